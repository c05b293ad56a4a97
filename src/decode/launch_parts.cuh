// Launching the tiled decode kernels.
#pragma once

#include "attention/tile_rows.hpp"
#include "decode/combine.hpp"
#include "decode/tile.hpp"
#include "device/launch.cuh"

namespace cuflash::decode {

template <class Call>
using Kernel = void (*)(Call, MergeProblem);

// The kernel, which takes a problem with its features or one that has none, over all blocks of the problem, and the merge
// of its parts. shape.blocks is filled in here.
template <class Call>
Status launch_parts(Kernel<Call> kernel, const char* name, int tile_rows, device::LaunchShape shape,
                    const Problem& problem, const Plan& plan, const LaunchContext& context) {
  if (problem.batch * problem.heads_q == 0 || problem.len_q == 0) return CUFLASH_SUCCESS;
  const MergeProblem parts = split_merge(problem, plan.num_splits, context.workspace);
  shape.blocks = blocks_of(problem, tile_rows, plan.num_splits);
  if constexpr (kHasFeatures<Call>)
    CUFLASH_TRY(device::launch(kernel, name, shape, context.stream, FullProblem(problem), parts));
  else
    CUFLASH_TRY(device::launch(kernel, name, shape, context.stream, problem, parts));
  return plan.num_splits > 1 ? combine_parts(parts, context) : CUFLASH_SUCCESS;
}

}  // namespace cuflash::decode
