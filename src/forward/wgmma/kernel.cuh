// Forward attention for Hopper (sm_90a): exact, one pass over the keys, fp32 sums. Any mask, lengths and strides of 16
// bytes; head_dim up to the bucket, padded with zeros.
//
// A block computes tiles of O, kConsumers x 64 query rows of one head each, one after the other, with specialised
// warpgroups:
//
//   producer, one thread    TMA loads of each tile's Q, then of its K and V tiles, as fast as places come free
//   consumers, 64 rows each S = Q K^T from shared memory, softmax in registers, O += P V with P from registers
//
// Several consumers take turns: while the products of one run, the others exponentiate. Each ends with the last tile of keys
// that its own rows see, and passes the turns that are left. The producer loads the next tile's Q beside this one's, or, above
// head_dim 128, for each consumer as soon as its last scores are made; and leaves beside it what a tile is, whose divisions
// would keep the consumers from computing. O goes from registers to global memory.
//
//   tensor cores  | O += P(j-1) V(j-1), S(j) = Q K(j)^T of one   | the same of the next            |
//   that consumer | waits                                        | exp, sum and round P(j)         | waits
//
// Products and arithmetic share the register file: an instruction of a consumer takes about a cycle from the products of
// another (docs/log/0016). So what counts is how few there are, and there is no look for the maximum of each tile: P is
// taken under that of earlier keys, as long as its sums say that it may be.
//
// A call with features is the same kernel compiled for FullProblem (attention/tile_rows.hpp). Of ragged batches it sorts the
// sequences first, has blocks take tiles as they come free, and clears what of V follows a sequence.
//
// Where there are few tiles of many keys, each block has a part of a tile's keys, and a second launch merges the parts.
//
// Shared memory: one Q or two, kStages of K and of V, in panels of 64 columns (device/wgmma_tile.hpp); 192 KB at head_dim
// 128, 224 KB at 256.
#pragma once

#include <cstddef>
#include <numeric>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/base2_softmax.cuh"
#include "attention/key_range.hpp"
#include "attention/quad_softmax.cuh"
#include "attention/tile_rows.hpp"
#include "core/split.hpp"
#include "core/variant.hpp"
#include "decode/combine.hpp"
#include "device/launch.cuh"
#include "device/once_per_device.hpp"
#include "device/packed16.cuh"
#include "device/ptx/ex2.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/rcp.cuh"
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
  CUtensorMap q, k, v;
};

// Tiles of O in the order in which they are begun. Heads come in sections: `sections` of section_heads, then one of those that
// are left. Within a section late rows come first: under a causal mask they see the most keys. Of the sections `dealt` are dealt
// out by themselves, and the others as one.
struct TileOrder {
  uint32_t m_tiles, tiles;
  uint32_t section_heads, sections, dealt;
  uint32_t group;  // query heads of a KV head
  uint32_t
      section_keys;  // of ragged batches: as many heads of a sequence are a section as have these keys together
};

// Calls f(tile) for the tiles of one block. A round gives each block one tile of a section, in turn from the first block
// and from the last: who got the heaviest tile of one round gets the lightest of the next. Measured against a counter in
// global memory (docs/log/0014): as fast, and the order is the same in every run.
template <class F>
__device__ void for_each_tile(const TileOrder& order, F f) {
  const uint32_t blocks = gridDim.x, section_tiles = order.section_heads * order.m_tiles;
  uint32_t place = blockIdx.x;
  for (uint32_t first = 0, section = 0; first < order.tiles; ++section) {
    const uint32_t end = section < order.dealt ? first + section_tiles : order.tiles;
    for (; first + blocks <= end; first += blocks) {
      f(first + place);
      place = blocks - 1 - place;
    }
    const uint32_t rest = end - first;
    if (place < rest) f(first + place);
    place = place < rest ? place + blocks - rest
                         : place - rest;  // who got none is the first in the next
    first = end;
  }
}

// The same of ragged batches, whose tiles no rule deals out evenly: each block takes the next that nobody has, which it asks
// for before it loads, so that the answer is there in time. As many blocks ask as there are tiles, and the counter is 0 again.
// Where there is none, a block has one tile.
template <class F>
__device__ void for_each_counted_tile(uint32_t tiles, uint32_t* counter, F f) {
  for (uint32_t tile = blockIdx.x; tile < tiles;) {
    const uint32_t next = gridDim.x + (counter != nullptr ? atomicInc(counter, tiles - 1) : tile);
    f(tile);
    tile = next;
  }
}

