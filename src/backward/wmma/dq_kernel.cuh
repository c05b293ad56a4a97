// dQ on tensor cores, and delta = rowsum(O * dO) on the way: the first of the two passes of backward.
//
//   dQ = scale * dS K      dS as in strip_math.cuh
//
// One block computes 32 rows of one head's dQ, in two strips of 16; keys stream past. The two warps of a strip split
// the work of its two first products, and the channels of the third:
//
//                     key tile j                                              | key tile j + 1
//   weights' warp      S = Q K(j)^T, P            | wait          | dQ[left]  += dS K(j)[left]
//   gradients' warp    dP = dO V(j)^T             | dS from P, dP | dQ[right] += dS K(j)[right]
//   copies            [ K(j + 1)  ...               [ V(j + 1)  ...
//   barriers          ^ K(j), V(j) are there      ^ P is there    ^ dS is there
//                                                   V(j) is free
#pragma once

#include "attention/key_range.hpp"
#include "backward/wmma/strip_math.cuh"
#include "core/problem.hpp"
#include "device/load_tile.cuh"
#include "device/store_rows.cuh"

namespace cuflash::backward_wmma {

// rowsum(O * dO) of the block's rows, to s_delta and g_delta; rows past the end are 0. By all warps. `token` is the first
// row in its tensors.
template <class Element, class Call>
__device__ void compute_delta(const Call& problem, const Sequence& sequence, int64_t head,
                              int64_t token, int64_t rows, float* s_delta, float* g_delta) {
  const int64_t b = sequence.batch;
  const int64_t o_stride = problem.o.row_stride, d_o_stride = problem.d_o.row_stride;
  const Element* g_o = problem.o.template row<const Element>(b, head, token);
  const Element* g_d_o = problem.d_o.template row<const Element>(b, head, token);
  const int channels = delta_is_given(problem) ? 0 : static_cast<int>(value_dim(problem));
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x / 32); row < kTileRows; row += kWarps) {
    float sum = 0;
    if (row < rows)
      for (int channel = lane; channel < channels; channel += 32)
        sum += static_cast<float>(g_o[row * o_stride + channel]) *
               static_cast<float>(g_d_o[row * d_o_stride + channel]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) {
      if (row < rows) {
        sum = reduced_delta(problem, sequence, head, token + row, sum, true);
        g_delta[row] = sum;
      }
      s_delta[row] = sum;
    }
  }
}

template <class Element, class Config, class Call>
__device__ void dq_block(const Call& problem, float* g_delta, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kLdTile = Config::kLdTile;
  constexpr int kLdStrip = Config::kLdStrip;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<DqStorage<Config, Element>*>(s_memory);
  const unsigned lane = threadIdx.x % 32;
  const unsigned role = threadIdx.x / 32 % 2;
  const unsigned strip = threadIdx.x / 64;
  auto& s_strip = s.strips[strip];

  // Late rows first: under a causal mask they see the most keys, and the short blocks fill the end.
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t m_tile = gridDim.x / heads - 1 - blockIdx.x / heads;
  const uint32_t b = blockIdx.x % heads / heads_q;
  const uint32_t head = blockIdx.x % heads % heads_q;
  const int64_t head_kv = problem.head_kv(head);
  const int head_dim = static_cast<int>(problem.head_dim);
  const int dim_v = static_cast<int>(value_dim(problem));

  const Sequence sequence = backward_sequence(problem, b);
  const int64_t tile_row = int64_t{m_tile} * kTileRows;
  if (kHasFeatures<Call> && tile_row >= sequence.len_q) return;  // others are longer
  const int64_t rows = min64(kTileRows, sequence.len_q - tile_row);
  const int64_t shift = centre_shift(problem.mask, b, sequence.len_q, sequence.len_k);
  const TileRange keys = tile_keys(problem.mask, shift, tile_row, tile_row + rows, sequence.len_k);
  // From here on keys are counted from the first that any row of the tile sees.
  const auto num_keys = static_cast<int>(keys.any.end - keys.any.begin);
  const auto unmasked_begin = static_cast<int>(keys.all.begin - keys.any.begin);
  const auto unmasked_end = static_cast<int>(keys.all.end - keys.any.begin);
  const int64_t first_token = sequence.first_q + tile_row;
  const int64_t first_key = sequence.first_k + keys.any.begin;
  const Element* g_k = problem.k.template row<const Element>(b, head_kv, first_key);
  const Element* g_v = problem.v.template row<const Element>(b, head_kv, first_key);
  const auto load_own = [&](Element* s_tile, const TensorView& tensor, int dim) {
    device::load_tile<kThreads, kTileRows, Config::kHeadDim, kLdTile>(
        s_tile, tensor.row<const Element>(b, head, first_token), tensor.row_stride,
        static_cast<int>(rows), dim, vector_access);
  };
  const auto load_keys = [&](Element* s_tile, const Element* g_rows, int64_t row_stride, int key,
                             int dim) {
    device::load_tile<kThreads, kTileN, Config::kHeadDim, kLdTile>(
        s_tile, g_rows + key * row_stride, row_stride, num_keys - key, dim, vector_access);
  };

  load_own(s.k[0][0], problem.q, head_dim);
  load_own(s.v[0], problem.d_o, dim_v);
  ptx::cp_async_commit();
  if (threadIdx.x < kTileRows) {
    const unsigned row = threadIdx.x;
    Range seen = visible_keys(problem.mask, shift, tile_row + row, sequence.len_k);
    if (kHasFeatures<Call> && row >= rows) seen = {};  // it has no bias to read
    s.seen.begin[row] = static_cast<int>(clamp64(seen.begin - keys.any.begin, 0, num_keys));
    s.seen.end[row] = static_cast<int>(clamp64(seen.end - keys.any.begin, 0, num_keys));
    s.lse[row] = row < rows ? *problem.lse.at(b, head, first_token + row) : 0.0f;
  }
  compute_delta<Element>(problem, sequence, head, first_token, rows, s.delta,
                         g_delta + first_delta(problem, sequence, head) + tile_row);
  const auto places = device::learn_element_places<kLdStrip>(s_strip.staging[role][0], lane);
  ptx::cp_async_wait<0>();
  __syncthreads();  // SAFETY: Q and dO have landed; the row statistics are written, the places learnt.

  device::LeftFragment<Element> own[Config::kChannelFragments];  // of Q or of dO
  const Element* s_own = (role == kWeights ? s.k[0][0] : s.v[0]) + strip * kFragment * kLdTile;
#pragma unroll
  for (int f = 0; f < Config::kChannelFragments; ++f)
    load_fragment(own[f], s_own + f * kFragment, kLdTile);
  float row_stat[Accumulator::num_elements];  // LSE or delta of each element's row
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; ++e)
    row_stat[e] = (role == kWeights ? s.lse : s.delta)[strip * kFragment + places.row(e)];
  constexpr int kHalf = Config::kChannelFragments / 2;
  Accumulator dq[kHalf];
