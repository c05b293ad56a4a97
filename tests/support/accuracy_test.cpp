// The accuracy rule must refuse what is wrong, however little of it there is.
#include "support/accuracy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/data.hpp"

namespace cuflash_test {
namespace {

struct Sample {
  Tensor reference, plain, good;
  explicit Sample(Dtype dtype, int64_t rows = 200) : reference(2, 2, rows, 16) {
    Random random(5);
    for (double& value : reference.x) value = random.normal();
    plain = good = reference;
    round_values(plain, dtype);
    for (double& value : good.x) value = round_to(dtype, value * (1 + 2e-8));
  }
};

class AccuracyRule : public testing::TestWithParam<Dtype> {};

TEST_P(AccuracyRule, TakesAnotherRounding) {
  const Sample s(GetParam());
  const Accuracy accuracy = check_tensor("o", s.good, s.reference, {&s.plain}, GetParam());
  EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst;
  EXPECT_GT(accuracy.worst, 0);
}

TEST_P(AccuracyRule, RefusesOneWrongElement) {
  Sample s(GetParam());
  double& value = s.good.at(1, 1, 199, 15);
  value += 4 * ulp(GetParam(), 4);
  const Accuracy accuracy = check_tensor("o", s.good, s.reference, {&s.plain}, GetParam());
  EXPECT_FALSE(accuracy.ok);
  EXPECT_EQ(accuracy.where, "o[b1 h1 rows 192..199] max");
}

TEST_P(AccuracyRule, SmallBlocksDoNotHideBehindLargeOnes) {
  Sample s(GetParam());
  for (Tensor* t : {&s.reference, &s.plain, &s.good})
    t->for_each([](int64_t, int64_t, int64_t r, int64_t, double& value) {
      if (r >= 64) value /= 1024;
    });
  s.good.at(0, 0, 70, 0) += 8 * ulp(GetParam(), 4.0 / 1024);
  EXPECT_FALSE(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok);
}

TEST_P(AccuracyRule, TakesWhatUnderflowMakesOfTinyResultsAlone) {
  for (const double size : {0x1p-115, 0x1p-90}) {
    Sample s(GetParam());
    for (Tensor* t : {&s.reference, &s.plain, &s.good})
      for (double& value : t->x) value *= size;
    s.plain = s.reference;
    for (double& value : s.good.x) value *= 1.25;
    const bool only_half_formats_below = GetParam() == Dtype::kF16;  // 2^-24 is its smallest number
    EXPECT_EQ(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok,
              size < 0x1p-104 || only_half_formats_below);
  }
}

TEST_P(AccuracyRule, RefusesASmallErrorEverywhere) {
  Sample s(GetParam());
  double sum = 0;
  for (size_t n = 0; n < s.reference.x.size(); ++n)
    sum += std::pow(s.plain.x[n] - s.reference.x[n], 2);
  const double rms = std::sqrt(sum / static_cast<double>(s.reference.x.size()));
  const double error = 1.5 * rms + ulp(GetParam(), 4) / 2;
  for (size_t n = 0; n < s.good.x.size(); ++n) s.good.x[n] = s.reference.x[n] + error;
  EXPECT_FALSE(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok);
}

TEST_P(AccuracyRule, NaNNeverPassesAndInfinitiesMatch) {
  const double kInfinity = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), kInfinity, -kInfinity}) {
    Sample s(GetParam());
    s.good.x[3] = bad;
    EXPECT_FALSE(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok);
    EXPECT_FALSE(check_lse(s.good, s.reference, {&s.plain}, GetParam()).ok);
    s.plain.x[3] = bad;  // the plain algorithm's failure excuses nothing
    EXPECT_FALSE(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok);
  }
  Sample s(GetParam());
  s.reference.x[0] = s.good.x[0] = s.plain.x[0] = -kInfinity;
  EXPECT_TRUE(check_lse(s.good, s.reference, {&s.plain}, GetParam()).ok);
  s.good.x[0] = kInfinity;
  EXPECT_FALSE(check_lse(s.good, s.reference, {&s.plain}, GetParam()).ok);
  s.good.x[0] = -1e30;
  EXPECT_FALSE(check_lse(s.good, s.reference, {&s.plain}, GetParam()).ok);
}

TEST_P(AccuracyRule, ExactZerosAllowTheSmallestSubnormalOnly) {
  const Tensor zero(1, 1, 4, 4);
  Tensor got = zero;
  EXPECT_TRUE(check_tensor("dq", got, zero, {&zero}, GetParam()).ok);
  got.x[5] = ulp(GetParam(), 0) * 2;
  EXPECT_FALSE(check_tensor("dq", got, zero, {&zero}, GetParam()).ok);
}

TEST_P(AccuracyRule, LogSumExp) {
  const Sample s(GetParam());
  const double allowed = GetParam() == Dtype::kF32 ? 1e-6 : 1e-5;
  Tensor got = s.reference;
  got.x[7] += 0.9 * allowed;
  EXPECT_TRUE(check_lse(got, s.reference, {&s.reference}, GetParam()).ok);
  got.x[7] = s.reference.x[7] / std::log(2.0);  // base 2
  EXPECT_FALSE(check_lse(got, s.reference, {&s.reference}, GetParam()).ok);
}

TEST_P(AccuracyRule, TheLargestSampleCounts) {
  Sample s(GetParam());
  Tensor other = s.plain;
  s.good.at(0, 1, 3, 4) += 8 * ulp(GetParam(), 4);
  other.at(0, 1, 9, 1) += 8 * ulp(GetParam(), 4);
  EXPECT_FALSE(check_tensor("o", s.good, s.reference, {&s.plain}, GetParam()).ok);
  EXPECT_TRUE(check_tensor("o", s.good, s.reference, {&s.plain, &other}, GetParam()).ok);
}

