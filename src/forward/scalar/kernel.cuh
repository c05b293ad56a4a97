// Forward attention on the CUDA cores: exact, one pass over the keys, all arithmetic in fp32. Any GPU, dtype, strides,
// mask and length; head_dim up to the bucket, padded with zeros.
//
// One block computes one tile of O: kTileM query rows of one head, Q in shared memory from start to end, K and V
// passing through it tile by tile. A warp owns kWarpRows of the rows; its threads form a grid of 4 x 8 over
// the tile, and each keeps its scores, then its part of O, in registers (device/warp_grid.hpp).
//
//            key tile j                                                        | key tile j + 1
//   copies   [ K(j) ][ V(j)                         ]                          |[ K(j+1) ...
//   threads           S = Q K(j)^T   softmax, by rows   P to shared   O += P V(j)
//   barriers         ^ K(j) is there               ^ K(j) is free  ^ V(j) is there  ^ P and V(j) are free
//
// The eight threads of a row exchange its maximum by shuffles. P goes through shared memory, over K, since the second
// product needs whole rows of it. O of each tile is summed by itself and then added: one sum over a
// long row would drift.
//
// Shared memory, for head_dim 64 (36 KB at 32, 58 KB at 128, 49 KB at 256):
//   q            [64][64 + 4] fp32   17,408 bytes
//   k / weights  [64][64 + 8] fp32   18,432
//   v            [64][64 + 4] fp32   17,408
//
// Limits: the multiply-adds of 8 warps on an SM hide all else; K(j + 1) waits for P(j): see README.md.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/columns.hpp"
#include "attention/tile_rows.hpp"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/load_tile_f32.cuh"
#include "device/once_per_device.hpp"
#include "device/register_tile.cuh"
#include "forward/scalar/config.hpp"

namespace cuflash::forward_scalar {

namespace ptx = device::ptx;
using device::WarpGrid;

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;

// ---- softmax --------------------------------------------------------------------------------------

// Over the eight threads of a row, whose lanes differ in these bits: the same bits in each.
template <class F>
__device__ float reduce_row(float x, F f) {
#pragma unroll
  for (const unsigned bit : {1u, 8u, 16u}) x = f(x, __shfl_xor_sync(0xffffffffu, x, bit));
  return x;
}

// The running softmax of one row: its maximum, the same in all its threads, and the sum of the weights that this
// thread computed.
struct RowState {
  float m = negative_infinity();
  float l = 0;

