// Public bug reports on attention kernels as small problems with known answers (cases.md lists them all): rows
// without keys, and extreme scores.
#include <cmath>
#include <limits>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfEmptyRows : public DeviceTest {};
class CasesOfExtremeScores : public DeviceTest {};
CUFLASH_FOR_DEVICES(CasesOfEmptyRows);
CUFLASH_FOR_DEVICES(CasesOfExtremeScores);

TEST_P(CasesOfEmptyRows, B01_MoreQueriesThanKeys) {
  const Shape shape = {1, 2, 1, 5, 2, 64};
  on_every_kernel(make_case(GetParam(), kForward, shape, causal_mask()), kEveryDtype,
                  [](const Case& c) {
                    Inputs in = zero_inputs(c);
                    fill_hash(in.q, 1, 1, c.dtype);
                    fill_hash(in.k, 2, 1, c.dtype);
                    set(in.v, [](auto, auto, auto, auto) { return 1; });
                    const Results r = run_ok(c, in);
                    expect_values(
                        "o", r.o, [](auto, auto, auto i, auto) { return i < 3 ? 0 : 1; }, c.dtype);
                    for (int h = 0; h < 2; ++h)
                      for (int i = 0; i < 5; ++i) {
                        if (i < 3)
                          EXPECT_EQ(r.lse.at(0, h, i), -kInfinity);
                        else
                          EXPECT_TRUE(std::isfinite(r.lse.at(0, h, i)));
                      }
                  });
  on_every_kernel(make_case(GetParam(), kBackward, shape, causal_mask()), kEveryDtype,
                  [](const Case& c) {
                    const Inputs in = make_inputs(c, DataKind::kHash);
                    const Results r = run_ok(c, in);
                    for (int h = 0; h < 2; ++h)
                      for (int i = 0; i < 3; ++i)
                        for (int d = 0; d < 64; ++d) EXPECT_EQ(r.dq.at(0, h, i, d), 0);
                    expect_accurate(c, in);
                  });
}

TEST_P(CasesOfEmptyRows, B02_NoKeys) {
  const Shape shape = {1, 1, 1, 3, 0, 64};
  on_every_kernel(make_case(GetParam(), kForward, shape), kEveryDtype, [](const Case& c) {
    Inputs in = zero_inputs(c);
    set(in.q, [](auto, auto, auto, auto) { return 1; });
    const Results r = run_ok(c, in);
    for (const double o : r.o.x) EXPECT_EQ(o, 0);
    for (const double lse : r.lse.x) EXPECT_EQ(lse, -kInfinity);
  });
  on_every_kernel(make_case(GetParam(), kBackward, shape), kEveryDtype, [](const Case& c) {
    for (const double dq : run_ok(c, make_inputs(c, DataKind::kHash)).dq.x) EXPECT_EQ(dq, 0);
  });
}

TEST_P(CasesOfEmptyRows, B03_NoKeysCausalAndSplit) {
  for (const bool causal : {false, true})
    for (const int splits : {0, 1, 4}) {
      Case c = make_case(GetParam(), kDecode, {2, 4, 4, 8, 0, 128});
      if (causal) c.mask = causal_mask();
      c.num_splits = splits;
      on_every_kernel(c, kEveryDtype, [](const Case& each) {
        const Results r = run_ok(each, zero_inputs(each));
        for (const double o : r.o.x) EXPECT_EQ(o, 0);
        for (const double lse : r.lse.x) EXPECT_EQ(lse, -kInfinity);
      });
    }
}

TEST_P(CasesOfEmptyRows, B05_MergeOfEmptyParts) {
  for (const Dtype dtype : kAllDtypes) {
    Results empty{Tensor(1, 1, 2, 64), Tensor(1, 1, 2, 1, -kInfinity), {}, {}, {}};
    Results garbage = empty, one = empty;
    for (double& o : garbage.o.x) o = std::nan("");
    for (double& o : one.o.x) o = 1;
    for (double& lse : one.lse.x) lse = 0.5;
    const Outcome none = run_merge(GetParam(), dtype, {empty, empty});
    ASSERT_EQ(none.status, CUFLASH_SUCCESS) << none.message;
    for (const double o : none.results.o.x) EXPECT_EQ(o, 0);
    for (const double lse : none.results.lse.x) EXPECT_EQ(lse, -kInfinity);
    for (const auto& parts : {std::vector<Results>{garbage, one}, {one, garbage}}) {
      const Outcome merged = run_merge(GetParam(), dtype, parts);
      for (const double o : merged.results.o.x) EXPECT_EQ(o, 1);
      for (const double lse : merged.results.lse.x) EXPECT_FLOAT_EQ(lse, 0.5);
    }
  }
}

