// The table of the scalar forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/scalar/variants.hpp"

#include "core/kernel_rows.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "forward/scalar/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins. The 16-bit types, which have
// tensor cores nearly everywhere, do with fewer buckets.
#define CUFLASH_FORWARD_SCALAR_ROWS(ROW) \
  ROW(f32, kF32, 32, 14)                 \
  ROW(f32, kF32, 64, 13)                 \
  ROW(f32, kF32, 128, 12)                \
  ROW(f32, kF32, 256, 11)                \
  ROW(f16, kF16, 64, 13)                 \
  ROW(f16, kF16, 128, 12)                \
  ROW(f16, kF16, 256, 11)                \
  ROW(bf16, kBf16, 64, 13)               \
  ROW(bf16, kBf16, 128, 12)              \
  ROW(bf16, kBf16, 256, 11)

namespace cuflash {
namespace forward_scalar {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(fwd_scalar_##type##_d##head_dim);
CUFLASH_FORWARD_SCALAR_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

// No tree masks: keys between others that a tree hides may hold NaN, which would reach the product with V.
constexpr uint32_t kTaken =
    kRaggedBatches | kSoftcap | kAlibi | kBias | kSinks | kDropout | kOwnValueDim;

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, kTaken>(problem)));
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  return refuse_more_tiles(problem.batch * problem.heads_q, problem.len_q,
                           KernelConfig<kHeadDim>::kTileM);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                             \
  CUFLASH_KERNEL_ROW(fwd_scalar_##type##_d##head_dim, "scalar", Operation::kForward, \
                     KernelConfig<head_dim>::kTileM, KernelConfig<head_dim>::kTileN, \
                     KernelConfig<head_dim>::kThreads, kSharedBytes<head_dim>, rank, \
                     (accepts<Dtype::dtype, head_dim>), plan_nothing),
constexpr Variant kRows[] = {CUFLASH_FORWARD_SCALAR_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_scalar

extern const VariantSpan kForwardScalar = span_of(forward_scalar::kRows);

}  // namespace cuflash