// Of ragged batches only the device knows how many tiles each sequence has. Those of the most keys come first, so that blocks
// end with short ones. s_sequences[i] becomes, of the i-th, the number of tiles of rows before it and, in its low bits, which
// it is; [batch] ends them. Returns how many tiles there are. By the whole block; s_keys is scratch, of a number for each.
template <class Config>
__device__ uint32_t sort_sequences(const FullProblem& problem, uint32_t* s_sequences,
                                   uint32_t* s_keys) {
  const auto batch = static_cast<uint32_t>(problem.batch);
  for (uint32_t b = threadIdx.x; b < batch; b += Config::kThreads)
    s_keys[b] = static_cast<uint32_t>(sequence_of(problem, b).len_k);
  __syncthreads();  // SAFETY: the numbers of keys are there.
  for (uint32_t b = threadIdx.x; b < batch; b += Config::kThreads) {
    const uint32_t keys = s_keys[b];
    uint32_t place = 0;
    for (uint32_t other = 0; other < batch; ++other)
      place += s_keys[other] > keys || (s_keys[other] == keys && other < b) ? 1 : 0;
    const int64_t tiles = ceil_div(sequence_of(problem, b).len_q, Config::kTileM);
    s_sequences[place] = static_cast<uint32_t>(tiles) << kSequenceBits | b;
  }
  ptx::fence_async_shared();  // TMA will write where the scratch is
  __syncthreads();            // SAFETY: the sequences are in order, with the tiles of each.
  if (threadIdx.x < 32) {
    // Each lane has a run of sequences.
    const uint32_t run = (batch + 31) / 32, begin = min(threadIdx.x * run, batch),
                   end = min(begin + run, batch);
    uint32_t sum = 0;
    for (uint32_t i = begin; i < end; ++i) sum += s_sequences[i] >> kSequenceBits;
    uint32_t before = sum;
    for (uint32_t offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, before, offset);
      if (threadIdx.x >= offset) before += other;
    }
    if (threadIdx.x == 31) s_sequences[batch] = before << kSequenceBits;
    before -= sum;
    for (uint32_t i = begin; i < end; ++i) {
      const uint32_t sequence = s_sequences[i], low = (1u << kSequenceBits) - 1;
      s_sequences[i] = before << kSequenceBits | (sequence & low);
      before += sequence >> kSequenceBits;
    }
  }
  __syncthreads();  // SAFETY: the sums are there.
  return (s_sequences[batch] >> kSequenceBits) * static_cast<uint32_t>(problem.heads_q);
}

// ---- a tile's work --------------------------------------------------------------------------------

struct Work {
  int b, head, head_kv;
  int split;  // of the parts that the keys are cut into
  Sequence sequence;
  int64_t tile_row;
  TileRange keys;
  int64_t shift;
  int num_tiles;  // of keys
};

template <class Config, class Call>
__device__ Work work_of(const Call& problem, const Sequence& s, uint32_t group, uint32_t b,
                        uint32_t head, uint32_t m_tile) {
  Work work;
  work.b = static_cast<int>(b);
  work.split = 0;
  work.head = static_cast<int>(head);
  work.head_kv = static_cast<int>(head / group);
  work.sequence = s;
  work.tile_row = int64_t{m_tile} * Config::kTileM;
  work.shift = centre_shift(problem.mask, work.b, s.len_q, s.len_k);
  work.keys = tile_keys(problem.mask, work.shift, work.tile_row,
                        min64(work.tile_row + Config::kTileM, s.len_q), s.len_k);
  work.num_tiles =
      static_cast<int>(ceil_div(work.keys.any.end - work.keys.any.begin, Config::kTileN));
  return work;
}

// Whether O is fp32.
template <class Call>
__device__ bool has_wide_outputs(const Call& problem) {
  if constexpr (kHasFeatures<Call>) return (problem.f.used & kWideOutputs) != 0;
  return false;
}

// A part of a tile's work: of its tiles of keys the split-th of `splits` runs, which may be empty.
template <class Config>
__device__ void take_split(Work& work, int split, int splits) {
  work.split = split;
  const int of_split = (work.num_tiles + splits - 1) / splits;
  const int begin = min(split * of_split, work.num_tiles);
  work.num_tiles = min(of_split, work.num_tiles - begin);
  Range& keys = work.keys.any;
  keys.begin = min64(keys.begin + int64_t{begin} * Config::kTileN, keys.end);
  keys.end = min64(keys.end, keys.begin + int64_t{work.num_tiles} * Config::kTileN);
}

// What the consumers need of it. Keys are counted from the first that any row of the tile sees.
template <class Element, class Call>
__device__ TileWork tile_work(const Call& problem, const MergeProblem& parts, const Work& work) {
  const int64_t rows_left = work.sequence.len_q - work.tile_row, first = work.keys.any.begin;
  const Range seen = uncut_keys(problem.mask, work.shift, work.tile_row);
  const auto from_first = [&](int64_t key) {
    return static_cast<int>(clamp64(key - first, -kFarKey, kFarKey));
  };
  TileWork tile;
  const int64_t row = work.sequence.first_q + work.tile_row;
  if (parts.num_parts > 1) {
    tile.o = parts.parts.row<float>(work.b, work.head, row) + work.split * parts.part_stride;
    tile.lse = parts.lse_parts.at(work.b, work.head, row) + work.split * parts.lse_part_stride;
  } else {
    if (has_wide_outputs(problem))
      tile.o = problem.o.template row<float>(work.b, work.head, row);
    else
      tile.o = problem.o.template row<Element>(work.b, work.head, row);
    tile.lse = problem.lse.data == nullptr ? nullptr : problem.lse.at(work.b, work.head, row);
  }
  tile.b = work.b;
  tile.head = work.head;
  tile.rows = static_cast<int>(min64(rows_left, kMaxTileRows));
  tile.num_tiles = work.num_tiles;
  tile.keys = static_cast<int>(work.keys.any.end - first);
  tile.seen_begin = from_first(seen.begin);
  tile.seen_end = from_first(seen.end);
  tile.centre = static_cast<float>(work.tile_row + work.shift - first);
  return tile;
}

