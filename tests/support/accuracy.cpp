#include "support/accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>

#include "support/expected.hpp"

namespace cuflash_test {
namespace {

struct Errors {
  double max = 0, sum_of_squares = 0;
  void add(double error) {
    max = std::max(max, std::fabs(error));
    sum_of_squares += error * error;
  }
  void take_larger(const Errors& other) {
    max = std::max(max, other.max);
    sum_of_squares = std::max(sum_of_squares, other.sum_of_squares);
  }
};

std::string block_name(const char* name, int64_t b, int64_t h, int64_t begin, int64_t end) {
  char text[128];
  std::snprintf(text, sizeof text, "%s[b%lld h%lld rows %lld..%lld]", name,
                static_cast<long long>(b), static_cast<long long>(h), static_cast<long long>(begin),
                static_cast<long long>(end - 1));
  return text;
}

double ratio(double error, double bound) {
  return error <= bound ? (bound > 0 ? error / bound : 0)
                        : std::max(error / bound, std::nextafter(1.0, 2.0));
}

// Calls block(first element, end element, name) for each block of rows.
template <class F>
void for_each_block(const char* name, const Tensor& t, F block) {
  for (int64_t b = 0; b < t.batch; ++b)
    for (int64_t h = 0; h < t.heads; ++h)
      for (int64_t begin = 0; begin < t.rows; begin += kBlockRows) {
        const int64_t end = std::min(begin + kBlockRows, t.rows);
        if (t.dim == 0) continue;
        const size_t first = t.index(b, h, begin, 0);
        block(first, first + static_cast<size_t>((end - begin) * t.dim),
              block_name(name, b, h, begin, end));
      }
}

struct BlockErrors {
  Errors got, plain;
  double largest = 0;  // finite |reference|
  bool legal = true;   // no NaN, infinities as in the reference
};

BlockErrors errors_of(const Tensor& got, const Tensor& reference, const Samples& plain,
                      size_t begin, size_t end) {
  BlockErrors errors;
  for (size_t n = begin; n < end; ++n) {
    if (std::isfinite(reference.x[n]) && std::isfinite(got.x[n])) {
      errors.got.add(got.x[n] - reference.x[n]);
      errors.largest = std::max(errors.largest, std::fabs(reference.x[n]));
    } else if (!(got.x[n] == reference.x[n])) {
      errors.legal = false;
    }
  }
  for (const Tensor* sample : plain) {
    Errors of_sample;
    for (size_t n = begin; n < end; ++n) {
      const double error = sample->x[n] - reference.x[n];
      if (std::isfinite(error)) of_sample.add(error);  // where plain fails there is no allowance
    }
    errors.plain.take_larger(of_sample);
  }
  return errors;
}

// What fp32 arithmetic may lose to underflow wherever in a sum it happens: weights below 2^-126 are no normal numbers, and
// the results that they alone make up have no digits that could be right. Gradients multiply a weight by dP - delta, by
// the scale and by Q or K, which is left 2^26.
constexpr double kUnderflow = 0x1p-126 * 0x1p26;

Accuracy verdict(double worst, const std::string& where) { return {worst <= 1, worst, where}; }

}  // namespace

void Accuracy::fold(const Accuracy& other) {
  ok = ok && other.ok;
  if (other.worst > worst || where.empty()) worst = other.worst, where = other.where;
}

Accuracy check_tensor(const char* name, const Tensor& got, const Tensor& reference,
                      const Samples& plain, Dtype dtype) {
  Accuracy accuracy;
  if (got.x.size() != reference.x.size())
    return verdict(std::numeric_limits<double>::infinity(), std::string(name) + ": wrong size");
  for_each_block(name, reference, [&](size_t begin, size_t end, const std::string& where) {
    const BlockErrors e = errors_of(got, reference, plain, begin, end);
    if (!e.legal)
      return accuracy.fold(
          verdict(std::numeric_limits<double>::infinity(), where + ": NaN or infinity"));
    const double underflow = e.largest > 0 ? kUnderflow : 0;
    const double unit = ulp(dtype, e.largest), count = static_cast<double>(end - begin);
    const auto rms = [&](const Errors& errors) { return std::sqrt(errors.sum_of_squares / count); };
    accuracy.fold(
        verdict(ratio(e.got.max, 2 * e.plain.max + unit / 2 + underflow), where + " max"));
    accuracy.fold(
        verdict(ratio(rms(e.got), 1.5 * rms(e.plain) + unit / 4 + underflow), where + " rms"));
  });
  return accuracy;
}

Accuracy check_lse(const Tensor& got, const Tensor& reference, const Samples& plain, Dtype dtype) {
  Accuracy accuracy;
  if (got.x.size() != reference.x.size())
    return verdict(std::numeric_limits<double>::infinity(), "lse: wrong size");
  for_each_block("lse", reference, [&](size_t begin, size_t end, const std::string& where) {
    const BlockErrors block = errors_of(got, reference, plain, begin, end);
    if (!block.legal)
      return accuracy.fold(
          verdict(std::numeric_limits<double>::infinity(), where + ": NaN or infinity"));
    for (size_t n = begin; n < end; ++n) {
      if (!std::isfinite(reference.x[n])) continue;
      const double relative = dtype == Dtype::kF32 ? 1e-6 : 1e-5;
      const double bound =
          2 * block.plain.max + relative * std::max(1.0, std::fabs(reference.x[n]));
      accuracy.fold(verdict(ratio(std::fabs(got.x[n] - reference.x[n]), bound), where));
    }
  });
  return accuracy;
}

namespace {

Accuracy judge_by(const Problem& problem, const Results& got, const Results& reference,
                  const std::vector<const Results*>& plain) {
  const auto samples = [&](const Tensor Results::*member) {
    Samples list;
    for (const Results* sample : plain) list.push_back(&(sample->*member));
    return list;
  };
  Accuracy accuracy;
  const auto add = [&](const char* name, const Tensor Results::*member, Dtype dtype) {
    accuracy.fold(check_tensor(name, got.*member, reference.*member, samples(member), dtype));
  };
  const Dtype output = problem.output_dtype();
  if (problem.operation == Operation::kBackward) {
    add("dq", &Results::dq, output);
    add("dk", &Results::dk, output);
    add("dv", &Results::dv, output);
    if (problem.bias) add("dbias", &Results::d_bias, problem.bias->dtype);
    if (problem.sinks) add("dsinks", &Results::d_sinks, *problem.sinks);
    return accuracy;
  }
  add("o", &Results::o, output);
  if (!got.lse.x.empty())
    accuracy.fold(check_lse(got.lse, reference.lse, samples(&Results::lse), problem.dtype));
  return accuracy;
}

}  // namespace

Accuracy judge(const Problem& problem, const Inputs& inputs, const Results& got) {
  // A sample of a large block tells enough, and many would take long.
  const Shape& shape = problem.shape;
  const int64_t work = shape.batch * shape.heads_q * shape.len_q * shape.len_k * shape.head_dim;
  const size_t most_samples = work > 50'000'000 ? 8 : work > 5'000'000 ? 64 : 256;
  Expected& expected = expected_of(problem, inputs);
  std::deque<Results> from_given_forward, with_underflow, in_natural_orders;
  const auto judge_by_samples = [&](size_t count) {
    std::vector<const Results*> samples;
    for (size_t n = 0; n < count; ++n) samples.push_back(&expected.plain[n]);
    for (const auto* more : {&from_given_forward, &with_underflow, &in_natural_orders})
      for (const Results& sample : *more) samples.push_back(&sample);
    return judge_by(problem, got, expected.reference, samples);
  };
  size_t count = 1;
  Accuracy accuracy = judge_by_samples(count);
  // NaN and infinities have no excuse.
  while (!accuracy.ok && std::isfinite(accuracy.worst) && count < most_samples) {
    count *= 2;
    while (expected.plain.size() < count)
      expected.plain.push_back(plain(problem, inputs, expected.plain.size()));
    while (problem.operation == Operation::kBackward && from_given_forward.size() < count)
      from_given_forward.push_back(
          plain_from_given_forward(problem, inputs, from_given_forward.size()));
    while (problem.dtype == Dtype::kF16 && with_underflow.size() < count)
      with_underflow.push_back(plain_with_underflow(problem, inputs, 1 + with_underflow.size()));
    while (in_natural_orders.size() < count)
      in_natural_orders.push_back(
          plain_in_natural_orders(problem, inputs, 1 + in_natural_orders.size()));
    accuracy = judge_by_samples(count);
  }
  return accuracy;
}

}  // namespace cuflash_test
