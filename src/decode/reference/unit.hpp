#pragma once

#include "core/variant.hpp"

namespace cuflash {

Status launch_dec_reference(const Problem& problem, const Plan& plan, const LaunchContext& context);
Status preload_dec_reference(int device);

}  // namespace cuflash
