// Forward attention for Hopper (sm_90a): exact, one pass over the keys, fp32 sums. Any mask, lengths and strides of 16
// bytes; head_dim up to the bucket, padded with zeros.
//
// A block computes tiles of O, kConsumers x 64 query rows of one head each, one after the other, with specialised
// warpgroups:
//
//   producer, one thread    TMA loads of each tile's Q, then of its K and V tiles, as fast as places come free
//   consumers, 64 rows each S = Q K^T from shared memory, softmax in registers, O += P V with P from registers
//
// Several consumers take turns: while the products of one run, the others exponentiate. While they write O the producer
// loads the next tile.
//
//   tensor cores  | O += P(j-1) V(j-1), S(j) = Q K(j)^T of one   | the same of the next            |
//   that consumer | waits                                        | exp, sum and round P(j)         | waits
//
// Products and arithmetic share the register file: an instruction of a consumer takes about a cycle from the products of
// another (docs/log/0016). So what counts is how few there are, and there is no look for the maximum of each tile: P is
// taken under that of earlier keys, as long as its sums say that it may be.
//
// Shared memory: Q, kStages of K and of V, and O, in panels of 64 columns (device/wgmma_tile.hpp); 192 KB at head_dim 128,
// 224 KB at 256, where O takes the place of Q.
#pragma once

#include <cstddef>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/base2_softmax.cuh"
#include "attention/key_range.hpp"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/once_per_device.hpp"
#include "device/packed16.cuh"
#include "device/ptx/ex2.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tensor_map.hpp"
#include "forward/wgmma/config.hpp"

namespace cuflash::forward_wgmma {

namespace ptx = device::ptx;

using f16 = __half;
using bf16 = __nv_bfloat16;

constexpr unsigned kFullWarp = 0xffffffffu;

struct TensorMaps {
  CUtensorMap q, k, v, o;
};

// Tiles of O in the order in which they are begun. Heads come in sections whose K and V fit L2 together; within a section
// late rows come first: under a causal mask they see the most keys.
struct TileOrder {
  uint32_t m_tiles, section_heads, tiles;
};

// Calls f(tile) for the tiles of one block. A round gives each block one tile of a section, in turn from the first block
// and from the last: who got the heaviest tile of one round gets the lightest of the next. Measured against a counter in
// global memory (docs/log/0014): as fast, and the order is the same in every run.
template <class F>
__device__ void for_each_tile(const TileOrder& order, F f) {
  const uint32_t blocks = gridDim.x, section_tiles = order.section_heads * order.m_tiles;
  uint32_t place = blockIdx.x;
  for (uint32_t first = 0; first < order.tiles; first += section_tiles) {
    const uint32_t count = min(section_tiles, order.tiles - first);
    for (uint32_t begin = 0, round = 0; begin < count; begin += blocks, ++round) {
      const uint32_t tile = begin + (round % 2 == 0 ? place : blocks - 1 - place);
      if (tile < count) f(first + tile);
    }
    place = (place + blocks - count % blocks) %
            blocks;  // the next section goes on where this one ended
  }
}

// ---- a tile's work --------------------------------------------------------------------------------

struct Work {
  int b, head, head_kv;
  int64_t tile_row;
  TileRange keys;
  int64_t shift;
  int num_tiles;  // of keys
};

template <class Config>
__device__ Work find_work(const Problem& problem, const TileOrder& order, uint32_t tile) {
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t section = tile / (order.m_tiles * order.section_heads);
  const uint32_t in_section = tile % (order.m_tiles * order.section_heads);
  const uint32_t first_head = section * order.section_heads;
  const uint32_t width = min(order.section_heads, heads - first_head);
  const uint32_t m_tile = order.m_tiles - 1 - in_section / width;
  const uint32_t head = first_head + in_section % width;

  Work work;
  work.b = static_cast<int>(head / heads_q);
  work.head = static_cast<int>(head % heads_q);
  work.head_kv = static_cast<int>(problem.head_kv(work.head));
  work.tile_row = int64_t{m_tile} * Config::kTileM;
  work.shift = centre_shift(problem.mask, work.b, problem.len_q, problem.len_k);
  work.keys = tile_keys(problem.mask, work.shift, work.tile_row,
                        min64(work.tile_row + Config::kTileM, problem.len_q), problem.len_k);
  work.num_tiles =
      static_cast<int>(ceil_div(work.keys.any.end - work.keys.any.begin, Config::kTileN));
  return work;
}

// ---- shared memory --------------------------------------------------------------------------------

// Places for tiles that one thread has filled by TMA and that one lane of each consumer warp releases. Tiles are
// counted from 0, over all tiles of O: tile n lies in place n % kPlaces, and its barriers are in phase n / kPlaces.
template <uint32_t kPlaces, uint32_t kTileBytes>
struct Ring {
  uint32_t s_tiles, s_full, s_free;  // shared addresses

