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

}  // namespace cuflash::device::ptx
