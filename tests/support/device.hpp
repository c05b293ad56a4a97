// Where a test runs: the CPU device, or the first CUDA device with its memory.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "cuflash.h"

namespace cuflash_test {

enum class Device { kCpu, kCuda };

const char* name_of(Device device);              // "cpu", "cuda"
void PrintTo(Device device, std::ostream* out);  // for GoogleTest

// Why a device cannot run tests here; empty: it can.
const std::string& why_unavailable(Device device);

// A handle of the device that lives as long as the process.
cuflash_handle_t handle_of(Device device);

void synchronize(Device device);

// Skips the running test with the reason where the device is not there.
#define CUFLASH_REQUIRE_DEVICE(device)                   \
  do {                                                   \
    const std::string& reason = why_unavailable(device); \
    if (!reason.empty()) GTEST_SKIP() << reason;         \
  } while (0)

// Memory of the device, of exactly `bytes` and aligned to 256, with 256 guard bytes before and after.
class Buffer {
 public:
  Buffer(Device device, size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return base_ + kGuard; }
  size_t size() const { return bytes_; }
  void fill(unsigned char byte);
  void upload(const void* source);
  void download(void* target) const;
  bool guards_intact() const;

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xa5;

  Device device_;
  size_t bytes_;
  unsigned char* base_ = nullptr;
};

// A host array copied to the device; null where it is empty.
template <class T>
class DeviceArray {
 public:
  DeviceArray(Device device, const std::vector<T>& values)
      : buffer_(device, values.size() * sizeof(T)), empty_(values.empty()) {
    if (!empty_) buffer_.upload(values.data());
  }
  T* data() const { return empty_ ? nullptr : static_cast<T*>(buffer_.data()); }
  void upload(const std::vector<T>& values) { buffer_.upload(values.data()); }

 private:
  Buffer buffer_;
  bool empty_;
};

}  // namespace cuflash_test
