// Products of a warp (sm_80): D[16][8] = A[16][16] B[16][8] + C, 16-bit operands, fp32 sums, and the loads that bring
// operands from shared memory into the registers where they belong. Older GPUs have no such product: there these trap.
//
// With g = lane / 4 and t = lane % 4, thread registers hold
//   a[i]  row g + 8 (i % 2), columns 2t + 8 (i / 2) + {0, 1}, the lower one in the lower half
//   b[i]  rows 2t + 8 i + {0, 1}, column g
//   d[i]  row g + 8 (i / 2), column 2t + i % 2, and so does c
// so d of the columns 0 to 7 and 8 to 15, rounded and packed in pairs, are the A of a product over those 16.
// PTX ISA: "Matrix Fragments for mma.m16n8k16 with floating point type".
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::device::ptx {

// d += a b. PTX ISA: "Warp-level Matrix Multiply-Accumulate Instructions: mma".
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  // Sums in and out have names of their own: sums that begin at zero then need no register set to it.
#define CUFLASH_MMA(type)                                                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"            \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), \
        "f"(d[2]), "f"(d[3]))
  if constexpr (std::is_same_v<Element, __half>)
    CUFLASH_MMA("f16");
  else
    CUFLASH_MMA("bf16");
#undef CUFLASH_MMA
#else
  __trap();
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the shared address of row l % 8 of matrix l / 8, a multiple of 16.
// r[i] is of matrix i: row g, columns 2t and 2t + 1. PTX ISA: "Warp-level Matrix Load Instruction: ldmatrix".
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t s_row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row_address)
               : "memory");
}
// The same, each matrix transposed: rows 2t and 2t + 1, column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t s_row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row_address)
               : "memory");
}

}  // namespace cuflash::device::ptx
