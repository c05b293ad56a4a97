// The work on tiles of the cpu family, each vector level by itself.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attention/online_softmax.hpp"
#include "common/float16.hpp"
#include "support/data.hpp"
#include "unit/cpu_levels.hpp"

namespace cuflash::cpu_blocked {
namespace {

using cuflash_test::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kMaxDim = 256;

class CpuExponential : public OnEveryLevel {};
class CpuRows : public OnEveryLevel {};
class CpuProducts : public OnEveryLevel {};
class CpuSoftmax : public OnEveryLevel {};
CUFLASH_FOR_LEVELS(CpuExponential);
CUFLASH_FOR_LEVELS(CpuRows);
CUFLASH_FOR_LEVELS(CpuProducts);
CUFLASH_FOR_LEVELS(CpuSoftmax);

struct Scores {
  alignas(64) float x[kSteps][kLanes] = {};
  float* data() { return x[0]; }
};
struct Lanes {
  alignas(64) float x[kMaxDim][kLanes] = {};
  float* data() { return x[0]; }
};
// A panel of which each row has `ld` channels.
struct Panel {
  explicit Panel(int ld_) : ld(ld_), x(static_cast<size_t>(kSteps * ld_)) {}
  float& at(int step, int channel) { return x[static_cast<size_t>(step * ld + channel)]; }
  int ld;
  std::vector<float> x;
};

// What each lane sees: the steps [begin, end).
struct Intervals {
  int begin[kLanes], end[kLanes];

