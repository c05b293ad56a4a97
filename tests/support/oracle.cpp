#include "support/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/data.hpp"

namespace cuflash_test {

const char* name_of(Operation operation) {
  return operation == Operation::kForward    ? "forward"
         : operation == Operation::kBackward ? "backward"
                                             : "decode";
}

MaskSpec causal_mask(int32_t align) {
  MaskSpec mask;
  mask.causal = true;
  mask.align = align;
  return mask;
}

MaskSpec window_mask(int64_t left, int64_t right) {
  MaskSpec mask;
  mask.window = true;
  mask.left = left;
  mask.right = right;
  return mask;
}

int64_t Problem::keys_of(int64_t b) const {
  if (lengths.empty()) return shape.len_k;
  return std::min(std::max<int64_t>(lengths[static_cast<size_t>(b)], 0), shape.len_k);
}

bool Problem::sees(int64_t b, int64_t row, int64_t key) const {
  const int64_t keys = keys_of(b);
  if (key >= keys) return false;
  int64_t centre = row;
  if (mask.align == CUFLASH_ALIGN_BOTTOM_RIGHT) centre += keys - shape.len_q;
  if (mask.align == CUFLASH_ALIGN_OFFSET) centre += mask.offset;
  if (mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS) centre += mask.offsets[static_cast<size_t>(b)];
  if (mask.causal && key > centre) return false;
  if (mask.window && mask.left >= 0 && key < centre - mask.left) return false;
  if (mask.window && mask.right >= 0 && key > centre + mask.right) return false;
  return true;
}

namespace {

// How a value is kept: fp64 throughout, or fp32 with 16-bit operands of the second products and 16-bit results.
// `unit` is the scale at which an operand is rounded.
struct Exact {
  using Real = double;
  Dtype dtype;
  double scale(const Problem& p) const {
    return p.scale_set ? p.scale : 1 / std::sqrt(static_cast<double>(p.shape.head_dim));
  }
  double operand(double x, double) const { return x; }
  double result(double x) const { return x; }
};

struct SamePrecision {
  using Real = float;
  Dtype dtype;
  float scale(const Problem& p) const {
    return p.scale_set ? p.scale
                       : static_cast<float>(1 / std::sqrt(static_cast<double>(p.shape.head_dim)));
  }
  float operand(float x, float unit) const {
    return static_cast<float>(round_to(dtype, x * unit)) / unit;
  }
  double result(float x) const { return round_to(dtype, x); }
};

// One (batch, key/value head): rows as [row][channel] and, for products along the channels, as
// [channel][row], so that inner loops run along memory and each sum keeps its natural order.
template <class Real>
struct Matrix {
  int64_t rows, dim;
  std::vector<Real> by_row, by_channel;

  Matrix(const Tensor& t, int64_t b, int64_t h)
      : rows(t.rows), dim(t.dim), by_row(static_cast<size_t>(t.rows * t.dim)), by_channel(by_row) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < dim; ++c) {
        const Real value = static_cast<Real>(t.at(b, h, r, c));
        by_row[static_cast<size_t>(r * dim + c)] = value;
        by_channel[static_cast<size_t>(c * rows + r)] = value;
      }
  }
  const Real* row(int64_t r) const { return by_row.data() + r * dim; }

  // out[r] = a . row r, for begin <= r < end, summed over the channels in the order given
  void products(const Real* a, const std::vector<int64_t>& channels, int64_t begin, int64_t end,
                Real* out) const {
    std::fill(out + begin, out + end, Real{0});
    for (const int64_t c : channels) {
      const Real factor = a[c];
      const Real* column = by_channel.data() + c * rows;
      for (int64_t r = begin; r < end; ++r) out[r] += factor * column[r];
    }
  }
};

template <class Real>
void add_scaled(Real* sum, Real factor, const Real* row, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) sum[c] += factor * row[c];
}

template <class Precision>
class Attention {
  using Real = typename Precision::Real;

