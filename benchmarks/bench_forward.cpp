// Forward attention: the kernel that the library chooses for each shape below (CUFLASH_KERNEL forces another), and
// what a call costs the host. Times are of CUDA events around one call; data are normally distributed.
//
//   bench_forward --benchmark_filter=wmma.*causal --benchmark_out=result.json
//
// A benchmark's name is forward/<kernel>/<dtype>/<mask>/<B>x<Hq>/<Hkv>x<S>x<D>.
#include <algorithm>
#include <chrono>
#include <cmath>
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
#include "empty_kernel.hpp"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(cuflash_status_t status, const char* what) {
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

struct Shape {
  int64_t batch, heads_q, heads_kv, len, head_dim;
  bool causal;
};

constexpr Shape kShapes[] = {
    {4, 32, 32, 4096, 64, true},   // the shape that releases are held to, D64
    {4, 16, 16, 4096, 128, true},  // the same, D128
    {4, 32, 32, 4096, 64, false},  {4, 16, 16, 4096, 128, false}, {16, 32, 32, 1024, 64, true},
    {16, 16, 16, 1024, 128, true}, {1, 16, 16, 16384, 128, true}, {4, 32, 8, 4096, 128, true},
    {64, 12, 12, 128, 32, false},  {4, 64, 64, 4096, 32, true},   {4, 21, 21, 4096, 96, true},
    {4, 10, 10, 4096, 192, true},  {4, 8, 8, 4096, 256, true},
};

struct Dtype {
  int32_t value;
  const char* name;
  size_t bytes;
};

constexpr Dtype kDtypes[] = {
    {CUFLASH_F16, "f16", 2}, {CUFLASH_BF16, "bf16", 2}, {CUFLASH_F32, "f32", 4}};

double flops(const Shape& s) {
  const double all = 4.0 * static_cast<double>(s.batch * s.heads_q) *
                     static_cast<double>(s.len * s.len) * static_cast<double>(s.head_dim);
  return s.causal ? all / 2 : all;
}

cuflash_tensor_t dense(void* data) {
  cuflash_tensor_t tensor = {};
  tensor.data = data;
  tensor.flags = CUFLASH_TENSOR_DENSE;
  return tensor;
}

cuflash_problem_t make_problem(const Shape& shape, const Dtype& dtype, const char* kernel) {
  cuflash_problem_t problem = {};
  problem.struct_size = sizeof problem;
  problem.batch = shape.batch;
  problem.heads_q = shape.heads_q;
  problem.heads_kv = shape.heads_kv;
  problem.len_q = problem.len_k = shape.len;
  problem.head_dim = shape.head_dim;
  problem.q = problem.k = problem.v = problem.o = dense(nullptr);
  problem.q.dtype = dtype.value;
  problem.mask = shape.causal ? CUFLASH_MASK_CAUSAL : CUFLASH_MASK_NONE;
  problem.kernel = kernel;
  return problem;
}

// `count` normal values on the device; a block of them over and over, whose length shares no factor with any
// extent.
std::unique_ptr<DeviceBuffer> normal_values(int64_t count, const Dtype& dtype, unsigned seed) {
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

void bench_forward(benchmark::State& state, const Shape& shape, const Dtype& dtype,
                   const std::string& kernel) {
  const int64_t queries = shape.batch * shape.heads_q * shape.len;
  const int64_t keys = shape.batch * shape.heads_kv * shape.len;
  const auto q = normal_values(queries * shape.head_dim, dtype, 1);
  const auto k = normal_values(keys * shape.head_dim, dtype, 2);
  const auto v = normal_values(keys * shape.head_dim, dtype, 3);
  const DeviceBuffer o(static_cast<size_t>(queries * shape.head_dim) * dtype.bytes);
  const DeviceBuffer lse(static_cast<size_t>(queries) * sizeof(float));
  cuflash_problem_t problem = make_problem(shape, dtype, kernel.c_str());
  problem.q.data = q->data();
  problem.k.data = k->data();
  problem.v.data = v->data();
  problem.o.data = o.data();
  problem.lse = static_cast<float*>(lse.data());

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto call = [&] {
    check(cuflash_attention_forward(nullptr, &problem, nullptr), kernel.c_str());
  };
  call();  // loads the kernel
  check(cudaDeviceSynchronize(), kernel.c_str());
  for (auto _ : state) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    call();
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), kernel.c_str());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    state.SetIterationTime(milliseconds * 1e-3);
  }
  state.counters["TFLOP/s"] =
      benchmark::Counter(flops(shape) * 1e-12, benchmark::Counter::kIsIterationInvariantRate);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

