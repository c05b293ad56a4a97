// Properties of forward, decode and merge that hold for any data. Numbers as in cases.md.
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class Property : public DeviceTest {};
class MergeProperty : public DeviceTest {};
CUFLASH_FOR_DEVICES(Property);
CUFLASH_FOR_DEVICES(MergeProperty);

std::vector<MaskSpec> some_masks() {
  std::vector<MaskSpec> masks = {{},
                                 causal_mask(),
                                 causal_mask(CUFLASH_ALIGN_TOP_LEFT),
                                 window_mask(5, 0),
                                 window_mask(0, 5),
                                 window_mask(-1, 3),
                                 window_mask(70, 66)};
  MaskSpec offset = causal_mask(CUFLASH_ALIGN_OFFSET);
  offset.offset = -20;
  masks.push_back(offset);
  MaskSpec offsets = window_mask(9, 2);
  offsets.align = CUFLASH_ALIGN_DEVICE_OFFSETS;
  offsets.offsets = {-40, 90};
  masks.push_back(offsets);
  return masks;
}

bool row_is_empty(const Case& c, int64_t b, int64_t row) {
  for (int64_t key = 0; key < c.shape.len_k; ++key)
    if (c.sees(b, row, key)) return false;
  return true;
}

bool key_is_unseen(const Case& c, int64_t b, int64_t key) {
  for (int64_t row = 0; row < c.shape.len_q; ++row)
    if (c.sees(b, row, key)) return false;
  return true;
}

TEST_P(Property, P01_NothingSeenGivesZeros) {
  for (const MaskSpec& mask : some_masks())
    for (const auto& [rows, keys] : {std::pair{70, 33}, {33, 70}}) {
      const Shape shape = {2, 2, 1, rows, keys, 32};
      on_every_kernel(make_case(GetParam(), kForward, shape, mask), kEveryDtype, [](const Case& c) {
        const Results r = run_ok(c, make_inputs(c, DataKind::kNormal));
        for (int64_t b = 0; b < 2; ++b)
          for (int64_t i = 0; i < c.shape.len_q; ++i)
            for (int64_t h = 0; h < 2 && row_is_empty(c, b, i); ++h) {
              EXPECT_EQ(r.lse.at(b, h, i), -kInfinity);
              for (int d = 0; d < 32; ++d) EXPECT_EQ(r.o.at(b, h, i, d), 0);
            }
      });
      on_every_kernel(make_case(GetParam(), kBackward, shape, mask), kEveryDtype,
                      [](const Case& c) {
                        const Results r = run_ok(c, make_inputs(c, DataKind::kNormal));
                        for (int64_t b = 0; b < 2; ++b) {
                          for (int64_t i = 0; i < c.shape.len_q; ++i)
                            for (int64_t h = 0; h < 2 && row_is_empty(c, b, i); ++h)
                              for (int d = 0; d < 32; ++d) EXPECT_EQ(r.dq.at(b, h, i, d), 0);
                          for (int64_t j = 0; j < c.shape.len_k; ++j)
                            for (int d = 0; d < 32 && key_is_unseen(c, b, j); ++d) {
                              EXPECT_EQ(r.dk.at(b, 0, j, d), 0);
                              EXPECT_EQ(r.dv.at(b, 0, j, d), 0);
                            }
                        }
                      });
    }
}

Results random_part(Dtype dtype, uint64_t seed) {
  Results part{Tensor(2, 3, 5, 40), Tensor(2, 3, 5, 1), {}, {}, {}};
  fill(part.o, DataKind::kNormal, 1, seed, 0, dtype);
  fill(part.lse, DataKind::kNormal, 2, seed, 0, Dtype::kF32);
  return part;
}

TEST_P(MergeProperty, P03_CommutativeMonoid) {
  for (const bool base2 : {false, true})
    for (const Dtype dtype : kAllDtypes)
      for (const uint64_t layout : {0, 7}) {
        Results a = random_part(dtype, 1), b = random_part(dtype, 2), c = random_part(dtype, 3);
        for (size_t n = 0; n < b.lse.x.size(); n += 3) b.lse.x[n] = -kInfinity;
        for (size_t n = 0; n < c.lse.x.size(); n += 2) c.lse.x[n] = -kInfinity;
        for (size_t n = 0; n < a.lse.x.size(); n += 6) a.lse.x[n] = -kInfinity;
        const Results expected = merge_oracle({a, b, c}, base2);
        for (const auto& parts : {std::vector<Results>{a, b, c}, {c, b, a}, {b, a, c}}) {
          const Outcome merged = run_merge(GetParam(), dtype, parts, base2, layout);
          ASSERT_EQ(merged.status, CUFLASH_SUCCESS) << merged.message;
          expect_values(
              "o", merged.results.o,
              [&](auto ib, auto h, auto i, auto d) { return expected.o.at(ib, h, i, d); }, dtype, 1,
              4e-7);
          expect_lse(merged.results,
                     [&](auto ib, auto h, auto i) { return expected.lse.at(ib, h, i); });
        }
        const Outcome alone = run_merge(GetParam(), dtype, {a}, base2, layout);
        const Results of_one = merge_oracle({a}, base2);
        EXPECT_EQ(alone.results.o.x, of_one.o.x);
      }
}

