// What the kernels of matrix_products.hpp share.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace cuflash_bench {

// About normally distributed: zeros would take less power, and the clocks be higher than with data.
template <class Element>
__device__ Element random_value(uint32_t index) {
  uint32_t bits = (index + 1) * 0x9e3779b9U;
  bits = (bits ^ (bits >> 16)) * 0x7feb352dU;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bU;
  bits ^= bits >> 16;
  // Four bytes, whose sum has a mean of 510 and a standard deviation of 147.8.
  const uint32_t sum = (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24);
  return static_cast<Element>((static_cast<float>(sum) - 510) * (1 / 147.8F));
}

// Two of them in a register.
template <class Element>
__device__ uint32_t random_pair(uint32_t index) {
  const Element pair[2] = {random_value<Element>(2 * index), random_value<Element>(2 * index + 1)};
  uint32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

// Keeps the products: the compiler does not know that their sum is another.
template <int kCount>
__device__ void use(const float (&sums)[kCount], float* never) {
  float total = 0;
  for (int i = 0; i < kCount; ++i) total += sums[i];
  if (total == 1.25e30F) *never = total;
}

inline cudaError_t launch_products(void (*kernel)(float*), int blocks, int threads, float* never,
                                   cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, never);
}

}  // namespace cuflash_bench
