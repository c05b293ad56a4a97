#pragma once

#include "core/variant.hpp"

namespace cuflash {

extern const VariantSpan kForwardMma;

}  // namespace cuflash