TEST_P(MergeProperty, MayWriteOverAPart) {
  const Results a = random_part(Dtype::kF16, 1), b = random_part(Dtype::kF16, 2);
  const Results expected = run_merge(GetParam(), Dtype::kF16, {a, b}).results;
  const Extents all_o = {4, 3, 5, 40}, all_lse = {4, 3, 5, 1};
  Tensor o_values(4, 3, 5, 40), lse_values(4, 3, 5, 1);
  std::copy(a.o.x.begin(), a.o.x.end(), o_values.x.begin());
  std::copy(b.o.x.begin(), b.o.x.end(), o_values.x.begin() + 2 * 3 * 5 * 40);
  std::copy(a.lse.x.begin(), a.lse.x.end(), lse_values.x.begin());
  std::copy(b.lse.x.begin(), b.lse.x.end(), lse_values.x.begin() + 2 * 3 * 5);
  for (const int64_t target : {0, 1}) {
    StridedTensor o(GetParam(), Dtype::kF16, all_o, bhsd_layout(all_o));
    StridedTensor lse(GetParam(), Dtype::kF32, all_lse, bhsd_layout(all_lse));
    o.write(o_values);
    lse.write(lse_values);
    cuflash_merge_t merge;
    cuflash_merge_init(&merge, sizeof merge);
    merge.num_parts = 2;
    merge.batch = 2;
    merge.heads = 3;
    merge.len = 5;
    merge.head_dim = 40;
    merge.parts = merge.o = o.tensor();
    merge.part_stride = 2 * 3 * 5 * 40;
    merge.o.data = static_cast<uint16_t*>(o.data()) + target * merge.part_stride;
    merge.lse_parts = static_cast<const float*>(lse.data());
    merge.lse_part_stride = 2 * 3 * 5;
    merge.lse = static_cast<float*>(lse.data()) + target * merge.lse_part_stride;
    ASSERT_EQ(cuflash_merge_states(handle_of(GetParam()), &merge, nullptr), CUFLASH_SUCCESS)
        << cuflash_last_error();
    synchronize(GetParam());
    const Tensor written = o.read();
    EXPECT_TRUE(std::equal(expected.o.x.begin(), expected.o.x.end(),
                           written.x.begin() + target * merge.part_stride));
    // One element beside a part is neither exactly a part nor apart from it.
    merge.o.data = static_cast<uint16_t*>(merge.o.data) + (target ? -1 : 1);
    EXPECT_EQ(cuflash_merge_states(handle_of(GetParam()), &merge, nullptr), CUFLASH_ERROR_ALIASING);
  }
}

TEST_P(Property, P04_EmptyExtents) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    for (const Shape& shape :
         {Shape{0, 2, 2, 5, 5, 64}, Shape{2, 0, 0, 5, 5, 64}, Shape{2, 2, 2, 0, 5, 64},
          Shape{2, 2, 2, 5, 0, 64}, Shape{0, 0, 0, 0, 0, 64}})
      for (const MaskSpec& mask : {MaskSpec(), causal_mask()}) {
        const Case c = make_case(GetParam(), operation, shape, mask);
        on_every_kernel(c, kEveryDtype, [](const Case& each) {
          const Results r = run_ok(each, zero_inputs(each));
          for (const Tensor* t : {&r.o, &r.dq, &r.dk, &r.dv})
            for (const double value : t->x) EXPECT_EQ(value, 0);
          for (const double lse : r.lse.x) EXPECT_EQ(lse, -kInfinity);
        });
      }
}

