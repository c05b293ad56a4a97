// Backward attention on the CUDA cores: exact, all arithmetic in fp32, gradients bitwise equal from run to run. Any
// GPU, dtype, strides, mask and length; head_dim and head_dim_v up to the bucket, padded with zeros.
//
// Both kernels are templates of their Call: a Problem, or a FullProblem, which has sequences of their own lengths and
// places, modified scores, dropout and further outputs (attention/tile_gradients.hpp).
//
// Two launches, both of the form of the forward kernel: a block keeps a tile of rows in shared memory, the other side
// passes through it tile by tile, and the threads of a warp form a grid of 4 x 8 over each tile of scores
// (device/warp_grid.hpp).
//
//   dq_kernel   keeps Q and dO, passes over keys:      delta = rowsum(O dO)                     to the workspace
//                 dP = dO V^T, P = exp(Q K^T - lse), dS = P (dP - delta), dQ += dS K            3 products
//   dkv_kernel  keeps K and V, passes over query rows of all heads of the group:
//                 P^T = exp(K Q^T - lse), dV += P^T dO, dP^T = V dO^T, dS^T, dK += dS^T Q       4 products
//
// Seven products instead of the five that one pass would need, but no sum is shared between blocks: neither atomics nor
// a workspace for dQ, and one result. Rows of P^T are rows of dV, so that neither product needs a transpose.
//
//              tile j                                                              | tile j + 1
//   dq copies  [ V(j) ][ K(j)    ]                                                 |[ V(j+1) ...
//      threads          dP        S, P, dS, to shared over V(j)   dQ += dS K(j)
//      barriers        ^ V there ^ K there, V free               (of the warp)    ^ K and dS are free
//   dkv copies [ Q(j) ][ dO(j)           ]                                         |[ Q(j+1) ...
//      threads          S, P, to shared   dV += P dO(j), dP, dS over P, dK += dS Q(j)
//      barriers        ^ Q there         ^ dO there          (of the warp)         ^ Q and dO are free
//
// Gradients of each tile are summed by themselves and then added: one sum over a long sequence would drift.
//
// Shared memory in bytes, for head_dim 64:
//   dq   q, d_o [64][64 + 4] fp32  34,816    k [32][64 + 4]         8,704    v / d_s   [64][32 + 8]  10,240
//   dkv  k, v   [64][64 + 4] fp32  34,816    q, d_o [32][64 + 4]   17,408    weights   [64][32 + 8]  10,240
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/columns.hpp"
#include "attention/reference.hpp"
#include "attention/tile_gradients.hpp"
#include "backward/scalar/config.hpp"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/load_tile_f32.cuh"
#include "device/once_per_device.hpp"
#include "device/register_tile.cuh"
#include "device/unpack.cuh"

namespace cuflash::backward_scalar {

namespace ptx = device::ptx;
using device::WarpGrid;

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;

// ---- what both passes do --------------------------------------------------------------------------

// Where a thread stands in its block.
template <class Config>
struct Place {
  WarpGrid thread;
  int first_row;  // its rows of the tile are first_row + 4 i

