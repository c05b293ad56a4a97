// Products of fp32 matrices in shared memory, summed in registers on the CUDA cores. Each thread of a warp's grid
// (warp_grid.hpp) owns a small tile of the result, so that what it reads serves many products: with 8 x 8 sums,
// 16 reads of 16 bytes for 256 multiply-adds.
#pragma once

#include "device/warp_grid.hpp"

namespace cuflash::device {

__device__ __forceinline__ void load_shared4(const float* s_source, float (&x)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(s_source);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// Enough steps of four at once that the reads of the next hide behind the products of the last; more only make
// the code longer.
constexpr int unrolled_steps(int sums) { return sums >= 32 ? 1 : 4; }

// sum[i][j] += A[4 i] . B[8 j], the products of rows of kDepth floats. s_a is the thread's first row of A, s_b its
// first of B. Each sum is one chain of fused multiply-adds from depth 0 on: scores have the same bits in every
// kernel that computes them so, whatever its tiles, and whether A or B is the query.
template <int kDepth, int kLd, int kRows, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&sum)[kRows][kColumns], const float* s_a,
                                              const float* s_b) {
  static_assert(kDepth % 4 == 0);
#pragma unroll unrolled_steps(kRows* kColumns)
  for (int d = 0; d < kDepth; d += 4) {
    float a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_shared4(s_a + i * WarpGrid::kRows * kLd + d, a[i]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float b[4];
      load_shared4(s_b + j * WarpGrid::kColumns * kLd + d, b);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum[i][j] = fmaf(a[i][e], b[e], sum[i][j]);
    }
  }
}

// sum[i][g][e] += W[4 i] . column 32 g + e of B: rows of kDepth weights by a matrix of channels. s_w is the thread's
// first row of W, s_b its first channel of B.
template <int kDepth, int kLdW, int kLd, int kRows, int kGroups>
__device__ __forceinline__ void multiply_columns(float (&sum)[kRows][kGroups][4], const float* s_w,
                                                 const float* s_b) {
  static_assert(kDepth % 4 == 0);
#pragma unroll unrolled_steps(kRows* kGroups * 4)
  for (int k = 0; k < kDepth; k += 4) {
    float w[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_shared4(s_w + i * WarpGrid::kRows * kLdW + k, w[i]);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float b[4];
        load_shared4(s_b + (k + step) * kLd + g * 4 * WarpGrid::kColumns, b);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][g][e] = fmaf(w[i][step], b[e], sum[i][g][e]);
      }
  }
}

}  // namespace cuflash::device