// A constant added to every score of a row, by one more channel. What stays the same is the softmax; the judge is the
// oracle of the shifted problem.
TEST_P(Property, P05_Shift) {
  for (const double shift : {-1e5, -120.0, 0.0, 120.0, 1e5})
    for (const Operation operation : {kForward, kBackward, kDecode}) {
      Case c = make_case(GetParam(), operation, {1, 2, 1, 20, 70, 64}, causal_mask());
      c.scale_set = true;
      c.scale = 0.125;
      on_every_kernel(c, kEveryDtype, [&](const Case& each) {
        Inputs in = make_inputs(each, DataKind::kNormal, 3);
        const double q = 1024, k = round_to(each.dtype, shift / (0.125 * q));
        in.q.for_each([&](auto, auto, auto, auto d, double& x) {
          if (d == 63) x = q;
        });
        in.k.for_each([&](auto, auto, auto, auto d, double& x) {
          if (d == 63) x = k;
        });
        if (operation == kBackward) add_forward_results(each, in);
        expect_accurate(each, in);
      });
    }
}

TEST_P(Property, P06_FiniteStaysFinite) {
  for (const double size : {1e-30, 1e-6, 1.0, 200.0, 60000.0})
    for (const Operation operation : {kForward, kDecode})
      on_every_kernel(make_case(GetParam(), operation, {1, 2, 1, 17, 65, 64}), kEveryDtype,
                      [&](const Case& c) {
                        Inputs in = make_inputs(c, DataKind::kHash);
                        for (Tensor* t : {&in.q, &in.k, &in.v}) {
                          for (double& x : t->x) x *= size / 2;
                          round_values(*t, c.dtype);
                        }
                        const Results r = run_ok(c, in);
                        for (const Tensor* t : {&r.o, &r.lse})
                          for (const double x : t->x) ASSERT_TRUE(std::isfinite(x)) << size;
                      });
}

TEST_P(Property, P07_OneVisibleKey) {
  MaskSpec diagonal = window_mask(0, 0);
  for (const int64_t dim : {8, 64, 96})
    on_every_kernel(make_case(GetParam(), kForward, {1, 2, 2, 70, 70, dim}, diagonal), kEveryDtype,
                    [](const Case& c) {
                      const Inputs in = make_inputs(c, DataKind::kNormal);
                      const Results r = run_ok(c, in);
                      EXPECT_EQ(r.o.x, in.v.x);
                      expect_accurate(c, in);
                    });
  on_every_kernel(make_case(GetParam(), kBackward, {1, 2, 2, 70, 70, 64}, diagonal), kEveryDtype,
                  [](const Case& c) {
                    const Inputs in = make_inputs(c, DataKind::kNormal);
                    const Results r = run_ok(c, in);
                    const auto zero = [](auto, auto, auto, auto) { return 0; };
                    expect_values("dq", r.dq, zero, c.dtype, 0, 1e-3);
                    expect_values("dk", r.dk, zero, c.dtype, 0, 1e-3);
                    expect_values(
                        "dv", r.dv,
                        [&](auto b, auto h, auto i, auto d) { return in.d_o.at(b, h, i, d); },
                        c.dtype, 1);
                  });
}

// The order of the keys is that of a sum: results change by rounding alone.
TEST_P(Property, P08_KeysInAnotherOrder) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(
        make_case(GetParam(), operation, {2, 4, 2, 20, 150, 64}), kEveryDtype, [](const Case& c) {
          const Inputs in = make_inputs(c, DataKind::kNormal);
          const auto reversed = [](const Tensor& t) {
            return Tensor::from(
                t.batch, t.heads, t.rows, t.dim,
                [&](auto b, auto h, auto r, auto ch) { return t.at(b, h, t.rows - 1 - r, ch); });
          };
          Inputs turned = in;
          turned.k = reversed(in.k);
          turned.v = reversed(in.v);
          Results results = run_ok(c, turned);
          if (c.operation == kBackward) {
            results.dk = reversed(results.dk);
            results.dv = reversed(results.dv);
          }
          EXPECT_TRUE(judge(c, in, results).ok);
        });
}

TEST_P(Property, P09_Convexity) {
  for (const Operation operation : {kForward, kDecode})
    for (const bool huge : {false, true})
      on_every_kernel(
          make_case(GetParam(), operation, {1, 2, 1, 9, 130, 64}), kEveryDtype, [&](const Case& c) {
            Inputs in = make_inputs(c, DataKind::kNormal);
            // Near the largest f16; the same numbers in the other types.
            if (huge)
              set(in.v, [&](auto, auto, auto j, auto d) {
                return round_to(c.dtype, (d % 2 ? -1 : 1) * (65000.0 + j));
              });
            const Results r = run_ok(c, in);
            for (int d = 0; d < 64; ++d) {
              double low = kInfinity, high = -kInfinity;
              for (int j = 0; j < 130; ++j) {
                low = std::min(low, in.v.at(0, 0, j, d));
                high = std::max(high, in.v.at(0, 0, j, d));
              }
              const double slack = ulp(c.dtype, std::max(std::abs(low), std::abs(high)));
              for (int h = 0; h < 2; ++h)
                for (int i = 0; i < 9; ++i) {
                  EXPECT_GE(r.o.at(0, h, i, d), low - slack);
                  EXPECT_LE(r.o.at(0, h, i, d), high + slack);
                }
            }
          });
}