 public:
  Attention(const Problem& problem, const Inputs& inputs, uint64_t variation)
      : p_(problem),
        in_(inputs),
        precision_{problem.dtype},
        scale_(precision_.scale(problem)),
        vary_(variation != 0),
        random_(variation) {}

  Results run() {
    const Shape& s = p_.shape;
    const bool backward = p_.operation == Operation::kBackward;
    out_.o = Tensor(s.batch, s.heads_q, s.len_q, s.head_dim);
    out_.lse = Tensor(s.batch, s.heads_q, s.len_q, 1);
    if (backward) {
      out_.dq = out_.o;
      out_.dk = Tensor(s.batch, s.heads_kv, s.len_k, s.head_dim);
      out_.dv = out_.dk;
    }
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t head_kv = 0; head_kv < s.heads_kv; ++head_kv) group(b, head_kv, backward);
    return std::move(out_);
  }

 private:
  void group(int64_t b, int64_t head_kv, bool backward) {
    const Shape& s = p_.shape;
    const Matrix<Real> k(in_.k, b, head_kv), v(in_.v, b, head_kv);
    const size_t kv_size = static_cast<size_t>(s.len_k * s.head_dim);
    std::vector<Real> dk(backward ? kv_size : 0), dv(dk);
    const int64_t group = s.heads_q / s.heads_kv;
    channels_ = order(s.head_dim);
    for (const int64_t head_in_group : order(group))
      for (const int64_t i : order(s.len_q)) {
        const int64_t head = head_kv * group + head_in_group;
        find_visible(b, i);
        forward_row(b, head, i, k, v);
        if (backward) backward_row(b, head, i, k, v, dk.data(), dv.data());
      }
    for (size_t n = 0; backward && n < kv_size; ++n) {
      out_.dk.row(b, head_kv, 0)[n] = precision_.result(dk[n]);
      out_.dv.row(b, head_kv, 0)[n] = precision_.result(dv[n]);
    }
  }

  // 0 .. n - 1 in the order of summation.
  std::vector<int64_t> order(int64_t n) {
    std::vector<int64_t> list(static_cast<size_t>(n));
    std::iota(list.begin(), list.end(), 0);
    shuffle(list);
    return list;
  }
  void shuffle(std::vector<int64_t>& list) {
    for (size_t n = list.size(); vary_ && n > 1; --n)
      std::swap(list[n - 1], list[random_.below(static_cast<int64_t>(n))]);
  }
  Real rounding_unit() { return vary_ ? static_cast<Real>(1 + random_.uniform()) : Real{1}; }

  // visible_ lists the keys; begin_ and end_ bound them.
  void find_visible(int64_t b, int64_t i) {
    visible_.clear();
    for (int64_t j = 0; j < p_.shape.len_k; ++j)
      if (p_.sees(b, i, j)) visible_.push_back(j);
    begin_ = visible_.empty() ? 0 : visible_.front();
    end_ = visible_.empty() ? 0 : visible_.back() + 1;
    shuffle(visible_);
    scores_.resize(static_cast<size_t>(p_.shape.len_k));
    d_p_.resize(scores_.size());
  }

  std::vector<Real> real_row(const Tensor& t, int64_t b, int64_t h, int64_t r) const {
    return std::vector<Real>(t.row(b, h, r), t.row(b, h, r) + t.dim);
  }

  void forward_row(int64_t b, int64_t head, int64_t i, const Matrix<Real>& k,
                   const Matrix<Real>& v) {
    const std::vector<Real> q = real_row(in_.q, b, head, i);
    k.products(q.data(), channels_, begin_, end_, scores_.data());
    Real m = -std::numeric_limits<Real>::infinity();
    for (const int64_t j : visible_) m = std::max(m, scores_[j] *= scale_);
    // As well subtracted as the maximum itself; and P may be divided by its sum before or after the product.
    if (vary_) m += static_cast<Real>(random_.uniform());
    const bool divide_last = vary_ && random_.below(2) == 0;
    Real l = 0;
    for (const int64_t j : visible_) l += std::exp(scores_[j] - m);
    lse_ = visible_.empty() ? m : m + std::log(l);
    std::vector<Real> o(q.size());
    const Real unit = rounding_unit();
    for (const int64_t j : visible_) {
      const Real weight = std::exp(scores_[j] - m);
      add_scaled(o.data(), precision_.operand(divide_last ? weight : weight / l, unit), v.row(j),
                 v.dim);
    }
    for (size_t c = 0; c < o.size(); ++c)
      out_.o.row(b, head, i)[c] =
          precision_.result(divide_last && !visible_.empty() ? o[c] / l : o[c]);
    out_.lse.at(b, head, i) = lse_;
  }

  // Follows forward_row, whose scores and LSE it uses.
  void backward_row(int64_t b, int64_t head, int64_t i, const Matrix<Real>& k,
                    const Matrix<Real>& v, Real* dk, Real* dv) {
    const std::vector<Real> q = real_row(in_.q, b, head, i), d_o = real_row(in_.d_o, b, head, i);
    const std::vector<Real> o = real_row(out_.o, b, head, i);
    Real delta = 0;
    for (size_t c = 0; c < o.size(); ++c) delta += o[c] * d_o[c];
    v.products(d_o.data(), channels_, begin_, end_, d_p_.data());
    std::vector<Real> dq(q.size());
    const Real unit_p = rounding_unit(), unit_s = rounding_unit();
    for (const int64_t j : visible_) {
      const Real weight = std::exp(scores_[j] - lse_);
      const Real d_s = precision_.operand(weight * (d_p_[j] - delta), unit_s);
      add_scaled(dv + j * v.dim, precision_.operand(weight, unit_p), d_o.data(), v.dim);
      add_scaled(dq.data(), d_s * scale_, k.row(j), k.dim);
      add_scaled(dk + j * k.dim, d_s * scale_, q.data(), k.dim);
    }
    for (size_t c = 0; c < dq.size(); ++c) out_.dq.row(b, head, i)[c] = precision_.result(dq[c]);
  }

  const Problem& p_;
  const Inputs& in_;
  const Precision precision_;
  const Real scale_;
  const bool vary_;
  Random random_;
  Results out_;
  std::vector<int64_t> channels_, visible_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Real> scores_, d_p_;
  Real lse_ = 0;
};

}  // namespace

