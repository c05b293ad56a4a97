// Decode on CUDA cores: f32, f16 and bf16, any strides, masks and lengths; head_dim up to the bucket. Exact in
// fp32, one pass over the keys.
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

// Loads this lane's channels of kCount rows of K or V, in kChunks chunks each, the first at g_row, of which those with
// valid(n) are read. The others, and channels past head_dim, become zero: nothing there, not even NaN, reaches a product.
// vector_access: chunks lie at multiples of 16 bytes and head_dim cuts none. (An alias template for the rows' type
// stops nvcc 12.4 with an internal error.)
template <class Config, bool kVectorAccess, class Element, int kCount, class Valid>
__device__ __forceinline__ void load_rows(device::Chunk<Element> (&rows)[kCount][Config::kChunks],
                                          const Element* g_row, int64_t stride, int lane_in_key,
                                          int head_dim, Valid valid) {
  if constexpr (kVectorAccess) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        const int channel = first_channel<Config>(lane_in_key, chunk);
        auto* source = reinterpret_cast<const uint4*>(g_row + n * stride + channel);
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
              valid(n) && channel < head_dim ? g_row[n * stride + channel] : Element(0.0f);
        }
  }
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

template <class Element, class Config, int kRows, bool kVectorAccess>
__device__ __forceinline__ void decode_block(const Problem& problem, const MergeProblem& parts) {
  constexpr int kChunk = Config::kChunk, kPasses = Config::kPasses;
  using Sums = RowSums<Config::kChannels>;
  // Long sums run over this many steps with sums of their own: one long fp32 sum drifts.
  constexpr unsigned kStepsPerSum = 32;

  __shared__ SharedStorage<Config, kRows> s;
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const int lane_in_key = static_cast<int>(lane % Config::kLanes);
  const int head_dim = static_cast<int>(problem.head_dim);
  const float scale_log2 = problem.scale * kLog2E;

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
    load_rows<Config, kVectorAccess>(x, problem.q.row<const Element>(tile.b, row.head, row.query),
                                     0, lane_in_key, head_dim, [&](int) { return r < tile.rows; });
#pragma unroll
    for (int c = 0; c < Config::kChannels; ++c)
      q[r][c] = device::to_fp32(x[0][c / kChunk].elements[c % kChunk]);
  }

  // This lane's key of the first pass; pass n of a step is n * kPassKeys keys further on.
  const unsigned own_key = threadIdx.x / Config::kLanes;
  const int64_t first_key = tile.keys.begin + own_key;
  const int64_t k_pass = problem.k.row_stride * Config::kPassKeys;
  const int64_t v_pass = problem.v.row_stride * Config::kPassKeys;
  const Element* g_k = problem.k.row<const Element>(tile.b, tile.head_kv, first_key);
  const Element* g_v = problem.v.row<const Element>(tile.b, tile.head_kv, first_key);
  device::Chunk<Element> k[kPasses][Config::kChunks], v[kPasses][Config::kChunks];
  const auto load_k = [&](unsigned key) {
    load_rows<Config, kVectorAccess>(k, g_k, k_pass, lane_in_key, head_dim,
                                     [&](int n) { return key + n * Config::kPassKeys < num_keys; });
    g_k += k_pass * kPasses;
  };
  const auto load_v = [&](unsigned key) {
    load_rows<Config, kVectorAccess>(v, g_v, v_pass, lane_in_key, head_dim,
                                     [&](int n) { return key + n * Config::kPassKeys < num_keys; });
    g_v += v_pass * kPasses;
  };

  Sums total[kRows], sums[kRows];
  unsigned steps = 0;
  load_k(own_key);
  for (unsigned first = 0; first < num_keys; first += Config::kStepKeys) {
    const unsigned key = first + own_key;
    load_v(key);
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

    float factor[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float m = sums[r].m;
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        if (!seen[r].contains(key + n * Config::kPassKeys)) scores[n][r] = negative_infinity();
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
    for (int channel = static_cast<int>(threadIdx.x); channel < head_dim; channel += kThreads) {
      float o = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) o += weight[w] * s.o[w][r][channel];
      if (target.partial != nullptr)
        target.partial[channel] = o * inverse;
      else
        target.o[channel] = Element(o * inverse);
    }
    if (target.lse != nullptr && threadIdx.x == 0)
      *target.lse = empty ? negative_infinity() : m * problem.scale + logf(l);
  }
}

// The access is a parameter of the template because element loads take so many registers that chunks would have half as
// many blocks on an SM.
template <class Element, class Config, int kRows, bool kVectorAccess>
__global__ void __launch_bounds__(kThreads, kVectorAccess ? (kRows == 1 ? Config::kBlocksOfOneRow
                                                                        : Config::kBlocks)
                                                          : 1)
    decode_kernel(const __grid_constant__ Problem problem,
                  const __grid_constant__ MergeProblem parts) {
  decode_block<Element, Config, kRows, kVectorAccess>(problem, parts);
}

// ---- host side ------------------------------------------------------------------------------------

template <class Element, class Config, int kRows>
decode::Kernel kernel_for(bool vector_access) {
  return vector_access ? decode_kernel<Element, Config, kRows, true>
                       : decode_kernel<Element, Config, kRows, false>;
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
    }
    return preload_combine();
  });
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  using Config = KernelConfig<sizeof(Element), kHeadDim>;
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  const bool vector_access = problem.aligned16 && problem.head_dim % Config::kChunk == 0;
  const bool one_row = problem.heads_q == problem.heads_kv && problem.len_q == 1;
  return decode::launch_parts(
      one_row ? kernel_for<Element, Config, 1>(vector_access)
              : kernel_for<Element, Config, Config::kMaxRows>(vector_access),
      name, one_row ? 1 : Config::kMaxRows, {0, kThreads}, problem, plan, context);
}

}  // namespace cuflash::decode_scalar