TEST_P(Property, P10_UniformProbe) {
  for (const MaskSpec& mask : some_masks())
    for (const Operation operation : {kForward, kDecode})
      for (const auto& [rows, keys] : {std::pair{40, 40}, {40, 150}, {150, 40}, {1, 129}})
        on_every_kernel(
            make_case(GetParam(), operation, {2, 2, 1, rows, keys, 32}, mask),
            {Dtype::kF32, Dtype::kF16}, [](const Case& c) {
              Inputs in = zero_inputs(c);
              set(in.v, [](auto, auto, auto j, auto) { return j; });
              const Results r = run_ok(c, in);
              Tensor mean(2, 1, c.shape.len_q, 1), count = mean;
              count.for_each([&](auto b, auto, auto i, auto, double& n) {
                for (int64_t j = 0; j < c.shape.len_k; ++j)
                  if (c.sees(b, i, j)) {
                    ++n;
                    mean.at(b, 0, i) += static_cast<double>(j);
                  }
                if (n > 0) mean.at(b, 0, i) /= n;
              });
              expect_values(
                  "o", r.o, [&](auto b, auto, auto i, auto) { return mean.at(b, 0, i); }, c.dtype,
                  ulps_of_means(c));
              expect_lse(r, [&](auto b, auto, auto i) { return std::log(count.at(b, 0, i)); });
            });
}

TEST_P(Property, P11_EquivalentMasks) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(
        make_case(GetParam(), operation, {1, 2, 1, 40, 70, 64}), kEveryDtype, [](const Case& c) {
          const Inputs in = make_inputs(c, DataKind::kNormal);
          const Results full = run_ok(c, in);
          for (const int64_t reach : {int64_t{70}, int64_t{INT32_MAX}, int64_t{INT64_MAX}}) {
            Case window = c;
            window.mask = window_mask(reach, reach);
            expect_same_bits(run_ok(window, in), full);
          }
          Case causal = c, top_left = c, offset = c;
          causal.mask = causal_mask();
          if (c.operation == kBackward) return;  // whose O and LSE would be other ones
          const Results expected = run_ok(causal, in);
          for (const int64_t left : {int64_t{-1}, int64_t{70}}) {
            Case window = c;
            window.mask = window_mask(left, 0);
            expect_same_bits(run_ok(window, in), expected);
          }
          offset.mask = causal_mask(CUFLASH_ALIGN_OFFSET);
          offset.mask.offset = 70 - 40;
          expect_same_bits(run_ok(offset, in), expected);
          offset.mask = causal_mask(CUFLASH_ALIGN_DEVICE_OFFSETS);
          offset.mask.offsets = {70 - 40};
          expect_same_bits(run_ok(offset, in), expected);
        });
}

TEST_P(Property, P12_UnseenKeysDoNotMatter) {
  for (const Operation operation : {kForward, kDecode})
    on_every_kernel(make_case(GetParam(), operation, {1, 1, 1, 70, 90, 64}, causal_mask()),
                    kEveryDtype, [](const Case& c) {
                      Inputs in = make_inputs(c, DataKind::kNormal);
                      Results before = run_ok(c, in);
                      for (const int64_t key : {0, 40, 63, 89}) {
                        Inputs changed = in;
                        for (int d = 0; d < 64; ++d)
                          changed.k.at(0, 0, key, d) = changed.v.at(0, 0, key, d) = 1000;
                        const Results after = run_ok(c, changed);
                        for (int64_t i = 0; i < 70; ++i) {
                          if (c.sees(0, i, key)) continue;
                          EXPECT_EQ(after.lse.at(0, 0, i), before.lse.at(0, 0, i));
                          for (int d = 0; d < 64; ++d)
                            EXPECT_EQ(after.o.at(0, 0, i, d), before.o.at(0, 0, i, d));
                        }
                      }
                    });
}

