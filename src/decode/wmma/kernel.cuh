// Decode on tensor cores through nvcuda::wmma: f16 from sm_70, bf16 from sm_80; any strides, masks and lengths;
// head_dim up to the bucket, padded with zeros. A template of its Call: Problem, or FullProblem with the features that
// decode/tile.hpp lists, where each key's place is looked up.
//
// One block takes 16 query rows that share a KV head (the heads of a group, for one query token or several) and a
// part of the keys, so that each key is read once for all of them. It is made to read memory; the tensor cores have
// little to do. Every warp takes keys of its own, 16 at a time, and keeps a softmax of its own over them: it fills its
// own ring of slots and waits for nobody.
//
//   warp w, step n: keys 16 * (w + n * kWarps) ...
//
//   copies   [ K(n+1)          ][ V(n+1)                              ]|[ K(n+2) ...      3 slots: 2 being filled
//   warp      S = Q K(n)^T, softmax of S by rows    O += P V(n)
//   waits    ^ K(n) is there                       ^ V(n) is there
//
// WMMA does not say which element of a matrix a thread holds: scores pass through shared memory and O is scaled by
// learnt row numbers, as in the forward kernel. At the end the warps bring their O to a common maximum and add them up
// in shared memory. Several parts of a sequence leave fp32 results in the workspace, which decode/combine.cu merges.
//
// Shared memory, for head_dim 128 (62 KB; 45 KB at 64, 61 KB at 256, with two warps):
//   q        [16][128 + 8]       16 bit             4,352 bytes
//   warps[4] [3][16][128 + 8]    16 bit     each   13,056             K and V; at the end O, fp32
//            [16][16 + 8] fp32 + 3 [16] fp32 each   1,728             scores, then P; factors, maxima, sums
//
// Limits: 16 rows, so a group of 1 uses a sixteenth of the tensor cores' work; more rows read the keys again, from L2.
#pragma once

#include "attention/base2_softmax.cuh"
#include "attention/wmma_softmax.cuh"
#include "decode/launch_parts.cuh"
#include "decode/tile.hpp"
#include "decode/wmma/config.hpp"
#include "device/load_tile.cuh"
#include "device/once_per_device.hpp"
#include "device/packed16.cuh"
#include "device/wmma_fragments.cuh"

namespace cuflash::decode_wmma {

namespace ptx = device::ptx;
namespace wmma = nvcuda::wmma;

using device::Accumulator;
using device::bf16;
using device::f16;
using device::LeftFragment;
using device::load_fragment;

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- input ----------------------------------------------------------------------------------------

// The tile's rows of Q to s_q, zeros past them and past head_dim. By the whole block; complete after a barrier.
template <class Config, class Element>
__device__ void load_q(Element (&s_q)[Config::kRows][Config::kLdTile], const Problem& problem,
                       const decode::Tile& tile, bool vector_access) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = Config::kHeadDim / kChunk;
  const int head_dim = static_cast<int>(problem.head_dim);
  for (unsigned i = threadIdx.x; i < Config::kRows * kChunks; i += Config::kThreads) {
    const int row = static_cast<int>(i / kChunks);
    const int channel = static_cast<int>(i % kChunks * kChunk);
    const decode::Row from = decode::row_of(problem, tile, row);
    const Element* g_chunk = problem.q.row<const Element>(tile.b, from.head, from.query) + channel;
    Element* s_chunk = &s_q[row][channel];
    const int valid = row < tile.rows ? head_dim - channel : 0;
    if (vector_access) {
      *reinterpret_cast<uint4*>(s_chunk) =
          valid > 0 ? *reinterpret_cast<const uint4*>(g_chunk) : make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) s_chunk[j] = j < valid ? g_chunk[j] : Element(0.0f);
    }
  }
}

