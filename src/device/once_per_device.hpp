// Runs something once for each device, also with racing first calls. A failure is not remembered.
#pragma once

#include <atomic>
#include <mutex>

#include "common/status.hpp"

namespace cuflash::device {

class OncePerDevice {
 public:
  template <class F>
  Status run(int device, F f) {
    if (device < 0 || device >= kMaxDevices) return f();
    if (done_[device].load(std::memory_order_acquire)) return CUFLASH_SUCCESS;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done_[device].load(std::memory_order_relaxed)) return CUFLASH_SUCCESS;
    const Status status = f();
    if (status == CUFLASH_SUCCESS) done_[device].store(true, std::memory_order_release);
    return status;
  }

 private:
  static constexpr int kMaxDevices = 64;
  std::mutex mutex_;
  std::atomic<bool> done_[kMaxDevices] = {};
};

}  // namespace cuflash::device
