// What the two warps of a strip compute, the same for dQ and for dK and dV.
//
//   S = scale * Q K^T     P = e^(S - LSE)        dP = dO V^T     dS = P * (dP - delta)
//
// The weights' warp makes P, the gradients' warp dP and then dS. Both are elementwise once the products are there:
// nothing leaves the fragments but P in fp32 (for the other warp, which reads it as the accumulator that it was
// stored from) and the factors of the next products, rounded to 16 bits.
#pragma once

#include "attention/base2_softmax.cuh"
#include "attention/tile_gradients.hpp"
#include "backward/wmma/config.hpp"
#include "device/element_places.cuh"
#include "device/ptx/ex2.cuh"

namespace cuflash::backward_wmma {

namespace ptx = device::ptx;
namespace wmma = nvcuda::wmma;

using device::Accumulator;
using device::load_fragment;

// product = left * s_right^T; s_right [16 * kCount][kLd]
template <int kLd, int kChannelFragments, int kCount, class Element>
__device__ void multiply_transposed(Accumulator (&product)[kCount],
                                    const device::LeftFragment<Element> (&left)[kChannelFragments],
                                    const Element* s_right) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) wmma::fill_fragment(product[n], 0.0f);
#pragma unroll
  for (int f = 0; f < kChannelFragments; ++f)
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      device::RightTransposedFragment<Element> right;
      load_fragment(right, s_right + n * kFragment * kLd + f * kFragment, kLd);
      wmma::mma_sync(product[n], left[f], right, product[n]);
    }
}

// total += s_left * s_right; s_left [16][kLdLeft], s_right [16 * kInner][kLdRight]
template <int kInner, int kLdLeft, int kLdRight, int kCount, class Element>
__device__ void multiply_add(Accumulator (&total)[kCount], const Element* s_left,
                             const Element* s_right) {
#pragma unroll
  for (int n = 0; n < kInner; ++n) {
    device::LeftFragment<Element> left;
    load_fragment(left, s_left + n * kFragment, kLdLeft);
#pragma unroll
    for (int f = 0; f < kCount; ++f) {
      device::RightFragment<Element> right;
      load_fragment(right, s_right + n * kFragment * kLdRight + f * kFragment, kLdRight);
      wmma::mma_sync(total[f], left, right, total[f]);
    }
  }
}

// product = P, from Q K^T; lse(fragment, element) of the element's query, seen(fragment, element) only where kMasked.
template <bool kMasked, int kCount, class Lse, class Seen>
__device__ void make_weights(Accumulator (&product)[kCount], float scale, Lse lse, Seen seen) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; ++e) {
      // Rounded before LSE is taken off, as the forward's maximum was: a row that sees one key has P = 1.
      const float score = __fmul_rn(scale, product[n].x[e]);
      const float p = ptx::ex2_approx_ftz((score - lse(n, e)) * kLog2E);
      product[n].x[e] = kMasked && !seen(n, e) ? 0.0f : p;
    }
}

// For the gradients' warp: P to s_p, in fp32. For its own product: to s_factors.
template <int kLd, int kCount, class Element>
__device__ void store_weights(float* s_p, Element* s_factors, const Accumulator (&p)[kCount],
                              const device::ElementPlaces& places) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    wmma::store_matrix_sync(s_p + n * kFragment, p[n], kLd, wmma::mem_row_major);
    if (s_factors != nullptr) device::store_rounded<kLd>(s_factors + n * kFragment, p[n], places);
  }
}

// Both at once where modifies_pairs(): pair(fragment, element, product) of those seen. What the gradients' warp gets is
// P * derivative, negative where the weight is dropped; in the factors of the own product it is P * kept.
template <int kLd, int kCount, class Element, class Lse, class Seen, class Pair>
__device__ void make_modified_weights(float* s_p, Element* s_factors,
                                      Accumulator (&product)[kCount],
                                      const device::ElementPlaces& places, Lse lse, Seen seen,
                                      Pair pair) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    Accumulator weights;
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; ++e) {
      float weight = 0, signed_p = 0;
      if (seen(n, e)) {
        const PairScore score = pair(n, e, product[n].x[e]);
        const float p = weight_of(score.score, lse(n, e), kLog2E);
        weight = p * score.kept;
        signed_p = score.kept == 0.0f ? -p * score.derivative : p * score.derivative;
      }
      weights.x[e] = weight;
      product[n].x[e] = signed_p;
    }
    __syncwarp();  // SAFETY: lanes whose pairs are hidden have waited for the others.
    wmma::store_matrix_sync(s_p + n * kFragment, product[n], kLd, wmma::mem_row_major);
    if (s_factors != nullptr)
      device::store_rounded<kLd>(s_factors + n * kFragment, weights, places);
  }
}

// dS of a pair, from what the weights' warp made of P. `kept` is the factor of weights that are not dropped.
template <class Call>
__device__ __forceinline__ float score_gradient(float p, float kept, float d_p, float delta) {
  if constexpr (!kHasFeatures<Call>) return p * (d_p - delta);
  // Where P = 0, delta may be anything: it has the gradient of LSE in it, also of a row without keys.
  return p == 0.0f ? 0.0f : fabsf(p) * ((p < 0.0f ? 0.0f : kept * d_p) - delta);
}

// dS from P in s_p and the product dO V^T, to s_factors; delta(fragment, element) of the element's query.
template <class Call, int kLd, int kCount, class Element, class Delta>
__device__ void store_score_gradients(Element* s_factors, const float* s_p,
                                      const Accumulator (&d_p)[kCount],
                                      const device::ElementPlaces& places, float kept,
                                      Delta delta) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    Accumulator d_s;
    wmma::load_matrix_sync(d_s, s_p + n * kFragment, kLd, wmma::mem_row_major);
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; ++e)
      d_s.x[e] = score_gradient<Call>(d_s.x[e], kept, d_p[n].x[e], delta(n, e));
    device::store_rounded<kLd>(s_factors + n * kFragment, d_s, places);
  }
}

template <int kCount>
__device__ void multiply_by(Accumulator (&matrix)[kCount], float factor) {
#pragma unroll
  for (int f = 0; f < kCount; ++f)
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; ++e) matrix[f].x[e] *= factor;
}

}  // namespace cuflash::backward_wmma
