// Register budgets and barriers of warpgroups (sm_90a).
#pragma once

#include <cstdint>

namespace cuflash::device::ptx {

// Moves this warpgroup's registers a thread down or up to kCount, a multiple of 8.
// PTX ISA: "Miscellaneous Instructions: setmaxnreg".
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads: waits, or only arrives.
// PTX ISA: "Parallel Synchronization and Communication Instructions: bar".
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
// PTX ISA: "Warp-level Matrix Store Instruction: stmatrix".
__device__ __forceinline__ void stmatrix_x4(uint32_t s_row_address, uint32_t r0, uint32_t r1,
                                            uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

}  // namespace cuflash::device::ptx
