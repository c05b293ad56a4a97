// Public bug reports as small problems with known answers: tile tails, head dims, poisoned padding, strides and
// alignment, and backward passes.
#include <array>
#include <cmath>
#include <limits>

#include "kernels/bulk.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfTails : public DeviceTest {};
class CasesOfLayouts : public DeviceTest {};
class CasesOfBackward : public DeviceTest {};
CUFLASH_FOR_DEVICES(CasesOfTails);
CUFLASH_FOR_DEVICES(CasesOfLayouts);
CUFLASH_FOR_DEVICES(CasesOfBackward);

TEST_P(CasesOfTails, B40_TheLastChannelCounts) {
  for (const int64_t dim : {96, 128, 192, 256})
    on_every_kernel(
        make_case(GetParam(), kForward, {1, 1, 1, 1, 8, dim}), kEveryDtype, [&](const Case& c) {
          Inputs in = zero_inputs(c);
          in.q.at(0, 0, 0, dim - 1) = 1;
          in.k.at(0, 0, 5, dim - 1) = 400;
          set(in.v, [&](auto, auto, auto j, auto d) { return round_to(c.dtype, j + d / 1024.0); });
          const Results r = run_ok(c, in);
          expect_values(
              "o", r.o, [&](auto, auto, auto, auto d) { return in.v.at(0, 0, 5, d); }, c.dtype);
          expect_lse(r,
                     [&](auto, auto, auto) { return 400 / std::sqrt(static_cast<double>(dim)); });
        });
}

TEST_P(CasesOfTails, B41_HeadDimsBetweenTiles) {
  const int64_t n = GetParam() == Device::kCpu ? 96 : 512;
  for (const int64_t dim : {40, 72, 88, 104})
    for (const Operation operation : {kForward, kBackward})
      on_every_kernel(make_case(GetParam(), operation, {1, 2, 2, n, n, dim}), {Dtype::kBf16},
                      [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kHash)); });
}

TEST_P(CasesOfTails, B42_LargeHeadDims) {
  for (const int64_t dim : {160, 192, 224, 256})
    for (const bool causal : {false, true})
      on_every_kernel(make_case(GetParam(), kBackward, {1, 1, 1, 97, 97, dim},
                                causal ? causal_mask() : MaskSpec()),
                      kEveryHalf,
                      [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kHash)); });
}

