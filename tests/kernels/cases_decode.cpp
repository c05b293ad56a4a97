// Public bug reports as small problems with known answers: decode, splits, merging, workspace.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/bulk.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfDecode : public DeviceTest {};
CUFLASH_FOR_DEVICES(CasesOfDecode);

Inputs probe(const Case& c) {  // q = 0, v = 1
  Inputs in = zero_inputs(c);
  set(in.v, [](auto, auto, auto, auto) { return 1; });
  return in;
}

TEST_P(CasesOfDecode, B81_ImpossibleLengthsAreCut) {
  Case c = make_case(GetParam(), kDecode, {4, 2, 1, 1, 6, 64});
  c.lengths = {-5, 6, 7, 2147483647};
  on_every_kernel(c, kEveryDtype, [](const Case& each) {
    const Results r = run_ok(each, probe(each));
    expect_values(
        "o", r.o, [](auto b, auto, auto, auto) { return b > 0; }, each.dtype);
    expect_lse(r, [](auto b, auto, auto) {
      return b > 0 ? std::log(6.0) : -std::numeric_limits<double>::infinity();
    });
  });
}

TEST_P(CasesOfDecode, B108_SplitsAgree) {
  const int64_t keys = GetParam() == Device::kCpu ? 500 : 4096;
  for (const int splits : {1, 2, 3, 16, 32, 0}) {
    Case c = make_case(GetParam(), kDecode, {1, 16, 8, 1, keys, 128});
    c.num_splits = splits;
    on_every_family(c, kEveryDtype, [](const Case& each) {
      expect_accurate(each, make_inputs(each, DataKind::kHash));
    });
  }
}

TEST_P(CasesOfDecode, B110_MoreSplitsThanKeys) {
  for (const int64_t keys : {1, 2, 5, 64, 65})
    for (const int splits : {2, 16, 128}) {
      // A window of one key to the left of the last: the first parts are empty.
      Case c = make_case(GetParam(), kDecode, {2, 2, 1, 1, keys, 64}, window_mask(1, 0));
      c.num_splits = splits;
      on_every_kernel(c, kEveryDtype, [&](const Case& each) {
        const Results r = run_ok(each, probe(each));
        expect_values(
            "o", r.o, [](auto, auto, auto, auto) { return 1; }, each.dtype);
        expect_lse(r, [&](auto, auto, auto) { return std::log(keys > 1 ? 2.0 : 1.0); });
      });
    }
}

TEST_P(CasesOfDecode, B111_LogSumExpIsNatural) {
  for (const Operation operation : {kForward, kDecode})
    for (const int splits : {0, 2}) {
      if (operation == kForward && splits > 0) continue;
      Case c = make_case(GetParam(), operation, {1, 2, 1, 3, 8, 64});
      c.num_splits = splits;
      on_every_kernel(c, kEveryDtype, [](const Case& each) {
        expect_lse(run_ok(each, probe(each)), [](auto, auto, auto) { return std::log(8.0); });
      });
    }
}

// Attention over all keys is the merge of attention over parts of them.
TEST_P(CasesOfDecode, B112_MergeOfPrefixAndSuffix) {
  const int64_t prefix = GetParam() == Device::kCpu ? 700 : 3072, all = prefix + 64;
  for (const Dtype dtype : kAllDtypes) {
    Case c = make_case(GetParam(), kForward, {1, 2, 2, 3, all, 64});
    c.dtype = dtype;
    const Inputs in = make_inputs(c, DataKind::kHash);
    const auto part = [&](int64_t begin, int64_t end) {
      Case cut = c;
      cut.shape.len_k = end - begin;
      Inputs some = in;
      for (const auto member : {&Inputs::k, &Inputs::v})
        some.*member = Tensor::from(1, 2, end - begin, 64, [&](auto b, auto h, auto j, auto d) {
          return (in.*member).at(b, h, begin + j, d);
        });
      return run_ok(cut, some);
    };
    const Outcome merged = run_merge(GetParam(), dtype, {part(0, prefix), part(prefix, all)});
    ASSERT_EQ(merged.status, CUFLASH_SUCCESS) << merged.message;
    const Results reference = oracle(c, in);
    // Three roundings to the dtype instead of one.
    expect_values(
        "o", merged.results.o,
        [&](auto b, auto h, auto i, auto d) { return reference.o.at(b, h, i, d); }, dtype, 2,
        dtype == Dtype::kF32 ? 1e-6 : 2 * ulp(dtype, 0.25));
    expect_lse(merged.results, [&](auto b, auto h, auto i) { return reference.lse.at(b, h, i); });
  }
}

TEST_P(CasesOfDecode, B113_StridedOutputOfSplits) {
  Case c = make_case(GetParam(), kDecode, {1, 8, 8, 4, 1024, 64});
  if (GetParam() == Device::kCpu) c.shape.len_k = 256;
  c.num_splits = 4;
  c.layouts[kO] = bshd_layout(c.extents(kO));
  c.layouts[kLse] = bshd_layout(c.extents(kLse));
  on_every_kernel(c, kEveryDtype, [](const Case& each) {
    expect_accurate(each, make_inputs(each, DataKind::kHash));
  });
}