// Of `count` tiles of keys the i-th in time. With slopes the last comes first: scores grow towards the diagonal, and each
// tile would outweigh all before it.
template <class Call>
__device__ bool last_tiles_first(const Call& problem) {
  if constexpr (kHasFeatures<Call>) return problem.f.score.slopes.data != nullptr;
  return false;
}
template <class Call>
__device__ int tile_in_turn(const Call& problem, int i, int count) {
  return last_tiles_first(problem) ? count - 1 - i : i;
}

template <class Config, class Call>
__device__ Work find_work(const Call& problem, const TileOrder& order, const uint32_t* s_sequences,
                          uint32_t tile) {
  const auto heads_q = static_cast<uint32_t>(problem.heads_q);
  if constexpr (kHasFeatures<Call>) {
    if (is_ragged(problem)) {
      const uint32_t row_tile = tile / heads_q;
      const auto first_tile = [&](uint32_t i) { return s_sequences[i] >> kSequenceBits; };
      uint32_t i = 0, above = static_cast<uint32_t>(problem.batch);
      while (above - i > 1) {  // first_tile(i) <= row_tile < first_tile(above)
        const uint32_t middle = (i + above) / 2;
        if (first_tile(middle) <= row_tile)
          i = middle;
        else
          above = middle;
      }
      const uint32_t b = s_sequences[i] & ((1u << kSequenceBits) - 1);
      const Sequence sequence = sequence_of(problem, b);
      // All rows of the sequence go over the keys of a section, which L2 holds.
      const uint32_t m_tiles = first_tile(i + 1) - first_tile(i);
      const auto len_k = static_cast<uint32_t>(sequence.len_k);
      const uint32_t most =
          min(order.group * max(1u, order.section_keys / max(1u, len_k)), heads_q);
      const uint32_t in_sequence = tile - first_tile(i) * heads_q;
      const uint32_t first_head = in_sequence / (m_tiles * most) * most;
      const uint32_t width = min(most, heads_q - first_head);
      const uint32_t in_section = in_sequence - first_head * m_tiles;
      return work_of<Config>(problem, sequence, order.group, b, first_head + in_section % width,
                             m_tiles - 1 - in_section / width);
    }
  }
  const uint32_t heads = static_cast<uint32_t>(problem.batch) * heads_q;
  const uint32_t section = min(tile / (order.m_tiles * order.section_heads), order.sections);
  const uint32_t first_head = section * order.section_heads;
  const uint32_t in_section = tile - first_head * order.m_tiles;
  const uint32_t width = section < order.sections ? order.section_heads : heads - first_head;
  const uint32_t m_tile = order.m_tiles - 1 - in_section / width;
  const uint32_t head = first_head + in_section % width;
  const uint32_t b = head / heads_q;
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  Sequence sequence = {b, 0, problem.len_q, 0, problem.len_k};
  if constexpr (kHasFeatures<Call>) sequence = sequence_of(problem, b);
  return work_of<Config>(problem, sequence, order.group, b, head % heads_q, m_tile);
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
  // Until the place is free, which all are at first.
  __device__ void wait_free(uint32_t n) const {
    ptx::mbarrier_wait(free(n), (n / kPlaces + 1) % 2);
  }
  __device__ void begin(uint32_t n) const {
    wait_free(n);
    ptx::mbarrier_arrive_expect(full(n), kTileBytes);  // announces the tile's bytes
  }
  // In place of a tile: there is none more.
  __device__ void end(uint32_t n) const {
    wait_free(n);
    ptx::mbarrier_arrive(full(n));
  }
};

template <class Config, class Element>
struct Shared {
  using Storage = SharedStorage<Config, Element>;
  using QRing = Ring<Config::kQPlaces, sizeof(typename Storage::QTile)>;

  Ring<Config::kStages, sizeof(typename Storage::KTile)> k;
  Ring<Config::kStages, sizeof(typename Storage::VTile)> v;
  TileWork* work;
  uint32_t s_q, s_q_full, s_q_free;

