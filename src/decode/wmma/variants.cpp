// The table of the wmma decode family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "decode/wmma/variants.hpp"

#include "core/constant_text.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "decode/tile.hpp"
#include "decode/wmma/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_DECODE_WMMA_ROWS(ROW) \
  ROW(f16, kF16, 64, 23)              \
  ROW(f16, kF16, 128, 22)             \
  ROW(f16, kF16, 256, 21)             \
  ROW(bf16, kBf16, 64, 23)            \
  ROW(bf16, kBf16, 128, 22)           \
  ROW(bf16, kBf16, 256, 21)

namespace cuflash {
namespace decode_wmma {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank)                                              \
  Status launch_dec_wmma_##type##_d##head_dim(const Problem&, const Plan&, const LaunchContext&); \
  Status preload_dec_wmma_##type##_d##head_dim(int device);
CUFLASH_DECODE_WMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  constexpr bool kIsF16 = kDtype == Dtype::kF16;
  if (problem.dtype != kDtype) return {kIsF16 ? "takes f16 only" : "takes bf16 only"};
  if (problem.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  if (capabilities.arch < (kIsF16 ? 70 : 80))
    return {kIsF16 ? "needs sm_70 or newer" : "needs sm_80 or newer"};
  if (capabilities.shared_memory_per_block < kSharedBytes<kHeadDim>)
    return {kNeedsSharedBytes<kSharedBytes<kHeadDim>>.data};
  return decode::accept_tiles(problem, capabilities, kSplitShape);
}

Plan plan(const Problem& problem, const Capabilities& capabilities) {
  return plan_splits(problem, capabilities, kSplitShape);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                              \
  {"dec_wmma_" #type "_d" #head_dim,                                                  \
   "wmma",                                                                            \
   Operation::kDecode,                                                                \
   false,                                                                             \
   KernelConfig<head_dim>::kRows,                                                     \
   KernelConfig<head_dim>::kTileN * KernelConfig<head_dim>::kWarps,                   \
   KernelConfig<head_dim>::kThreads,                                                  \
   kSharedBytes<head_dim>,                                                            \
   rank,                                                                              \
   accepts<Dtype::dtype, head_dim>,                                                   \
   plan,                                                                              \
   CUFLASH_ENTRY_dec_wmma_##type##_d##head_dim(launch_dec_wmma_##type##_d##head_dim), \
   CUFLASH_ENTRY_dec_wmma_##type##_d##head_dim(preload_dec_wmma_##type##_d##head_dim)},
constexpr Variant kRows[] = {CUFLASH_DECODE_WMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace decode_wmma

extern const VariantSpan kDecodeWmma = {decode_wmma::kRows,
                                        sizeof decode_wmma::kRows / sizeof decode_wmma::kRows[0]};

}  // namespace cuflash
