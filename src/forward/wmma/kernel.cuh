// Forward attention on tensor cores through nvcuda::wmma: exact, one pass over the keys, fp32 sums. f16 from
// sm_70, bf16 from sm_80; any strides, masks, lengths; head_dim up to the bucket, padded with zeros.
//
// One block computes one tile of O: kTileM query rows of one head. Each of its four warps owns
// kStrips x 16 of them from start to end, with Q and O in fragments (registers); the warps share K and V.
//
//            key tile j                                             | key tile j + 1
//   copies   [ V(j)            ][ K(j+1)                            ]|[ V(j+1) ...
//   warps     S = Q K(j)^T      softmax of S, by rows    O += P V(j)
//   barriers ^ K(j) is there    ^ K(j) is free           ^ V(j) is there
//
// WMMA does not say which element of a matrix a thread holds. Scores therefore go through the warp's own
// shared memory: stored as fp32, read back by rows (two lanes each), and left there as 16-bit weights P for
// the second product. O stays in fragments all the time: loading a matrix of row numbers once tells in
// which row each element lies, and that is all that rescaling needs.
//
// Shared memory, for head_dim 64 (54 KB at 128, 44 KB at 256):
//   k        [64][64 + 8]        16 bit    9,216 bytes      Q passes through k and v at the start
//   v        [64][64 + 8]        16 bit    9,216
//   warps[4] [16][64 + 8] fp32 + [16] fp32 18,688           scores, then P; row factors
//
// Limits: three barriers for each key tile, and scores cross shared memory twice: see README.md.
#pragma once

#include "attention/key_range.hpp"
#include "attention/online_softmax.hpp"
#include "attention/tile_rows.hpp"
#include "attention/wmma_softmax.cuh"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/load_tile.cuh"
#include "device/once_per_device.hpp"
#include "device/store_rows.cuh"
#include "device/packed16.cuh"
#include "device/wmma_fragments.cuh"
#include "forward/wmma/config.hpp"

namespace cuflash::forward_wmma {

namespace ptx = device::ptx;
namespace wmma = nvcuda::wmma;

using device::Accumulator;
using device::bf16;
using device::f16;
using device::LeftFragment;
using device::load_fragment;

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- products -------------------------------------------------------------------------------------

// Scores of the warp's rows and all keys of the tile: Q K^T, left in s_warp.scores.
template <class Config, class Element, class Warp, int kStrips, int kChannelFragments>
__device__ void multiply_q_k(Warp& s_warp,
                             const LeftFragment<Element> (&q)[kStrips][kChannelFragments],
                             const Element (&s_k)[Config::kTileN][Config::kLdTile]) {
  // Two key fragments at a time: one leaves the tensor cores waiting for its own sums; four cost the registers
  // of all scores, and spill at head_dim 128.
  constexpr int kGroup = 2;
#pragma unroll
  for (int key = 0; key < Config::kTileN; key += kGroup * kFragment) {
    Accumulator scores[kStrips][kGroup];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int n = 0; n < kGroup; ++n) wmma::fill_fragment(scores[strip][n], 0.0f);
#pragma unroll
    for (int f = 0; f < kChannelFragments; ++f)
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
        device::RightTransposedFragment<Element> k;
        load_fragment(k, &s_k[key + n * kFragment][f * kFragment], Config::kLdTile);
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip)
          wmma::mma_sync(scores[strip][n], q[strip][f], k, scores[strip][n]);
      }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int n = 0; n < kGroup; ++n)
        wmma::store_matrix_sync(&s_warp.scores[strip * kFragment][key + n * kFragment],
                                scores[strip][n], Config::kLdScores, wmma::mem_row_major);
  }
}