  __device__ uint32_t tile(uint32_t n) const { return s_tiles + n % kPlaces * kTileBytes; }
  __device__ uint32_t full(uint32_t n) const { return s_full + n % kPlaces * 8; }
  __device__ uint32_t free(uint32_t n) const { return s_free + n % kPlaces * 8; }

  __device__ void init(uint32_t consumer_warps) const {
    for (uint32_t n = 0; n < kPlaces; ++n) {
      ptx::mbarrier_init(full(n), 1);
      ptx::mbarrier_init(free(n), consumer_warps);
    }
  }
  __device__ void wait_full(uint32_t n) const { ptx::mbarrier_wait(full(n), n / kPlaces % 2); }
  __device__ void release(uint32_t n) const { ptx::mbarrier_arrive(free(n)); }
  // Waits until the place is free, which all are at first, and announces the tile's bytes.
  __device__ void begin(uint32_t n) const {
    ptx::mbarrier_wait(free(n), (n / kPlaces + 1) % 2);
    ptx::mbarrier_arrive_expect(full(n), kTileBytes);
  }
};

template <class Config, class Element>
struct Shared {
  using Storage = SharedStorage<Config, Element>;
  using KvRing = Ring<Config::kStages, sizeof(typename Storage::KvTile)>;

  Ring<1, sizeof(typename Storage::QTile)> q;
  KvRing k, v;
  uint32_t s_o;

  // The base is the same in all lanes, and the compiler may know: addresses and descriptors then live in uniform
  // registers.
  __device__ explicit Shared(const void* memory)
      : Shared(__shfl_sync(kFullWarp, ptx::shared_address(memory), 0)) {}

 private:
#define CUFLASH_AT(member) (base + static_cast<uint32_t>(offsetof(Storage, member)))
  __device__ explicit Shared(uint32_t base)
      : q{CUFLASH_AT(q), CUFLASH_AT(q_full), CUFLASH_AT(q_free)},
        k{CUFLASH_AT(k), CUFLASH_AT(k_full), CUFLASH_AT(k_free)},
        v{CUFLASH_AT(v), CUFLASH_AT(v_full), CUFLASH_AT(v_free)},
        s_o(Config::kOInQ ? CUFLASH_AT(q) : CUFLASH_AT(o)) {}
#undef CUFLASH_AT
};

// ---- producer -------------------------------------------------------------------------------------

template <class Config, class Element>
__device__ void produce(const Shared<Config, Element>& shared, const Problem& problem,
                        const TensorMaps& maps, const TileOrder& order) {
  const auto load = [&](const auto& ring, uint32_t n, const CUtensorMap& map, int rows,
                        int64_t first_row, int head, int b) {
    ring.begin(n);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel)
      ptx::tma_load_4d(ring.tile(n) + panel * rows * device::kPanelRowBytes, map, ring.full(n),
                       panel * device::kPanelColumns, static_cast<int32_t>(first_row), head, b);
  };
  uint32_t q_tile = 0, kv_tile = 0;
  for_each_tile(order, [&](uint32_t tile) {
    const Work work = find_work<Config>(problem, order, tile);
    const auto load_keys = [&](const auto& ring, const CUtensorMap& map, int i) {
      load(ring, kv_tile + i, map, Config::kTileN,
           work.keys.any.begin + int64_t{i} * Config::kTileN, work.head_kv, work.b);
    };
    // The first K before Q, whose place may be free last.
    if (work.num_tiles > 0) load_keys(shared.k, maps.k, 0);
    load(shared.q, q_tile++, maps.q, Config::kTileM, work.tile_row, work.head, work.b);
    for (int i = 0; i < work.num_tiles; ++i) {
      if (i > 0) load_keys(shared.k, maps.k, i);
      load_keys(shared.v, maps.v, i);
    }
    kv_tile += work.num_tiles;
  });
}

