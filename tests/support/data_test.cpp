// Number formats, data, layouts and guards of the test support itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "support/data.hpp"
#include "support/layout.hpp"

namespace cuflash_test {
namespace {

TEST(Dtype, EveryPatternComesBack) {
  for (const Dtype dtype : kHalfDtypes)
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t pattern = static_cast<uint16_t>(bits);
      const double value = load(dtype, &pattern);
      if (std::isnan(value)) continue;
      uint16_t back;
      store(dtype, value, &back);
      EXPECT_EQ(back, pattern);
      EXPECT_EQ(round_to(dtype, value), value);
    }
}

TEST(Dtype, RoundsToNearestEven) {
  EXPECT_EQ(round_to(Dtype::kF16, 2049), 2048);
  EXPECT_EQ(round_to(Dtype::kF16, 2051), 2052);
  EXPECT_EQ(round_to(Dtype::kBf16, 257), 256);
  EXPECT_EQ(round_to(Dtype::kBf16, 259), 260);
  EXPECT_EQ(round_to(Dtype::kF16, 65519.99), 65504);
  EXPECT_EQ(round_to(Dtype::kF16, 65520), std::numeric_limits<double>::infinity());
  EXPECT_EQ(round_to(Dtype::kF16, -0x1.8p-24), -0x1p-23);
  EXPECT_EQ(round_to(Dtype::kF16, 0x1p-25), 0);
  Random random(1);
  for (int n = 0; n < 100000; ++n) {
    const double x = random.normal() * std::ldexp(1.0, static_cast<int>(random.below(250)) - 140);
    EXPECT_EQ(round_to(Dtype::kF32, x), static_cast<double>(static_cast<float>(x)));
    for (const Dtype dtype : kAllDtypes) {
      const double rounded = round_to(dtype, x);
      if (!std::isfinite(rounded)) continue;
      EXPECT_LE(std::fabs(rounded - x), std::max(ulp(dtype, x), ulp(dtype, rounded)) / 2);
    }
  }
}

TEST(Data, HashIsTheDocumentedOne) {
  // h(n=1, t=1) by hand: 2654435761 + 2246822519 mod 2^32 = 606290984.
  uint32_t h = 606290984u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  EXPECT_DOUBLE_EQ(hash_value(1, 1, 2), 2 * ((h >> 8) / 16777216.0 - 0.5));
}

TEST(Data, NormalHasMeanZeroAndVarianceOne) {
  Random random(3);
  double sum = 0, squares = 0;
  constexpr int kCount = 100000;
  for (int n = 0; n < kCount; ++n) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Layout, RandomLayoutsAreInjective) {
  Random random(9);
  for (int n = 0; n < 200; ++n) {
    const Extents e = {1 + random.below(3), 1 + random.below(4), 1 + random.below(5),
                       1 + random.below(9)};
    const Layout l = random_layout(e, random);
    std::set<int64_t> seen;
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h = 0; h < e.heads; ++h)
        for (int64_t r = 0; r < e.rows; ++r)
          for (int64_t c = 0; c < e.dim; ++c)
            seen.insert(l.offset + b * l.batch_stride + h * l.head_stride + r * l.row_stride + c);
    EXPECT_EQ(static_cast<int64_t>(seen.size()), e.batch * e.heads * e.rows * e.dim);
  }
}

TEST(Layout, SeesEveryWrongWrite) {
  const Extents e = {2, 3, 4, 5};
  Random random(4);
  for (const Layout& layout : {dense_layout(e), bshd_layout(e, 3), random_layout(e, random)}) {
    StridedTensor t(Device::kCpu, Dtype::kF16, e, layout);
    Tensor values(2, 3, 4, 5);
    fill_hash(values, 1, 1, Dtype::kF16);
    t.write(values);
    EXPECT_EQ(t.read().x, values.x);
    EXPECT_TRUE(t.unchanged());
    uint16_t* const first = static_cast<uint16_t*>(t.data());
    first[0] ^= 1;
    EXPECT_FALSE(t.unchanged());
    EXPECT_TRUE(t.surroundings_intact());
    first[0] ^= 1;
    uint16_t* const before = first - layout.offset - 1;
    *before ^= 1;
    EXPECT_FALSE(t.surroundings_intact());
    *before ^= 1;
    if (layout.offset > 0) {
      first[-1] ^= 1;
      EXPECT_FALSE(t.surroundings_intact());
    }
  }
}

TEST(Buffer, GuardsSeeOneByteOnEitherSide) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1000}}) {
    Buffer buffer(Device::kCpu, bytes);
    buffer.fill(0xff);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
    unsigned char* const data = static_cast<unsigned char*>(buffer.data());
    EXPECT_TRUE(buffer.guards_intact());
    data[bytes] ^= 1;
    EXPECT_FALSE(buffer.guards_intact());
    data[bytes] ^= 1;
    data[-1] ^= 1;
    EXPECT_FALSE(buffer.guards_intact());
    data[-1] ^= 1;
  }
}

}  // namespace
}  // namespace cuflash_test
