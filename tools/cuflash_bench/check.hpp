// Whether a result of forward is right: on sampled rows in double precision, and everywhere finite.
//
// A kernel for f16 or bf16 rounds the probabilities, each by itself, and the result. The error that this makes of
// channel d is of the size of u sqrt(sum_j (p_j v_jd)^2 + o_d^2), u being half the distance of 1 to the next number: far
// less than the size of v where many keys share the weight, so that even one lost tile of keys shows.
// benchmarks/comparison/check.py has the same rule.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "points.hpp"
#include "values.hpp"

namespace cuflash_bench {

// A result that may not be timed.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// q, k and v, dense [batch, heads, row, channel].
struct Inputs {
  NormalValues q, k, v;
  explicit Inputs(Dtype dtype) : q(dtype, 1), k(dtype, 2), v(dtype, 3) {}
};

class Expected {
 public:
  Expected(const Point& point, const Inputs& inputs);

  // o: [batch, heads, len_q, head_dim] of the point's dtype, lse: [batch, heads, len_q]. Returns the worst error of a
  // channel, in units of what rounding makes; throws Wrong if one is too large.
  double check(const void* o, const std::vector<float>& lse) const;

 private:
  struct Row {
    int64_t head, q_row;  // head among those of all sequences
    std::vector<double> o, noise;
    double lse;
  };

  void add_head(const Inputs& inputs, int64_t head, const std::vector<int64_t>& q_rows);
  void check_finite(const void* o, const std::vector<float>& lse) const;
  double error_of(const Row& row, const void* o) const;
  std::string place_of(const Row& row) const;

  Point point_;
  Dtype dtype_;
  std::vector<Row> rows_;
};

}  // namespace cuflash_bench