// Where the rows of a warp's next 16 keys lie, in calls with features: in pages, or in any entry of the cache. Lane i < 16
// knows the row of key i in K, lane 16 + i that in V. They are found a step before they are needed, since finding reads
// tables.
template <class Config>
class Places {
 public:
  static constexpr int kKeys = Config::kTileN;
  static constexpr uint32_t kAllKeys = (1u << kKeys) - 1;
  static_assert(kKeys == 16, "two keys' rows by 32 lanes, two sets of keys by 32 bits");
  static_assert(Config::kSlots == 3 || Config::kSlots == 4,
                "K is loaded a step ahead of its scores");

  __device__ __forceinline__ void find(const FullProblem& problem, const decode::Tile& tile,
                                       unsigned first_key, unsigned lane) {
    const KeySlot at = decode::slot_of_key(problem, tile, first_key + lane % kKeys);
    offset_ = lane < kKeys ? decode::row_offset(problem.k, at) : decode::row_offset(problem.v, at);
  }
  // The keys that were found are loaded now.
  __device__ __forceinline__ void take_keys() {
    valid_ = valid_ << kKeys | (__ballot_sync(kFullWarp, offset_ >= 0) & kAllKeys);
  }
  // By all lanes.
  __device__ __forceinline__ int64_t offset(bool of_k, unsigned row) const {
    return __shfl_sync(kFullWarp, offset_, of_k ? row : row + kKeys);
  }
  // Of the step whose scores are computed, a bit for each key that can be seen: one step was taken since.
  __device__ __forceinline__ uint32_t valid_keys() const { return valid_ >> kKeys; }

 private:
  int64_t offset_;      // in elements from the tensor's first row of the head; negative: none
  uint32_t valid_ = 0;  // of the last two steps, the older one high
};

// ---- products -------------------------------------------------------------------------------------

// Scores of all rows and the 16 keys of a slot: Q K^T, left in s_warp.scores.
template <class Config, class Element, class Warp>
__device__ void multiply_q_k(Warp& s_warp, const Element (&s_q)[Config::kRows][Config::kLdTile],
                             const Element (&s_k)[Config::kTileN][Config::kLdTile]) {
  // Two sums at a time: one would leave each product waiting for the last.
  Accumulator scores[2];
  wmma::fill_fragment(scores[0], 0.0f);
  wmma::fill_fragment(scores[1], 0.0f);
#pragma unroll
  for (int f = 0; f < Config::kHeadDim / kFragment; ++f) {
    LeftFragment<Element> q;
    device::RightTransposedFragment<Element> k;
    load_fragment(q, &s_q[0][f * kFragment], Config::kLdTile);
    load_fragment(k, &s_k[0][f * kFragment], Config::kLdTile);
    wmma::mma_sync(scores[f % 2], q, k, scores[f % 2]);
  }
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; ++e) scores[0].x[e] += scores[1].x[e];
  wmma::store_matrix_sync(s_warp.scores[0], scores[0], Config::kLdScores, wmma::mem_row_major);
}

// Makes scores of products, in calls with features: this lane's part of row lane / 2, as softmax_strip() shares it out.
// Keys that are not `valid`, a bit each, get -infinity; what the row does not see stays as it is.
template <class Config, class Warp>
__device__ void finish_scores(Warp& s_warp, unsigned lane, Columns seen, uint32_t valid,
                              const ModifiedRow& row, unsigned first_key) {
  // One at a time: unrolled, scores in the making take the registers that O needs.
#pragma unroll 1
  for (unsigned i = 0; i < Config::kTileN / 2; ++i) {
    const unsigned column = i / 4 * 8 + lane % 2 * 4 + i % 4;
    if (!seen.contain(column)) continue;
    float& score = s_warp.scores[lane / 2][column];
    if ((valid >> column & 1) == 0)
      score = negative_infinity();
    else if (modifies_scores(row.p))
      score = row.score(score, int64_t{first_key} + column);
  }
}

// Whether products are not yet scores, or some of a step's keys are not there. `places` is Places.
template <class Places>
__device__ __forceinline__ bool has_scores_to_finish(const Problem&, const Places&) {
  return false;
}
template <class Places>
__device__ __forceinline__ bool has_scores_to_finish(const FullProblem& problem,
                                                     const Places& places) {
  return modifies_scores(problem) || places.valid_keys() != Places::kAllKeys;
}

