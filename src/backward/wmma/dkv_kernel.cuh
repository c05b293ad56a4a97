// dK and dV on tensor cores: the second pass of backward, after delta is there.
//
//   dV = P^T dO      dK = scale * dS^T Q      P, dS as in strip_math.cuh, here transposed: rows are keys
//
// One block computes 32 rows of dK and dV of one KV head, in two strips of 16; the queries of all heads of its group
// stream past, so that no sum needs another block. The two warps of a strip split the products evenly:
//
//                     query tile j                                        | query tile j + 1
//   weights' warp      S^T = K Q(j)^T, P          | dV += P^T dO(j)
//   gradients' warp    dP^T = V dO(j)^T           | dS from P, dP; dK += dS^T Q(j)
//   copies            [ Q(j + 1), dO(j + 1)  ...
//   barriers          ^ Q(j), dO(j) are there     ^ P is there
#pragma once

#include "attention/key_range.hpp"
#include "backward/wmma/strip_math.cuh"
#include "core/problem.hpp"
#include "device/load_tile.cuh"
#include "device/store_rows.cuh"

namespace cuflash::backward_wmma {

template <class Element, class Config, class Call>
__device__ void dkv_block(const Call& problem, const float* g_delta, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kLdTile = Config::kLdTile;
  constexpr int kLdStrip = Config::kLdStrip;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<DkvStorage<Config, Element>*>(s_memory);
  const unsigned lane = threadIdx.x % 32;
  const unsigned role = threadIdx.x / 32 % 2;
  const unsigned strip = threadIdx.x / 64;
  auto& s_strip = s.strips[strip];

  // Early keys first: under a causal mask most rows see them, and the short blocks fill the end.
  const auto heads_kv = static_cast<uint32_t>(problem.heads_kv);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_kv;
  const uint32_t n_tile = blockIdx.x / heads;
  const uint32_t b = blockIdx.x % heads / heads_kv;
  const uint32_t head_kv = blockIdx.x % heads % heads_kv;
  const int64_t group = problem.heads_q / problem.heads_kv;
  const int head_dim = static_cast<int>(problem.head_dim);
  const int dim_v = static_cast<int>(value_dim(problem));

  const Sequence sequence = backward_sequence(problem, b);
  const int64_t tile_key = int64_t{n_tile} * kTileRows;
  if (kHasFeatures<Call> && tile_key >= sequence.len_k) return;  // others are longer
  const int64_t num_keys = min64(kTileRows, sequence.len_k - tile_key);
  const int64_t shift = centre_shift(problem.mask, b, sequence.len_q, sequence.len_k);
  const TileRange rows =
      tile_rows(problem.mask, shift, tile_key, tile_key + num_keys, sequence.len_q);
  // From here on rows are counted from the first that sees any key of the tile.
  const int64_t first_row = rows.any.begin;
  const auto num_rows = static_cast<int>(rows.any.end - first_row);
  const auto unmasked_begin = static_cast<int>(rows.all.begin - first_row);
  const auto unmasked_end = static_cast<int>(rows.all.end - first_row);
  const int64_t key_token = sequence.first_k + tile_key;
  const auto load_own = [&](Element* s_tile, const TensorView& tensor, int dim) {
    device::load_tile<kThreads, kTileRows, Config::kHeadDim, kLdTile>(
        s_tile, tensor.row<const Element>(b, head_kv, key_token), tensor.row_stride,
        static_cast<int>(num_keys), dim, vector_access);
  };
  const auto load_queries = [&](Element* s_tile, const TensorView& tensor, int64_t head, int row,
                                int dim) {
    device::load_tile<kThreads, kTileN, Config::kHeadDim, kLdTile>(
        s_tile, tensor.row<const Element>(b, head, sequence.first_q + first_row + row),
        tensor.row_stride, num_rows - row, dim, vector_access);
  };
  const auto load_stage = [&](unsigned stage, int64_t head, int row) {
    load_queries(s.q[stage][0], problem.q, head, row, head_dim);
    load_queries(s.d_o[stage][0], problem.d_o, head, row, dim_v);
    if (threadIdx.x < kTileN) {  // past the end: P = e^0, but its dO is 0, and delta
      const int i = static_cast<int>(threadIdx.x);
      const bool valid = i < num_rows - row;
      const int64_t query = first_row + row + (valid ? i : 0);
      ptx::cp_async_4_zfill(&s.lse[stage][i], problem.lse.at(b, head, sequence.first_q + query),
                            valid);
      ptx::cp_async_4_zfill(&s.delta[stage][i],
                            g_delta + (first_delta(problem, sequence, head) + query), valid);
    }
  };

  load_own(s.q[0][0], problem.k, head_dim);
  load_own(s.d_o[0][0], problem.v, dim_v);
  ptx::cp_async_commit();
  if (threadIdx.x < kTileRows) {
    const unsigned i = threadIdx.x;
    Range seen = visible_rows(problem.mask, shift, tile_key + i, sequence.len_q);
    if (kHasFeatures<Call> && i >= num_keys) seen = {};  // it has no bias to read
    s.seen.begin[i] = static_cast<int>(clamp64(seen.begin - first_row, 0, num_rows));
    s.seen.end[i] = static_cast<int>(clamp64(seen.end - first_row, 0, num_rows));
  }
  const auto places = device::learn_element_places<kLdStrip>(s_strip.staging[role][0], lane);
  ptx::cp_async_wait<0>();
  __syncthreads();  // SAFETY: K and V have landed; the bounds are written, the places learnt.

  device::LeftFragment<Element> own[Config::kChannelFragments];  // of K or of V
  const Element* s_own = (role == kWeights ? s.q[0][0] : s.d_o[0][0]) + strip * kFragment * kLdTile;
  Accumulator total[Config::kChannelFragments];  // dV or dK
#pragma unroll
  for (int f = 0; f < Config::kChannelFragments; ++f) {
    load_fragment(own[f], s_own + f * kFragment, kLdTile);
    wmma::fill_fragment(total[f], 0.0f);
  }
  __syncthreads();  // SAFETY: all warps have read K and V before Q and dO overwrite them.

  const bool modified = modifies_pairs(problem);
  const float kept = kept_factor(problem);
  const int64_t end_head = (int64_t{head_kv} + 1) * group;
  int64_t head = num_rows > 0 ? head_kv * group : end_head;
  if (head < end_head) load_stage(0, head, 0);
  ptx::cp_async_commit();
  // Rows are counted down: num_rows may be 2^31 - 1, where a row counted up would overflow.
  int rows_left = num_rows;
  for (unsigned stage = 0; head < end_head; stage ^= 1) {
    const int row = num_rows - rows_left;
    const int64_t next_head = rows_left > kTileN ? head : head + 1;
    rows_left = rows_left > kTileN ? rows_left - kTileN : num_rows;
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: the stage has landed; all warps have read the other one, P and dS.
    if (next_head < end_head) load_stage(stage ^ 1, next_head, num_rows - rows_left);
    ptx::cp_async_commit();

    const Element* s_q = s.q[stage][0];
    const Element* s_d_o = s.d_o[stage][0];
    Accumulator product[Config::kTileFragments];
    multiply_transposed<kLdTile>(product, own, role == kWeights ? s_q : s_d_o);
    if (role == kWeights) {
      const auto lse = [&](int n, int e) { return s.lse[stage][n * kFragment + places.column(e)]; };
      const auto seen = [&](int n, int e) {
        const unsigned i = strip * kFragment + places.row(e);
        const int column = row + n * kFragment + places.column(e);
        return s.seen.begin[i] <= column && column < s.seen.end[i];
      };
      if constexpr (kHasFeatures<Call>) {  // a branch that is dead in calls without cost registers
        const auto pair = [&](int n, int e, float of_product) {
          const int64_t key = tile_key + strip * kFragment + places.row(e);
          const int64_t query = first_row + row + n * kFragment + places.column(e);
          return pair_score(problem, {b, head, query, query + shift}, key, of_product);
        };
        if (modified)
          make_modified_weights<kLdStrip>(s_strip.in_loop.p[0],
                                          s_strip.in_loop.factors[kWeights][0], product, places,
                                          lse, seen, pair);
      }
      if (!modified) {
        if (row < unmasked_begin || unmasked_end - row < kTileN)
          make_weights<true>(product, problem.scale, lse, seen);
        else
          make_weights<false>(product, problem.scale, lse, seen);
        store_weights<kLdStrip>(s_strip.in_loop.p[0], s_strip.in_loop.factors[kWeights][0], product,
                                places);
      }
    }

    __syncthreads();  // SAFETY: P is written.
    if (role == kGradients)
      store_score_gradients<Call, kLdStrip>(
          s_strip.in_loop.factors[kGradients][0], s_strip.in_loop.p[0], product, places, kept,
          [&](int n, int e) { return s.delta[stage][n * kFragment + places.column(e)]; });
    __syncwarp();  // SAFETY: the warp's own factors are written.
    multiply_add<Config::kTileFragments, kLdStrip, kLdTile>(total, s_strip.in_loop.factors[role][0],
                                                            role == kWeights ? s_d_o : s_q);
    head = next_head;
  }

  __syncthreads();  // SAFETY: all warps have read P and dS before rows of dK and dV overwrite them.
  if (role == kGradients) multiply_by(total, problem.scale);
  const int64_t strip_key = strip * kFragment;
  const TensorView& result = role == kWeights ? problem.dv : problem.dk;
  constexpr int kColumns = Config::kHeadDim % kTileN == 0 ? kTileN : 32;
  device::store_rows<kColumns, kLdStrip>(
      s_strip.staging[role][0], lane, total, result.row<Element>(b, head_kv, key_token + strip_key),
      result.row_stride, num_keys - strip_key, role == kWeights ? dim_v : head_dim, vector_access);
}

}  // namespace cuflash::backward_wmma
