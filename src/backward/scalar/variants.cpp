// The table of the scalar backward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "backward/scalar/variants.hpp"

#include "core/kernel_rows.hpp"
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

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(bwd_scalar_##type##_d##head_dim);
CUFLASH_BACKWARD_SCALAR_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

// All but the gradients of the bias and of the sinks.
constexpr uint32_t kTaken = kRaggedBatches | kSoftcap | kAlibi | kBias | kSinks | kDropout |
                            kOwnValueDim | kWideOutputs | kAccumulation | kDelta | kLseGradient;

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, kTaken>(problem)));
  CUFLASH_REFUSE(refuse_modifier_gradients(problem));
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  CUFLASH_REFUSE(refuse_more_tiles(problem.batch * problem.heads_q, problem.len_q,
                                   QueryConfig<kHeadDim>::kTileM));
  return refuse_more_tiles(problem.batch * problem.heads_kv, problem.len_k,
                           KeyConfig<kHeadDim>::kTileM);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                              \
  CUFLASH_KERNEL_ROW(bwd_scalar_##type##_d##head_dim, "scalar", Operation::kBackward, \
                     QueryConfig<head_dim>::kTileM, QueryConfig<head_dim>::kTileN,    \
                     QueryConfig<head_dim>::kThreads, kSharedBytes<head_dim>, rank,   \
                     (accepts<Dtype::dtype, head_dim>), plan_delta),
constexpr Variant kRows[] = {CUFLASH_BACKWARD_SCALAR_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace backward_scalar

extern const VariantSpan kBackwardScalar = span_of(backward_scalar::kRows);

}  // namespace cuflash
