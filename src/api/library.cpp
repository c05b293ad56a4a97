// Version, statuses, messages, and the initialisation of structs.
#include <cstring>
#include <string>

#include "api/checks.hpp"
#include "api/entry.hpp"
#include "device/runtime.hpp"

namespace cuflash {
namespace {

struct StatusRow {
  const char* name;
  const char* text;
};

// By value. The texts of 0 to 5 and 7 are those of releases up to 0.6.
constexpr StatusRow kStatuses[] = {
    {"CUFLASH_SUCCESS", "Success"},
    {"CUFLASH_ERROR_INVALID_DIMENSION", "Invalid dimension: dimensions must be positive"},
    {"CUFLASH_ERROR_DIMENSION_MISMATCH",
     "Dimension mismatch: Q, K, V tensors have incompatible shapes"},
    {"CUFLASH_ERROR_NULL_POINTER", "Null pointer: input or output pointer is null"},
    {"CUFLASH_ERROR_CUDA", "CUDA error occurred"},
    {"CUFLASH_ERROR_OUT_OF_MEMORY", "Out of memory: insufficient GPU memory"},
    {"CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM", "Unsupported head_dim: must be 1 to 256"},
    {"CUFLASH_ERROR_UNSUPPORTED_DTYPE", "Unsupported data type"},
    {"CUFLASH_ERROR_INVALID_VALUE", "Invalid value: an argument is out of its range"},
    {"CUFLASH_ERROR_MISALIGNED", "Misaligned pointer: not a multiple of the element size"},
    {"CUFLASH_ERROR_UNSUPPORTED", "Unsupported field or combination"},
    {"CUFLASH_ERROR_WORKSPACE_TOO_SMALL", "Workspace too small"},
    {"CUFLASH_ERROR_NO_DEVICE", "No CUDA device or driver; the CPU device works"},
    {"CUFLASH_ERROR_UNSUPPORTED_ARCH", "Unsupported architecture: no code for this GPU"},
    {"CUFLASH_ERROR_STRUCT_SIZE", "Wrong struct_size, or an unknown field is set"},
    {"CUFLASH_ERROR_ALIASING", "Aliasing: an output overlaps other memory of the call"},
    {"CUFLASH_ERROR_INTERNAL", "Internal error: a bug in cuflash"},
    {"CUFLASH_ERROR_WRONG_DEVICE", "Wrong device: memory or stream of another device"},
    {"CUFLASH_ERROR_NOT_BUILT", "Not built: left out of this build of the library"},
    {"CUFLASH_ERROR_DRIVER_TOO_OLD", "CUDA driver too old for this library"},
    {"CUFLASH_ERROR_HOST_MEMORY", "Out of host memory"},
    {"CUFLASH_ERROR_CAPTURE", "Not possible during stream capture: preload first"},
    {"CUFLASH_ERROR_ASYNCHRONOUS", "An earlier asynchronous fault: the CUDA context is lost"},
};

const StatusRow* status_row(int32_t status) {
  constexpr int32_t kCount = sizeof kStatuses / sizeof kStatuses[0];
  return status >= 0 && status < kCount ? &kStatuses[status] : nullptr;
}

#define CUFLASH_TEXT_(x) #x
#define CUFLASH_TEXT(x) CUFLASH_TEXT_(x)

}  // namespace
}  // namespace cuflash

using namespace cuflash;

extern "C" {

void cuflash_version(int32_t* major, int32_t* minor, int32_t* patch) {
  if (major != nullptr) *major = CUFLASH_VERSION_MAJOR;
  if (minor != nullptr) *minor = CUFLASH_VERSION_MINOR;
  if (patch != nullptr) *patch = CUFLASH_VERSION_PATCH;
}

int32_t cuflash_abi_version(void) { return CUFLASH_ABI; }

const char* cuflash_build_info(void) {
  static const std::string* info = new std::string(
      "cuflash " CUFLASH_TEXT(CUFLASH_VERSION_MAJOR) "." CUFLASH_TEXT(
          CUFLASH_VERSION_MINOR) "." CUFLASH_TEXT(CUFLASH_VERSION_PATCH) ", " +
      (device::built_with_cuda()
           ? "CUDA " + std::string(device::cuda_version_text()) + " for " CUFLASH_CUDA_ARCHS
           : std::string("CPU device only")) +
      ", compiler " __VERSION__);
  return info->c_str();
}

const char* cuflash_status_name(cuflash_status_t status) {
  const StatusRow* row = status_row(status);
  return row != nullptr ? row->name : "CUFLASH_STATUS_UNKNOWN";
}

const char* cuflash_error_string(int32_t status) {
  const StatusRow* row = status_row(status);
  return row != nullptr ? row->text : "Unknown error";
}

const char* cuflash_last_error(void) { return last_error(); }

size_t cuflash_last_error_copy(char* buffer, size_t capacity) {
  const char* message = last_error();
  const size_t length = std::strlen(message);
  if (buffer != nullptr && capacity > 0) {
    const size_t copied = length < capacity ? length : capacity - 1;
    std::memcpy(buffer, message, copied);
    buffer[copied] = '\0';
  }
  return length;
}

int32_t cuflash_last_cuda_error(void) { return last_cuda_error(); }

cuflash_status_t cuflash_problem_init(cuflash_problem_t* problem, size_t size) {
  return entry(__func__, [&] { return init_struct(problem, size, "problem"); });
}

cuflash_status_t cuflash_gradients_init(cuflash_gradients_t* gradients, size_t size) {
  return entry(__func__, [&] { return init_struct(gradients, size, "gradients"); });
}

cuflash_status_t cuflash_kv_cache_init(cuflash_kv_cache_t* cache, size_t size) {
  return entry(__func__, [&] { return init_struct(cache, size, "cache"); });
}

cuflash_status_t cuflash_kv_append_init(cuflash_kv_append_t* append, size_t size) {
  return entry(__func__, [&] { return init_struct(append, size, "append"); });
}

cuflash_status_t cuflash_merge_init(cuflash_merge_t* merge, size_t size) {
  return entry(__func__, [&] { return init_struct(merge, size, "merge"); });
}

cuflash_status_t cuflash_weights_init(cuflash_weights_t* weights, size_t size) {
  return entry(__func__, [&] { return init_struct(weights, size, "weights"); });
}

}  // extern "C"
