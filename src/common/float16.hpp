// 16-bit floating-point storage, with conversions that host and device share. No CUDA header: the
// CPU device must build without one.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.hpp"

namespace cuflash {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

CUFLASH_HOST_DEVICE uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

CUFLASH_HOST_DEVICE float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

CUFLASH_HOST_DEVICE float to_float(float x) { return x; }

CUFLASH_HOST_DEVICE float to_float(Bfloat16 x) { return bits_float(uint32_t{x.bits} << 16); }

CUFLASH_HOST_DEVICE float to_float(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: magnitude * 2^-24, exact in fp32.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return bits_float(sign | float_bits(value));
}

// Round to nearest even; NaN stays NaN, overflow becomes infinity.
template <class T>
CUFLASH_HOST_DEVICE T from_float(float x);

template <>
CUFLASH_HOST_DEVICE float from_float<float>(float x) {
  return x;
}

template <>
CUFLASH_HOST_DEVICE Bfloat16 from_float<Bfloat16>(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return Bfloat16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return Bfloat16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
CUFLASH_HOST_DEVICE Half from_float<Half>(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;  // rounds past 65504
  } else if (magnitude >= 0x38800000u) {
    const uint32_t rebased = magnitude - (112u << 23);
    result = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  } else {
    // Subnormal: adding 0.5 makes the fp32 adder round at 2^-24, the last place of the half.
    result = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  }
  return Half{static_cast<uint16_t>(sign | result)};
}

}  // namespace cuflash