// A row of few numbers, right to the last bit but one: the first sample alone may call it wrong.
TEST_P(AccuracyRule, JudgeTakesOtherSamplesOfThePlainAlgorithm) {
  Problem problem;
  problem.dtype = GetParam();
  problem.shape = {1, 1, 1, 1, 100, 4};
  Inputs inputs{Tensor(1, 1, 1, 4), Tensor(1, 1, 100, 4), Tensor(1, 1, 100, 4), {}, {}, {}};
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    fill(inputs.q, DataKind::kNormal, 1, seed, 0, GetParam());
    fill(inputs.k, DataKind::kNormal, 2, seed, 0, GetParam());
    fill(inputs.v, DataKind::kNormal, 3, seed, 0, GetParam());
    const Accuracy accuracy = judge(problem, inputs, plain(problem, inputs, 12345 + seed));
    EXPECT_TRUE(accuracy.ok) << seed << ' ' << accuracy.where << ' ' << accuracy.worst;
    Results wrong = oracle(problem, inputs);
    wrong.o.x[0] += GetParam() == Dtype::kF32 ? 1e-3 : 0.1;
    EXPECT_FALSE(judge(problem, inputs, wrong).ok) << seed;
  }
}

// A block of one key with a weight of e^-10 / 64, so that dS is below the normal numbers of f16: its last bit is some per cent of
// it, and how twelve such errors add up is one number.
TEST(AccuracyRuleOfF16, GradientsBelowTheNormalNumbersHaveSamplesToo) {
  Problem problem;
  problem.operation = Operation::kBackward;
  problem.dtype = Dtype::kF16;
  constexpr int64_t kKeys = kBlockRows + 1;
  problem.shape = {1, 1, 1, 12, kKeys, 8};
  problem.scale_set = true;
  problem.scale = 1;
  Inputs inputs{Tensor(1, 1, 12, 8), Tensor(1, 1, kKeys, 8), Tensor(1, 1, kKeys, 8), {}, {}, {}};
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    inputs.q = Tensor::from(1, 1, 12, 8, [](auto, auto, auto, auto ch) { return ch == 0 ? 4 : 1; });
    inputs.k = Tensor::from(1, 1, kKeys, 8, [](auto, auto, auto j, auto ch) {
      return j == kKeys - 1 && ch == 0 ? -2.5 : 0;
    });
    fill(inputs.v, DataKind::kNormal, 3, seed, 0, problem.dtype);
    inputs.d_o = Tensor(1, 1, 12, 8);
    fill(inputs.d_o, DataKind::kNormal, 4, seed, 0, problem.dtype);
    const Results exact = oracle(problem, inputs);
    inputs.o = exact.o;
    for (double& x : inputs.o.x) x = round_to(problem.dtype, x);
    inputs.lse = exact.lse;
    const Accuracy accuracy =
        judge(problem, inputs, plain_with_underflow(problem, inputs, 12345 + seed));
    EXPECT_TRUE(accuracy.ok) << seed << ' ' << accuracy.where << ' ' << accuracy.worst;
    Results wrong = exact;
    for (int64_t ch = 0; ch < 8; ++ch) wrong.dk.at(0, 0, kKeys - 1, ch) = 0;
    EXPECT_FALSE(judge(problem, inputs, wrong).ok) << seed;
  }
}

// One key is seen, so dS = dO V - delta is the difference of two sums of the same terms. In the order of memory these go far
// up and then down, in almost all others they stay near 0.
TEST(AccuracyRuleOfF32, TheOrderOfMemoryHasSamplesToo) {
  Problem problem;
  problem.operation = Operation::kBackward;
  constexpr int64_t kDim = 256;
  problem.shape = {1, 1, 1, 1, 1, kDim};
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Inputs inputs{Tensor(1, 1, 1, kDim), Tensor(1, 1, 1, kDim), Tensor(1, 1, 1, kDim), {}, {}, {}};
    fill(inputs.k, DataKind::kNormal, 2, seed, 0, problem.dtype);
    inputs.d_o = Tensor(1, 1, 1, kDim);
    fill(inputs.d_o, DataKind::kNormal, 4, seed, 0, problem.dtype);
    float in_order = 0;
    double exact = 0;
    for (int64_t ch = 0; ch < kDim; ++ch) {
      double& d_o = inputs.d_o.at(0, 0, 0, ch);
      d_o = (ch < kDim / 2 ? 1 : -1) * std::abs(d_o);
      inputs.v.at(0, 0, 0, ch) = 1;
      in_order += static_cast<float>(d_o);
      exact += d_o;
    }
    inputs.o = inputs.v;
    Results got = oracle(problem, inputs);
    inputs.lse = got.lse;
    const double d_s = in_order - static_cast<float>(exact);
    for (int64_t ch = 0; ch < kDim; ++ch)
      got.dq.at(0, 0, 0, ch) = d_s * inputs.k.at(0, 0, 0, ch) / std::sqrt(kDim);
    const Accuracy accuracy = judge(problem, inputs, got);
    EXPECT_TRUE(accuracy.ok) << seed << ' ' << accuracy.where << ' ' << accuracy.worst;
    got.dq.at(0, 0, 0, 3) += 1e-3;
    EXPECT_FALSE(judge(problem, inputs, got).ok) << seed;
  }
}

TEST_P(AccuracyRule, RefusesAMissingTensor) {
  const Sample s(GetParam());
  EXPECT_FALSE(check_tensor("o", Tensor(), s.reference, {&s.plain}, GetParam()).ok);
}

INSTANTIATE_TEST_SUITE_P(, AccuracyRule, testing::ValuesIn(kAllDtypes),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace cuflash_test
