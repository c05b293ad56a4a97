// The oracle and the plain algorithm against values worked out by hand.
#include "support/oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "support/data.hpp"

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// q = 0 and v[j] = j: O is the mean of the visible keys' numbers, LSE the logarithm of their count.
struct Uniform {
  Problem problem;
  Inputs inputs;
  Uniform(int64_t len_q, int64_t len_k, const MaskSpec& mask) {
    problem.shape = {1, 1, 1, len_q, len_k, 2};
    problem.mask = mask;
    inputs.q = Tensor(1, 1, len_q, 2);
    inputs.k = Tensor(1, 1, len_k, 2);
    inputs.v = Tensor::from(1, 1, len_k, 2, [](auto, auto, auto j, auto) { return j; });
  }
  void expect(const std::vector<std::vector<int>>& visible) const {
    for (const Results& r : {oracle(problem, inputs), plain(problem, inputs)})
      for (size_t i = 0; i < visible.size(); ++i) {
        double sum = 0;
        for (const int j : visible[i]) sum += j;
        const double count = static_cast<double>(visible[i].size());
        EXPECT_NEAR(r.o.at(0, 0, i, 1), count ? sum / count : 0, 1e-6) << "row " << i;
        if (count == 0)
          EXPECT_EQ(r.lse.at(0, 0, i), -kInfinity) << "row " << i;
        else
          EXPECT_NEAR(r.lse.at(0, 0, i), std::log(count), 1e-6) << "row " << i;
      }
  }
};

TEST(Oracle, MaskByHand) {
  Uniform(2, 5, causal_mask()).expect({{0, 1, 2, 3}, {0, 1, 2, 3, 4}});
  Uniform(2, 5, causal_mask(CUFLASH_ALIGN_TOP_LEFT)).expect({{0}, {0, 1}});
  Uniform(3, 2, causal_mask()).expect({{}, {0}, {0, 1}});
  MaskSpec offset = causal_mask(CUFLASH_ALIGN_OFFSET);
  offset.offset = -1;
  Uniform(3, 3, offset).expect({{}, {0}, {0, 1}});
  MaskSpec offsets = causal_mask(CUFLASH_ALIGN_DEVICE_OFFSETS);
  offsets.offsets = {2};
  Uniform(2, 4, offsets).expect({{0, 1, 2}, {0, 1, 2, 3}});
  Uniform(4, 4, window_mask(1, 0)).expect({{0}, {0, 1}, {1, 2}, {2, 3}});
  Uniform(3, 4, window_mask(0, 1)).expect({{1, 2}, {2, 3}, {3}});
  Uniform(3, 3, window_mask(-1, 1)).expect({{0, 1}, {0, 1, 2}, {0, 1, 2}});
  MaskSpec both = window_mask(1, 2);
  both.causal = true;
  Uniform(3, 3, both).expect({{0}, {0, 1}, {1, 2}});
}

TEST(Oracle, LengthsCutKeysAndMoveTheCentre) {
  Uniform u(1, 6, causal_mask());
  u.problem.operation = Operation::kDecode;
  u.problem.lengths = {3};
  u.expect({{0, 1, 2}});
  u.problem.lengths = {-4};
  u.expect({{}});
  u.problem.lengths = {100};
  u.expect({{0, 1, 2, 3, 4, 5}});
}

TEST(Oracle, HeadsOfAGroupShareKeys) {
  Problem problem;
  problem.shape = {1, 6, 2, 1, 3, 4};
  Inputs inputs;
  inputs.q = Tensor(1, 6, 1, 4);
  inputs.k = Tensor(1, 2, 3, 4);
  inputs.v = Tensor::from(1, 2, 3, 4, [](auto, auto h, auto, auto) { return 10.0 + h; });
  const Results r = oracle(problem, inputs);
  for (int h = 0; h < 6; ++h) EXPECT_EQ(r.o.at(0, h, 0, 3), h < 3 ? 10 : 11);
}