  __device__ Place()
      : thread(threadIdx.x % 32),
        first_row(static_cast<int>(threadIdx.x / 32) * Config::kWarpRows + thread.row) {}
  __device__ static int row_step(int i) { return i * WarpGrid::kRows; }
  __device__ int column(int j) const { return thread.column + j * WarpGrid::kColumns; }
  __device__ int channel(int g) const { return 4 * (thread.column + g * WarpGrid::kColumns); }
};

template <class Config>
using Gradient = float[Config::kThreadRows][Config::kThreadGroups][4];
template <class Config>
using Scores = float[Config::kThreadRows][Config::kThreadColumns];

// Writes the thread's elements of a tile of weights.
template <class Config>
__device__ void store_weights(float (&s_weights)[Config::kTileM][Config::kLdWeights],
                              const Place<Config>& place, const Scores<Config>& x) {
#pragma unroll
  for (int i = 0; i < Config::kThreadRows; ++i)
#pragma unroll
    for (int j = 0; j < Config::kThreadColumns; ++j)
      s_weights[place.first_row + place.row_step(i)][place.column(j)] = x[i][j];
}

// gradient += weights * values, for a tile.
template <class Config>
__device__ void add_products(Gradient<Config>& gradient, const Place<Config>& place,
                             const float (&s_weights)[Config::kTileM][Config::kLdWeights],
                             const float (&s_values)[Config::kTileN][Config::kLd]) {
#pragma unroll
  for (int first = 0; first < Config::kThreadGroups; first += Config::kPassGroups) {
    float sum[Config::kThreadRows][Config::kPassGroups][4] = {};
    device::multiply_columns<Config::kTileN, Config::kLdWeights, Config::kLd>(
        sum, &s_weights[place.first_row][0], &s_values[0][place.channel(first)]);
#pragma unroll
    for (int i = 0; i < Config::kThreadRows; ++i)
#pragma unroll
      for (int g = 0; g < Config::kPassGroups; ++g)
#pragma unroll
        for (int e = 0; e < 4; ++e) gradient[i][first + g][e] += sum[i][g][e];
  }
}

// P of a score, and dS. A weight that is 0 has a gradient of 0, whatever its row or key holds: that covers all that
// the mask hides, where LSE may be -inf and delta NaN.
__device__ __forceinline__ float weight_of(float scale, float product, float lse) {
  return expf(rounded_product(scale, product) - lse);
}
__device__ __forceinline__ float weight_of(const PairScore& pair, float lse) {
  return pair.score == negative_infinity() ? 0.0f : expf(pair.score - lse);
}
__device__ __forceinline__ float score_gradient(float weight, float d_p, float delta) {
  return weight == 0.0f ? 0.0f : weight * (d_p - delta);
}

// Rounds and writes the thread's elements of a gradient to `rows` rows, or adds them to what is there.
template <class Config, class Element>
__device__ void store_gradient(const Gradient<Config>& gradient, float factor,
                               const Place<Config>& place, Element* g_tile, int64_t row_stride,
                               int64_t rows, int head_dim, bool vector_access,
                               bool accumulate = false) {
#pragma unroll
  for (int i = 0; i < Config::kThreadRows; ++i) {
    const int row = place.first_row + place.row_step(i);
    if (row >= rows) continue;
#pragma unroll
    for (int g = 0; g < Config::kThreadGroups; ++g) {
      const int channel = place.channel(g);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = gradient[i][g][e] * factor;
        if (accumulate && channel + e < head_dim)
          x[e] += device::to_fp32(g_tile[row * row_stride + channel + e]);
      }
      device::store4(g_tile + row * row_stride + channel, head_dim - channel, vector_access, x);
    }
  }
}

// The same to rows of a head from `token` on; fp32 ones may be written where Element is not.
template <class Element, class Config>
__device__ void store_gradient(const Problem&, const Gradient<Config>& gradient, float factor,
                               const Place<Config>& place, const TensorView& tensor, int64_t b,
                               int64_t head, int64_t token, int64_t rows, int dim,
                               bool vector_access) {
  store_gradient<Config>(gradient, factor, place, tensor.row<Element>(b, head, token),
                         tensor.row_stride, rows, dim, vector_access);
}
template <class Element, class Config>
__device__ void store_gradient(const FullProblem& problem, const Gradient<Config>& gradient,
                               float factor, const Place<Config>& place, const TensorView& tensor,
                               int64_t b, int64_t head, int64_t token, int64_t rows, int dim,
                               bool vector_access) {
  with_row<Element>(tensor, b, head, token, [&](auto* g_tile) {
    store_gradient<Config>(gradient, factor, place, g_tile, tensor.row_stride, rows, dim,
                           vector_access, problem.f.accumulate_gradients);
  });
}

// ---- dQ and delta ---------------------------------------------------------------------------------

