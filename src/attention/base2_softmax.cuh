// Softmax weights on the GPU: powers of 2 of raw scores, scaled by scale * log2(e).
#pragma once

#include "attention/online_softmax.hpp"
#include "device/ptx/ex2.cuh"

namespace cuflash {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^((score - m) * scale_log2). The difference first: scores of 1e11 lose their distance in
// fma(x, c, -m * c). -inf weighs nothing; not left to 2^-inf: with scale 0, or under a maximum of -inf, that is NaN.
__device__ __forceinline__ float weight_of(float score, float m, float scale_log2) {
  return score == negative_infinity() ? 0.0f
                                      : device::ptx::ex2_approx_ftz((score - m) * scale_log2);
}

// What sums under the maximum m_old must be multiplied by under m_new. An unchanged maximum needs no factor,
// -inf included.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, float scale_log2) {
  return m_old == m_new ? 1.0f : weight_of(m_old, m_new, scale_log2);
}

// ln of the sum of e^score, of which m is the greatest, with `factor`, and l the sum of e^(score - m). Rounded in the
// middle: a compiler may contract this or not, and two kernels from one source would differ in the last bit.
__device__ __forceinline__ float lse_of(float m, float factor, float l) {
  return l == 0.0f ? negative_infinity() : __fadd_rn(__fmul_rn(m, factor), logf(l));
}

}  // namespace cuflash