  bool show(int lane, int step) const { return begin[lane] <= step && step < end[lane]; }
  Visible visible() const {
    Visible bits = {};
    for (int i = 0; i < kLanes; ++i)
      for (int s = 0; s < kSteps; ++s)
        if (show(i, s)) bits.words[s / 32][i] |= uint32_t{1} << s % 32;
    return bits;
  }
};

float random_float(Random& random) { return static_cast<float>(random.normal()); }
LaneValues lanes_of(float x) {
  LaneValues values;
  std::fill(values.x, values.x + kLanes, x);
  return values;
}

// exp(x) of a tile full of numbers: the weights of the backward with lse = 0.
void exponential(const TileOps& ops, std::vector<float>& x) {
  ASSERT_LE(x.size(), size_t{kSteps * kLanes});
  const LaneValues zeros = lanes_of(0);
  Scores scores, d_p;
  std::copy(x.begin(), x.end(), scores.data());
  ops.gradients_by_lane(kSteps, kLanes / ops.width, nullptr, zeros, zeros, scores.data(),
                        d_p.data());
  std::copy(scores.data(), scores.data() + x.size(), x.begin());
}

TEST_P(CpuExponential, TwoUlpsFromTheTruth) {
  const float last = -110.0f, first = 89.5f;
  double worst = 0;
  std::vector<float> x, y;
  const auto check = [&] {
    y = x;
    exponential(ops(), y);
    for (size_t n = 0; n < x.size(); ++n) {
      const double truth = std::exp(static_cast<double>(x[n]));
      const float rounded = static_cast<float>(truth);
      if (std::isinf(rounded) || std::isinf(y[n])) {
        // Half an ulp below the limit either is as good.
        ASSERT_GE(truth, 3.402823e38) << x[n];
        ASSERT_GE(y[n], 3.402823e38f) << x[n];
        continue;
      }
      const double unit = static_cast<double>(std::nextafter(rounded, kInfinity)) - rounded;
      const double error = std::fabs(y[n] - truth) / unit;
      ASSERT_LE(error, 2) << x[n];
      worst = std::max(worst, error);
    }
    x.clear();
  };
  // Every 997th float of either sign, subnormals too.
  for (const float end : {first, last})
    for (uint32_t bits = float_bits(std::copysign(0.0f, end)); bits <= float_bits(end);
         bits += 997) {
      x.push_back(bits_float(bits));
      if (x.size() == size_t{kSteps * kLanes}) check();
    }
  check();
  RecordProperty("worst_ulps", std::to_string(worst));
  std::printf("[   exp    ] %s: %.3f ulp\n", ops().name, worst);
}

TEST_P(CpuExponential, SpecialValues) {
  std::vector<float> x = {0.0f, -0.0f, -kInfinity, -3e38f,  -1e5f,   kInfinity,   3e38f,  89.0f,
                          kNaN, -kNaN, 1e-30f,     -1e-45f, -103.5f, -87.336548f, -104.5f};
  const std::vector<float> given = x;
  exponential(ops(), x);
  for (size_t n = 0; n < x.size(); ++n) {
    const float truth = std::exp(given[n]);
    if (std::isnan(truth))
      EXPECT_TRUE(std::isnan(x[n])) << given[n];
    else
      EXPECT_EQ(x[n], truth) << given[n];
  }
}

template <class T>
constexpr Dtype kDtype = Dtype::kF32;
template <>
constexpr Dtype kDtype<Half> = Dtype::kF16;
template <>
constexpr Dtype kDtype<Bfloat16> = Dtype::kBf16;

// rows -> panel -> lanes -> rows changes no bit, and writes nothing beside its elements.
template <class T>
void expect_round_trip(const TileOps& ops, int count, int head_dim) {
  Random random(5);
  const int ld = (head_dim + kChannelPad - 1) / kChannelPad * kChannelPad;
  std::vector<std::vector<T>> in, out;
  std::vector<const void*> in_rows;
  std::vector<void*> out_rows;
  const T mark = from_float<T>(-77);
  for (int i = 0; i < count; ++i) {
    in.emplace_back(head_dim + 1, mark);  // exactly as long as it may be read, but for one
    out.emplace_back(head_dim + 1, mark);
    for (int c = 0; c < head_dim; ++c) in[i][c] = from_float<T>(random_float(random));
  }
  in[0][0] = from_float<T>(kInfinity);
  in[count - 1][head_dim - 1] = from_float<T>(1e-7f);  // subnormal in f16
  for (int i = 0; i < count; ++i) {
    in_rows.push_back(in[i].data());
    out_rows.push_back(out[i].data());
  }
  Panel panel(ld);
  Lanes lanes;
  std::fill(panel.x.begin(), panel.x.end(), kNaN);
  std::fill(lanes.data(), lanes.data() + kMaxDim * kLanes, kNaN);
  ops.load_rows(kDtype<T>, in_rows.data(), count, head_dim, panel.x.data(), ld);
  const int vectors = (count + ops.width - 1) / ops.width;
  ops.transpose(panel.x.data(), ld, count, head_dim, vectors, lanes.data());
  for (int i = 0; i < count; ++i)
    for (int c = 0; c < head_dim; ++c) {
      ASSERT_EQ(panel.at(i, c), to_float(in[i][c])) << i << ' ' << c;
      ASSERT_EQ(lanes.x[c][i], panel.at(i, c)) << i << ' ' << c;
    }
  for (int i = count; i < vectors * ops.width; ++i) ASSERT_EQ(lanes.x[head_dim - 1][i], 0.0f);
  ops.store_rows(kDtype<T>, lanes.data(), lanes_of(1), count, head_dim, out_rows.data());
  for (int i = 0; i < count; ++i)
    ASSERT_EQ(std::memcmp(in[i].data(), out[i].data(), in[i].size() * sizeof(T)), 0) << i;
}

TEST_P(CpuRows, RoundTrip) {
  for (const int count : {1, 3, 16, 17, 63, 64})
    for (const int head_dim : {1, 3, 8, 15, 16, 17, 40, 64, 130, 256}) {
      SCOPED_TRACE(testing::Message() << count << " rows of " << head_dim);
      expect_round_trip<float>(ops(), count, head_dim);
      expect_round_trip<Half>(ops(), count, head_dim);
      expect_round_trip<Bfloat16>(ops(), count, head_dim);
    }
}

template <class T>
void expect_every_conversion(const TileOps& ops) {
  for (uint32_t first = 0; first < 65536; first += kMaxDim) {
    T row[kMaxDim];
    for (uint32_t c = 0; c < kMaxDim; ++c) row[c].bits = static_cast<uint16_t>(first + c);
    const void* rows[] = {row};
    Panel panel(kMaxDim);
    ops.load_rows(kDtype<T>, rows, 1, kMaxDim, panel.x.data(), kMaxDim);
    Lanes lanes;
    for (int c = 0; c < kMaxDim; ++c) {
      const float want = to_float(row[c]), got = panel.at(0, c);
      if (std::isnan(want))
        ASSERT_TRUE(std::isnan(got)) << row[c].bits;
      else
        ASSERT_EQ(float_bits(got), float_bits(want)) << row[c].bits;
      // This value, the middle between it and the next one, and both neighbours of the middle.
      T next = row[c];
      ++next.bits;
      const float middle = want + (to_float(next) - want) / 2;
      lanes.x[c][0] = want;
      lanes.x[c][1] = middle;
      lanes.x[c][2] = std::nextafter(middle, -kInfinity);
      lanes.x[c][3] = std::nextafter(middle, kInfinity);
    }
    T out[4][kMaxDim];
    void* out_rows[] = {out[0], out[1], out[2], out[3]};
    ops.store_rows(kDtype<T>, lanes.data(), lanes_of(1), 4, kMaxDim, out_rows);
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < kMaxDim; ++c) {
        const float x = lanes.x[c][i];
        if (std::isnan(x))
          ASSERT_TRUE(std::isnan(to_float(out[i][c])));
        else
          ASSERT_EQ(out[i][c].bits, from_float<T>(x).bits) << x;
      }
  }
}

TEST_P(CpuRows, ConvertsAsTheScalarFunctions) {
  expect_every_conversion<Half>(ops());
  expect_every_conversion<Bfloat16>(ops());
}

TEST_P(CpuRows, FindsWhatIsNotFinite) {
  for (const int head_dim : {1, 16, 40, 256}) {
    const int ld = (head_dim + kChannelPad - 1) / kChannelPad * kChannelPad;
    for (const int steps : {1, 5, 64}) {
      Panel panel(ld);
      for (int s = 0; s < steps; ++s)
        for (int c = 0; c < head_dim; ++c) panel.at(s, c) = 3e38f;
      EXPECT_TRUE(ops().is_finite(panel.x.data(), ld, steps, head_dim));
      for (const float bad : {kNaN, kInfinity, -kInfinity})
        for (const auto& [s, c] : {std::pair{0, 0}, {steps - 1, head_dim - 1}}) {
          Panel other = panel;
          other.at(s, c) = bad;
          EXPECT_FALSE(ops().is_finite(other.x.data(), ld, steps, head_dim)) << s << ' ' << c;
        }
    }
  }
}

struct ProductData {
  Panel panel;
  Lanes lanes;
  ProductData(int ld, int head_dim) : panel(ld) {
    Random random(9);
    for (int s = 0; s < kSteps; ++s)
      for (int c = 0; c < head_dim; ++c) panel.at(s, c) = random_float(random);
    for (int c = 0; c < head_dim; ++c)
      for (int i = 0; i < kLanes; ++i) lanes.x[c][i] = random_float(random);
  }
};

TEST_P(CpuProducts, ScoresAreSumsOverChannels) {
  for (const int head_dim : {1, 7, 64, 256})
    for (const int lanes : {1, ops().width, ops().width + 1, kLanes})
      for (const int steps : {1, 13, 64}) {
        const auto data = std::make_unique<ProductData>(kMaxDim, head_dim);
        Scores scores;
        const int vectors = (lanes + ops().width - 1) / ops().width;
        ops().products(data->panel.x.data(), kMaxDim, steps, data->lanes.data(), head_dim, vectors,
                       0.5f, scores.data());
        for (int s = 0; s < steps; ++s)
          for (int i = 0; i < lanes; ++i) {
            double sum = 0;
            for (int c = 0; c < head_dim; ++c)
              sum += 0.5 * data->panel.at(s, c) * data->lanes.x[c][i];
            ASSERT_NEAR(scores.x[s][i], sum, 1e-4) << head_dim << ' ' << s << ' ' << i;
          }
      }
}

// Forward has queries as lanes, dK and dV have keys: P is rebuilt from equal bits.
TEST_P(CpuProducts, LanesAndStepsCanChangePlaces) {
  for (const int head_dim : {1, 40, 64, 256}) {
    const auto data = std::make_unique<ProductData>(kMaxDim, head_dim);
    const auto turned = std::make_unique<ProductData>(kMaxDim, head_dim);
    for (int n = 0; n < 64; ++n)
      for (int c = 0; c < head_dim; ++c) {
        turned->panel.at(n, c) = data->lanes.x[c][n];
        turned->lanes.x[c][n] = data->panel.at(n, c);
      }
    Scores a, b;
    ops().products(data->panel.x.data(), kMaxDim, kSteps, data->lanes.data(), head_dim,
                   kLanes / ops().width, 0.3f, a.data());
    // One vector at a time is the other shape of the kernel.
    for (int i = 0; i < kLanes; i += ops().width)
      ops().products(turned->panel.x.data(), kMaxDim, kSteps, turned->lanes.data() + i, head_dim, 1,
                     0.3f, b.data() + i);
    for (int s = 0; s < kSteps; ++s)
      for (int i = 0; i < kLanes; ++i) ASSERT_EQ(a.x[s][i], b.x[i][s]) << head_dim;
  }
}

TEST_P(CpuProducts, AccumulatesOverSteps) {
  for (const int head_dim : {1, 9, 64})
    for (const int lanes : {1, ops().width + 1, kLanes})
      for (const int steps : {1, 13, 64})
        for (const bool guarded : {false, true}) {
          const auto data = std::make_unique<ProductData>(kMaxDim, head_dim);
          Random random(11);
          Scores weights;
          for (auto& row : weights.x)
            for (float& w : row) w = random_float(random);
          Intervals intervals;
          for (int i = 0; i < kLanes; ++i) {
            intervals.begin[i] = i % 5;
            intervals.end[i] = steps - i % 7;
          }
          const Visible visible = intervals.visible();
          LaneValues factors;
          for (int i = 0; i < kLanes; ++i) factors.x[i] = 1.0f + 0.01f * static_cast<float>(i);
          if (guarded) data->panel.at(steps - 1, head_dim - 1) = kNaN;
          Lanes acc = data->lanes;
          ops().accumulate(weights.data(), steps, data->panel.x.data(), kMaxDim, head_dim,
                           (lanes + ops().width - 1) / ops().width, guarded ? &visible : nullptr,
                           factors, acc.data());
          for (int c = 0; c < head_dim; ++c)
            for (int i = 0; i < lanes; ++i) {
              double sum = static_cast<double>(data->lanes.x[c][i]) * factors.x[i];
              for (int s = 0; s < steps; ++s)
                if (!guarded || intervals.show(i, s))
                  sum += static_cast<double>(weights.x[s][i]) * data->panel.at(s, c);
              if (std::isnan(sum))
                ASSERT_TRUE(std::isnan(acc.x[c][i]));
              else
                ASSERT_NEAR(acc.x[c][i], sum, 2e-5) << head_dim << ' ' << i << ' ' << steps;
            }
        }
}

TEST_P(CpuProducts, DotOfLanes) {
  const auto data = std::make_unique<ProductData>(kMaxDim, 40);
  LaneValues sums;
  ops().dot(data->lanes.data(), data->lanes.data(), 40, kLanes / ops().width, &sums);
  for (int i = 0; i < kLanes; ++i) {
    double sum = 0;
    for (int c = 0; c < 40; ++c) sum += std::pow(data->lanes.x[c][i], 2);
    EXPECT_NEAR(sums.x[i], sum, 1e-4);
  }
}

// Tile after tile against the scalar softmax, with masks, -inf, huge scores and NaN.
TEST_P(CpuSoftmax, IsTheOnlineSoftmax) {
  Random random(13);
  LaneValues m = lanes_of(-kInfinity), l = lanes_of(0), factors;
  OnlineSoftmax want[kLanes];
  for (const int steps : {64, 1, 17, 64}) {
    Scores scores;
    for (auto& row : scores.x)
      for (int i = 0; i < kLanes; ++i) {
        const float spread = i < 16 ? 1.0f : i < 32 ? 1e10f : 30.0f;
        row[i] = spread * random_float(random);
        if (i % 8 == 3) row[i] = -kInfinity;
        if (i % 8 == 5 && random.below(3) == 0) row[i] = -kInfinity;
      }
    if (steps == 17) scores.x[3][60] = kNaN, scores.x[4][61] = kInfinity;
    Intervals intervals;
    for (int i = 0; i < kLanes; ++i) {
      intervals.begin[i] = i % 4;
      intervals.end[i] = i % 11 == 0 ? 0 : steps - i % 2;
    }
    const Visible visible = intervals.visible();
    const Visible* mask = steps == 64 ? nullptr : &visible;
    const Scores given = scores;
    const LaneValues m_before = m;
    ops().softmax(steps, kLanes / ops().width, mask, scores.data(), &m, &l, &factors);
    for (int i = 0; i < kLanes; ++i)
      for (int s = 0; s < steps; ++s) {
        const bool seen = mask == nullptr || intervals.show(i, s);
        float ignored;
        if (seen) want[i].update(given.x[s][i], &ignored);
        if (!seen) ASSERT_EQ(scores.x[s][i], 0.0f) << s << ' ' << i;
        if (seen && given.x[s][i] == -kInfinity) ASSERT_EQ(scores.x[s][i], 0.0f);
        if (i == 60 && std::isnan(given.x[s][i])) ASSERT_TRUE(std::isnan(scores.x[s][i]));
        if (i < 60 && seen && given.x[s][i] != -kInfinity) {
          ASSERT_NEAR(scores.x[s][i], std::exp(given.x[s][i] - m.x[i]), 1e-6);
        }
      }
    for (int i = 0; i < 60; ++i) {
      ASSERT_EQ(m.x[i], want[i].m) << i;
      ASSERT_NEAR(l.x[i], want[i].l, 1e-5 * want[i].l) << i;
      ASSERT_NEAR(factors.x[i], m_before.x[i] == m.x[i] ? 1 : std::exp(m_before.x[i] - m.x[i]),
                  1e-6);
    }
  }
  EXPECT_TRUE(std::isnan(l.x[60]) && std::isnan(l.x[61]));
  EXPECT_EQ(l.x[3], 0.0f);
}

TEST_P(CpuSoftmax, Gradients) {
  Random random(15);
  Scores scores, d_p;
  for (int s = 0; s < kSteps; ++s)
    for (int i = 0; i < kLanes; ++i) {
      scores.x[s][i] = random_float(random);
      d_p.x[s][i] = random_float(random);
    }
  scores.x[2][1] = d_p.x[3][2] = kNaN;  // not seen
  LaneValues lse, delta;
  StepValues step_lse, step_delta;
  Intervals intervals;
  for (int i = 0; i < kLanes; ++i) {
    lse.x[i] = step_lse.x[i] = random_float(random);
    delta.x[i] = step_delta.x[i] = random_float(random);
    intervals.begin[i] = 4 + i % 4;
    intervals.end[i] = 60 - i % 3;
  }
  const Visible visible = intervals.visible();
  for (const bool by_lane : {true, false}) {
    Scores p = scores, d_s = d_p;
    if (by_lane)
      ops().gradients_by_lane(kSteps, kLanes / ops().width, &visible, lse, delta, p.data(),
                              d_s.data());
    else
      ops().gradients_by_step(kSteps, kLanes / ops().width, &visible, step_lse, step_delta,
                              p.data(), d_s.data());
    for (int s = 0; s < kSteps; ++s)
      for (int i = 0; i < kLanes; ++i) {
        const bool seen = intervals.show(i, s);
        const int at = by_lane ? i : s;
        const double weight = seen ? std::exp(scores.x[s][i] - lse.x[at]) : 0;
        ASSERT_NEAR(p.x[s][i], weight, 1e-5) << s << ' ' << i;
        ASSERT_NEAR(d_s.x[s][i], seen ? weight * (d_p.x[s][i] - delta.x[at]) : 0, 1e-4);
      }
  }
}

}  // namespace
}  // namespace cuflash::cpu_blocked
