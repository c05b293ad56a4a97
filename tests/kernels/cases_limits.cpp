// Public bug reports as small problems with known answers: extents beyond the limits of a grid dimension. The rows that
// need gigabytes are in cuda/.
#include <cmath>

#include "kernels/bulk.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfLimits : public DeviceTest {
 protected:
  // q = 0, v = 1 and dO = 1: o is 1 and dv is Sq / Sk in every batch entry and head.
  static void expect_ones(const Case& c) {
    const auto len_q = static_cast<double>(c.shape.len_q);
    const auto len_k = static_cast<double>(c.shape.len_k);
    const auto zero = [](auto, auto, auto) { return 0; };
    BulkCall call(c);
    fill_with_ones(call);
    if (c.operation == kBackward) {
      call.fill(kDo, {1});
      call.fill(kO, {1});
      call.fill(kLse, {std::log(len_k)});
    }
    on_every_family(call, [&] {
      if (c.operation == kBackward) {
        call.expect_rows("dq", kDq, zero, 0, 1e-6);
        call.expect_rows("dk", kDk, zero, 0, 1e-6);
        call.expect_rows(
            "dv", kDv, [&](auto, auto, auto) { return len_q / len_k; }, 2, 1e-6);
      } else {
        call.expect_rows("o", kO, [](auto, auto, auto) { return 1; });
        call.expect_lse([&](auto, auto, auto) { return std::log(len_k); });
      }
    });
  }
};
CUFLASH_FOR_DEVICES(CasesOfLimits);

// The products of batch and heads that do not fit into 16 bits or into a grid's second dimension, and the last that does.
struct Rows {
  int64_t batch, heads_q, heads_kv;
};
constexpr Rows kManyRows[] = {
    {13107, 5, 5}, {64, 1024, 256}, {700, 100, 20}};  // 65535, 65536, 70000

// Entries first, middle and last of a batch.
Tensor some_entries(const Tensor& all) {
  const int64_t entries[] = {0, all.batch / 2, all.batch - 1};
  if (all.x.empty()) return {};
  return Tensor::from(3, all.heads, all.rows, all.dim,
                      [&](auto b, auto h, auto r, auto c) { return all.at(entries[b], h, r, c); });
}

void expect_finite(const Results& r) {
  for (const Tensor* tensor : {&r.o, &r.lse, &r.dq, &r.dk, &r.dv})
    for (const double x : tensor->x) ASSERT_TRUE(std::isfinite(x));  // outputs begin as NaN
}

TEST_P(CasesOfLimits, P20_BatchTimesHeads) {
  const int64_t head_dim = GetParam() == Device::kCpu ? 2 : 8;
  for (const Rows& rows : kManyRows)
    for (const Operation operation : {kForward, kBackward, kDecode}) {
      Case c = make_case(GetParam(), operation,
                         {rows.batch, rows.heads_q, rows.heads_kv, 2, 3, head_dim}, causal_mask());
      c.dtype = Dtype::kF16;
      if (operation == kDecode) c.num_splits = rows.batch == 700 ? 2 : 1;
      on_every_family(c, {c.dtype}, [](const Case& each) {
        const Inputs in = make_inputs(each, DataKind::kNormal);
        const Results r = run_ok(each, in);
        expect_finite(r);
        Case some = each;
        some.shape.batch = 3;
        const Inputs some_in = {some_entries(in.q),   some_entries(in.k), some_entries(in.v),
                                some_entries(in.d_o), some_entries(in.o), some_entries(in.lse)};
        const Accuracy accuracy = judge(some, some_in,
                                        {some_entries(r.o), some_entries(r.lse), some_entries(r.dq),
                                         some_entries(r.dk), some_entries(r.dv)});
        EXPECT_TRUE(accuracy.ok) << accuracy.where;
      });
    }
}

TEST_P(CasesOfLimits, P20_MergeOfManyRows) {
  for (const Rows& rows : kManyRows) {
    std::vector<Results> parts(2), some_parts(2);
    for (uint64_t n = 0; n < 2; ++n) {
      parts[n].o = Tensor(rows.batch, rows.heads_q, 1, 8);
      parts[n].lse = Tensor(rows.batch, rows.heads_q, 1, 1);
      fill(parts[n].o, DataKind::kNormal, 1, n, 0, Dtype::kBf16);
      fill(parts[n].lse, DataKind::kNormal, 2, n, 0, Dtype::kF32);
      some_parts[n].o = some_entries(parts[n].o);
      some_parts[n].lse = some_entries(parts[n].lse);
    }
    const Outcome merged = run_merge(GetParam(), Dtype::kBf16, parts);
    ASSERT_EQ(merged.status, CUFLASH_SUCCESS) << merged.message;
    expect_finite(merged.results);
    const Results expected = merge_oracle(some_parts, false);
    expect_values(
        "o", some_entries(merged.results.o),
        [&](auto b, auto h, auto i, auto d) { return expected.o.at(b, h, i, d); }, Dtype::kBf16);
  }
}

TEST_P(CasesOfLimits, B66_BatchOrHeadsOf65536) {
  const bool cpu = GetParam() == Device::kCpu;
  for (const Operation operation : {kForward, kBackward})
    for (const Shape& shape : {Shape{65536, 1, 1, cpu ? 2 : 16, cpu ? 2 : 16, cpu ? 16 : 80},
                               Shape{1, 65536, 65536, cpu ? 2 : 4, cpu ? 2 : 4, cpu ? 16 : 32}}) {
      Case c = make_case(GetParam(), operation, shape);
      c.dtype = Dtype::kBf16;
      expect_ones(c);
    }
}

// More keys than the second level of cache holds: kernels that order their tiles by heads come back to every head.
TEST_P(CasesOfLimits, MoreKeysThanL2) {
  const bool cpu = GetParam() == Device::kCpu;
  for (const Dtype dtype : kEveryHalf)
    for (const int64_t dim : {64, 128}) {
      const int64_t heads = cpu ? 4 : 50 * 128 / dim;
      Case c =
          make_case(GetParam(), kForward, {2, heads, heads, cpu ? 2 : 130, cpu ? 64 : 2048, dim});
      c.dtype = dtype;
      const auto value = [&](auto b, auto h, auto...) { return (b * heads + h) % 251; };
      BulkCall call(c);
      call.fill(kQ, {0});
      call.fill(kK, {0});
      call.fill_heads(kV, value);
      on_every_kernel(call, [&] { call.expect_rows("o", kO, value, 0); });
    }
}

TEST_P(CasesOfLimits, B67_DecodeBatchesAroundTheLimit) {
  for (const int64_t batch : {65535, 65536, 65537}) {
    Case c = make_case(GetParam(), kDecode, {batch, 1, 1, 1, 2, 8});
    c.dtype = Dtype::kF16;
    for (const int splits : {1, 2}) {
      c.num_splits = splits;
      expect_ones(c);
    }
  }
}

TEST_P(CasesOfLimits, B68_ManyQueriesOfASplitDecode) {
  Case c = make_case(GetParam(), kDecode, {1, 1, 1, 65537, 64, 64});
  if (GetParam() == Device::kCpu) c.shape = {1, 1, 1, 65537, 8, 8};
  c.dtype = Dtype::kF16;
  c.num_splits = 2;
  expect_ones(c);
}

}  // namespace
}  // namespace cuflash_test