// o += P V for the 16 keys of a slot.
template <class Config, class Element, class Warp, int kChannelFragments>
__device__ void multiply_p_v(Accumulator (&o)[kChannelFragments], const Warp& s_warp,
                             const Element (&s_v)[Config::kTileN][Config::kLdTile]) {
  LeftFragment<Element> p;
  load_fragment(p, s_warp.weights[0], Config::kLdScores);
#pragma unroll
  for (int f = 0; f < kChannelFragments; ++f) {
    device::RightFragment<Element> v;
    load_fragment(v, &s_v[0][f * kFragment], Config::kLdTile);
    wmma::mma_sync(o[f], p, v, o[f]);
  }
}

// ---- output ---------------------------------------------------------------------------------------

// The sums of the warps' O, which are scaled to add up to the rows of the result.
template <class Config, class Element, class Storage, class Call>
__device__ void store_rows(const Storage& s, const Call& problem, const MergeProblem& parts,
                           const decode::Tile& tile, bool vector_access) {
  constexpr int kChunk = 4;
  constexpr int kChunks = Config::kHeadDim / kChunk;
  const int head_dim = decode::value_dim(problem);
  for (unsigned i = threadIdx.x; i < Config::kRows * kChunks; i += Config::kThreads) {
    const int row = static_cast<int>(i / kChunks);
    const int channel = static_cast<int>(i % kChunks * kChunk);
    if (row >= tile.rows || channel >= head_dim) continue;
    float o[kChunk] = {};
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const auto x = *reinterpret_cast<const float4*>(&s.warps[w].o[row][channel]);
      o[0] += x.x, o[1] += x.y, o[2] += x.z, o[3] += x.w;
    }
    const auto target = decode::target_of<Element>(problem, parts, tile, row);
    if (vector_access) {
      if (target.partial != nullptr)
        *reinterpret_cast<float4*>(target.partial + channel) = make_float4(o[0], o[1], o[2], o[3]);
      else
        device::store_packed16(target.o + channel, o);
    } else {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        if (channel + j >= head_dim) break;
        if (target.partial != nullptr)
          target.partial[channel + j] = o[j];
        else
          target.o[channel + j] = Element(o[j]);
      }
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, class Call>
__device__ void decode_block(const Call& problem, const MergeProblem& parts, bool vector_access) {
  constexpr int kTileN = Config::kTileN;
  constexpr int kSlots = Config::kSlots;
  constexpr int kChannelFragments = Config::kHeadDim / kFragment;
  constexpr unsigned kStepKeys = Config::kWarps * kTileN;

  extern __shared__ __align__(128) unsigned char s_memory[];
  auto& s = *reinterpret_cast<SharedStorage<Config, Element>*>(s_memory);
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  auto& s_warp = s.warps[warp];
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = decode::value_dim(problem);
  const float scale_log2 = factor_of_scores(problem) * kLog2E;

  const decode::Tile tile = decode::tile_of<Config::kRows>(problem, parts.num_parts, blockIdx.x);
  // Keys are counted from the part's first. Unsigned: there may be 2^31 - 1, and the loop steps past them.
  const auto num_keys = static_cast<unsigned>(tile.keys.end - tile.keys.begin);
  const auto unmasked_begin = static_cast<unsigned>(tile.common.begin - tile.keys.begin);
  const auto unmasked_end = static_cast<unsigned>(tile.common.end - tile.keys.begin);
  const auto own_row = static_cast<int>(lane / 2);  // of the softmax
  const decode::KeyInterval seen = decode::keys_of_row(problem, tile, own_row);
  // With features keys lie anywhere, and these are the first rows of the head.
  const int64_t first_entry = kHasFeatures<Call> ? 0 : tile.b;
  const int64_t first_slot = kHasFeatures<Call> ? 0 : tile.keys.begin;
  const Element* g_k = problem.k.template row<const Element>(first_entry, tile.head_kv, first_slot);
  const Element* g_v = problem.v.template row<const Element>(first_entry, tile.head_kv, first_slot);
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  [[maybe_unused]] Places<Config> places;
  if constexpr (kHasFeatures<Call>) places.find(problem, tile, warp * kTileN, lane);

  // Copies the warp's 16 keys, or values, from `key` on into a slot. A group of copies also where there are none: the
  // waits below count.
  const auto load = [&](unsigned slot, const Element* g_tensor, int64_t row_stride, int channels,
                        unsigned key) {
    if (key < num_keys)
      device::load_tile<32, kTileN, Config::kHeadDim, Config::kLdTile>(
          s_warp.slots[slot][0], g_tensor + key * row_stride, row_stride,
          static_cast<int>(num_keys - key), channels, vector_access, lane);
    ptx::cp_async_commit();
  };
  // The ring holds K(0), V(0), K(1), V(1), ...; `filled` counts what was started.
  unsigned filled = 0;
  const auto load_next = [&] {
    const unsigned key = warp * kTileN + filled / 2 * kStepKeys;
    const bool of_k = filled % 2 == 0;
    if constexpr (kHasFeatures<Call>) {
      if (of_k) places.take_keys();
      if (key < num_keys)
        device::load_tile_rows<32, kTileN, Config::kHeadDim, Config::kLdTile>(
            s_warp.slots[filled % kSlots][0], of_k ? g_k : g_v,
            [&](unsigned row) { return places.offset(of_k, row); }, of_k ? head_dim : head_dim_v,
            vector_access, lane);
      ptx::cp_async_commit();
      if (!of_k) places.find(problem, tile, key + kStepKeys, lane);
    } else if (of_k) {
      load(filled % kSlots, g_k, problem.k.row_stride, head_dim, key);
    } else {
      load(filled % kSlots, g_v, problem.v.row_stride, head_dim_v, key);
    }
    ++filled;
  };
#pragma unroll
  for (int slot = 0; slot < kSlots - 1; ++slot) load_next();
  load_q<Config>(s.q, problem, tile, vector_access);
  const uint32_t element_rows =
      device::learn_element_rows<Config::kLdScores>(s_warp.scores[0], lane);
  Accumulator o[kChannelFragments];
#pragma unroll
  for (int f = 0; f < kChannelFragments; ++f) wmma::fill_fragment(o[f], 0.0f);
  RowState state;
  if constexpr (kHasFeatures<Call>) {
    // A row's sink counts once: in part 0, in one warp, in one of the two lanes' sums.
    const float sink = sink_of(problem, decode::row_of(problem, tile, own_row).head);
    if (tile.split == 0 && warp == 0 && sink != negative_infinity()) {
      state.m = sink;
      state.l = lane % 2 == 0 ? 1.0f : 0.0f;
    }
  }
  __syncthreads();  // SAFETY: Q is there; the row numbers have been read.

  unsigned used = 0;  // slot of the next K or V
  const auto next_slot = [&] {
    const unsigned slot = used;
    used = used + 1 == kSlots ? 0 : used + 1;
    return slot;
  };
  for (unsigned key = warp * kTileN; key < num_keys; key += kStepKeys) {
    ptx::cp_async_wait<kSlots - 2>();
    // SAFETY: this K has landed for all lanes; all have read the last V, whose slot is filled next, the last weights
    // and factors.
    __syncwarp();
    load_next();
    multiply_q_k<Config>(s_warp, s.q, s_warp.slots[next_slot()]);
    __syncwarp();  // SAFETY: the scores are written.
    bool rescale;
    if (key < unmasked_begin || unmasked_end < key + kTileN ||
        has_scores_to_finish(problem, places)) {
      const auto edge = [&](unsigned end) {  // of the row's keys, as a column of the tile
        return static_cast<int>(end <= key ? 0 : min(end - key, unsigned{kTileN}));
      };
      const Columns columns = {edge(seen.begin), edge(seen.end)};
      if constexpr (kHasFeatures<Call>)
        finish_scores<Config>(s_warp, lane, columns, places.valid_keys(),
                              decode::modified_row(problem, tile, own_row), key);
      rescale = softmax_strip<true, Config>(s_warp, 0, lane, scale_log2, columns, state);
    } else {
      rescale = softmax_strip<false, Config>(s_warp, 0, lane, scale_log2, {}, state);
    }

    ptx::cp_async_wait<kSlots - 2>();
    // SAFETY: this V has landed for all lanes; all have read this K, whose slot is filled next; weights and factors are
    // written.
    __syncwarp();
    load_next();
    if (rescale) device::scale_rows(o, s_warp.row_factors, element_rows);
    multiply_p_v<Config>(o, s_warp, s_warp.slots[next_slot()]);
  }

  // The rows of all warps to one maximum, divided by the sum of all their weights.
  const float l_warp = state.l + __shfl_xor_sync(kFullWarp, state.l, 1);
  if (lane % 2 == 0) s_warp.m[own_row] = state.m, s_warp.l[own_row] = l_warp;
  __syncthreads();  // SAFETY: maxima and sums of all warps are there; each has read its last factors.
  float m = negative_infinity(), l = 0;
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) m = fmaxf(m, s.warps[w].m[own_row]);
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w)
    l += weight_of(s.warps[w].m[own_row], m, scale_log2) * s.warps[w].l[own_row];
  const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
  if (lane % 2 == 0)
    s_warp.row_factors[own_row] = empty ? 0.0f : weight_of(state.m, m, scale_log2) / l;
  if (warp == 0 && lane % 2 == 0 && own_row < tile.rows) {
    float* g_lse = decode::target_of<Element>(problem, parts, tile, own_row).lse;
    if (g_lse != nullptr) *g_lse = lse_of(m, factor_of_scores(problem), l);
  }
  __syncwarp();  // SAFETY: the factors are written.
  device::scale_rows(o, s_warp.row_factors, element_rows);
