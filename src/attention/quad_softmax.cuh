// Online softmax of scores in the registers where products of 16 rows leave them (device/ptx/mma.cuh): a thread has two
// rows, g = lane / 4 and g + 8, and of each the columns 8 j + 2 (lane % 4) + {0, 1}; the four lanes of a quad share them.
// scores[i] is of row i / 2 % 2 and column 8 (i / 4) + 2 (lane % 4) + i % 2.
//
// There is no look for the maximum of each tile: weights are taken under that of earlier keys as long as their sums say that
// they may be, which spares a comparison for each score and two shuffles for each row. A row's weights depend on nothing but
// the row.
#pragma once

#include "attention/base2_softmax.cuh"
#include "attention/columns.hpp"
#include "common/float16.hpp"
#include "device/packed16.cuh"
#include "device/ptx/ex2.cuh"

namespace cuflash {

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

struct QuadRows {
  // What raw scores are compared with, equal in a row's four lanes: the greatest of the first tile, raised to that of each
  // later one whose weights would outgrow those before it (quad_weigh).
  float m[2] = {negative_infinity(), negative_infinity()};
  float l[2] = {0, 0};  // of the weights that this lane computed
};

// scale_log2 of quad_weigh and quad_weigh_under_new_maximum. Never 0: a masked score of -inf stays -inf.
__device__ inline float quad_scale_log2(float factor_of_scores) {
  return fmaxf(factor_of_scores * kLog2E, 1.4e-45f);
}

// fma(x, c, -m * c), the exponent in one instruction, is off by the rounding of m * c: 2^-16 of the weight at most below
// this bound. Else the difference comes first: scores of 1e11 would lose their distance.
__device__ inline bool quad_is_near(float offset) {
  constexpr float kNear = 256;
  return fabsf(offset) < kNear;
}

// -inf where the row does not see the key.
template <int kCount>
__device__ void quad_mask(float (&scores)[kCount], const Columns (&seen)[2],
                          unsigned lane_in_quad) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!seen[i / 2 % 2].contain(8 * (i / 4) + 2 * lane_in_quad + i % 2))
      scores[i] = negative_infinity();
}

// Weights 2^exponent(score, row), rounded to the A operands of the next product, and their sums by row.
template <class Element, int kCount, int kSteps, class Exponent>
__device__ void quad_exponentiate(const float (&scores)[kCount], Exponent exponent,
                                  uint32_t (&p)[kSteps][4], float (&sum)[2]) {
  static_assert(kCount == 8 * kSteps);
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int row = i / 2 % 2;
    const float w0 = device::ptx::ex2_approx_ftz(exponent(scores[i], row)),
                w1 = device::ptx::ex2_approx_ftz(exponent(scores[i + 1], row));
    sum[row] += w0 + w1;
    p[i / 8][i / 2 % 4] = device::pack16<Element>(w0, w1);
  }
}

// The weights of a tile under the m that there is, and their sums, which are to be added to l where no row asks for another
// m. Returns the rows (bits) for which this lane asks for one. Where any lane does, quad_weigh_under_new_maximum() does all
// again.
template <class Element, int kCount, int kSteps>
__device__ uint32_t quad_weigh(const float (&scores)[kCount], float scale_log2,
                               const QuadRows& rows, uint32_t (&p)[kSteps][4], float (&sum)[2]) {
  // Good while no lane's part outweighs by this all that it had before. A weight that is most of a row is thus 1 and rounds
  // to itself. Measured without (docs/log/0016): twice the error.
  constexpr float kOutweighs = 8;
  // And no greater than this, or values near the end of bf16 overflow sums of O that they do not overflow under the
  // greatest score (16-bit weights themselves end at 65504).
  constexpr float kMaxSum = 256;
  // Made anew for each tile, which is two instructions, rather than kept in registers; NaN, and so the sum, where this
  // cannot work with m.
  float offset[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    offset[row] = -rows.m[row] * scale_log2;
    if (!quad_is_near(offset[row])) offset[row] = bits_float(0x7fffffff);
  }
  quad_exponentiate<Element>(
      scores, [&](float x, int row) { return fmaf(x, scale_log2, offset[row]); }, p, sum);
  uint32_t asks = 0;
#pragma unroll
  for (int row = 0; row < 2; ++row)
    if (!(sum[row] <= fminf(kOutweighs * rows.l[row], kMaxSum))) asks |= 1 << row;  // NaN asks
  return asks;
}

// The weights of a tile after m was raised to the greatest score so far in the rows that a lane asks for, and the factors of
// what was summed before. The other rows get the bits that quad_weigh() gave them. By a whole warp.
template <class Element, int kCount, int kSteps>
__device__ void quad_weigh_under_new_maximum(const float (&scores)[kCount], float scale_log2,
                                             uint32_t asks, QuadRows& rows,
                                             uint32_t (&p)[kSteps][4], float (&factor)[2]) {
  asks |= __shfl_xor_sync(0xffffffffu, asks, 1);
  asks |= __shfl_xor_sync(0xffffffffu, asks, 2);
  float m[2] = {rows.m[0], rows.m[1]};
#pragma unroll
  for (int i = 0; i < kCount; ++i) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], scores[i]);
  float used[2], offset[2];
  bool near[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float greatest = quad_max(m[row]);
    const float now = asks >> row & 1 ? greatest : rows.m[row];
    used[row] = now == negative_infinity() ? 0 : now;  // -inf - -inf is no number
    factor[row] = device::ptx::ex2_approx_ftz((rows.m[row] - used[row]) * scale_log2);
    rows.m[row] = now;
    offset[row] = -used[row] * scale_log2;
    near[row] = quad_is_near(offset[row]);
  }
  float sum[2];
  quad_exponentiate<Element>(
      scores,
      [&](float x, int row) {
        return near[row] ? fmaf(x, scale_log2, offset[row]) : (x - used[row]) * scale_log2;
      },
      p, sum);
#pragma unroll
  for (int row = 0; row < 2; ++row) rows.l[row] = rows.l[row] * factor[row] + sum[row];
}

}  // namespace cuflash
