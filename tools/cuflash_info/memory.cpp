#include "memory.hpp"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "cuflash.h"

namespace cuflash_info {
namespace {

class HostMemory : public Memory {
 public:
  void* allocate(size_t bytes) override {
    blocks_.push_back(std::make_unique<unsigned char[]>(bytes));
    return blocks_.back().get();
  }
  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

 private:
  std::vector<std::unique_ptr<unsigned char[]>> blocks_;
};

// libcuda. Never unloaded: the library inside this process may use it as well.
class Driver {
 public:
  Driver() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (library_ == nullptr) throw std::runtime_error("no CUDA driver");
    call("cuInit", 0U);
  }

  // The arguments have exactly the types of the driver's function.
  template <class... Arguments>
  int result_of(const char* name, Arguments... arguments) const {
    using Function = int (*)(Arguments...);
    const auto function = reinterpret_cast<Function>(dlsym(library_, name));
    return function != nullptr ? function(arguments...) : kNotFound;
  }

  template <class... Arguments>
  void call(const char* name, Arguments... arguments) const {
    if (const int result = result_of(name, arguments...))
      throw std::runtime_error(std::string(name) + " returns " + std::to_string(result));
  }

  int device(int32_t ordinal) const {
    int device = 0;
    call("cuDeviceGet", &device, static_cast<int>(ordinal));
    return device;
  }

 private:
  static constexpr int kNotFound = 500;  // CUDA_ERROR_NOT_FOUND
  void* library_;
};

class CudaMemory : public Memory {
 public:
  explicit CudaMemory(int32_t ordinal) : device_(driver_.device(ordinal)) {
    // The primary context is the one that the library computes in.
    void* context = nullptr;
    driver_.call("cuDevicePrimaryCtxRetain", &context, device_);
    driver_.call("cuCtxSetCurrent", context);
  }
  // After a fault nothing can be freed: the context is lost with all that it held.
  ~CudaMemory() override {
    for (const unsigned long long block : blocks_) driver_.result_of("cuMemFree_v2", block);
    driver_.result_of("cuDevicePrimaryCtxRelease_v2", device_);
  }
  void* allocate(size_t bytes) override {
    unsigned long long block = 0;
    driver_.call("cuMemAlloc_v2", &block, bytes);
    blocks_.push_back(block);
    return reinterpret_cast<void*>(block);
  }
  void write(void* to, const void* from, size_t bytes) override {
    driver_.call("cuMemcpyHtoD_v2", reinterpret_cast<unsigned long long>(to), from, bytes);
  }
  void read(void* to, const void* from, size_t bytes) override {
    driver_.call("cuMemcpyDtoH_v2", to, reinterpret_cast<unsigned long long>(from), bytes);
  }

 private:
  Driver driver_;
  int device_;
  std::vector<unsigned long long> blocks_;
};

}  // namespace

std::unique_ptr<Memory> memory_of(int32_t device) {
  if (device == CUFLASH_DEVICE_CPU) return std::make_unique<HostMemory>();
  return std::make_unique<CudaMemory>(device);
}

std::string model_of(int32_t device) {
  const Driver driver;
  char name[256] = "";
  driver.call("cuDeviceGetName", &name[0], static_cast<int>(sizeof name), driver.device(device));
  return name;
}

}  // namespace cuflash_info