Results oracle(const Problem& problem, const Inputs& inputs) {
  return Attention<Exact>(problem, inputs, 0).run();
}

Results plain(const Problem& problem, const Inputs& inputs, uint64_t variation) {
  return Attention<SamePrecision>(problem, inputs, variation).run();
}

Results merge_oracle(const std::vector<Results>& parts, bool base2) {
  const double unit = base2 ? std::log(2.0) : 1;
  Results out{Tensor(parts[0].o.batch, parts[0].o.heads, parts[0].o.rows, parts[0].o.dim),
              parts[0].lse,
              {},
              {},
              {}};
  out.lse.for_each([&](int64_t b, int64_t h, int64_t r, int64_t, double& lse) {
    double m = -std::numeric_limits<double>::infinity(), l = 0;
    for (const Results& part : parts) m = std::max(m, part.lse.at(b, h, r) * unit);
    lse = m;
    if (std::isinf(m)) return;
    for (const Results& part : parts) l += std::exp(part.lse.at(b, h, r) * unit - m);
    for (const Results& part : parts) {
      const double weight = std::exp(part.lse.at(b, h, r) * unit - m) / l;
      if (weight > 0) add_scaled(out.o.row(b, h, r), weight, part.o.row(b, h, r), part.o.dim);
    }
    lse = (m + std::log(l)) / unit;
  });
  return out;
}

}  // namespace cuflash_test
