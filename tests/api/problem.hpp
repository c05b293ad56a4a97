// A small legal problem of each operation on the CPU device, to be spoilt one field at a time.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuflash.h"
#include "support/device.hpp"

namespace cuflash_test {

struct SmallProblem {
  static constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kLenQ = 3, kLenK = 5, kDim = 8;
  static constexpr size_t kQuerySize = kBatch * kHeadsQ * kLenQ * kDim;
  static constexpr size_t kKeySize = kBatch * kHeadsKv * kLenK * kDim;
  static constexpr float kUntouched = -77;

  std::vector<float> q = values(kQuerySize, 1), k = values(kKeySize, 2), v = values(kKeySize, 3),
                     d_o = values(kQuerySize, 4), o = untouched(kQuerySize),
                     lse = untouched(kBatch * kHeadsQ * kLenQ), dq = untouched(kQuerySize),
                     dk = untouched(kKeySize), dv = untouched(kKeySize);
  std::vector<int32_t> lengths = {5, 4}, offsets = {0, 1};
  cuflash_problem_t problem;         // forward and backward
  cuflash_problem_t decode_problem;  // decode, with cache
  cuflash_gradients_t gradients;
  cuflash_kv_cache_t cache;

  SmallProblem() {
    cuflash_problem_init(&problem, sizeof problem);
    problem.batch = kBatch;
    problem.heads_q = kHeadsQ;
    problem.heads_kv = kHeadsKv;
    problem.len_q = kLenQ;
    problem.head_dim = kDim;
    problem.q = dense(q.data());
    problem.o = dense(o.data());
    problem.lse = lse.data();
    decode_problem = problem;
    problem.len_k = kLenK;
    problem.k = dense(k.data());
    problem.v = dense(v.data());
    cuflash_gradients_init(&gradients, sizeof gradients);
    gradients.d_o = dense(d_o.data());
    gradients.dq = dense(dq.data());
    gradients.dk = dense(dk.data());
    gradients.dv = dense(dv.data());
    cuflash_kv_cache_init(&cache, sizeof cache);
    cache.k = problem.k;
    cache.v = problem.v;
    cache.max_len = kLenK;
    cache.lengths = lengths.data();
  }
  SmallProblem(const SmallProblem&) = delete;
  SmallProblem& operator=(const SmallProblem&) = delete;

  cuflash_status_t forward() {
    return cuflash_attention_forward(handle_of(Device::kCpu), &problem, nullptr);
  }
  cuflash_status_t backward() {
    return cuflash_attention_backward(handle_of(Device::kCpu), &problem, &gradients, nullptr);
  }
  cuflash_status_t decode() {
    return cuflash_attention_decode(handle_of(Device::kCpu), &decode_problem, &cache, nullptr);
  }

  // No output was written.
  bool nothing_written() const {
    for (const std::vector<float>* output : {&o, &lse, &dq, &dk, &dv})
      for (const float value : *output)
        if (value != kUntouched) return false;
    return true;
  }

  static cuflash_tensor_t dense(void* data) {
    cuflash_tensor_t tensor = {};
    tensor.data = data;
    tensor.flags = CUFLASH_TENSOR_DENSE;
    tensor.dtype = CUFLASH_F32;
    return tensor;
  }

 private:
  static std::vector<float> values(size_t n, int seed) {
    std::vector<float> list(n);
    for (size_t i = 0; i < n; ++i)
      list[i] = static_cast<float>((i * 37 + static_cast<size_t>(seed) * 11) % 17) / 8 - 1;
    return list;
  }
  static std::vector<float> untouched(size_t n) { return std::vector<float>(n, kUntouched); }
};

inline ::testing::AssertionResult message_names(const std::string& what) {
  const std::string message = cuflash_last_error();
  if (message.find(what) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << message << "\" does not name " << what;
}

}  // namespace cuflash_test
