// The formats of quantised caches against those of the tests: every code, and every boundary between two of them.
#include "common/quantised.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/data.hpp"
#include "support/stored.hpp"

namespace cuflash {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr StoredDtype kNarrow[] = {StoredDtype::kE4m3, StoredDtype::kE5m2, StoredDtype::kInt8,
                                   StoredDtype::kInt4};

double value_of(StoredDtype dtype, int code) {
  return cuflash_test::value_of_code(static_cast<int32_t>(dtype), static_cast<uint32_t>(code));
}

int codes(StoredDtype dtype) { return dtype == StoredDtype::kInt4 ? 16 : 256; }

struct Number {
  double value;
  int code;
};

// All finite numbers in rising order; of the two zeros the positive one.
std::vector<Number> numbers_of(StoredDtype dtype) {
  std::vector<Number> list;
  for (int code = 0; code < codes(dtype); ++code) {
    const double value = value_of(dtype, code);
    if (std::isfinite(value) && !(value == 0 && code != 0)) list.push_back({value, code});
  }
  std::sort(list.begin(), list.end(),
            [](const Number& a, const Number& b) { return a.value < b.value; });
  return list;
}

uint32_t code_of(StoredDtype dtype, float x) { return quantise(dtype, x, {}); }
float float_of(StoredDtype dtype, uint32_t code) { return dequantise(dtype, code, {}); }

TEST(Quantised, KnownValues) {
  EXPECT_EQ(float_of(StoredDtype::kE4m3, 0x7e), 448);
  EXPECT_EQ(float_of(StoredDtype::kE4m3, 0x81), -0x1p-9f);
  EXPECT_EQ(float_of(StoredDtype::kE5m2, 0xfb), -57344);
  EXPECT_EQ(float_of(StoredDtype::kE5m2, 0x01), 0x1p-16f);
  EXPECT_EQ(float_of(StoredDtype::kInt8, 0x80), -128);
  EXPECT_EQ(float_of(StoredDtype::kInt4, 0x8), -8);
}

TEST(Quantised, EveryCodeToFloatAndBack) {
  for (const StoredDtype dtype : kNarrow)
    for (int code = 0; code < codes(dtype); ++code) {
      const double expected = value_of(dtype, code);
      const float got = float_of(dtype, static_cast<uint32_t>(code));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got)) << code;
        ASSERT_TRUE(std::isnan(float_of(dtype, code_of(dtype, got)))) << code;
        continue;
      }
      ASSERT_EQ(got, expected) << code;
      if (std::isinf(expected)) continue;  // saturates: below
      const bool float_format = !is_integer(dtype);
      ASSERT_EQ(std::signbit(got), float_format ? code >= 128 : expected < 0) << code;
      ASSERT_EQ(code_of(dtype, got), static_cast<uint32_t>(code));
    }
}

TEST(Quantised, EveryBoundaryRoundsToTheEvenCode) {
  for (const StoredDtype dtype : kNarrow) {
    const std::vector<Number> numbers = numbers_of(dtype);
    ASSERT_EQ(numbers.size(), dtype == StoredDtype::kE4m3   ? 253u
                              : dtype == StoredDtype::kE5m2 ? 247u
                                                            : static_cast<size_t>(codes(dtype)));
    for (size_t n = 0; n + 1 < numbers.size(); ++n) {
      const Number &below = numbers[n], &above = numbers[n + 1];
      const float middle = static_cast<float>((below.value + above.value) / 2);
      ASSERT_EQ(middle, (below.value + above.value) / 2);
      const auto nearest = [&](float x) {
        return value_of(dtype, static_cast<int>(code_of(dtype, x)));
      };
      const Number& even = below.code % 2 == 0 ? below : above;
      ASSERT_EQ(nearest(middle), even.value) << middle;
      ASSERT_EQ(nearest(std::nextafterf(middle, -1e30f)), below.value) << middle;
      ASSERT_EQ(nearest(std::nextafterf(middle, 1e30f)), above.value) << middle;
    }
  }
}

