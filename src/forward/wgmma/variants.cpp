// The table of the wgmma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/wgmma/variants.hpp"

#include <algorithm>

#include "common/integer.hpp"
#include "core/kernel_rows.hpp"
#include "cuflash_built.hpp"
#include "device/wgmma_tile.hpp"
#include "forward/wgmma/config.hpp"

// name, its Dtype, bucket of head dims, size of tiles, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_WGMMA_ROWS(ROW)                \
  ROW(fwd_wgmma_f16_d64, kF16, 64, kLarge, 50)         \
  ROW(fwd_wgmma_small_f16_d64, kF16, 64, kSmall, 49)   \
  ROW(fwd_wgmma_f16_d96, kF16, 96, kLarge, 47)         \
  ROW(fwd_wgmma_f16_d128, kF16, 128, kLarge, 46)       \
  ROW(fwd_wgmma_f16_d192, kF16, 192, kLarge, 45)       \
  ROW(fwd_wgmma_f16_d256, kF16, 256, kLarge, 44)       \
  ROW(fwd_wgmma_bf16_d64, kBf16, 64, kLarge, 50)       \
  ROW(fwd_wgmma_small_bf16_d64, kBf16, 64, kSmall, 49) \
  ROW(fwd_wgmma_bf16_d96, kBf16, 96, kLarge, 47)       \
  ROW(fwd_wgmma_bf16_d128, kBf16, 128, kLarge, 46)     \
  ROW(fwd_wgmma_bf16_d192, kBf16, 192, kLarge, 45)     \
  ROW(fwd_wgmma_bf16_d256, kBf16, 256, kLarge, 44)

namespace cuflash {
namespace forward_wgmma {

#define CUFLASH_DECLARE(name, dtype, head_dim, size, rank) CUFLASH_DECLARE_KERNEL(name);
CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr uint32_t kTaken = kRaggedBatches | kSoftcap | kAlibi | kSinks;

template <Dtype kDtype, class Config>
Refusal accepts(const Variant&, const Problem& p, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, Config::kHeadDim, kTaken>(p)));
  if (capabilities.arch != 90) return {"needs sm_90"};
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytesOfRagged<Config>>(capabilities));
  if (p.head_dim % 8 != 0) return {"head_dim is not a multiple of 8"};
  if (!p.aligned16) return {"a pointer or stride of q, k, v or o is not a multiple of 16 bytes"};
  const int64_t rows_q = query_extents(p).rows, rows_k = key_extents(p).rows;
  if (min64(p.len_q, rows_q) == 0 || min64(p.len_k, rows_k) == 0)
    return {"there are no queries or no keys"};
  if (!device::fits_tensor_map(p.q, p.batch, p.heads_q, rows_q) ||
      !device::fits_tensor_map(p.o, p.batch, p.heads_q, rows_q) ||
      !device::fits_tensor_map(p.k, p.batch, p.heads_kv, rows_k) ||
      !device::fits_tensor_map(p.v, p.batch, p.heads_kv, rows_k))
    return {"an extent near 2^31 or a stride of 2^40 bytes"};
  if (p.features != nullptr) {
    if ((p.features->used & kRaggedBatches) != 0 && p.batch > kMaxSequences)
      return {"more than 512 sequences"};
    static_assert(kMaxSequences == 512);
    // The kernel's tanh is off by 2^-23 of the cap, which shows in weights where that is much.
    constexpr float kMaxSoftcap = 256;
    if (p.features->score.softcap > kMaxSoftcap) return {"softcap is above 256"};
  }
  return refuse_more_tiles(p.batch * p.heads_q, p.len_q, Config::kTileM);
}

// All the blocks that fit the SMs that the call may use.
template <class Config>
Plan plan(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  const int64_t tiles = p.batch * p.heads_q * ceil_div(p.len_q, Config::kTileM);
  plan.blocks = min64(tiles, int64_t{Config::kBlocks} * capabilities.sm_count);
  return plan;
}

// Up to 64 queries and keys the wmma kernels take 0.5 to 0.95 of the time (docs/log/0013), and less on the host: no
// tensor maps. Small tiles, where there are any, take 0.8 of it under a causal mask up to 1024 keys, and 1.1 to 1.2 without
// one (docs/log/0018).
int rank_for(const Problem& p, TileSize size, int rank) {
  constexpr int64_t kFew = 64, kShort = 1024;
  constexpr int kBelowWmma = 20, kBelowSmall = 48;
  if (p.len_q <= kFew && p.len_k <= kFew) return kBelowWmma;
  const bool suits_small = p.len_q <= kFew || (!p.mask.is_full() && p.len_k <= kShort);
  return size == kLarge && suits_small ? std::min(rank, kBelowSmall) : rank;
}

#define CUFLASH_VARIANT_ROW(name, dtype, head_dim, size, rank)                            \
  with_rank_for(CUFLASH_KERNEL_ROW(name, "wgmma", Operation::kForward,                    \
                                   (KernelConfig<head_dim, size>::kTileM),                \
                                   (KernelConfig<head_dim, size>::kTileN),                \
                                   (KernelConfig<head_dim, size>::kThreads),              \
                                   (kSharedBytes<KernelConfig<head_dim, size>>), rank,    \
                                   (accepts<Dtype::dtype, KernelConfig<head_dim, size>>), \
                                   (plan<KernelConfig<head_dim, size>>)),                 \
                [](const Problem& p) { return rank_for(p, size, rank); }),
constexpr Variant kRows[] = {CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_wgmma

extern const VariantSpan kForwardWgmma = span_of(forward_wgmma::kRows);

}  // namespace cuflash
