// The table of the mma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/mma/variants.hpp"

#include "core/kernel_rows.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "forward/mma/config.hpp"

// name, its Dtype, bucket of head dims, size of tiles, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_MMA_ROWS(ROW)                  \
  ROW(fwd_mma_f16_d32, kF16, 32, kStandard, 43)        \
  ROW(fwd_mma_f16_d64, kF16, 64, kStandard, 42)        \
  ROW(fwd_mma_long_f16_d64, kF16, 64, kLong, 41)       \
  ROW(fwd_mma_few_f16_d64, kF16, 64, kFew, 40)         \
  ROW(fwd_mma_f16_d96, kF16, 96, kStandard, 36)        \
  ROW(fwd_mma_f16_d128, kF16, 128, kStandard, 35)      \
  ROW(fwd_mma_few_f16_d128, kF16, 128, kFew, 34)       \
  ROW(fwd_mma_f16_d192, kF16, 192, kStandard, 32)      \
  ROW(fwd_mma_pairs_f16_d256, kF16, 256, kPairs, 31)   \
  ROW(fwd_mma_f16_d256, kF16, 256, kStandard, 30)      \
  ROW(fwd_mma_bf16_d32, kBf16, 32, kStandard, 43)      \
  ROW(fwd_mma_bf16_d64, kBf16, 64, kStandard, 42)      \
  ROW(fwd_mma_long_bf16_d64, kBf16, 64, kLong, 41)     \
  ROW(fwd_mma_few_bf16_d64, kBf16, 64, kFew, 40)       \
  ROW(fwd_mma_bf16_d96, kBf16, 96, kStandard, 36)      \
  ROW(fwd_mma_bf16_d128, kBf16, 128, kStandard, 35)    \
  ROW(fwd_mma_few_bf16_d128, kBf16, 128, kFew, 34)     \
  ROW(fwd_mma_bf16_d192, kBf16, 192, kStandard, 32)    \
  ROW(fwd_mma_pairs_bf16_d256, kBf16, 256, kPairs, 31) \
  ROW(fwd_mma_bf16_d256, kBf16, 256, kStandard, 30)

namespace cuflash {
namespace forward_mma {

#define CUFLASH_DECLARE(name, dtype, head_dim, size, rank) CUFLASH_DECLARE_KERNEL(name);
CUFLASH_FORWARD_MMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

// No tree masks: keys between others that a tree hides may hold NaN, which would reach the product with V.
constexpr uint32_t kTaken =
    kRaggedBatches | kSoftcap | kAlibi | kBias | kSinks | kDropout | kOwnValueDim;

template <Dtype kDtype, class Config>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, Config::kHeadDim, kTaken>(problem)));
  if (capabilities.arch < 80) return {"needs sm_80 or newer"};
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<Config>>(capabilities));
  return refuse_more_tiles(problem.batch * problem.heads_q, problem.len_q, Config::kTileM);
}

// The size that suits a problem best, where there is one of the bucket.
TileSize suited(const Problem& p, int head_dim) {
  constexpr int64_t kLargeRows = 128, kFewBlocks = 128;  // an H200 has 132 SMs, an A100 108
  constexpr int64_t kManyKeys = 2048;
  const int64_t blocks = p.batch * p.heads_q * ceil_div(p.len_q, kLargeRows);
  if (head_dim == 256) {
    // Measured: 2 to 7 % slower at 512 keys and, under a causal mask, at 1024; 4 to 12 % faster from there on.
    const int64_t many = p.mask.is_full() ? 1024 : 2048;
    return blocks > kFewBlocks && p.len_k >= many ? kPairs : kStandard;
  }
  if ((head_dim == 64 || head_dim == 128) && blocks <= kFewBlocks) return kFew;
  if (head_dim == 64 && p.len_k >= kManyKeys) return kLong;
  return kStandard;
}

// The suited size keeps its rank, the others fall below all sizes of their bucket.
int rank_for(const Problem& p, int head_dim, TileSize size, int rank) {
  const int sizes = head_dim == 64 ? 3 : head_dim == 128 || head_dim == 256 ? 2 : 0;
  return size == suited(p, head_dim) ? rank : rank - sizes;
}

#define CUFLASH_VARIANT_ROW(name, dtype, head_dim, size, rank)                                     \
  with_rank_for(                                                                                   \
      CUFLASH_KERNEL_ROW(name, "mma", Operation::kForward, (KernelConfig<head_dim, size>::kTileM), \
                         (KernelConfig<head_dim, size>::kTileN),                                   \
                         (KernelConfig<head_dim, size>::kThreads),                                 \
                         (kSharedBytes<KernelConfig<head_dim, size>>), rank,                       \
                         (accepts<Dtype::dtype, KernelConfig<head_dim, size>>), plan_nothing),     \
      [](const Problem& p) { return rank_for(p, head_dim, size, rank); }),
constexpr Variant kRows[] = {CUFLASH_FORWARD_MMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_mma

extern const VariantSpan kForwardMma = span_of(forward_mma::kRows);

}  // namespace cuflash
