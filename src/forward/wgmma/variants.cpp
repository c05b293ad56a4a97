// The table of the wgmma forward family. Plain C++: a build without CUDA has the rows, not the kernels.
#include "forward/wgmma/variants.hpp"

#include <algorithm>

#include "common/integer.hpp"
#include "core/kernel_rows.hpp"
#include "core/split.hpp"
#include "cuflash_built.hpp"
#include "device/wgmma_tile.hpp"
#include "forward/wgmma/config.hpp"

// name, its Dtype, bucket of head_dim and head_dim_v, size of tiles, rank: the smallest bucket that fits wins.
#define CUFLASH_FORWARD_WGMMA_ROWS(ROW)                      \
  ROW(fwd_wgmma_f16_d64, kF16, 64, 64, kLarge, 50)           \
  ROW(fwd_wgmma_small_f16_d64, kF16, 64, 64, kSmall, 49)     \
  ROW(fwd_wgmma_f16_d96, kF16, 96, 96, kLarge, 46)           \
  ROW(fwd_wgmma_f16_d128, kF16, 128, 128, kLarge, 45)        \
  ROW(fwd_wgmma_long_f16_d128, kF16, 128, 128, kLong, 44)    \
  ROW(fwd_wgmma_f16_d192_v128, kF16, 192, 128, kLarge, 41)   \
  ROW(fwd_wgmma_f16_d192, kF16, 192, 192, kLarge, 40)        \
  ROW(fwd_wgmma_f16_d256, kF16, 256, 256, kLarge, 39)        \
  ROW(fwd_wgmma_bf16_d64, kBf16, 64, 64, kLarge, 50)         \
  ROW(fwd_wgmma_small_bf16_d64, kBf16, 64, 64, kSmall, 49)   \
  ROW(fwd_wgmma_bf16_d96, kBf16, 96, 96, kLarge, 46)         \
  ROW(fwd_wgmma_bf16_d128, kBf16, 128, 128, kLarge, 45)      \
  ROW(fwd_wgmma_long_bf16_d128, kBf16, 128, 128, kLong, 44)  \
  ROW(fwd_wgmma_bf16_d192_v128, kBf16, 192, 128, kLarge, 41) \
  ROW(fwd_wgmma_bf16_d192, kBf16, 192, 192, kLarge, 40)      \
  ROW(fwd_wgmma_bf16_d256, kBf16, 256, 256, kLarge, 39)

