// Decode on CUDA cores: f32, f16 and bf16, any strides, masks and lengths; head_dim up to the bucket. Exact in
// fp32, one pass over the keys. A template of its Call: Problem, or FullProblem with the features that decode/tile.hpp
// lists, where each key's place is looked up.
//
// One block takes a few query rows that share a KV head (4, or 2 where a lane has 8 channels) and a part of the
// keys. It is made to read memory: a key's channels lie in kLanes lanes, 16 bytes in each, and every element that
// arrives serves all rows of the tile. Each group of lanes runs a softmax of its own over its keys, so the loop has no barrier:
//
//   loads     [ V(i)           ][ K(i+1)          ][ V(i+1) ...
//   lanes      scores of K(i)    O += weights V(i)   scores of K(i+1)
//
// A step is 4 loads of K and 4 of V by each lane, 128 bytes. At the end the groups of a warp merge by shuffles, the
// warps through shared memory. Several parts of a sequence leave fp32 results in the workspace, which
// decode/combine.cu merges.
//
// Limits: a score costs log2(kLanes) shuffles for each key and row, so with 4 rows arithmetic is no longer free; with
// more rows the keys are read again, from L2.
#pragma once

#include "attention/base2_softmax.cuh"
#include "decode/scalar/config.hpp"
#include "decode/launch_parts.cuh"
#include "decode/tile.hpp"
#include "device/launch.cuh"
#include "device/once_per_device.hpp"
#include "device/unpack.cuh"

namespace cuflash::decode_scalar {

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- loads ----------------------------------------------------------------------------------------

// The channel at which a lane's chunk starts.
template <class Config>
__device__ __forceinline__ int first_channel(int lane_in_key, int chunk) {
  return (chunk * Config::kLanes + lane_in_key) * Config::kChunk;
}

// Loads this lane's channels of kCount rows of K or V, in kChunks chunks each, from row_at(n), of which those with
// valid(n) are read. The others, and channels past head_dim, become zero: nothing there, not even NaN, reaches a product.
// vector_access: chunks lie at multiples of 16 bytes and head_dim cuts none. (An alias template for the rows' type
// stops nvcc 12.4 with an internal error.)
template <class Config, bool kVectorAccess, class Element, int kCount, class RowAt, class Valid>
__device__ __forceinline__ void load_rows(device::Chunk<Element> (&rows)[kCount][Config::kChunks],
                                          RowAt row_at, int lane_in_key, int head_dim,
                                          Valid valid) {
  if constexpr (kVectorAccess) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        const int channel = first_channel<Config>(lane_in_key, chunk);
        auto* source = reinterpret_cast<const uint4*>(row_at(n) + channel);
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (valid(n) && channel < head_dim) raw = __ldg(source);
        rows[n][chunk] = reinterpret_cast<const device::Chunk<Element>&>(raw);
      }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int chunk = 0; chunk < Config::kChunks; ++chunk)
#pragma unroll
        for (int i = 0; i < Config::kChunk; ++i) {
          const int channel = first_channel<Config>(lane_in_key, chunk) + i;
          rows[n][chunk].elements[i] =
              valid(n) && channel < head_dim ? row_at(n)[channel] : Element(0.0f);
        }
  }
}

// ---- features -------------------------------------------------------------------------------------

// Where the rows of a warp's next step lie, in calls with features: in pages, or in any entry of the cache. Lane i < 16
// knows the row of the warp's key i in K, lane 16 + i that in V, so that each place is found once, and a step before it is
// needed: finding reads tables.
template <class Config>
class Places {
 public:
  static constexpr int kGroups = 32 / Config::kLanes;  // keys of the warp in a pass
  static constexpr int kKeys = 16;                     // of the warp in a step, at most
  static_assert(kGroups * Config::kPasses <= kKeys);

  // Of the step that begins with `first_key`; by all lanes.
  __device__ __forceinline__ void find(const FullProblem& problem, const decode::Tile& tile,
                                       unsigned first_key, unsigned warp, unsigned lane) {
    const unsigned i = lane % kKeys;
    const unsigned pass = i / kGroups, group = i % kGroups;
    const KeySlot at = decode::slot_of_key(
        problem, tile, first_key + pass * Config::kPassKeys + warp * kGroups + group);
    offset_ = lane < kKeys ? decode::row_offset(problem.k, at) : decode::row_offset(problem.v, at);
  }
  // The rows of this lane's keys, in elements from the tensor's first of the head; negative: none. Returns which there
  // are, a bit for each pass. By all lanes.
  __device__ __forceinline__ unsigned take(int64_t (&offsets)[Config::kPasses], bool of_k,
                                           unsigned lane) const {
    unsigned valid = 0;
#pragma unroll
    for (int n = 0; n < Config::kPasses; ++n) {
      const unsigned i = n * kGroups + lane / Config::kLanes;
      offsets[n] = __shfl_sync(kFullWarp, offset_, of_k ? i : i + kKeys);
      valid |= (offsets[n] >= 0 ? 1u : 0u) << n;
    }
    return valid;
  }