// delta of the thread's row: O from global, dO from shared memory; the same bits in all eight threads of the row.
template <class Config, class Element>
__device__ float row_delta(const Element* g_o_row, const float* s_d_o_row,
                           const Place<Config>& place, int dim, bool vector_access) {
  float sum = 0;
#pragma unroll
  for (int g = 0; g < Config::kThreadGroups; ++g) {
    const int channel = place.channel(g);
    float o[4], d_o[4];
    device::load4(g_o_row + channel, dim - channel, vector_access, o);
    device::load_shared4(s_d_o_row + channel, d_o);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum = fmaf(o[e], d_o[e], sum);
  }
#pragma unroll
  for (const unsigned bit : {1u, 8u, 16u}) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  return sum;
}

template <class Element, class Config>
__device__ float row_delta(const Problem& problem, int64_t b, int64_t head, int64_t token,
                           const float* s_d_o_row, const Place<Config>& place, int dim,
                           bool vector_access) {
  return row_delta(problem.o.row<const Element>(b, head, token), s_d_o_row, place, dim,
                   vector_access);
}
// O may be fp32 where Element is not, and is not read where delta is given.
template <class Element, class Config>
__device__ float row_delta(const FullProblem& problem, int64_t b, int64_t head, int64_t token,
                           const float* s_d_o_row, const Place<Config>& place, int dim,
                           bool vector_access) {
  float delta = 0;
  if (!delta_is_given(problem))
    with_row<Element>(problem.o, b, head, token, [&](const auto* g_o_row) {
      delta = row_delta(g_o_row, s_d_o_row, place, dim, vector_access);
    });
  return delta;
}

template <class Element, class Config, class Call>
__device__ void dq_block(const Call& problem, float* g_delta, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kThreadRows = Config::kThreadRows;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<QueryStorage<Config>*>(s_memory);
  const Place<Config> place;

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
  const int64_t tile_row = int64_t{m_tile} * Config::kTileM;
  if (kHasFeatures<Call> && tile_row >= sequence.len_q) return;  // others are longer
  const int64_t rows = min64(sequence.len_q - tile_row, Config::kTileM);
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
  const auto load_rows = [&](float* s_tile, const TensorView& tensor, int dim) {
    device::load_tile_f32<Config::kThreads, Config::kTileM, Config::kHeadDim, Config::kLd>(
        s_tile, tensor.row<const Element>(b, head, first_token), tensor.row_stride,
        static_cast<int>(rows), dim, vector_access);
  };
  const auto load_keys = [&](float* s_tile, const Element* g_keys, int64_t row_stride, int key,
                             int dim) {
    device::load_tile_f32<Config::kThreads, kTileN, Config::kHeadDim, Config::kLd>(
        s_tile, g_keys + key * row_stride, row_stride, num_keys - key, dim, vector_access);
  };

  load_rows(s.d_o[0], problem.d_o, dim_v);
  load_rows(s.q[0], problem.q, head_dim);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();  // SAFETY: Q and dO have landed.
  float* g_tile_delta = g_delta + first_delta(problem, sequence, head) + tile_row;
  float lse[kThreadRows] = {}, delta[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int tile_i = place.first_row + place.row_step(i);
    const bool valid = tile_i < rows;
    // Rows past the sequence's end read row 0 of the tile, which is there, and keep nothing of it.
    const int64_t token = valid ? first_token + tile_i : first_token;
    delta[i] =
        row_delta<Element>(problem, b, head, token, s.d_o[tile_i], place, dim_v, vector_access);
    if (!valid) continue;
    const bool writes = place.thread.column == 0;
    lse[i] = *problem.lse.at(b, head, token);
    delta[i] = reduced_delta(problem, sequence, head, token, delta[i], writes);
    if (writes) g_tile_delta[tile_i] = delta[i];
  }

  Gradient<Config> dq = {};
  // Counted down: num_keys may be 2^31 - 1, where a key counted up would overflow.
  for (int keys_left = num_keys; keys_left > 0; keys_left -= kTileN) {
    const int key = num_keys - keys_left;
    load_keys(s.v[0], g_v, problem.v.row_stride, key, dim_v);
    ptx::cp_async_commit();
    load_keys(s.k[0], g_k, problem.k.row_stride, key, head_dim);
    ptx::cp_async_commit();

    ptx::cp_async_wait<1>();
    __syncthreads();  // SAFETY: this V has landed.
    Scores<Config> d_p = {}, d_s = {};
    device::multiply_rows<Config::kHeadDim, Config::kLd>(d_p, &s.d_o[place.first_row][0],
                                                         &s.v[place.thread.column][0]);
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: this K has landed; all warps have read V before dS overwrites it.
    device::multiply_rows<Config::kHeadDim, Config::kLd>(d_s, &s.q[place.first_row][0],
                                                         &s.k[place.thread.column][0]);
    const auto seen_by = [&](int64_t row) {
      return columns_of<kTileN>(visible_keys(problem.mask, shift, row, sequence.len_k),
                                keys.any.begin + key);
    };
    if (modifies_pairs(problem)) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const int tile_i = place.first_row + place.row_step(i);
        const int64_t row = tile_row + tile_i;
        const Columns seen = tile_i < rows ? seen_by(row) : Columns{0, 0};
#pragma unroll
        for (int j = 0; j < Config::kThreadColumns; ++j) {
          float weight = 0;
          if (seen.contain(place.column(j))) {
            const int64_t seen_key = keys.any.begin + key + place.column(j);
            const PairScore pair =
                pair_score(problem, {b, head, row, row + shift}, seen_key, d_s[i][j]);
            weight = weight_of(pair, lse[i]) * pair.derivative;
            d_p[i][j] *= pair.kept;
          }
          d_s[i][j] = weight;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < Config::kThreadColumns; ++j)
          d_s[i][j] = weight_of(problem.scale, d_s[i][j], lse[i]);
      if (key < unmasked_begin || unmasked_end - key < kTileN) {
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          const Columns seen = seen_by(tile_row + place.first_row + place.row_step(i));
#pragma unroll
          for (int j = 0; j < Config::kThreadColumns; ++j)
            if (!seen.contain(place.column(j))) d_s[i][j] = 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int j = 0; j < Config::kThreadColumns; ++j)
        d_s[i][j] = score_gradient(d_s[i][j], d_p[i][j], delta[i]);
    store_weights(s.d_s, place, d_s);
    __syncwarp();  // SAFETY: the warp's rows of dS, which no other warp reads, are written.
    add_products<Config>(dq, place, s.d_s, s.k);
    __syncthreads();  // SAFETY: all warps have read K and dS before the next tile overwrites them.
  }
  store_gradient<Element>(problem, dq, problem.scale, place, problem.dq, b, head, first_token, rows,
                          head_dim, vector_access);
}

