#include "core/split.hpp"

#include "common/integer.hpp"
#include "core/features.hpp"

namespace cuflash {
namespace {

constexpr int64_t kMaxAutomatic = 256;

// Costs in units of the time in which an SM, at its share of the bandwidth, streams the keys and values of one
// token (512 bytes in bf16 at head_dim 128, 15 ns on an H200).
constexpr int64_t kMinKeys = 64;     // of a part
constexpr int64_t kBlockCost = 32;   // to start and end a block
constexpr int64_t kMergeCost = 192;  // to launch the merge
constexpr int64_t kPartCost = 1;     // to merge a part

// Beyond this many blocks on each SM the last ones cost too little to look further.
constexpr int64_t kMaxRounds = 16;

int64_t rows_of(const Problem& p) { return query_extents(p).count(); }

// An upper bound of the keys that a tile of rows sees.
int64_t visible_length(const Problem& p, const SplitShape& shape) {
  return min64(p.len_k, p.mask.left + p.mask.right + shape.tile_rows);
}

}  // namespace

int32_t invariant_splits(int64_t keys) {
  return static_cast<int32_t>(clamp64(ceil_div(keys, Problem::kInvariantPart), 1, kMaxAutomatic));
}

int32_t choose_splits(const Problem& p, const Capabilities& capabilities, const SplitShape& shape) {
  if (p.num_splits > 0) return p.num_splits;
  if (capabilities.is_cpu) return 1;
  if (p.batch == 0 || p.heads_q == 0 || p.len_q == 0) return 1;  // packed rows may be there yet
  const int64_t keys = visible_length(p, shape);
  if (p.batch_invariant) return invariant_splits(keys);
  const int64_t most = clamp64(keys / kMinKeys, 1, kMaxAutomatic);
  const int64_t tiles =
      p.batch * p.heads_kv * ceil_div(p.heads_q / p.heads_kv * p.len_q, shape.tile_rows);
  // An SM's time is that of its blocks, one after the other; fewer than blocks_per_sm at once do not run faster.
  const auto cost = [&](int64_t splits) {
    const int64_t rounds = ceil_div(tiles * splits, capabilities.sm_count);
    const int64_t merge = splits > 1 ? kMergeCost + splits * kPartCost : 0;
    return max64(rounds, shape.blocks_per_sm) * (ceil_div(keys, splits) + kBlockCost) + merge;
  };
  int64_t best = 1, best_cost = cost(1);
  // For each number of blocks on an SM the most parts that give no more.
  for (int64_t rounds = 1; rounds <= kMaxRounds; ++rounds) {
    const int64_t splits = clamp64(rounds * capabilities.sm_count / tiles, 1, most);
    if (splits == best) continue;
    const int64_t splits_cost = cost(splits);
    if (splits_cost < best_cost) best = splits, best_cost = splits_cost;
    if (splits == most) break;
  }
  return static_cast<int32_t>(best);
}

SplitWorkspace split_workspace(const Problem& p, int32_t num_splits) {
  if (num_splits <= 1) return {};
  const int64_t rows = rows_of(p);
  const int64_t o_bytes = round_up(num_splits * rows * p.head_dim_v * 4, 256);
  return {static_cast<size_t>(o_bytes), static_cast<size_t>(o_bytes + num_splits * rows * 4)};
}

MergeProblem split_merge(const Problem& p, int32_t num_splits, void* workspace) {
  MergeProblem merge;
  merge.num_parts = num_splits;
  const RowExtents e = query_extents(p);
  merge.batch = e.batch, merge.heads = e.heads, merge.len = e.rows, merge.head_dim = p.head_dim_v;
  const int64_t dim = p.head_dim_v;
  merge.parts = {workspace, e.heads * e.rows * dim, e.rows * dim, dim, Dtype::kF32};
  merge.part_stride = e.count() * dim;
  char* lse = static_cast<char*>(workspace) + split_workspace(p, num_splits).lse_offset;
  merge.lse_parts = {reinterpret_cast<float*>(lse), e.heads * e.rows, e.rows, 1};
  merge.lse_part_stride = e.count();
  merge.o = p.o;
  merge.lse = p.lse;
  return merge;
}

}  // namespace cuflash