 private:
  int64_t offset_;
};

// Makes scores of products, where modifies_scores(): each lane of a key makes one, the score of pass i / kRows and row
// i % kRows, and they pass it round. Those of keys that are not there or that the row does not see stay as they are.
template <class Config, int kRows>
__device__ __forceinline__ void finish_scores(float (&scores)[Config::kPasses][kRows],
                                              const FullProblem& problem, const decode::Tile& tile,
                                              unsigned valid_passes, unsigned first_key,
                                              int lane_in_key) {
  static_assert(Config::kPasses * kRows <= Config::kLanes);
  const int row = lane_in_key % kRows, pass = lane_in_key / kRows;
  float own = 0;
#pragma unroll
  for (int n = 0; n < Config::kPasses; ++n)
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (n == pass && r == row) own = scores[n][r];
  const unsigned key = first_key + pass * Config::kPassKeys;
  if (pass < Config::kPasses && (valid_passes >> pass & 1) != 0 &&
      decode::keys_of_row(problem, tile, row).contains(key))
    own = decode::modified_row(problem, tile, row).score(own, key);
#pragma unroll
  for (int n = 0; n < Config::kPasses; ++n)
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      scores[n][r] = __shfl_sync(kFullWarp, own, n * kRows + r, Config::kLanes);
}

// ---- sums -----------------------------------------------------------------------------------------

// The softmax of one row over some keys: maximum of the raw scores, sum of weights, and this lane's channels of the
// weighted sum of V.
template <int kChannels>
struct RowSums {
  float m = negative_infinity();
  float l = 0;
  float o[kChannels] = {};

  __device__ __forceinline__ void merge(const RowSums& other, float scale_log2) {
    const float m_new = fmaxf(m, other.m);
    const float factor = rescale_factor(m, m_new, scale_log2);
    const float other_factor = rescale_factor(other.m, m_new, scale_log2);
    m = m_new;
    l = l * factor + other.l * other_factor;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) o[c] = o[c] * factor + other.o[c] * other_factor;
  }

  // Merges with the lane `offset` away.
  __device__ __forceinline__ void merge_across(int offset, float scale_log2) {
    RowSums other;
    other.m = __shfl_xor_sync(kFullWarp, m, offset);
    other.l = __shfl_xor_sync(kFullWarp, l, offset);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) other.o[c] = __shfl_xor_sync(kFullWarp, o[c], offset);
    merge(other, scale_log2);
  }
};

// ---- the kernel -----------------------------------------------------------------------------------

