#pragma once

#include "core/variant.hpp"

namespace cuflash {

Status launch_bwd_reference(const Problem& problem, const Plan& plan, const LaunchContext& context);
Status preload_bwd_reference(int device);

}  // namespace cuflash