  // Of the n-th tile of O: written before its Q is announced to the first consumer.
  __device__ TileWork& work_of(uint32_t n) const { return work[n % Config::kWorkPlaces]; }
  // Of a consumer's rows: each has its own, for the next may come while others still read theirs.
  __device__ QRing q(unsigned consumer) const {
    constexpr uint32_t kTiles = Config::kQPlaces * sizeof(typename Storage::QTile),
                       kBarriers = Config::kQPlaces * 8;
    return {s_q + consumer * kTiles, s_q_full + consumer * kBarriers,
            s_q_free + consumer * kBarriers};
  }

  // The base is the same in all lanes, and the compiler may know: addresses and descriptors then live in uniform
  // registers.
  __device__ explicit Shared(void* memory)
      : Shared(__shfl_sync(kFullWarp, ptx::shared_address(memory), 0)) {
    work = static_cast<Storage*>(memory)->work;
  }

 private:
#define CUFLASH_AT(member) (base + static_cast<uint32_t>(offsetof(Storage, member)))
  __device__ explicit Shared(uint32_t base)
      : k{CUFLASH_AT(k), CUFLASH_AT(k_full), CUFLASH_AT(k_free)},
        v{CUFLASH_AT(v), CUFLASH_AT(v_full), CUFLASH_AT(v_free)},
        work(nullptr),
        s_q(CUFLASH_AT(q)),
        s_q_full(CUFLASH_AT(q_full)),
        s_q_free(CUFLASH_AT(q_free)) {}
#undef CUFLASH_AT
};

// ---- producer -------------------------------------------------------------------------------------

template <class Config, class Element, class Call>
__device__ void produce(const Shared<Config, Element>& shared, const Call& problem,
                        const TensorMaps& maps, const MergeProblem& parts, const TileOrder& order,
                        uint32_t* counter, const uint32_t* s_sequences) {
  using Panels = std::integral_constant<int, Config::kPanels>;
  using PanelsV = std::integral_constant<int, Config::kPanelsV>;
  const auto load = [&](const auto& ring, uint32_t n, const CUtensorMap& map, auto panels, int rows,
                        int64_t first_row, int head, int b) {
    ring.begin(n);
#pragma unroll
    for (int panel = 0; panel < decltype(panels)::value; ++panel)
      ptx::tma_load_4d(ring.tile(n) + panel * rows * device::kPanelRowBytes, map, ring.full(n),
                       panel * device::kPanelColumns, static_cast<int32_t>(first_row), head, b);
  };
  uint32_t q_tile = 0, kv_tile = 0;
  const auto splits = static_cast<uint32_t>(parts.num_parts);
  const auto load_tile = [&](uint32_t tile) {
    // NOLINTNEXTLINE(misc-const-correctness): calls in parts change it
    Work work = find_work<Config>(problem, order, s_sequences, splits > 1 ? tile / splits : tile);
    if (splits > 1) take_split<Config>(work, tile % splits, splits);
    const auto load_keys = [&](const auto& ring, const CUtensorMap& map, auto panels, int i) {
      const int key_tile = tile_in_turn(problem, i, work.num_tiles);
      load(ring, kv_tile + i, map, panels, Config::kTileN,
           work.sequence.first_k + work.keys.any.begin + int64_t{key_tile} * Config::kTileN,
           work.head_kv, work.b);
    };
    // The first K before Q, whose place may be free last.
    if (work.num_tiles > 0) load_keys(shared.k, maps.k, Panels{}, 0);
    shared.q(0).wait_free(q_tile);
    shared.work_of(q_tile) = tile_work<Element>(problem, parts, work);
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer)
      load(shared.q(consumer), q_tile, maps.q, Panels{}, kWarpgroupRows,
           work.sequence.first_q + work.tile_row + consumer * kWarpgroupRows, work.head, work.b);
    ++q_tile;
    for (int i = 0; i < work.num_tiles; ++i) {
      if (i > 0) load_keys(shared.k, maps.k, Panels{}, i);
      load_keys(shared.v, maps.v, PanelsV{}, i);
    }
    kv_tile += work.num_tiles;
  };
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  bool counted = false;
  if constexpr (kHasFeatures<Call>) counted = is_ragged(problem);
  if (splits > 1)
    load_tile(blockIdx.x);  // a block for each part
  else if (counted)
    for_each_counted_tile(order.tiles, counter, load_tile);
  else
    for_each_tile(order, load_tile);
  shared.q(0).wait_free(q_tile);
  shared.work_of(q_tile).rows = 0;
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) shared.q(consumer).end(q_tile);
}

// ---- consumer -------------------------------------------------------------------------------------

