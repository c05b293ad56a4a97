#pragma once

#include "core/variant.hpp"

namespace cuflash {

Status launch_append_reference(const Problem& problem, const Plan& plan,
                               const LaunchContext& context);
Status preload_append_reference(int device);

}  // namespace cuflash
