#pragma once

#include "core/variant.hpp"

namespace cuflash {

// The n-way merge of partial results on CUDA: one warp per row.
Status merge_states_cuda(const MergeProblem& problem, const LaunchContext& context);
Status preload_merge(int device);

}  // namespace cuflash
