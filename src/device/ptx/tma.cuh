// Copies of boxes of tensors from global to shared memory by the tensor memory accelerator (sm_90). One thread issues a
// copy of the whole box. What lies outside the tensor becomes zeros, and counts. PTX ISA: "Data Movement and Conversion
// Instructions: cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include "device/ptx/mbarrier.cuh"

namespace cuflash::device::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// s_box is a shared address, a multiple of 128; `barrier` receives the box's bytes.
__device__ __forceinline__ void tma_load_4d(uint32_t s_box, const CUtensorMap& map,
                                            uint32_t barrier, int32_t x0, int32_t x1, int32_t x2,
                                            int32_t x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(s_box),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// Makes this thread's writes to shared memory visible to asynchronous copies and products.
// PTX ISA: "Parallel Synchronization and Communication Instructions: fence.proxy".
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cuflash::device::ptx
