// Forward attention for Hopper (sm_90a): exact, one pass over the keys, fp32 sums. Any mask, lengths and strides of 16
// bytes; head_dim up to the bucket, padded with zeros.
//
// One block computes one tile of O, kConsumers x 64 query rows of one head, with specialised warpgroups:
//
//   producer, one thread    TMA loads of Q once, then of K and V tiles, as fast as stages come free
//   consumers, 64 rows each S = Q K^T from shared memory, softmax in registers, O += P V with P from registers
//
// A consumer keeps the tensor cores busy while it exponentiates: it issues the next S before this P V, and works on
// the next scores while this P V runs. With several consumers a named barrier lets one issue its products while the
// others exponentiate.
//
//                    | key tile j                                       | key tile j + 1
//   tensor cores     | S(j) = Q K(j)^T | O += P(j-1) V(j-1)             |
//   consumer         | issue both      | wait S(j); max, exp; wait O; rescale O; round P(j)
//
// Shared memory: Q, then kStages of K and of V, in panels of 64 columns (device/wgmma_tile.hpp); 160 KB at
// head_dim 128.
#pragma once

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

// Which tile of O a block computes. Heads come in sections whose K and V fit L2 together; within a section late rows
// come first: under a causal mask they see the most keys, and the short blocks fill the end.
struct TileOrder {
  uint32_t m_tiles, section_heads;
};

// ---- the block's work -----------------------------------------------------------------------------

struct Work {
  int b, head, head_kv;
  int64_t tile_row;
  TileRange keys;
  int64_t shift;
  int num_tiles;  // of keys
};

template <class Config>
__device__ Work find_work(const Problem& problem, const TileOrder& order) {
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t section = blockIdx.x / (order.m_tiles * order.section_heads);
  const uint32_t in_section = blockIdx.x % (order.m_tiles * order.section_heads);
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

// ---- producer -------------------------------------------------------------------------------------

template <class Config, class Storage>
__device__ void produce(Storage& s, const TensorMaps& maps, const Work& work) {
  constexpr uint32_t kRowBytes = Config::kPanels * device::kPanelRowBytes;
  constexpr uint32_t kTileBytes = Config::kTileN * kRowBytes;
  const auto first_key = static_cast<int32_t>(work.keys.any.begin);

  ptx::mbarrier_arrive_expect(s.q_full, Config::kTileM * kRowBytes);
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel)
    ptx::tma_load_4d(s.q[panel], maps.q, s.q_full, panel * device::kPanelColumns,
                     static_cast<int32_t>(work.tile_row), work.head, work.b);
  const auto load = [&](auto& s_tile, const CUtensorMap& map, uint64_t& full, uint64_t& free,
                        uint32_t phase, int tile) {
    ptx::mbarrier_wait(free, phase ^ 1);  // the first round finds all stages free
    ptx::mbarrier_arrive_expect(full, kTileBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel)
      ptx::tma_load_4d(s_tile[panel], map, full, panel * device::kPanelColumns,
                       first_key + tile * Config::kTileN, work.head_kv, work.b);
  };
  uint32_t stage = 0, phase = 0;
  for (int tile = 0; tile < work.num_tiles; ++tile) {
    load(s.k[stage], maps.k, s.k_full[stage], s.k_free[stage], phase, tile);
    load(s.v[stage], maps.v, s.v_full[stage], s.v_free[stage], phase, tile);
    if (++stage == Config::kStages) stage = 0, phase ^= 1;
  }
}

// ---- consumer -------------------------------------------------------------------------------------

// s = Q K^T: the warpgroup's 64 rows of Q and all keys of a tile, both in shared memory.
template <class Config, class Element, int kCount>
__device__ void issue_q_k(float (&scores)[kCount], uint32_t s_q, uint32_t s_k) {
  const uint64_t q = device::k_major_descriptor(s_q), k = device::k_major_descriptor(s_k);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 2;
    ptx::wgmma_m64k16_ss<Element>(scores, q + (panel * Config::kTileM * 8 + in_panel),
                                  k + (panel * Config::kTileN * 8 + in_panel), step > 0);
  }
  ptx::wgmma_commit();
}

