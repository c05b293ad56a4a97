// The table of the wmma backward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "backward/wmma/variants.hpp"

#include "backward/wmma/config.hpp"
#include "core/kernel_rows.hpp"
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

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(bwd_wmma_##type##_d##head_dim);
CUFLASH_BACKWARD_WMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

// Not the gradients of the bias and of the sinks. Gradients are written in the inputs' type and once.
constexpr uint32_t kTaken = kRaggedBatches | kSoftcap | kAlibi | kBias | kSinks | kDropout |
                            kOwnValueDim | kDelta | kLseGradient;

// dV takes weights times 1 / (1 - p) in 16 bits, and f16 ends at 65504. (The forward scales O instead.)
template <Dtype kDtype>
Refusal refuse_much_dropout(const Problem& problem) {
  constexpr float kMaxFactor = 65504;
  if (kDtype != Dtype::kF16 || problem.features == nullptr) return {};
  const float p = problem.features->dropout.p;
  return {p < 1 && 1 / (1 - p) > kMaxFactor ? "1 / (1 - dropout_p) is above what f16 holds"
                                            : nullptr};
}

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, kTaken>(problem)));
  CUFLASH_REFUSE(refuse_modifier_gradients(problem));
  CUFLASH_REFUSE(refuse_much_dropout<kDtype>(problem));
  CUFLASH_REFUSE(refuse_without_wmma<kDtype>(capabilities));
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  CUFLASH_REFUSE(refuse_more_tiles(problem.batch * problem.heads_q, problem.len_q, kTileRows));
  return refuse_more_tiles(problem.batch * problem.heads_kv, problem.len_k, kTileRows);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                                     \
  CUFLASH_KERNEL_ROW(bwd_wmma_##type##_d##head_dim, "wmma", Operation::kBackward, kTileRows, \
                     tile_of(head_dim).keys, kThreads, kSharedBytes<head_dim>, rank,         \
                     (accepts<Dtype::dtype, head_dim>), plan_delta),
constexpr Variant kRows[] = {CUFLASH_BACKWARD_WMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace backward_wmma

extern const VariantSpan kBackwardWmma = span_of(backward_wmma::kRows);

}  // namespace cuflash