template <class Element, class Config, int kRows, bool kVectorAccess, class Call>
__device__ __forceinline__ void decode_block(const Call& problem, const MergeProblem& parts) {
  constexpr int kChunk = Config::kChunk, kPasses = Config::kPasses;
  using Sums = RowSums<Config::kChannels>;
  // Long sums run over this many steps with sums of their own: one long fp32 sum drifts.
  constexpr unsigned kStepsPerSum = 32;

  __shared__ SharedStorage<Config, kRows> s;
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const int lane_in_key = static_cast<int>(lane % Config::kLanes);
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = decode::value_dim(problem);
  const float scale_log2 = factor_of_scores(problem) * kLog2E;

  const decode::Tile tile = decode::tile_of<kRows>(problem, parts.num_parts, blockIdx.x);
  // Keys are counted from the part's first. Unsigned: there may be 2^31 - 1, and the loop steps past them.
  const auto num_keys = static_cast<unsigned>(tile.keys.end - tile.keys.begin);
  decode::KeyInterval seen[kRows];
  float q[kRows][Config::kChannels];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    seen[r] = decode::keys_of_row(problem, tile, r);
    const decode::Row row = decode::row_of(problem, tile, r);
    device::Chunk<Element> x[1][Config::kChunks];
    const Element* g_q = problem.q.template row<const Element>(tile.b, row.head, row.query);
    load_rows<Config, kVectorAccess, Element>(
        x, [&](int) { return g_q; }, lane_in_key, head_dim, [&](int) { return r < tile.rows; });
#pragma unroll
    for (int c = 0; c < Config::kChannels; ++c)
      q[r][c] = device::to_fp32(x[0][c / kChunk].elements[c % kChunk]);
  }

  // This lane's key of the first pass; pass n of a step is n * kPassKeys keys further on.
  const unsigned own_key = threadIdx.x / Config::kLanes;
  // With features keys lie anywhere, and g_k and g_v are the first rows of the head.
  const int64_t first_entry = kHasFeatures<Call> ? 0 : tile.b;
  const int64_t first_slot = kHasFeatures<Call> ? 0 : tile.keys.begin + own_key;
  const int64_t k_pass = problem.k.row_stride * Config::kPassKeys;
  const int64_t v_pass = problem.v.row_stride * Config::kPassKeys;
  const Element* g_k = problem.k.template row<const Element>(first_entry, tile.head_kv, first_slot);
  const Element* g_v = problem.v.template row<const Element>(first_entry, tile.head_kv, first_slot);
  device::Chunk<Element> k[kPasses][Config::kChunks], v[kPasses][Config::kChunks];
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  [[maybe_unused]] Places<Config> places;
  // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
  [[maybe_unused]] unsigned valid_passes = 0;  // of the step: whether its key is there, a bit each
  const auto load_k = [&](unsigned key) {
    if constexpr (kHasFeatures<Call>) {
      int64_t offsets[kPasses];
      places.take(offsets, true, lane);
      load_rows<Config, kVectorAccess, Element>(
          k, [&](int n) { return g_k + offsets[n]; }, lane_in_key, head_dim,
          [&](int n) { return offsets[n] >= 0; });
    } else {
      load_rows<Config, kVectorAccess, Element>(
          k, [&](int n) { return g_k + n * k_pass; }, lane_in_key, head_dim,
          [&](int n) { return key + n * Config::kPassKeys < num_keys; });
      g_k += k_pass * kPasses;
    }
  };
  const auto load_v = [&](unsigned key) {
    if constexpr (kHasFeatures<Call>) {
      int64_t offsets[kPasses];
      valid_passes = places.take(offsets, false, lane);
      load_rows<Config, kVectorAccess, Element>(
          v, [&](int n) { return g_v + offsets[n]; }, lane_in_key, head_dim_v,
          [&](int n) { return offsets[n] >= 0; });
    } else {
      load_rows<Config, kVectorAccess, Element>(
          v, [&](int n) { return g_v + n * v_pass; }, lane_in_key, head_dim_v,
          [&](int n) { return key + n * Config::kPassKeys < num_keys; });
      g_v += v_pass * kPasses;
    }
  };

  Sums total[kRows], sums[kRows];
  if constexpr (kHasFeatures<Call>) {
    places.find(problem, tile, 0, warp, lane);
    // A row's sink counts once: in part 0, in one group of lanes.
    if (tile.split == 0 && threadIdx.x < Config::kLanes) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sink = sink_of(problem, decode::row_of(problem, tile, r).head);
        if (sink != negative_infinity()) total[r].m = sink, total[r].l = 1;
      }
    }
  }
  unsigned steps = 0;
  load_k(own_key);
  for (unsigned first = 0; first < num_keys; first += Config::kStepKeys) {
    const unsigned key = first + own_key;
    load_v(key);
    if constexpr (kHasFeatures<Call>)
      places.find(problem, tile, first + Config::kStepKeys, warp, lane);
    float scores[kPasses][kRows] = {};
#pragma unroll
    for (int n = 0; n < kPasses; ++n)
#pragma unroll
      for (int c = 0; c < Config::kChannels; ++c) {
        const float x = device::to_fp32(k[n][c / kChunk].elements[c % kChunk]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) scores[n][r] += q[r][c] * x;
      }
    load_k(key + Config::kStepKeys);
#pragma unroll
    for (int offset = Config::kLanes / 2; offset > 0; offset /= 2)
#pragma unroll
      for (int n = 0; n < kPasses; ++n)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          scores[n][r] += __shfl_xor_sync(kFullWarp, scores[n][r], offset);

    if constexpr (kHasFeatures<Call>)
      if (modifies_scores(problem))
        finish_scores<Config>(scores, problem, tile, valid_passes, key, lane_in_key);

    float factor[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float m = sums[r].m;
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        // NOLINTNEXTLINE(misc-const-correctness): calls with features change it
        bool visible = seen[r].contains(key + n * Config::kPassKeys);
        if constexpr (kHasFeatures<Call>) visible = visible && (valid_passes >> n & 1) != 0;
        if (!visible) scores[n][r] = negative_infinity();
        m = fmaxf(m, scores[n][r]);
      }
      factor[r] = rescale_factor(sums[r].m, m, scale_log2);
      sums[r].m = m;
      float l = 0;
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        scores[n][r] = weight_of(scores[n][r], m, scale_log2);
        l += scores[n][r];
      }
      sums[r].l = sums[r].l * factor[r] + l;
    }
