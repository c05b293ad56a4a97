// How decode cuts its keys into parts, and where partial results lie in the workspace. Host arithmetic.
#pragma once

#include <cstddef>

#include "common/capabilities.hpp"
#include "core/problem.hpp"

namespace cuflash {

constexpr int32_t kMaxSplits = 1024;

// What a family's blocks are like: each takes the rows of one KV head, up to tile_rows of them, and a part of
// the keys.
struct SplitShape {
  int tile_rows;
  int blocks_per_sm;  // that keep enough loads under way to use the whole bandwidth
};
constexpr SplitShape kRowOfAWarp = {1, 16};  // the reference's warps

// Enough parts of Problem::least_part() for `keys`, up to a bound beyond which parts become longer.
int32_t invariant_splits(int64_t keys);

// The number of parts for a decode problem: what the caller asked for, or the one for which the device streams
// the keys soonest. Depends on capacities known to the host, never on lengths on the device, so that a captured
// launch stays right; with batch_invariant on the capacity of a sequence alone.
int32_t choose_splits(const Problem& problem, const Capabilities& capabilities,
                      const SplitShape& shape = kRowOfAWarp);

// Partial O (fp32 [split, batch, head, row, channel]) and LSE ([split, batch, head, row]).
struct SplitWorkspace {
  size_t lse_offset = 0, bytes = 0;  // O lies at 0
};
SplitWorkspace split_workspace(const Problem& problem, int32_t num_splits);

// The merge of those partial results into the problem's o and lse.
MergeProblem split_merge(const Problem& problem, int32_t num_splits, void* workspace);

}  // namespace cuflash
