// What a cache may store: besides the types of problems fp8, int8 and int4. An element x is kept as the number nearest to
// x / scale, of integers to x / scale + zero. The one home of these formats and of their rounding, for host and device.
#pragma once

#include <cmath>

#include "common/float16.hpp"

namespace cuflash {

// ---- fp8 ------------------------------------------------------------------------------------------

struct E4m3 {  // exponent bias 7, subnormals of 2^-9, no infinity: 0x7f and 0xff are NaN
  uint8_t bits;
};
struct E5m2 {  // the upper half of binary16
  uint8_t bits;
};

CUFLASH_HOST_DEVICE float to_float(E4m3 x) {
  const uint32_t sign = (x.bits & 0x80u) << 24;
  const uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return bits_float(sign | 0x7fc00000u);
  if (magnitude >= 0x08u) return bits_float(sign | ((magnitude << 20) + (120u << 23)));
  return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0.001953125f));  // subnormal
}

CUFLASH_HOST_DEVICE float to_float(E5m2 x) {
  return to_float(Half{static_cast<uint16_t>(x.bits << 8)});
}

// Round to nearest even, saturating: what is beyond the largest finite number, infinity too, becomes it. NaN stays NaN.
// The format has kFractionBits and the exponent bias kBias; kLargest is the code of its largest number.
template <int kFractionBits, int kBias, uint32_t kLargest>
CUFLASH_HOST_DEVICE uint8_t to_fp8(float x) {
  constexpr int kDropped = 23 - kFractionBits;
  constexpr uint32_t kRebase = (127u - kBias) << 23;
  constexpr uint32_t kLargestBits = (kLargest << kDropped) + kRebase;
  const uint32_t sign = (float_bits(x) >> 24) & 0x80u;
  uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude > kLargestBits) magnitude = kLargestBits;
  uint32_t code;
  if (magnitude >= kRebase + (1u << 23)) {
    const uint32_t rebased = magnitude - kRebase;
    code = (rebased + (1u << (kDropped - 1)) - 1 + ((rebased >> kDropped) & 1u)) >> kDropped;
  } else {
    // Subnormal: the fp32 adder rounds at the last place of the format, of which 2^23 make this number.
    constexpr uint32_t kUnits = (127u + 23u + 1u - kBias - kFractionBits) << 23;
    code = float_bits(bits_float(magnitude) + bits_float(kUnits)) - kUnits;
  }
  return static_cast<uint8_t>(sign | code);
}

template <>
CUFLASH_HOST_DEVICE E4m3 from_float<E4m3>(float x) {
  return E4m3{to_fp8<3, 7, 0x7e>(x)};
}
template <>
CUFLASH_HOST_DEVICE E5m2 from_float<E5m2>(float x) {
  return E5m2{to_fp8<2, 15, 0x7b>(x)};
}

// ---- integers -------------------------------------------------------------------------------------

// The nearest integer of kBits bits, two's complement, ties to even, saturating. NaN becomes 0.
template <int kBits>
CUFLASH_HOST_DEVICE uint32_t to_integer_code(float x) {
  constexpr float kMost = (1 << (kBits - 1)) - 1;
  const float nearest = x == x ? rintf(fminf(fmaxf(x, -kMost - 1), kMost)) : 0.0f;
  return static_cast<uint32_t>(static_cast<int32_t>(nearest)) & ((1u << kBits) - 1);
}

template <int kBits>
CUFLASH_HOST_DEVICE float integer_of_code(uint32_t code) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  return static_cast<float>(static_cast<int32_t>(code ^ kSign) - static_cast<int32_t>(kSign));
}

// ---- elements of a cache --------------------------------------------------------------------------

enum class StoredDtype : int32_t {  // the values of cuflash_dtype
  kF32 = 1,
  kF16 = 2,
  kBf16 = 3,
  kE4m3 = 4,
  kE5m2 = 5,
  kInt8 = 6,
  kInt4 = 7
};

constexpr int64_t stored_bits(StoredDtype dtype) {
  return dtype == StoredDtype::kF32                                  ? 32
         : dtype == StoredDtype::kF16 || dtype == StoredDtype::kBf16 ? 16
         : dtype == StoredDtype::kInt4                               ? 4
                                                                     : 8;
}
constexpr bool is_integer(StoredDtype dtype) { return dtype >= StoredDtype::kInt8; }

struct Quantisation {
  float scale = 1;
  float zero = 0;  // of integers alone
};

// The code that stands for x, in the low stored_bits(). fp8 and the integers saturate, f16 and bf16 overflow to infinity.
// NaN stays NaN; an integer cannot hold it and is that of x = 0, as is every x with a scale of 0.
CUFLASH_HOST_DEVICE uint32_t quantise(StoredDtype dtype, float x, const Quantisation& q) {
  const bool none = q.scale == 0 || (is_integer(dtype) && x != x);
  const float y = none ? 0.0f : x / q.scale;
  switch (dtype) {
    case StoredDtype::kF16:
      return from_float<Half>(y).bits;
    case StoredDtype::kBf16:
      return from_float<Bfloat16>(y).bits;
    case StoredDtype::kE4m3:
      return from_float<E4m3>(y).bits;
    case StoredDtype::kE5m2:
      return from_float<E5m2>(y).bits;
    case StoredDtype::kInt8:
      return to_integer_code<8>(y + q.zero);
    case StoredDtype::kInt4:
      return to_integer_code<4>(y + q.zero);
    case StoredDtype::kF32:
      break;
  }
  return float_bits(y);
}

CUFLASH_HOST_DEVICE float dequantise(StoredDtype dtype, uint32_t code, const Quantisation& q) {
  float y = 0;
  switch (dtype) {
    case StoredDtype::kF32:
      y = bits_float(code);
      break;
    case StoredDtype::kF16:
      y = to_float(Half{static_cast<uint16_t>(code)});
      break;
    case StoredDtype::kBf16:
      y = to_float(Bfloat16{static_cast<uint16_t>(code)});
      break;
    case StoredDtype::kE4m3:
      y = to_float(E4m3{static_cast<uint8_t>(code)});
      break;
    case StoredDtype::kE5m2:
      y = to_float(E5m2{static_cast<uint8_t>(code)});
      break;
    case StoredDtype::kInt8:
      y = integer_of_code<8>(code) - q.zero;
      break;
    case StoredDtype::kInt4:
      y = integer_of_code<4>(code) - q.zero;
      break;
  }
  return y * q.scale;
}

// Element `index` of an array. Of int4 there are two a byte, the even one in the low half.
CUFLASH_HOST_DEVICE uint32_t stored_code(StoredDtype dtype, const void* data, int64_t index) {
  switch (stored_bits(dtype)) {
    case 32:
      return static_cast<const uint32_t*>(data)[index];
    case 16:
      return static_cast<const uint16_t*>(data)[index];
    case 8:
      return static_cast<const uint8_t*>(data)[index];
    default:
      return (static_cast<const uint8_t*>(data)[index / 2] >> (index % 2 * 4)) & 0xfu;
  }
}

}  // namespace cuflash
