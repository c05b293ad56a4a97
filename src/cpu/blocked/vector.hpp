// fp32 vectors of the level that a unit is compiled for: GCC's vector types, which clang has too, with an intrinsic
// where they have no word. Everything is internal and inlined: a function shared between units of different
// levels would run in any of them, whatever the processor.
#pragma once

#include <cstdint>

#include "common/float16.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CUFLASH_VECTOR inline __attribute__((always_inline))

namespace cuflash::cpu_blocked {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kWidth)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kWidth)));

CUFLASH_VECTOR Vec broadcast(float x) { return x - Vec{}; }

// From any address; floats are aligned to their size only.
CUFLASH_VECTOR Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
CUFLASH_VECTOR void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
CUFLASH_VECTOR UintVec load(const uint32_t* p) {
  UintVec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// a * b + c, rounded once where the processor can.
CUFLASH_VECTOR Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger one; `running` where x is NaN.
CUFLASH_VECTOR Vec maximum(Vec x, Vec running) {
#if defined(__AVX512F__)
  return _mm512_max_ps(x, running);
#elif defined(__AVX2__)
  return _mm256_max_ps(x, running);
#elif defined(__SSE2__)
  return _mm_max_ps(x, running);
#else
  return x > running ? x : running;
#endif
}

// ---- storage types --------------------------------------------------------------------------------------

CUFLASH_VECTOR Vec load(const Bfloat16* p) {
  ShortVec x;
  __builtin_memcpy(&x, p, sizeof x);
  return (Vec)(__builtin_convertvector(x, UintVec) << 16);
}

CUFLASH_VECTOR void store(Bfloat16* p, Vec x) {
  const UintVec u = (UintVec)x;
  const UintVec rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const UintVec nan = u | 0x400000u;
  const ShortVec result = __builtin_convertvector((x == x ? rounded : nan) >> 16, ShortVec);
  __builtin_memcpy(p, &result, sizeof result);
}

#if defined(__AVX512F__)
CUFLASH_VECTOR Vec load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
CUFLASH_VECTOR void store(Half* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
CUFLASH_VECTOR Vec load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CUFLASH_VECTOR void store(Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
CUFLASH_VECTOR Vec load(const Half* p) {
  Vec x;
  for (int i = 0; i < kWidth; ++i) x[i] = to_float(p[i]);
  return x;
}
CUFLASH_VECTOR void store(Half* p, Vec x) {
  for (int i = 0; i < kWidth; ++i) p[i] = from_float<Half>(x[i]);
}
#endif

// ---- exponential ------------------------------------------------------------------------------------------

// y * 2^n, n the integer whose bits are those of `n_bits`; |n| below 200, y between 0.5 and 2.
CUFLASH_VECTOR Vec scale_by_power(Vec y, Vec n, IntVec n_bits) {
#if defined(__AVX512F__)
  (void)n_bits;
  return _mm512_scalef_ps(y, n);
#else
  // In two steps, each of which has a normal factor: 2^n itself may be subnormal or too large.
  (void)n;
  const IntVec half = n_bits >> 1;
  const IntVec first = (half + 127) << 23, second = (n_bits - half + 127) << 23;
  return y * (Vec)first * (Vec)second;
#endif
}

// e^x to 1 ulp, subnormal results included; 0 for -inf, +inf past the largest float, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 P(r), P a minimax polynomial for the relative
// error, 3e-9 before its coefficients are rounded.
CUFLASH_VECTOR Vec exponential(Vec x) {
  // Beyond these the result is 0 or infinity anyway. The comparisons keep NaN.
  x = x < -104.0f ? broadcast(-104.0f) : x;
  x = x > 89.0f ? broadcast(89.0f) : x;
  // Added to 1.5 * 2^23 a number is rounded to an integer, which lies in the low bits.
  const Vec round = broadcast(12582912.0f);
  const Vec shifted = multiply_add(x, broadcast(1.44269504f), round);
  const Vec n = shifted - round;
  const IntVec n_bits = (IntVec)((UintVec)shifted - 0x4b400000u);
  // ln 2 in two parts; n times the first, of 10 bits, is exact without a fused multiply-add too.
  Vec r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.3814323e-3f);
  p = multiply_add(p, r, broadcast(8.3688510e-3f));
  p = multiply_add(p, r, broadcast(4.1668400e-2f));
  p = multiply_add(p, r, broadcast(1.6666520e-1f));
  p = multiply_add(p, r, broadcast(4.9999994e-1f));
  const Vec y = multiply_add(p, r * r, r) + 1.0f;
  return scale_by_power(y, n, n_bits);
}

}  // namespace
}  // namespace cuflash::cpu_blocked
