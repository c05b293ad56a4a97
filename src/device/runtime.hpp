// The host side of a CUDA device: what the API layer needs of the CUDA runtime, without its headers. A
// build without CUDA links runtime_none.cpp, where everything answers CUFLASH_ERROR_NOT_BUILT.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/capabilities.hpp"
#include "common/status.hpp"

namespace cuflash::device {

bool built_with_cuda();
const char* cuda_version_text();  // "13.0", "none"

// Statuses for a cudaError_t that a call named `what` returned. Takes our own error out of the runtime's
// last-error slot, where it is not sticky.
Status status_of(int cuda_error, const char* what);

// Whether a driver and a device are there: 12 or 19 with a message if not.
Status check_driver();
Status device_count(int* count);
Status current_device(int* device);
// Cached per device.
Status query_capabilities(int device, Capabilities* capabilities);

// Makes `device` current for a scope and restores the caller's device.
class DeviceGuard {
 public:
  DeviceGuard() = default;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  Status enter(int device);

 private:
  [[maybe_unused]] int restore_ = -1;  // a build without CUDA has nothing to restore
};

// Where a pointer lives. kUnknown: an address CUDA was never told of, plain host memory.
enum class Place { kDevice, kManaged, kPinnedHost, kUnknown };
struct PointerInfo {
  Place place = Place::kUnknown;
  int device = -1;
};
Status query_pointer(const void* pointer, PointerInfo* info);
// The device reads pageable host memory by itself.
bool reads_pageable_memory(int device);

// The private stream-ordered pool of the current device; legal during capture.
Status pool_prepare(int device);  // makes it, which the first allocation else does
Status pool_allocate(size_t bytes, int device, void* stream, void** memory);
Status pool_free(void* memory, void* stream);
Status pool_trim(int device);

Status fill_zero(void* memory, size_t bytes, void* stream);

}  // namespace cuflash::device
