// fp32 values rounded to f16 or bf16, packed to be stored at once.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::device {

template <class Element>
struct Pair16;
template <>
struct Pair16<__half> {
  __half2 values;
  __device__ void round(float lo, float hi) { values = __floats2half2_rn(lo, hi); }
};
template <>
struct Pair16<__nv_bfloat16> {
  __nv_bfloat162 values;
  __device__ void round(float lo, float hi) { values = __floats2bfloat162_rn(lo, hi); }
};

// lo in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack16(float lo, float hi) {
  Pair16<Element> pair;
  pair.round(lo, hi);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <class Element, int kCount>
struct alignas(2 * kCount) Packed16 {
  Pair16<Element> pairs[kCount / 2];
};

// Rounds x and stores it; destination is a multiple of 2 * kCount bytes.
template <class Element, int kCount>
__device__ __forceinline__ void store_packed16(Element* destination, const float (&x)[kCount]) {
  Packed16<Element, kCount> packed;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed.pairs[i].round(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<Packed16<Element, kCount>*>(destination) = packed;
}

}  // namespace cuflash::device
