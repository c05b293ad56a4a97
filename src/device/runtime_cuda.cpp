#include "device/runtime.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "device/once_per_device.hpp"

namespace cuflash::device {
namespace {

struct DeviceState {
  OncePerDevice capabilities_once, pool_once;
  Capabilities capabilities[kMaxDevices];
  bool pageable[kMaxDevices];
  cudaMemPool_t pools[kMaxDevices];
};

// Never destroyed: calls may still run while the process exits.
DeviceState& state() {
  static DeviceState* instance = new DeviceState();
  return *instance;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

Status create_pool(int device) {
  int supported = 0;
  cudaError_t error = cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device);
  if (error != cudaSuccess) return status_of(error, "cudaDeviceGetAttribute");
  CUFLASH_CHECK(supported != 0, CUFLASH_ERROR_UNSUPPORTED,
                "device %d has no stream-ordered memory pools: give a workspace or an allocator",
                device);
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  cudaMemPool_t pool;
  // Another thread may be capturing in the global mode, which forbids this call to all threads but those
  // that say they know better: a pool belongs to no stream.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  error = cudaMemPoolCreate(&pool, &properties);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return status_of(error, "cudaMemPoolCreate");
  // Keeps up to this much between calls; at 0 each synchronisation would give the memory back.
  uint64_t threshold = uint64_t{64} << 20;
  error = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold);
  if (error != cudaSuccess) return status_of(error, "cudaMemPoolSetAttribute");
  state().pools[device] = pool;
  return CUFLASH_SUCCESS;
}

}  // namespace

bool built_with_cuda() { return true; }

const char* cuda_version_text() {
  static const std::string* text = new std::string(std::to_string(CUDART_VERSION / 1000) + "." +
                                                   std::to_string(CUDART_VERSION % 1000 / 10));
  return text->c_str();
}

Status status_of(int cuda_error, const char* what) {
  const auto error = static_cast<cudaError_t>(cuda_error);
  // Take our own error out of the last-error slot; another library's stays. Sticky ones cannot be taken out.
  if (cudaPeekAtLastError() == error) (void)cudaGetLastError();
  const char* name = cudaGetErrorName(error);
  const char* text = cudaGetErrorString(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return fail_cuda(CUFLASH_ERROR_OUT_OF_MEMORY, error, "%s: out of device memory (%s)", what,
                       name);
    case cudaErrorNoDevice:
      return fail_cuda(CUFLASH_ERROR_NO_DEVICE, error,
                       "%s: no CUDA device (%s); the CPU device works: CUFLASH_DEVICE_CPU", what,
                       name);
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return fail_cuda(CUFLASH_ERROR_UNSUPPORTED_ARCH, error,
                       "%s: this library holds no code for the GPU (%s); it was built for %s", what,
                       name, CUFLASH_CUDA_ARCHS);
    case cudaErrorInvalidResourceHandle:
    case cudaErrorDeviceUninitialized:
      return fail_cuda(CUFLASH_ERROR_WRONG_DEVICE, error,
                       "%s: the stream belongs to another device or context (%s)", what, name);
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureWrongThread:
      return fail_cuda(CUFLASH_ERROR_CAPTURE, error,
                       "%s: not possible during this stream capture (%s); call cuflash_preload() "
                       "before the capture",
                       what, name);
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return fail_cuda(CUFLASH_ERROR_ASYNCHRONOUS, error,
                       "%s: earlier work on this device faulted (%s: %s)", what, name, text);
    default:
      return fail_cuda(CUFLASH_ERROR_CUDA, error, "%s: %s: %s", what, name, text);
  }
}

Status check_driver() {
  static std::atomic<bool> good{false};
  if (good.load(std::memory_order_acquire)) return CUFLASH_SUCCESS;
  int version = 0;
  (void)cudaDriverGetVersion(&version);
  CUFLASH_CHECK(version != 0, CUFLASH_ERROR_NO_DEVICE,
                "no CUDA driver on this machine; the CPU device works: cuflash_create(&handle, "
                "CUFLASH_DEVICE_CPU), cuflash_set_default_device(CUFLASH_DEVICE_CPU) or "
                "CUFLASH_DEVICE=cpu");
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    (void)status_of(error, "cudaGetDeviceCount");
    return fail_cuda(CUFLASH_ERROR_DRIVER_TOO_OLD, error,
                     "the CUDA driver supports CUDA %d.%d, this library needs %d.%d",
                     version / 1000, version % 1000 / 10, CUDART_VERSION / 1000,
                     CUDART_VERSION % 1000 / 10);
  }
  if (error != cudaSuccess) return status_of(error, "cudaGetDeviceCount");
  good.store(true, std::memory_order_release);
  return CUFLASH_SUCCESS;
}