// ---- dK and dV ------------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__device__ void dkv_block(const Call& problem, const float* g_delta, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kThreadRows = Config::kThreadRows;
  constexpr int kThreadColumns = Config::kThreadColumns;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<KeyStorage<Config>*>(s_memory);
  const Place<Config> place;

  // Early keys first: under a causal mask the most rows see them.
  const auto heads_kv = static_cast<uint32_t>(problem.heads_kv);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_kv;
  const uint32_t tile = blockIdx.x / heads;
  const uint32_t b = blockIdx.x % heads / heads_kv;
  const uint32_t head_kv = blockIdx.x % heads % heads_kv;
  const int head_dim = static_cast<int>(problem.head_dim);
  const int dim_v = static_cast<int>(value_dim(problem));

  const Sequence sequence = backward_sequence(problem, b);
  const int64_t tile_key = int64_t{tile} * Config::kTileM;
  if (kHasFeatures<Call> && tile_key >= sequence.len_k) return;  // others are longer
  const int64_t num_keys = min64(sequence.len_k - tile_key, Config::kTileM);
  const int64_t shift = centre_shift(problem.mask, b, sequence.len_q, sequence.len_k);
  const TileRange rows =
      tile_rows(problem.mask, shift, tile_key, tile_key + num_keys, sequence.len_q);
  // From here on rows are counted from the first that sees any key of the tile.
  const auto num_rows = static_cast<int>(rows.any.end - rows.any.begin);
  const auto unmasked_begin = static_cast<int>(rows.all.begin - rows.any.begin);
  const auto unmasked_end = static_cast<int>(rows.all.end - rows.any.begin);
  const int64_t key_token = sequence.first_k + tile_key;
  const int64_t first_token = sequence.first_q + rows.any.begin;
  const auto load_keys = [&](float* s_tile, const TensorView& tensor, int dim) {
    device::load_tile_f32<Config::kThreads, Config::kTileM, Config::kHeadDim, Config::kLd>(
        s_tile, tensor.row<const Element>(b, head_kv, key_token), tensor.row_stride,
        static_cast<int>(num_keys), dim, vector_access);
  };
  const auto load_rows = [&](float* s_tile, const TensorView& tensor, int64_t head, int row,
                             int dim) {
    device::load_tile_f32<Config::kThreads, kTileN, Config::kHeadDim, Config::kLd>(
        s_tile, tensor.row<const Element>(b, head, first_token + row), tensor.row_stride,
        num_rows - row, dim, vector_access);
  };

  load_keys(s.k[0], problem.k, head_dim);  // they join the first group of the loop
  load_keys(s.v[0], problem.v, dim_v);
  const float kept = kept_factor(problem);
  Gradient<Config> dk = {}, dv = {};
  const int64_t group = problem.heads_q / problem.heads_kv;
  for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    const float* g_head_delta = g_delta + first_delta(problem, sequence, head) + rows.any.begin;
    // Counted down: num_rows may be 2^31 - 1, where a row counted up would overflow.
    for (int rows_left = num_rows; rows_left > 0; rows_left -= kTileN) {
      const int row = num_rows - rows_left;
      load_rows(s.q[0], problem.q, head, row, head_dim);
      ptx::cp_async_commit();
      load_rows(s.d_o[0], problem.d_o, head, row, dim_v);
      ptx::cp_async_commit();
      float lse[kThreadColumns] = {}, delta[kThreadColumns] = {};
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) {
        const int column = place.column(j);
        if (column >= rows_left) continue;
        lse[j] = *problem.lse.at(b, head, first_token + row + column);
        delta[j] = g_head_delta[row + column];
      }

      ptx::cp_async_wait<1>();
      __syncthreads();  // SAFETY: this Q has landed, and K and V before the first.
      Scores<Config> p = {};
      device::multiply_rows<Config::kHeadDim, Config::kLd>(p, &s.k[place.first_row][0],
                                                           &s.q[place.thread.column][0]);
      const auto seen_by = [&](int64_t key) {
        return columns_of<kTileN>(visible_rows(problem.mask, shift, key, sequence.len_q),
                                  rows.any.begin + row);
      };
      if (modifies_pairs(problem)) {
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          const int tile_i = place.first_row + place.row_step(i);
          const int64_t key = tile_key + tile_i;
          const Columns seen = tile_i < num_keys ? seen_by(key) : Columns{0, 0};
#pragma unroll
          for (int j = 0; j < kThreadColumns; ++j) {
            float weight = 0, sloped = 0;  // P * kept for dV, P * derivative for dS
            if (seen.contain(place.column(j))) {
              const int64_t query = rows.any.begin + row + place.column(j);
              const PairScore pair =
                  pair_score(problem, {b, head, query, query + shift}, key, p[i][j]);
              const float p_of_pair = weight_of(pair, lse[j]);
              weight = p_of_pair * pair.kept, sloped = p_of_pair * pair.derivative;
            }
            s.weights[tile_i][place.column(j)] = weight;
            p[i][j] = sloped;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
          for (int j = 0; j < kThreadColumns; ++j)
            p[i][j] = weight_of(problem.scale, p[i][j], lse[j]);
        if (row < unmasked_begin || unmasked_end - row < kTileN) {
#pragma unroll
          for (int i = 0; i < kThreadRows; ++i) {
            const Columns seen = seen_by(tile_key + place.first_row + place.row_step(i));
#pragma unroll
            for (int j = 0; j < kThreadColumns; ++j)
              if (!seen.contain(place.column(j))) p[i][j] = 0;
          }
        }
        store_weights(s.weights, place, p);
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // SAFETY: this dO has landed; P is written.
      add_products<Config>(dv, place, s.weights, s.d_o);

      Scores<Config> d_p = {};
      device::multiply_rows<Config::kHeadDim, Config::kLd>(d_p, &s.v[place.first_row][0],
                                                           &s.d_o[place.thread.column][0]);
      __syncwarp();  // SAFETY: the warp has read its rows of P, which no other warp reads.
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < kThreadColumns; ++j) {
          float& weight = s.weights[place.first_row + place.row_step(i)][place.column(j)];
          if constexpr (kHasFeatures<Call>)  // P * derivative; the weight is 0 where it was dropped
            weight = score_gradient(p[i][j], weight == 0.0f ? 0.0f : kept * d_p[i][j], delta[j]);
          else
            weight = score_gradient(weight, d_p[i][j], delta[j]);
        }
      __syncwarp();  // SAFETY: its rows of dS are written.
      add_products<Config>(dk, place, s.weights, s.q);
      __syncthreads();  // SAFETY: all warps have read Q and dO before the next overwrite them.
    }
  }
  ptx::cp_async_wait<0>();  // K and V, where no row sees them: a thread leaves no copy behind
  store_gradient<Element>(problem, dk, problem.scale, place, problem.dk, b, head_kv, key_token,
                          num_keys, head_dim, vector_access);
  store_gradient<Element>(problem, dv, 1.0f, place, problem.dv, b, head_kv, key_token, num_keys,
                          dim_v, vector_access);
}

