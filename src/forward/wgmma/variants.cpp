// The table of the wgmma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/wgmma/variants.hpp"

#include "common/integer.hpp"
#include "core/constant_text.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "device/wgmma_tile.hpp"
#include "forward/wgmma/config.hpp"

// type, its Dtype, bucket of head dims, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_WGMMA_ROWS(ROW) \
  ROW(f16, kF16, 64, 46)                \
  ROW(f16, kF16, 128, 44)               \
  ROW(bf16, kBf16, 64, 46)              \
  ROW(bf16, kBf16, 128, 44)

namespace cuflash {
namespace forward_wgmma {

#define CUFLASH_DECLARE(type, dtype, head_dim, rank)                                               \
  Status launch_fwd_wgmma_##type##_d##head_dim(const Problem&, const Plan&, const LaunchContext&); \
  Status preload_fwd_wgmma_##type##_d##head_dim(int device);
CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of grid.x

template <Dtype kDtype, int kHeadDim>
Refusal accepts(const Variant&, const Problem& p, const Capabilities& capabilities) {
  if (p.dtype != kDtype) return {kDtype == Dtype::kF16 ? "takes f16 only" : "takes bf16 only"};
  if (p.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  if (capabilities.arch != 90) return {"needs sm_90"};
  if (capabilities.shared_memory_per_block < kSharedBytes<kHeadDim>)
    return {kNeedsSharedBytes<kSharedBytes<kHeadDim>>.data};
  if (p.head_dim % 8 != 0) return {"head_dim is not a multiple of 8"};
  if (!p.aligned16) return {"a pointer or stride of q, k, v or o is not a multiple of 16 bytes"};
  if (p.len_q == 0 || p.len_k == 0) return {"there are no queries or no keys"};
  if (!device::fits_tensor_map(p.q, p.batch, p.heads_q, p.len_q) ||
      !device::fits_tensor_map(p.o, p.batch, p.heads_q, p.len_q) ||
      !device::fits_tensor_map(p.k, p.batch, p.heads_kv, p.len_k) ||
      !device::fits_tensor_map(p.v, p.batch, p.heads_kv, p.len_k))
    return {"an extent near 2^31 or a stride of 2^40 bytes"};
  if (p.batch * p.heads_q > kMaxBlocks / ceil_div(p.len_q, KernelConfig<kHeadDim>::kTileM))
    return {"more than 2^31 - 1 tiles of query rows"};
  return {};
}

#define CUFLASH_VARIANT_ROW(type, dtype, head_dim, rank)                                \
  {"fwd_wgmma_" #type "_d" #head_dim,                                                   \
   "wgmma",                                                                             \
   Operation::kForward,                                                                 \
   false,                                                                               \
   KernelConfig<head_dim>::kTileM,                                                      \
   KernelConfig<head_dim>::kTileN,                                                      \
   KernelConfig<head_dim>::kThreads,                                                    \
   kSharedBytes<head_dim>,                                                              \
   rank,                                                                                \
   accepts<Dtype::dtype, head_dim>,                                                     \
   plan_nothing,                                                                        \
   CUFLASH_ENTRY_fwd_wgmma_##type##_d##head_dim(launch_fwd_wgmma_##type##_d##head_dim), \
   CUFLASH_ENTRY_fwd_wgmma_##type##_d##head_dim(preload_fwd_wgmma_##type##_d##head_dim)},
constexpr Variant kRows[] = {CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_wgmma

extern const VariantSpan kForwardWgmma = {
    forward_wgmma::kRows, sizeof forward_wgmma::kRows / sizeof forward_wgmma::kRows[0]};

}  // namespace cuflash
