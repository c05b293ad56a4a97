// Handles, and the session that every call opens: which device, what it can do, with which options.
#pragma once

#include <string>

#include "common/capabilities.hpp"
#include "common/thread_pool.hpp"
#include "core/variant.hpp"
#include "cuflash.h"
#include "device/runtime.hpp"

namespace cuflash {

struct Options {
  bool deterministic = false, batch_invariant = false, check_pointers = true;
  int sm_margin = 0, cpu_threads = 0;
};

struct Allocator {
  cuflash_alloc_fn allocate = nullptr;
  cuflash_free_fn release = nullptr;
  void* user = nullptr;
};

}  // namespace cuflash

struct cuflash_handle {
  int32_t device;
  cuflash::Options options;
  std::string kernel;  // forced, "" none
  cuflash::Allocator allocator;
  cuflash::ThreadPool pool;
};

namespace cuflash {

// The handle that NULL stands for on the CPU device.
cuflash_handle& default_cpu_handle();

struct Session {
  bool is_cpu = false;
  int device = 0;  // CUDA ordinal, or CUFLASH_DEVICE_CPU
  Capabilities capabilities;
  Options options;
  Allocator allocator;
  const char* kernel = nullptr;  // forced by the handle or the environment
  const char* kernel_source = "CUFLASH_KERNEL";
  ThreadPool* pool = nullptr;
  device::DeviceGuard guard;  // the call's device is current while the session lives

  // Makes the handle's device current and reads its capabilities.
  Status open(cuflash_handle_t handle, int32_t extra_sm_margin);
  // For queries about a GPU that need not be there.
  Status open_faked(cuflash_handle_t handle, int32_t target_arch, int32_t extra_sm_margin);

 private:
  void take_options(cuflash_handle_t handle);
};

}  // namespace cuflash