// ---- consumer -------------------------------------------------------------------------------------

// s = Q K^T: the warpgroup's 64 rows of Q and all keys of a tile, both in shared memory.
template <class Config, class Element, int kCount>
__device__ void issue_q_k(float (&scores)[kCount], uint32_t s_q, uint32_t s_k) {
  const uint64_t q = device::k_major_descriptor(s_q), k = device::k_major_descriptor(s_k);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 2;
    ptx::wgmma_m64k16_ss<Element>(scores, device::advance(q, panel * Config::kTileM * 8 + in_panel),
                                  device::advance(k, panel * Config::kTileN * 8 + in_panel),
                                  step > 0);
  }
  ptx::wgmma_commit();
}

// O += P V
template <class Config, class Element, int kSteps, int kCount>
__device__ void issue_p_v(float (&o)[kCount], const uint32_t (&p)[kSteps][4], uint32_t s_v) {
  const uint64_t v = device::mn_major_descriptor(s_v, Config::kTileN);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::wgmma_m64k16_rs<Element>(o, p[step], device::advance(v, step * 128), true);
  ptx::wgmma_commit();
}

// Of a thread's two rows, g and g + 8 of its warp's 16.
struct RowStates {
  // What raw scores are compared with, equal in a row's four lanes: the greatest of the first tile, raised to that of each
  // later one whose weights would outgrow those before it (weigh).
  float m[2] = {negative_infinity(), negative_infinity()};
  float offset[2];      // -m * scale_log2; NaN where weigh() cannot work with m
  float l[2] = {0, 0};  // of the weights that this lane computed
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// -inf where the row does not see the key; bounds are those of the two rows, in columns of the tile.
template <int kCount>
__device__ void mask_scores(float (&scores)[kCount], const int (&begin)[2], const int (&end)[2],
                            int first_column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = first_column + 8 * (i / 4) + i % 2, row = i / 2 % 2;
    if (column < begin[row] || column >= end[row]) scores[i] = negative_infinity();
  }
}

template <int kCount>
__device__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// Turns scores into weights 2^exponent(score, row), rounded to the A operand of the next product, and sums them by row.
template <class Element, int kCount, int kSteps, class Exponent>
__device__ void exponentiate(const float (&scores)[kCount], Exponent exponent,
                             uint32_t (&p)[kSteps][4], float (&sum)[2]) {
  static_assert(kCount == 8 * kSteps);
  float l[2][2] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int row = i / 2 % 2;
    const float w0 = ptx::ex2_approx_ftz(exponent(scores[i], row)),
                w1 = ptx::ex2_approx_ftz(exponent(scores[i + 1], row));
    l[0][row] += w0;
    l[1][row] += w1;
    p[i / 8][i / 2 % 4] = device::pack16<Element>(w0, w1);
  }
  sum[0] = l[0][0] + l[1][0];
  sum[1] = l[0][1] + l[1][1];
}

// A tile's weights under an m that is not their own: good while no lane's part outweighs by this all that it had before.
// A weight that is most of a row is thus 1 and rounds to itself. Measured without (docs/log/0016): twice the error.
constexpr float kOutweighs = 8;
// And no greater than this, or values near the end of bf16 overflow sums of O that they do not overflow under the greatest
// score (16-bit weights themselves end at 65504).
constexpr float kMaxSum = 256;

// The weights of a tile under the m that there is. Returns the rows (bits) for which this lane asks for another m; if any
// lane of the warp does, nothing but p has changed.
template <class Element, int kCount, int kSteps>
__device__ uint32_t weigh(const float (&scores)[kCount], float scale_log2, RowStates& state,
                          uint32_t (&p)[kSteps][4], bool* done) {
  float sum[2];
  exponentiate<Element>(
      scores, [&](float x, int row) { return fmaf(x, scale_log2, state.offset[row]); }, p, sum);
  uint32_t asks = 0;
#pragma unroll
  for (int row = 0; row < 2; ++row)
    if (!(sum[row] <= fminf(kOutweighs * state.l[row], kMaxSum))) asks |= 1 << row;  // NaN asks
  *done = __all_sync(kFullWarp, asks == 0);
  if (*done) {
    state.l[0] += sum[0];
    state.l[1] += sum[1];
  }
  return asks;
}

