// A [batch, head, row, channel] tensor of doubles on the host: what the oracle reads and every result
// becomes.
#pragma once

#include <cstdint>
#include <vector>

namespace cuflash_test {

struct Tensor {
  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  std::vector<double> x;

  Tensor() = default;
  Tensor(int64_t b, int64_t h, int64_t r, int64_t d, double fill = 0)
      : batch(b), heads(h), rows(r), dim(d), x(static_cast<size_t>(b * h * r * d), fill) {}

  // f(b, h, row, channel)
  template <class F>
  static Tensor from(int64_t b, int64_t h, int64_t r, int64_t d, F f) {
    Tensor t(b, h, r, d);
    t.for_each([&](int64_t ib, int64_t ih, int64_t ir, int64_t ic, double& value) {
      value = f(ib, ih, ir, ic);
    });
    return t;
  }

  size_t index(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return static_cast<size_t>(((b * heads + h) * rows + r) * dim + c);
  }
  double& at(int64_t b, int64_t h, int64_t r, int64_t c = 0) { return x[index(b, h, r, c)]; }
  double at(int64_t b, int64_t h, int64_t r, int64_t c = 0) const { return x[index(b, h, r, c)]; }
  double* row(int64_t b, int64_t h, int64_t r) { return x.data() + index(b, h, r, 0); }
  const double* row(int64_t b, int64_t h, int64_t r) const { return x.data() + index(b, h, r, 0); }

  // f(b, h, row, channel, value&)
  template <class F>
  void for_each(F f) {
    size_t n = 0;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < dim; ++c) f(b, h, r, c, x[n++]);
  }
};

}  // namespace cuflash_test
