// The work on tiles (tile_ops.hpp) for the vector level that the including unit is compiled for. Everything is internal to
// the unit (vector.hpp says why).
#pragma once

#include "cpu/blocked/tile_ops.hpp"
#include "cpu/blocked/vector.hpp"

namespace cuflash::cpu_blocked {
namespace {

// What the products keep in registers: kVectors vectors of lanes times kSteps steps (or channels), beside the vectors and a
// broadcast. The narrow shape is for the lanes that are left, and for decode.
#if defined(__AVX512F__)
constexpr int kMainVectors = 4, kMainRows = 4;
#else
constexpr int kMainVectors = 2, kMainRows = 4;
#endif
constexpr int kNarrowRows = 8;
static_assert(kSteps % kNarrowRows == 0 && kChannelPad % kNarrowRows == 0);
static_assert(kNarrowRows % kMainRows == 0 && kLanes % (kMainVectors * kWidth) == 0);

// Calls f(shape, first vector) so that the shapes cover `vectors` vectors.
template <int kV, int kR>
struct Shape {
  static constexpr int kVectors = kV, kRows = kR;
};
template <class F>
CUFLASH_VECTOR void for_shapes(int vectors, F f) {
  int v = 0;
  for (; v + kMainVectors <= vectors; v += kMainVectors) f(Shape<kMainVectors, kMainRows>(), v);
  for (; v < vectors; ++v) f(Shape<1, kNarrowRows>(), v);
}

// Lane masks of one vector of lanes.
struct Sight {
  UintVec words[kVisibleWords] = {};
  Sight() = default;
  CUFLASH_VECTOR Sight(const Visible& visible, int vector) {
    for (int w = 0; w < kVisibleWords; ++w) words[w] = load(visible.words[w] + vector * kWidth);
  }
  CUFLASH_VECTOR IntVec of(int step) const { return (words[step / 32] >> step % 32 & 1u) != 0u; }
};

// ---- rows in and out ------------------------------------------------------------------------------------

template <class T>
CUFLASH_VECTOR void load_rows_of(const void* const* rows, int count, int head_dim, float* panel,
                                 int ld) {
  for (int i = 0; i < count; ++i) {
    const T* row = static_cast<const T*>(rows[i]);
    float* out = panel + i * ld;
    int channel = 0;
    for (; channel + kWidth <= head_dim; channel += kWidth)
      store(out + channel, load(row + channel));
    if (channel == head_dim) continue;
    T rest[kWidth] = {};
    for (int n = 0; channel + n < head_dim; ++n) rest[n] = row[channel + n];
    store(out + channel, load(rest));
  }
}

void load_rows(Dtype dtype, const void* const* rows, int count, int head_dim, float* panel,
               int ld) {
  switch (dtype) {
    case Dtype::kF32:
      return load_rows_of<float>(rows, count, head_dim, panel, ld);
    case Dtype::kF16:
      return load_rows_of<Half>(rows, count, head_dim, panel, ld);
    case Dtype::kBf16:
      return load_rows_of<Bfloat16>(rows, count, head_dim, panel, ld);
  }
}

void transpose(const float* panel, int ld, int count, int head_dim, int vectors, float* lanes) {
  for (int channel = 0; channel < head_dim; ++channel)
    for (int i = 0; i < vectors * kWidth; ++i)
      lanes[channel * kLanes + i] = i < count ? panel[i * ld + channel] : 0.0f;
}

template <class T>
CUFLASH_VECTOR void store_rows_of(const float* lanes, const LaneValues& factors, int count,
                                  int head_dim, void* const* rows) {
  for (int i = 0; i < count; ++i)
    for (int channel = 0; channel < head_dim; channel += kWidth) {
      const int n = head_dim - channel < kWidth ? head_dim - channel : kWidth;
      float values[kWidth] = {};
      for (int c = 0; c < n; ++c) values[c] = lanes[(channel + c) * kLanes + i] * factors.x[i];
      T rounded[kWidth];
      store(rounded, load(values));
      __builtin_memcpy(static_cast<T*>(rows[i]) + channel, rounded, n * sizeof(T));
    }
}

void store_rows(Dtype dtype, const float* lanes, const LaneValues& factors, int count, int head_dim,
                void* const* rows) {
  switch (dtype) {
    case Dtype::kF32:
      return store_rows_of<float>(lanes, factors, count, head_dim, rows);
    case Dtype::kF16:
      return store_rows_of<Half>(lanes, factors, count, head_dim, rows);
    case Dtype::kBf16:
      return store_rows_of<Bfloat16>(lanes, factors, count, head_dim, rows);
  }
}

bool is_finite(const float* panel, int ld, int steps, int head_dim) {
  // x * 0 is 0, or NaN for what is not finite; the padding is 0.
  Vec sum = {};
  for (int s = 0; s < steps; ++s)
    for (int channel = 0; channel < head_dim; channel += kWidth)
      sum += load(panel + s * ld + channel) * 0.0f;
  bool finite = true;
  for (int i = 0; i < kWidth; ++i) finite = finite && sum[i] == 0.0f;
  return finite;
}

// ---- products -------------------------------------------------------------------------------------------

void dot(const float* a, const float* b, int head_dim, int vectors, LaneValues* sums) {
  for (int v = 0; v < vectors; ++v) {
    Vec sum = {};
    for (int channel = 0; channel < head_dim; ++channel) {
      const int at = channel * kLanes + v * kWidth;
      sum = multiply_add(load(a + at), load(b + at), sum);
    }
    store(sums->x + v * kWidth, sum);
  }
}

template <class S>
CUFLASH_VECTOR void product_block(const float* panel, int ld, const float* lanes, int head_dim,
                                  float scale, float* scores) {
  Vec sum[S::kRows][S::kVectors] = {};
  for (int channel = 0; channel < head_dim; ++channel) {
    Vec x[S::kVectors];
    for (int v = 0; v < S::kVectors; ++v) x[v] = load(lanes + channel * kLanes + v * kWidth);
    for (int r = 0; r < S::kRows; ++r) {
      const Vec y = broadcast(panel[r * ld + channel]);
      for (int v = 0; v < S::kVectors; ++v) sum[r][v] = multiply_add(y, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < S::kRows; ++r)
    for (int v = 0; v < S::kVectors; ++v)
      store(scores + r * kLanes + v * kWidth, scale * sum[r][v]);
}

void products(const float* panel, int ld, int steps, const float* lanes, int head_dim, int vectors,
              float scale, float* scores) {
  for_shapes(vectors, [&](auto shape, int v) {
    using S = decltype(shape);
    // The last block may reach past the steps, into rows of the panel that nobody reads from the scores.
    for (int s = 0; s < steps; s += S::kRows)
      product_block<S>(panel + s * ld, ld, lanes + v * kWidth, head_dim, scale,
                       scores + s * kLanes + v * kWidth);
  });
}

template <class S, bool kGuarded>
CUFLASH_VECTOR void accumulate_block(const float* weights, int steps, const float* panel, int ld,
                                     const Sight* sight, const float* factors, float* acc) {
  Vec sum[S::kRows][S::kVectors] = {};
  for (int s = 0; s < steps; ++s) {
    Vec w[S::kVectors];
    for (int v = 0; v < S::kVectors; ++v) w[v] = load(weights + s * kLanes + v * kWidth);
    for (int r = 0; r < S::kRows; ++r) {
      const Vec y = broadcast(panel[s * ld + r]);
      for (int v = 0; v < S::kVectors; ++v) {
        const Vec with = multiply_add(y, w[v], sum[r][v]);
        sum[r][v] = kGuarded ? (sight[v].of(s) ? with : sum[r][v]) : with;
      }
    }
  }
  for (int r = 0; r < S::kRows; ++r)
    for (int v = 0; v < S::kVectors; ++v) {
      float* out = acc + r * kLanes + v * kWidth;
      store(out, multiply_add(load(out), load(factors + v * kWidth), sum[r][v]));
    }
}

void accumulate(const float* weights, int steps, const float* panel, int ld, int head_dim,
                int vectors, const Visible* visible, const LaneValues& factors, float* acc) {
  for_shapes(vectors, [&](auto shape, int v) {
    using S = decltype(shape);
    Sight sight[S::kVectors];
    if (visible != nullptr)
      for (int n = 0; n < S::kVectors; ++n) sight[n] = Sight(*visible, v + n);
    const int lane = v * kWidth;
    for (int channel = 0; channel < head_dim; channel += S::kRows) {
      float* out = acc + channel * kLanes + lane;
      if (visible != nullptr)
        accumulate_block<S, true>(weights + lane, steps, panel + channel, ld, sight,
                                  factors.x + lane, out);
      else
        accumulate_block<S, false>(weights + lane, steps, panel + channel, ld, sight,
                                   factors.x + lane, out);
    }
  });
}

// ---- softmax --------------------------------------------------------------------------------------------

template <bool kMasked>
CUFLASH_VECTOR void softmax_of(int steps, int vectors, const Visible* visible, float* scores,
                               LaneValues* m, LaneValues* l, LaneValues* factors) {
  const Vec lowest = broadcast(-__builtin_inff());
  for (int v = 0; v < vectors; ++v) {
    float* const column = scores + v * kWidth;
    const Vec before = load(m->x + v * kWidth);
    Vec top = before;
    const Sight sight = kMasked ? Sight(*visible, v) : Sight();
    for (int s = 0; s < steps; ++s) {
      const Vec raw = load(column + s * kLanes);
      const Vec score = kMasked ? (sight.of(s) ? raw : lowest) : raw;
      if constexpr (kMasked) store(column + s * kLanes, score);
      top = maximum(score, top);
    }
    // Where all scores so far are -inf they weigh nothing: -inf - 0, not -inf + inf.
    const Vec base = top == lowest ? broadcast(0.0f) : top;
    const Vec factor = before == top ? broadcast(1.0f) : exponential(before - base);
    Vec sum = {};
    for (int s = 0; s < steps; ++s) {
      const Vec weight = exponential(load(column + s * kLanes) - base);
      store(column + s * kLanes, weight);
      sum += weight;
    }
    store(m->x + v * kWidth, top);
    store(l->x + v * kWidth, multiply_add(load(l->x + v * kWidth), factor, sum));
    store(factors->x + v * kWidth, factor);
  }
}

void softmax(int steps, int vectors, const Visible* visible, float* scores, LaneValues* m,
             LaneValues* l, LaneValues* factors) {
  if (visible != nullptr)
    softmax_of<true>(steps, vectors, visible, scores, m, l, factors);
  else
    softmax_of<false>(steps, vectors, nullptr, scores, m, l, factors);
}

// lse_at(step, vector) and delta_at(step, vector) give vectors.
template <class Lse, class Delta>
CUFLASH_VECTOR void gradients(int steps, int vectors, const Visible* visible, Lse lse_at,
                              Delta delta_at, float* scores, float* d_p) {
  for (int v = 0; v < vectors; ++v)
    for (int s = 0; s < steps; ++s) {
      const int at = s * kLanes + v * kWidth;
      Vec p = exponential(load(scores + at) - lse_at(s, v));
      Vec d_s = p * (load(d_p + at) - delta_at(s, v));
      if (visible != nullptr) {
        const IntVec seen = Sight(*visible, v).of(s);
        p = seen ? p : Vec{};
        d_s = seen ? d_s : Vec{};
      }
      store(scores + at, p);
      store(d_p + at, d_s);
    }
}

void gradients_by_lane(int steps, int vectors, const Visible* visible, const LaneValues& lse,
                       const LaneValues& delta, float* scores, float* d_p) {
  gradients(
      steps, vectors, visible, [&](int, int v) { return load(lse.x + v * kWidth); },
      [&](int, int v) { return load(delta.x + v * kWidth); }, scores, d_p);
}

void gradients_by_step(int steps, int vectors, const Visible* visible, const StepValues& lse,
                       const StepValues& delta, float* scores, float* d_p) {
  gradients(
      steps, vectors, visible, [&](int s, int) { return broadcast(lse.x[s]); },
      [&](int s, int) { return broadcast(delta.x[s]); }, scores, d_p);
}

#define CUFLASH_TILE_OPS(name)                                                         \
  {                                                                                    \
    name, kWidth, load_rows, transpose, store_rows, is_finite, dot, products, softmax, \
        gradients_by_lane, gradients_by_step, accumulate                               \
  }

}  // namespace
}  // namespace cuflash::cpu_blocked