namespace cuflash {
namespace forward_wgmma {

#define CUFLASH_DECLARE(name, dtype, head_dim, head_dim_v, size, rank) CUFLASH_DECLARE_KERNEL(name);
CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_DECLARE)
#undef CUFLASH_DECLARE

namespace {

constexpr uint32_t kTaken =
    kRaggedBatches | kSoftcap | kAlibi | kSinks | kOwnValueDim | kWideOutputs;

bool is_ragged(const Problem& p) {
  return p.features != nullptr && (p.features->used & kRaggedBatches) != 0;
}

template <Dtype kDtype, class Config>
Refusal accepts(const Variant&, const Problem& p, const Capabilities& capabilities) {
  CUFLASH_REFUSE((refuse_other_problems<kDtype, Config::kHeadDim, kTaken>(p)));
  if (capabilities.arch != 90) return {"needs sm_90"};
  CUFLASH_REFUSE(refuse_less_shared_memory<kSharedBytesOfRagged<Config>>(capabilities));
  if (p.head_dim % 8 != 0) return {"head_dim is not a multiple of 8"};
  if (p.head_dim_v % 8 != 0) return {"head_dim_v is not a multiple of 8"};
  if (Config::kHeadDimV < Config::kHeadDim && p.head_dim_v > Config::kHeadDimV)
    return {"head_dim_v is above 128"};
  if (!p.aligned16) return {"a pointer or stride of q, k, v or o is not a multiple of 16 bytes"};
  const int64_t rows_q = query_extents(p).rows, rows_k = key_extents(p).rows;
  if (min64(p.len_q, rows_q) == 0 || min64(p.len_k, rows_k) == 0)
    return {"there are no queries or no keys"};
  if (!device::fits_tensor_map(p.q, p.batch, p.heads_q, rows_q) ||
      !device::fits_tensor_map(p.o, p.batch, p.heads_q, rows_q) ||
      !device::fits_tensor_map(p.k, p.batch, p.heads_kv, rows_k) ||
      !device::fits_tensor_map(p.v, p.batch, p.heads_kv, rows_k))
    return {"an extent near 2^31 or a stride of 2^40 bytes"};
  if (is_ragged(p)) {
    if (p.batch > kMaxSequences) return {"more than 512 sequences"};
    static_assert(kMaxSequences == 512);
    if (p.batch * ceil_div(p.len_q, Config::kTileM) > kMaxRaggedTiles)
      return {"more than 2^23 - 1 tiles of rows in a ragged batch"};
  }
  if (p.features != nullptr) {
    // The kernel's tanh is off by 2^-23 of the cap, which shows in weights where that is much.
    constexpr float kMaxSoftcap = 256;
    if (p.features->score.softcap > kMaxSoftcap) return {"softcap is above 256"};
  }
  return refuse_more_tiles(p.batch * p.heads_q, p.len_q, Config::kTileM);
}

// How many parts the keys of each tile are cut into where there are too few tiles for the SMs. Each part is a block, and long
// enough to be worth the merge, which takes about as long as 300 keys.
template <class Config>
int32_t choose_parts(const Problem& p, int64_t tiles, int64_t blocks) {
  constexpr int64_t kLeastKeys = 1024, kMostParts = 128;
  // A row's parts would depend on its batch; and each part would add the sink.
  if (p.batch_invariant || is_ragged(p)) return 1;
  if (p.features != nullptr && (p.features->used & kSinks) != 0) return 1;
  const int64_t keys = min64(p.len_k, p.mask.left + p.mask.right + Config::kTileM);
  return static_cast<int32_t>(clamp64(min64(blocks / tiles, keys / kLeastKeys), 1, kMostParts));
}

// All the blocks that fit the SMs that the call may use. A dense problem's tiles are dealt out to them.
template <class Config>
Plan plan(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  const int64_t tiles = p.batch * p.heads_q * ceil_div(p.len_q, Config::kTileM);
  const int64_t blocks = int64_t{Config::kBlocks} * capabilities.sm_count;
  plan.num_splits = tiles == 0 ? 1 : choose_parts<Config>(p, tiles, blocks);
  plan.workspace_bytes = split_workspace(p, plan.num_splits).bytes;
  plan.launches = plan.num_splits > 1 ? 2 : 1;
  plan.blocks = min64(tiles * plan.num_splits, blocks);
  plan.counts_tiles = is_ragged(p) && tiles > plan.blocks;
  return plan;
}

// Up to 64 queries and keys the wmma kernels take 0.5 to 0.95 of the time (docs/log/0013), and less on the host: no
// tensor maps. Small tiles, where there are any, take 0.8 of it under a causal mask up to 1024 keys, and 1.1 to 1.2 without
// one (docs/log/0018); where large ones leave SMs without a block, 0.75 to 0.9; tiles of more keys 0.96 to 0.99 of it at 16,384
// keys, at 4096 as much, and 1.04 under a causal mask (docs/log/0025).
int rank_for(const Problem& p, int head_dim, TileSize size, int rank) {
  constexpr int64_t kFew = 64, kShort = 1024, kMany = 4096;
  constexpr int64_t kFewTiles = 264;  // two for each SM of an H100 or H200
  constexpr int kBelowWmma = 20;
  if (p.len_q <= kFew && p.len_k <= kFew) return kBelowWmma;
  TileSize suited = kLarge;
  if (head_dim == 64) {
    const bool few = p.len_q <= kFew || p.batch * p.heads_q * ceil_div(p.len_q, kFew) <= kFewTiles;
    if (few || (!p.mask.is_full() && p.len_k <= kShort)) suited = kSmall;
  } else if (head_dim == 128) {
    // Of ragged batches the host does not know how many keys there are.
    if (!is_ragged(p) && min64(p.len_k, p.mask.left + p.mask.right) >= kMany) suited = kLong;
  }
  // The suited size keeps its rank, the others fall below all sizes of their bucket.
  return size == suited ? rank : rank - 2;
}

#define CUFLASH_VARIANT_ROW(name, dtype, head_dim, head_dim_v, size, rank)                  \
  with_rank_for(                                                                            \
      CUFLASH_KERNEL_ROW(name, "wgmma", Operation::kForward,                                \
                         (KernelConfig<head_dim, head_dim_v, size>::kTileM),                \
                         (KernelConfig<head_dim, head_dim_v, size>::kTileN),                \
                         (KernelConfig<head_dim, head_dim_v, size>::kThreads),              \
                         (kSharedBytes<KernelConfig<head_dim, head_dim_v, size>>), rank,    \
                         (accepts<Dtype::dtype, KernelConfig<head_dim, head_dim_v, size>>), \
                         (plan<KernelConfig<head_dim, head_dim_v, size>>)),                 \
      [](const Problem& p) { return rank_for(p, head_dim, size, rank); }),
constexpr Variant kRows[] = {CUFLASH_FORWARD_WGMMA_ROWS(CUFLASH_VARIANT_ROW)};
#undef CUFLASH_VARIANT_ROW

}  // namespace
}  // namespace forward_wgmma

extern const VariantSpan kForwardWgmma = span_of(forward_wgmma::kRows);

}  // namespace cuflash
