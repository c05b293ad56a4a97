// What the cpu family does with tiles, as one table of functions for each vector level of the processor.
//
// A tile pairs lanes with steps. Lanes are query rows (forward, dQ) or keys (dK and dV); they lie side by side in
// vectors, so that a softmax needs no sum across a vector. Steps are what a lane runs over: keys, or query rows.
//   lanes      [channel][kLanes]    fp32, transposed once for each tile of lanes
//   panel      [step][ld]           fp32 rows as in memory; their elements are broadcast
//   scores     [step][kLanes]       fp32
//
// The units of the levels are compiled with flags of their own (level.hpp): only plain types here, and no inline
// function that they could emit for all.
#pragma once

#include <cstdint>

#include "common/tensor_view.hpp"

namespace cuflash::cpu_blocked {

// 64 lanes are 4 vectors of AVX-512, and few enough that a causal mask wastes little.
constexpr int kLanes = 64;
constexpr int kSteps = 64;
// Channels of a panel are padded with zeros to a multiple of this, the widest vector.
constexpr int kChannelPad = 16;

// The steps that each lane sees, counted from the first of the tile: a bit each, from the lowest of the first word on.
constexpr int kVisibleWords = kSteps / 32;
struct Visible {
  alignas(64) uint32_t words[kVisibleWords][kLanes];
};

// One fp32 value for each lane, or for each step.
struct alignas(64) LaneValues {
  float x[kLanes];
};
struct alignas(64) StepValues {
  float x[kSteps];
};

// In all of these only the first `vectors` * width lanes count. A null `visible` stands for a tile that every lane
// sees as a whole.
struct TileOps {
  const char* name;
  int width;  // lanes of a vector

  // count rows of head_dim elements to fp32; the channels up to a multiple of the width become 0.
  void (*load_rows)(Dtype dtype, const void* const* rows, int count, int head_dim, float* panel,
                    int ld);
  // lanes[channel][i] = panel[i][channel]; lanes from `count` on become 0.
  void (*transpose)(const float* panel, int ld, int count, int head_dim, int vectors, float* lanes);
  // rows[i][channel] = lanes[channel][i] * factors[i], rounded to the dtype.
  void (*store_rows)(Dtype dtype, const float* lanes, const LaneValues& factors, int count,
                     int head_dim, void* const* rows);
  // No NaN and no infinity in `steps` rows of a panel.
  bool (*is_finite)(const float* panel, int ld, int steps, int head_dim);

  // sums[i] = sum over channels of a[channel][i] * b[channel][i].
  void (*dot)(const float* a, const float* b, int head_dim, int vectors, LaneValues* sums);
  // scores[s][i] = scale * (row s of the panel . lane i): the sum runs over the channels in their order, whatever
  // are lanes and what steps, so forward and backward see the same bits.
  void (*products)(const float* panel, int ld, int steps, const float* lanes, int head_dim,
                   int vectors, float scale, float* scores);
  // Takes scores into the running maximum m and sum l, and turns them into weights. `factors` is for what was
  // accumulated before.
  void (*softmax)(int steps, int vectors, const Visible* visible, float* scores, LaneValues* m,
                  LaneValues* l, LaneValues* factors);
  // scores become P = exp(score - lse), d_p becomes dS = P * (d_p - delta); 0 where a step is not seen. lse and delta
  // are given for each lane, or for each step.
  void (*gradients_by_lane)(int steps, int vectors, const Visible* visible, const LaneValues& lse,
                            const LaneValues& delta, float* scores, float* d_p);
  void (*gradients_by_step)(int steps, int vectors, const Visible* visible, const StepValues& lse,
                            const StepValues& delta, float* scores, float* d_p);
  // acc[channel][i] = acc[channel][i] * factors[i] + sum over steps of weights[s][i] * panel[s][channel]: the tile's
  // sum on its own first, since one long fp32 sum drifts. With `visible` terms that are not seen are left out, not
  // multiplied by 0, which NaN would survive.
  void (*accumulate)(const float* weights, int steps, const float* panel, int ld, int head_dim,
                     int vectors, const Visible* visible, const LaneValues& factors, float* acc);
};

extern const TileOps kBaseline;
#if defined(__x86_64__)
extern const TileOps kAvx2;
extern const TileOps kAvx512;
#endif

// The levels that this processor has, slowest first; returns how many.
constexpr int kMaxLevels = 3;
int supported_levels(const TileOps* (&levels)[kMaxLevels]);

}  // namespace cuflash::cpu_blocked
