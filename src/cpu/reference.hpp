#pragma once

#include "core/variant.hpp"

namespace cuflash {

extern const VariantSpan kCpuReference;

Status merge_states_cpu(const MergeProblem& problem, const LaunchContext& context);

}  // namespace cuflash
