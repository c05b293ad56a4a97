// The table of the wmma backward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "backward/wmma/variants.hpp"

#include "backward/wmma/config.hpp"
#include "common/integer.hpp"
#include "core/constant_text.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_BACKWARD_WMMA_ROWS(ROW) \
  ROW(f16, kF16, 32, 26)                \
  ROW(f16, kF16, 64, 25)                \
  ROW(f16, kF16, 96, 24)                \
  ROW(f16, kF16, 128, 23)               \
  ROW(f16, kF16, 192, 22)               \
  ROW(f16, kF16, 256, 21)               \
  ROW(bf16, kBf16, 32, 26)              \
  ROW(bf16, kBf16, 64, 25)              \
  ROW(bf16, kBf16, 96, 24)              \
  ROW(bf16, kBf16, 128, 23)             \
  ROW(bf16, kBf16, 192, 22)             \
  ROW(bf16, kBf16, 256, 21)

namespace cuflash {
namespace backward_wmma {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank)                                              \
  Status launch_bwd_wmma_##type##_d##head_dim(const Problem&, const Plan&, const LaunchContext&); \
  Status preload_bwd_wmma_##type##_d##head_dim(int device);
CUFLASH_BACKWARD_WMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of grid.x

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  constexpr bool kIsF16 = kDtype == Dtype::kF16;
  if (problem.dtype != kDtype) return {kIsF16 ? "takes f16 only" : "takes bf16 only"};
  if (problem.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  if (capabilities.arch < (kIsF16 ? 70 : 80))
    return {kIsF16 ? "needs sm_70 or newer" : "needs sm_80 or newer"};
  if (capabilities.shared_memory_per_block < kSharedBytes<kHeadDim>)
    return {kNeedsSharedBytes<kSharedBytes<kHeadDim>>.data};
  const int64_t m_tiles = ceil_div(problem.len_q, kTileRows);
  const int64_t n_tiles = ceil_div(problem.len_k, kTileRows);
  if ((m_tiles > 0 && problem.batch * problem.heads_q > kMaxBlocks / m_tiles) ||
      (n_tiles > 0 && problem.batch * problem.heads_kv > kMaxBlocks / n_tiles))
    return {"more than 2^31 - 1 tiles of rows"};
  return {};
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                              \
  {"bwd_wmma_" #type "_d" #head_dim,                                                  \
   "wmma",                                                                            \
   Operation::kBackward,                                                              \
   false,                                                                             \
   kTileRows,                                                                         \
   tile_of(head_dim).keys,                                                            \
   kThreads,                                                                          \
   kSharedBytes<head_dim>,                                                            \
   rank,                                                                              \
   accepts<Dtype::dtype, head_dim>,                                                   \
   plan_delta,                                                                        \
   CUFLASH_ENTRY_bwd_wmma_##type##_d##head_dim(launch_bwd_wmma_##type##_d##head_dim), \
   CUFLASH_ENTRY_bwd_wmma_##type##_d##head_dim(preload_bwd_wmma_##type##_d##head_dim)},
constexpr Variant kRows[] = {CUFLASH_BACKWARD_WMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace backward_wmma

extern const VariantSpan kBackwardWmma = {
    backward_wmma::kRows, sizeof backward_wmma::kRows / sizeof backward_wmma::kRows[0]};

}  // namespace cuflash