  // Turns this thread's scores of a tile into weights exp(score - m) and returns the factor for what was
  // accumulated before. expf, not 2^x on the special-function unit: fp32 results are held to the error of fp32,
  // and a score costs 128 multiply-adds at head_dim 64, an expf ten instructions.
  template <int kCount>
  __device__ float update(float (&scores)[kCount]) {
    float m_new = scores[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) m_new = fmaxf(m_new, scores[j]);
    m_new = fmaxf(m, reduce_row(m_new, [](float a, float b) { return fmaxf(a, b); }));
    // Before the first key that the row sees all weights are exp(-inf), which must not become -inf - -inf.
    const float base = m_new == negative_infinity() ? 0.0f : m_new;
    const float rescale = expf(m - base);
    float sum = 0;  // of this tile alone, or it would drift
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      scores[j] = expf(scores[j] - base);
      sum += scores[j];
    }
    m = m_new;
    l = l * rescale + sum;
    return rescale;
  }
};

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__device__ void forward_block(const Call& problem, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kThreadRows = Config::kThreadRows;
  constexpr int kThreadKeys = Config::kThreadKeys;
  constexpr int kThreadGroups = Config::kThreadGroups;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<SharedStorage<Config>*>(s_memory);
  const WarpGrid thread(threadIdx.x % 32);
  // This thread's rows of the tile are first_row + 4 i.
  const int first_row = static_cast<int>(threadIdx.x / 32) * Config::kWarpRows + thread.row;

  // Late rows first: under a causal mask they see the most keys, and the short blocks fill the end.
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t m_tile = gridDim.x / heads - 1 - blockIdx.x / heads;
  const uint32_t b = blockIdx.x % heads / heads_q;
  const uint32_t head = blockIdx.x % heads % heads_q;
  const int64_t head_kv = problem.head_kv(head);
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = kHasFeatures<Call> ? static_cast<int>(problem.head_dim_v) : head_dim;

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
  const auto load_keys = [&](float* s_tile, const Element* g_keys, int64_t row_stride, int channels,
                             int key) {
    device::load_tile_f32<Config::kThreads, kTileN, Config::kHeadDim, Config::kLd>(
        s_tile, g_keys + key * row_stride, row_stride, num_keys - key, channels, vector_access);
  };

  device::load_tile_f32<Config::kThreads, Config::kTileM, Config::kHeadDim, Config::kLd>(
      s.q[0], g_q, problem.q.row_stride,
      static_cast<int>(min64(sequence.len_q - tile_row, Config::kTileM)), head_dim, vector_access);
  float o[kThreadRows][kThreadGroups][4] = {};
  RowState state[kThreadRows];
  if constexpr (kHasFeatures<Call>) {
    const float sink = sink_of(problem, head);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      state[i].m = sink;
      state[i].l = sink != negative_infinity() && thread.column == 0 ? 1.0f : 0.0f;
    }
  }

  // Counted down: num_keys may be 2^31 - 1, where a key counted up would overflow.
  for (int keys_left = num_keys; keys_left > 0; keys_left -= kTileN) {
    const int key = num_keys - keys_left;
    load_keys(s.k[0], g_k, problem.k.row_stride, head_dim, key);
    ptx::cp_async_commit();
    load_keys(s.v[0], g_v, problem.v.row_stride, head_dim_v, key);
    ptx::cp_async_commit();

    ptx::cp_async_wait<1>();
    __syncthreads();  // SAFETY: this K has landed, and Q before the first.
    float p[kThreadRows][kThreadKeys] = {};
    device::multiply_rows<Config::kHeadDim, Config::kLd>(p, &s.q[first_row][0],
                                                         &s.k[thread.column][0]);
    const auto row_of = [&](int i) { return tile_row + first_row + i * WarpGrid::kRows; };
    const auto seen_by = [&](int64_t row) {
      return columns_of<kTileN>(visible_keys(problem.mask, shift, row, sequence.len_k),
                                keys.any.begin + key);
    };
    // This thread's part of s.weights. What follows each store to it reads back what the thread itself wrote.
    const auto stored = [&](int i, int j) -> float& {
      return s.weights[first_row + i * WarpGrid::kRows][thread.column + j * WarpGrid::kColumns];
    };
    const auto store_p = [&] {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < kThreadKeys; ++j) stored(i, j) = p[i][j];
    };
    if (modifies_scores(problem)) {
      if constexpr (kHasFeatures<Call>) {
        __syncthreads();  // SAFETY: all warps have read this K before scores overwrite it.
        store_p();
        // Rolled, by way of shared memory: unrolled it takes the compiler three times as long as all else.
#pragma unroll 1
        for (int i = 0; i < kThreadRows; ++i) {
          const int64_t row = row_of(i);
          const Columns seen = row < sequence.len_q ? seen_by(row) : Columns{0, 0};
          const ModifiedRow modified(problem, sequence, shift, head, row, keys.any.begin + key);
#pragma unroll 1
          for (int j = 0; j < kThreadKeys; ++j) {
            const int column = thread.column + j * WarpGrid::kColumns;
            float& x = stored(i, j);
            x = seen.contain(column) ? modified.score(x, column) : negative_infinity();
          }
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
          for (int j = 0; j < kThreadKeys; ++j) p[i][j] = stored(i, j);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int j = 0; j < kThreadKeys; ++j) p[i][j] = rounded_product(problem.scale, p[i][j]);
      if (key < unmasked_begin || unmasked_end - key < kTileN) {
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          const Columns seen = seen_by(row_of(i));
#pragma unroll
          for (int j = 0; j < kThreadKeys; ++j)
            if (!seen.contain(thread.column + j * WarpGrid::kColumns))
              p[i][j] = negative_infinity();
        }
      }
    }
    float rescale[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) rescale[i] = state[i].update(p[i]);

    __syncthreads();  // SAFETY: all warps have read this K before P overwrites it.
    store_p();
    if constexpr (kHasFeatures<Call>) {
      if (problem.f.dropout.p > 0) {
#pragma unroll 1
        for (int i = 0; i < kThreadRows; ++i) {
          const ModifiedRow modified(problem, sequence, shift, head, row_of(i),
                                     keys.any.begin + key);
#pragma unroll 1
          for (int j = 0; j < kThreadKeys; ++j)
            if (!modified.keeps(thread.column + j * WarpGrid::kColumns)) stored(i, j) = 0;
        }
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // SAFETY: this V has landed; P is written.
#pragma unroll
    for (int first = 0; first < kThreadGroups; first += Config::kPassGroups) {
      float tile_o[kThreadRows][Config::kPassGroups][4] = {};
      device::multiply_columns<kTileN, Config::kLdWeights, Config::kLd>(
          tile_o, &s.weights[first_row][0],
          &s.v[0][4 * (thread.column + first * WarpGrid::kColumns)]);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int g = 0; g < Config::kPassGroups; ++g)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            o[i][first + g][e] = fmaf(o[i][first + g][e], rescale[i], tile_o[i][g][e]);
    }
    __syncthreads();  // SAFETY: all warps have read P and V before the next tile overwrites them.
  }
  ptx::cp_async_wait<0>();  // Q, where there is no key: a thread leaves no copy behind

