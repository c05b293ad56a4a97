// Decode with one query token over a full cache: the kernel that the library chooses for each shape below
// (CUFLASH_KERNEL forces another). Times are of a CUDA graph that calls it once on each of several caches, which together
// are larger than any L2: every key and value comes from memory.
//
//   bench_decode --benchmark_filter=bf16.*x8192 --benchmark_out=result.json
//   CUFLASH_KERNEL=scalar bench_decode
//
// A benchmark's name is decode/<kernel>/<dtype>/<splits, 0: chosen>/<B>x<Hq>/<Hkv>x<ctx>x<D>; TB/s counts the keys and
// values read.
#include "support.hpp"

namespace {

struct Shape {
  int64_t batch, heads_q, heads_kv, len, head_dim;
};

constexpr Shape kGuardShape = {8, 32, 8, 8192, 128};  // the shape that releases are held to
constexpr Shape kShapes[] = {
    kGuardShape,
    {8, 32, 8, 32768, 128},
    {1, 32, 8, 1024, 128},
    {1, 32, 8, 8192, 128},
    {1, 32, 8, 65536, 128},
    {64, 32, 8, 2048, 128},
    {8, 32, 32, 4096, 128},
    {8, 32, 8, 8192, 64},
};
constexpr int kSplits[] = {1, 2, 4, 8, 16, 32};  // of the guard shape

// Of all the caches that a graph goes through.
constexpr int64_t kCacheBytes = int64_t{512} << 20;

int64_t values_of(const Shape& s) { return s.batch * s.heads_kv * s.len * s.head_dim; }

struct Call {
  cuflash_problem_t problem = {};
  cuflash_kv_cache_t cache = {};

  Call(const Shape& s, const Dtype& dtype, int num_splits) {
    problem.struct_size = sizeof problem;
    problem.batch = s.batch;
    problem.heads_q = s.heads_q;
    problem.heads_kv = s.heads_kv;
    problem.len_q = 1;
    problem.head_dim = s.head_dim;
    problem.q = problem.o = dense(nullptr);
    problem.q.dtype = dtype.value;
    problem.num_splits = num_splits;
    cache.struct_size = sizeof cache;
    cache.k = cache.v = dense(nullptr);
    cache.max_len = s.len;
  }

  std::string explain() const {
    std::vector<char> json(1 << 16);
    check(cuflash_decode_explain(nullptr, &problem, &cache, json.data(), json.size(), nullptr),
          "cuflash_decode_explain");
    return json.data();
  }
};

void bench_decode(benchmark::State& state, const Shape& shape, const Dtype& dtype,
                  const std::string& kernel, int num_splits) {
  const int64_t values = values_of(shape);
  const auto kv_bytes = static_cast<int64_t>(dtype.bytes) * 2 * values;
  const int64_t caches = std::max<int64_t>(2, (kCacheBytes + kv_bytes - 1) / kv_bytes);
  const int64_t rows = shape.batch * shape.heads_q;
  const auto q = normal_values(rows * shape.head_dim, dtype, 1);
  const auto k = normal_values(caches * values, dtype, 2);
  const auto v = normal_values(caches * values, dtype, 3);
  const DeviceBuffer o(static_cast<size_t>(rows * shape.head_dim) * dtype.bytes);
  const DeviceBuffer lengths(static_cast<size_t>(shape.batch) * sizeof(int32_t));
  const std::vector<int32_t> full(static_cast<size_t>(shape.batch),
                                  static_cast<int32_t>(shape.len));
  check(
      cudaMemcpy(lengths.data(), full.data(), full.size() * sizeof full[0], cudaMemcpyHostToDevice),
      "cudaMemcpy");

  Call call(shape, dtype, num_splits);
  call.problem.kernel = kernel.c_str();
  call.problem.q.data = q->data();
  call.problem.o.data = o.data();
  call.cache.lengths = static_cast<const int32_t*>(lengths.data());
  size_t workspace_bytes = 0;
  check(cuflash_decode_workspace_size(nullptr, &call.problem, &call.cache, &workspace_bytes),
        "cuflash_decode_workspace_size");
  const DeviceBuffer workspace(workspace_bytes);
  call.problem.workspace = workspace.data();
  call.problem.workspace_size = workspace_bytes;

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t run;
  cudaEvent_t begin, end;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto call_all = [&] {
    for (int64_t n = 0; n < caches; ++n) {
      call.cache.k.data = static_cast<char*>(k->data()) + n * kv_bytes / 2;
      call.cache.v.data = static_cast<char*>(v->data()) + n * kv_bytes / 2;
      check(cuflash_attention_decode(nullptr, &call.problem, &call.cache, stream), kernel.c_str());
    }
  };
  call_all();  // loads the kernels
  check(cudaStreamSynchronize(stream), kernel.c_str());
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  call_all();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&run, graph, 0), "cudaGraphInstantiate");
  for (auto _ : state) {
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    check(cudaGraphLaunch(run, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), kernel.c_str());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    state.SetIterationTime(milliseconds * 1e-3 / static_cast<double>(caches));
  }
  state.counters["TB/s"] = benchmark::Counter(static_cast<double>(kv_bytes) * 1e-12,
                                              benchmark::Counter::kIsIterationInvariantRate);
  state.counters["splits"] = std::atof(value_of(call.explain(), "num_splits").c_str());
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
}

void register_decode(const Shape& shape, const Dtype& dtype, int num_splits) {
  const std::string kernel = value_of(Call(shape, dtype, num_splits).explain(), "kernel");
  if (kernel.empty() || kernel == "null") return;
  char name[200];
  std::snprintf(name, sizeof name, "decode/%s/%s/%d/%lldx%lld/%lldx%lldx%lld", kernel.c_str(),
                dtype.name, num_splits, static_cast<long long>(shape.batch),
                static_cast<long long>(shape.heads_q), static_cast<long long>(shape.heads_kv),
                static_cast<long long>(shape.len), static_cast<long long>(shape.head_dim));
  benchmark::RegisterBenchmark(
      name, [=](benchmark::State& state) { bench_decode(state, shape, dtype, kernel, num_splits); })
      ->UseManualTime()
      ->MinTime(0.02)  // of one call: a graph takes up to 128 times as long
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  add_context();
  for (const Dtype& dtype : kDtypes) {
    for (const Shape& shape : kShapes) register_decode(shape, dtype, 0);
    for (const int splits : kSplits) register_decode(kGuardShape, dtype, splits);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
