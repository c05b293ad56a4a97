// nvcuda::wmma in 16x16x16 with fp32 sums: names for its fragments, loads from shared memory, and what can be
// done with the rows of an accumulator although WMMA leaves open which element a thread holds.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include "device/ptx/wmma_load.cuh"
#include "device/wmma_shape.hpp"

namespace cuflash::device {

namespace wmma = nvcuda::wmma;

using f16 = __half;
using bf16 = __nv_bfloat16;

// The operands of left * right, each [row][column] in memory, or transposed: the memory holds its columns.
template <class Element>
using LeftFragment =
    wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, Element, wmma::row_major>;
template <class Element>
using RightFragment =
    wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, Element, wmma::row_major>;
template <class Element>
using RightTransposedFragment =
    wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, Element, wmma::col_major>;
using Accumulator = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

// Whether this GPU's WMMA has the type.
template <class Element>
inline constexpr bool kHasWmma = true;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <>
inline constexpr bool kHasWmma<bf16> = false;
#endif

template <class Fragment>
__device__ void load_fragment(Fragment& fragment, const f16* s_matrix, int ld) {
  wmma::load_matrix_sync(fragment, s_matrix, ld);
}
template <class Fragment>
__device__ void load_fragment(Fragment& fragment, const bf16* s_matrix, int ld) {
  ptx::wmma_load_m16n16k16_shared(fragment, s_matrix, ld);
}

// Which row each of this thread's accumulator elements lies in, 4 bits each. WMMA does not say; loading a
// matrix of row numbers tells. By a whole warp, over 16 rows of kLd floats of its own.
template <int kLd>
__device__ uint32_t learn_element_rows(float* s_warp_scratch, unsigned lane) {
  for (unsigned i = lane; i < kFragment * kFragment; i += 32)
    s_warp_scratch[i / kFragment * kLd + i % kFragment] = static_cast<float>(i / kFragment);
  __syncwarp();  // SAFETY: the row numbers are written before other lanes read them.
  Accumulator rows;
  wmma::load_matrix_sync(rows, s_warp_scratch, kLd, wmma::mem_row_major);
  static_assert(Accumulator::num_elements == 8, "4 bits each must fit in 32");
  uint32_t packed = 0;
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; ++e)
    packed |= static_cast<uint32_t>(rows.x[e]) << (4 * e);
  return packed;
}

// matrix *= factor of the element's row
template <int kCount>
__device__ void scale_rows(Accumulator (&matrix)[kCount], const float* s_row_factors,
                           uint32_t element_rows) {
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; ++e) {
    const float factor = s_row_factors[element_rows >> (4 * e) & 15];
#pragma unroll
    for (int f = 0; f < kCount; ++f) matrix[f].x[e] *= factor;
  }
}

}  // namespace cuflash::device