// s = Q K^T: the warpgroup's 64 rows of Q and all keys of a tile, both in shared memory.
template <class Config, class Element, int kCount>
__device__ void issue_q_k(float (&scores)[kCount], uint32_t s_q, uint32_t s_k) {
  const uint64_t q = device::k_major_descriptor(s_q), k = device::k_major_descriptor(s_k);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 2;
    ptx::wgmma_m64k16_ss<Element>(scores, device::advance(q, panel * kWarpgroupRows * 8 + in_panel),
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

// A bit for each of a row's columns in one thread, which are 8 j + {0, 1} of a tile. Sixteen such pairs fill a word.
constexpr int kColumnsOfWord = 128;

// The first `count` bits.
__device__ inline uint32_t low_bits(int count) {
  return count >= 32 ? 0xffffffffu : ~(0xffffffffu << count);
}

// Of the columns of a word those from `begin` to `end`.
__device__ inline uint32_t columns_between(int begin, int end) {
  const auto before = [](int column) {
    const int c = max(column, 0);
    return min(c / 8, 16) * 2 + min(c % 8, 2);
  };
  return low_bits(before(end)) & ~low_bits(before(begin));
}

// -inf where the row does not see the key: of scores[first] and after, which are of one word.
template <int kCount>
__device__ void mask_scores(float (&scores)[kCount], int first, const uint32_t (&seen)[2]) {
#pragma unroll
  for (int i = 0; i < kColumnsOfWord / 2 && first + i < kCount; ++i)
    if ((seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) scores[first + i] = negative_infinity();
}

// Finishes scores that are more than scaled products; `centre` is that of the first row, in columns from the thread's first.
template <int kCount>
__device__ void modify_scores(float (&scores)[kCount], const FullProblem& p, int b, int head,
                              float centre) {
  if (p.f.score.softcap > 0) {
    // cap * tanh(x) = cap - 2 cap / (e^2x + 1), off by 2^-23 of the cap: the table takes no large ones.
    const float cap = p.f.score.softcap;
    const float to_exponent = 2 * kLog2E * p.scale / cap;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      scores[i] = fmaf(-2 * cap,
                       ptx::rcp_approx_ftz(ptx::ex2_approx_ftz(scores[i] * to_exponent) + 1), cap);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = rounded_product(p.scale, scores[i]);
  }
  if (p.f.score.slopes.data != nullptr) {
    const float slope = p.f.score.slopes.load(b * p.f.score.slopes_batch_stride + head);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      constexpr int kRowStep = 8;  // the second row's centre is as far on
      const auto column = static_cast<float>(8 * (i / 4) + i % 2 - kRowStep * (i / 2 % 2));
      scores[i] = fmaf(-slope, fabsf(centre - column), scores[i]);
    }
  }
}

// Zeros from row `valid` of a tile of V on: what follows a sequence may be NaN, which a weight of 0 does not stop. Each
// consumer does it for itself; the others write the same.
template <class Config>
__device__ void clear_rows(uint32_t s_tile, int valid, unsigned thread) {
  constexpr int kChunks = Config::kPanelsV * device::kPanelRowBytes / 16;
  for (int i = valid * kChunks + static_cast<int>(thread); i < Config::kTileN * kChunks; i += 128) {
    const int row = i / kChunks, panel = i % kChunks / 8, chunk = i % 8;
    const uint32_t address =
        s_tile + (panel * Config::kTileN + row) * device::kPanelRowBytes + chunk * 16;
    *static_cast<uint4*>(__cvta_shared_to_generic(address)) = make_uint4(0, 0, 0, 0);
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
// get the bits that weigh() gave them: a row does not depend on its neighbours. In the first tile O is 0.
template <class Element, bool kFirst, int kCount, int kSteps, int kCountO>
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
  if (__all_sync(kFullWarp, near[0] && near[1]))
    exponentiate<Element>(
        scores, [&](float x, int row) { return fmaf(x, scale_log2, state.offset[row]); }, p, sum);
  else
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
  if (!kFirst) scale_rows(o, factor);
}

// O from registers to global memory: rows `row` and `row` + 8 of the `rows` at `g_o`, where there are such. A thread's columns
// 2t and 2t + 1 of four blocks of 8 become, between the lanes of its quad, all 8 columns of block t: 16 bytes to store.
template <class Element, int kCount>
__device__ void store_rows(const float (&o)[kCount], Element* g_o, int64_t row_stride, int channels,
                           int row, int rows, unsigned lane_in_quad) {
  const int blocks = channels / 8;
  const bool odd = lane_in_quad % 2 != 0, high = lane_in_quad / 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Element* g_row = g_o + (row + 8 * r) * row_stride;
    const bool valid = row + 8 * r < rows;
#pragma unroll
    for (int first = 0; first < kCount / 4; first += 4) {
      uint32_t x[4];  // of block first + i
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = device::pack16<Element>(o[4 * (first + i) + 2 * r], o[4 * (first + i) + 2 * r + 1]);
        // A transpose of four by four words: blocks of two by two words first.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(kFullWarp, high ? x[i] : x[i + 2], 2);
        (high ? x[i] : x[i + 2]) = other;
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = other;
      }
      const int block = first + static_cast<int>(lane_in_quad);
      if (valid && block < blocks)
        reinterpret_cast<uint4*>(g_row)[block] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// The same of an fp32 O: 32 bytes of each row from a quad.
template <int kCount>
__device__ void store_wide_rows(const float (&o)[kCount], float* g_o, int64_t row_stride,
                                int channels, int row, int rows, unsigned lane_in_quad) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= rows) continue;
    float* g_row = g_o + (row + 8 * r) * row_stride + 2 * lane_in_quad;
#pragma unroll
    for (int block = 0; block < kCount / 4; ++block)
      if (8 * block < channels)
        *reinterpret_cast<float2*>(g_row + 8 * block) =
            make_float2(o[4 * block + 2 * r], o[4 * block + 2 * r + 1]);
  }
}

// head_dim_v, which without features is head_dim.
__device__ inline int value_dim(const Problem& p) { return static_cast<int>(p.head_dim); }
__device__ inline int value_dim(const FullProblem& p) { return static_cast<int>(p.head_dim_v); }

// The named barriers that let consumers issue their products in turn.
enum NamedBarrier : uint32_t { kBarClear = 1, kBarTurn = 4 };

template <class Config, class Element, class Call>
__device__ void consume(const Shared<Config, Element>& shared, const Call& problem,
                        const MergeProblem& parts, unsigned consumer) {
  constexpr int kTileN = Config::kTileN;
  const unsigned thread = threadIdx.x % 128;
  const unsigned warp = thread / 32, lane = thread % 32, lane_in_quad = lane % 4;
  // Never 0: a masked score of -inf stays -inf.
  const float scale_log2 = fmaxf(factor_of_scores(problem) * kLog2E, 1.4e-45f);
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
  // Tiles of keys that no row of this consumer sees: its turns, which the others wait for, and its part of the places.
  const auto skip = [&](uint32_t kv_tile, int count) {
    for (int i = 0; i < count; ++i) {
      take_turn();
      pass_turn();
      shared.k.wait_full(kv_tile + i);
      release(shared.k, kv_tile + i);
      shared.v.wait_full(kv_tile + i);
      release(shared.v, kv_tile + i);
    }
  };
  // Rows of this consumer in a tile, and of this thread: row and row + 8.
  const int first_row = static_cast<int>(consumer) * kWarpgroupRows;
  const int row = first_row + static_cast<int>(16 * warp + lane / 4);
  const auto q = shared.q(consumer);

  // Each turn's barrier has one consumer that waits and one that arrives; before the first turn nobody has passed it.
  if (consumer == Config::kConsumers - 1) pass_turn();
  uint32_t kv_tile = 0;
  for (uint32_t q_tile = 0;; ++q_tile) {
    q.wait_full(q_tile);
    const TileWork& work = shared.work_of(q_tile);
    // The same in all lanes, and the compiler may know.
    const auto uniform = [](int x) { return __shfl_sync(kFullWarp, x, 0); };
    const int rows = uniform(work.rows);
    if (rows == 0) break;
    const int num_tiles = uniform(work.num_tiles), keys = uniform(work.keys);
    const int seen_begin = uniform(work.seen_begin), seen_end = uniform(work.seen_end);
    const auto cut = [&](int key) { return min(max(key, 0), keys); };
    // Of the keys that this consumer's rows see, any of them or all.
    const int last_row = min(first_row + kWarpgroupRows, rows) - 1;
    const int any_begin = cut(seen_begin + first_row), any_end = cut(seen_end + last_row);
    const int all_begin = cut(seen_begin + last_row), all_end = cut(seen_end + first_row);
    const bool sees = first_row <= last_row && any_begin < any_end;
    // The tiles of those, in turn. With slopes the last comes first: see tile_in_turn().
    int begin = sees ? any_begin / kTileN : 0;
    int end = sees ? (any_end + kTileN - 1) / kTileN : 0;
    if (sees && last_tiles_first(problem)) {
      const int after = num_tiles - end;
      end = num_tiles - begin;
      begin = after;
    }

    float o[Config::kHeadDimV / 2] = {};
    RowStates state;
    if constexpr (kHasFeatures<Call>) {
      const float sink = sink_of(problem, work.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        state.m[r] = sink;
        state.l[r] = sink != negative_infinity() && lane_in_quad == 0 ? 1.0f : 0.0f;
      }
    }
    if (sees) {
      const uint32_t s_q = q.tile(q_tile);
      float scores[kTileN / 2];
      uint32_t p[kTileN / 16][4];
      const auto mask = [&](int i) {
        const int key = tile_in_turn(problem, i, num_tiles) * kTileN;
        const int first_column = key + 2 * static_cast<int>(lane_in_quad);
        if constexpr (kHasFeatures<Call>) {
          if (modifies_scores(problem))
            modify_scores(scores, problem, work.b, work.head,
                          work.centre + static_cast<float>(row - first_column));
        }
        if (key >= all_begin && all_end - key >= kTileN) return;
#pragma unroll
        for (int column = 0; column < kTileN; column += kColumnsOfWord) {
          uint32_t seen[2];
#pragma unroll
          for (int r = 0; r < 2; ++r)
            seen[r] = columns_between(cut(seen_begin + row + 8 * r) - first_column - column,
                                      cut(seen_end + row + 8 * r) - first_column - column);
          mask_scores(scores, column / 2, seen);
        }
      };

      // Of the i-th tile of V in time, before its product.
      const auto clear_past_end = [&](int i) {
        if constexpr (kHasFeatures<Call>) {
          const int valid = keys - tile_in_turn(problem, i, num_tiles) * kTileN;
          if (valid >= kTileN) return;
          clear_rows<Config>(shared.v.tile(kv_tile + i), valid, thread);
          ptx::fence_async_shared();
          // SAFETY: the rows are cleared before products read them.
          ptx::named_barrier_sync(kBarClear + consumer, 128);
        }
      };

      skip(kv_tile, begin);
      shared.k.wait_full(kv_tile + begin);
      take_turn();
      ptx::wgmma_fence();
      issue_q_k<Config, Element>(scores, s_q, shared.k.tile(kv_tile + begin));
      pass_turn();
      ptx::wgmma_wait<0>();
      release(shared.k, kv_tile + begin);
      mask(begin);
      constexpr uint32_t kBothRows = 3;
      weigh_under_new_maximum<Element, true>(scores, scale_log2, kBothRows, state, p, o);

#pragma unroll 1
      for (int i = begin + 1; i < end; ++i) {
        shared.v.wait_full(kv_tile + i - 1);
        clear_past_end(i - 1);
        shared.k.wait_full(kv_tile + i);
        take_turn();
        ptx::wgmma_fence();
        issue_p_v<Config, Element>(o, p, shared.v.tile(kv_tile + i - 1));
        issue_q_k<Config, Element>(scores, s_q, shared.k.tile(kv_tile + i));
        pass_turn();
        ptx::wgmma_wait<0>();
        release(shared.v, kv_tile + i - 1);
        release(shared.k, kv_tile + i);
        mask(i);
        bool done;
        const uint32_t asks = weigh<Element>(scores, scale_log2, state, p, &done);
        if (!done) weigh_under_new_maximum<Element, false>(scores, scale_log2, asks, state, p, o);
      }
      release(q, q_tile);
      shared.v.wait_full(kv_tile + end - 1);
      clear_past_end(end - 1);
      ptx::wgmma_fence();
      issue_p_v<Config, Element>(o, p, shared.v.tile(kv_tile + end - 1));
      ptx::wgmma_wait<0>();
      release(shared.v, kv_tile + end - 1);
      // Now, not beside the product: it waits for tiles that may be loaded in the place of that V.
      skip(kv_tile + end, num_tiles - end);
    } else {
      release(q, q_tile);
      skip(kv_tile, num_tiles);
    }
    kv_tile += num_tiles;

    // ---- output
    const bool in_parts = parts.num_parts > 1;
    const int64_t lse_stride = in_parts ? parts.lse_parts.row_stride : problem.lse.row_stride;
    const int64_t o_stride = in_parts ? parts.parts.row_stride : problem.o.row_stride;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = quad_sum(state.l[r]);
      // 0: the row sees no key, else the greatest score alone weighs 1.
      inverse[r] = l == 0.0f ? 0.0f : ptx::rcp_approx_ftz(l);
      if (lane_in_quad == 0 && work.lse != nullptr && row + 8 * r < rows)
        work.lse[(row + 8 * r) * lse_stride] = lse_of(state.m[r], factor_of_scores(problem), l);
    }
    scale_rows(o, inverse);
    if (in_parts || has_wide_outputs(problem))
      store_wide_rows(o, static_cast<float*>(work.o), o_stride, value_dim(problem), row, rows,
                      lane_in_quad);
    else
      store_rows(o, static_cast<Element*>(work.o), o_stride, value_dim(problem), row, rows,
                 lane_in_quad);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    forward_kernel(const __grid_constant__ Call problem, const __grid_constant__ TensorMaps maps,
                   const __grid_constant__ MergeProblem parts, const TileOrder dense_order,
                   uint32_t* counter) {
  extern __shared__ __align__(1024) unsigned char s_memory[];
  const Shared<Config, Element> shared(s_memory);
  // The same in all lanes, and the compiler may know.
  const unsigned warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(maps.q);
    ptx::tma_prefetch_map(maps.k);
    ptx::tma_prefetch_map(maps.v);
    constexpr uint32_t kConsumerWarps = 4 * Config::kConsumers;
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) shared.q(consumer).init(4);
    shared.k.init(kConsumerWarps);
    shared.v.init(kConsumerWarps);
    ptx::mbarrier_init_fence();
    ptx::fence_async_shared();
  }
  __syncthreads();  // SAFETY: the barriers are initialised.
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  TileOrder order = dense_order;
  auto* s_sequences =
      reinterpret_cast<uint32_t*>(s_memory + sizeof(SharedStorage<Config, Element>));
  if constexpr (kHasFeatures<Call>) {
    if (is_ragged(problem)) {
      using Storage = SharedStorage<Config, Element>;
      static_assert(sizeof(typename Storage::KTile) >= 4 * kMaxSequences);
      // Over the first K, which is not there yet.
      auto* s_keys = reinterpret_cast<uint32_t*>(s_memory + offsetof(Storage, k));
      order.tiles = sort_sequences<Config>(problem, s_sequences, s_keys);
    }
  }
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kRegisters.of_producer>();
    if (threadIdx.x == 0) produce(shared, problem, maps, parts, order, counter, s_sequences);
  } else {
    ptx::setmaxnreg_inc<Config::kRegisters.of_consumer>();
    consume(shared, problem, parts, warpgroup - 1);
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, class Config>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY(preload_combine());
    CUFLASH_TRY(
        device::load_kernel(forward_kernel<Element, Config, Problem>, name, kSharedBytes<Config>));
    return device::load_kernel(forward_kernel<Element, Config, FullProblem>, name,
                               kSharedBytesOfRagged<Config>);
  });
}

