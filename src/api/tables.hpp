// All kernels of the library. Tables are linked explicitly: self-registering objects would be dropped by a
// static link without a word.
#pragma once

#include "core/selection.hpp"

namespace cuflash {

VariantTables all_variants();

}  // namespace cuflash