TEST_P(CasesOfDecode, B115_SplitsFollowTheShape) {
  const auto splits_of = [](const Shape& shape) {
    cuflash_problem_t problem;
    cuflash_problem_init(&problem, sizeof problem);
    problem.batch = shape.batch;
    problem.heads_q = shape.heads_q;
    problem.heads_kv = shape.heads_kv;
    problem.len_q = shape.len_q;
    problem.head_dim = shape.head_dim;
    problem.q.dtype = CUFLASH_F16;
    problem.q.flags = problem.o.flags = CUFLASH_TENSOR_DENSE;
    problem.target_arch = 90;
    cuflash_kv_cache_t cache;
    cuflash_kv_cache_init(&cache, sizeof cache);
    cache.k.flags = cache.v.flags = CUFLASH_TENSOR_DENSE;
    cache.max_len = shape.len_k;
    char text[16384];
    EXPECT_EQ(cuflash_decode_explain(nullptr, &problem, &cache, text, sizeof text, nullptr), 0)
        << cuflash_last_error();
    const char* found = std::strstr(text, "\"num_splits\"");
    EXPECT_NE(found, nullptr) << text;
    return found ? std::atoi(std::strpbrk(found, "0123456789")) : -1;
  };
  if (kernels_of(kDecode, Device::kCuda).empty()) GTEST_SKIP() << "built without CUDA";
  EXPECT_GT(splits_of({1, 1, 1, 1, 65536, 128}), 1);
  EXPECT_EQ(splits_of({256, 32, 32, 1, 512, 128}), 1);
}

TEST_P(CasesOfDecode, B116_TwoQueriesOverALongCache) {
  for (const int64_t keys : {512, 32768}) {
    if (GetParam() == Device::kCpu && keys > 512) continue;
    for (const int splits : {0, 16}) {
      Case c = make_case(GetParam(), kDecode, {8, 8, 1, 2, keys, 128}, causal_mask());
      if (GetParam() == Device::kCpu) c.shape.batch = 2;
      c.num_splits = splits;
      for (const Dtype dtype : kEveryHalf) {
        c.dtype = dtype;
        BulkCall call(c);
        fill_with_ones(call);
        on_every_family(call, [&] {
          call.expect_rows("o", kO, [](auto, auto, auto) { return 1; });
          call.expect_lse([&](auto, auto, auto i) { return std::log(keys - 1.0 + i); });
        });
      }
    }
  }
}

TEST_P(CasesOfDecode, B117_PartialResultsStayInFp32) {
  Case c = make_case(GetParam(), kDecode, {1, 1, 1, 1, 8192, 64});
  c.dtype = Dtype::kBf16;
  c.num_splits = 64;
  on_every_kernel(c, [](const Case& each) {
    Inputs in = zero_inputs(each);
    set(in.v, [](auto, auto, auto j, auto) {
      return round_to(Dtype::kBf16, (j % 2 ? -100 : 100) + 0.01 * (j % 7));
    });
    Case whole = each;
    whole.num_splits = 1;
    const Results exact = oracle(each, in);
    const auto error = [&](const Results& r) {
      double largest = 0;
      for (size_t n = 0; n < r.o.x.size(); ++n)
        largest = std::max(largest, std::abs(r.o.x[n] - exact.o.x[n]));
      return largest;
    };
    EXPECT_LE(error(run_ok(each, in)),
              1.5 * error(run_ok(whole, in)) + ulp(Dtype::kBf16, exact.o.x[0]) / 2 + 1e-5);
  });
}

TEST_P(CasesOfDecode, B121_WorkspaceHoldsNothingBetweenCalls) {
  const auto check = [&](Operation operation, const Shape& shape, int splits) {
    Case c = make_case(GetParam(), operation, shape);
    c.num_splits = splits;
    c.dtype = Dtype::kBf16;
    const Inputs in = make_inputs(c, DataKind::kHash);
    Call call(c, in);
    Results first;
    for (int n = 0; n < 2; ++n) {  // the second finds what the first left
      call.poison_outputs();
      const auto status = call.launch();
      synchronize(GetParam());
      Outcome outcome = call.collect(status);
      ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
      if (n == 0) first = outcome.results;
      expect_same_bits(outcome.results, first);
    }
    const Accuracy accuracy = judge(c, in, first);
    EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst << ' ' << describe(c);
  };
  for (int round = 0; round < 4; ++round) {
    check(kDecode, {round % 2 ? 64 : 1, 2, 1, 1, 100, round % 3 ? 64 : 128}, round % 2 ? 8 : 1);
    check(kBackward, {round % 2 ? 8 : 1, 2, 1, 20, 30, round % 3 ? 64 : 128}, 0);
    check(kForward, {round % 2 ? 8 : 1, 2, 1, 20, 30, round % 3 ? 64 : 128}, 0);
  }
}

TEST_P(CasesOfDecode, B145_LongContexts) {
  for (const int64_t keys : {4096, 131072, 1048576})
    for (const int splits : {1, 64}) {
      if (GetParam() == Device::kCpu && keys > 131072) continue;
      Case c = make_case(GetParam(), kDecode, {1, 1, 1, 1, keys, 32});
      c.num_splits = splits;
      for (const Dtype dtype : kEveryDtype) {
        c.dtype = dtype;
        BulkCall call(c);
        fill_with_ones(call);
        on_every_family(call, [&] {
          call.expect_rows("o", kO, [](auto, auto, auto) { return 1; });
          call.expect_lse([&](auto, auto, auto) { return std::log(keys); });
        });
      }
    }
}

}  // namespace
}  // namespace cuflash_test