// The gradients of L = sum dO * O by central differences.
TEST(Oracle, GradientsAreThoseOfFiniteDifferences) {
  Problem problem;
  problem.operation = Operation::kBackward;
  problem.shape = {2, 4, 2, 5, 7, 3};
  problem.mask = window_mask(3, 1);
  const Shape& s = problem.shape;
  Inputs inputs;
  inputs.q = Tensor(s.batch, s.heads_q, s.len_q, s.head_dim);
  inputs.k = Tensor(s.batch, s.heads_kv, s.len_k, s.head_dim);
  inputs.v = inputs.k;
  inputs.d_o = inputs.q;
  Tensor* all[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.d_o};
  for (uint32_t t = 1; t <= 4; ++t) fill_hash(*all[t - 1], t, 4, Dtype::kF32);
  const auto loss = [&] {
    const Results r = oracle(problem, inputs);
    double sum = 0;
    for (size_t n = 0; n < r.o.x.size(); ++n) sum += r.o.x[n] * inputs.d_o.x[n];
    return sum;
  };
  const Results r = oracle(problem, inputs);
  const Tensor* gradients[] = {&r.dq, &r.dk, &r.dv};
  for (int t = 0; t < 3; ++t)
    for (size_t n = 0; n < all[t]->x.size(); n += 5) {
      double& x = all[t]->x[n];
      const double kept = x, step = 1e-5;
      x = kept + step;
      const double above = loss();
      x = kept - step;
      const double below = loss();
      x = kept;
      EXPECT_NEAR(gradients[t]->x[n], (above - below) / (2 * step), 1e-7) << t << " " << n;
    }
}

TEST(Oracle, PlainIsNearAndRounded) {
  for (const Dtype dtype : kAllDtypes) {
    Problem problem;
    problem.operation = Operation::kBackward;
    problem.dtype = dtype;
    problem.shape = {1, 2, 1, 33, 65, 16};
    problem.mask = causal_mask();
    Inputs inputs;
    inputs.q = Tensor(1, 2, 33, 16);
    inputs.k = Tensor(1, 1, 65, 16);
    inputs.v = inputs.k;
    inputs.d_o = inputs.q;
    Tensor* all[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.d_o};
    for (uint32_t t = 1; t <= 4; ++t) fill(*all[t - 1], DataKind::kNormal, t, 7, 0, dtype);
    const Results exact = oracle(problem, inputs), same = plain(problem, inputs);
    const Tensor Results::*members[] = {&Results::o, &Results::dq, &Results::dk, &Results::dv};
    for (const auto member : members)
      for (size_t n = 0; n < (exact.*member).x.size(); ++n) {
        const double value = (same.*member).x[n];
        EXPECT_EQ(value, round_to(dtype, value));
        EXPECT_NEAR(value, (exact.*member).x[n], 32 * ulp(dtype, 1));
      }
  }
}

TEST(Oracle, Merge) {
  Results a{Tensor(1, 1, 3, 1), Tensor(1, 1, 3, 1), {}, {}, {}}, b = a;
  a.lse.x = {-kInfinity, -kInfinity, std::log(3.0)};
  b.lse.x = {-kInfinity, 0.5, std::log(1.0)};
  a.o.x = {std::nan(""), std::nan(""), 4};
  b.o.x = {0, 1, 8};
  const Results m = merge_oracle({a, b}, false);
  EXPECT_EQ(m.o.x[0], 0);
  EXPECT_EQ(m.lse.x[0], -kInfinity);
  EXPECT_EQ(m.o.x[1], 1);
  EXPECT_EQ(m.lse.x[1], 0.5);
  EXPECT_DOUBLE_EQ(m.o.x[2], 5);
  EXPECT_DOUBLE_EQ(m.lse.x[2], std::log(4.0));
}

// One head of dimension 1 whose products are those of `scores`.
struct OneRow {
  Problem problem;
  Inputs inputs;
  explicit OneRow(const std::vector<double>& scores) {
    const auto keys = static_cast<int64_t>(scores.size());
    problem.shape = {1, 1, 1, 1, keys, 1};
    problem.scale_set = true;
    problem.scale = 1;
    inputs.q = Tensor(1, 1, 1, 1, 1);
    inputs.k = Tensor::from(
        1, 1, keys, 1, [&](auto, auto, auto j, auto) { return scores[static_cast<size_t>(j)]; });
    inputs.v = Tensor::from(1, 1, keys, 1, [](auto, auto, auto j, auto) { return j; });
  }
  void expect(double o, double lse) const {
    for (const Results& r :
         {oracle(problem, inputs), plain(problem, inputs), plain(problem, inputs, 3)}) {
      EXPECT_NEAR(r.o.at(0, 0, 0), o, 1e-5);
      if (std::isinf(lse))
        EXPECT_EQ(r.lse.at(0, 0, 0), lse);
      else
        EXPECT_NEAR(r.lse.at(0, 0, 0), lse, 1e-5);
    }
  }
};