// O += P V
template <class Config, class Element, int kSteps, int kCount>
__device__ void issue_p_v(float (&o)[kCount], const uint32_t (&p)[kSteps][4], uint32_t s_v) {
  const uint64_t v = device::mn_major_descriptor(s_v, Config::kTileN);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::wgmma_m64k16_rs<Element>(o, p[step], v + step * 128, true);
  ptx::wgmma_commit();
}

// Of a thread's two rows, g and g + 8 of its warp's 16.
struct RowStates {
  float m[2] = {negative_infinity(),
                negative_infinity()};  // of the raw scores, equal in a row's four lanes
  float l[2] = {0, 0};                 // of the weights that this lane computed
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

// Turns scores into weights 2^((score - m) * scale_log2), in fp32, and gives the factors for what was summed before.
template <bool kMasked, int kCount>
__device__ void softmax(float (&scores)[kCount], float scale_log2, RowStates& state,
                        float (&factor)[2]) {
  float m[2][2] = {{state.m[0], state.m[1]}, {state.m[0], state.m[1]}};
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    m[i / 4 % 2][i / 2 % 2] = fmaxf(m[i / 4 % 2][i / 2 % 2], scores[i]);
  float used[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float now = quad_max(fmaxf(m[0][row], m[1][row]));
    factor[row] = rescale_factor(state.m[row], now, scale_log2);
    state.m[row] = now;
    used[row] = now == negative_infinity() ? 0 : now;  // -inf - -inf is no number
  }
  // fma(x, c, -m * c) is off by the rounding of m * c: 2^-16 of the weight at most below this bound. Each row for
  // itself: with one answer for all rows of a warp, a row's bits would depend on keys that only others see.
  constexpr float kNear = 256;
  const float offset[2] = {-used[0] * scale_log2, -used[1] * scale_log2};
  const bool near[2] = {fabsf(offset[0]) < kNear, fabsf(offset[1]) < kNear};
  float l[2][2] = {};  // of this tile alone: with the running sum among them they would drift
  const auto exponentiate = [&](auto exponent) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = i / 2 % 2;
      float p = ptx::ex2_approx_ftz(exponent(scores[i], row));
      // Not left to 2^-inf: with scale 0 that is NaN.
      if (kMasked && scores[i] == negative_infinity()) p = 0;
      scores[i] = p;
      l[i / 4 % 2][row] += p;
    }
  };
  if (__all_sync(kFullWarp, near[0] && near[1]))
    exponentiate([&](float x, int row) { return fmaf(x, scale_log2, offset[row]); });
  else
    exponentiate([&](float x, int row) {
      return near[row] ? fmaf(x, scale_log2, offset[row]) : (x - used[row]) * scale_log2;
    });
#pragma unroll
  for (int row = 0; row < 2; ++row)
    state.l[row] = state.l[row] * factor[row] + (l[0][row] + l[1][row]);
}

// Rounds weights to the A operand of the next product.
template <class Element, int kSteps, int kCount>
__device__ void round_weights(const float (&weights)[kCount], uint32_t (&p)[kSteps][4]) {
  static_assert(kCount == 8 * kSteps);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
    p[i / 4][i % 4] = device::pack16<Element>(weights[2 * i], weights[2 * i + 1]);
}

template <int kCount>
__device__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// The named barriers that let consumers issue their products in turn.
enum NamedBarrier : uint32_t { kBarStore = 1, kBarTurn = 4 };

