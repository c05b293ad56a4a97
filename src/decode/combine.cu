// One block per row. All LSEs are read at once and their maximum is known before any O is, so that many loads
// of O are under way together: a warp that takes part after part, each after the last one's weight, waits for memory at
// every part.
#include "decode/combine.hpp"

#include "attention/lanes.hpp"
#include "attention/online_softmax.hpp"
#include "attention/row_index.hpp"
#include "common/dtype_dispatch.hpp"
#include "common/integer.hpp"
#include "core/split.hpp"
#include "device/launch.cuh"

namespace cuflash {
namespace decode {

constexpr int kWarps = 4;
constexpr int kCombineThreads = 32 * kWarps;
constexpr int kPartsAtOnce = 4;  // of a warp
using Lanes = WarpLanes<kMaxTiledHeadDim>;

template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ MergeProblem p) {
  __shared__ float s_lse[kMaxSplits];
  __shared__ float s_l[kWarps];
  __shared__ float s_o[kWarps][kMaxTiledHeadDim];
  const int num_parts = static_cast<int>(p.num_parts);
  const int head_dim = static_cast<int>(p.head_dim);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Lanes lanes{static_cast<int>(threadIdx.x % 32)};

  for (int64_t index = blockIdx.x; index < p.batch * p.heads * p.len; index += gridDim.x) {
    const RowIndex i = row_index(index, p.heads, p.len);
    const float* g_lse = p.lse_parts.at(i.batch, i.head, i.row);
    const float* g_o = p.parts.row<float>(i.batch, i.head, i.row);
    for (int part = static_cast<int>(threadIdx.x); part < num_parts; part += kCombineThreads)
      s_lse[part] = g_lse[part * p.lse_part_stride];
    __syncthreads();  // SAFETY: all LSEs are there.
    float m = negative_infinity();
    for (int part = lanes.lane; part < num_parts; part += 32) m = fmaxf(m, s_lse[part]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));

    float l = 0;
    float acc[Lanes::kSlots] = {};
    for (int first = warp; first < num_parts; first += kWarps * kPartsAtOnce) {
      float o[kPartsAtOnce][Lanes::kSlots], weight[kPartsAtOnce];
#pragma unroll
      for (int n = 0; n < kPartsAtOnce; ++n) {
        const int part = first + n * kWarps;
        const float lse = part < num_parts ? s_lse[part] : negative_infinity();
        const bool empty = lse == negative_infinity();
        weight[n] = empty ? 0.0f : expf(lse - m);
        lanes.for_channels(head_dim, [&](int slot, int channel) {
          o[n][slot] = empty ? 0.0f : g_o[part * p.part_stride + channel];
        });
      }
#pragma unroll
      for (int n = 0; n < kPartsAtOnce; ++n) {
        l += weight[n];
        lanes.for_channels(head_dim, [&](int slot, int) { acc[slot] += weight[n] * o[n][slot]; });
      }
    }
    if (lanes.is_first()) s_l[warp] = l;
    lanes.for_channels(head_dim, [&](int slot, int channel) { s_o[warp][channel] = acc[slot]; });
    __syncthreads();  // SAFETY: the sums of all warps are there.
    OnlineSoftmax sum;
    sum.m = m;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.l += s_l[w];
    T* g_row = p.o.row<T>(i.batch, i.head, i.row);
    for (int channel = static_cast<int>(threadIdx.x); channel < head_dim;
         channel += kCombineThreads) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x += s_o[w][channel];
      g_row[channel] = from_float<T>(x * sum.inverse_sum());
    }
    if (p.lse.data != nullptr && threadIdx.x == 0) *p.lse.at(i.batch, i.head, i.row) = sum.lse();
    // SAFETY: of what the next row overwrites, s_lse was last read before the barrier above; its own first barrier
    // comes before s_l and s_o are written again.
  }
}

}  // namespace decode

Status combine_parts(const MergeProblem& p, const LaunchContext& context) {
  return dispatch_dtype(p.o.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    // Any count fits: the grid stops at a bound and each block strides on.
    const int64_t blocks = min64(p.batch * p.heads * p.len, int64_t{1} << 24);
    return device::launch(decode::combine_kernel<T>, "combine", {blocks, decode::kCombineThreads},
                          context.stream, p);
  });
}

Status preload_combine() {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      return device::load_kernel(decode::combine_kernel<typename decltype(tag)::Type>, "combine");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
