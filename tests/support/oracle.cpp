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

namespace {

int64_t entry(const std::vector<int32_t>& list, int64_t b, int64_t otherwise, int64_t most) {
  if (list.empty()) return otherwise;
  return std::min(std::max<int64_t>(list[static_cast<size_t>(b)], 0), most);
}

}  // namespace

int64_t Problem::pad_of(int64_t b) const {
  return entry(left_pad, b, 0, entry(lengths, b, shape.len_k, shape.len_k));
}
int64_t Problem::keys_of(int64_t b) const {
  return entry(lengths, b, shape.len_k, shape.len_k) - pad_of(b);
}
int64_t Problem::rows_of(int64_t b) const { return entry(lengths_q, b, shape.len_q, shape.len_q); }

int64_t Problem::centre(int64_t b, int64_t row) const {
  if (mask.align == CUFLASH_ALIGN_BOTTOM_RIGHT) return row + keys_of(b) - rows_of(b);
  if (mask.align == CUFLASH_ALIGN_OFFSET) return row + mask.offset;
  if (mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS) return row + mask.offsets[static_cast<size_t>(b)];
  return row;
}

bool Problem::sees(int64_t b, int64_t row, int64_t key) const {
  if (key >= keys_of(b)) return false;
  const int64_t c = centre(b, row);
  if (mask.causal && key > c) return false;
  if (mask.window && mask.left >= 0 && key < c - mask.left) return false;
  if (mask.window && mask.right >= 0 && key > c + mask.right) return false;
  if (!tree) return true;
  const int64_t bit = key - keys_of(b) + tree->bits;
  const int64_t first = ((tree->per_batch ? b : 0) * shape.len_q + row) * tree->bits;
  return bit < 0 || tree->shown[static_cast<size_t>(first + bit)] != 0;
}

std::array<uint32_t, 4> DropoutSpec::words(int64_t head_of_batch, int64_t row, int64_t key) const {
  const uint64_t position = offset + static_cast<uint64_t>(key) / 4;
  uint64_t x[2] = {position,
                   static_cast<uint64_t>(head_of_batch) << 32 | static_cast<uint64_t>(row)};
  uint64_t round_key = seed;
  const auto low = [](uint64_t n) { return n & 0xffffffffu; };
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = low(x[0]) * 0xD2511F53u, b = low(x[1]) * 0xCD9E8D57u;
    x[0] = low((b >> 32) ^ (x[0] >> 32) ^ low(round_key)) | low(b) << 32;
    x[1] = low((a >> 32) ^ (x[1] >> 32) ^ (round_key >> 32)) | low(a) << 32;
    round_key = low(low(round_key) + 0x9E3779B9u) | low((round_key >> 32) + 0xBB67AE85u) << 32;
  }
  return {static_cast<uint32_t>(x[0]), static_cast<uint32_t>(x[0] >> 32),
          static_cast<uint32_t>(x[1]), static_cast<uint32_t>(x[1] >> 32)};
}

bool DropoutSpec::drops(int64_t head_of_batch, int64_t row, int64_t key) const {
  if (p == 0) return false;
  return words(head_of_batch, row, key)[static_cast<size_t>(key % 4)] <
         static_cast<double>(p) * 0x1p32;
}