TEST_P(Property, P13_ChunksOfAPrefill) {
  for (const Dtype dtype : kAllDtypes) {
    Case whole = make_case(GetParam(), kForward, {1, 4, 2, 97, 97, 64}, causal_mask());
    whole.dtype = dtype;
    const Inputs in = make_inputs(whole, DataKind::kNormal);
    Results pieces{Tensor(1, 4, 97, 64), Tensor(1, 4, 97, 1), {}, {}, {}};
    int64_t begin = 0;
    for (const int64_t end : {1, 33, 34, 96, 97}) {
      // The chunk's rows over the keys so far; the last one over a cache with room to spare.
      Case chunk = whole;
      chunk.shape.len_q = end - begin;
      Inputs some = in;
      some.q = Tensor::from(1, 4, end - begin, 64, [&](auto b, auto h, auto i, auto d) {
        return in.q.at(b, h, begin + i, d);
      });
      if (end == 97) {
        chunk.operation = kDecode;
        chunk.lengths = {97};
      } else {
        chunk.shape.len_k = end;
        for (const auto member : {&Inputs::k, &Inputs::v})
          some.*member = Tensor::from(1, 2, end, 64, [&](auto b, auto h, auto j, auto d) {
            return (in.*member).at(b, h, j, d);
          });
      }
      const Results r = run_ok(chunk, some);
      for (int64_t h = 0; h < 4; ++h)
        for (int64_t i = begin; i < end; ++i) {
          pieces.lse.at(0, h, i) = r.lse.at(0, h, i - begin);
          std::copy_n(r.o.row(0, h, i - begin), 64, pieces.o.row(0, h, i));
        }
      begin = end;
    }
    const Accuracy accuracy = judge(whole, in, pieces);
    EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst;
  }
}

// On every kernel that takes both: between two, weights of 16 bits may round differently.
TEST_P(Property, P15_PaddedHeadDim) {
  for (const auto& [dim, padded] : {std::pair{40, 64}, {72, 80}, {96, 128}, {130, 256}})
    for (const Dtype dtype : kAllDtypes) {
      Case c = make_case(GetParam(), kForward, {1, 2, 1, 33, 65, dim}, causal_mask());
      c.dtype = dtype;
      c.scale_set = true;
      c.scale = 0.125;
      const Inputs in = make_inputs(c, DataKind::kNormal);
      Case wide = c;
      wide.shape.head_dim = padded;
      Inputs more = zero_inputs(wide);
      for (const auto member : {&Inputs::q, &Inputs::k, &Inputs::v})
        set(more.*member, [&, dim = dim](auto b, auto h, auto r, auto d) {
          return d < dim ? (in.*member).at(b, h, r, d) : 0;
        });
      int taken = 0;
      for (const std::string& kernel : accepting_kernels(wide)) {
        if (!accepts(c, kernel)) continue;
        ++taken;
        c.kernel = wide.kernel = kernel;
        SCOPED_TRACE(describe(wide));
        const Results narrow_results = run_ok(c, in);
        expect_values(
            "o", run_ok(wide, more).o,
            [&, dim = dim](auto b, auto h, auto i, auto d) {
              return d < dim ? narrow_results.o.at(b, h, i, d) : 0;
            },
            dtype, 1, 4e-7);
      }
      EXPECT_GT(taken, 0);
    }
}

// Results that lie between two numbers of the type, with weights that are exact in any.
TEST_P(Property, RoundsToNearestEven) {
  for (const Dtype dtype : kHalfDtypes) {
    const double u = ulp(dtype, 1);
    // v of two keys, or dO of two rows, and what comes out of their mean or sum.
    const double means[][3] = {{1, 1 + u, 1}, {1 + u, 1 + 2 * u, 1 + 2 * u}};
    const double sums[][3] = {
        {1, u / 2, 1}, {1 + u, u / 2, 1 + 2 * u}, {1, 0.75 * u, 1 + u}, {1, 0.25 * u, 1}};
    for (const double sign : {1.0, -1.0}) {
      for (const Operation operation : {kForward, kDecode})
        for (const auto& [first, second, mean] : means) {
          Case c = make_case(GetParam(), operation, {1, 1, 1, 1, 2, 64});
          c.dtype = dtype;
          c.num_splits = operation == kDecode ? 2 : 0;
          on_every_kernel(c, [&, first = first, second = second, mean = mean](const Case& each) {
            Inputs in = zero_inputs(each);
            set(in.v, [&](auto, auto, auto j, auto) { return sign * (j ? second : first); });
            for (const double o : run_ok(each, in).o.x) EXPECT_EQ(o, sign * mean);
          });
        }
      for (const auto& [first, second, sum] : sums) {
        Case c = make_case(GetParam(), kBackward, {1, 1, 1, 2, 1, 64});
        c.dtype = dtype;
        on_every_kernel(c, [&, first = first, second = second, sum = sum](const Case& each) {
          Inputs in = zero_inputs(each);
          set(in.d_o, [&](auto, auto, auto i, auto) { return sign * (i ? second : first); });
          for (const double dv : run_ok(each, in).dv.x) EXPECT_EQ(dv, sign * sum);
        });
      }
    }
  }
}

