// What the benchmarks share: checks, device memory, data, and what the library says of a problem.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuflash.h"

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

inline void check(cuflash_status_t status, const char* what) {
  if (status == CUFLASH_SUCCESS) return;
  std::fprintf(stderr, "%s: %s\n", what, cuflash_last_error());
  std::exit(1);
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) {
    check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct Dtype {
  int32_t value;
  const char* name;
  size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {CUFLASH_F16, "f16", 2}, {CUFLASH_BF16, "bf16", 2}, {CUFLASH_F32, "f32", 4}};

inline cuflash_tensor_t dense(void* data) {
  cuflash_tensor_t tensor = {};
  tensor.data = data;
  tensor.flags = CUFLASH_TENSOR_DENSE;
  return tensor;
}

// `count` normal values on the device; a block of them over and over, whose length shares no factor with any
// extent.
inline std::unique_ptr<DeviceBuffer> normal_values(int64_t count, const Dtype& dtype,
                                                   unsigned seed) {
  constexpr int64_t kBlock = 1000003;
  std::vector<char> block(static_cast<size_t>(kBlock) * dtype.bytes);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float x = normal(generator);
    if (dtype.value == CUFLASH_F16)
      reinterpret_cast<__half*>(block.data())[i] = __float2half(x);
    else if (dtype.value == CUFLASH_BF16)
      reinterpret_cast<__nv_bfloat16*>(block.data())[i] = __float2bfloat16(x);
    else
      reinterpret_cast<float*>(block.data())[i] = x;
  }
  const size_t bytes = static_cast<size_t>(count) * dtype.bytes;
  auto buffer = std::make_unique<DeviceBuffer>(bytes);
  for (size_t at = 0; at < bytes; at += block.size())
    check(cudaMemcpy(static_cast<char*>(buffer->data()) + at, block.data(),
                     std::min(block.size(), bytes - at), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  return buffer;
}

// The value of a key in an explanation, without quotes; "" if it has none.
inline std::string value_of(const std::string& explanation, const char* key) {
  const std::string start = "\"" + std::string(key) + "\": ";
  size_t begin = explanation.find(start);
  if (begin == std::string::npos) return "";
  begin += start.size();
  if (explanation[begin] == '"') ++begin;
  return explanation.substr(begin, explanation.find_first_of("\",}\n", begin) - begin);
}

inline void add_context() {
  int device, driver, runtime;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
  benchmark::AddCustomContext("cuda_runtime", std::to_string(runtime));
  benchmark::AddCustomContext("cuflash", cuflash_build_info());
}