TEST_P(CasesOfTails, B43_LengthsAroundTheBlock) {
  for (const int64_t keys : {8, 16, 32, 64, 128})
    for (const int64_t more : {0, 1, 7}) {
      const Shape shape = {1, 1, 1, keys + more, keys, 64};
      const auto ones = [](const Case& c) {
        Inputs in = zero_inputs(c);
        for (Tensor* t : {&in.q, &in.k, &in.v, &in.d_o})
          set(*t, [](auto, auto, auto, auto) { return 1; });
        return in;
      };
      on_every_kernel(make_case(GetParam(), kForward, shape), kEveryDtype, [&](const Case& c) {
        const Results r = run_ok(c, ones(c));
        expect_values(
            "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype);
        expect_lse(r, [&](auto, auto, auto) { return 8 + std::log(keys); });
      });
      on_every_kernel(make_case(GetParam(), kBackward, shape), kEveryDtype, [&](const Case& c) {
        Inputs in = ones(c);
        add_forward_results(c, in);
        const Results r = run_ok(c, in);
        const double slack = 64 * ulp(c.dtype, 1);
        const auto zero = [](auto, auto, auto, auto) { return 0; };
        expect_values("dq", r.dq, zero, c.dtype, 0, slack);
        expect_values("dk", r.dk, zero, c.dtype, 0, slack);
        expect_values(
            "dv", r.dv,
            [&](auto, auto, auto, auto) {
              return static_cast<double>(keys + more) / static_cast<double>(keys);
            },
            c.dtype, 2, 1e-5);
      });
    }
}

TEST_P(CasesOfTails, B45_RepeatedKeyHeads) {
  for (const int64_t keys : {33, 65, 97})
    on_every_kernel(make_case(GetParam(), kForward, {2, 8, 8, 40, keys, 256}, causal_mask()),
                    kEveryHalf, [&](const Case& c) {
                      Inputs in = make_inputs(c, DataKind::kHash);
                      for (Tensor* t : {&in.k, &in.v}) {
                        const Tensor copy = *t;
                        set(*t, [&](auto b, auto, auto j, auto d) { return copy.at(b, 0, j, d); });
                      }
                      Case repeated = c;
                      for (const Role role : {kK, kV})
                        repeated.layouts[role] = Layout{0, keys * 256, 0, 256, false};
                      expect_same_bits(run_ok(repeated, in), run_ok(c, in));
                    });
}

// Rows past the keys hold garbage: NaN everywhere around the elements is the rule of StridedTensor; infinity and the
// largest finite value come here.
TEST_P(CasesOfTails, B46_GarbagePastTheKeys) {
  for (const Operation operation : {kForward, kBackward})
    on_every_kernel(make_case(GetParam(), operation, {1, 1, 1, 65, 65, 64}), kEveryDtype,
                    [](const Case& c) {
                      const Inputs in = make_inputs(c, DataKind::kHash);
                      const Results expected = run_ok(c, in);
                      for (const double garbage :
                           {std::nan(""), std::numeric_limits<double>::infinity(), 65504.0}) {
                        // 128 rows, of which the call sees 65.
                        Case wide = c;
                        Inputs more = in;
                        wide.shape.len_k = 128;
                        const Tensor* from[] = {&in.k, &in.v};
                        Tensor* to[] = {&more.k, &more.v};
                        for (int t = 0; t < 2; ++t)
                          *to[t] = Tensor::from(1, 1, 128, 64, [&](auto, auto, auto j, auto d) {
                            return j < 65 ? from[t]->at(0, 0, j, d) : round_to(c.dtype, garbage);
                          });
                        Call call(wide, more);
                        call.problem().len_k = 65;
                        call.poison_outputs();
                        const auto status = call.launch();
                        synchronize(c.device);
                        Outcome outcome = call.collect(status);
                        ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
                        for (Tensor* t : {&outcome.results.dk, &outcome.results.dv})
                          t->x.resize(std::min<size_t>(t->x.size(), 65 * 64));
                        expect_same_bits(outcome.results, expected);
                      }
                    });
}

TEST_P(CasesOfTails, B47_GarbageInUnusedCacheSlots) {
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{32, 64, 96, 48}, {1, 3}})
    for (const int splits : {1, 3}) {
      Case c =
          make_case(GetParam(), kDecode, {static_cast<int64_t>(lengths.size()), 8, 4, 1, 128, 64});
      c.lengths = lengths;
      c.num_splits = splits;
      on_every_kernel(c, kEveryDtype, [&](const Case& each) {
        Inputs in = make_inputs(each, DataKind::kHash);
        const auto fill_unused = [&](double value) {
          for (Tensor* t : {&in.k, &in.v})
            t->for_each([&](auto b, auto, auto j, auto, double& x) {
              if (j >= lengths[static_cast<size_t>(b)]) x = value;
            });
        };
        fill_unused(0);
        const Results expected = run_ok(each, in);
        fill_unused(std::nan(""));
        expect_same_bits(run_ok(each, in), expected);
      });
    }
}

TEST_P(CasesOfTails, B50_FewQueryRows) {
  for (const Operation operation : {kForward, kDecode})
    for (int64_t rows = 1; rows <= 16; ++rows)
      on_every_kernel(make_case(GetParam(), operation, {1, 4, 4, rows, 200, 128}), kEveryHalf,
                      [](const Case& c) {
                        Inputs in = make_inputs(c, DataKind::kHash);
                        const Tensor q = in.q;
                        set(in.q, [&](auto, auto h, auto, auto d) { return q.at(0, h, 0, d); });
                        expect_accurate(c, in);
                      });
}

