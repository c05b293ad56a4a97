// The CUDA runtime of a build without CUDA: everything answers "not built".
#include "device/runtime.hpp"

namespace cuflash::device {
namespace {

Status not_built() {
  return fail(CUFLASH_ERROR_NOT_BUILT,
              "this library was built without CUDA; the CPU device works: cuflash_create(&handle, "
              "CUFLASH_DEVICE_CPU), cuflash_set_default_device(CUFLASH_DEVICE_CPU) or "
              "CUFLASH_DEVICE=cpu");
}

}  // namespace

bool built_with_cuda() { return false; }
const char* cuda_version_text() { return "none"; }
Status status_of(int, const char*) { return not_built(); }
Status check_driver() { return not_built(); }
Status device_count(int*) { return not_built(); }
Status current_device(int*) { return not_built(); }
Status query_capabilities(int, Capabilities*) { return not_built(); }
DeviceGuard::~DeviceGuard() = default;
Status DeviceGuard::enter(int) { return not_built(); }
Status query_pointer(const void*, PointerInfo*) { return not_built(); }
bool reads_pageable_memory(int) { return false; }
Status pool_prepare(int) { return not_built(); }
Status pool_allocate(size_t, int, void*, void**) { return not_built(); }
Status pool_free(void*, void*) { return not_built(); }
Status pool_trim(int) { return not_built(); }
Status fill_zero(void*, size_t, void*) { return not_built(); }

}  // namespace cuflash::device
