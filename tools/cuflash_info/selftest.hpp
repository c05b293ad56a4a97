// Tiny random problems on a device, compared with double precision.
#pragma once

#include "question.hpp"

namespace cuflash_info {

// One object for each operation, dtype and head dim: what cuflash-info(1) calls a result.
Json self_test(const Target& target);

}  // namespace cuflash_info
