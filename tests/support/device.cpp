#include "support/device.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <utility>

#if defined(CUFLASH_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace cuflash_test {
namespace {

[[noreturn]] void stop(const char* what, const char* why) {
  std::fprintf(stderr, "test support: %s: %s\n", what, why);
  std::abort();
}

#if defined(CUFLASH_WITH_CUDA)
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) stop(what, cudaGetErrorString(error));
}

void* allocate(Device device, size_t bytes) {
  void* memory = nullptr;
  if (device == Device::kCuda)
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
  else
    memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return memory;
}
void release(Device device, void* memory) {
  if (device == Device::kCpu) return std::free(memory);
  check(cudaFree(memory), "cudaFree");
}
void copy(void* target, const void* source, size_t bytes) {
  // The runtime finds out where both lie: plain host memory works too, but needs a device.
  check(cudaMemcpy(target, source, bytes, cudaMemcpyDefault), "cudaMemcpy");
}
void set(Device device, void* target, unsigned char byte, size_t bytes) {
  if (device == Device::kCpu)
    std::memset(target, byte, bytes);
  else
    check(cudaMemset(target, byte, bytes), "cudaMemset");
}

std::string find_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    return std::string("no CUDA device: ") + cudaGetErrorString(error);
  return "";
}
#else
void* allocate(Device, size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
void release(Device, void* memory) { std::free(memory); }
void set(Device, void* target, unsigned char byte, size_t bytes) {
  std::memset(target, byte, bytes);
}
std::string find_cuda() { return "no CUDA device: built without CUDA"; }
#endif

void transfer(Device device, void* target, const void* source, size_t bytes) {
  if (bytes == 0) return;
#if defined(CUFLASH_WITH_CUDA)
  if (device == Device::kCuda) return copy(target, source, bytes);
#endif
  (void)device;
  std::memcpy(target, source, bytes);
}

}  // namespace

const char* name_of(Device device) { return device == Device::kCpu ? "cpu" : "cuda"; }
void PrintTo(Device device, std::ostream* out) { *out << name_of(device); }

const std::string& why_unavailable(Device device) {
  static const std::string none, cuda = find_cuda();
  return device == Device::kCpu ? none : cuda;
}

cuflash_handle_t handle_of(Device device) {
  const auto create = [](int32_t ordinal) {
    cuflash_handle_t handle = nullptr;
    if (cuflash_create(&handle, ordinal) != CUFLASH_SUCCESS)
      stop("cuflash_create", cuflash_last_error());
    return handle;
  };
  if (device == Device::kCpu) {
    static const cuflash_handle_t cpu = create(CUFLASH_DEVICE_CPU);
    return cpu;
  }
  static const cuflash_handle_t cuda = create(0);
  return cuda;
}

void synchronize(Device device) {
#if defined(CUFLASH_WITH_CUDA)
  if (device == Device::kCuda) check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
#endif
  (void)device;
}

Buffer::Buffer(Device device, size_t bytes)
    : device_(device),
      bytes_(bytes),
      base_(static_cast<unsigned char*>(allocate(device, bytes + 2 * kGuard))) {
  if (base_ == nullptr) stop("Buffer", "out of memory");
  set(device_, base_, kGuardByte, kGuard);
  set(device_, base_ + kGuard + bytes_, kGuardByte, kGuard);
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_), bytes_(other.bytes_), base_(std::exchange(other.base_, nullptr)) {}

Buffer::~Buffer() {
  if (base_ != nullptr) release(device_, base_);
}

void Buffer::fill(unsigned char byte) { set(device_, data(), byte, bytes_); }
void Buffer::upload(const void* source) { transfer(device_, data(), source, bytes_); }
void Buffer::download(void* target) const { transfer(device_, target, data(), bytes_); }

bool Buffer::guards_intact() const {
  unsigned char expected[kGuard], found[kGuard];
  std::memset(expected, kGuardByte, kGuard);
  for (const unsigned char* guard : {base_, base_ + kGuard + bytes_}) {
    transfer(device_, found, guard, kGuard);
    if (std::memcmp(found, expected, kGuard) != 0) return false;
  }
  return true;
}

}  // namespace cuflash_test