// The same numbers in other layouts: the same bits.
void expect_layout_does_not_matter(const Case& base, const std::vector<Case>& others) {
  const Inputs in = make_inputs(base, DataKind::kHash);
  const Results expected = run_ok(base, in);
  for (const Case& c : others) {
    SCOPED_TRACE(describe(c));
    expect_same_bits(run_ok(c, in), expected);
  }
}

TEST_P(CasesOfLayouts, B72_KeysAndValuesWithDifferentStrides) {
  for (const int64_t n : {64, 100})
    for (const int64_t rows : {int64_t{1}, int64_t{64}})
      for (const Operation operation : {kForward, kBackward})
        on_every_kernel(make_case(GetParam(), operation, {2, 2, 2, rows, n, 32}), kEveryDtype,
                        [&](const Case& c) {
                          const Layout every_second = {0, 4 * n * 32, 2 * n * 32, 64, false};
                          Case k = c, v = c;
                          k.layouts[kK] = every_second;
                          v.layouts[kV] = every_second;
                          expect_layout_does_not_matter(c, {k, v});
                        });
}

TEST_P(CasesOfLayouts, B73_TransposedViews) {
  for (const Operation operation : {kForward, kBackward})
    on_every_kernel(make_case(GetParam(), operation, {2, 4, 4, 50, 50, 256}), {Dtype::kBf16},
                    [](const Case& c) {
                      Case bshd = c;
                      for (int role = 0; role < kRoleCount; ++role)
                        bshd.layouts[role] = bshd_layout(c.extents(static_cast<Role>(role)));
                      expect_layout_does_not_matter(c, {bshd});
                    });
}

TEST_P(CasesOfLayouts, B75_TransposedGradientOfTheOutput) {
  on_every_kernel(make_case(GetParam(), kBackward, {2, 4, 1, 32, 32, 128}), kEveryDtype,
                  [](const Case& c) {
                    Case transposed = c;
                    transposed.layouts[kDo] = bshd_layout(c.extents(kDo));
                    expect_layout_does_not_matter(c, {transposed});
                  });
}

TEST_P(CasesOfLayouts, B76_GradientOfTheOutputIsOneRepeatedRow) {
  // The channels are contiguous by contract: a row of ones with all strides 0.
  on_every_kernel(make_case(GetParam(), kBackward, {1, 2, 2, 5, 5, 8}, causal_mask()), kEveryDtype,
                  [](const Case& c) {
                    Inputs in = make_inputs(c, DataKind::kHash);
                    set(in.d_o, [](auto, auto, auto, auto) { return 1; });
                    Case repeated = c;
                    repeated.layouts[kDo] = Layout{0, 0, 0, 0, false};
                    expect_same_bits(run_ok(repeated, in), run_ok(c, in));
                  });
}

TEST_P(CasesOfLayouts, B77_AllMixesOfTransposedTensors) {
  const int64_t n = GetParam() == Device::kCpu ? 33 : 513;
  on_every_kernel(make_case(GetParam(), kBackward, {2, 4, 4, n, n, 64}), {Dtype::kF16},
                  [](const Case& c) {
                    std::vector<Case> mixes;
                    for (int bits = 1; bits < 8; ++bits)
                      for (const auto& roles : {std::array<Role, 3>{kQ, kK, kV}, {kDq, kDk, kDv}}) {
                        Case mix = c;
                        for (int i = 0; i < 3; ++i)
                          if (bits >> i & 1)
                            mix.layouts[roles[i]] = bshd_layout(c.extents(roles[i]));
                        mixes.push_back(mix);
                      }
                    expect_layout_does_not_matter(c, mixes);
                  });
}

