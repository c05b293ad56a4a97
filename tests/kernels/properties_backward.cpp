// Properties of the backward pass that hold for any data. Numbers as in cases.md.
#include <cmath>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;

class BackwardProperty : public DeviceTest {};
CUFLASH_FOR_DEVICES(BackwardProperty);

double product(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (size_t n = 0; n < a.x.size(); ++n) sum += a.x[n] * b.x[n];
  return sum;
}

double size(const Tensor& t) { return std::sqrt(product(t, t)); }

// The library's own forward and backward together: the directional derivative of sum dO * O. The rest of P24 is the
// accuracy rule on every problem of the grid.
TEST_P(BackwardProperty, P24_DirectionalDerivative) {
  for (const MaskSpec& mask : {MaskSpec(), causal_mask(), window_mask(5, 2)})
    on_every_kernel(make_case(GetParam(), kBackward, {1, 4, 2, 21, 30, 32}, mask), {Dtype::kF32},
                    [](const Case& c) {
                      Inputs in = make_inputs(c, DataKind::kHash);
                      Case forward = c;
                      forward.operation = kForward;
                      forward.kernel.clear();
                      const Results at = run_ok(forward, in);
                      in.o = at.o;
                      in.lse = at.lse;
                      const Results gradients = run_ok(c, in);
                      const double step = 1e-3;
                      const auto along = [&](double factor) {
                        Inputs moved = in;
                        Tensor* tensors[] = {&moved.q, &moved.k, &moved.v};
                        for (uint32_t t = 0; t < 3; ++t) {
                          for (size_t n = 0; n < tensors[t]->x.size(); ++n)
                            tensors[t]->x[n] += factor * step * hash_value(n, 10 + t, 2);
                          round_values(*tensors[t], c.dtype);
                        }
                        return product(run_ok(forward, moved).o, in.d_o);
                      };
                      double expected = 0;
                      const Tensor* tensors[] = {&gradients.dq, &gradients.dk, &gradients.dv};
                      for (uint32_t t = 0; t < 3; ++t)
                        for (size_t n = 0; n < tensors[t]->x.size(); ++n)
                          expected += tensors[t]->x[n] * hash_value(n, 10 + t, 2);
                      EXPECT_NEAR((along(1) - along(-1)) / (2 * step), expected,
                                  2e-2 * std::max(1.0, std::abs(expected)));
                    });
}

TEST_P(BackwardProperty, P25_Identities) {
  for (const MaskSpec& mask : {MaskSpec(), causal_mask(), window_mask(5, 2)})
    on_every_kernel(make_case(GetParam(), kBackward, {1, 4, 2, 40, 50, 64}, mask), kEveryDtype,
                    [](const Case& c) {
                      const double relative = 64 * ulp(c.dtype, 1);
                      const Inputs in = make_inputs(c, DataKind::kNormal);
                      const Results r = run_ok(c, in);
                      // Both are the derivative by the logarithm of the scale.
                      EXPECT_NEAR(product(in.q, r.dq), product(in.k, r.dk),
                                  relative * size(in.q) * size(r.dq));
                      // The weights of a row sum to one.
                      for (int h = 0; h < 2; ++h)
                        for (int d = 0; d < 64; ++d) {
                          double of_values = 0, of_outputs = 0, magnitude = 0;
                          for (int j = 0; j < 50; ++j) of_values += r.dv.at(0, h, j, d);
                          for (int head = 2 * h; head < 2 * h + 2; ++head)
                            for (int i = 0; i < 40; ++i) {
                              bool empty = true;
                              for (int j = 0; j < 50; ++j) empty = empty && !c.sees(0, i, j);
                              if (!empty) of_outputs += in.d_o.at(0, head, i, d);
                              magnitude += std::abs(in.d_o.at(0, head, i, d));
                            }
                          EXPECT_NEAR(of_values, of_outputs, relative * magnitude);
                        }
                    });
}

TEST_P(BackwardProperty, P25_EqualKeysHaveNoQueryGradient) {
  on_every_kernel(make_case(GetParam(), kBackward, {1, 2, 1, 20, 33, 64}), kEveryDtype,
                  [](const Case& c) {
                    Inputs in = make_inputs(c, DataKind::kNormal);
                    set(in.k, [](auto, auto, auto, auto d) { return d % 3 - 1; });
                    add_forward_results(c, in);
                    for (const double dq : run_ok(c, in).dq.x)
                      EXPECT_NEAR(dq, 0, 64 * ulp(c.dtype, 1));
                  });
}

TEST_P(BackwardProperty, P26_LinearInTheOutputGradient) {
  on_every_kernel(make_case(GetParam(), kBackward, {1, 2, 1, 20, 33, 64}, causal_mask()),
                  {Dtype::kF32}, [](const Case& c) {
                    const Inputs one = make_inputs(c, DataKind::kNormal, 1);
                    Inputs two = one, both = one;
                    fill(two.d_o, DataKind::kNormal, 4, 2, 0, c.dtype);
                    for (size_t n = 0; n < both.d_o.x.size(); ++n)
                      both.d_o.x[n] = round_to(c.dtype, 2 * one.d_o.x[n] - 0.5 * two.d_o.x[n]);
                    const Results a = run_ok(c, one), b = run_ok(c, two), sum = run_ok(c, both);
                    for (const auto member : {&Results::dq, &Results::dk, &Results::dv})
                      for (size_t n = 0; n < (sum.*member).x.size(); ++n)
                        EXPECT_NEAR((sum.*member).x[n],
                                    2 * (a.*member).x[n] - 0.5 * (b.*member).x[n], 1e-4);
                  });
}

}  // namespace
}  // namespace cuflash_test