// Decode with q = 0 and v = 1: o is 1 and LSE the logarithm of the length, or the row is empty.
void expect_counts(const Case& c) {
  Inputs in = zero_inputs(c);
  set(in.v, [](auto, auto, auto, auto) { return 1; });
  const Results r = run_ok(c, in);
  expect_values(
      "o", r.o, [&](auto b, auto, auto, auto) { return c.lengths[b] > 0 ? 1 : 0; }, c.dtype);
  expect_lse(r, [&](auto b, auto, auto) {
    return c.lengths[b] > 0 ? std::log(c.lengths[b]) : -kInfinity;
  });
}

TEST_P(CasesOfEmptyRows, B06_SplitDecodeOfSomeEmptySequences) {
  Case c = make_case(GetParam(), kDecode, {8, 4, 2, 1, 8, 64});
  c.lengths = {0, 1, 0, 2, 3, 0, 4, 5};
  c.num_splits = 4;
  on_every_kernel(c, kEveryDtype, expect_counts);
}

TEST_P(CasesOfEmptyRows, B07_EmptySequenceWritesItsRow) {
  Case c = make_case(GetParam(), kDecode, {4, 2, 2, 1, 5, 128});
  c.lengths = {0, 5, 0, 1};
  on_every_kernel(c, kEveryDtype, expect_counts);
}

TEST_P(CasesOfEmptyRows, B08_PaddingSlotsOnEachRun) {
  Case c = make_case(GetParam(), kDecode, {1024, 1, 1, 1, 4, 64});
  c.lengths.assign(1024, 0);
  c.lengths[0] = 1;
  on_every_kernel(c, kEveryHalf, [](const Case& each) {
    Inputs in = zero_inputs(each);
    set(in.v, [](auto, auto, auto, auto) { return 1; });
    Call call(each, in);
    for (int replay = 0; replay < 2; ++replay) {
      call.poison_outputs();
      const auto status = call.launch();
      synchronize(each.device);
      const Outcome outcome = call.collect(status);
      ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
      expect_values(
          "o", outcome.results.o, [](auto b, auto, auto, auto) { return b == 0; }, each.dtype);
    }
  });
}

TEST_P(CasesOfExtremeScores, B12_AllScoresBelowAnySentinel) {
  const Shape shape = {1, 16, 1, 1, 64, 128};
  for (const Operation operation : {kForward, kDecode})
    on_every_kernel(make_case(GetParam(), operation, shape), kEveryDtype, [](const Case& c) {
      for (const double first : {0.0, 7.0}) {
        Inputs in = zero_inputs(c);
        set(in.q, [](auto, auto, auto, auto) { return 1; });
        set(in.k, [](auto, auto, auto j, auto) { return j == 0 ? -2000 : -2048; });
        set(in.v, [&](auto, auto, auto j, auto) { return j == 0 ? first : j; });
        const Results r = run_ok(c, in);
        expect_values(
            "o", r.o, [&](auto, auto, auto, auto) { return first; }, c.dtype, 0);
        expect_lse(r, [](auto, auto, auto) { return -256000 / std::sqrt(128.0); });
      }
    });
}