TEST_P(CasesOfLayouts, B78_KeysCutFromALongerBuffer) {
  on_every_kernel(
      make_case(GetParam(), kBackward, {2, 4, 2, 40, 72, 64}), kEveryHalf, [](const Case& c) {
        Case cut = c;  // heads of 200 rows; the rows past 72 must keep their poison in dk and dv
        for (const Role role : {kK, kV, kDk, kDv})
          cut.layouts[role] = Layout{0, 2 * 200 * 64, 200 * 64, 64, false};
        expect_layout_does_not_matter(c, {cut});
      });
}

TEST_P(CasesOfLayouts, B80_RowsAndPointersOffTheAlignment) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(
        make_case(GetParam(), operation, {2, 2, 1, 33, 43, 64}), kEveryDtype, [](const Case& c) {
          Case shifted = c, odd_rows = c;
          for (int i = 0; i < kRoleCount; ++i) {
            const Extents e = c.extents(static_cast<Role>(i));
            shifted.layouts[i] = bhsd_layout(e, 1);
            odd_rows.layouts[i] =
                Layout{0, e.heads * e.rows * (e.dim + 1), e.rows * (e.dim + 1), e.dim + 1, false};
          }
          // A kernel may refuse; the library as a whole may not.
          for (Case* each : {&shifted, &odd_rows})
            if (!accepts(*each, each->kernel)) each->kernel.clear();
          const Inputs in = make_inputs(c, DataKind::kHash);
          expect_accurate(shifted, in);
          expect_accurate(odd_rows, in);
        });
}

// numpy and torch leave any number there.
TEST_P(CasesOfLayouts, StridesOfExtentsOfOneMeanNothing) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(
        make_case(GetParam(), operation, {1, 1, 1, 1, 33, 64}), kEveryDtype, [](const Case& c) {
          const Inputs in = make_inputs(c, DataKind::kNormal);
          const Results expected = run_ok(c, in);
          Call call(c, in);
          const auto scramble = [](cuflash_tensor_t& t, bool one_row) {
            if (t.data == nullptr) return;
            t.batch_stride = 7, t.head_stride = (int64_t{1} << 60) + 1;
            if (one_row) t.row_stride = 5;
          };
          for (cuflash_tensor_t* t :
               {&call.problem().q, &call.problem().o, &call.gradients().d_o, &call.gradients().dq})
            scramble(*t, true);
          for (cuflash_tensor_t* t : {&call.problem().k, &call.problem().v, &call.gradients().dk,
                                      &call.gradients().dv, &call.cache().k, &call.cache().v})
            scramble(*t, false);
          const auto status = call.launch();
          synchronize(c.device);
          const Outcome outcome = call.collect(status);
          ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
          EXPECT_EQ(outcome.damage, "");
          expect_same_bits(outcome.results, expected);
        });
}

TEST_P(CasesOfBackward, B85_StructuredDataInTwoBatches) {
  const int64_t n = GetParam() == Device::kCpu ? 48 : 256;
  on_every_kernel(make_case(GetParam(), kBackward, {1, 16, 2, n, n, 256}, causal_mask()),
                  kEveryHalf, [](const Case& one) {
                    const Inputs in = make_inputs(one, DataKind::kStructured, 3);
                    const Results expected = run_ok(one, in);
                    Case two = one;
                    two.shape.batch = 2;
                    Inputs both = in;
                    for (Tensor* t : {&both.q, &both.k, &both.v, &both.d_o, &both.o, &both.lse}) {
                      t->batch = 2;
                      const std::vector<double> copy = t->x;
                      t->x.insert(t->x.end(), copy.begin(), copy.end());
                    }
                    const Results r = run_ok(two, both);
                    const Tensor Results::*members[] = {&Results::dq, &Results::dk, &Results::dv};
                    for (const auto member : members) {
                      const std::vector<double>&got = (r.*member).x, &want = (expected.*member).x;
                      EXPECT_TRUE(std::equal(want.begin(), want.end(), got.begin()));
                      EXPECT_TRUE(std::equal(want.begin(), want.end(), got.begin() + want.size()));
                    }
                    expect_accurate(one, in);
                  });
}

