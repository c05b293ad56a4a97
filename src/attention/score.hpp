// From a product q.k to the score that the softmax takes: scale, softcap, bias and ALiBi, in this order. The one home of
// that rule; the mask comes after it (key_range.hpp).
#pragma once

#include <cmath>

#include "core/features.hpp"

namespace cuflash {

// A product that is rounded before anything is added to it. Contracted into the addition that follows, as nvcc would,
// forward and backward would see different scores, and P = exp(s - lse) would miss 1 where a row sees a single key.
CUFLASH_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

struct Score {
  float value;
  float derivative;  // of the value by the scaled product
};

// A query row as its scores see it. `row` and keys count from the sequence's first.
struct ScoreRow {
  int64_t batch, head, row, centre;
};

CUFLASH_HOST_DEVICE Score score_of(const ScoreModifiers& m, float scale, float product,
                                   const ScoreRow& r, int64_t key) {
  Score s{rounded_product(scale, product), 1.0f};
  if (m.softcap > 0) {
    // 1 - tanh^2 in a form that keeps its digits where tanh nears 1.
    const float x = s.value / m.softcap;
    const float u = expf(-2.0f * fabsf(x));
    s = {rounded_product(m.softcap, tanhf(x)), 4.0f * u / ((1.0f + u) * (1.0f + u))};
  }
  if (m.bias.data != nullptr) {
    const int64_t at = r.batch * m.bias.batch_stride + r.head * m.bias.head_stride +
                       r.row * m.bias.row_stride + key;
    s.value += Elements{m.bias.data, m.bias.dtype}.load(at);
  }
  if (m.slopes.data != nullptr) {
    const int64_t distance = r.centre > key ? r.centre - key : key - r.centre;
    s.value -= rounded_product(m.slopes.load(r.batch * m.slopes_batch_stride + r.head),
                               static_cast<float>(distance));
  }
  return s;
}

}  // namespace cuflash
