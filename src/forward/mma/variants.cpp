// The table of the mma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/mma/variants.hpp"

#include "core/kernel_rows.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "forward/mma/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_MMA_ROWS(ROW) \
  ROW(f16, kF16, 32, 36)              \
  ROW(f16, kF16, 64, 35)              \
  ROW(f16, kF16, 96, 34)              \
  ROW(f16, kF16, 128, 33)             \
  ROW(f16, kF16, 192, 32)             \
  ROW(f16, kF16, 256, 31)             \
  ROW(bf16, kBf16, 32, 36)            \
  ROW(bf16, kBf16, 64, 35)            \
  ROW(bf16, kBf16, 96, 34)            \
  ROW(bf16, kBf16, 128, 33)           \
  ROW(bf16, kBf16, 192, 32)           \
  ROW(bf16, kBf16, 256, 31)

namespace cuflash {
namespace forward_mma {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(fwd_mma_##type##_d##head_dim);
CUFLASH_FORWARD_MMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

// No tree masks: keys between others that a tree hides may hold NaN, which would reach the product with V.
constexpr uint32_t kTaken =
    kRaggedBatches | kSoftcap | kAlibi | kBias | kSinks | kDropout | kOwnValueDim;

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, kTaken>(problem)));
  if (capabilities.arch < 80) return {"needs sm_80 or newer"};
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  return refuse_more_tiles(problem.batch * problem.heads_q, problem.len_q,
                           KernelConfig<kHeadDim>::kTileM);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                             \
  CUFLASH_KERNEL_ROW(fwd_mma_##type##_d##head_dim, "mma", Operation::kForward,       \
                     KernelConfig<head_dim>::kTileM, KernelConfig<head_dim>::kTileN, \
                     KernelConfig<head_dim>::kThreads, kSharedBytes<head_dim>, rank, \
                     (accepts<Dtype::dtype, head_dim>), plan_nothing),
constexpr Variant kRows[] = {CUFLASH_FORWARD_MMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_mma

extern const VariantSpan kForwardMma = span_of(forward_mma::kRows);

}  // namespace cuflash
