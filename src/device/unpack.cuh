// Elements of 16 loaded bytes, in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::device {

template <class Element>
struct alignas(16) Chunk {
  static constexpr int kElements = 16 / sizeof(Element);
  Element elements[kElements];
};

__device__ __forceinline__ float to_fp32(float x) { return x; }
__device__ __forceinline__ float to_fp32(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_fp32(__nv_bfloat16 x) { return __bfloat162float(x); }

}  // namespace cuflash::device
