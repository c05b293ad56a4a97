#pragma once

#include "core/variant.hpp"

namespace cuflash {

extern const VariantSpan kAppendReference;

}  // namespace cuflash
