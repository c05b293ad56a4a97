// The running softmax against the two-pass one in long double.
#include "attention/online_softmax.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/data.hpp"

namespace cuflash {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Reference {
  long double o = 0, lse = -std::numeric_limits<long double>::infinity();
};
Reference two_pass(const std::vector<float>& scores, const std::vector<float>& values) {
  long double m = -std::numeric_limits<long double>::infinity(), l = 0;
  for (const float s : scores) m = std::max<long double>(m, s);
  Reference r;
  if (std::isinf(m)) return r;
  for (size_t n = 0; n < scores.size(); ++n) {
    const long double weight = std::exp(scores[n] - m);
    l += weight;
    r.o += weight * values[n];
  }
  r.o /= l;
  r.lse = m + std::log(l);
  return r;
}

struct Online {
  OnlineSoftmax softmax;
  float acc = 0;
  void add(float score, float value) {
    float weight;
    const float rescale = softmax.update(score, &weight);
    acc = acc * rescale + weight * value;
  }
  float o() const { return acc * softmax.inverse_sum(); }
};

void expect_equal(const std::vector<float>& scores, const std::vector<float>& values) {
  Online online;
  for (size_t n = 0; n < scores.size(); ++n) online.add(scores[n], values[n]);
  const Reference r = two_pass(scores, values);
  EXPECT_NEAR(online.o(), static_cast<double>(r.o), 2e-6);
  if (std::isinf(r.lse))
    EXPECT_EQ(online.softmax.lse(), -kInfinity);
  else
    EXPECT_NEAR(online.softmax.lse(), static_cast<double>(r.lse),
                1e-6 * std::max<double>(1, std::fabs(static_cast<double>(r.lse))));
}

TEST(OnlineSoftmax, RandomScoresInEveryOrder) {
  cuflash_test::Random random(3);
  for (const double spread : {0.0, 1.0, 30.0, 1e4, 1e9})
    for (const double shift : {0.0, -120.0, 120.0, -1e5, 1e5}) {
      std::vector<float> scores, values;
      for (int n = 0; n < 100; ++n) {
        scores.push_back(static_cast<float>(shift + spread * random.normal()));
        values.push_back(static_cast<float>(random.uniform()));
      }
      expect_equal(scores, values);
      std::sort(scores.begin(), scores.end());
      expect_equal(scores, values);
      std::reverse(scores.begin(), scores.end());
      expect_equal(scores, values);
    }
}

TEST(OnlineSoftmax, EmptyAndMasked) {
  OnlineSoftmax empty;
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(empty.lse(), -kInfinity);
  EXPECT_EQ(empty.inverse_sum(), 0);
  expect_equal({-kInfinity}, {5});
  expect_equal({-kInfinity, -kInfinity, 2, -kInfinity}, {5, 6, 7, 8});
  expect_equal({2, -kInfinity, -3e38f}, {1, 100, 3});
}

TEST(OnlineSoftmax, EqualScoresOfAnySize) {
  for (const float score : {0.0f, -1e-30f, -46340.95f, 1.41767475e11f, -3e38f, 3e38f})
    for (const int count : {1, 2, 100}) {
      Online online;
      for (int n = 0; n < count; ++n) online.add(score, 1);
      EXPECT_EQ(online.o(), 1);
      EXPECT_FLOAT_EQ(online.softmax.lse(), score + std::log(static_cast<float>(count)));
    }
}

TEST(OnlineSoftmax, BadScoresShow) {
  for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    Online online;
    online.add(1, 1);
    online.add(bad, 1);
    online.add(2, 1);
    EXPECT_FALSE(std::isfinite(online.o()) && std::isfinite(online.softmax.lse()));
  }
}

}  // namespace
}  // namespace cuflash
