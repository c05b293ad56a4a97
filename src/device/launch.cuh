// Launching a kernel: the launch's own return value is the error, so that errors of others are neither
// reported nor cleared.
#pragma once

#include <type_traits>

#include <cuda_runtime.h>

#include "device/runtime.hpp"

namespace cuflash::device {

struct LaunchShape {
  int64_t blocks;
  int threads;
  size_t shared_memory = 0;  // dynamic bytes
};

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of grid.x; y and z stop at 65535 and are not used

// Arguments by reference, each of its parameter's type: a problem and its tensor maps are 1 KB, which would be copied at
// each step down.
template <class... Parameters>
Status launch(void (*kernel)(Parameters...), const char* name, const LaunchShape& shape,
              void* stream, const std::common_type_t<Parameters>&... arguments) {
  if (shape.blocks == 0) return CUFLASH_SUCCESS;  // an empty grid is an error to CUDA
  if (shape.blocks < 0 || shape.blocks > kMaxBlocks)
    return fail(CUFLASH_ERROR_INTERNAL, "%s: grid of %lld blocks", name,
                static_cast<long long>(shape.blocks));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_memory;
  config.stream = static_cast<cudaStream_t>(stream);
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const cudaError_t error =
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, name);
}

// Loads a kernel on the current device and raises its shared-memory limit where it needs more than 48 KB.
template <class... Parameters>
Status load_kernel(void (*kernel)(Parameters...), const char* name, size_t shared_memory = 0) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error == cudaSuccess && shared_memory > 48 * 1024)
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_memory));
  return error == cudaSuccess ? CUFLASH_SUCCESS : status_of(error, name);
}

}  // namespace cuflash::device