#pragma unroll
  for (int f = 0; f < kHalf; ++f) wmma::fill_fragment(dq[f], 0.0f);
  __syncthreads();  // SAFETY: all warps have read Q and dO before K and V overwrite them.
  if (num_keys > 0) {
    load_keys(s.k[0][0], g_k, problem.k.row_stride, 0, head_dim);
    load_keys(s.v[0], g_v, problem.v.row_stride, 0, dim_v);
  }
  ptx::cp_async_commit();

  const bool modified = modifies_pairs(problem);
  const float kept = kept_factor(problem);
  // Counted down: num_keys may be 2^31 - 1, where a key counted up would overflow.
  unsigned stage = 0;
  for (int keys_left = num_keys; keys_left > 0; keys_left -= kTileN) {
    const int key = num_keys - keys_left;
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: K and V have landed; all warps have read the last K, P and dS.
    if (keys_left > kTileN)
      load_keys(s.k[stage ^ 1][0], g_k, problem.k.row_stride, key + kTileN, head_dim);
    ptx::cp_async_commit();

    Accumulator product[Config::kTileFragments];
    multiply_transposed<kLdTile>(product, own, role == kWeights ? s.k[stage][0] : s.v[0]);
    if (role == kWeights) {
      const auto lse = [&](int, int e) { return row_stat[e]; };
      const auto seen = [&](int n, int e) {
        const unsigned row = strip * kFragment + places.row(e);
        const int column = key + n * kFragment + places.column(e);
        return s.seen.begin[row] <= column && column < s.seen.end[row];
      };
      if constexpr (kHasFeatures<Call>) {
        const auto pair = [&](int n, int e, float of_product) {
          const int64_t row = tile_row + strip * kFragment + places.row(e);
          const int64_t seen_key = keys.any.begin + key + n * kFragment + places.column(e);
          return pair_score(problem, {b, head, row, row + shift}, seen_key, of_product);
        };
        if (modified)
          make_modified_weights<kLdStrip, Config::kTileFragments, Element>(
              s_strip.in_loop.p[0], nullptr, product, places, lse, seen, pair);
      }
      if (!modified) {
        if (key < unmasked_begin || unmasked_end - key < kTileN)
          make_weights<true>(product, problem.scale, lse, seen);
        else
          make_weights<false>(product, problem.scale, lse, seen);
        store_weights<kLdStrip, Config::kTileFragments, Element>(s_strip.in_loop.p[0], nullptr,
                                                                 product, places);
      }
    }

    __syncthreads();  // SAFETY: P is written; all warps have read V.
    if (keys_left > kTileN) load_keys(s.v[0], g_v, problem.v.row_stride, key + kTileN, dim_v);
    ptx::cp_async_commit();
    if (role == kGradients)
      store_score_gradients<Call, kLdStrip>(s_strip.in_loop.factors[kGradients][0],
                                            s_strip.in_loop.p[0], product, places, kept,
                                            [&](int, int e) { return row_stat[e]; });

    __syncthreads();  // SAFETY: dS is written.
    multiply_add<Config::kTileFragments, kLdStrip, kLdTile>(
        dq, s_strip.in_loop.factors[kGradients][0], s.k[stage][0] + role * kHalf * kFragment);
    stage ^= 1;
  }

  __syncthreads();  // SAFETY: all warps have read dS before rows of dQ overwrite it.
  multiply_by(dq, problem.scale);
  const int64_t strip_row = strip * kFragment;
  const int first_channel = static_cast<int>(role) * kHalf * kFragment;
  constexpr int kColumns = kHalf * kFragment % kTileN == 0 ? kTileN : kFragment;
  device::store_rows<kColumns, kLdStrip>(
      s_strip.staging[role][0], lane, dq,
      problem.dq.template row<Element>(b, head, first_token + strip_row) + first_channel,
      problem.dq.row_stride, rows - strip_row, head_dim - first_channel, vector_access);
}

}  // namespace cuflash::backward_wmma
