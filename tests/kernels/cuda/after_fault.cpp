// A kernel of someone else's faults: the next call says so, with the status for it.
#include <cstdio>

#include "kernels/cuda/kernels.hpp"
#include "support/runner.hpp"

using namespace cuflash_test;

int main() {
  const std::string& reason = why_unavailable(Device::kCuda);
  if (!reason.empty()) {
    std::printf("skipped: %s\n", reason.c_str());
    return 77;
  }
  Case c;
  c.device = Device::kCuda;
  c.dtype = Dtype::kF16;
  c.shape = {1, 2, 2, 33, 65, 64};
  // Never freed: nothing on the device can be, after the fault.
  Call& call = *new Call(c, make_inputs(c, DataKind::kNormal));
  if (call.launch() != CUFLASH_SUCCESS) {
    std::printf("the call before the fault failed: %s\n", cuflash_last_error());
    return 1;
  }
  cudaDeviceSynchronize();
  fault(nullptr);
  cudaDeviceSynchronize();
  const cuflash_status_t status = call.launch();
  std::printf("after the fault: %s: %s\n", cuflash_status_name(status), cuflash_last_error());
  return status == CUFLASH_ERROR_ASYNCHRONOUS && cuflash_last_cuda_error() != 0 ? 0 : 1;
}
