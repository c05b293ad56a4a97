// The running maximum and sum of one row's softmax. The one home of its algebra: an empty state is
// m = -inf, l = 0, and merging with it changes nothing.
//
// The maximum is subtracted before scaling: (x - m) * c. The fused form fma(x, c, -m * c) saves an
// instruction but is wrong for large |m * c| (equal scores of 1e11 then differ after rounding).
#pragma once

#include <cmath>

#include "common/host_device.hpp"
#include "common/float16.hpp"

namespace cuflash {

CUFLASH_HOST_DEVICE float negative_infinity() { return bits_float(0xff800000u); }

struct OnlineSoftmax {
  float m = negative_infinity();
  float l = 0;

  // Takes in one natural-log score. Returns the factor for what was accumulated before; `weight` is the
  // score's own weight.
  CUFLASH_HOST_DEVICE float update(float score, float* weight) {
    return merge({score, 1.0f}, weight);
  }

  // The same for a state that took in other scores; `weight` is the factor for what it accumulated.
  CUFLASH_HOST_DEVICE float merge(const OnlineSoftmax& other, float* weight) {
    const float m_new = fmaxf(m, other.m);
    const float rescale = m == m_new ? 1.0f : expf(m - m_new);  // equal covers -inf - -inf
    // -inf (a bias that masks, an empty state) weighs nothing even where the maximum is -inf; NaN and +inf give
    // NaN.
    *weight = other.m == negative_infinity() ? 0.0f : expf(other.m - m_new);
    l = l * rescale + *weight * other.l;
    m = m_new;
    return rescale;
  }

  CUFLASH_HOST_DEVICE bool empty() const { return l == 0.0f; }
  CUFLASH_HOST_DEVICE float inverse_sum() const { return l == 0.0f ? 0.0f : 1.0f / l; }
  CUFLASH_HOST_DEVICE float lse() const { return l == 0.0f ? negative_infinity() : m + logf(l); }
};

}  // namespace cuflash
