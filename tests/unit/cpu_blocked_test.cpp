// The operations of the cpu family on each vector level: judged by the accuracy rule, with any number of threads, and with
// NaN where it must not be seen. Every other test of the CPU device runs on the fastest level only.
#include "cpu/blocked/kernel.hpp"

#include <cmath>
#include <cstring>

#include "common/thread_pool.hpp"
#include "core/features.hpp"
#include "support/accuracy.hpp"
#include "support/data.hpp"
#include "unit/cpu_levels.hpp"

namespace cuflash::cpu_blocked {
namespace {

namespace test = cuflash_test;
using test::DataKind;
using test::Inputs;
using test::Results;
using test::Tensor;

class CpuBlocked : public OnEveryLevel {};
CUFLASH_FOR_LEVELS(CpuBlocked);

// A dense tensor in its storage type.
class Stored {
 public:
  Stored(const Tensor& like, test::Dtype dtype)
      : dtype_(dtype),
        shape_(like.batch, like.heads, like.rows, like.dim),
        bytes_(like.x.size() * static_cast<size_t>(test::bytes_of(dtype)) + 1) {
    for (size_t n = 0; n < like.x.size(); ++n) test::store(dtype, like.x[n], at(n));
  }
  TensorView view() {
    const Tensor& t = shape_;
    return {bytes_.data(), t.heads * t.rows * t.dim, t.rows * t.dim, t.dim,
            static_cast<Dtype>(dtype_)};
  }
  RowStatsView stats() {
    return {reinterpret_cast<float*>(bytes_.data()), shape_.heads * shape_.rows, shape_.rows, 1};
  }
  Tensor read() {
    for (size_t n = 0; n < shape_.x.size(); ++n) shape_.x[n] = test::load(dtype_, at(n));
    return shape_;
  }