template <class Config, class Element, class Storage>
__device__ void consume(Storage& s, const Problem& problem, const TensorMaps& maps,
                        const Work& work, unsigned consumer) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kSteps = kTileN / 16;
  const unsigned thread = threadIdx.x % 128;
  const unsigned warp = thread / 32, lane = thread % 32, lane_in_quad = lane % 4;
  const float scale_log2 = problem.scale * kLog2E;

  // Rows of this thread: row_in_tile and row_in_tile + 8. Keys are counted from the first that any row of the tile sees.
  const unsigned row_in_tile = consumer * kWarpgroupRows + 16 * warp + lane / 4;
  const auto num_keys = static_cast<int>(work.keys.any.end - work.keys.any.begin);
  int begin[2], end[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Range seen =
        visible_keys(problem.mask, work.shift, work.tile_row + row_in_tile + 8 * r, problem.len_k);
    begin[r] = static_cast<int>(clamp64(seen.begin - work.keys.any.begin, 0, num_keys));
    end[r] = static_cast<int>(clamp64(seen.end - work.keys.any.begin, 0, num_keys));
  }
  const auto unmasked_begin = static_cast<int>(work.keys.all.begin - work.keys.any.begin);
  const auto unmasked_end = static_cast<int>(work.keys.all.end - work.keys.any.begin);
  const auto is_masked = [&](int key) {
    return key < unmasked_begin || unmasked_end - key < kTileN;
  };

  const uint32_t s_q =
      ptx::shared_address(s.q) + consumer * kWarpgroupRows * device::kPanelRowBytes;
  const auto take_turn = [&] { ptx::named_barrier_sync(kBarTurn + consumer, 256); };
  const auto pass_turn = [&] {
    ptx::named_barrier_arrive(kBarTurn + (consumer + 1) % Config::kConsumers, 256);
  };
  const auto release = [&](uint64_t& barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  float o[Config::kHeadDim / 2] = {};
  RowStates state;
  if (work.num_tiles > 0) {
    float scores[kTileN / 2];
    uint32_t p[kSteps][4];
    float factor[2];
    const auto weigh = [&](int tile) {
      const int key = tile * kTileN;
      if (is_masked(key)) {
        mask_scores(scores, begin, end, key + 2 * static_cast<int>(lane_in_quad));
        softmax<true>(scores, scale_log2, state, factor);
      } else {
        softmax<false>(scores, scale_log2, state, factor);
      }
    };
    // Two barriers, each of one that waits and one that arrives; before the first turn nobody has passed it.
    if (consumer == Config::kConsumers - 1) pass_turn();

    ptx::mbarrier_wait(s.q_full, 0);
    ptx::mbarrier_wait(s.k_full[0], 0);
    take_turn();
    ptx::wgmma_fence();
    issue_q_k<Config, Element>(scores, s_q, ptx::shared_address(s.k[0]));
    pass_turn();
    ptx::wgmma_wait<0>();
    release(s.k_free[0]);
    weigh(0);
    round_weights<Element>(scores, p);

    uint32_t v_stage = 0, v_phase = 0;
    uint32_t k_stage = 1 % Config::kStages, k_phase = 1 / Config::kStages;
#pragma unroll 1
    for (int tile = 1; tile < work.num_tiles; ++tile) {
      ptx::mbarrier_wait(s.k_full[k_stage], k_phase);
      take_turn();
      ptx::wgmma_fence();
      issue_q_k<Config, Element>(scores, s_q, ptx::shared_address(s.k[k_stage]));
      ptx::mbarrier_wait(s.v_full[v_stage], v_phase);
      ptx::wgmma_fence();
      issue_p_v<Config, Element>(o, p, ptx::shared_address(s.v[v_stage]));
      pass_turn();
      ptx::wgmma_wait<1>();
      release(s.k_free[k_stage]);
      weigh(tile);
      ptx::wgmma_wait<0>();
      release(s.v_free[v_stage]);
      scale_rows(o, factor);
      round_weights<Element>(scores, p);
      if (++k_stage == Config::kStages) k_stage = 0, k_phase ^= 1;
      if (++v_stage == Config::kStages) v_stage = 0, v_phase ^= 1;
    }
    ptx::mbarrier_wait(s.v_full[v_stage], v_phase);
    ptx::wgmma_fence();
    issue_p_v<Config, Element>(o, p, ptx::shared_address(s.v[v_stage]));
    ptx::wgmma_wait<0>();
  } else {
    ptx::mbarrier_wait(s.q_full, 0);  // O goes where Q lands
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
  // SAFETY: only this warpgroup reads its rows of Q, and its products with them have completed.
  const uint32_t s_row = s_q + (16 * warp + lane % 8 + 8 * (lane / 8 % 2)) * device::kPanelRowBytes;
#pragma unroll
  for (int j = 0; j < Config::kHeadDim / 16; ++j) {
    const uint32_t address =
        s_row + j / 4 * Config::kTileM * device::kPanelRowBytes + (j % 4 * 2 + lane / 16) * 16;
    ptx::stmatrix_x4(device::swizzle_128(address), device::pack16<Element>(o[8 * j], o[8 * j + 1]),
                     device::pack16<Element>(o[8 * j + 2], o[8 * j + 3]),
                     device::pack16<Element>(o[8 * j + 4], o[8 * j + 5]),
                     device::pack16<Element>(o[8 * j + 6], o[8 * j + 7]));
  }
  ptx::fence_async_shared();
  ptx::named_barrier_sync(kBarStore + consumer,
                          128);  // SAFETY: all rows are written before the copy reads them.
  if (thread == 0) {
    const auto first_row =
        static_cast<int32_t>(work.tile_row) + static_cast<int32_t>(consumer) * kWarpgroupRows;
    if (first_row < problem.len_q) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel)
        ptx::tma_store_4d(maps.o, s.q[panel][consumer * kWarpgroupRows],
                          panel * device::kPanelColumns, first_row, work.head, work.b);
      ptx::tma_store_commit();
      ptx::tma_store_wait_read<0>();
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(KernelConfig<kHeadDim>::kThreads, 1)
    forward_kernel(const __grid_constant__ Problem problem, const __grid_constant__ TensorMaps maps,
                   const TileOrder order) {
  using Config = KernelConfig<kHeadDim>;
  extern __shared__ __align__(1024) unsigned char s_memory[];
  auto& s = *reinterpret_cast<SharedStorage<Config, Element>*>(s_memory);
  // The same in all lanes, and the compiler may know: descriptors then live in uniform registers.
  const unsigned warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(maps.q);
    ptx::tma_prefetch_map(maps.k);
    ptx::tma_prefetch_map(maps.v);
    ptx::tma_prefetch_map(maps.o);
    ptx::mbarrier_init(s.q_full, 1);
#pragma unroll
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(s.k_full[stage], 1);
      ptx::mbarrier_init(s.v_full[stage], 1);
      ptx::mbarrier_init(s.k_free[stage], 4 * Config::kConsumers);  // one lane of each warp
      ptx::mbarrier_init(s.v_free[stage], 4 * Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
    ptx::fence_async_shared();
  }
  __syncthreads();  // SAFETY: the barriers are initialised.
  const Work work = find_work<Config>(problem, order);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(s, maps, work);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config, Element>(s, problem, maps, work, warpgroup - 1);
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    return device::load_kernel(forward_kernel<Element, kHeadDim>, name, kSharedBytes<kHeadDim>);
  });
}

inline TileOrder tile_order(const Problem& p, int tile_m) {
  constexpr int64_t kSectionBytes = int64_t{32} << 20;  // of K and V, of the 60 MB of L2
  const int64_t head_bytes = 4 * p.len_k * p.head_dim;
  const int64_t kv_heads = max64(1, kSectionBytes / head_bytes);
  const int64_t heads = min64(p.batch * p.heads_q, kv_heads * (p.heads_q / p.heads_kv));
  return {static_cast<uint32_t>(ceil_div(p.len_q, tile_m)), static_cast<uint32_t>(heads)};
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const LaunchContext& context) {
  using Config = KernelConfig<kHeadDim>;
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<kHeadDim>);
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
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
  const TileOrder order = tile_order(p, Config::kTileM);
  return device::launch(
      forward_kernel<Element, kHeadDim>, name,
      {int64_t{order.m_tiles} * p.batch * p.heads_q, Config::kThreads, kSharedBytes<kHeadDim>},
      context.stream, problem, maps, order);
}

}  // namespace cuflash::forward_wgmma