// Without a mask all tiles are alike, and heads come one after the other: what runs together reads the same K and V. With one, a
// section is as few heads as make whole rounds, at most as many as fit L2 together. In both K and V of new heads come from
// memory in every round. All at once, in the first of the rounds of a long section, blocks waited for them about as long as
// they computed (docs/log/0023).
inline TileOrder tile_order(const Problem& p, int tile_m, int64_t blocks) {
  const int64_t heads = p.batch * p.heads_q, group = p.heads_q / p.heads_kv;
  const int64_t m_tiles = ceil_div(p.len_q, tile_m);
  constexpr int64_t kSectionBytes = int64_t{32} << 20;  // of K and V, of the 60 MB of L2
  const int64_t key_bytes = 2 * (p.head_dim + p.head_dim_v);
  const auto order = [&](int64_t section, int64_t sections, int64_t dealt) -> TileOrder {
    return {static_cast<uint32_t>(m_tiles),
            static_cast<uint32_t>(m_tiles * heads),
            static_cast<uint32_t>(section),
            static_cast<uint32_t>(sections),
            static_cast<uint32_t>(dealt),
            static_cast<uint32_t>(group),
            static_cast<uint32_t>(kSectionBytes / key_bytes)};
  };
  if (p.mask.is_full()) return order(group, heads / group, 0);
  const int64_t most = group * max64(1, kSectionBytes / (p.len_k * key_bytes));
  const int64_t whole_rounds = blocks / std::gcd(blocks, m_tiles);
  const int64_t section = min64(heads, min64(most, group * ceil_div(whole_rounds, group)));
  // The last rounds take the rest too, where that fits: they end together when their tiles are sorted together.
  const int64_t rest = heads % section;
  const bool joins = rest == 0 || section + rest <= most;
  const int64_t sections = heads / section - (joins ? 1 : 0);
  return order(section, sections, sections);
}

