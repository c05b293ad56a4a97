#include "selftest.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "expected.hpp"
#include "memory.hpp"

namespace cuflash_info {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rows of 64 elements may be read 16 bytes at a time, those of 100 in 16 bits may not.
constexpr int64_t kHeadDims[] = {64, 100};

struct Format {
  size_t bytes;
  int mantissa_bits;
  // Of the largest expected value or of 1, whichever is larger: 8 roundings to the 16-bit types; the sums of fp32
  // round more often.
  double allowed;
};

Format format_of(int32_t dtype) {
  if (dtype == CUFLASH_F32) return {4, 23, 1e-5};
  if (dtype == CUFLASH_F16) return {2, 10, 0x1p-8};
  return {2, 7, 0x1p-5};
}

// ---- elements -----------------------------------------------------------------------------------------

// Multiples of 1/16 from -2 to 2, which every dtype holds exactly.
Values random_values(std::mt19937* generator, size_t count) {
  Values values(count);
  for (double& value : values) value = (static_cast<int>((*generator)() % 65) - 32) / 16.0;
  return values;
}

// Of a value that the dtype holds exactly and as a normal number, or 0.
uint32_t bits_of(double value, int32_t dtype) {
  const auto single = static_cast<float>(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &single, sizeof bits);
  if (dtype == CUFLASH_F32) return bits;
  if (dtype == CUFLASH_BF16 || value == 0) return bits >> 16;
  const uint32_t exponent = ((bits >> 23) & 0xff) - 127 + 15;
  return bits >> 31 << 15 | exponent << 10 | (bits >> 13 & 0x3ff);
}

double value_of(uint32_t bits, int32_t dtype) {
  if (dtype != CUFLASH_F16) {
    if (dtype == CUFLASH_BF16) bits <<= 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(0x400 + fraction, exponent - 15 - 10);
  if (exponent == 0x1f)
    magnitude = fraction == 0 ? kInfinity : std::numeric_limits<double>::quiet_NaN();
  return bits >> 15 != 0 ? -magnitude : magnitude;
}

// Infinity where a value is not a number.
double difference(const Values& got, const Values& expected) {
  double error = 0, largest = 1;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(got[i])) return kInfinity;
    error = std::max(error, std::abs(got[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return error / largest;
}

// ---- the operations -----------------------------------------------------------------------------------

// One dtype and head dim on a device. Each operation returns its error.
class Trial {
 public:
  Trial(const Target& target, Memory* memory, int32_t dtype, int64_t head_dim)
      : target_(target), memory_(*memory), dtype_(dtype), shape_{2, 4, 2, 37, 61, head_dim, true} {
    std::mt19937 generator(1);
    const size_t queries = shape_.queries() * shape_.channels();
    const size_t keys = shape_.keys() * shape_.channels();
    in_ = {random_values(&generator, queries), random_values(&generator, keys),
           random_values(&generator, keys), random_values(&generator, queries)};
    q_ = input(in_.q);
    k_ = input(in_.k);
    v_ = input(in_.v);
  }

  double forward() {
    const cuflash_problem_t problem = run_forward();
    const Outputs expected = expected_forward(shape_, in_, full_lengths());
    return std::max(difference(read(problem.o.data, expected.o.size(), dtype_), expected.o),
                    difference(read(problem.lse, expected.lse.size(), CUFLASH_F32), expected.lse));
  }

  double backward() {
    const cuflash_problem_t problem = run_forward();
    const Gradients expected = expected_backward(shape_, in_);
    auto gradients = cuflash::make<cuflash_gradients_t>();
    gradients.d_o = tensor(input(in_.d_o));
    gradients.dq = tensor(output(expected.dq.size(), dtype_));
    gradients.dk = tensor(output(expected.dk.size(), dtype_));
    gradients.dv = tensor(output(expected.dv.size(), dtype_));
    cuflash::check(cuflash_attention_backward(target_.handle, &problem, &gradients, nullptr));
    return std::max({difference(read(gradients.dq.data, expected.dq.size(), dtype_), expected.dq),
                     difference(read(gradients.dk.data, expected.dk.size(), dtype_), expected.dk),
                     difference(read(gradients.dv.data, expected.dv.size(), dtype_), expected.dv)});
  }

  // One new token of each sequence, the sequences of different lengths.
  double decode() {
    Shape shape = shape_;
    shape.len_q = 1;
    Inputs in = in_;
    in.q.resize(shape.queries() * shape.channels());
    const std::vector<int32_t> lengths = {61, 29};
    const Outputs expected = expected_forward(shape, in, lengths);
    cuflash_problem_t problem = problem_of(shape);
    problem.q = tensor(input(in.q));
    problem.k = problem.v = {};
    problem.len_k = 0;
    auto cache = cuflash::make<cuflash_kv_cache_t>();
    cache.k = tensor(k_);
    cache.v = tensor(v_);
    cache.max_len = shape.len_k;
    const size_t bytes = lengths.size() * sizeof lengths[0];
    void* device_lengths = memory_.allocate(bytes);
    memory_.write(device_lengths, lengths.data(), bytes);
    cache.lengths = static_cast<const int32_t*>(device_lengths);
    cuflash::check(cuflash_attention_decode(target_.handle, &problem, &cache, nullptr));
    return std::max(difference(read(problem.o.data, expected.o.size(), dtype_), expected.o),
                    difference(read(problem.lse, expected.lse.size(), CUFLASH_F32), expected.lse));
  }

  // Forward over the first keys and over the others, merged: forward over all of them.
  double merge() {
    Shape shape = shape_;
    shape.causal = false;
    const size_t o_size = shape.queries() * shape.channels();
    void* parts = output(2 * o_size, dtype_);
    void* lse_parts = output(2 * shape.queries(), CUFLASH_F32);
    const int64_t begins[] = {0, 23, shape.len_k};
    for (size_t part = 0; part < 2; ++part) {
      cuflash_problem_t problem = problem_of(shape);
      problem.len_k = begins[part + 1] - begins[part];
      problem.k = rows_from(k_, begins[part]);
      problem.v = rows_from(v_, begins[part]);
      problem.o = tensor(element(parts, part * o_size, dtype_));
      problem.lse = static_cast<float*>(lse_parts) + part * shape.queries();
      cuflash::check(cuflash_attention_forward(target_.handle, &problem, nullptr));
    }
    auto merge = cuflash::make<cuflash_merge_t>();
    merge.num_parts = 2;
    merge.batch = shape.batch;
    merge.heads = shape.heads_q;
    merge.len = shape.len_q;
    merge.head_dim = shape.head_dim;
    merge.parts = tensor(parts);
    merge.part_stride = static_cast<int64_t>(o_size);
    merge.lse_parts = static_cast<const float*>(lse_parts);
    merge.lse_part_stride = static_cast<int64_t>(shape.queries());
    merge.o = tensor(output(o_size, dtype_));
    merge.lse = static_cast<float*>(output(shape.queries(), CUFLASH_F32));
    cuflash::check(cuflash_merge_states(target_.handle, &merge, nullptr));
    const Outputs expected = expected_forward(shape, in_, full_lengths());
    return std::max(difference(read(merge.o.data, o_size, dtype_), expected.o),
                    difference(read(merge.lse, expected.lse.size(), CUFLASH_F32), expected.lse));
  }

  // The operation's call, for explain.
  Question question(const Named& operation, const Named& dtype) const {
    Question question;
    question.operation = operation;
    question.dtype = dtype;
    question.causal = shape_.causal;
    question.batch = shape_.batch;
    question.heads_q = shape_.heads_q;
    question.heads_kv = shape_.heads_kv;
    question.len_q = operation.value == CUFLASH_OPERATION_DECODE ? 1 : shape_.len_q;
    question.len_k = shape_.len_k;
    question.head_dim = shape_.head_dim;
    return question;
  }

 private:
  cuflash_problem_t run_forward() {
    const cuflash_problem_t problem = problem_of(shape_);
    cuflash::check(cuflash_attention_forward(target_.handle, &problem, nullptr));
    return problem;
  }

  cuflash_problem_t problem_of(const Shape& shape) {
    auto problem = cuflash::make<cuflash_problem_t>();
    problem.batch = shape.batch;
    problem.heads_q = shape.heads_q;
    problem.heads_kv = shape.heads_kv;
    problem.len_q = shape.len_q;
    problem.len_k = shape.len_k;
    problem.head_dim = shape.head_dim;
    problem.q = tensor(q_);
    problem.k = tensor(k_);
    problem.v = tensor(v_);
    problem.o = tensor(output(shape.queries() * shape.channels(), dtype_));
    problem.lse = static_cast<float*>(output(shape.queries(), CUFLASH_F32));
    problem.mask = shape.causal ? CUFLASH_MASK_CAUSAL : CUFLASH_MASK_NONE;
    return problem;
  }

  cuflash_tensor_t tensor(void* data) const {
    cuflash_tensor_t tensor = {};
    tensor.data = data;
    tensor.flags = CUFLASH_TENSOR_DENSE;
    tensor.dtype = dtype_;
    return tensor;
  }

  // Keys or values without the first rows of each head.
  cuflash_tensor_t rows_from(void* data, int64_t first) const {
    cuflash_tensor_t rows =
        tensor(element(data, static_cast<size_t>(first) * shape_.channels(), dtype_));
    rows.flags = 0;
    rows.row_stride = shape_.head_dim;
    rows.head_stride = shape_.len_k * rows.row_stride;
    rows.batch_stride = shape_.heads_kv * rows.head_stride;
    return rows;
  }

  static void* element(void* data, size_t index, int32_t dtype) {
    return static_cast<unsigned char*>(data) + index * format_of(dtype).bytes;
  }

  void* input(const Values& values) {
    const size_t size = format_of(dtype_).bytes;
    std::vector<unsigned char> bytes(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) {
      const uint32_t bits = bits_of(values[i], dtype_);
      std::memcpy(&bytes[i * size], &bits,
                  size);  // little-endian, as every platform of the library
    }
    void* data = memory_.allocate(bytes.size());
    memory_.write(data, bytes.data(), bytes.size());
    return data;
  }

  // Every bit set is NaN in every dtype: what is not written shows.
  void* output(size_t count, int32_t dtype) {
    const std::vector<unsigned char> bytes(count * format_of(dtype).bytes, 0xff);
    void* data = memory_.allocate(bytes.size());
    memory_.write(data, bytes.data(), bytes.size());
    return data;
  }

  Values read(const void* data, size_t count, int32_t dtype) {
    const size_t size = format_of(dtype).bytes;
    std::vector<unsigned char> bytes(count * size);
    memory_.read(bytes.data(), data, bytes.size());
    Values values(count);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &bytes[i * size], size);
      values[i] = value_of(bits, dtype);
    }
    return values;
  }

  std::vector<int32_t> full_lengths() const {
    return std::vector<int32_t>(static_cast<size_t>(shape_.batch),
                                static_cast<int32_t>(shape_.len_k));
  }

  const Target& target_;
  Memory& memory_;
  int32_t dtype_;
  Shape shape_;
  Inputs in_;
  void *q_, *k_, *v_;
};

// ---- results ------------------------------------------------------------------------------------------

// A device that this library cannot compute on, or a kernel that this build left out, is not a wrong result.
bool is_absence(cuflash_status_t status) {
  return status == CUFLASH_ERROR_NOT_BUILT || status == CUFLASH_ERROR_UNSUPPORTED_ARCH ||
         status == CUFLASH_ERROR_DRIVER_TOO_OLD;
}

template <class Run>
void add_result(Json* results, Json result, double allowed, Run run) {
  result["allowed"] = allowed;
  try {
    const double error = run(&result);
    result["error"] = error;  // null in JSON where it is not a number
    result["result"] = error <= allowed ? "passed" : "failed";
  } catch (const cuflash::Error& error) {
    result["result"] = is_absence(error.status()) ? "skipped" : "failed";
    result["message"] = error.what();
  } catch (const std::exception& error) {
    result["result"] = "failed";
    result["message"] = error.what();
  }
  results->push_back(std::move(result));
}

}  // namespace

Json self_test(const Target& target) {
  struct Step {
    Named operation;
    double (Trial::*run)();
  };
  constexpr Step kSteps[] = {{kOperations[0], &Trial::forward},
                             {kOperations[1], &Trial::backward},
                             {kOperations[2], &Trial::decode},
                             {{"merge", CUFLASH_OPERATION_MERGE}, &Trial::merge}};
  Json results = Json::array();
  for (const Step& step : kSteps) {
    for (const Named& dtype : kDtypes) {
      for (const int64_t head_dim : kHeadDims) {
        Json result = {{"device", target.name},
                       {"operation", step.operation.name},
                       {"dtype", dtype.name},
                       {"head_dim", head_dim},
                       {"kernel", nullptr}};
        const double allowed = format_of(dtype.value).allowed;
        add_result(&results, std::move(result), allowed, [&](Json* answer) {
          const std::unique_ptr<Memory> memory = memory_of(target.device);
          Trial trial(target, memory.get(), dtype.value, head_dim);
          if (step.operation.value != CUFLASH_OPERATION_MERGE)
            (*answer)["kernel"] = ask(target, trial.question(step.operation, dtype))["kernel"];
          return (trial.*step.run)();
        });
      }
    }
  }
  return results;
}

}  // namespace cuflash_info
