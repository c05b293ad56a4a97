// Public bug reports as small problems with known answers: causal masks, alignments and windows, head groups.
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfMasks : public DeviceTest {
 protected:
  // q = 0 and v[j] = factor * j on every kernel and dtype, forward and decode: row i sees first(i) .. last(i).
  // Averages are exact to the rounding of the sum.
  template <class First, class Last>
  void expect_rows(const Shape& shape, const MaskSpec& mask, First first, Last last,
                   double factor = 1, const std::vector<Dtype>& dtypes = kEveryDtype) {
    for (const Operation operation : {kForward, kDecode})
      on_every_kernel(make_case(GetParam(), operation, shape, mask), dtypes, [&](const Case& c) {
        Inputs in = zero_inputs(c);
        set(in.v, [&](auto, auto, auto j, auto) { return factor * j; });
        const Results r = run_ok(c, in);
        const auto count = [&](int64_t i) { return std::max<int64_t>(0, last(i) - first(i) + 1); };
        expect_values(
            "o", r.o,
            [&](auto, auto, auto i, auto) {
              return count(i) ? factor * static_cast<double>(first(i) + last(i)) / 2 : 0.0;
            },
            c.dtype, ulps_of_means(c));
        expect_lse(r, [&](auto, auto, auto i) {
          return count(i) ? std::log(static_cast<double>(count(i)))
                          : -std::numeric_limits<double>::infinity();
        });
      });
  }
};
CUFLASH_FOR_DEVICES(CasesOfMasks);

TEST_P(CasesOfMasks, B26_CausalIsBottomRight) {
  expect_rows(
      {1, 1, 1, 2, 5, 32}, causal_mask(), [](auto) { return 0; }, [](auto i) { return i + 3; });
}

TEST_P(CasesOfMasks, B27_ThreeQueriesOverManyKeys) {
  expect_rows(
      {1, 1, 1, 3, 128, 128}, causal_mask(), [](auto) { return 0; },
      [](auto i) { return 125 + i; });
}

TEST_P(CasesOfMasks, B28_LeadingRowsWithoutKeys) {
  const Shape shape = {1, 1, 1, 2048, 1024, 64};
  expect_rows(
      shape, causal_mask(), [](auto) { return 0; }, [](auto i) { return i - 1024; }, 1.0 / 1024,
      {Dtype::kF16});
  on_every_kernel(make_case(GetParam(), kBackward, {1, 1, 1, 256, 128, 64}, causal_mask()),
                  {Dtype::kF16}, [](const Case& c) {
                    const Results r = run_ok(c, make_inputs(c, DataKind::kNormal));
                    for (int i = 0; i < 128; ++i)
                      for (int d = 0; d < 64; ++d) EXPECT_EQ(r.dq.at(0, 0, i, d), 0);
                  });
}

TEST_P(CasesOfMasks, B30_FourWaysToSayCausal) {
  for (const int64_t n : {1, 63, 64, 65, 257})
    for (const Operation operation : {kForward, kBackward})
      on_every_kernel(make_case(GetParam(), operation, {1, 2, 1, n, n, 32}, causal_mask()),
                      kEveryDtype, [&](const Case& causal) {
                        const Inputs in = make_inputs(causal, DataKind::kHash);
                        const Results expected = run_ok(causal, in);
                        for (const int64_t left : {int64_t{-1}, n, n - 1}) {
                          Case window = causal;
                          window.mask = window_mask(left, 0);
                          expect_same_bits(run_ok(window, in), expected);
                        }
                      });
}

TEST_P(CasesOfMasks, B31_RightWindowIsNotCutToTheKeys) {
  for (const int64_t right : {int64_t{INT32_MAX}, int64_t{INT64_MAX}, int64_t{9}})
    expect_rows(
        {1, 1, 1, 10, 4, 64}, window_mask(-1, right), [](auto) { return 0; },
        [](auto) { return 3; });
}

TEST_P(CasesOfMasks, B32_TwoSidedWindowWithMoreQueriesThanKeys) {
  expect_rows(
      {1, 1, 1, 129, 61, 64}, window_mask(32, 64),
      [](auto i) { return std::max<int64_t>(0, i - 100); },
      [](auto i) { return std::min<int64_t>(60, i - 4); });
}

TEST_P(CasesOfMasks, B33_WindowBoundsAreInclusive) {
  expect_rows(
      {1, 1, 1, 8, 8, 64}, window_mask(3, 0), [](auto i) { return std::max<int64_t>(0, i - 3); },
      [](auto i) { return i; });
}

TEST_P(CasesOfMasks, B35_LeftWindowWithSplitKeys) {
  for (const int splits : {1, 2, 3, 8, 0}) {
    // The rows that matter are the first and the last: all 300 on a GPU.
    const int64_t rows = 300, heads = GetParam() == Device::kCpu ? 1 : 8;
    Case c = make_case(GetParam(), kDecode, {1, heads, heads > 1 ? 2 : 1, rows, 4096, 128},
                       window_mask(333, -1));
    c.dtype = Dtype::kBf16;
    c.num_splits = splits;
    if (GetParam() == Device::kCpu && splits > 3) continue;
    on_every_kernel(c, [](const Case& each) {
      Inputs in = zero_inputs(each);
      set(in.v, [](auto, auto, auto j, auto) { return j >= 3840; });
      const Results r = run_ok(each, in);
      expect_values(
          "o", r.o, [](auto, auto, auto i, auto) { return 256.0 / (633 - i); }, each.dtype, 1);
      expect_lse(r, [](auto, auto, auto i) { return std::log(633.0 - i); });
    });
  }
}

