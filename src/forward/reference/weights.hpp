#pragma once

#include "core/features.hpp"
#include "core/variant.hpp"

namespace cuflash {

// The softmax probabilities of chosen rows on CUDA: one warp per row.
Status attention_weights_cuda(const Problem& problem, const WeightsOutput& out,
                              const LaunchContext& context);
Status preload_weights();

}  // namespace cuflash
