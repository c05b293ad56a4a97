// Four neighbouring elements of a row in global memory, to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/packed16.cuh"

namespace cuflash::device {

__device__ __forceinline__ void load_packed4(const float* source, float (&x)[4]) {
  const float4 v = __ldg(reinterpret_cast<const float4*>(source));
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

__device__ __forceinline__ float2 unpack2(__half, unsigned bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ float2 unpack2(__nv_bfloat16, unsigned bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
template <class Element>
__device__ __forceinline__ void load_packed4(const Element* source, float (&x)[4]) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(source));
  const float2 lo = unpack2(Element{}, bits.x), hi = unpack2(Element{}, bits.y);
  x[0] = lo.x, x[1] = lo.y, x[2] = hi.x, x[3] = hi.y;
}

// The first `count` of four elements, which nothing writes while the kernel runs; the rest of x becomes 0.
// vector_access: source is aligned to the four elements and count is 4 or not positive.
template <class Element>
__device__ __forceinline__ void load4(const Element* source, int count, bool vector_access,
                                      float (&x)[4]) {
  if (vector_access) {
    x[0] = x[1] = x[2] = x[3] = 0;
    if (count > 0) load_packed4(source, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < count ? static_cast<float>(__ldg(source + i)) : 0.0f;
  }
}

__device__ __forceinline__ void store_packed4(float* destination, const float (&x)[4]) {
  *reinterpret_cast<float4*>(destination) = make_float4(x[0], x[1], x[2], x[3]);
}
template <class Element>
__device__ __forceinline__ void store_packed4(Element* destination, const float (&x)[4]) {
  store_packed16(destination, x);
}

// The other way, under the same conditions: x is rounded, elements past `count` stay as they are.
template <class Element>
__device__ __forceinline__ void store4(Element* destination, int count, bool vector_access,
                                       const float (&x)[4]) {
  if (vector_access) {
    if (count > 0) store_packed4(destination, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) destination[i] = static_cast<Element>(x[i]);
  }
}

}  // namespace cuflash::device