// o += P V for the warp's rows.
template <class Config, class Element, class Warp, int kStrips, int kChannelFragments>
__device__ void multiply_p_v(Accumulator (&o)[kStrips][kChannelFragments], const Warp& s_warp,
                             const Element (&s_v)[Config::kTileN][Config::kLdTile]) {
#pragma unroll
  for (int n = 0; n < Config::kTileN / kFragment; ++n) {
    LeftFragment<Element> p[kStrips];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
      load_fragment(p[strip], &s_warp.weights[strip * kFragment][n * kFragment], Config::kLdScores);
#pragma unroll
    for (int f = 0; f < kChannelFragments; ++f) {
      device::RightFragment<Element> v;
      load_fragment(v, &s_v[n * kFragment][f * kFragment], Config::kLdTile);
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip)
        wmma::mma_sync(o[strip][f], p[strip], v, o[strip][f]);
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__device__ void forward_block(const Call& problem, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kStrips = Config::kStrips;
  constexpr int kChannelFragments = Config::kHeadDim / kFragment;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<SharedStorage<Config, Element>*>(s_memory);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  auto& s_warp = s.warps[warp];

  // Late rows first: under a causal mask they see the most keys, and the short blocks fill the end.
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t m_tile = gridDim.x / heads - 1 - blockIdx.x / heads;
  const uint32_t b = blockIdx.x % heads / heads_q;
  const uint32_t head = blockIdx.x % heads % heads_q;
  const int64_t head_kv = problem.head_kv(head);
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = kHasFeatures<Call> ? static_cast<int>(problem.head_dim_v) : head_dim;
  const float scale_log2 = factor_of_scores(problem) * kLog2E;

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
  const auto unmasked_end = static_cast<int>(keys.all.end - keys.any.begin);
  const int64_t first_key = sequence.first_k + keys.any.begin;
  const Element* g_q = problem.q.template row<const Element>(b, head, sequence.first_q + tile_row);
  const Element* g_k = problem.k.template row<const Element>(b, head_kv, first_key);
  const Element* g_v = problem.v.template row<const Element>(b, head_kv, first_key);
  const auto load_q = [&] {
    device::load_tile<kThreads, Config::kTileM, Config::kHeadDim, Config::kLdTile>(
        s.k[0], g_q, problem.q.row_stride, static_cast<int>(sequence.len_q - tile_row), head_dim,
        vector_access);
  };
  const auto load_k = [&](int key) {
    device::load_tile<kThreads, kTileN, Config::kHeadDim, Config::kLdTile>(
        s.k[0], g_k + key * problem.k.row_stride, problem.k.row_stride, num_keys - key, head_dim,
        vector_access);
  };
  const auto load_v = [&](int key) {
    device::load_tile<kThreads, kTileN, Config::kHeadDim, Config::kLdTile>(
        s.v[0], g_v + key * problem.v.row_stride, problem.v.row_stride, num_keys - key, head_dim_v,
        vector_access);
  };

  load_q();
  ptx::cp_async_commit();
  const uint32_t element_rows =
      device::learn_element_rows<Config::kLdScores>(s_warp.scores[0], lane);
  ptx::cp_async_wait<0>();
  __syncthreads();  // SAFETY: Q has landed; the row numbers have been read.
  LeftFragment<Element> q[kStrips][kChannelFragments];
  Accumulator o[kStrips][kChannelFragments];
  RowState state[kStrips];
  if constexpr (kHasFeatures<Call>) {
    const float sink = sink_of(problem, head);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      state[strip].m = sink;
      state[strip].l = sink != negative_infinity() && lane % 2 == 0 ? 1.0f : 0.0f;
    }
  }
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int f = 0; f < kChannelFragments; ++f) {
      const unsigned row = warp * Config::kWarpRows + strip * kFragment;
      load_fragment(q[strip][f], s.k[0] + row * Config::kLdTile + f * kFragment, Config::kLdTile);
      wmma::fill_fragment(o[strip][f], 0.0f);
    }
  __syncthreads();  // SAFETY: all warps have read Q before K overwrites it.
  if (num_keys > 0) load_k(0);
  ptx::cp_async_commit();

  // Counted down: num_keys may be 2^31 - 1, where a key counted up would overflow.
  for (int keys_left = num_keys; keys_left > 0; keys_left -= kTileN) {
    const int key = num_keys - keys_left;
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: this K has landed; all warps have read the last V and weights.
    load_v(key);
    ptx::cp_async_commit();
    multiply_q_k<Config>(s_warp, q, s.k);

    __syncthreads();  // SAFETY: all warps have read this K; the scores are written.
    if (keys_left > kTileN) load_k(key + kTileN);
    ptx::cp_async_commit();  // a group also where it is empty: the wait below counts
    bool rescale[kStrips];
    const auto row_of = [&](int strip) {
      return tile_row + warp * Config::kWarpRows + strip * kFragment + lane / 2;
    };
    const auto seen_by = [&](int64_t row) {
      return columns_of<kTileN>(visible_keys(problem.mask, shift, row, sequence.len_k),
                                keys.any.begin + key);
    };
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      if (modifies_scores(problem)) {
        if constexpr (kHasFeatures<Call>) {
          const int64_t row = row_of(strip);
          const Columns seen = row < sequence.len_q ? seen_by(row) : Columns{0, 0};
          const ModifiedRow modified(problem, sequence, shift, head, row, keys.any.begin + key);
          modify_scores<Config>(s_warp, strip, lane, seen, modified);
          rescale[strip] = softmax_strip<true, Config>(s_warp, strip, lane, scale_log2, {0, kTileN},
                                                       state[strip]);
          drop_weights<Config>(s_warp, strip, lane, modified);
        }
      } else if (key < unmasked_begin || unmasked_end - key < kTileN) {
        rescale[strip] = softmax_strip<true, Config>(s_warp, strip, lane, scale_log2,
                                                     seen_by(row_of(strip)), state[strip]);
      } else {
        rescale[strip] =
            softmax_strip<false, Config>(s_warp, strip, lane, scale_log2, {}, state[strip]);
      }
    }

    ptx::cp_async_wait<1>();
    __syncthreads();  // SAFETY: this V has landed; weights and factors are written.
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
      if (rescale[strip])
        device::scale_rows(o[strip], s_warp.row_factors + strip * kFragment, element_rows);
    multiply_p_v<Config>(o, s_warp, s.v);
  }

  __syncwarp();  // SAFETY: the last weights and factors have been read.
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    const int64_t strip_row = tile_row + warp * Config::kWarpRows + strip * kFragment;
    const float m = state[strip].m;
    const float l = state[strip].l + __shfl_xor_sync(kFullWarp, state[strip].l, 1);
    const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
    if (lane % 2 == 0) {
      const int64_t row = strip_row + lane / 2;
      s_warp.row_factors[lane / 2] = empty ? 0.0f : factor_of_outputs(problem) / l;
      if (problem.lse.data != nullptr && row < sequence.len_q)
        *problem.lse.at(b, head, sequence.first_q + row) = lse_of(m, factor_of_scores(problem), l);
    }
    __syncwarp();  // SAFETY: the factors are written; store_rows ends with their being read.
    device::scale_rows(o[strip], s_warp.row_factors, element_rows);
    constexpr int kColumns = Config::kHeadDim % kTileN == 0 ? kTileN : 32;
    device::store_rows<kColumns, Config::kLdScores>(
        s_warp.scores[0], lane, o[strip],
        problem.o.template row<Element>(b, head, sequence.first_q + strip_row),
        problem.o.row_stride, sequence.len_q - strip_row, head_dim_v, vector_access);
  }
}