 private:
  void* at(size_t n) { return bytes_.data() + n * static_cast<size_t>(test::bytes_of(dtype_)); }
  test::Dtype dtype_;
  Tensor shape_;
  std::vector<char> bytes_;
};

Inputs inputs_of(const test::Problem& p, DataKind kind = DataKind::kNormal) {
  const test::Shape& s = p.shape;
  Inputs in;
  in.q = Tensor(s.batch, s.heads_q, s.len_q, s.head_dim);
  in.d_o = in.o = Tensor(s.batch, s.heads_q, s.len_q, s.dim_v());
  in.k = Tensor(s.batch, s.heads_kv, s.len_k, s.head_dim);
  in.v = Tensor(s.batch, s.heads_kv, s.len_k, s.dim_v());
  in.lse = Tensor(s.batch, s.heads_q, s.len_q, 1);
  test::fill(in.q, kind, 1, 1, 0, p.dtype);
  test::fill(in.k, kind, 2, 1, 0, p.dtype);
  test::fill(in.v, kind, 3, 1, -1, p.dtype);
  test::fill(in.d_o, kind, 4, 1, -1, p.dtype);
  if (p.bias) {
    in.bias = Tensor(s.batch, s.heads_q, s.len_q, s.len_k);
    test::fill(in.bias, kind, 5, 1, -1, p.bias->dtype);
  }
  if (p.slopes) {
    in.slopes = Tensor(1, s.heads_q, 1, 1);
    test::fill(in.slopes, kind, 6, 1, -1, p.slopes->dtype);
  }
  if (p.sinks) {
    in.sinks = Tensor(1, s.heads_q, 1, 1);
    test::fill(in.sinks, kind, 7, 1, -1, *p.sinks);
  }
  return in;
}

// The problem as the library sees it, without its C interface.
Results run(const TileOps& ops, const test::Problem& given, const Inputs& in, int threads,
            int num_splits = 0) {
  const auto nothing = [](const Tensor& like) {
    return Tensor(like.batch, like.heads, like.rows, like.dim, std::nan(""));
  };
  const bool is_backward = given.operation == test::Operation::kBackward;
  Stored q(in.q, given.dtype), k(in.k, given.dtype), v(in.v, given.dtype);
  Stored d_o(in.d_o, given.dtype), dq(nothing(in.q), given.dtype);
  Stored dk(nothing(in.k), given.dtype), dv(nothing(in.v), given.dtype);
  Stored o(is_backward ? in.o : nothing(in.o), given.dtype);
  Stored lse(is_backward ? in.lse : nothing(in.lse), test::Dtype::kF32);
  const test::Shape& s = given.shape;
  Problem p;
  p.operation = static_cast<Operation>(given.operation);
  p.dtype = static_cast<Dtype>(given.dtype);
  p.batch = s.batch, p.heads_q = s.heads_q, p.heads_kv = s.heads_kv;
  p.len_q = s.len_q, p.len_k = s.len_k, p.head_dim = s.head_dim, p.head_dim_v = s.dim_v();
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.o = o.view(), p.lse = lse.stats();
  p.d_o = d_o.view(), p.dq = dq.view(), p.dk = dk.view(), p.dv = dv.view();
  p.scale = given.scale_set ? given.scale
                            : static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  p.num_splits = num_splits;
  Stored bias(in.bias, test::Dtype::kF32), slopes(in.slopes, test::Dtype::kF32);
  Stored sinks(in.sinks, test::Dtype::kF32);
  Stored d_bias(nothing(in.bias), test::Dtype::kF32), d_sinks(nothing(in.sinks), test::Dtype::kF32);
  Features features;
  if (s.dim_v() != s.head_dim) features.used |= kOwnValueDim;
  if (given.softcap > 0) features.used |= kSoftcap;
  features.score.softcap = given.softcap;
  if (given.bias) features.used |= kBias, features.score.bias = bias.view();
  if (given.slopes) features.used |= kAlibi, features.score.slopes.data = slopes.view().data;
  if (given.sinks) features.used |= kSinks, features.sinks.data = sinks.view().data;
  if (is_backward && given.bias) features.d_bias = d_bias.view();
  if (is_backward && given.sinks) features.d_sinks.data = d_sinks.view().data;
  if (given.dropout.p > 0) features.used |= kDropout;
  features.dropout.p = given.dropout.p, features.dropout.seed = given.dropout.seed;
  p.features = &features;
  if (!given.lengths.empty()) p.lengths_k = given.lengths.data();
  const test::MaskSpec& mask = given.mask;
  p.mask.align = static_cast<Align>(mask.align);
  p.mask.offset = mask.offset;
  p.mask.offsets = mask.offsets.data();
  if (mask.window && mask.left >= 0) p.mask.left = mask.left;
  if (mask.window && mask.right >= 0) p.mask.right = mask.right;
  if (mask.causal) p.mask.right = 0;

  ThreadPool pool;
  LaunchContext context;
  context.capabilities.is_cpu = true;
  context.capabilities.cpu_threads = threads;
  context.pool = &pool;
  const Plan plan = p.operation == Operation::kForward    ? plan_forward(p, context.capabilities)
                    : p.operation == Operation::kBackward ? plan_backward(p, context.capabilities)
                                                          : plan_decode(p, context.capabilities);
  std::vector<float> workspace(plan.workspace_bytes / sizeof(float), std::nanf(""));
  context.workspace = workspace.data();
  Results results;
  if (is_backward) {
    EXPECT_EQ(backward(ops, p, context), CUFLASH_SUCCESS);
    results.dq = dq.read(), results.dk = dk.read(), results.dv = dv.read();
    results.d_bias = d_bias.read(), results.d_sinks = d_sinks.read();
    return results;
  }
  EXPECT_EQ(
      p.operation == Operation::kForward ? forward(ops, p, context) : decode(ops, p, plan, context),
      CUFLASH_SUCCESS);
  results.o = o.read(), results.lse = lse.read();
  return results;
}

test::Problem problem_of(test::Operation operation, test::Dtype dtype, const test::Shape& shape,
                         const test::MaskSpec& mask = {}) {
  test::Problem p;
  p.operation = operation;
  p.dtype = dtype;
  p.shape = shape;
  p.mask = mask;
  return p;
}

void add_forward_results(const TileOps& ops, test::Problem p, Inputs& in) {
  p.operation = test::Operation::kForward;
  Results forward = run(ops, p, in, 1);
  in.o = std::move(forward.o);
  in.lse = std::move(forward.lse);
}

void expect_same_bits(const Results& a, const Results& b) {
  const auto same = [](const Tensor& x, const Tensor& y) {
    return x.x.empty() ? y.x.empty()
                       : std::memcmp(x.x.data(), y.x.data(), x.x.size() * sizeof(double)) == 0;
  };
  EXPECT_TRUE(same(a.o, b.o) && same(a.lse, b.lse));
  EXPECT_TRUE(same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv));
  EXPECT_TRUE(same(a.d_bias, b.d_bias) && same(a.d_sinks, b.d_sinks));
}

test::MaskSpec offset_mask() {
  test::MaskSpec mask = test::window_mask(30, 40);
  mask.align = CUFLASH_ALIGN_DEVICE_OFFSETS;
  mask.offsets = {-20, 70};
  return mask;
}

// Accurate, and the same bits for any number of threads. All levels in one test: what is right is computed once for them.
TEST(CpuBlockedLevels, AccurateAndIndependentOfTheThreads) {
  const test::Shape shapes[] = {{2, 6, 2, 67, 130, 64},
                                {2, 4, 1, 3, 200, 40},
                                {2, 2, 2, 130, 33, 130},
                                {2, 3, 3, 65, 65, 1},
                                {2, 1, 1, 64, 64, 256}};
  for (const test::Shape& shape : shapes)
    for (const test::MaskSpec& mask : {test::MaskSpec(), test::causal_mask(), offset_mask()})
      for (const test::Dtype dtype : test::kAllDtypes)
        for (const auto operation :
             {test::Operation::kForward, test::Operation::kBackward, test::Operation::kDecode})
          for (const int splits : {0, 3}) {
            if (splits > 0 && operation != test::Operation::kDecode) continue;
            test::Problem p = problem_of(operation, dtype, shape, mask);
            if (operation == test::Operation::kDecode)
              p.lengths = {static_cast<int32_t>(shape.len_k),
                           static_cast<int32_t>(shape.len_k / 2)};
            SCOPED_TRACE(testing::Message()
                         << name_of(operation) << ' ' << name_of(dtype) << " Sq" << shape.len_q
                         << " Sk" << shape.len_k << " D" << shape.head_dim << " causal "
                         << mask.causal << " window " << mask.window << " splits " << splits);
            Inputs in = inputs_of(p);
            for (const TileOps* ops : levels_here()) {
              SCOPED_TRACE(ops->name);
              if (operation == test::Operation::kBackward) add_forward_results(*ops, p, in);
              const Results results = run(*ops, p, in, 1, splits);
              const test::Accuracy accuracy = judge(p, in, results);
              EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst;
              for (const int threads : {2, 7})
                expect_same_bits(run(*ops, p, in, threads, splits), results);
            }
          }
}

// What is done pair by pair between the products.
TEST_P(CpuBlocked, ModifiedScores) {
  for (const auto operation :
       {test::Operation::kForward, test::Operation::kBackward, test::Operation::kDecode})
    for (const test::MaskSpec& mask : {test::MaskSpec(), offset_mask()}) {
      test::Problem p = problem_of(operation, test::Dtype::kF32, {2, 4, 2, 67, 130, 40, 72}, mask);
      p.softcap = 2;
      p.bias.emplace();
      p.slopes.emplace();
      p.sinks = test::Dtype::kF32;
      p.dropout = {0.3f, 11, 0};
      SCOPED_TRACE(testing::Message() << name_of(operation) << " window " << mask.window);
      Inputs in = inputs_of(p);
      if (operation == test::Operation::kBackward) add_forward_results(ops(), p, in);
      const Results results = run(ops(), p, in, 1);
      const test::Accuracy accuracy = judge(p, in, results);
      EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst;
      expect_same_bits(run(ops(), p, in, 3), results);
    }
}

// Decode chooses its parts by the shape, so long caches are cut on their own.
TEST_P(CpuBlocked, PartsOfALongCache) {
  test::Problem p = problem_of(test::Operation::kDecode, test::Dtype::kF16, {1, 4, 1, 1, 5000, 64});
  const Inputs in = inputs_of(p);
  const Results results = run(ops(), p, in, 1);
  const test::Accuracy accuracy = judge(p, in, results);
  EXPECT_TRUE(accuracy.ok) << accuracy.where << ' ' << accuracy.worst;
  expect_same_bits(run(ops(), p, in, 4), results);
}

// Keys that no row sees, and rows that see no key, hold NaN or infinity: not a bit changes, though they share tiles with
// others and 0 * NaN is NaN.
TEST_P(CpuBlocked, WhatIsNotSeenMayBeAnything) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const test::Dtype dtype : test::kAllDtypes)
    for (const double garbage : {std::nan(""), infinity, -infinity}) {
      const test::Shape more_keys = {1, 4, 2, 40, 70, 40}, more_rows = {1, 4, 2, 70, 40, 40};
      for (const test::Shape& shape : {more_keys, more_rows})
        for (const auto operation : {test::Operation::kForward, test::Operation::kBackward}) {
          // Top-left: keys from 40 on are hidden; bottom-right: the first 30 rows see nothing.
          const bool keys = shape.len_k > shape.len_q;
          const test::Problem p = problem_of(
              operation, dtype, shape,
              test::causal_mask(keys ? CUFLASH_ALIGN_TOP_LEFT : CUFLASH_ALIGN_BOTTOM_RIGHT));
          SCOPED_TRACE(testing::Message() << name_of(operation) << ' ' << name_of(dtype) << ' '
                                          << garbage << (keys ? " keys" : " rows"));
          Inputs in = inputs_of(p);
          if (operation == test::Operation::kBackward) add_forward_results(ops(), p, in);
          Results expected = run(ops(), p, in, 1);
          const auto spoil = [&](Tensor& t, int64_t begin, int64_t end) {
            t.for_each([&](int64_t, int64_t, int64_t row, int64_t, double& x) {
              if (begin <= row && row < end) x = garbage;
            });
          };
          if (keys)
            for (Tensor* t : {&in.k, &in.v}) spoil(*t, 40, 70);
          else
            for (Tensor* t : {&in.q, &in.d_o, &in.o, &in.lse}) spoil(*t, 0, 30);
          expect_same_bits(run(ops(), p, in, 1), expected);
        }
    }
}

// A key with NaN reaches the rows that see it, and only those.
TEST_P(CpuBlocked, NaNReachesWhoSeesIt) {
  for (const bool in_keys : {true, false}) {
    const test::Problem p = problem_of(test::Operation::kForward, test::Dtype::kF32,
                                       {1, 2, 1, 100, 100, 24}, test::window_mask(5, 3));
    Inputs in = inputs_of(p);
    const Results before = run(ops(), p, in, 1);
    (in_keys ? in.k : in.v).at(0, 0, 50, 7) = std::nan("");
    const Results after = run(ops(), p, in, 1);
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 100; ++i)
        for (int64_t c = 0; c < 24; ++c) {
          const bool reached = p.sees(0, i, 50) && (in_keys || c == 7);
          if (reached)
            ASSERT_TRUE(std::isnan(after.o.at(0, h, i, c))) << i << ' ' << c;
          else
            ASSERT_EQ(after.o.at(0, h, i, c), before.o.at(0, h, i, c)) << i << ' ' << c;
        }
  }
}

}  // namespace
}  // namespace cuflash::cpu_blocked