#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const float l = reduce_row(state[i].l, [](float a, float b) { return a + b; });
    const int64_t row = tile_row + first_row + i * WarpGrid::kRows;
    if (row >= sequence.len_q) continue;
    const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
    if (problem.lse.data != nullptr && thread.column == 0)
      *problem.lse.at(b, head, sequence.first_q + row) =
          empty ? negative_infinity() : state[i].m + logf(l);
    const float inverse_sum = empty ? 0.0f : factor_of_outputs(problem) / l;
#pragma unroll
    for (int g = 0; g < kThreadGroups; ++g) {
      const int channel = 4 * (thread.column + g * WarpGrid::kColumns);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = o[i][g][e] * inverse_sum;
      device::store4(problem.o.template row<Element>(b, head, sequence.first_q + row) + channel,
                     head_dim_v - channel, vector_access, x);
    }
  }
}

// With features there may be fewer blocks on an SM: scores in the making take registers.
template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(KernelConfig<kHeadDim>::kThreads,
                                  kHasFeatures<Call> ? 1 : KernelConfig<kHeadDim>::kMinBlocks)
    forward_kernel(const __grid_constant__ Call problem, bool vector_access) {
  forward_block<Element, KernelConfig<kHeadDim>>(problem, vector_access);
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
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  const int64_t m_tiles = ceil_div(problem.len_q, Config::kTileM);
  const bool vector_access =
      problem.aligned16 && problem.head_dim % 4 == 0 && problem.head_dim_v % 4 == 0;
  const device::LaunchShape shape{m_tiles * problem.batch * problem.heads_q, Config::kThreads,
                                  kSharedBytes<kHeadDim>};
  if (problem.features != nullptr)
    return device::launch(forward_kernel<Element, kHeadDim, FullProblem>, name, shape,
                          context.stream, FullProblem(problem), vector_access);
  return device::launch(forward_kernel<Element, kHeadDim, Problem>, name, shape, context.stream,
                        problem, vector_access);
}

}  // namespace cuflash::forward_scalar
