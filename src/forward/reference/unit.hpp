#pragma once

#include "core/variant.hpp"

namespace cuflash {

Status launch_fwd_reference(const Problem& problem, const Plan& plan, const LaunchContext& context);
Status preload_fwd_reference(int device);

}  // namespace cuflash
