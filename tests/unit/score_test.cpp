// The score of one pair, by hand and against finite differences.
#include "attention/score.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace cuflash {
namespace {

constexpr ScoreRow kRow = {1, 2, 3, 10};

TEST(Score, ScaledProduct) {
  const Score s = score_of({}, 0.5f, 3, kRow, 4);
  EXPECT_EQ(s.value, 1.5f);
  EXPECT_EQ(s.derivative, 1);
}

TEST(Score, Softcap) {
  ScoreModifiers m;
  m.softcap = 5;
  for (const float product : {-1e30f, -40.0f, -1.0f, 0.0f, 0.1f, 7.0f, 1e30f}) {
    const Score s = score_of(m, 0.5f, product, kRow, 4);
    const double x = product * 0.5 / 5;
    EXPECT_NEAR(s.value, 5 * std::tanh(x), 1e-6);
    EXPECT_NEAR(s.derivative, 1 - std::tanh(x) * std::tanh(x), 1e-6);
  }
}

TEST(Score, BiasBySteps) {
  float values[2000];
  for (int n = 0; n < 2000; ++n) values[n] = static_cast<float>(n);
  ScoreModifiers m;
  m.bias = {values, 1000, 100, 10, Dtype::kF32};
  EXPECT_EQ(score_of(m, 1, 0.5f, kRow, 4).value, 1234.5f);
  m.bias.head_stride = 0;
  EXPECT_EQ(score_of(m, 1, 0.5f, kRow, 4).value, 1034.5f);
  uint16_t halves[] = {0x3c00, 0x4000, 0xfc00};  // 1, 2, -infinity in f16
  m.bias = {halves, 0, 0, 0, Dtype::kF16};
  EXPECT_EQ(score_of(m, 1, 0.5f, kRow, 1).value, 2.5f);
  EXPECT_EQ(score_of(m, 1, 0.5f, kRow, 2).value, -INFINITY);
}

TEST(Score, SlopesByDistance) {
  float slopes[] = {0, 1, 2, 3, 4, 5, 6, 7};
  ScoreModifiers m;
  m.slopes = {slopes, Dtype::kF32};
  EXPECT_EQ(score_of(m, 1, 0, kRow, 7).value, -6);  // slope 2, distance 3 on either side
  EXPECT_EQ(score_of(m, 1, 0, kRow, 13).value, -6);
  EXPECT_EQ(score_of(m, 1, 0, kRow, 10).value, 0);
  m.slopes_batch_stride = 4;
  EXPECT_EQ(score_of(m, 1, 0, kRow, 7).value, -18);
}

TEST(Score, TheCapComesFirst) {
  float values[] = {100};
  ScoreModifiers m;
  m.softcap = 1;
  m.bias = {values, 0, 0, 0, Dtype::kF32};
  EXPECT_NEAR(score_of(m, 1, 50, kRow, 0).value, 101, 1e-5);
}

}  // namespace
}  // namespace cuflash