// Every call is guarded and its gaps are checked (see runner.hpp): all lengths around a tile.
TEST_P(Property, P16_GuardsAroundEveryTail) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    for (int64_t n = 1; n <= 66; n += n < 60 ? 3 : 1) {
      Case c = make_case(GetParam(), operation, {1, 1, 1, n, 67 - n, 24});
      c.layout_seed = static_cast<uint64_t>(n);
      on_every_kernel(c, kEveryHalf,
                      [](const Case& each) { run_ok(each, make_inputs(each, DataKind::kHash)); });
    }
}

TEST_P(Property, P17_GroupsAreRepeatedHeads) {
  for (const auto& [q, kv] : {std::pair{6, 2}, {7, 1}, {8, 4}})
    for (const Operation operation : {kForward, kBackward, kDecode})
      on_every_kernel(make_case(GetParam(), operation, {2, q, kv, 17, 40, 64}, causal_mask()),
                      kEveryDtype, [group = q / kv](const Case& c) {
                        const Inputs in = make_inputs(c, DataKind::kNormal);
                        Case repeated = c;
                        repeated.shape.heads_kv = c.shape.heads_q;
                        if (!accepts(repeated, repeated.kernel)) return;
                        Inputs more = in;
                        for (const auto member : {&Inputs::k, &Inputs::v})
                          more.*member = Tensor::from(2, c.shape.heads_q, 40, 64,
                                                      [&](auto b, auto h, auto j, auto d) {
                                                        return (in.*member).at(b, h / group, j, d);
                                                      });
                        const Results grouped = run_ok(c, in), single = run_ok(repeated, more);
                        EXPECT_EQ(grouped.o.x, single.o.x);
                        EXPECT_EQ(grouped.lse.x, single.lse.x);
                        EXPECT_EQ(grouped.dq.x, single.dq.x);
                        if (c.operation != kBackward) return;
                        for (const auto member : {&Results::dk, &Results::dv})
                          expect_values(
                              member == &Results::dk ? "dk" : "dv", grouped.*member,
                              [&](auto b, auto h, auto j, auto d) {
                                double sum = 0;
                                for (int64_t g = 0; g < group; ++g)
                                  sum += (single.*member).at(b, h * group + g, j, d);
                                return sum;
                              },
                              c.dtype, 1, static_cast<double>(group) * 4 * ulp(c.dtype, 1));
                      });
}

TEST_P(Property, P18_EveryGroupRatio) {
  for (int64_t group = 1; group <= 20; ++group)
    for (const int64_t rows : {1, 2, 17})
      for (const Operation operation : {kForward, kDecode}) {
        Case c = make_case(GetParam(), operation, {1, 2 * group, 2, rows, 9, 16});
        c.dtype = Dtype::kF16;
        on_every_kernel(c, [&](const Case& each) {
          Inputs in = zero_inputs(each);
          set(in.v, [](auto, auto h, auto, auto) { return h + 1; });
          expect_values(
              "o", run_ok(each, in).o, [&](auto, auto h, auto, auto) { return h / group + 1; },
              each.dtype, 0);
        });
      }
}

// Strides change no bit where the same kernel runs; the gaps hold NaN (P14).
TEST_P(Property, P14_P21_StridesDoNotMatter) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(make_case(GetParam(), operation, {2, 6, 2, 33, 70, 64}, causal_mask()),
                    kEveryDtype, [](const Case& c) {
                      const Inputs in = make_inputs(c, DataKind::kNormal);
                      const Results dense = run_ok(c, in);
                      for (uint64_t seed = 1; seed <= 12; ++seed) {
                        Case strided = c;
                        strided.layout_seed = seed;
                        if (!accepts(strided, strided.kernel)) continue;
                        SCOPED_TRACE(describe(strided));
                        expect_same_bits(run_ok(strided, in), dense);
                      }
                    });
}

TEST_P(Property, P22_PointersAtAnyElement) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    for (int64_t shift = 1; shift < 8; ++shift)
      for (const Dtype dtype : kAllDtypes) {
        Case c = make_case(GetParam(), operation, {2, 2, 1, 17, 40, 64});
        c.dtype = dtype;
        for (int i = 0; i < kRoleCount; ++i)
          c.layouts[i] = bhsd_layout(c.extents(static_cast<Role>(i)), (shift + i) % 8);
        expect_accurate(c, make_inputs(c, DataKind::kNormal));
      }
}