TEST_P(CasesOfMasks, B36_RowsLeftOfTheSharedWindow) {
  expect_rows(
      {1, 1, 1, 4, 12, 64}, window_mask(7, 0), [](auto i) { return i + 1; },
      [](auto i) { return i + 8; }, 1.0 / 16);
  expect_rows(
      {1, 1, 1, 128, 4096, 64}, window_mask(100, 0), [](auto i) { return i + 3868; },
      [](auto i) { return i + 3968; }, 1.0 / 16, {Dtype::kF16, Dtype::kF32});
}

TEST_P(CasesOfMasks, B37_NegativeWindowsAreRefused) {
  for (const auto& [left, right] : {std::pair<int64_t, int64_t>{-1, -3}, {-16, 0}}) {
    Case c = make_case(GetParam(), kForward, {1, 1, 1, 8, 8, 64}, window_mask(left, right));
    for (const bool causal : {false, true}) {
      c.mask.causal = causal;
      const Outcome outcome = run(c, zero_inputs(c));
      EXPECT_EQ(outcome.status, CUFLASH_ERROR_INVALID_VALUE);
      EXPECT_NE(outcome.message.find("window"), std::string::npos) << outcome.message;
    }
  }
}

TEST_P(CasesOfMasks, B38_CausalWithAnUnlimitedWindow) {
  MaskSpec mask = window_mask(-1, -1);
  mask.causal = true;
  const int64_t n = GetParam() == Device::kCpu ? 200 : 1024;
  on_every_kernel(make_case(GetParam(), kForward, {2, 8, 8, n, n, 128}, mask), {Dtype::kBf16},
                  [](const Case& c) {
                    Inputs in = zero_inputs(c);
                    set(in.v, [](auto, auto, auto, auto) { return 1; });
                    const Results r = run_ok(c, in);
                    expect_values(
                        "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype);
                    expect_lse(r, [](auto, auto, auto i) { return std::log(i + 1.0); });
                  });
}

// v[kv head] = value(kv head) and q = 0: o of a query head tells whose keys it read.
template <class Value, class Expected>
void expect_heads(const Case& c, Value value, Expected expected) {
  Inputs in = zero_inputs(c);
  set(in.v, [&](auto b, auto h, auto, auto) { return value(b, h); });
  expect_values(
      "o", run_ok(c, in).o, [&](auto b, auto h, auto, auto) { return expected(b, h); }, c.dtype, 0);
}

TEST_P(CasesOfMasks, B52_HeadsAreDividedNotTaken) {
  on_every_kernel(
      make_case(GetParam(), kForward, {1, 4, 2, 3, 5, 32}), kEveryDtype, [](const Case& c) {
        expect_heads(
            c, [](auto, auto h) { return h + 1; }, [](auto, auto h) { return h / 2 + 1; });
      });
}

TEST_P(CasesOfMasks, B53_DecodeGroupsBeyondATile) {
  for (const auto& [q, kv] : {std::pair{48, 2}, {40, 2}, {80, 4}})
    on_every_kernel(make_case(GetParam(), kDecode, {1, q, kv, 1, 17, 64}), kEveryDtype,
                    [group = q / kv](const Case& c) {
                      expect_heads(
                          c, [](auto, auto h) { return h; },
                          [&](auto, auto h) { return h / group; });
                    });
}

TEST_P(CasesOfMasks, B55_CausalLimitOfEveryHead) {
  expect_rows(
      {1, 8, 2, 128, 128, 32}, causal_mask(), [](auto) { return 0; }, [](auto i) { return i; }, 1,
      {Dtype::kF32, Dtype::kF16});
}

TEST_P(CasesOfMasks, B56_LogSumExpOfGroups) {
  Case c = make_case(GetParam(), kForward, {1, 16, 4, 5, 5, 64});
  c.scale_set = true;
  c.scale = 0.125;
  on_every_kernel(c, kEveryDtype, [](const Case& each) {
    Inputs in = zero_inputs(each);
    set(in.q, [](auto, auto, auto, auto d) { return d == 0; });
    set(in.k, [](auto, auto h, auto, auto d) { return d == 0 ? 8 * h : 0; });
    expect_lse(run_ok(each, in), [](auto, auto h, auto) { return h / 4 + std::log(5.0); });
  });
}

TEST_P(CasesOfMasks, B57_OneQueryOfManyHeadsAndBatches) {
  for (const Operation operation : {kForward, kDecode})
    on_every_kernel(make_case(GetParam(), operation, {4, 8, 2, 1, 33, 128}), kEveryDtype,
                    [](const Case& c) {
                      expect_heads(
                          c, [](auto b, auto h) { return 10 * b + h; },
                          [](auto b, auto h) { return 10 * b + h / 4; });
                    });
}

TEST_P(CasesOfMasks, B58_GradientsSumOverTheGroup) {
  for (const auto& [q, kv] : {std::pair{6, 2}, {8, 2}, {12, 3}})
    on_every_kernel(make_case(GetParam(), kBackward, {1, q, kv, 20, 40, 64}), kEveryDtype,
                    [group = q / kv](const Case& c) {
                      Inputs in = zero_inputs(c);
                      fill_hash(in.v, 3, 1, c.dtype);
                      set(in.d_o, [](auto, auto h, auto, auto) { return h + 1; });
                      add_forward_results(c, in);
                      const Results r = run_ok(c, in);
                      expect_values(
                          "dv", r.dv,
                          [&](auto, auto h, auto, auto) {
                            double sum = 0;
                            for (int64_t head = h * group; head < (h + 1) * group; ++head)
                              sum += head + 1;
                            return sum * 20 / 40;
                          },
                          c.dtype, 2, c.dtype == Dtype::kF32 ? 1e-4 : 0.05);
                      for (const double dk : r.dk.x) EXPECT_TRUE(std::isfinite(dk));
                    });
}

}  // namespace
}  // namespace cuflash_test