TEST(Oracle, ModifiersByHand) {
  OneRow capped({5000, 10000, -10000});
  capped.problem.softcap = 50;
  capped.expect(0.5, 50 + std::log(2.0));

  OneRow sloped({0, 0, 0, 0});
  sloped.problem.slopes = SlopesSpec{};
  sloped.inputs.slopes = Tensor(1, 1, 1, 1, 1);
  sloped.expect(2.4926527, 0.4401897);

  OneRow biased({0, 0, 0});
  biased.problem.bias = BiasSpec{};
  biased.inputs.bias = Tensor::from(1, 1, 1, 3, [](auto, auto, auto, auto j) {
    return j == 0 ? -kInfinity : std::log(static_cast<double>(j));
  });
  biased.expect(5.0 / 3, std::log(3.0));
  biased.inputs.bias = Tensor(1, 1, 1, 3, -kInfinity);
  biased.expect(0, -kInfinity);

  OneRow sunk({0, 0, 0});
  sunk.problem.sinks = Dtype::kF32;
  sunk.inputs.sinks = Tensor(1, 1, 1, 1, std::log(3.0));
  sunk.expect(0.5, std::log(6.0));
  sunk.problem.lengths = {0};
  sunk.expect(0, std::log(3.0));
}

TEST(Oracle, LeftPaddingAndLengthsOfQueries) {
  Uniform u(3, 5, causal_mask());
  u.problem.lengths = {4};
  u.problem.left_pad = {1};
  u.problem.lengths_q = {2};
  u.expect({{0, 1}, {0, 1, 2}});
}

TEST(Oracle, DropoutByHand) {
  OneRow row({0, 0, 0, 0});
  row.problem.dropout = {0.5f, 0, 0};
  // Of the first known answer of Philox, 6627e8d5 and below 2^31 drops.
  row.expect((1 + 2 + 3) * 2 / 4.0, std::log(4.0));
}

// Finite differences of sum(dO O) + sum(dLSE LSE) by the bias and the sinks.
TEST(Oracle, GradientsOfBiasAndSinks) {
  Problem p;
  p.operation = Operation::kBackward;
  p.shape = {1, 2, 1, 3, 4, 5};
  p.bias = BiasSpec{};
  p.sinks = Dtype::kF32;
  p.softcap = 2;
  p.dropout = {0.3f, 1, 2};
  p.d_lse = true;
  Inputs in;
  const auto make = [](int64_t heads, int64_t rows, int64_t dim, uint32_t t) {
    Tensor tensor(1, heads, rows, dim);
    fill(tensor, DataKind::kNormal, t, 1, -1, Dtype::kF32);
    return tensor;
  };
  in.q = make(2, 3, 5, 1), in.k = make(1, 4, 5, 2), in.v = make(1, 4, 5, 3);
  in.d_o = make(2, 3, 5, 4), in.bias = make(2, 3, 4, 5), in.sinks = make(2, 1, 1, 6);
  in.d_lse = make(2, 3, 1, 7);
  const Results exact = oracle(p, in);
  const auto loss = [&] {
    const Results r = oracle(p, in);
    double sum = 0;
    for (size_t n = 0; n < r.o.x.size(); ++n) sum += r.o.x[n] * in.d_o.x[n];
    for (size_t n = 0; n < r.lse.x.size(); ++n) sum += r.lse.x[n] * in.d_lse.x[n];
    return sum;
  };
  const std::pair<Tensor*, const Tensor*> pairs[] = {{&in.bias, &exact.d_bias},
                                                     {&in.sinks, &exact.d_sinks},
                                                     {&in.q, &exact.dq},
                                                     {&in.k, &exact.dk},
                                                     {&in.v, &exact.dv}};
  for (const auto& [input, gradient] : pairs)
    for (size_t n = 0; n < input->x.size(); ++n) {
      constexpr double kStep = 1e-5;
      const double before = input->x[n];
      input->x[n] = before + kStep;
      const double above = loss();
      input->x[n] = before - kStep;
      const double below = loss();
      input->x[n] = before;
      EXPECT_NEAR(gradient->x[n], (above - below) / (2 * kStep), 1e-7);
    }
}

}  // namespace
}  // namespace cuflash_test