Status device_count(int* count) {
  CUFLASH_TRY(check_driver());
  const cudaError_t error = cudaGetDeviceCount(count);
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "cudaGetDeviceCount");
}

Status current_device(int* device) {
  const cudaError_t error = cudaGetDevice(device);
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "cudaGetDevice");
}

Status query_capabilities(int device, Capabilities* capabilities) {
  CUFLASH_TRY(state().capabilities_once.run(device, [&]() -> Status {
    int major = 0, minor = 0, sm_count = 0, shared_memory = 0, pageable = 0;
    const struct {
      int* value;
      cudaDeviceAttr attribute;
    } queries[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                   {&minor, cudaDevAttrComputeCapabilityMinor},
                   {&sm_count, cudaDevAttrMultiProcessorCount},
                   {&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                   {&pageable, cudaDevAttrPageableMemoryAccess}};
    for (const auto& query : queries) {
      const cudaError_t error = cudaDeviceGetAttribute(query.value, query.attribute, device);
      if (error != cudaSuccess) return status_of(error, "cudaDeviceGetAttribute");
    }
    Capabilities& c = state().capabilities[device];
    c.arch = 10 * major + minor;
    c.sm_count = sm_count;
    c.shared_memory_per_block = shared_memory;
    state().pageable[device] = pageable != 0;
    return CUFLASH_SUCCESS;
  }));
  *capabilities = state().capabilities[device];
  return CUFLASH_SUCCESS;
}

DeviceGuard::~DeviceGuard() {
  if (restore_ >= 0) (void)cudaSetDevice(restore_);
}

Status DeviceGuard::enter(int device) {
  int current = -1;
  CUFLASH_TRY(current_device(&current));
  if (current == device) return CUFLASH_SUCCESS;
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return status_of(error, "cudaSetDevice");
  restore_ = current;
  return CUFLASH_SUCCESS;
}

Status query_pointer(const void* pointer, PointerInfo* info) {
  cudaPointerAttributes attributes;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
  if (error == cudaErrorInvalidValue) {  // how some drivers answer for plain host memory
    (void)status_of(error, "cudaPointerGetAttributes");
    clear_error();
    *info = {};
    return CUFLASH_SUCCESS;
  }
  if (error != cudaSuccess) return status_of(error, "cudaPointerGetAttributes");
  info->device = attributes.device;
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
      info->place = Place::kDevice;
      break;
    case cudaMemoryTypeManaged:
      info->place = Place::kManaged;
      break;
    case cudaMemoryTypeHost:
      info->place = Place::kPinnedHost;
      break;
    default:
      info->place = Place::kUnknown;
  }
  return CUFLASH_SUCCESS;
}

bool reads_pageable_memory(int device) {
  return device >= 0 && device < kMaxDevices && state().pageable[device];
}

Status pool_prepare(int device) {
  return state().pool_once.run(device, [&] { return create_pool(device); });
}

Status pool_allocate(size_t bytes, int device, void* stream, void** memory) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t error;
  // In a capture this makes a memory node, which the graph owns whatever the pool; making a pool there
  // would end the capture.
  if (!state().pool_once.is_done(device) && is_capturing(cuda_stream)) {
    error = cudaMallocAsync(memory, bytes, cuda_stream);
  } else {
    CUFLASH_TRY(pool_prepare(device));
    error = cudaMallocFromPoolAsync(memory, bytes, state().pools[device], cuda_stream);
  }
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "workspace from the pool");
}

Status pool_free(void* memory, void* stream) {
  const cudaError_t error = cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "workspace back to the pool");
}

Status pool_trim(int device) {
  CUFLASH_TRY(pool_prepare(device));
  const cudaError_t error = cudaMemPoolTrimTo(state().pools[device], 0);
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "cudaMemPoolTrimTo");
}

Status fill_zero(void* memory, size_t bytes, void* stream) {
  const cudaError_t error = cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, "cudaMemsetAsync");
}

}  // namespace cuflash::device
