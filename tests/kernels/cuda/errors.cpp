// Refused calls on CUDA: a status, nothing written, the runtime's own error state as it was, and the next call works.
#include <cuda_runtime_api.h>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

class Errors_cuda : public testing::Test {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(Device::kCuda); }
  static Case small(Operation operation = Operation::kForward) {
    Case c = make_case(Device::kCuda, operation, {1, 2, 2, 33, 65, 64});
    c.dtype = Dtype::kF16;
    return c;
  }
};

TEST_F(Errors_cuda, RefusedCallsLeaveTheContextUsable) {
  const Case c = small();
  const Inputs in = make_inputs(c, DataKind::kNormal);
  const Results expected = run_ok(c, in);
  Call call(c, in);
  const cuflash_problem_t good = call.problem();
  const std::pair<cuflash_status_t, void (*)(cuflash_problem_t&)> spoilt[] = {
      {CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM, [](cuflash_problem_t& p) { p.head_dim = 577; }},
      {CUFLASH_ERROR_NULL_POINTER, [](cuflash_problem_t& p) { p.k.data = nullptr; }},
      {CUFLASH_ERROR_MISALIGNED,
       [](cuflash_problem_t& p) { p.v.data = static_cast<char*>(p.v.data) + 1; }},
      {CUFLASH_ERROR_ALIASING, [](cuflash_problem_t& p) { p.o = p.q; }},
      {CUFLASH_ERROR_UNSUPPORTED, [](cuflash_problem_t& p) { p.kernel = "fwd_reference_cpu"; }},
      {CUFLASH_ERROR_INVALID_VALUE, [](cuflash_problem_t& p) { p.kernel = "nobody"; }},
  };
  for (const auto& [status, spoil] : spoilt) {
    call.problem() = good;
    call.poison_outputs();
    spoil(call.problem());
    EXPECT_EQ(call.launch(), status) << cuflash_last_error();
    EXPECT_STRNE(cuflash_last_error(), "");
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    EXPECT_EQ(call.collect(status).damage, "");
    expect_same_bits(run_ok(c, in), expected);
  }
}

TEST_F(Errors_cuda, HostMemoryIsRefused) {
  int pageable = 0;
  cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0);
  if (pageable) GTEST_SKIP() << "this device reads pageable host memory";
  const Case c = small();
  const Inputs in = make_inputs(c, DataKind::kNormal);
  std::vector<char> host(1 << 20);
  Call call(c, in);
  const void* const good = call.problem().k.data;
  call.problem().k.data = host.data();
  EXPECT_EQ(call.launch(), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_NE(std::string(cuflash_last_error()).find("problem.k"), std::string::npos);
  call.problem().k.data = const_cast<void*>(good);
  EXPECT_EQ(call.launch(), CUFLASH_SUCCESS);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST_F(Errors_cuda, PinnedAndManagedMemoryWork) {
  const Case c = small();
  const Inputs in = make_inputs(c, DataKind::kNormal);
  const Results expected = run_ok(c, in);
  Call call(c, in);
  const size_t bytes = in.k.x.size() * 2;
  void *pinned = nullptr, *managed = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, bytes), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&managed, bytes), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(pinned, call.problem().k.data, bytes, cudaMemcpyDefault), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(managed, call.problem().v.data, bytes, cudaMemcpyDefault), cudaSuccess);
  call.problem().k.data = pinned;
  call.problem().v.data = managed;
  const cuflash_status_t status = call.launch();
  synchronize(Device::kCuda);
  expect_same_bits(call.collect(status).results, expected);
  cudaFreeHost(pinned);
  cudaFree(managed);
}

TEST_F(Errors_cuda, B118_OtherDevicesAreKeptApart) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (count < 2) GTEST_SKIP() << "one CUDA device only";
  const Case c = small(Operation::kBackward);
  const Inputs in = make_inputs(c, DataKind::kNormal);
  const Results expected = run_ok(c, in);
  // Memory of device 0 and a handle of device 0 while device 1 is current.
  Call call(c, in);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const cuflash_status_t status = call.launch();
  int current = -1;
  cudaGetDevice(&current);
  EXPECT_EQ(current, 1);
  // The same memory with a handle of device 1.
  cuflash_handle_t other = nullptr;
  ASSERT_EQ(cuflash_create(&other, 1), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_attention_backward(other, &call.problem(), &call.gradients(), nullptr),
            CUFLASH_ERROR_WRONG_DEVICE);
  cuflash_destroy(other);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  synchronize(Device::kCuda);
  expect_same_bits(call.collect(status).results, expected);
}

}  // namespace
}  // namespace cuflash_test
