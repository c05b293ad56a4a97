// WMMA loads of 16x16 bf16 fragments from shared memory. nvcc 13.0 finds the state space of a pointer for
// nvcuda::wmma::load_matrix_sync in f16 but not in bf16: there it emits generic loads, eight for a fragment,
// and transposes in registers, where these become one ldmatrix.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <mma.h>

namespace cuflash::device::ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// As load_matrix_sync, by the whole warp: s_matrix is a multiple of 32 bytes, ld one of 8 elements.
// PTX ISA: "Warp-level Matrix Load Instruction: wmma.load".
#define CUFLASH_WMMA_LOAD(operand, layout, Use, Layout)                                           \
  __device__ __forceinline__ void wmma_load_m16n16k16_shared(                                     \
      nvcuda::wmma::fragment<nvcuda::wmma::Use, 16, 16, 16, __nv_bfloat16, nvcuda::wmma::Layout>& \
          fragment,                                                                               \
      const __nv_bfloat16* s_matrix, int ld) {                                                    \
    static_assert(sizeof fragment.x == 16);                                                       \
    auto* r = reinterpret_cast<uint32_t*>(fragment.x);                                            \
    const auto s_address = static_cast<uint32_t>(__cvta_generic_to_shared(s_matrix));             \
    asm volatile("wmma.load." #operand ".sync.aligned." #layout                                   \
                 ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"                             \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                 \
                 : "r"(s_address), "r"(ld)                                                        \
                 : "memory");                                                                     \
  }
CUFLASH_WMMA_LOAD(a, row, matrix_a, row_major)
CUFLASH_WMMA_LOAD(b, row, matrix_b, row_major)
CUFLASH_WMMA_LOAD(b, col, matrix_b, col_major)
#undef CUFLASH_WMMA_LOAD

#endif

}  // namespace cuflash::device::ptx