// The weights of a tile after m was raised to the greatest score so far in the rows that a lane asks for. The other rows
// get the bits that weigh() gave them: a row does not depend on its neighbours.
template <class Element, int kCount, int kSteps, int kCountO>
__device__ void weigh_under_new_maximum(const float (&scores)[kCount], float scale_log2,
                                        uint32_t asks, RowStates& state, uint32_t (&p)[kSteps][4],
                                        float (&o)[kCountO]) {
  asks |= __shfl_xor_sync(kFullWarp, asks, 1);
  asks |= __shfl_xor_sync(kFullWarp, asks, 2);
  float m[2] = {state.m[0], state.m[1]};
#pragma unroll
  for (int i = 0; i < kCount; ++i) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], scores[i]);
  float used[2], factor[2];
  bool near[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float greatest = quad_max(m[row]);
    const float now = asks >> row & 1 ? greatest : state.m[row];
    used[row] = now == negative_infinity() ? 0 : now;  // -inf - -inf is no number
    factor[row] = ptx::ex2_approx_ftz((state.m[row] - used[row]) * scale_log2);
    state.m[row] = now;
    // fma(x, c, -m * c) is off by the rounding of m * c: 2^-16 of the weight at most below this bound.
    constexpr float kNear = 256;
    state.offset[row] = -used[row] * scale_log2;
    near[row] = fabsf(state.offset[row]) < kNear;
  }
  float sum[2];
  exponentiate<Element>(
      scores,
      [&](float x, int row) {
        return near[row] ? fmaf(x, scale_log2, state.offset[row]) : (x - used[row]) * scale_log2;
      },
      p, sum);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    state.l[row] = state.l[row] * factor[row] + sum[row];
    if (!near[row] || state.m[row] == negative_infinity())
      state.offset[row] = bits_float(0x7fffffff);
  }
  scale_rows(o, factor);
}

// The named barriers that let consumers issue their products in turn.
enum NamedBarrier : uint32_t { kBarStore = 1, kBarTurn = 4 };