#pragma unroll
    for (int c = 0; c < Config::kChannels; ++c) {
      float x[kPasses];
#pragma unroll
      for (int n = 0; n < kPasses; ++n)
        x[n] = device::to_fp32(v[n][c / kChunk].elements[c % kChunk]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float o = scores[0][r] * x[0];
#pragma unroll
        for (int n = 1; n < kPasses; ++n) o += scores[n][r] * x[n];
        sums[r].o[c] = sums[r].o[c] * factor[r] + o;
      }
    }
    if (++steps % kStepsPerSum != 0) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      total[r].merge(sums[r], scale_log2);
      sums[r] = Sums();
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    total[r].merge(sums[r], scale_log2);
#pragma unroll
    for (int offset = Config::kLanes; offset < 32; offset *= 2)
      total[r].merge_across(offset, scale_log2);
    if (lane < Config::kLanes) {
#pragma unroll
      for (int c = 0; c < Config::kChannels; ++c)
        s.o[warp][r][first_channel<Config>(lane_in_key, c / kChunk) + c % kChunk] = total[r].o[c];
    }
    if (lane == 0) s.m[warp][r] = total[r].m, s.l[warp][r] = total[r].l;
  }
  __syncthreads();  // SAFETY: the sums of all warps are there.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
    float m = negative_infinity(), l = 0, weight[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, s.m[w][r]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weight[w] = weight_of(s.m[w][r], m, scale_log2);
      l += weight[w] * s.l[w][r];
    }
    const bool empty = l == 0.0f;  // the row sees no key: the greatest score alone weighs 1
    const float inverse = empty ? 0.0f : 1.0f / l;
    const decode::RowTarget<Element> target = decode::target_of<Element>(problem, parts, tile, r);
    for (int channel = static_cast<int>(threadIdx.x); channel < head_dim_v; channel += kThreads) {
      float o = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) o += weight[w] * s.o[w][r][channel];
      if (target.partial != nullptr)
        target.partial[channel] = o * inverse;
      else
        target.o[channel] = Element(o * inverse);
    }
    if (target.lse != nullptr && threadIdx.x == 0)
      *target.lse = lse_of(m, factor_of_scores(problem), l);
  }
}

// The access is a parameter of the template because element loads take so many registers that chunks would have half as
// many blocks on an SM.
template <class Element, class Config, int kRows, bool kVectorAccess, class Call>
__global__ void __launch_bounds__(kThreads,
                                  kVectorAccess ? kBlocksOf<Config, kRows, kHasFeatures<Call>> : 1)
    decode_kernel(const __grid_constant__ Call problem,
                  const __grid_constant__ MergeProblem parts) {
  decode_block<Element, Config, kRows, kVectorAccess>(problem, parts);
}

// ---- host side ------------------------------------------------------------------------------------

// Of problems without features.
template <class Element, class Config, int kRows>
decode::Kernel<Problem> kernel_for(bool vector_access) {
  return vector_access ? decode_kernel<Element, Config, kRows, true, Problem>
                       : decode_kernel<Element, Config, kRows, false, Problem>;
}

// With features one row without vector access takes the kernel for several: it is rare, and each kernel takes time to
// compile.
template <class Element, class Config>
decode::Kernel<FullProblem> full_kernel_for(bool one_row, bool vector_access) {
  if (!vector_access) return decode_kernel<Element, Config, Config::kMaxRows, false, FullProblem>;
  return one_row ? decode_kernel<Element, Config, 1, true, FullProblem>
                 : decode_kernel<Element, Config, Config::kMaxRows, true, FullProblem>;
}

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  using Config = KernelConfig<sizeof(Element), kHeadDim>;
  static device::OncePerDevice once;
  return once.run(device, [&] {
    for (const bool vector_access : {false, true}) {
      CUFLASH_TRY(device::load_kernel(kernel_for<Element, Config, 1>(vector_access), name));
      CUFLASH_TRY(
          device::load_kernel(kernel_for<Element, Config, Config::kMaxRows>(vector_access), name));
      for (const bool one_row : {false, true})
        CUFLASH_TRY(
            device::load_kernel(full_kernel_for<Element, Config>(one_row, vector_access), name));
    }
    return preload_combine();
  });
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  using Config = KernelConfig<sizeof(Element), kHeadDim>;
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  const bool vector_access = problem.aligned16 && problem.head_dim % Config::kChunk == 0 &&
                             problem.head_dim_v % Config::kChunk == 0;
  const bool one_row = problem.heads_q == problem.heads_kv && problem.len_q == 1;
  if (problem.features != nullptr)
    return decode::launch_parts<FullProblem>(
        full_kernel_for<Element, Config>(one_row, vector_access), name,
        one_row && vector_access ? 1 : Config::kMaxRows, {0, kThreads}, problem, plan, context);
  return decode::launch_parts<Problem>(
      one_row ? kernel_for<Element, Config, 1>(vector_access)
              : kernel_for<Element, Config, Config::kMaxRows>(vector_access),
      name, one_row ? 1 : Config::kMaxRows, {0, kThreads}, problem, plan, context);
}

}  // namespace cuflash::decode_scalar