// With features there may be fewer blocks on an SM: scores in the making take registers.
template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(kThreads,
                                  kHasFeatures<Call> ? 1 : KernelConfig<kHeadDim>::kMinBlocks)
    forward_kernel(const __grid_constant__ Call problem, bool vector_access) {
  if constexpr (device::kHasWmma<Element>) {
    forward_block<Element, KernelConfig<kHeadDim>>(problem, vector_access);
  } else {
    __trap();  // bf16 needs sm_80; the table refuses such GPUs
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY(device::load_kernel(forward_kernel<Element, kHeadDim, Problem>, name,
                                    kSharedBytes<kHeadDim>));
    return device::load_kernel(forward_kernel<Element, kHeadDim, FullProblem>, name,
                               kSharedBytes<kHeadDim>);
  });
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const LaunchContext& context) {
  using Config = KernelConfig<kHeadDim>;
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<kHeadDim>);
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  const int64_t m_tiles = ceil_div(problem.len_q, Config::kTileM);
  const bool vector_access =
      problem.aligned16 && problem.head_dim % 8 == 0 && problem.head_dim_v % 8 == 0;
  const device::LaunchShape shape{m_tiles * problem.batch * problem.heads_q, kThreads,
                                  kSharedBytes<kHeadDim>};
  if (problem.features != nullptr)
    return device::launch(forward_kernel<Element, kHeadDim, FullProblem>, name, shape,
                          context.stream, FullProblem(problem), vector_access);
  return device::launch(forward_kernel<Element, kHeadDim, Problem>, name, shape, context.stream,
                        problem, vector_access);
}

}  // namespace cuflash::forward_wmma