template <class Config, class Element>
__device__ void consume(const Shared<Config, Element>& shared, const Problem& problem,
                        const TensorMaps& maps, const TileOrder& order, unsigned consumer) {
  constexpr int kTileN = Config::kTileN;
  const unsigned thread = threadIdx.x % 128;
  const unsigned warp = thread / 32, lane = thread % 32, lane_in_quad = lane % 4;
  // Never 0: a masked score of -inf stays -inf.
  const float scale_log2 = fmaxf(problem.scale * kLog2E, 1.4e-45f);
  const auto take_turn = [&] {
    if (Config::kConsumers > 1) ptx::named_barrier_sync(kBarTurn + consumer, 256);
  };
  const auto pass_turn = [&] {
    if (Config::kConsumers > 1)
      ptx::named_barrier_arrive(kBarTurn + (consumer + 1) % Config::kConsumers, 256);
  };
  const auto release = [&](const auto& ring, uint32_t n) {
    if (lane == 0) ring.release(n);
  };
  // Rows of this thread in a tile: row_in_tile and row_in_tile + 8.
  const unsigned row_in_tile = consumer * kWarpgroupRows + 16 * warp + lane / 4;
  const uint32_t rows_offset = consumer * kWarpgroupRows * device::kPanelRowBytes;

  // Each turn's barrier has one consumer that waits and one that arrives; before the first turn nobody has passed it.
  if (consumer == Config::kConsumers - 1) pass_turn();
  uint32_t q_tile = 0, kv_tile = 0;
  for_each_tile(order, [&](uint32_t tile) {
    const Work work = find_work<Config>(problem, order, tile);
    float o[Config::kHeadDim / 2] = {};
    RowStates state;
    shared.q.wait_full(q_tile);
    if (work.num_tiles > 0) {
      const uint32_t s_q = shared.q.tile(q_tile) + rows_offset;
      float scores[kTileN / 2];
      uint32_t p[kTileN / 16][4];
      // Keys are counted from the first that any row of the tile sees.
      const auto from_first = [&](int64_t k) {
        return static_cast<int>(clamp64(k, work.keys.any.begin, work.keys.any.end) -
                                work.keys.any.begin);
      };
      const int seen_by_all_begin = from_first(work.keys.all.begin),
                seen_by_all_end = from_first(work.keys.all.end);
      const auto mask = [&](int i) {
        const int key = i * kTileN;
        if (key >= seen_by_all_begin && seen_by_all_end - key >= kTileN) return;
        int begin[2], end[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Range seen = visible_keys(problem.mask, work.shift,
                                          work.tile_row + row_in_tile + 8 * r, problem.len_k);
          begin[r] = from_first(seen.begin);
          end[r] = from_first(seen.end);
        }
        mask_scores(scores, begin, end, key + 2 * static_cast<int>(lane_in_quad));
      };

      shared.k.wait_full(kv_tile);
      take_turn();
      ptx::wgmma_fence();
      issue_q_k<Config, Element>(scores, s_q, shared.k.tile(kv_tile));
      pass_turn();
      ptx::wgmma_wait<0>();
      release(shared.k, kv_tile);
      mask(0);
      constexpr uint32_t kBothRows = 3;
      weigh_under_new_maximum<Element>(scores, scale_log2, kBothRows, state, p, o);

#pragma unroll 1
      for (int i = 1; i < work.num_tiles; ++i) {
        ++kv_tile;
        shared.v.wait_full(kv_tile - 1);
        shared.k.wait_full(kv_tile);
        take_turn();
        ptx::wgmma_fence();
        issue_p_v<Config, Element>(o, p, shared.v.tile(kv_tile - 1));
        issue_q_k<Config, Element>(scores, s_q, shared.k.tile(kv_tile));
        pass_turn();
        ptx::wgmma_wait<0>();
        release(shared.v, kv_tile - 1);
        release(shared.k, kv_tile);
        mask(i);
        bool done;
        const uint32_t asks = weigh<Element>(scores, scale_log2, state, p, &done);
        if (!done) weigh_under_new_maximum<Element>(scores, scale_log2, asks, state, p, o);
      }
      if (!Config::kOInQ) release(shared.q, q_tile);
      shared.v.wait_full(kv_tile);
      ptx::wgmma_fence();
      issue_p_v<Config, Element>(o, p, shared.v.tile(kv_tile));
      ptx::wgmma_wait<0>();
      release(shared.v, kv_tile);
      ++kv_tile;
    } else if (!Config::kOInQ) {
      release(shared.q, q_tile);
    }

    // ---- output
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = quad_sum(state.l[r]);
      const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
      inverse[r] = empty ? 0.0f : 1.0f / l;
      const int64_t row = work.tile_row + row_in_tile + 8 * r;
      if (lane_in_quad == 0 && problem.lse.data != nullptr && row < problem.len_q)
        *problem.lse.at(work.b, work.head, row) =
            empty ? negative_infinity() : state.m[r] * problem.scale + logf(l);
    }
    scale_rows(o, inverse);
    const uint32_t s_o = shared.s_o + rows_offset;
    if (!Config::kOInQ && thread == 0) ptx::tma_store_wait_read<0>();
    ptx::named_barrier_sync(
        kBarStore + consumer,
        128);  // SAFETY: the last tile's copy, or products of Q, have read these rows.
    const uint32_t s_row =
        s_o + (16 * warp + lane % 8 + 8 * (lane / 8 % 2)) * device::kPanelRowBytes;
#pragma unroll
    for (int j = 0; j < Config::kHeadDim / 16; ++j) {
      const uint32_t address =
          s_row + j / 4 * Config::kTileM * device::kPanelRowBytes + (j % 4 * 2 + lane / 16) * 16;
      ptx::stmatrix_x4(device::swizzle_128(address),
                       device::pack16<Element>(o[8 * j], o[8 * j + 1]),
                       device::pack16<Element>(o[8 * j + 2], o[8 * j + 3]),
                       device::pack16<Element>(o[8 * j + 4], o[8 * j + 5]),
                       device::pack16<Element>(o[8 * j + 6], o[8 * j + 7]));
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kBarStore + consumer,
                            128);  // SAFETY: all rows are written before the copy reads them.
    const auto first_row =
        static_cast<int32_t>(work.tile_row) + static_cast<int32_t>(consumer) * kWarpgroupRows;
    if (thread == 0 && first_row < problem.len_q) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel)
        ptx::tma_store_4d(maps.o, s_o + panel * Config::kTileM * device::kPanelRowBytes,
                          panel * device::kPanelColumns, first_row, work.head, work.b);
      ptx::tma_store_commit();
      if (Config::kOInQ) ptx::tma_store_wait_read<0>();
    }
    if (Config::kOInQ) release(shared.q, q_tile);
    ++q_tile;
  });
  // Shared memory must outlive the copies out of it.
  if (thread == 0) ptx::tma_store_wait_read<0>();
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    forward_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps,
                   const TileOrder order) {
  extern __shared__ __align__(1024) unsigned char s_memory[];
  const Shared<Config, Element> shared(s_memory);
  // The same in all lanes, and the compiler may know.
  const unsigned warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(maps.q);
    ptx::tma_prefetch_map(maps.k);
    ptx::tma_prefetch_map(maps.v);
    ptx::tma_prefetch_map(maps.o);
    constexpr uint32_t kConsumerWarps = 4 * Config::kConsumers;
    shared.q.init(kConsumerWarps);
    shared.k.init(kConsumerWarps);
    shared.v.init(kConsumerWarps);
    ptx::mbarrier_init_fence();
    ptx::fence_async_shared();
  }
  __syncthreads();  // SAFETY: the barriers are initialised.
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kRegisters.of_producer>();
    if (threadIdx.x == 0) produce(shared, problem, maps, order);
  } else {
    ptx::setmaxnreg_inc<Config::kRegisters.of_consumer>();
    consume(shared, problem, maps, order, warpgroup - 1);
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, class Config>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    return device::load_kernel(forward_kernel<Element, Config>, name, kSharedBytes<Config>);
  });
}