template <class Element, class Config>
Status launch(const char* name, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<Config>);
  CUFLASH_TRY((preload<Element, Config>(name, context.device)));
  const Problem& p = problem;
  // Of packed tensors too there are `batch` entries: all of them are the first, at a stride of 0.
  const int64_t rows_q = query_extents(p).rows, rows_k = key_extents(p).rows;
  TensorMaps maps;
  CUFLASH_TRY(device::encode_tensor_map(p.q, p.batch, p.heads_q, rows_q, p.head_dim, kWarpgroupRows,
                                        &maps.q));
  CUFLASH_TRY(device::encode_tensor_map(p.k, p.batch, p.heads_kv, rows_k, p.head_dim,
                                        Config::kTileN, &maps.k));
  CUFLASH_TRY(device::encode_tensor_map(p.v, p.batch, p.heads_kv, rows_k, p.head_dim_v,
                                        Config::kTileN, &maps.v));
  device::LaunchShape shape{plan.blocks, Config::kThreads, kSharedBytes<Config>};
  const TileOrder order = tile_order(p, Config::kTileM, plan.blocks);
  // NOLINTNEXTLINE(misc-const-correctness): the kernel writes to it
  uint32_t* counter = plan.counts_tiles ? context.counter : nullptr;
  const MergeProblem parts = split_merge(p, plan.num_splits, context.workspace);
  if (p.features == nullptr) {
    CUFLASH_TRY(device::launch(forward_kernel<Element, Config, Problem>, name, shape,
                               context.stream, p, maps, parts, order, counter));
  } else {
    shape.shared_memory = kSharedBytesOfRagged<Config>;
    CUFLASH_TRY(device::launch(forward_kernel<Element, Config, FullProblem>, name, shape,
                               context.stream, FullProblem(p), maps, parts, order, counter));
  }
  return plan.num_splits > 1 ? combine_parts(parts, context) : CUFLASH_SUCCESS;
}

}  // namespace cuflash::forward_wgmma
