// The table of the scalar decode family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "decode/scalar/variants.hpp"

#include "core/constant_text.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "decode/scalar/config.hpp"
#include "decode/tile.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_DECODE_SCALAR_ROWS(ROW) \
  ROW(f32, kF32, 64, 13)                \
  ROW(f32, kF32, 128, 12)               \
  ROW(f32, kF32, 256, 11)               \
  ROW(f16, kF16, 64, 13)                \
  ROW(f16, kF16, 128, 12)               \
  ROW(f16, kF16, 256, 11)               \
  ROW(bf16, kBf16, 64, 13)              \
  ROW(bf16, kBf16, 128, 12)             \
  ROW(bf16, kBf16, 256, 11)

namespace cuflash {
namespace decode_scalar {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank)                         \
  Status launch_dec_scalar_##type##_d##head_dim(const Problem&, const Plan&, \
                                                const LaunchContext&);       \
  Status preload_dec_scalar_##type##_d##head_dim(int device);
CUFLASH_DECODE_SCALAR_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr const char* takes_only(Dtype dtype) {
  return dtype == Dtype::kF32   ? "takes f32 only"
         : dtype == Dtype::kF16 ? "takes f16 only"
                                : "takes bf16 only";
}

template <Dtype kDtype, int kHeadDim>
using Config = KernelConfig<static_cast<int>(dtype_bytes(kDtype)), kHeadDim>;

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  if (problem.dtype != kDtype) return {takes_only(kDtype)};
  if (problem.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  return decode::accept_tiles(problem, capabilities, kSplitShape<Config<kDtype, kHeadDim>>);
}

template <Dtype kDtype, int kHeadDim>
Plan plan(const Problem& problem, const Capabilities& capabilities) {
  return plan_splits(problem, capabilities, kSplitShape<Config<kDtype, kHeadDim>>);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                                  \
  {"dec_scalar_" #type "_d" #head_dim,                                                    \
   "scalar",                                                                              \
   Operation::kDecode,                                                                    \
   false,                                                                                 \
   Config<Dtype::dtype, head_dim>::kMaxRows,                                              \
   Config<Dtype::dtype, head_dim>::kStepKeys,                                             \
   kThreads,                                                                              \
   kSharedBytes<Config<Dtype::dtype, head_dim>>,                                          \
   rank,                                                                                  \
   accepts<Dtype::dtype, head_dim>,                                                       \
   plan<Dtype::dtype, head_dim>,                                                          \
   CUFLASH_ENTRY_dec_scalar_##type##_d##head_dim(launch_dec_scalar_##type##_d##head_dim), \
   CUFLASH_ENTRY_dec_scalar_##type##_d##head_dim(preload_dec_scalar_##type##_d##head_dim)},
constexpr Variant kRows[] = {CUFLASH_DECODE_SCALAR_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace decode_scalar

extern const VariantSpan kDecodeScalar = {
    decode_scalar::kRows, sizeof decode_scalar::kRows / sizeof decode_scalar::kRows[0]};

}  // namespace cuflash