#pragma unroll
  for (int f = 0; f < kChannelFragments; ++f)
    wmma::store_matrix_sync(&s_warp.o[0][f * kFragment], o[f], Config::kLdO, wmma::mem_row_major);
  __syncthreads();  // SAFETY: the O of all warps are written, over slots whose copies have all been waited for.
  store_rows<Config, Element>(s, problem, parts, tile, vector_access);
}

template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(KernelConfig<kHeadDim>::kThreads,
                                  KernelConfig<kHeadDim>::kMinBlocks)
    decode_kernel(const __grid_constant__ Call problem,
                  const __grid_constant__ MergeProblem parts) {
  if constexpr (device::kHasWmma<Element>) {
    // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
    bool vector_access = problem.aligned16 && problem.head_dim % 8 == 0;
    if constexpr (kHasFeatures<Call>) vector_access = vector_access && problem.head_dim_v % 8 == 0;
    decode_block<Element, KernelConfig<kHeadDim>>(problem, parts, vector_access);
  } else {
    __trap();  // bf16 needs sm_80; the table refuses such GPUs
  }
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY(device::load_kernel(decode_kernel<Element, kHeadDim, Problem>, name,
                                    kSharedBytes<kHeadDim>));
    CUFLASH_TRY(device::load_kernel(decode_kernel<Element, kHeadDim, FullProblem>, name,
                                    kSharedBytes<kHeadDim>));
    return preload_combine();
  });
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  using Config = KernelConfig<kHeadDim>;
  static_assert(sizeof(SharedStorage<Config, Element>) == kSharedBytes<kHeadDim>);
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  const device::LaunchShape shape = {0, Config::kThreads, kSharedBytes<kHeadDim>};
  if (problem.features != nullptr)
    return decode::launch_parts<FullProblem>(decode_kernel<Element, kHeadDim, FullProblem>, name,
                                             Config::kRows, shape, problem, plan, context);
  return decode::launch_parts<Problem>(decode_kernel<Element, kHeadDim, Problem>, name,
                                       Config::kRows, shape, problem, plan, context);
}

}  // namespace cuflash::decode_wmma
