// Forward attention on tensor cores through mma.sync and ldmatrix (sm_80 and later): exact, one pass over the keys, fp32
// sums. f16 and bf16; any strides, masks, lengths; head_dim up to the bucket, padded with zeros.
//
// One block computes one tile of O: kTileM query rows of one head. Each warp owns kStrips x 16 of them from start to end;
// the warps share K and V. Scores and weights never leave registers: a product's sums lie just as the next product wants
// its left operand (device/ptx/mma.cuh).
//
//   two stages          key tile j                                          | key tile j + 1
//   copies              [ K(j+1), V(j+1)                                   ]|[ K(j+2), V(j+2) ...
//   each warp            S = Q K(j)^T    weights of S     O += P V(j)       | S = Q K(j+1)^T ...
//   barrier             ^ K(j) and V(j) are there; K(j-1) and V(j-1) are free
//
//   one stage            key tile j
//   copies              [ V(j)         ][ K(j+1)                           ]|[ V(j+1) ...
//   each warp            S = Q K(j)^T    weights of S     O += P V(j)       | S = Q K(j+1)^T ...
//   barriers            ^ K(j) is there ^ V(j) is there, K(j) is free
//
// With two stages nothing holds the warps together but one barrier for each tile, so that some use the tensor cores while
// others exponentiate. A warp of which no row sees a key of the tile leaves it out.
//
// Where the tile says so, two warps share their rows: pair.cuh. What such a warp does differently is folded away in others.
//
// Shared memory, for head_dim 128 (96 KB, as at 192 and 256; 48 KB at 64; other sizes of tiles: README.md), swizzled as in device/mma_tile.hpp:
//   stages[2]  k [64][128], v [64][128]  16 bit  65,536 bytes    where Q is kept in registers it passes through the second
//   q          [128][128]                16 bit  32,768          at the end: O
//
// Limits: tensor cores wait while all warps of a scheduler exponentiate: see README.md.
#pragma once

#include "attention/key_range.hpp"
#include "attention/online_softmax.hpp"
#include "attention/quad_softmax.cuh"
#include "attention/tile_rows.hpp"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/load_swizzled.cuh"
#include "device/mma_tile.hpp"
#include "device/once_per_device.hpp"
#include "device/packed16.cuh"
#include "device/ptx/mma.cuh"
#include "forward/mma/block_order.hpp"
#include "forward/mma/config.hpp"
#include "forward/mma/pair.cuh"

namespace cuflash::forward_mma {

namespace ptx = device::ptx;

using f16 = __half;
using bf16 = __nv_bfloat16;

// Whether this GPU has the products. A template so that the kernel's body is not even compiled where not.
template <class Element>
inline constexpr bool kHasMma =
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    false;
#else
    true;
#endif

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- products -------------------------------------------------------------------------------------

// A warp's rows of Q: one strip's 16 channels from `step` on.
template <class Config>
struct QInShared {
  uint32_t s_lane;  // of the row and chunk that this lane gives the address of
  __device__ void load(uint32_t (&a)[4], int strip, int step) const {
    ptx::ldmatrix_x4(a, Config::Layout::advance(s_lane, strip, step));
  }
};
template <class Config>
struct QInRegisters {
  uint32_t fragments[Config::kStrips][Config::kHeadDim / 16][4];
  __device__ explicit QInRegisters(const QInShared<Config>& shared) {
#pragma unroll
    for (int strip = 0; strip < Config::kStrips; ++strip)
#pragma unroll
      for (int step = 0; step < Config::kHeadDim / 16; ++step)
        shared.load(fragments[strip][step], strip, step);
  }
  __device__ void load(uint32_t (&a)[4], int strip, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragments[strip][step][i];
  }
};

// Scores of the warp's rows and keys: Q K^T. s_k_lane: the lane's row and chunk of its first 16 keys.
template <class Config, class Element, class Q, int kStrips, int kCount>
__device__ void multiply_q_k(float (&scores)[kStrips][kCount], const Q& q, uint32_t s_k_lane) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[strip][i] = 0;
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    uint32_t a[kStrips][4];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) q.load(a[strip], strip, step);
#pragma unroll
    for (int n = 0; n < Config::kWarpKeys / 16; ++n) {
      uint32_t b[4];  // keys 0 to 7 of the 16, then 8 to 15
      ptx::ldmatrix_x4(b, Config::Layout::advance(s_k_lane, n, step));
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        ptx::mma_m16n8k16<Element>(scores[strip] + 8 * n, a[strip], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(scores[strip] + 8 * n + 4, a[strip], b[2], b[3]);
      }
    }
  }
}

