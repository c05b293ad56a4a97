// The checker of cuflash-bench: right results pass, wrong ones do not, each kind of them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "check.hpp"

namespace cuflash_bench {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<unsigned char> o;
  std::vector<float> lse;
};

// Forward by its definition, rounded to the dtype. `hidden` keys, the first ones, are left out.
Result forward(const Point& point, const Inputs& in, int64_t hidden = 0) {
  const Dtype dtype = dtype_of(point.dtype);
  const int64_t d = point.head_dim;
  Result result = {
      std::vector<unsigned char>(static_cast<size_t>(point.queries() * d) * size_of(dtype)),
      std::vector<float>(static_cast<size_t>(point.queries()))};
  for (int64_t row = 0; row < point.queries(); ++row) {
    const int64_t i = row % point.len_q, head = row / point.len_q;
    const int64_t head_kv =
        head / point.heads * point.heads_kv + head % point.heads * point.heads_kv / point.heads;
    const int64_t centre = i + point.len_k - point.len_q;
    std::vector<double> o(static_cast<size_t>(d));
    double total = 0;
    for (int64_t j = hidden; j < point.len_k; ++j) {
      if (point.mask != "full" && j > centre) continue;
      if (point.mask == "window" && j <= centre - point.window) continue;
      const int64_t key = (head_kv * point.len_k + j) * d;
      double score = 0;
      for (int64_t c = 0; c < d; ++c) score += in.q.at(row * d + c) * in.k.at(key + c);
      const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
      total += weight;
      for (int64_t c = 0; c < d; ++c) o[static_cast<size_t>(c)] += weight * in.v.at(key + c);
    }
    for (int64_t c = 0; c < d; ++c)
      store(result.o.data(), row * d + c,
            encode(total > 0 ? o[static_cast<size_t>(c)] / total : 0, dtype), dtype);
    result.lse[static_cast<size_t>(row)] = static_cast<float>(std::log(total));
  }
  return result;
}

Point small_point(const std::string& dtype, const std::string& mask) {
  Point point;
  point.dtype = dtype;
  point.mask = mask;
  point.window = mask == "window" ? 9 : 0;
  point.batch = 2;
  point.heads = 4;
  point.heads_kv = 2;
  point.len_q = 33;
  point.len_k = 40;
  point.head_dim = 16;
  return point;
}

class Check : public testing::TestWithParam<std::string> {
 protected:
  // Expects the result to be refused with these words.
  static void expect_wrong(const Expected& expected, const Result& result, const char* words) {
    try {
      expected.check(result.o.data(), result.lse);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Wrong& wrong) {
      EXPECT_NE(std::string(wrong.what()).find(words), std::string::npos) << wrong.what();
    }
  }
};

TEST_P(Check, TakesRightResults) {
  for (const char* mask : {"full", "causal", "window"}) {
    Point point = small_point(GetParam(), mask);
    for (const int64_t len_k : {40, 20}) {  // with 20 the first rows of the masks see no key
      point.len_k = len_k;
      const Inputs in(dtype_of(point.dtype));
      const Result result = forward(point, in);
      const double error = Expected(point, in).check(result.o.data(), result.lse);
      EXPECT_LE(error, 1) << words_of(point);
      EXPECT_GT(error, 0) << words_of(point);
    }
  }
}

TEST_P(Check, RefusesWrongOnes) {
  const Point point = small_point(GetParam(), "causal");
  const Dtype dtype = dtype_of(point.dtype);
  const Inputs in(dtype);
  const Expected expected(point, in);
  const Result right = forward(point, in);
  const int64_t last = point.queries() * point.head_dim - 1;  // in a sampled row

  Result result = right;
  store(result.o.data(), last,
        encode(decode(load(result.o.data(), last, dtype), dtype) + 0.25, dtype), dtype);
  expect_wrong(expected, result, "wrong result: batch 1 head 3 row 32: error ");

  result = right;
  store(result.o.data(), last / 2, encode(kNan, dtype), dtype);
  expect_wrong(expected, result, "NaN or infinity, or rows not written");

  result = right;
  result.lse.back() += 0.01F;
  expect_wrong(expected, result, "wrong LSE: batch 1 head 3 row 32: error 0.01");

  result = right;
  result.lse[5] = kNan;
  expect_wrong(expected, result, "wrong LSE: NaN");

  result = right;
  result.lse[5] = -kInfinity;
  expect_wrong(expected, result, "wrong LSE: NaN");

  expect_wrong(expected, Result{std::vector<unsigned char>(right.o.size()), right.lse},
               "wrong result");
}

TEST_P(Check, RefusesAnotherMask) {
  const Point causal = small_point(GetParam(), "causal"),
              window = small_point(GetParam(), "window");
  const Inputs in(dtype_of(causal.dtype));
  expect_wrong(Expected(window, in), forward(causal, in), "wrong result");
  expect_wrong(Expected(causal, in), forward(window, in), "wrong result");
}

// One key of a thousand, which moves the result by less than the size of the values.
TEST_P(Check, RefusesALostKey) {
  Point point = small_point(GetParam(), "full");
  point.batch = point.heads = point.heads_kv = 1;
  point.len_q = 4;
  point.len_k = 1000;
  const Inputs in(dtype_of(point.dtype));
  const Expected expected(point, in);
  Result result = forward(point, in);
  EXPECT_LE(expected.check(result.o.data(), result.lse), 1);
  const std::vector<float> lse = result.lse;
  result = forward(point, in, 1);
  result.lse = lse;
  expect_wrong(expected, result, "wrong result");
}

// A row that sees no key has zeros and -infinity, and nothing else.
TEST_P(Check, KnowsRowsWithoutKeys) {
  Point point = small_point(GetParam(), "causal");
  point.len_k = 20;
  const Dtype dtype = dtype_of(point.dtype);
  const Inputs in(dtype);
  const Expected expected(point, in);
  Result result = forward(point, in);
  ASSERT_EQ(result.lse[0], -kInfinity);
  result.lse[0] = 0;
  expect_wrong(expected, result, "wrong LSE");
  result.lse[0] = -kInfinity;
  store(result.o.data(), 0, encode(1e-3, dtype), dtype);
  expect_wrong(expected, result, "wrong result: batch 0 head 0 row 0: error inf");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Check, testing::Values("f32", "f16", "bf16"));

}  // namespace
}  // namespace cuflash_bench
