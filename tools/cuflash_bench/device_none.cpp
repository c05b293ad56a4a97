// In the place of device_cuda.cpp in a build without CUDA.
#include <stdexcept>

#include "device.hpp"

namespace cuflash_bench {

std::unique_ptr<Device> cuda_device() {
  throw std::runtime_error("this cuflash-bench was built without CUDA");
}

}  // namespace cuflash_bench