// o += P V for the warp's rows and channels. s_v_lane: the lane's row and chunk of the first 16 keys. Each second
// 16 channels of a pair's: their first chunk is 2 or 3 at most, and `advance` steps over four.
template <class Config, class Element, int kStrips, int kSteps, int kCount>
__device__ void multiply_p_v(float (&o)[kStrips][kCount], const uint32_t (&p)[kStrips][kSteps][4],
                             uint32_t s_v_lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 16; n += Config::kSharers) {
      uint32_t b[4];  // channels 0 to 7 of the 16, then 8 to 15
      ptx::ldmatrix_x4_trans(b, Config::Layout::advance(s_v_lane, step, n));
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        float* sums = o[strip] + 8 * (n / Config::kSharers);
        ptx::mma_m16n8k16<Element>(sums, p[strip][step], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(sums + 4, p[strip][step], b[2], b[3]);
      }
    }
}

// The scores [first, first + kPart) of a strip.
template <int kPart, int kCount>
__device__ const float (&part(const float (&scores)[kCount], int first))[kPart] {
  return reinterpret_cast<const float(&)[kPart]>(scores[first]);
}

template <int kCount>
__device__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// ---- features -------------------------------------------------------------------------------------

// Finishes the scores of a warp's tile: -infinity where the row does not see the key. Returns which weights dropout keeps, a
// bit for each score of a strip. Rolled, through local memory: each score made where it lies, 64 times unrolled, would
// take the compiler many times as long as all else.
//
// `row` and `first_key` are those of the first strip and column.
template <class Config, int kStrips, int kCount>
__device__ void modify_scores(float (&scores)[kStrips][kCount], uint32_t (&kept)[kStrips],
                              const FullProblem& problem, const Sequence& sequence, int64_t shift,
                              int64_t head, int64_t row, int64_t first_key, unsigned lane) {
  float finished[kStrips * kCount];
  uint32_t bits[kStrips];
#pragma unroll
  for (int i = 0; i < kStrips * kCount; ++i) finished[i] = scores[i / kCount][i % kCount];
#pragma unroll 1
  for (int strip = 0; strip < kStrips; ++strip) {
    uint32_t kept_of_strip = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int64_t own_row = row + strip * kStripRows + 8 * half + lane / 4;
      const Columns seen =
          own_row < sequence.len_q
              ? columns_of<Config::kWarpKeys>(
                    visible_keys(problem.mask, shift, own_row, sequence.len_k), first_key)
              : Columns{0, 0};
      const ModifiedRow modified(problem, sequence, shift, head, own_row, first_key);
#pragma unroll 1
      for (int j = 0; j < kCount / 2; ++j) {
        const int i = j / 2 * 4 + 2 * half + j % 2;
        const int column = j / 2 * 8 + static_cast<int>(2 * (lane % 4)) + j % 2;
        float& score = finished[strip * kCount + i];
        if (seen.contain(column)) {
          score = modified.score(score, column);
          if (modified.keeps(column)) kept_of_strip |= 1u << i;
        } else {
          score = negative_infinity();
        }
      }
    }
    bits[strip] = kept_of_strip;
  }
#pragma unroll
  for (int i = 0; i < kStrips * kCount; ++i) scores[i / kCount][i % kCount] = finished[i];
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) kept[strip] = bits[strip];
}

// Dropout, between softmax and product.
template <int kSteps>
__device__ void drop_weights(uint32_t (&p)[kSteps][4], uint32_t kept) {
#pragma unroll
  for (int i = 0; i < 8 * kSteps; i += 2) {
    if ((kept >> i & 1) == 0) p[i / 8][i / 2 % 4] &= 0xffff0000u;
    if ((kept >> (i + 1) & 1) == 0) p[i / 8][i / 2 % 4] &= 0x0000ffffu;
  }
}

// ---- output ---------------------------------------------------------------------------------------

