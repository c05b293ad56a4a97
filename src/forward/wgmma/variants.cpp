// The table of the wgmma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/wgmma/variants.hpp"

#include "common/integer.hpp"
#include "core/kernel_rows.hpp"
#include "cuflash_built.hpp"
#include "device/wgmma_tile.hpp"
#include "forward/wgmma/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_WGMMA_ROWS(ROW) \
  ROW(f16, kF16, 64, 48)                \
  ROW(f16, kF16, 96, 47)                \
  ROW(f16, kF16, 128, 46)               \
  ROW(f16, kF16, 192, 45)               \
  ROW(f16, kF16, 256, 44)               \
  ROW(bf16, kBf16, 64, 48)              \
  ROW(bf16, kBf16, 96, 47)              \
  ROW(bf16, kBf16, 128, 46)             \
  ROW(bf16, kBf16, 192, 45)             \
  ROW(bf16, kBf16, 256, 44)

namespace cuflash {
namespace forward_wgmma {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank) \
  CUFLASH_DECLARE_KERNEL(fwd_wgmma_##type##_d##head_dim);
CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& p, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, kHeadDim>(p)));
  if (capabilities.arch != 90) return {"needs sm_90"};
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytes<kHeadDim>>(capabilities));
  if (p.head_dim % 8 != 0) return {"head_dim is not a multiple of 8"};
  if (!p.aligned16) return {"a pointer or stride of q, k, v or o is not a multiple of 16 bytes"};
  if (p.len_q == 0 || p.len_k == 0) return {"there are no queries or no keys"};
  if (!device::fits_tensor_map(p.q, p.batch, p.heads_q, p.len_q) ||
      !device::fits_tensor_map(p.o, p.batch, p.heads_q, p.len_q) ||
      !device::fits_tensor_map(p.k, p.batch, p.heads_kv, p.len_k) ||
      !device::fits_tensor_map(p.v, p.batch, p.heads_kv, p.len_k))
    return {"an extent near 2^31 or a stride of 2^40 bytes"};
  return refuse_more_tiles(p.batch * p.heads_q, p.len_q, KernelConfig<kHeadDim>::kTileM);
}

// A block on each SM that the call may use.
template <int kHeadDim>
Plan plan(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  const int64_t tiles = p.batch * p.heads_q * ceil_div(p.len_q, KernelConfig<kHeadDim>::kTileM);
  plan.blocks = min64(tiles, capabilities.sm_count);
  return plan;
}

// Up to 64 queries and keys the wmma kernels take 0.5 to 0.95 of the time (docs/log/0013), and less on the host: no
// tensor maps.
int rank_for(const Problem& p, int rank) {
  constexpr int64_t kFew = 64;
  constexpr int kBelowWmma = 20;
  return p.len_q <= kFew && p.len_k <= kFew ? kBelowWmma : rank;
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                                           \
  with_rank_for(CUFLASH_KERNEL_ROW(fwd_wgmma_##type##_d##head_dim, "wgmma", Operation::kForward,   \
                                   KernelConfig<head_dim>::kTileM, KernelConfig<head_dim>::kTileN, \
                                   KernelConfig<head_dim>::kThreads, kSharedBytes<head_dim>, rank, \
                                   (accepts<Dtype::dtype, head_dim>), plan<head_dim>),             \
                [](const Problem& p) { return rank_for(p, rank); }),
constexpr Variant kRows[] = {CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_wgmma

extern const VariantSpan kForwardWgmma = span_of(forward_wgmma::kRows);

}  // namespace cuflash
