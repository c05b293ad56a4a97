// Elements of the dtypes in cuflash-bench.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "values.hpp"

namespace cuflash_bench {
namespace {

TEST(Values, EveryF16AndBf16IsItsOwnRounding) {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double value = decode(bits, dtype);
      EXPECT_EQ(is_special(bits, dtype), !std::isfinite(value));
      if (!std::isnan(value)) EXPECT_EQ(encode(value, dtype), bits);
    }
  }
}

TEST(Values, RoundToTheNearestAndThenToEven) {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16}) {
    const uint32_t largest = dtype == Dtype::kF16 ? 0x7bff : 0x7f7f;
    for (uint32_t bits = 0; bits < largest; ++bits) {
      const double low = decode(bits, dtype), high = decode(bits + 1, dtype);
      const double middle = (low + high) / 2;
      EXPECT_EQ(encode(middle, dtype), bits + bits % 2);
      EXPECT_EQ(encode(low + (high - low) / 4, dtype), bits);
      EXPECT_EQ(encode(-(high - (high - low) / 4), dtype), 0x8000 | (bits + 1));
    }
  }
  EXPECT_EQ(encode(65519.9, Dtype::kF16), 0x7bffU);
  EXPECT_EQ(encode(65520, Dtype::kF16), 0x7c00U);
  EXPECT_TRUE(
      is_special(encode(std::numeric_limits<double>::quiet_NaN(), Dtype::kF16), Dtype::kF16));
}

TEST(Values, AreNormal) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    const NormalValues values(dtype, 1), others(dtype, 2);
    double sum = 0, squares = 0, products = 0;
    constexpr int64_t kCount = 100000;
    for (int64_t i = 0; i < kCount; ++i) {
      sum += values.at(i);
      squares += values.at(i) * values.at(i);
      products += values.at(i) * others.at(i);
    }
    EXPECT_NEAR(sum / kCount, 0, 0.02);
    EXPECT_NEAR(squares / kCount, 1, 0.02);
    EXPECT_NEAR(products / kCount, 0, 0.02);
    EXPECT_EQ(values.range(1000000, 10)[5], values.at(1000005));
    EXPECT_EQ(values.at(1000005), values.at(2));
  }
}

}  // namespace
}  // namespace cuflash_bench