// Decode over caches of which each sequence uses another part, on a cache with room for many more.
TEST_P(Property, P28_DecodeOfALongSequenceInAnyBatch) {
  const int64_t head_dim = GetParam() == Device::kCpu ? 8 : 64;
  for (const int64_t rows : {1, 3}) {
    Case one = make_case(GetParam(), kDecode, {1, 4, 2, rows, 2500, head_dim}, causal_mask());
    one.flags = CUFLASH_PROBLEM_BATCH_INVARIANT;
    one.lengths = {2500};
    on_every_kernel(one, kEveryDtype, [](const Case& c) {
      const Inputs in = make_inputs(c, DataKind::kNormal);
      const Results alone = run_ok(c, in);
      for (const int64_t capacity : {2500, 5000})
        for (const int64_t own : {0, 2}) {  // where it stands in the batch
          Case three = c;
          three.shape.batch = 3;
          three.shape.len_k = capacity;
          three.lengths = {1000, 17, static_cast<int32_t>(capacity)};
          three.lengths[static_cast<size_t>(own)] = 2500;
          Inputs more = make_inputs(three, DataKind::kNormal, 2);
          const auto put = [&](const Tensor& from, Tensor& to) {
            for (int64_t h = 0; h < from.heads; ++h)
              for (int64_t r = 0; r < from.rows; ++r)
                for (int64_t ch = 0; ch < from.dim; ++ch)
                  to.at(own, h, r, ch) = from.at(0, h, r, ch);
          };
          put(in.q, more.q);
          put(in.k, more.k);
          put(in.v, more.v);
          const Results r = run_ok(three, more);
          for (const auto member : {&Results::o, &Results::lse}) {
            const std::vector<double>&all = (r.*member).x, &want = (alone.*member).x;
            EXPECT_TRUE(std::equal(want.begin(), want.end(),
                                   all.begin() + own * static_cast<int64_t>(want.size())));
          }
        }
    });
  }
}

TEST_P(Property, P28_BatchEntriesAreIndependent) {
  for (const Operation operation : {kForward, kBackward, kDecode}) {
    Case c = make_case(GetParam(), operation, {1, 4, 2, 33, 70, 64}, causal_mask());
    c.flags = CUFLASH_PROBLEM_BATCH_INVARIANT | CUFLASH_PROBLEM_DETERMINISTIC;
    on_every_kernel(c, kEveryDtype, [](const Case& one) {
      const Inputs in = make_inputs(one, DataKind::kNormal);
      const Results expected = run_ok(one, in);
      Case three = one;
      three.shape.batch = 3;
      Inputs more = in;
      for (Tensor* t : {&more.q, &more.k, &more.v, &more.d_o, &more.o, &more.lse}) {
        const size_t size = t->x.size();
        t->batch = 3;
        t->x.resize(3 * size);
        // The neighbours hold other numbers.
        for (size_t n = 0; n < size; ++n) {
          t->x[size + n] = t->x[n];
          t->x[n] = -t->x[size + n] / 2;
          t->x[2 * size + n] = t->x[size + n] / 4;
        }
        if (t != &more.lse) round_values(*t, one.dtype);
      }
      const Results r = run_ok(three, more);
      for (const auto member :
           {&Results::o, &Results::lse, &Results::dq, &Results::dk, &Results::dv}) {
        const std::vector<double>&all = (r.*member).x, &want = (expected.*member).x;
        EXPECT_TRUE(std::equal(want.begin(), want.end(),
                               all.begin() + static_cast<int64_t>(all.size() / 3)));
      }
    });
  }
}

// Rows that a kernel computes together: what the others see does not change the bits of one.
TEST_P(Property, P28_RowsOfATileAreIndependent) {
  on_every_kernel(make_case(GetParam(), kForward, {1, 2, 1, 65, 400, 64}, window_mask(300, 20)),
                  kEveryDtype, [](const Case& c) {
                    Inputs in = make_inputs(c, DataKind::kNormal);
                    Results before = run_ok(c, in);
                    in.q.for_each([&](auto, auto, auto row, auto, double& x) {
                      if (row % 3 != 0) x = round_to(c.dtype, 8 * x);
                    });
                    Results after = run_ok(c, in);
                    before.o.for_each([&](auto b, auto h, auto row, auto d, const double& x) {
                      if (row % 3 == 0) {
                        EXPECT_EQ(x, after.o.at(b, h, row, d)) << "row " << row;
                      }
                    });
                    before.lse.for_each([&](auto b, auto h, auto row, auto, const double& x) {
                      if (row % 3 == 0) {
                        EXPECT_EQ(x, after.lse.at(b, h, row)) << "row " << row;
                      }
                    });
                  });
}