inline TileOrder tile_order(const Problem& p, int tile_m) {
  constexpr int64_t kSectionBytes = int64_t{32} << 20;  // of K and V, of the 60 MB of L2
  const int64_t head_bytes = 4 * p.len_k * p.head_dim;
  const int64_t kv_heads = max64(1, kSectionBytes / head_bytes);
  const int64_t heads = min64(p.batch * p.heads_q, kv_heads * (p.heads_q / p.heads_kv));
  const int64_t m_tiles = ceil_div(p.len_q, tile_m);
  return {static_cast<uint32_t>(m_tiles), static_cast<uint32_t>(heads),
          static_cast<uint32_t>(m_tiles * p.batch * p.heads_q)};
}

template <class Element, class Config>
Status launch(const char* name, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<Config>);
  CUFLASH_TRY((preload<Element, Config>(name, context.device)));
  const Problem& p = problem;
  TensorMaps maps;
  CUFLASH_TRY(device::encode_tensor_map(p.q, p.batch, p.heads_q, p.len_q, p.head_dim,
                                        Config::kTileM, &maps.q));
  CUFLASH_TRY(device::encode_tensor_map(p.k, p.batch, p.heads_kv, p.len_k, p.head_dim,
                                        Config::kTileN, &maps.k));
  CUFLASH_TRY(device::encode_tensor_map(p.v, p.batch, p.heads_kv, p.len_k, p.head_dim,
                                        Config::kTileN, &maps.v));
  CUFLASH_TRY(device::encode_tensor_map(p.o, p.batch, p.heads_q, p.len_q, p.head_dim,
                                        kWarpgroupRows, &maps.o));
  return device::launch(forward_kernel<Element, Config>, name,
                        {plan.blocks, Config::kThreads, kSharedBytes<Config>}, context.stream,
                        problem, maps, tile_order(p, Config::kTileM));
}

}  // namespace cuflash::forward_wgmma
