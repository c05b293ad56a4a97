#include "expected.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace cuflash_info {
namespace {

double dot(const double* a, const double* b, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

void add(double* sum, double factor, const double* values, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += factor * values[i];
}

// A query row: its place among all query rows, that of its first key among all keys, and its probabilities.
struct Row {
  size_t query, first_key;
  Values p;
  double lse;
};

// Calls visit(row) for each query row.
template <class Visit>
void for_each_row(const Shape& s, const Inputs& in, const std::vector<int32_t>& lengths,
                  Visit visit) {
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.len_q; ++i) {
        const int64_t length = lengths[static_cast<size_t>(b)];
        const int64_t seen =
            s.causal ? std::clamp(i + length - s.len_q + 1, int64_t{0}, length) : length;
        Row row;
        row.query = static_cast<size_t>((b * s.heads_q + h) * s.len_q + i);
        const int64_t head_kv = h / (s.heads_q / s.heads_kv);
        row.first_key = static_cast<size_t>((b * s.heads_kv + head_kv) * s.len_k);
        row.p.resize(static_cast<size_t>(seen));
        double top = -std::numeric_limits<double>::infinity();
        for (size_t j = 0; j < row.p.size(); ++j) {
          row.p[j] = scale * dot(&in.q[row.query * s.channels()],
                                 &in.k[(row.first_key + j) * s.channels()], s.channels());
          top = std::max(top, row.p[j]);
        }
        double sum = 0;
        for (double& p : row.p) sum += p = std::exp(p - top);
        for (double& p : row.p) p /= sum;
        row.lse = top + std::log(sum);
        visit(row);
      }
    }
  }
}

}  // namespace

Outputs expected_forward(const Shape& s, const Inputs& in, const std::vector<int32_t>& lengths) {
  Outputs out = {Values(s.queries() * s.channels()), Values(s.queries())};
  for_each_row(s, in, lengths, [&](const Row& row) {
    out.lse[row.query] = row.lse;
    for (size_t j = 0; j < row.p.size(); ++j)
      add(&out.o[row.query * s.channels()], row.p[j], &in.v[(row.first_key + j) * s.channels()],
          s.channels());
  });
  return out;
}

Gradients expected_backward(const Shape& s, const Inputs& in) {
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  const size_t d = s.channels();
  Gradients out = {Values(s.queries() * d), Values(s.keys() * d), Values(s.keys() * d)};
  const std::vector<int32_t> lengths(static_cast<size_t>(s.batch), static_cast<int32_t>(s.len_k));
  for_each_row(s, in, lengths, [&](const Row& row) {
    const double* d_o = &in.d_o[row.query * d];
    Values d_p(row.p.size());
    double mean = 0;
    for (size_t j = 0; j < row.p.size(); ++j) {
      d_p[j] = dot(d_o, &in.v[(row.first_key + j) * d], d);
      mean += row.p[j] * d_p[j];
    }
    for (size_t j = 0; j < row.p.size(); ++j) {
      const size_t key = (row.first_key + j) * d;
      const double d_s = scale * row.p[j] * (d_p[j] - mean);
      add(&out.dq[row.query * d], d_s, &in.k[key], d);
      add(&out.dk[key], d_s, &in.q[row.query * d], d);
      add(&out.dv[key], row.p[j], d_o, d);
    }
  });
  return out;
}

}  // namespace cuflash_info