namespace {

// How a value is kept: fp64 throughout, or fp32 with 16-bit operands of the second products and 16-bit results.
// `unit` is the scale at which an operand is rounded.
struct Exact {
  using Real = double;
  Dtype dtype, output;
  bool keeps_subnormals = true;
  double scale(const Problem& p) const {
    return p.scale_set ? p.scale : 1 / std::sqrt(static_cast<double>(p.shape.head_dim));
  }
  double operand(double x, double) const { return x; }
  double result(double x) const { return x; }
  double result(double x, Dtype) const { return x; }
};

struct SamePrecision {
  using Real = float;
  Dtype dtype, output;
  bool keeps_subnormals = true;  // in variations, where unit is not 1
  float scale(const Problem& p) const {
    return p.scale_set ? p.scale
                       : static_cast<float>(1 / std::sqrt(static_cast<double>(p.shape.head_dim)));
  }
  float operand(float x, float unit) const {
    // What underflow loses may by luck come nearer to the truth, so there are variations that lose nothing to it.
    constexpr float kSmallestNormalOfF16 = 0x1p-14f;
    if (dtype == Dtype::kF16 && unit != 1 && keeps_subnormals && std::abs(x) < kSmallestNormalOfF16)
      return x;
    return static_cast<float>(round_to(dtype, x * unit)) / unit;
  }
  double result(float x) const { return round_to(output, x); }
  double result(float x, Dtype of) const { return round_to(of, x); }
};

// How sums of products are made: each product rounded and added, by fused multiply-adds, or as tensor cores do: those of 16
// channels summed exactly, and what is beyond fp32 cut off when they are added.
enum class Products { kRounded, kFused, kTensorCores };

template <class Real>
Real cut_off(double x) {
  const Real rounded = static_cast<Real>(x);
  return std::abs(rounded) > std::abs(x) ? std::nextafter(rounded, Real{0}) : rounded;
}

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

  // out[r] = a . row r, for begin <= r < end, summed over the channels in the order given.
  void products(const Real* a, const std::vector<int64_t>& channels, int64_t begin, int64_t end,
                Products how, Real* out) const {
    std::fill(out + begin, out + end, Real{0});
    std::vector<double> exact(how == Products::kTensorCores ? static_cast<size_t>(rows) : 0);
    for (size_t n = 0; n < channels.size(); ++n) {
      const Real factor = a[channels[n]];
      const Real* column = by_channel.data() + channels[n] * rows;
      const auto product = [&](int64_t r) { return static_cast<double>(factor) * column[r]; };
      if (how == Products::kRounded) {
        for (int64_t r = begin; r < end; ++r) out[r] += factor * column[r];
      } else if (how == Products::kFused) {
        for (int64_t r = begin; r < end; ++r) out[r] = static_cast<Real>(product(r) + out[r]);
      } else {
        for (int64_t r = begin; r < end; ++r) exact[static_cast<size_t>(r)] += product(r);
        if (n % 16 != 15 && n + 1 != channels.size()) continue;
        for (int64_t r = begin; r < end; ++r) {
          double& sum = exact[static_cast<size_t>(r)];
          out[r] = cut_off<Real>(out[r] + sum);
          sum = 0;
        }
      }
    }
  }
};

template <class Real>
void add_scaled(Real* sum, Real factor, const Real* row, int64_t dim) {
  for (int64_t c = 0; c < dim; ++c) sum[c] += factor * row[c];
}

// Of variations: what they take from elsewhere, and what they do not vary.
struct Kind {
  bool given_forward = false, keeps_subnormals = true, natural_orders = false;
};

template <class Precision>
class Attention {
  using Real = typename Precision::Real;

 public:
  Attention(const Problem& problem, const Inputs& inputs, uint64_t variation, Kind kind = {})
      : p_(problem),
        in_(inputs),
        precision_{problem.dtype, problem.output_dtype(), kind.keeps_subnormals},
        scale_(precision_.scale(problem)),
        vary_(variation != 0),
        variation_(variation),
        rows_alike_(variation % 4 == 1),
        natural_orders_(kind.natural_orders),
        forward_o_(kind.given_forward ? inputs.o : out_.o),
        forward_lse_(kind.given_forward ? inputs.lse : out_.lse),
        random_(variation),
        products_(!vary_
                      ? Products::kRounded
                      : static_cast<Products>(random_.below(problem.dtype == Dtype::kF32 ? 2 : 3))),
        fused_delta_(vary_ && random_.below(2) == 0) {}