// The median wall time of `call`, which enqueues one small kernel; the queue of the stream is kept short.
template <class Call>
void measure_host_cost(benchmark::State& state, Call call) {
  constexpr int kCallsPerSync = 100;
  call();
  check(cudaDeviceSynchronize(), "host cost");
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds.push_back(elapsed.count());
    state.SetIterationTime(elapsed.count());
    if (seconds.size() % kCallsPerSync == 0) check(cudaDeviceSynchronize(), "host cost");
  }
  check(cudaDeviceSynchronize(), "host cost");
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  state.counters["median_us"] = *middle * 1e6;
}

// One positional call, from argument checks to the launch.
void bench_host_cost(benchmark::State& state) {
  constexpr int kBatch = 1, kHeads = 1, kLen = 16, kHeadDim = 64;
  const auto in = normal_values(kBatch * kHeads * kLen * kHeadDim, kDtypes[0], 1);
  const DeviceBuffer o(kBatch * kHeads * kLen * kHeadDim * 2);
  const DeviceBuffer lse(kBatch * kHeads * kLen * sizeof(float));
  measure_host_cost(state, [&] {
    check(cuflash_attention_forward_f16(in->data(), in->data(), in->data(), o.data(),
                                        static_cast<float*>(lse.data()), kBatch, kHeads, kLen,
                                        kHeadDim, 0.125f, 1, nullptr),
          "cuflash_attention_forward_f16");
  });
}

// What CUDA alone takes of it: an empty kernel on the same stream.
void bench_host_floor(benchmark::State& state) {
  measure_host_cost(state, [] { check(launch_empty_kernel(nullptr), "empty kernel"); });
}

// The name of the kernel that the library chooses, "" if none takes the shape.
std::string chosen_kernel(const Shape& shape, const Dtype& dtype) {
  const cuflash_problem_t problem = make_problem(shape, dtype, nullptr);
  std::vector<char> json(1 << 16);
  check(cuflash_forward_explain(nullptr, &problem, json.data(), json.size(), nullptr),
        "cuflash_forward_explain");
  const std::string key = "\"kernel\": \"", text = json.data();
  const size_t at = text.find(key);
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size();
  return text.substr(begin, text.find('"', begin) - begin);
}

void register_forward() {
  for (const Dtype& dtype : kDtypes)
    for (const Shape& shape : kShapes) {
      const std::string kernel = chosen_kernel(shape, dtype);
      if (kernel.empty()) continue;
      char name[200];
      std::snprintf(name, sizeof name, "forward/%s/%s/%s/%lldx%lld/%lldx%lldx%lld", kernel.c_str(),
                    dtype.name, shape.causal ? "causal" : "full",
                    static_cast<long long>(shape.batch), static_cast<long long>(shape.heads_q),
                    static_cast<long long>(shape.heads_kv), static_cast<long long>(shape.len),
                    static_cast<long long>(shape.head_dim));
      benchmark::RegisterBenchmark(name,
                                   [shape, dtype, kernel](benchmark::State& state) {
                                     bench_forward(state, shape, dtype, kernel);
                                   })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
}

void add_context() {
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

}  // namespace

int main(int argc, char** argv) {
  add_context();
  benchmark::RegisterBenchmark("host_cost/forward_f16", bench_host_cost)
      ->Iterations(10000)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
  benchmark::RegisterBenchmark("host_cost/empty_kernel", bench_host_floor)
      ->Iterations(10000)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
  register_forward();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