TEST_P(Property, P33_AnyNumberOfSplits) {
  for (const int splits : {1, 2, 3, 5, 16, 63, 64, 65, 200, 1024}) {
    Case c = make_case(GetParam(), kDecode, {2, 4, 2, 2, 130, 64}, causal_mask());
    c.num_splits = splits;
    c.lengths = {130, 77};
    on_every_kernel(c, kEveryDtype, [](const Case& each) {
      expect_accurate(each, make_inputs(each, DataKind::kNormal));
    });
  }
}

TEST_P(Property, P34_MergeOfCutKeysIsTheWhole) {
  Case c = make_case(GetParam(), kForward, {2, 2, 1, 7, 100, 64});
  const Inputs in = make_inputs(c, DataKind::kNormal);
  for (const auto& cuts :
       {std::vector<int64_t>{0, 0, 100}, {0, 1, 50, 100}, {0, 37, 37, 99, 100}}) {
    std::vector<Results> parts;
    for (size_t p = 0; p + 1 < cuts.size(); ++p) {
      Case cut = c;
      cut.shape.len_k = cuts[p + 1] - cuts[p];
      Inputs some = in;
      for (const auto member : {&Inputs::k, &Inputs::v})
        some.*member = Tensor::from(2, 1, cut.shape.len_k, 64, [&](auto b, auto h, auto j, auto d) {
          return (in.*member).at(b, h, cuts[p] + j, d);
        });
      parts.push_back(run_ok(cut, some));
    }
    const Outcome merged = run_merge(GetParam(), Dtype::kF32, parts);
    ASSERT_EQ(merged.status, CUFLASH_SUCCESS) << merged.message;
    const Results reference = oracle(c, in);
    expect_values(
        "o", merged.results.o,
        [&](auto b, auto h, auto i, auto d) { return reference.o.at(b, h, i, d); }, Dtype::kF32, 4,
        1e-6);
    expect_lse(merged.results, [&](auto b, auto h, auto i) { return reference.lse.at(b, h, i); });
  }
}

TEST_P(Property, P35_WorkspaceIsExact) {
  for (const Operation operation : {kForward, kBackward, kDecode}) {
    Case c = make_case(GetParam(), operation, {2, 2, 2, 9, 600, 64});
    c.num_splits = operation == kDecode ? 3 : 0;
    on_every_kernel(c, kEveryDtype, [](const Case& each) {
      const Inputs in = make_inputs(each, DataKind::kHash);
      Call call(each, in);
      const size_t exact = call.workspace_bytes();
      if (exact > 0) {
        call.problem().workspace_size = exact - 1;
        EXPECT_EQ(call.launch(), CUFLASH_ERROR_WORKSPACE_TOO_SMALL);
        synchronize(each.device);
        EXPECT_EQ(call.collect(CUFLASH_ERROR_WORKSPACE_TOO_SMALL).damage, "");
        call.problem().workspace_size = exact;
      }
      const auto status = call.launch();
      synchronize(each.device);
      const Outcome own = call.collect(status);
      EXPECT_EQ(own.damage, "");
      call.use_pool();
      call.poison_outputs();
      const auto pool_status = call.launch();
      synchronize(each.device);
      expect_same_bits(call.collect(pool_status).results, own.results);
      // A larger problem needs no less.
      Case larger = each;
      larger.shape.batch = 3;
      larger.shape.len_q = 10;
      EXPECT_GE(Call(larger, make_inputs(larger, DataKind::kHash)).workspace_bytes(), exact);
    });
  }
}

TEST_P(Property, P40_RepeatedCallsWithOtherMemory) {
  for (const Operation operation : {kForward, kBackward, kDecode})
    on_every_kernel(make_case(GetParam(), operation, {2, 4, 2, 33, 129, 80}, causal_mask()),
                    kEveryDtype, [](const Case& c) {
                      const Inputs in = make_inputs(c, DataKind::kNormal);
                      const Results first = run_ok(c, in);
                      for (size_t n = 1; n < 6; ++n) {
                        const Buffer between(c.device, n * 4096 - 300);
                        expect_same_bits(run_ok(c, in), first);
                      }
                    });
}

}  // namespace
}  // namespace cuflash_test