  Results run() {
    const Shape& s = p_.shape;
    const bool backward = p_.operation == Operation::kBackward;
    out_.o = Tensor(s.batch, s.heads_q, s.len_q, s.dim_v());
    out_.lse = Tensor(s.batch, s.heads_q, s.len_q, 1);
    if (backward) {
      out_.dq = Tensor(s.batch, s.heads_q, s.len_q, s.head_dim);
      out_.dk = Tensor(s.batch, s.heads_kv, s.len_k, s.head_dim);
      out_.dv = Tensor(s.batch, s.heads_kv, s.len_k, s.dim_v());
      out_.d_bias = Tensor(in_.bias.batch, in_.bias.heads, in_.bias.rows, in_.bias.dim);
      out_.d_sinks = Tensor(in_.sinks.batch, in_.sinks.heads, in_.sinks.rows, in_.sinks.dim);
      d_bias_.assign(out_.d_bias.x.size(), 0);
      d_sinks_.assign(out_.d_sinks.x.size(), 0);
    }
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t head_kv = 0; head_kv < s.heads_kv; ++head_kv) group(b, head_kv, backward);
    for (size_t n = 0; n < d_bias_.size(); ++n)
      out_.d_bias.x[n] = precision_.result(d_bias_[n], p_.bias->dtype);
    for (size_t n = 0; n < d_sinks_.size(); ++n)
      out_.d_sinks.x[n] = precision_.result(d_sinks_[n], *p_.sinks);
    return std::move(out_);
  }

 private:
  void group(int64_t b, int64_t head_kv, bool backward) {
    const Shape& s = p_.shape;
    const Matrix<Real> k(in_.k, b, head_kv), v(in_.v, b, head_kv);
    const size_t k_size = static_cast<size_t>(s.len_k * s.head_dim),
                 v_size = static_cast<size_t>(s.len_k * s.dim_v());
    std::vector<Real> dk(backward ? k_size : 0), dv(backward ? v_size : 0);
    const int64_t group = s.heads_q / s.heads_kv;
    channels_ = order(s.head_dim);
    channels_v_ = s.dim_v() == s.head_dim ? channels_ : order(s.dim_v());
    channels_delta_ = order(s.dim_v());
    for (const int64_t head_in_group : order(group))
      for (const int64_t i : order(p_.rows_of(b))) {
        const int64_t head = head_kv * group + head_in_group;
        if (rows_alike_) random_ = Random(variation_);
        find_visible(b, head, i);
        forward_row(b, head, i, k, v);
        if (backward) backward_row(b, head, i, k, v, dk.data(), dv.data());
      }
    for (size_t n = 0; n < dk.size(); ++n) out_.dk.row(b, head_kv, 0)[n] = precision_.result(dk[n]);
    for (size_t n = 0; n < dv.size(); ++n) out_.dv.row(b, head_kv, 0)[n] = precision_.result(dv[n]);
  }

  // 0 .. n - 1 in the order of summation.
  std::vector<int64_t> order(int64_t n) {
    std::vector<int64_t> list(static_cast<size_t>(n));
    std::iota(list.begin(), list.end(), 0);
    shuffle(list);
    return list;
  }
  void shuffle(std::vector<int64_t>& list) {
    if (natural_orders_ && random_.below(2) == 0) return;
    for (size_t n = list.size(); vary_ && n > 1; --n)
      std::swap(list[n - 1], list[random_.below(static_cast<int64_t>(n))]);
  }
  Real rounding_unit() { return vary_ ? static_cast<Real>(1 + random_.uniform()) : Real{1}; }

  // The element of an array that repeats along extents of 1.
  static size_t repeated(const Tensor& t, int64_t b, int64_t h, int64_t r, int64_t c) {
    return t.index(t.batch == 1 ? 0 : b, t.heads == 1 ? 0 : h, t.rows == 1 ? 0 : r, c);
  }

  // visible_ lists the keys; begin_ and end_ bound them. A bias of -infinity hides a key.
  void find_visible(int64_t b, int64_t head, int64_t i) {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    visible_.clear();
    for (int64_t j = 0; j < p_.shape.len_k; ++j)
      if (p_.sees(b, i, j) &&
          !(p_.bias && in_.bias.x[repeated(in_.bias, b, head, i, j)] == kHidden))
        visible_.push_back(j);
    begin_ = visible_.empty() ? 0 : visible_.front();
    end_ = visible_.empty() ? 0 : visible_.back() + 1;
    shuffle(visible_);
    scores_.resize(static_cast<size_t>(p_.shape.len_k));
    d_p_.resize(scores_.size());
    slope_.assign(scores_.size(), 1);
    kept_.assign(scores_.size(), 1);
  }

  // From products to scores, with their derivatives in slope_; and what dropout makes of each probability in kept_.
  void modify_scores(int64_t b, int64_t head, int64_t i) {
    const Real cap = p_.softcap;
    for (const int64_t j : visible_) {
      Real& s = scores_[j];
      s *= scale_;
      if (cap > 0) {
        const Real x = s / cap;
        const Real u =
            std::exp(-2 * std::abs(x));  // 1 - tanh^2 has no digits left where x is large
        s = cap * std::tanh(x);
        slope_[j] = 4 * u / ((1 + u) * (1 + u));
      }
      if (p_.bias) s += static_cast<Real>(in_.bias.x[repeated(in_.bias, b, head, i, j)]);
      if (p_.slopes)
        s -= static_cast<Real>(in_.slopes.x[repeated(in_.slopes, b, head, 0, 0)]) *
             static_cast<Real>(std::abs(p_.centre(b, i) - j));
      if (p_.dropout.p > 0)
        kept_[j] = p_.dropout.drops(b * p_.shape.heads_q + head, i, j)
                       ? Real{0}
                       : 1 / (1 - static_cast<Real>(p_.dropout.p));
    }
  }

  std::vector<Real> real_row(const Tensor& t, int64_t b, int64_t h, int64_t r) const {
    return std::vector<Real>(t.row(b, h, r), t.row(b, h, r) + t.dim);
  }

  void forward_row(int64_t b, int64_t head, int64_t i, const Matrix<Real>& k,
                   const Matrix<Real>& v) {
    const std::vector<Real> q = real_row(in_.q, b, head, i);
    k.products(q.data(), channels_, begin_, end_, products_, scores_.data());
    modify_scores(b, head, i);
    const Real sink = p_.sinks ? static_cast<Real>(in_.sinks.at(0, head, 0))
                               : -std::numeric_limits<Real>::infinity();
    const bool empty = visible_.empty() && std::isinf(sink);
    Real m = sink;
    for (const int64_t j : visible_) m = std::max(m, scores_[j]);
    // As well subtracted as the maximum itself; and P may be divided by its sum before or after the product.
    if (vary_) m += static_cast<Real>(random_.uniform());
    const bool divide_last = vary_ && random_.below(2) == 0;
    const bool by_lse = vary_ && p_.operation == Operation::kDecode && random_.below(2) == 0;
    Real l = std::isinf(sink) ? 0 : std::exp(sink - m);
    // Parts of equal lengths, of which the first has the sink, merged by their LSEs: what rounding those does to the sums.
    const int64_t parts = by_lse ? int64_t{2} << random_.below(6) : 1;
    const int64_t length = std::max<int64_t>(1, (end_ - begin_ + parts - 1) / parts);
    std::vector<Real> factors(static_cast<size_t>(parts), 1);
    const auto part_of = [&](int64_t j) { return static_cast<size_t>((j - begin_) / length); };
    if (by_lse) {
      std::vector<Real> sums(static_cast<size_t>(parts));
      sums[0] = l;
      for (const int64_t j : visible_) sums[part_of(j)] += std::exp(scores_[j] - m);
      for (size_t part = 0; part < sums.size(); ++part)
        if (sums[part] > 0) factors[part] = std::exp((m + std::log(sums[part])) - m) / sums[part];
      l *= factors[0];
    }
    const auto weight_of = [&](int64_t j) {
      return std::exp(scores_[j] - m) * factors[part_of(j)];
    };
    for (const int64_t j : visible_) l += weight_of(j);
    out_.lse.at(b, head, i) = empty ? -std::numeric_limits<Real>::infinity() : m + std::log(l);
    std::vector<Real> o(static_cast<size_t>(v.dim));
    const Real unit = rounding_unit();
    for (const int64_t j : visible_) {
      const Real weight = weight_of(j) * kept_[j];
      add_scaled(o.data(), precision_.operand(divide_last ? weight : weight / l, unit), v.row(j),
                 v.dim);
    }
    for (size_t c = 0; c < o.size(); ++c)
      out_.o.row(b, head, i)[c] = precision_.result(divide_last && !empty ? o[c] / l : o[c]);
  }

  // Follows forward_row, whose scores it uses.
  void backward_row(int64_t b, int64_t head, int64_t i, const Matrix<Real>& k,
                    const Matrix<Real>& v, Real* dk, Real* dv) {
    const std::vector<Real> q = real_row(in_.q, b, head, i), d_o = real_row(in_.d_o, b, head, i);
    const std::vector<Real> o = real_row(forward_o_, b, head, i);
    const Real lse = static_cast<Real>(forward_lse_.at(b, head, i));
    Real delta = 0;
    for (const int64_t c : channels_delta_)
      delta = fused_delta_ ? static_cast<Real>(static_cast<double>(o[c]) * d_o[c] + delta)
                           : delta + o[c] * d_o[c];
    if (p_.d_lse) delta -= static_cast<Real>(in_.d_lse.at(b, head, i));
    v.products(d_o.data(), channels_v_, begin_, end_, products_, d_p_.data());
    if (p_.sinks && !std::isinf(in_.sinks.at(0, head, 0)))
      d_sinks_[static_cast<size_t>(head)] -=
          std::exp(static_cast<Real>(in_.sinks.at(0, head, 0)) - lse) * delta;
    std::vector<Real> dq(q.size());
    const Real unit_p = rounding_unit(), unit_s = rounding_unit();
    for (const int64_t j : visible_) {
      const Real weight = std::exp(scores_[j] - lse);
      const Real d_score = weight * (kept_[j] * d_p_[j] - delta);
      if (p_.bias) d_bias_[repeated(in_.bias, b, head, i, j)] += d_score;
      const Real d_s = precision_.operand(d_score * slope_[j], unit_s);
      add_scaled(dv + j * v.dim, precision_.operand(weight * kept_[j], unit_p), d_o.data(), v.dim);
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
  const uint64_t variation_;
  // Whether all rows take the same choices, as a kernel's rows do: where a batch or heads repeat one row, by stride 0,
  // its error is theirs, and an average over rows of different luck is not to be had.
  const bool rows_alike_, natural_orders_;
  Results out_;
  const Tensor &forward_o_, &forward_lse_;  // what the backward pass starts from
  Random random_;
  const Products products_;  // Q K and dO V
  const bool fused_delta_;
  std::vector<int64_t> channels_, channels_v_, channels_delta_, visible_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<Real> scores_, d_p_, slope_, kept_;
  std::vector<Real> d_bias_, d_sinks_;
};

}  // namespace

Results oracle(const Problem& problem, const Inputs& inputs) {
  return Attention<Exact>(problem, inputs, 0).run();
}

Results plain(const Problem& problem, const Inputs& inputs, uint64_t variation) {
  return Attention<SamePrecision>(problem, inputs, variation).run();
}

Results plain_with_underflow(const Problem& problem, const Inputs& inputs, uint64_t variation) {
  return Attention<SamePrecision>(problem, inputs, variation, {false, false, false}).run();
}

Results plain_in_natural_orders(const Problem& problem, const Inputs& inputs, uint64_t variation) {
  return Attention<SamePrecision>(problem, inputs, variation, {false, true, true}).run();
}

Results plain_from_given_forward(const Problem& problem, const Inputs& inputs, uint64_t variation) {
  return Attention<SamePrecision>(problem, inputs, variation, {true, true, false}).run();
}

Results merge_oracle(const std::vector<Results>& parts, bool base2) {
  const double unit = base2 ? std::log(2.0) : 1;
  Results out;
  out.o = Tensor(parts[0].o.batch, parts[0].o.heads, parts[0].o.rows, parts[0].o.dim);
  out.lse = parts[0].lse;
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