TEST(Quantised, Saturates) {
  for (const StoredDtype dtype : kNarrow) {
    const std::vector<Number> numbers = numbers_of(dtype);
    for (const double factor : {1.0001, 1.06, 2.0, 1e30, kInfinity}) {
      const double least = numbers.front().value, most = numbers.back().value;
      EXPECT_EQ(float_of(dtype, code_of(dtype, static_cast<float>(least * factor))), least);
      EXPECT_EQ(float_of(dtype, code_of(dtype, static_cast<float>(most * factor))), most);
    }
  }
}

TEST(Quantised, RandomNumbers) {
  cuflash_test::Random random(12);
  for (const StoredDtype dtype : kNarrow)
    for (int n = 0; n < 200000; ++n) {
      const int exponent = static_cast<int>(random.below(20));
      const auto x = static_cast<float>(random.normal() * std::ldexp(1000, -exponent));
      const uint32_t expected = cuflash_test::nearest_code(static_cast<int32_t>(dtype), x);
      ASSERT_EQ(float_of(dtype, code_of(dtype, x)), value_of(dtype, static_cast<int>(expected)))
          << x;
    }
}

TEST(Quantised, NanAndScaleOfZero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const StoredDtype dtype : {StoredDtype::kF32, StoredDtype::kF16, StoredDtype::kBf16,
                                  StoredDtype::kE4m3, StoredDtype::kE5m2})
    EXPECT_TRUE(std::isnan(float_of(dtype, code_of(dtype, nan))));
  for (const StoredDtype dtype : {StoredDtype::kInt8, StoredDtype::kInt4}) {
    EXPECT_EQ(code_of(dtype, nan), 0u);
    EXPECT_EQ(quantise(dtype, nan, {2, 3}), 3u);
  }
  for (const StoredDtype dtype : kNarrow)
    for (const float x : {0.0f, 3.0f, nan})
      EXPECT_EQ(dequantise(dtype, quantise(dtype, x, {0, 0}), {0, 0}), 0) << x;
}

TEST(Quantised, ScaleAndZero) {
  for (int code = 0; code < 256; ++code)
    for (const Quantisation q : {Quantisation{0.25f, 0}, {0.1f, -7}, {3.5f, 128}, {0.01f, 0.5f}}) {
      const auto bits = static_cast<uint32_t>(code);
      const float x = dequantise(StoredDtype::kInt8, bits, q);
      ASSERT_EQ(x, static_cast<float>((value_of(StoredDtype::kInt8, code) - double{q.zero}) *
                                      double{q.scale}));
      ASSERT_EQ(quantise(StoredDtype::kInt8, x, q), bits) << code << ' ' << q.scale;
    }
  EXPECT_EQ(dequantise(StoredDtype::kE4m3, quantise(StoredDtype::kE4m3, 896, {2, 0}), {2, 0}), 896);
  EXPECT_EQ(dequantise(StoredDtype::kE4m3, quantise(StoredDtype::kE4m3, 9e9f, {2, 0}), {2, 0}),
            896);
}

TEST(Quantised, WiderTypesAreThoseOfProblems) {
  for (const float x : {1.0f, -2.7f, 3e38f, 1e-8f}) {
    EXPECT_EQ(float_of(StoredDtype::kF32, code_of(StoredDtype::kF32, x)), x);
    EXPECT_EQ(float_of(StoredDtype::kF16, code_of(StoredDtype::kF16, x)),
              to_float(from_float<Half>(x)));
    EXPECT_EQ(float_of(StoredDtype::kBf16, code_of(StoredDtype::kBf16, x)),
              to_float(from_float<Bfloat16>(x)));
  }
}

TEST(Quantised, CodesOfAnArray) {
  const uint32_t words[] = {0x87654321u, 0x0fedcba9u};
  EXPECT_EQ(stored_code(StoredDtype::kF32, words, 1), 0x0fedcba9u);
  EXPECT_EQ(stored_code(StoredDtype::kBf16, words, 1), 0x8765u);
  EXPECT_EQ(stored_code(StoredDtype::kInt8, words, 6), 0xedu);
  for (uint32_t n = 0; n < 16; ++n)  // little-endian, so in the order of the digits from the right
    EXPECT_EQ(stored_code(StoredDtype::kInt4, words, n), (n + 1) % 16);
}

}  // namespace
}  // namespace cuflash
