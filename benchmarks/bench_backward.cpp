// Backward attention: the kernel that the library chooses for each shape below (CUFLASH_KERNEL forces another). Times
// are of CUDA events around one call, all its launches together; data are normally distributed. The FLOPs are
// those of five products, whatever a kernel computes twice: 2.5 times those of forward.
//
//   bench_backward --benchmark_filter=scalar.*causal --benchmark_out=result.json
//
// A benchmark's name is backward/<kernel>/<dtype>/<mask>/<B>x<Hq>/<Hkv>x<S>x<D>.
#include "dense_problem.hpp"

namespace {

constexpr Shape kHalfShapes[] = {
    {4, 32, 32, 4096, 64, true},   // the shape that releases are held to, D64
    {4, 16, 16, 4096, 128, true},  // the same, D128
    {4, 32, 32, 4096, 64, false}, {4, 32, 8, 4096, 128, true}, {4, 64, 64, 4096, 32, true},
    {4, 21, 21, 4096, 96, true},  {4, 8, 8, 4096, 256, true},
};
constexpr Shape kFloatShapes[] = {
    {16, 32, 32, 1024, 64, true},  // the shape that releases are held to
    {16, 16, 16, 1024, 128, true}, {16, 32, 32, 1024, 64, false}, {16, 32, 8, 1024, 64, true},
    {16, 64, 64, 1024, 32, true},  {16, 8, 8, 1024, 256, true},
};

cuflash_gradients_t make_gradients() {
  cuflash_gradients_t gradients = {};
  gradients.struct_size = sizeof gradients;
  gradients.d_o = gradients.dq = gradients.dk = gradients.dv = dense(nullptr);
  return gradients;
}

void bench_backward(benchmark::State& state, const Shape& shape, const Dtype& dtype,
                    const std::string& kernel) {
  const int64_t of_q = shape.queries() * shape.head_dim, of_k = shape.keys() * shape.head_dim;
  const auto bytes = [&](int64_t count) { return static_cast<size_t>(count) * dtype.bytes; };
  const auto q = normal_values(of_q, dtype, 1), k = normal_values(of_k, dtype, 2);
  const auto v = normal_values(of_k, dtype, 3), d_o = normal_values(of_q, dtype, 4);
  const DeviceBuffer o(bytes(of_q)), dq(bytes(of_q)), dk(bytes(of_k)), dv(bytes(of_k));
  const DeviceBuffer lse(static_cast<size_t>(shape.queries()) * sizeof(float));
  // O and LSE by name: CUFLASH_KERNEL may name a kernel that is for backward only.
  cuflash_problem_t problem = make_problem(shape, dtype, "fwd_reference");
  problem.q.data = q->data();
  problem.k.data = k->data();
  problem.v.data = v->data();
  problem.o.data = o.data();
  problem.lse = static_cast<float*>(lse.data());
  check(cuflash_attention_forward(nullptr, &problem, nullptr), "fwd_reference");

  problem.kernel = kernel.c_str();
  cuflash_gradients_t gradients = make_gradients();
  gradients.d_o.data = d_o->data();
  gradients.dq.data = dq.data();
  gradients.dk.data = dk.data();
  gradients.dv.data = dv.data();
  size_t workspace_bytes = 0;
  check(cuflash_backward_workspace_size(nullptr, &problem, &gradients, &workspace_bytes),
        "cuflash_backward_workspace_size");
  const DeviceBuffer workspace(workspace_bytes);
  problem.workspace = workspace.data();
  problem.workspace_size = workspace_bytes;
  time_calls(state, kernel.c_str(), 2.5 * forward_flops(shape), [&] {
    check(cuflash_attention_backward(nullptr, &problem, &gradients, nullptr), kernel.c_str());
  });
}

void register_backward(const Shape& shape, const Dtype& dtype) {
  const cuflash_problem_t problem = make_problem(shape, dtype, nullptr);
  const cuflash_gradients_t gradients = make_gradients();
  std::vector<char> json(1 << 16);
  check(cuflash_backward_explain(nullptr, &problem, &gradients, json.data(), json.size(), nullptr),
        "cuflash_backward_explain");
  const std::string kernel = value_of(json.data(), "kernel");
  if (kernel == "null") return;
  benchmark::RegisterBenchmark(
      benchmark_name("backward", kernel, dtype, shape).c_str(),
      [=](benchmark::State& state) { bench_backward(state, shape, dtype, kernel); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) {
  add_context();
  for (const Dtype& dtype : kDtypes) {
    if (dtype.value == CUFLASH_F32)
      for (const Shape& shape : kFloatShapes) register_backward(shape, dtype);
    else
      for (const Shape& shape : kHalfShapes) register_backward(shape, dtype);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