// Writes a warp's rows of O to a tile in shared memory. `sharer`: which of those that have these rows.
template <class Config, class Element, int kStrips, int kCount>
__device__ void place_o(const float (&o)[kStrips][kCount], unsigned char* s_rows, unsigned sharer,
                        unsigned lane) {
  using Layout = typename Config::Layout;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const unsigned row = strip * kStripRows + i / 2 % 2 * 8 + lane / 4;
      const unsigned chunk = 2 * (i / 8 * Config::kSharers + sharer) + i / 4 % 2;
      *reinterpret_cast<uint32_t*>(s_rows + Layout::offset(row, chunk) + lane % 4 * 4) =
          device::pack16<Element>(o[strip][i], o[strip][i + 1]);
    }
}

// The first `rows` of kRows rows from there to O, `channels` of each.
template <class Config, int kRows, class Element>
__device__ void store_o(const unsigned char* s_rows, unsigned lane, Element* g_rows,
                        int64_t row_stride, int64_t rows, int channels, bool vector_access) {
  using Layout = typename Config::Layout;
  constexpr int kChunk = Layout::kChunkElements;
  constexpr int kChunks = Layout::kChunks;
  // Most tiles, without a question: a lane keeps its chunk, and rows 8 further on are permuted alike.
  if constexpr (32 % kChunks == 0) {
    if (vector_access && rows >= kRows) {
      constexpr int kRowsPerPass = 32 / kChunks;
      const unsigned first = lane / kChunks;
      const unsigned chunk = lane % kChunks;
      if (static_cast<int>(chunk) * kChunk >= channels) return;
      const int64_t step = kRowsPerPass * row_stride;
      Element* g_chunk = g_rows + first * row_stride + chunk * kChunk;
#pragma unroll
      for (int row = 0; row < kRows; row += kRowsPerPass, g_chunk += step)
        *reinterpret_cast<uint4*>(g_chunk) = *reinterpret_cast<const uint4*>(
            s_rows + Layout::offset(first + row % 8, chunk) + row / 8 * (8 * Layout::kRowBytes));
      return;
    }
  }
#pragma unroll 4
  for (unsigned i = lane; i < kRows * kChunks; i += 32) {
    const unsigned row = i / kChunks;
    const unsigned chunk = i % kChunks;
    const int channel = static_cast<int>(chunk) * kChunk;
    if (row >= rows || channel >= channels) continue;
    const unsigned char* s_chunk = s_rows + Layout::offset(row, chunk);
    Element* g_chunk = g_rows + row * row_stride + channel;
    if (vector_access) {
      *reinterpret_cast<uint4*>(g_chunk) = *reinterpret_cast<const uint4*>(s_chunk);
    } else {
#pragma unroll 1
      for (int j = 0; j < kChunk && channel + j < channels; ++j)
        g_chunk[j] = reinterpret_cast<const Element*>(s_chunk)[j];
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__device__ void forward_block(const Call& problem, const BlockOrder& order, bool vector_access) {
  using Layout = typename Config::Layout;
  constexpr int kTileN = Config::kTileN;
  constexpr int kStrips = Config::kStrips;
  constexpr int kStages = Config::kStages;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kThreads = Config::kThreads;
  constexpr int kSharers = Config::kSharers;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<SharedStorage<Config, Element>*>(s_memory);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const unsigned rows_of_tile = warp / kSharers * Config::kWarpRows;  // where the warp's begin
  const unsigned sharer = warp % kSharers;
  const unsigned own_keys = sharer * Config::kWarpKeys, other_keys = Config::kWarpKeys - own_keys;

  const auto [m_tile, b, head, head_kv] = order.place(blockIdx.x);
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = kHasFeatures<Call> ? static_cast<int>(problem.head_dim_v) : head_dim;
  const float scale_log2 = quad_scale_log2(factor_of_scores(problem));

  const Sequence sequence = sequence_of(problem, b);
  const int64_t tile_row = int64_t{m_tile} * Config::kTileM;
  if (kHasFeatures<Call> && tile_row >= sequence.len_q) return;  // a sequence shorter than others
  const int64_t shift = centre_shift(problem.mask, b, sequence.len_q, sequence.len_k);
  const TileRange keys =
      tile_keys(problem.mask, shift, tile_row, min64(tile_row + Config::kTileM, sequence.len_q),
                sequence.len_k);
  // From here on keys are counted from the first that any row of the tile sees.
  const auto num_keys = static_cast<int>(keys.any.end - keys.any.begin);
  const auto unmasked_begin = static_cast<int>(keys.all.begin - keys.any.begin);
  const int64_t warp_row = tile_row + rows_of_tile;
  const bool idle = warp_row >= sequence.len_q;  // this warp: it sees nothing
  const int unmasked_end = idle ? 0 : static_cast<int>(keys.all.end - keys.any.begin);
  const int64_t first_key = sequence.first_k + keys.any.begin;
  const Element* g_q = problem.q.template row<const Element>(b, head, sequence.first_q + tile_row);
  const Element* g_k = problem.k.template row<const Element>(b, head_kv, first_key);
  const Element* g_v = problem.v.template row<const Element>(b, head_kv, first_key);

  // Where Q is loaded to, and O leaves through.
  auto* s_q =
      reinterpret_cast<Element*>(Config::kQInRegisters ? static_cast<void*>(&s.stages[kStages - 1])
                                                       : static_cast<void*>(&s.q));
  const auto load_k = [&](int stage, int key) {
    device::load_swizzled<kThreads, kTileN, kHeadDim>(
        s.stages[stage].k, g_k + key * problem.k.row_stride, problem.k.row_stride, num_keys - key,
        head_dim, vector_access);
  };
  const auto load_v = [&](int stage, int key) {
    device::load_swizzled<kThreads, kTileN, kHeadDim>(
        s.stages[stage].v, g_v + key * problem.v.row_stride, problem.v.row_stride, num_keys - key,
        head_dim_v, vector_access);
  };
  // What ldmatrix wants of this lane: the address of a row of one of four 8x8 matrices. Of Q and V the second lies 8 rows
  // below the first, the third a chunk to the right; of K, whose rows are the columns of the product, the other way round.
  const uint32_t q_lane = Layout::offset(lane % 16, lane / 16);
  const uint32_t k_lane = Layout::offset(own_keys + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_lane = Layout::offset(lane % 16, 2 * sharer + lane / 16);
  constexpr uint32_t kStageBytes = sizeof s.stages[0];

  if (num_keys > 0) {
    device::load_swizzled<kThreads, Config::kTileM, kHeadDim>(
        s_q, g_q, problem.q.row_stride, static_cast<int>(sequence.len_q - tile_row), head_dim,
        vector_access);
    load_k(0, 0);
    if (kStages == 2) load_v(0, 0);
    ptx::cp_async_commit();
  }
  if (Config::kQInRegisters) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: Q has landed.
  }
  using Q = std::conditional_t<Config::kQInRegisters, QInRegisters<Config>, QInShared<Config>>;
  const Q q(QInShared<Config>{shared_address(s_q) + rows_of_tile * Layout::kRowBytes + q_lane});

  float o[kStrips][Config::kWarpChannels / 2] = {};
  QuadRows rows[kStrips];
  if constexpr (kHasFeatures<Call>) {
    const float sink = sink_of(problem, head);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[strip].m[r] = sink;
        const bool counts = sink != negative_infinity() && lane % 4 == 0 && sharer == 0;
        rows[strip].l[r] = counts ? 1.0f : 0.0f;
      }
  }
  // The keys that row i of the warp sees: [seen_begin + i, seen_end + i), cut to those that there are. 32 bits, so that masks
  // take few registers.
  const Range uncut = uncut_keys(problem.mask, shift, warp_row);
  const auto from_first = [&](int64_t k) {
    return static_cast<int>(clamp64(k - keys.any.begin, -Config::kWarpRows, num_keys));
  };
  const int seen_begin = from_first(uncut.begin);
  const int seen_end = idle ? -Config::kWarpRows : from_first(uncut.end);

  // Counted down: num_keys may be 2^31 - 1, where a key counted up would overflow.
#pragma unroll 1
  for (int keys_left = num_keys; keys_left > 0; keys_left -= kTileN) {
    const int key = num_keys - keys_left;
    const int stage = kStages == 2 ? key / kTileN % 2 : 0;
    ptx::cp_async_wait<0>();
    // SAFETY: this K has landed (with two stages, V too); all warps have read the last tile, and Q if it passed through.
    __syncthreads();
    if (kStages == 1) {
      load_v(0, key);
      ptx::cp_async_commit();
    } else if (keys_left > kTileN) {
      load_k(stage ^ 1, key + kTileN);
      load_v(stage ^ 1, key + kTileN);
      ptx::cp_async_commit();
    }
    const bool masked = key < unmasked_begin || unmasked_end - key < kTileN;
    // What row i sees, in columns of the tile before they are cut: [begin + i, end + i).
    const auto in_tile = [&](int k) { return max(min(k - key, kTileN), -Config::kWarpRows); };
    const int begin = in_tile(seen_begin), end = in_tile(seen_end);
    const bool skipped = masked && (begin == kTileN || end <= 1 - Config::kWarpRows);
    if (kStages == 2 && skipped) continue;
    const uint32_t s_stage = shared_address(&s.stages[0]) + stage * kStageBytes;
    float scores[kStrips][Config::kWarpKeys / 2];
    if (!skipped) multiply_q_k<Config, Element>(scores, q, s_stage + k_lane);

    if (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // SAFETY: this V has landed; all warps have read this K.
      if (keys_left > kTileN) {
        load_k(0, key + kTileN);
        ptx::cp_async_commit();
      }
      if (skipped) continue;
    }

    [[maybe_unused]] uint32_t kept[kStrips];
    if (modifies_scores(problem)) {
      if constexpr (kHasFeatures<Call>)
        modify_scores<Config>(scores, kept, problem, sequence, shift, head, warp_row,
                              keys.any.begin + key + own_keys, lane);
    } else if (masked) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        Columns seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = strip * kStripRows + 8 * r + static_cast<int>(lane / 4);
          const auto first = static_cast<int>(own_keys);
          seen[r] = {begin + i - first, max(begin + i, min(end + i, keys_left)) - first};
        }
        quad_mask(scores[strip], seen, lane % 4);
      }
    }
    constexpr uint32_t kBytesOfK = sizeof s.stages[0].k;
    if constexpr (kSharers == 2) {
      const Pair<Config> pair{s.q.pairs, warp, lane};
      uint32_t p[kStrips][Config::kWarpKeys / 16][4], asks[kStrips], any = 0;
      float sum[kStrips][2];
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        asks[strip] =
            quad_weigh<Element>(scores[strip], scale_log2, rows[strip], p[strip], sum[strip]);
        any |= asks[strip];
      }
      const auto drop = [&] {
        if constexpr (kHasFeatures<Call>)
          if (modifies_scores(problem)) {
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) drop_weights(p[strip], kept[strip]);
          }
      };
      drop();
      const bool warp_asks = __any_sync(kFullWarp, any != 0);
      pair.give(p, warp_asks);
      if (__all_sync(kFullWarp, !warp_asks && !pair.partner_asks())) {
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
          for (int r = 0; r < 2; ++r) rows[strip].l[r] += sum[strip][r];
      } else {
        float factor[kStrips][2];
        pair.template weigh_under_new_maximum<Element>(scores, scale_log2, asks, rows, p, factor);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) scale_rows(o[strip], factor[strip]);
        drop();
        pair.give(p, true);
      }
      uint32_t p_of_partner[kStrips][Config::kWarpKeys / 16][4];
      pair.take(p_of_partner);
      const uint32_t s_v_lane = s_stage + kBytesOfK + v_lane;
      multiply_p_v<Config, Element>(o, p, s_v_lane + own_keys * Layout::kRowBytes);
      multiply_p_v<Config, Element>(o, p_of_partner, s_v_lane + other_keys * Layout::kRowBytes);
    } else {
      // Some keys at a time: the products of the first are under way while the next are exponentiated.
      constexpr int kKeys = Config::kTile.weighed_keys, kTogether = Config::kTile.weighed_strips;
#pragma unroll
      for (int n = 0; n < kTileN; n += kKeys) {
        uint32_t p[kStrips][kKeys / 16][4];
#pragma unroll
        for (int first_strip = 0; first_strip < kStrips; first_strip += kTogether) {
          float sum[kTogether][2];
          uint32_t asks[kTogether], any = 0;
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int strip = first_strip + i;
            asks[i] = quad_weigh<Element>(part<kKeys / 2>(scores[strip], n / 2), scale_log2,
                                          rows[strip], p[strip], sum[i]);
            any |= asks[i];
          }
          if (__all_sync(kFullWarp, any == 0)) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              rows[first_strip + i].l[0] += sum[i][0];
              rows[first_strip + i].l[1] += sum[i][1];
            }
          } else {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              const int strip = first_strip + i;
              float factor[2];
              quad_weigh_under_new_maximum<Element>(part<kKeys / 2>(scores[strip], n / 2),
                                                    scale_log2, asks[i], rows[strip], p[strip],
                                                    factor);
              scale_rows(o[strip], factor);
            }
          }
        }
        if constexpr (kHasFeatures<Call>)
          if (modifies_scores(problem)) {
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip)
              drop_weights(p[strip], kept[strip] >> (n / 2));
          }
        multiply_p_v<Config, Element>(o, p, s_stage + kBytesOfK + n * Layout::kRowBytes + v_lane);
      }
    }
  }

  // SAFETY: O passes over these rows of Q, which the partner too has then read.
  if constexpr (kSharers == 2)
    Pair<Config>{s.q.pairs, warp, lane}.give_sums(rows);
  else if (Config::kQInRegisters)
    __syncthreads();  // SAFETY: all warps have read the last tile, over which O passes.
  else
    __syncwarp();  // SAFETY: all lanes have read the warp's rows of Q, over which O passes.
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // NOLINTNEXTLINE(misc-const-correctness): pairs change it
      float l = quad_sum(rows[strip].l[r]);
      if constexpr (kSharers == 2)
        l += Pair<Config>{s.q.pairs, warp, lane}.sum_of_partner(strip, r);
      const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
      factor[r] = empty ? 0.0f : factor_of_outputs(problem) / l;
      const int64_t row = warp_row + strip * kStripRows + 8 * r + lane / 4;
      const bool writes = lane % 4 == 0 && strip % kSharers == static_cast<int>(sharer);
      if (writes && problem.lse.data != nullptr && row < sequence.len_q)
        *problem.lse.at(b, head, sequence.first_q + row) =
            lse_of(rows[strip].m[r], factor_of_scores(problem), l);
    }
    scale_rows(o[strip], factor);
  }
  // Each of those that share rows stores its part of them.
  constexpr int kStoredRows = Config::kWarpRows / kSharers;
  const unsigned first_stored = sharer * kStoredRows;
  unsigned char* s_rows = reinterpret_cast<unsigned char*>(s_q) + rows_of_tile * Layout::kRowBytes;
  place_o<Config, Element>(o, s_rows, sharer, lane);
  // SAFETY: the rows are written before other lanes, and the partner, read them.
  if constexpr (kSharers == 2)
    Pair<Config>{s.q.pairs, warp, lane}.meet();
  else
    __syncwarp();
  store_o<Config, kStoredRows>(
      s_rows + first_stored * Layout::kRowBytes, lane,
      problem.o.template row<Element>(b, head, sequence.first_q + warp_row + first_stored),
      problem.o.row_stride, sequence.len_q - warp_row - first_stored, head_dim_v, vector_access);
}