// ---- kernels --------------------------------------------------------------------------------------

template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(QueryConfig<kHeadDim>::kThreads,
                                  QueryConfig<kHeadDim>::kMinBlocks)
    dq_kernel(const __grid_constant__ Call problem, float* g_delta, bool vector_access) {
  dq_block<Element, QueryConfig<kHeadDim>>(problem, g_delta, vector_access);
}

template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(KeyConfig<kHeadDim>::kThreads, KeyConfig<kHeadDim>::kMinBlocks)
    dkv_kernel(const __grid_constant__ Call problem, const float* g_delta, bool vector_access) {
  dkv_block<Element, KeyConfig<kHeadDim>>(problem, g_delta, vector_access);
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, int kHeadDim, class Call>
Status load_kernels(const char* name) {
  CUFLASH_TRY(device::load_kernel(dq_kernel<Element, kHeadDim, Call>, name, kQueryBytes<kHeadDim>));
  return device::load_kernel(dkv_kernel<Element, kHeadDim, Call>, name, kKeyBytes<kHeadDim>);
}

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY((load_kernels<Element, kHeadDim, Problem>(name)));
    return load_kernels<Element, kHeadDim, FullProblem>(name);
  });
}

template <class Element, int kHeadDim, class Call>
Status launch_passes(const char* name, const Call& problem, const LaunchContext& context) {
  using Queries = QueryConfig<kHeadDim>;
  using Keys = KeyConfig<kHeadDim>;
  const int64_t query_tiles = ceil_div(problem.len_q, Queries::kTileM);
  const int64_t key_tiles = ceil_div(problem.len_k, Keys::kTileM);
  const bool vector_access =
      problem.aligned16 && problem.head_dim % 4 == 0 && value_dim(problem) % 4 == 0;
  auto* g_delta = static_cast<float*>(context.workspace);
  CUFLASH_TRY(device::launch(
      dq_kernel<Element, kHeadDim, Call>, name,
      {query_tiles * problem.batch * problem.heads_q, Queries::kThreads, kQueryBytes<kHeadDim>},
      context.stream, problem, g_delta, vector_access));
  return device::launch(
      dkv_kernel<Element, kHeadDim, Call>, name,
      {key_tiles * problem.batch * problem.heads_kv, Keys::kThreads, kKeyBytes<kHeadDim>},
      context.stream, problem, g_delta, vector_access);
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const LaunchContext& context) {
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  if (problem.features == nullptr) return launch_passes<Element, kHeadDim>(name, problem, context);
  return launch_passes<Element, kHeadDim>(name, FullProblem(problem), context);
}

}  // namespace cuflash::backward_scalar
