// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies (sm_90).
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>

namespace cuflash::device::ptx {

using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A phase ends after `arrivals` arrivals, and all bytes that were announced.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to asynchronous copies. By the thread that initialised them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
// Arrives, and announces bytes that copies will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier& barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first, third, ... phase.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, uint32_t parity) {
  const uint32_t address = shared_address(&barrier);
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
}

}  // namespace cuflash::device::ptx
