#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

namespace cuflash_bench {
namespace {

constexpr double kLimit = 4;  // right kernels reach about 1.5 in some thousand channels
constexpr double kLseLimit = 1e-3;
constexpr int kHeads = 4, kRows = 16;  // sampled of a point, and of each of its sampled heads
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// u; that of f32 leaves room for the sums, which are in f32 as well.
double rounding_of(Dtype dtype) {
  if (dtype == Dtype::kF32) return 0x1p-20;
  return dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-8;
}

// The first, the last and others between them, rising.
std::vector<int64_t> sample(int64_t extent, int count, std::mt19937_64* random) {
  std::set<int64_t> chosen = {0, extent - 1};
  for (int i = 2; i < count; ++i)
    chosen.insert(static_cast<int64_t>((*random)() % static_cast<uint64_t>(extent)));
  return {chosen.begin(), chosen.end()};
}

// Four sums, which the compiler can keep in one register.
double dot(const double* a, const double* b, size_t count) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (size_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

Expected::Expected(const Point& point, const Inputs& inputs)
    : point_(point), dtype_(dtype_of(point.dtype)) {
  std::mt19937_64 random(static_cast<uint64_t>(point.len_q));
  const std::vector<int64_t> q_rows = sample(point.len_q, kRows, &random);
  for (const int64_t head : sample(point.batch * point.heads, kHeads, &random))
    add_head(inputs, head, q_rows);
}

void Expected::add_head(const Inputs& inputs, int64_t head, const std::vector<int64_t>& q_rows) {
  const int64_t d = point_.head_dim;
  const auto channels = static_cast<size_t>(d);
  const int64_t batch = head / point_.heads;
  const int64_t head_kv =
      batch * point_.heads_kv + head % point_.heads / (point_.heads / point_.heads_kv);
  const std::vector<double> keys = inputs.k.range(head_kv * point_.len_k * d, point_.len_k * d);
  const std::vector<double> values = inputs.v.range(head_kv * point_.len_k * d, point_.len_k * d);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  for (const int64_t q_row : q_rows) {
    Row row = {head, q_row, std::vector<double>(channels), std::vector<double>(channels),
               -kInfinity};
    const KeyRange seen = point_.seen_by(q_row);
    const std::vector<double> q = inputs.q.range((head * point_.len_q + q_row) * d, d);
    std::vector<double> weights;
    double largest = -kInfinity, total = 0;
    for (int64_t key = seen.begin; key < seen.end; ++key) {
      weights.push_back(scale * dot(q.data(), &keys[static_cast<size_t>(key * d)], channels));
      largest = std::max(largest, weights.back());
    }
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    for (size_t j = 0; j < weights.size(); ++j) {
      const double* v = &values[(static_cast<size_t>(seen.begin) + j) * channels];
      for (size_t c = 0; c < channels; ++c) {
        const double part = weights[j] / total * v[c];
        row.o[c] += part;
        row.noise[c] += part * part;
      }
    }
    for (size_t c = 0; c < channels; ++c)
      row.noise[c] = std::sqrt(row.noise[c] + row.o[c] * row.o[c]);
    if (!seen.empty()) row.lse = largest + std::log(total);
    rows_.push_back(std::move(row));
  }
}

double Expected::check(const void* o, const std::vector<float>& lse) const {
  check_finite(o, lse);
  double worst = 0;
  for (const Row& row : rows_) {
    worst = std::max(worst, error_of(row, o));
    if (worst > kLimit)
      throw Wrong("wrong result: " + place_of(row) + ": error " + significant(worst, 3) +
                  " times what rounding makes, " + significant(kLimit, 3) + " allowed");
    const auto got =
        static_cast<double>(lse[static_cast<size_t>(row.head * point_.len_q + row.q_row)]);
    const double lse_error = got == row.lse ? 0 : std::abs(got - row.lse);  // both may be -infinity
    if (!(lse_error <= kLseLimit))
      throw Wrong("wrong LSE: " + place_of(row) + ": error " + significant(lse_error, 3) + ", " +
                  significant(kLseLimit, 3) + " allowed");
  }
  return worst;
}

// A row that sees no key has an LSE of -infinity.
void Expected::check_finite(const void* o, const std::vector<float>& lse) const {
  const int64_t channels = point_.queries() * point_.head_dim;
  for (int64_t i = 0; i < channels; ++i)
    if (is_special(load(o, i, dtype_), dtype_))
      throw Wrong("wrong result: NaN or infinity, or rows not written");
  for (int64_t q_row = 0; q_row < point_.len_q; ++q_row) {
    const bool sees_keys = !point_.seen_by(q_row).empty();
    for (int64_t head = 0; head < point_.batch * point_.heads; ++head) {
      const float value = lse[static_cast<size_t>(head * point_.len_q + q_row)];
      if (sees_keys ? !std::isfinite(value) : value != -kInfinity)
        throw Wrong("wrong LSE: NaN or infinity, or rows not written");
    }
  }
}

double Expected::error_of(const Row& row, const void* o) const {
  const int64_t first = (row.head * point_.len_q + row.q_row) * point_.head_dim;
  double worst = 0;
  for (int64_t c = 0; c < point_.head_dim; ++c) {
    const auto channel = static_cast<size_t>(c);
    const double error = std::abs(decode(load(o, first + c, dtype_), dtype_) - row.o[channel]);
    // Without noise, as in a row that sees no key, the result is exact.
    if (error > 0) worst = std::max(worst, error / (rounding_of(dtype_) * row.noise[channel]));
  }
  return worst;
}

std::string Expected::place_of(const Row& row) const {
  return "batch " + std::to_string(row.head / point_.heads) + " head " +
         std::to_string(row.head % point_.heads) + " row " + std::to_string(row.q_row);
}

}  // namespace cuflash_bench
