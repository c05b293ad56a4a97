#include "core/split.hpp"

#include "common/integer.hpp"

namespace cuflash {
namespace {

constexpr int64_t kMinKeys = 256;  // of a part: fewer are not worth their merge
constexpr int64_t kBlocksPerSm = 2;
constexpr int64_t kInvariantKeys = 1024;
constexpr int64_t kMaxAutomatic = 128;

int64_t rows_of(const Problem& p) { return p.batch * p.heads_q * p.len_q; }

}  // namespace

int32_t choose_splits(const Problem& p, const Capabilities& capabilities) {
  if (p.num_splits > 0) return p.num_splits;
  if (capabilities.is_cpu || rows_of(p) == 0 || p.len_k < 2 * kMinKeys) return 1;
  const int64_t by_length = p.len_k / kMinKeys;
  if (p.batch_invariant)  // may depend on the cache's capacity, not on the batch
    return static_cast<int32_t>(clamp64(p.len_k / kInvariantKeys, 1, kMaxAutomatic));
  const int64_t parallel = p.batch * p.heads_kv;
  if (parallel >= capabilities.sm_count) return 1;
  const int64_t to_fill = ceil_div(kBlocksPerSm * capabilities.sm_count, parallel);
  return static_cast<int32_t>(clamp64(min64(by_length, to_fill), 1, kMaxAutomatic));
}

SplitWorkspace split_workspace(const Problem& p, int32_t num_splits) {
  if (num_splits <= 1) return {};
  const int64_t rows = rows_of(p);
  const int64_t o_bytes = round_up(num_splits * rows * p.head_dim * 4, 256);
  return {static_cast<size_t>(o_bytes), static_cast<size_t>(o_bytes + num_splits * rows * 4)};
}

MergeProblem split_merge(const Problem& p, int32_t num_splits, void* workspace) {
  MergeProblem merge;
  merge.num_parts = num_splits;
  merge.batch = p.batch, merge.heads = p.heads_q, merge.len = p.len_q, merge.head_dim = p.head_dim;
  const int64_t rows = rows_of(p);
  merge.parts = {workspace, p.heads_q * p.len_q * p.head_dim, p.len_q * p.head_dim, p.head_dim,
                 Dtype::kF32};
  merge.part_stride = rows * p.head_dim;
  char* lse = static_cast<char*>(workspace) + split_workspace(p, num_splits).lse_offset;
  merge.lse_parts = {reinterpret_cast<float*>(lse), p.heads_q * p.len_q, p.len_q, 1};
  merge.lse_part_stride = rows;
  merge.o = p.o;
  merge.lse = p.lse;
  return merge;
}

}  // namespace cuflash