TEST_P(CasesOfExtremeScores, B13_OneKeyWithAHugeNegativeScore) {
  const Shape shape = {1, 32, 8, 1, 1, 128};
  const auto inputs = [](const Case& c) {
    Inputs in = zero_inputs(c);
    set(in.q, [](auto, auto, auto, auto) { return 64; });
    set(in.k, [](auto, auto, auto, auto) { return -64; });
    set(in.v, [](auto, auto, auto, auto) { return 1; });
    return in;
  };
  on_every_kernel(make_case(GetParam(), kForward, shape), kEveryDtype, [&](const Case& c) {
    const Results r = run_ok(c, inputs(c));
    expect_values(
        "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype, 0);
    expect_lse(r, [](auto, auto, auto) { return -524288 / std::sqrt(128.0); });
  });
  on_every_kernel(make_case(GetParam(), kBackward, shape), kEveryDtype, [&](const Case& c) {
    Inputs in = inputs(c);
    set(in.d_o, [](auto, auto h, auto, auto) { return 1 + h % 4; });
    add_forward_results(c, in);
    const Results r = run_ok(c, in);
    // The score is rebuilt in fp32 from another order of the sum: weights are 1 to about 1e-2 only.
    for (const double dq : r.dq.x) EXPECT_EQ(dq, 0);
    for (const double dk : r.dk.x) EXPECT_EQ(dk, 0);
    expect_values(
        "dv", r.dv, [](auto, auto, auto, auto) { return 10; }, c.dtype, 0);
  });
}

TEST_P(CasesOfExtremeScores, B15_EqualHugeScores) {
  for (const int64_t keys : {1, 3, 130})
    on_every_kernel(make_case(GetParam(), kForward, {1, 1, 1, 1, keys, 64}),
                    {Dtype::kBf16, Dtype::kF32}, [&](const Case& c) {
                      Inputs in = zero_inputs(c);
                      for (Tensor* t : {&in.q, &in.k, &in.v})
                        set(*t, [](auto, auto, auto, auto) { return 133120; });
                      const Results r = run_ok(c, in);
                      expect_values(
                          "o", r.o, [](auto, auto, auto, auto) { return 133120; }, c.dtype, 1);
                      expect_lse(r, [](auto, auto, auto) { return 141767475200.0; });
                    });
}

TEST_P(CasesOfExtremeScores, B16_BackwardOfOneQueryAndOneKey) {
  on_every_kernel(make_case(GetParam(), kBackward, {1, 1, 1, 1, 1, 16}), kEveryDtype,
                  [](const Case& c) {
                    Inputs in = zero_inputs(c);
                    fill_hash(in.q, 1, 14, c.dtype);
                    fill_hash(in.k, 2, 14, c.dtype);
                    fill_hash(in.v, 3, 6, c.dtype);
                    set(in.d_o, [](auto, auto, auto, auto) { return 1; });
                    add_forward_results(c, in);
                    const Results r = run_ok(c, in);
                    const auto zero = [](auto, auto, auto, auto) { return 0; };
                    expect_values("dq", r.dq, zero, c.dtype, 0, 1e-3);
                    expect_values("dk", r.dk, zero, c.dtype, 0, 1e-3);
                    expect_values(
                        "dv", r.dv, [](auto, auto, auto, auto) { return 1; }, c.dtype);
                  });
}

TEST_P(CasesOfExtremeScores, B17_ManyQueriesAndOneKey) {
  // The report's three ragged sequences, one dense problem each.
  for (const int64_t rows : {76, 34, 146})
    on_every_kernel(make_case(GetParam(), kBackward, {1, 1, 1, rows, 1, 32}, causal_mask()),
                    kEveryDtype, [&](const Case& c) {
                      Inputs in = zero_inputs(c);
                      fill_hash(in.q, 1, 6, c.dtype);
                      fill_hash(in.k, 2, 6, c.dtype);
                      fill_hash(in.v, 3, 6, c.dtype);
                      set(in.d_o, [](auto, auto, auto, auto) { return 1; });
                      add_forward_results(c, in);
                      const Results r = run_ok(c, in);
                      const auto zero = [](auto, auto, auto, auto) { return 0; };
                      expect_values("dq", r.dq, zero, c.dtype, 0, 1e-3);
                      expect_values("dk", r.dk, zero, c.dtype, 0, 1e-3);
                      expect_values(
                          "dv", r.dv, [](auto, auto, auto, auto) { return 1; }, c.dtype);
                    });
}

// q[0] = 1 and k[0] = -960 at D = 64: every score is -120.
void set_scores_to_minus_120(Inputs& in) {
  set(in.q, [](auto, auto, auto, auto d) { return d == 0 ? 1 : 0; });
  set(in.k, [](auto, auto, auto, auto d) { return d == 0 ? -960 : 0; });
}

TEST_P(CasesOfExtremeScores, B18_AllScoresVeryNegative) {
  for (const int64_t n : {64, 192, 320, 704, 1000}) {
    if (GetParam() == Device::kCpu && n > 320) continue;  // slow there, and no longer another case
    const Shape shape = {1, 1, 1, n, n, 64};
    const auto inputs = [](const Case& c) {
      Inputs in = zero_inputs(c);
      set_scores_to_minus_120(in);
      set(in.v, [](auto, auto, auto j, auto) { return j % 2; });
      return in;
    };
    on_every_kernel(make_case(GetParam(), kForward, shape), kEveryDtype, [&](const Case& c) {
      const Results r = run_ok(c, inputs(c));
      expect_values(
          "o", r.o, [](auto, auto, auto, auto) { return 0.5; }, c.dtype, 2, 2e-6);
      expect_lse(r, [&](auto, auto, auto) { return -120 + std::log(n); });
    });
    on_every_kernel(make_case(GetParam(), kBackward, shape), kEveryDtype, [&](const Case& c) {
      Inputs in = inputs(c);
      set(in.d_o, [](auto, auto, auto, auto) { return 1; });
      add_forward_results(c, in);
      const Results r = run_ok(c, in);
      const double slack = c.dtype == Dtype::kF32 ? 1e-3 : 0.1;
      expect_values(
          "dq", r.dq, [](auto, auto, auto, auto) { return 0; }, c.dtype, 0, 30 * slack);
      expect_values(
          "dk", r.dk, [](auto, auto, auto j, auto d) { return d       ? 0
                                                              : j % 2 ? 4
                                                                      : -4; }, c.dtype, 0,
          slack);
      expect_values(
          "dv", r.dv, [](auto, auto, auto, auto) { return 1; }, c.dtype, 2, 2e-4);
    });
  }
}

TEST_P(CasesOfExtremeScores, B20_OneLargeKeyChannel) {
  on_every_kernel(make_case(GetParam(), kBackward, {1, 1, 1, 2, 2, 8}), {Dtype::kBf16, Dtype::kF32},
                  [](const Case& c) {
                    Inputs in = zero_inputs(c);
                    in.q.at(0, 0, 0, 4) = 2.5;
                    in.q.at(0, 0, 1, 4) = -4.25;
                    in.k.at(0, 0, 0, 4) = 70;
                    in.k.at(0, 0, 1, 4) = 70.5;
                    fill_hash(in.v, 3, 2, c.dtype);
                    fill_hash(in.d_o, 4, 2, c.dtype);
                    add_forward_results(c, in);
                    expect_accurate(c, in);
                  });
}

TEST_P(CasesOfExtremeScores, B21_FirstBlockMaskedAndAllScoresNegative) {
  on_every_kernel(make_case(GetParam(), kForward, {1, 14, 2, 88, 448, 64}, causal_mask()),
                  kEveryHalf, [](const Case& c) {
                    Inputs in = zero_inputs(c);
                    set_scores_to_minus_120(in);
                    set(in.v, [](auto, auto, auto, auto) { return 1; });
                    const Results r = run_ok(c, in);
                    expect_values(
                        "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype);
                    expect_lse(r, [](auto, auto, auto i) { return -120 + std::log(361 + i); });
                  });
}

TEST_P(CasesOfExtremeScores, B22_SumOfLargeValues) {
  for (const int64_t keys : {64, 131072})
    for (const Operation operation : {kForward, kDecode})
      on_every_family(make_case(GetParam(), operation, {1, 1, 1, 1, keys, 64}), {Dtype::kF16},
                      [](const Case& c) {
                        Inputs in = zero_inputs(c);
                        set(in.v, [](auto, auto, auto, auto) { return 60000; });
                        expect_values(
                            "o", run_ok(c, in).o, [](auto, auto, auto, auto) { return 60000; },
                            c.dtype, 4);  // the fp32 sum drifts by some ulps
                      });
}

// Each tile of keys outweighs those before it, by less than what makes a kernel look for another maximum at once, and
// values are near the end of the type: sums under an older maximum must not overflow.
TEST_P(CasesOfExtremeScores, B22_LargeValuesUnderARisingMaximum) {
  for (const Operation operation : {kForward, kDecode})
    for (const int64_t head_dim : {64, 128})
      on_every_family(make_case(GetParam(), operation, {1, 1, 1, 2, 3000, head_dim}),
                      {Dtype::kBf16, Dtype::kF32}, [](const Case& c) {
                        Inputs in = zero_inputs(c);
                        set(in.q, [](auto, auto, auto, auto d) { return d == 0; });
                        set(in.k, [&](auto, auto, auto j, auto d) {
                          return d ? 0
                                   : round_to(c.dtype, static_cast<double>(j) / 88 *
                                                           std::sqrt(c.shape.head_dim));
                        });
                        set(in.v, [&](auto, auto, auto, auto) { return round_to(c.dtype, 1e34); });
                        expect_accurate(c, in);
                      });
}

TEST_P(CasesOfExtremeScores, B23_MaximumThatKeepsRising) {
  for (const bool rising : {true, false})
    for (const Operation operation : {kForward, kDecode})
      on_every_family(make_case(GetParam(), operation, {1, 1, 1, 1, 40000, 64}), kEveryHalf,
                      [&](const Case& c) {
                        const auto place = [&](int64_t j) { return rising ? j : 39999 - j; };
                        Inputs in = zero_inputs(c);
                        in.q.at(0, 0, 0, 0) = 8;
                        set(in.k, [&](auto, auto, auto j, auto d) {
                          return d ? 0 : round_to(c.dtype, static_cast<double>(place(j)) / 512);
                        });
                        set(in.v, [&](auto, auto, auto j, auto) { return place(j) >= 39000; });
                        expect_accurate(c, in);
                      });
}

TEST_P(CasesOfExtremeScores, B25_LengthsBeyondInt16) {
  for (const int64_t rows : {int64_t{1}, int64_t{33728}}) {
    // Sq = Sk needs a GPU: 10^9 scores.
    if (GetParam() == Device::kCpu && rows > 1) continue;
    on_every_family(make_case(GetParam(), kForward, {1, 1, 1, rows, 33728, 64}), kEveryDtype,
                    [](const Case& c) {
                      Inputs in = zero_inputs(c);
                      set(in.v, [](auto, auto, auto, auto) { return 1; });
                      const Results r = run_ok(c, in);
                      expect_values(
                          "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype, 2);
                      expect_lse(r, [](auto, auto, auto) { return std::log(33728.0); });
                    });
  }
}

}  // namespace
}  // namespace cuflash_test
