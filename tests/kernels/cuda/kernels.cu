#include "kernels/cuda/kernels.hpp"

namespace cuflash_test {
namespace {

__global__ void spin_kernel(long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < static_cast<unsigned long long>(nanoseconds));
}

__global__ void fault_kernel(int* nowhere) { *nowhere = 1; }

}  // namespace

cudaError_t spin(int milliseconds, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(milliseconds * 1000000ll);
  return cudaGetLastError();
}

cudaError_t fault(cudaStream_t stream) {
  fault_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(16));
  return cudaGetLastError();
}

}  // namespace cuflash_test