TEST_P(CasesOfBackward, B86_PoisonedScratch) {
  // Every call of these tests has its workspace filled with 0xFF.
  for (const int64_t rows : {1, 65, 127})
    on_every_kernel(make_case(GetParam(), kBackward, {1, 2, 1, rows, 65, 64}), kEveryDtype,
                    [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kHash)); });
}

TEST_P(CasesOfBackward, B83_B90_RepeatedCallsGiveTheSameBits) {
  const bool cpu = GetParam() == Device::kCpu;
  Case c = make_case(GetParam(), kBackward, {2, 4, 2, cpu ? 65 : 1024, cpu ? 65 : 1024, 64},
                     causal_mask());
  c.flags = CUFLASH_PROBLEM_DETERMINISTIC;
  on_every_family(c, kEveryHalf, [&](const Case& each) {
    Call call(each, make_inputs(each, DataKind::kNormal));
    Results first;
    for (int n = 0; n < (cpu ? 5 : 50); ++n) {
      call.poison_outputs();
      const auto status = call.launch();
      synchronize(each.device);
      Outcome outcome = call.collect(status);
      ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
      if (n == 0)
        first = std::move(outcome.results);
      else
        expect_same_bits(outcome.results, first);
    }
  });
}

TEST_P(CasesOfBackward, B82_ManySmallBatches) {
  const bool cpu = GetParam() == Device::kCpu;
  const auto hashed = [](uint32_t t) {  // with a period that is no power of two
    std::vector<double> values(1000003);
    for (size_t n = 0; n < values.size(); ++n) values[n] = hash_value(n, t, 6);
    return values;
  };
  for (const int64_t len_q : {512, 2048}) {
    if (cpu && len_q > 512) continue;
    Case c = make_case(GetParam(), kForward, {cpu ? 8 : 300, 1, 1, cpu ? 100 : len_q, 128, 128});
    c.dtype = Dtype::kF16;
    BulkCall forward(c);
    c.operation = kBackward;
    BulkCall backward(c);
    for (BulkCall* call : {&forward, &backward}) {
      call->fill(kQ, hashed(1));
      call->fill(kK, hashed(2));
      call->fill(kV, hashed(3));
    }
    on_each(forward, {""}, [&] {
      for (const Role role : {kO, kLse}) backward.write(role, forward.read(role));
    });
    backward.fill(kDo, {1});
    const auto runs_again = [&] {
      const Role gradients[] = {kDq, kDk, kDv};
      std::vector<Image> first;
      for (const Role role : gradients) {
        EXPECT_TRUE(backward.is_finite(role));
        first.push_back(backward.read(role));
      }
      backward.run();
      for (size_t n = 0; n < 3; ++n) EXPECT_TRUE(backward.read(gradients[n]) == first[n]) << n;
    };
    // The longer rows are 100 GFLOP a run, too many for a plain family: the library's choice alone.
    if (len_q > 512)
      on_each(backward, {""}, runs_again);
    else
      on_every_family(backward, runs_again);
  }
}

TEST_P(CasesOfBackward, B127_NothingLeftUnwritten) {
  for (const int64_t n : {1, 65, 512, 513})
    for (const Operation operation : {kForward, kBackward}) {
      if (GetParam() == Device::kCpu && n == 512) continue;
      Case c = make_case(GetParam(), operation, {1, 1, 1, n, n, 128});
      on_every_kernel(c, {Dtype::kBf16}, [](const Case& each) {
        const Results r = run_ok(each, make_inputs(each, DataKind::kHash));
        for (const Tensor* t : {&r.o, &r.lse, &r.dq, &r.dk, &r.dv})
          for (const double value : t->x) ASSERT_TRUE(std::isfinite(value));
      });
    }
}

}  // namespace
}  // namespace cuflash_test