// With features there may be fewer blocks on an SM: scores in the making take registers.
template <class Element, class Config, class Call>
__global__ void __launch_bounds__(Config::kThreads, kHasFeatures<Call> ? 1 : Config::kMinBlocks)
    forward_kernel(const __grid_constant__ Call problem, const __grid_constant__ BlockOrder order,
                   bool vector_access) {
  if constexpr (kHasMma<Element>) {
    forward_block<Element, Config>(problem, order, vector_access);
  } else {
    __trap();  // needs sm_80; the table refuses such GPUs
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, class Config>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY(
        device::load_kernel(forward_kernel<Element, Config, Problem>, name, kSharedBytes<Config>));
    return device::load_kernel(forward_kernel<Element, Config, FullProblem>, name,
                               kSharedBytes<Config>);
  });
}

template <class Element, class Config>
Status launch(const char* name, const Problem& problem, const LaunchContext& context) {
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<Config>);
  CUFLASH_TRY((preload<Element, Config>(name, context.device)));
  const int64_t m_tiles = ceil_div(problem.len_q, Config::kTileM);
  const bool vector_access =
      problem.aligned16 && problem.head_dim % 8 == 0 && problem.head_dim_v % 8 == 0;
  const device::LaunchShape shape{m_tiles * problem.batch * problem.heads_q, Config::kThreads,
                                  kSharedBytes<Config>};
  if (shape.blocks == 0) return CUFLASH_SUCCESS;
  const BlockOrder order(problem, m_tiles, heads_together(problem));
  if (problem.features != nullptr)
    return device::launch(forward_kernel<Element, Config, FullProblem>, name, shape, context.stream,
                          FullProblem(problem), order, vector_access);
  return device::launch(forward_kernel<Element, Config, Problem>, name, shape, context.stream,
                        problem, order, vector_access);
}

}  // namespace cuflash::forward_mma
