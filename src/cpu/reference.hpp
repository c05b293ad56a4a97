#pragma once

#include "core/features.hpp"
#include "core/variant.hpp"

namespace cuflash {

extern const VariantSpan kCpuReference;

Status merge_states_cpu(const MergeProblem& problem, const LaunchContext& context);
Status attention_weights_cpu(const Problem& problem, const WeightsOutput& out,
                             const LaunchContext& context);

}  // namespace cuflash
