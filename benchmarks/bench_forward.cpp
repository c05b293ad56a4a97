// Forward attention: the kernel that the library chooses for each shape below (CUFLASH_KERNEL forces another), and
// what a call costs the host. Times are of CUDA events around one call; data are normally distributed.
//
//   bench_forward --benchmark_filter=wmma.*causal --benchmark_out=result.json
//
// A benchmark's name is forward/<kernel>/<dtype>/<mask>/<B>x<Hq>/<Hkv>x<S>x<D>.
#include <chrono>

#include "dense_problem.hpp"
#include "empty_kernel.hpp"

namespace {

constexpr Shape kShapes[] = {
    {4, 32, 32, 4096, 64, true},   // the shape that releases are held to, D64
    {4, 16, 16, 4096, 128, true},  // the same, D128
    {4, 32, 32, 4096, 64, false},  {4, 16, 16, 4096, 128, false}, {16, 32, 32, 1024, 64, true},
    {16, 16, 16, 1024, 128, true}, {1, 16, 16, 16384, 128, true}, {4, 32, 8, 4096, 128, true},
    {64, 12, 12, 128, 32, false},  {4, 64, 64, 4096, 32, true},   {4, 21, 21, 4096, 96, true},
    {4, 10, 10, 4096, 192, true},  {4, 8, 8, 4096, 256, true},
};

void bench_forward(benchmark::State& state, const Shape& shape, const Dtype& dtype,
                   const std::string& kernel) {
  const auto q = normal_values(shape.queries() * shape.head_dim, dtype, 1);
  const auto k = normal_values(shape.keys() * shape.head_dim, dtype, 2);
  const auto v = normal_values(shape.keys() * shape.head_dim, dtype, 3);
  const DeviceBuffer o(static_cast<size_t>(shape.queries() * shape.head_dim) * dtype.bytes);
  const DeviceBuffer lse(static_cast<size_t>(shape.queries()) * sizeof(float));
  cuflash_problem_t problem = make_problem(shape, dtype, kernel.c_str());
  problem.q.data = q->data();
  problem.k.data = k->data();
  problem.v.data = v->data();
  problem.o.data = o.data();
  problem.lse = static_cast<float*>(lse.data());

  time_calls(state, kernel.c_str(), forward_flops(shape),
             [&] { check(cuflash_attention_forward(nullptr, &problem, nullptr), kernel.c_str()); });
}

// The median wall time of `call`, which enqueues one small kernel; the queue of the stream is kept short.
template <class Call>
void measure_host_cost(benchmark::State& state, Call call) {
  constexpr int kCallsPerSync = 100, kWarmUp = 20000;
  // A processor that has just woken takes a third longer.
  for (int i = 0; i < kWarmUp; ++i) {
    call();
    if (i % kCallsPerSync == 0) check(cudaDeviceSynchronize(), "host cost");
  }
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

void register_forward() {
  for (const Dtype& dtype : kDtypes)
    for (const Shape& shape : kShapes) {
      const cuflash_problem_t problem = make_problem(shape, dtype, nullptr);
      std::vector<char> json(1 << 16);
      check(cuflash_forward_explain(nullptr, &problem, json.data(), json.size(), nullptr),
            "cuflash_forward_explain");
      const std::string kernel = value_of(json.data(), "kernel");
      if (kernel == "null") continue;
      benchmark::RegisterBenchmark(
          benchmark_name("forward", kernel, dtype, shape).c_str(),
          [=](benchmark::State& state) { bench_forward(state, shape, dtype, kernel); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
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
