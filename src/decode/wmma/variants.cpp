// The table of the wmma decode family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "decode/wmma/variants.hpp"

#include "core/kernel_rows.hpp"
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

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(dec_wmma_##type##_d##head_dim);
CUFLASH_DECODE_WMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& problem, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim, decode::kTakenFeatures>(problem)));
  CUFLASH_REFUSE(refuse_without_wmma<kDtype>(capabilities));
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  return decode::accept_tiles(problem, capabilities, kSplitShape);
}

Plan plan(const Problem& problem, const Capabilities& capabilities) {
  return plan_splits(problem, capabilities, kSplitShape);
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                             \
  CUFLASH_KERNEL_ROW(dec_wmma_##type##_d##head_dim, "wmma", Operation::kDecode,      \
                     KernelConfig<head_dim>::kRows,                                  \
                     KernelConfig<head_dim>::kTileN* KernelConfig<head_dim>::kWarps, \
                     KernelConfig<head_dim>::kThreads, kSharedBytes<head_dim>, rank, \
                     (accepts<Dtype::dtype, head_dim>), plan),
constexpr Variant kRows[] = {CUFLASH_DECODE_WMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace decode_wmma

extern const VariantSpan kDecodeWmma = span_of(decode_wmma::kRows);

}  // namespace cuflash
