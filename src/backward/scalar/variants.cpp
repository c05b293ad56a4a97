// The table of the scalar backward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "backward/scalar/variants.hpp"

#include "common/integer.hpp"
#include "core/constant_text.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "backward/scalar/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins. The 16-bit types, which have
// tensor cores nearly everywhere, do with fewer buckets.
#define CUFLASH_BACKWARD_SCALAR_ROWS(ROW) \
  ROW(f32, kF32, 32, 14)                  \
  ROW(f32, kF32, 64, 13)                  \
  ROW(f32, kF32, 128, 12)                 \
  ROW(f32, kF32, 256, 11)                 \
  ROW(f16, kF16, 64, 13)                  \
  ROW(f16, kF16, 128, 12)                 \
  ROW(f16, kF16, 256, 11)                 \
  ROW(bf16, kBf16, 64, 13)                \
  ROW(bf16, kBf16, 128, 12)               \
  ROW(bf16, kBf16, 256, 11)

namespace cuflash {
namespace backward_scalar {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank)                         \
  Status launch_bwd_scalar_##type##_d##head_dim(const Problem&, const Plan&, \
                                                const LaunchContext&);       \
  Status preload_bwd_scalar_##type##_d##head_dim(int device);
CUFLASH_BACKWARD_SCALAR_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of grid.x

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  if (problem.dtype != kDtype)
    return {kDtype == Dtype::kF32   ? "takes f32 only"
            : kDtype == Dtype::kF16 ? "takes f16 only"
                                    : "takes bf16 only"};
  if (problem.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  if (capabilities.shared_memory_per_block < kSharedBytes<kHeadDim>)
    return {kNeedsSharedBytes<kSharedBytes<kHeadDim>>.data};
  const int64_t query_tiles = ceil_div(problem.len_q, QueryConfig<kHeadDim>::kTileM);
  const int64_t key_tiles = ceil_div(problem.len_k, KeyConfig<kHeadDim>::kTileM);
  if ((query_tiles > 0 && problem.batch * problem.heads_q > kMaxBlocks / query_tiles) ||
      (key_tiles > 0 && problem.batch * problem.heads_kv > kMaxBlocks / key_tiles))
    return {"more than 2^31 - 1 tiles of rows"};
  return {};
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                                  \
  {"bwd_scalar_" #type "_d" #head_dim,                                                    \
   "scalar",                                                                              \
   Operation::kBackward,                                                                  \
   false,                                                                                 \
   QueryConfig<head_dim>::kTileM,                                                         \
   QueryConfig<head_dim>::kTileN,                                                         \
   QueryConfig<head_dim>::kThreads,                                                       \
   kSharedBytes<head_dim>,                                                                \
   rank,                                                                                  \
   accepts<Dtype::dtype, head_dim>,                                                       \
   plan_delta,                                                                            \
   CUFLASH_ENTRY_bwd_scalar_##type##_d##head_dim(launch_bwd_scalar_##type##_d##head_dim), \
   CUFLASH_ENTRY_bwd_scalar_##type##_d##head_dim(preload_bwd_scalar_##type##_d##head_dim)},
constexpr Variant kRows[] = {CUFLASH_BACKWARD_SCALAR_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace backward_scalar

extern const VariantSpan kBackwardScalar = {
    backward_scalar::kRows, sizeof backward_scalar::kRows / sizeof backward_scalar::kRows[0]};

}  // namespace cuflash
