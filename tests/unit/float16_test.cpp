// The library's 16-bit formats against the tests' own: every 16-bit pattern one way, and the other way every
// boundary between two of them, with its neighbours.
#include "common/float16.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "support/data.hpp"
#include "support/dtype.hpp"

namespace cuflash {
namespace {

using cuflash_test::load;
using cuflash_test::round_to;

template <class T>
constexpr cuflash_test::Dtype kDtype =
    std::is_same_v<T, Half> ? cuflash_test::Dtype::kF16 : cuflash_test::Dtype::kBf16;

template <class T>
class Float16 : public testing::Test {};
using Types = testing::Types<Half, Bfloat16>;
TYPED_TEST_SUITE(Float16, Types);

template <class T>
void expect_rounds(float x) {
  const T rounded = from_float<T>(x);
  const double expected = round_to(kDtype<T>, x), got = load(kDtype<T>, &rounded);
  ASSERT_EQ(got, expected) << x;
  ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
}

TYPED_TEST(Float16, EveryPatternToFloat) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const TypeParam value = {static_cast<uint16_t>(bits)};
    const double expected = load(kDtype<TypeParam>, &value);
    const float got = to_float(value);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_float<TypeParam>(got)))) << bits;
    } else {
      ASSERT_EQ(got, expected) << bits;
      ASSERT_EQ(from_float<TypeParam>(got).bits, bits);
    }
  }
}

TYPED_TEST(Float16, EveryBoundaryFromFloat) {
  for (uint32_t bits = 0; bits < 0x7f80u; ++bits) {
    const uint16_t lower = static_cast<uint16_t>(bits), upper = static_cast<uint16_t>(bits + 1);
    const double a = load(kDtype<TypeParam>, &lower), b = load(kDtype<TypeParam>, &upper);
    if (!std::isfinite(a) || std::isnan(b)) continue;
    // The midpoint before infinity is that to the value which the next exponent would have.
    const double next = std::isfinite(b) ? b : a + cuflash_test::ulp(kDtype<TypeParam>, a);
    const float middle = static_cast<float>((a + next) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      expect_rounds<TypeParam>(sign * middle);
      expect_rounds<TypeParam>(sign * std::nextafterf(middle, 0));
      expect_rounds<TypeParam>(sign *
                               std::nextafterf(middle, std::numeric_limits<float>::infinity()));
    }
  }
}

TYPED_TEST(Float16, RandomFloats) {
  cuflash_test::Random random(11);
  for (int n = 0; n < 2000000; ++n) {
    const float x = bits_float(static_cast<uint32_t>(random.bits()));
    if (!std::isnan(x)) expect_rounds<TypeParam>(x);
  }
}

TYPED_TEST(Float16, Special) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(from_float<TypeParam>(infinity)), infinity);
  EXPECT_EQ(to_float(from_float<TypeParam>(-infinity)), -infinity);
  EXPECT_EQ(to_float(from_float<TypeParam>(std::numeric_limits<float>::max())), infinity);
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffc00000u, 0xff800001u})
    EXPECT_TRUE(std::isnan(to_float(from_float<TypeParam>(bits_float(bits)))));
}

}  // namespace
}  // namespace cuflash
