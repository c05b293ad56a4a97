// Public bug reports as small problems with known answers: extents beyond the limits of a grid dimension. The rows that
// need gigabytes are in cuda/.
#include <cmath>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

class CasesOfLimits : public DeviceTest {
 protected:
  // q = 0, v = 1 and dO = 1: o is 1 and dv is Sq / Sk in every batch entry and head.
  void expect_ones(const Case& base) {
    on_every_kernel(base, [](const Case& c) {
      Inputs in = zero_inputs(c);
      set(in.v, [](auto, auto, auto, auto) { return 1; });
      if (c.operation == kBackward) {
        set(in.d_o, [](auto, auto, auto, auto) { return 1; });
        set(in.o, [](auto, auto, auto, auto) { return 1; });
        set(in.lse,
            [&](auto, auto, auto, auto) { return static_cast<float>(std::log(c.shape.len_k)); });
      }
      const Results r = run_ok(c, in);
      const auto zero = [](auto, auto, auto, auto) { return 0; };
      if (c.operation == kBackward) {
        expect_values("dq", r.dq, zero, c.dtype, 0, 1e-6);
        expect_values("dk", r.dk, zero, c.dtype, 0, 1e-6);
        expect_values(
            "dv", r.dv,
            [&](auto, auto, auto, auto) {
              return static_cast<double>(c.shape.len_q) / static_cast<double>(c.shape.len_k);
            },
            c.dtype, 2, 1e-6);
      } else {
        expect_values(
            "o", r.o, [](auto, auto, auto, auto) { return 1; }, c.dtype);
        expect_lse(r, [&](auto, auto, auto) { return std::log(c.shape.len_k); });
      }
    });
  }
};
CUFLASH_FOR_DEVICES(CasesOfLimits);

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
