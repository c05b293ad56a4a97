// Sums over very many keys.
#include <cmath>

#include "kernels/bulk.hpp"

namespace cuflash_test {
namespace {

constexpr int64_t kLong = 131072;

class LongContexts : public DeviceTest {
 protected:
  // The lengths are what counts; on the CPU fewer channels save time.
  static int64_t channels(int64_t otherwise) {
    return GetParam() == Device::kCpu ? otherwise / 8 : otherwise;
  }
};
CUFLASH_FOR_DEVICES(LongContexts);

// Equal scores and values of 1: a sum that drifts shows.
TEST_P(LongContexts, P46_AMillionKeys) {
  constexpr int64_t kKeys = 1 << 20;
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const int32_t splits : {0, 1, 64}) {
      if (operation == Operation::kForward && splits > 1) continue;
      Case base = make_case(GetParam(), operation, {1, 1, 1, 1, kKeys, channels(8)});
      base.num_splits = splits;
      for (const Dtype dtype : kEveryDtype) {
        base.dtype = dtype;
        BulkCall call(base);
        fill_with_ones(call);
        on_every_family(call, [&] {
          call.expect_rows("o", kO, [](auto...) { return 1; });
          call.expect_lse([](auto...) { return std::log(static_cast<double>(kKeys)); });
        });
      }
    }
}

TEST_P(LongContexts, P46_FewRowsOverManyKeys) {
  for (const Operation operation : {Operation::kForward, Operation::kBackward, Operation::kDecode})
    on_every_family(
        make_case(GetParam(), operation, {1, 1, 1, 3, kLong, channels(32)}, causal_mask()),
        {Dtype::kF32, Dtype::kBf16},
        [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kNormal)); });
}

TEST_P(LongContexts, P46_ManyRowsOverFewKeys) {
  on_every_family(make_case(GetParam(), Operation::kBackward, {1, 1, 1, kLong, 3, channels(32)}),
                  {Dtype::kF32, Dtype::kBf16},
                  [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kNormal)); });
}

// Some rows of a causal prefill, each judged as a problem of its own.
TEST_P(LongContexts, P46_RowsOfAPrefill) {
  const int64_t length = GetParam() == Device::kCpu ? 2048 : kLong;
  on_every_family(
      make_case(GetParam(), Operation::kForward, {1, 1, 1, length, length, 64}, causal_mask()),
      kEveryHalf, [&](const Case& c) {
        const Inputs in = make_inputs(c, DataKind::kNormal);
        const Results results = run_ok(c, in);
        for (const int64_t row : {int64_t{0}, length / 2 - 1, length / 2, length - 1}) {
          Case one = c;
          one.shape.len_q = 1;
          one.mask = causal_mask(CUFLASH_ALIGN_OFFSET);
          one.mask.offset = row;
          const auto row_of = [&](const Tensor& t) {
            return Tensor::from(1, 1, 1, t.dim,
                                [&](auto, auto, auto, auto ch) { return t.at(0, 0, row, ch); });
          };
          Inputs own = in;
          own.q = row_of(in.q);
          Results got;
          got.o = row_of(results.o);
          got.lse = row_of(results.lse);
          const Accuracy accuracy = judge(one, own, got);
          EXPECT_TRUE(accuracy.ok) << "row " << row << ": " << accuracy.where << ": "
                                   << accuracy.worst << " times the allowed error";
        }
      });
}

}  // namespace
}  // namespace cuflash_test
