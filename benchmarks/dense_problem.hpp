// What the benchmarks of forward and backward share: dense self-attention problems, their names and their timing.
#pragma once

#include "support.hpp"

struct Shape {
  int64_t batch, heads_q, heads_kv, len, head_dim;
  bool causal;

  int64_t queries() const { return batch * heads_q * len; }
  int64_t keys() const { return batch * heads_kv * len; }
};

// Of the two products of forward; the masked half counts as nothing.
inline double forward_flops(const Shape& s) {
  const double all = 4.0 * static_cast<double>(s.queries() * s.len * s.head_dim);
  return s.causal ? all / 2 : all;
}

inline cuflash_problem_t make_problem(const Shape& shape, const Dtype& dtype, const char* kernel) {
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

// <operation>/<kernel>/<dtype>/<mask>/<B>x<Hq>/<Hkv>x<S>x<D>
inline std::string benchmark_name(const char* operation, const std::string& kernel,
                                  const Dtype& dtype, const Shape& s) {
  char name[200];
  std::snprintf(name, sizeof name, "%s/%s/%s/%s/%lldx%lld/%lldx%lldx%lld", operation,
                kernel.c_str(), dtype.name, s.causal ? "causal" : "full",
                static_cast<long long>(s.batch), static_cast<long long>(s.heads_q),
                static_cast<long long>(s.heads_kv), static_cast<long long>(s.len),
                static_cast<long long>(s.head_dim));
  return name;
}

// Times `call`, which enqueues work of so many FLOPs on the default stream, by CUDA events around each.
template <class Call>
void time_calls(benchmark::State& state, const char* what, double flops, Call call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  call();  // loads the kernels
  check(cudaDeviceSynchronize(), what);
  for (auto _ : state) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    call();
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), what);
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    state.SetIterationTime(milliseconds * 1e-3);
  }
  state.counters["TFLOP/s"] =
      benchmark::Counter(flops * 1e-12, benchmark::Counter::kIsIterationInvariantRate);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}
