// The table of the scalar decode family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "decode/scalar/variants.hpp"

#include "core/kernel_rows.hpp"
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

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(dec_scalar_##type##_d##head_dim);
CUFLASH_DECODE_SCALAR_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

template <Dtype kDtype, int kHeadDim>
using Config = KernelConfig<static_cast<int>(dtype_bytes(kDtype)), kHeadDim>;

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, decode::kTakenFeatures>(problem)));
  return decode::accept_tiles(problem, capabilities, kSplitShape<Config<kDtype, kHeadDim>>);
}

template <Dtype kDtype, int kHeadDim>
Plan plan(const Problem& problem, const Capabilities& capabilities) {
  return plan_splits(problem, capabilities, kSplitShape<Config<kDtype, kHeadDim>>);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                            \
  CUFLASH_KERNEL_ROW(dec_scalar_##type##_d##head_dim, "scalar", Operation::kDecode, \
                     (Config<Dtype::dtype, head_dim>::kMaxRows),                    \
                     (Config<Dtype::dtype, head_dim>::kStepKeys), kThreads,         \
                     (kSharedBytes<Config<Dtype::dtype, head_dim>>), rank,          \
                     (accepts<Dtype::dtype, head_dim>), (plan<Dtype::dtype, head_dim>)),
constexpr Variant kRows[] = {CUFLASH_DECODE_SCALAR_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace decode_scalar

extern const VariantSpan kDecodeScalar = span_of(decode_scalar::kRows);

}  // namespace cuflash
