// first_capture <forward|backward|decode|append|merge> <plain|preloaded>
//
// The first call of a process is made inside a capture. After cuflash_preload it must work; without, it may work or
// return CUFLASH_ERROR_CAPTURE, and then the capture must survive it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "support/append.hpp"
#include "support/runner.hpp"

using namespace cuflash_test;

namespace {

bool check(bool condition, const char* what) {
  if (!condition) std::printf("%s: %s\n", what, cuflash_last_error());
  return condition;
}

struct Merge {
  static constexpr int64_t kRows = 6, kDim = 32;
  Buffer parts{Device::kCuda, 2 * kRows*kDim * 4}, lse_parts{Device::kCuda, 2 * kRows * 4},
      o{Device::kCuda, kRows*kDim * 4}, lse{Device::kCuda, kRows * 4};
  cuflash_merge_t merge;
  Merge() {
    parts.fill(0);
    lse_parts.fill(0);
    o.fill(0xff);
    cuflash_merge_init(&merge, sizeof merge);
    merge.num_parts = 2;
    merge.batch = 1;
    merge.heads = 2;
    merge.len = 3;
    merge.head_dim = kDim;
    merge.parts.data = parts.data();
    merge.parts.dtype = CUFLASH_F32;
    merge.parts.flags = merge.o.flags = CUFLASH_TENSOR_DENSE;
    merge.part_stride = kRows * kDim;
    merge.lse_parts = static_cast<float*>(lse_parts.data());
    merge.lse_part_stride = kRows;
    merge.o.data = o.data();
    merge.lse = static_cast<float*>(lse.data());
  }
  bool right() const {
    std::vector<float> values(kRows * kDim), sums(kRows);
    o.download(values.data());
    lse.download(sums.data());
    for (const float value : values)
      if (value != 0) return false;
    for (const float sum : sums)
      if (std::fabs(sum - std::log(2.0f)) > 1e-5f) return false;
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string& reason = why_unavailable(Device::kCuda);
  if (!reason.empty()) {
    std::printf("skipped: %s\n", reason.c_str());
    return 77;
  }
  if (argc != 3) return 2;
  const bool preloaded = std::strcmp(argv[2], "preloaded") == 0;
  const bool is_merge = std::strcmp(argv[1], "merge") == 0;
  const bool is_append = std::strcmp(argv[1], "append") == 0;
  Case c;
  c.device = Device::kCuda;
  c.dtype = Dtype::kF16;
  c.shape = {2, 4, 2, 33, 130, 64};
  for (const Operation operation : {Operation::kForward, Operation::kBackward, Operation::kDecode})
    if (std::strcmp(argv[1], name_of(operation)) == 0) c.operation = operation;
  if (c.operation == Operation::kDecode) c.num_splits = 3;
  const Inputs inputs = make_inputs(c, DataKind::kNormal);
  Call call(c, inputs);  // asks for the workspace size, launches nothing
  call.use_pool();
  Merge merge;
  AppendCase append_case;
  append_case.device = Device::kCuda;
  append_case.dtype = Dtype::kF16;
  append_case.lengths = {3};
  AppendCall append(append_case);
  cudaDeviceSynchronize();

  if (preloaded &&
      !check(cuflash_preload(handle_of(Device::kCuda), nullptr) == CUFLASH_SUCCESS, "preload"))
    return 1;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  // Global mode: unsafe calls anywhere would break the capture.
  if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess) return 1;
  const cuflash_status_t status =
      is_merge    ? cuflash_merge_states(handle_of(Device::kCuda), &merge.merge, stream)
      : is_append ? append.launch(stream)
                  : call.launch(stream);
  const std::string message = cuflash_last_error();
  std::printf("%s %s: %s %s\n", argv[1], argv[2], cuflash_status_name(status), message.c_str());
  if (!check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture did not survive"))
    return 1;
  if (status == CUFLASH_ERROR_CAPTURE && !preloaded) return 0;
  if (status != CUFLASH_SUCCESS) return 1;
  if (cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) return 1;
  for (int replay = 0; replay < 2; ++replay) {
    call.poison_outputs();
    cudaDeviceSynchronize();
    if (cudaGraphLaunch(executable, stream) != cudaSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess)
      return 1;
    if (is_append) {
      append.expect_right();
      if (!check(!testing::Test::HasFailure(), "wrong append")) return 1;
      append.reset();
      continue;
    }
    if (is_merge) {
      if (!check(merge.right(), "wrong merge")) return 1;
      continue;
    }
    const Outcome outcome = call.collect(CUFLASH_SUCCESS);
    const Accuracy accuracy = judge(c, inputs, outcome.results);
    if (!check(outcome.damage.empty() && accuracy.ok, "wrong result")) return 1;
  }
  return 0;
}
