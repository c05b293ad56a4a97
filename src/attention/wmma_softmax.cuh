// Online softmax of 16 rows of raw scores that a warp keeps in its own shared memory, as WMMA kernels do: they
// may not look into fragments.
#pragma once

#include "attention/base2_softmax.cuh"
#include "attention/columns.hpp"
#include "attention/tile_rows.hpp"
#include "device/packed16.cuh"
#include "device/wmma_shape.hpp"

namespace cuflash {

// The running softmax of one row, in two lanes: both hold the maximum of the raw scores, each the sum of the
// weights that it computed.
struct RowState {
  float m = negative_infinity();
  float l = 0;
};

// Turns 16 rows of scores of a warp into 16-bit weights 2^((score - m) * scale_log2), and leaves in row_factors
// what O must be multiplied by before they count. Returns whether any factor is not 1. Lanes 2r and 2r + 1
// share row r, four columns in turn. The strips are taken in order: the weights are half as long as the
// scores, so they lie over scores that have been read.
template <bool kMasked, class Config, class Warp>
__device__ bool softmax_strip(Warp& s_warp, int strip, unsigned lane, float scale_log2,
                              Columns seen, RowState& state) {
  constexpr int kGroups = Config::kTileN / 8;
  const unsigned row = strip * device::kFragment + lane / 2;
  const unsigned first_column = lane % 2 * 4;

  float x[kGroups][4];  // [group][i] is column 8 * group + first_column + i
  float m_part[4] = {state.m, state.m, state.m, state.m};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const auto scores =
        *reinterpret_cast<const float4*>(&s_warp.scores[row][8 * group + first_column]);
    x[group][0] = scores.x, x[group][1] = scores.y, x[group][2] = scores.z, x[group][3] = scores.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kMasked && !seen.contain(8 * group + first_column + i)) x[group][i] = negative_infinity();
      m_part[i] = fmaxf(m_part[i], x[group][i]);
    }
  }
  float m = fmaxf(fmaxf(m_part[0], m_part[1]), fmaxf(m_part[2], m_part[3]));
  m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
  const float factor = rescale_factor(state.m, m, scale_log2);
  if (first_column == 0) s_warp.row_factors[row] = factor;
  __syncwarp();  // SAFETY: all lanes have read the strip's scores before weights overwrite them.

  float l_part[4] = {};  // of this tile alone: with the running sum among them they would drift
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The difference first: scores of 1e11 lose their distance in fma(x, c, -m * c).
      p[i] = device::ptx::ex2_approx_ftz((x[group][i] - m) * scale_log2);
      // Not left to 2^-inf: with scale 0, or where no key has been seen yet, that is NaN.
      if (kMasked && x[group][i] == negative_infinity()) p[i] = 0;
      l_part[i] += p[i];
    }
    device::store_packed16(&s_warp.weights[row][8 * group + first_column], p);
  }
  state.m = m;
  state.l = state.l * factor + ((l_part[0] + l_part[1]) + (l_part[2] + l_part[3]));
  return __any_sync(0xffffffffu, factor != 1.0f);
}

// Where scores are more than scaled products: finishes a strip of them before its softmax, which then sees the columns with
// a score above -infinity. `row` is the lane's, as there. A pass of its own and rolled: each score made where the softmax
// takes it, 64 times unrolled, takes the compiler four times as long as all else.
template <class Config, class Warp>
__device__ void modify_scores(Warp& s_warp, int strip, unsigned lane, Columns seen,
                              const ModifiedRow& row) {
  float* s_row = s_warp.scores[strip * device::kFragment + lane / 2];
#pragma unroll 1
  for (unsigned column = lane % 2; column < Config::kTileN; column += 2)
    s_row[column] = seen.contain(column) ? row.score(s_row[column], column) : negative_infinity();
  __syncwarp();  // SAFETY: the scores are written before the row's other lane reads them.
}

// Dropout, between softmax and product.
template <class Config, class Warp>
__device__ void drop_weights(Warp& s_warp, int strip, unsigned lane, const ModifiedRow& row) {
  if (!row.dropout.active) return;
  __syncwarp();  // SAFETY: the weights are written, by either lane of the row.
  auto* s_row = s_warp.weights[strip * device::kFragment + lane / 2];
#pragma unroll 1
  for (unsigned column = lane % 2; column < Config::kTileN; column += 2)
    if (!row.keeps(column)) s_row[column] = 0.0f;
}

}  // namespace cuflash
