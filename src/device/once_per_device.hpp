// Runs something once for each device, also with racing first calls. A failure is not remembered.
#pragma once

#include <atomic>
#include <mutex>

#include "common/status.hpp"

namespace cuflash::device {

constexpr int kMaxDevices = 64;

class OncePerDevice {
 public:
  template <class F>
  Status run(int device, F f) {
    CUFLASH_CHECK(device >= 0 && device < kMaxDevices, CUFLASH_ERROR_INVALID_VALUE,
                  "device %d: cuflash knows CUDA ordinals 0 to %d", device, kMaxDevices - 1);
    if (done_[device].load(std::memory_order_acquire)) return CUFLASH_SUCCESS;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done_[device].load(std::memory_order_relaxed)) return CUFLASH_SUCCESS;
    const Status status = f();
    if (status == CUFLASH_SUCCESS) done_[device].store(true, std::memory_order_release);
    return status;
  }

  bool is_done(int device) const {
    return device >= 0 && device < kMaxDevices && done_[device].load(std::memory_order_acquire);
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> done_[kMaxDevices] = {};
};

}  // namespace cuflash::device
