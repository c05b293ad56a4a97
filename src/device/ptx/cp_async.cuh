// Asynchronous copies from global to shared memory (sm_80). Older GPUs copy through registers at the same
// place, so that a kernel written for cp.async is right on them too.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace cuflash::device::ptx {

// Copies 16 bytes past L1; where !valid writes zeros and does not read g_source. Both addresses are
// multiples of 16. PTX ISA: "Data Movement and Conversion Instructions: cp.async".
__device__ __forceinline__ void cp_async_16_zfill(void* s_destination, const void* g_source,
                                                  bool valid) {
#if __CUDA_ARCH__ >= 800
  const auto s_address = static_cast<uint32_t>(__cvta_generic_to_shared(s_destination));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_address), "l"(g_source),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(s_destination) =
      valid ? *static_cast<const uint4*>(g_source) : make_uint4(0, 0, 0, 0);
#endif
}

// The same where there is no question.
__device__ __forceinline__ void cp_async_16(void* s_destination, const void* g_source) {
#if __CUDA_ARCH__ >= 800
  const auto s_address = static_cast<uint32_t>(__cvta_generic_to_shared(s_destination));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s_address), "l"(g_source)
               : "memory");
#else
  *static_cast<uint4*>(s_destination) = *static_cast<const uint4*>(g_source);
#endif
}

// cp_async_16_zfill for 4 bytes, through L1; both addresses are multiples of 4.
__device__ __forceinline__ void cp_async_4_zfill(void* s_destination, const void* g_source,
                                                 bool valid) {
#if __CUDA_ARCH__ >= 800
  const auto s_address = static_cast<uint32_t>(__cvta_generic_to_shared(s_destination));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s_address), "l"(g_source),
               "r"(valid ? 4 : 0)
               : "memory");
#else
  *static_cast<uint32_t*>(s_destination) = valid ? *static_cast<const uint32_t*>(g_source) : 0;
#endif
}

// Closes this thread's group of copies since the last commit, which may be none.
// PTX ISA: "Data Movement and Conversion Instructions: cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups, the youngest, are under way. Other threads see
// the data after a barrier. PTX ISA: "Data Movement and Conversion Instructions: cp.async.wait_group".
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace cuflash::device::ptx
