#include "api/handle.hpp"

#include <strings.h>

#include <atomic>
#include <cstdlib>

#include "api/entry.hpp"
#include "api/tables.hpp"

namespace cuflash {
namespace {

constexpr int32_t kUnknownDevice = -3;  // of the environment: calls on NULL handles refuse it

int32_t device_of_environment() {
  const char* text = std::getenv("CUFLASH_DEVICE");
  if (text == nullptr || text[0] == '\0' || strcasecmp(text, "cuda") == 0)
    return CUFLASH_DEVICE_CURRENT;
  return strcasecmp(text, "cpu") == 0 ? CUFLASH_DEVICE_CPU : kUnknownDevice;
}

std::atomic<int32_t>& default_device() {
  static std::atomic<int32_t> device{device_of_environment()};
  return device;
}

// Read once per process.
const char* kernel_of_environment() {
  static const char* name = std::getenv("CUFLASH_KERNEL");
  return name;
}

struct OptionRow {
  int32_t key;
  int64_t minimum, maximum, initial;
};
constexpr OptionRow kOptions[] = {
    {CUFLASH_OPTION_DETERMINISTIC, 0, 1, 0},  {CUFLASH_OPTION_BATCH_INVARIANT, 0, 1, 0},
    {CUFLASH_OPTION_SM_MARGIN, 0, 1024, 0},   {CUFLASH_OPTION_CPU_THREADS, 0, 1024, 0},
    {CUFLASH_OPTION_CHECK_POINTERS, 0, 1, 1},
};

const OptionRow* find_option(int32_t key) {
  for (const OptionRow& row : kOptions)
    if (row.key == key) return &row;
  return nullptr;
}

Status unknown_option(int32_t key) {
  return fail(CUFLASH_ERROR_INVALID_VALUE, "key: %d is no option; there are %d to %d", key,
              kOptions[0].key, kOptions[sizeof kOptions / sizeof kOptions[0] - 1].key);
}

// Typical parts, for questions about a GPU that is not there.
Status faked_capabilities(int32_t arch, Capabilities* c) {
  struct Row {
    int arch, sm_count, shared_memory;
  };
  constexpr Row kRows[] = {{70, 80, 98304},   {75, 40, 65536},    {80, 108, 166912},
                           {86, 84, 101376},  {87, 16, 166912},   {89, 128, 101376},
                           {90, 132, 232448}, {100, 148, 232448}, {103, 148, 232448},
                           {110, 20, 232448}, {120, 170, 101376}, {121, 48, 101376}};
  for (const Row& row : kRows) {
    if (row.arch != arch) continue;
    c->arch = arch, c->sm_count = row.sm_count, c->shared_memory_per_block = row.shared_memory;
    return CUFLASH_SUCCESS;
  }
  return fail(CUFLASH_ERROR_UNSUPPORTED_ARCH,
              "problem.target_arch: %d; known are 70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120 "
              "and 121",
              arch);
}

int effective_sms(int sm_count, int64_t margin) {
  const int64_t left = sm_count - margin;
  return static_cast<int>(left < 1 ? 1 : left);
}

}  // namespace

cuflash_handle& default_cpu_handle() {
  // Never destroyed: joining its threads while the process exits could hang.
  static cuflash_handle* handle = new cuflash_handle{CUFLASH_DEVICE_CPU, {}, {}, {}, {}};
  return *handle;
}

void Session::take_options(cuflash_handle_t handle) {
  kernel = kernel_of_environment();
  if (handle == nullptr) return;
  options = handle->options;
  allocator = handle->allocator;
  if (handle->kernel.empty()) return;
  kernel = handle->kernel.c_str();
  kernel_source = "cuflash_set_kernel";
}

Status Session::open(cuflash_handle_t handle, int32_t extra_sm_margin) {
  take_options(handle);
  device = handle != nullptr ? handle->device : default_device().load();
  CUFLASH_CHECK(device != kUnknownDevice, CUFLASH_ERROR_INVALID_VALUE,
                "CUFLASH_DEVICE in the environment is neither cpu nor cuda");
  is_cpu = device == CUFLASH_DEVICE_CPU;
  if (is_cpu) {
    capabilities.is_cpu = true;
    capabilities.cpu_threads = options.cpu_threads > 0 ? options.cpu_threads : available_cpus();
    pool = handle != nullptr ? &handle->pool : &default_cpu_handle().pool;
    return CUFLASH_SUCCESS;
  }
  CUFLASH_TRY(device::check_driver());
  if (device == CUFLASH_DEVICE_CURRENT)
    CUFLASH_TRY(device::current_device(&device));
  else
    CUFLASH_TRY(guard.enter(device));
  CUFLASH_TRY(device::query_capabilities(device, &capabilities));
  capabilities.sm_count =
      effective_sms(capabilities.sm_count, int64_t{options.sm_margin} + extra_sm_margin);
  return CUFLASH_SUCCESS;
}

Status Session::open_faked(cuflash_handle_t handle, int32_t target_arch, int32_t extra_sm_margin) {
  take_options(handle);
  device = 0;
  CUFLASH_TRY(faked_capabilities(target_arch, &capabilities));
  capabilities.sm_count =
      effective_sms(capabilities.sm_count, int64_t{options.sm_margin} + extra_sm_margin);
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash

using namespace cuflash;

extern "C" {

cuflash_status_t cuflash_create(cuflash_handle_t* handle, int32_t device) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(handle != nullptr, CUFLASH_ERROR_NULL_POINTER, "handle: is NULL");
    *handle = nullptr;
    if (device != CUFLASH_DEVICE_CPU) {
      CUFLASH_CHECK(device >= 0 || device == CUFLASH_DEVICE_CURRENT, CUFLASH_ERROR_INVALID_VALUE,
                    "device: %d; a CUDA ordinal, CUFLASH_DEVICE_CPU (-1) or "
                    "CUFLASH_DEVICE_CURRENT (-2)",
                    device);
      int count = 0;
      CUFLASH_TRY(device::device_count(&count));
      CUFLASH_CHECK(device < count, CUFLASH_ERROR_INVALID_VALUE,
                    "device: %d; this machine has the CUDA devices 0 to %d", device, count - 1);
    }
    *handle = new cuflash_handle{device, {}, {}, {}, {}};
    log_line(CUFLASH_LOG_INFO, "created a handle for device %d", device);
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_destroy(cuflash_handle_t handle) {
  return entry(__func__, [&]() -> Status {
    delete handle;
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_set_default_device(int32_t device) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(device >= CUFLASH_DEVICE_CURRENT, CUFLASH_ERROR_INVALID_VALUE,
                  "device: %d; a CUDA ordinal, CUFLASH_DEVICE_CPU (-1) or CUFLASH_DEVICE_CURRENT "
                  "(-2)",
                  device);
    if (device >= 0) {
      int count = 0;
      CUFLASH_TRY(device::device_count(&count));
      CUFLASH_CHECK(device < count, CUFLASH_ERROR_INVALID_VALUE,
                    "device: %d; this machine has the CUDA devices 0 to %d", device, count - 1);
    }
    default_device().store(device);
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_set_option(cuflash_handle_t handle, int32_t key, int64_t value) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(handle != nullptr, CUFLASH_ERROR_NULL_POINTER,
                  "handle: is NULL; the default handle has default options");
    const OptionRow* row = find_option(key);
    if (row == nullptr) return unknown_option(key);
    CUFLASH_CHECK(value >= row->minimum && value <= row->maximum, CUFLASH_ERROR_INVALID_VALUE,
                  "value: %lld for option %d; %lld to %lld", static_cast<long long>(value), key,
                  static_cast<long long>(row->minimum), static_cast<long long>(row->maximum));
    switch (key) {
      case CUFLASH_OPTION_DETERMINISTIC:
        handle->options.deterministic = value != 0;
        break;
      case CUFLASH_OPTION_BATCH_INVARIANT:
        handle->options.batch_invariant = value != 0;
        break;
      case CUFLASH_OPTION_SM_MARGIN:
        handle->options.sm_margin = static_cast<int>(value);
        break;
      case CUFLASH_OPTION_CPU_THREADS:
        handle->options.cpu_threads = static_cast<int>(value);
        break;
      default:
        handle->options.check_pointers = value != 0;
    }
    log_line(CUFLASH_LOG_INFO, "option %d = %lld", key, static_cast<long long>(value));
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_get_option(cuflash_handle_t handle, int32_t key, int64_t* value) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(value != nullptr, CUFLASH_ERROR_NULL_POINTER, "value: is NULL");
    const OptionRow* row = find_option(key);
    if (row == nullptr) return unknown_option(key);
    *value = row->initial;
    if (handle == nullptr) return CUFLASH_SUCCESS;
    switch (key) {
      case CUFLASH_OPTION_DETERMINISTIC:
        *value = handle->options.deterministic;
        break;
      case CUFLASH_OPTION_BATCH_INVARIANT:
        *value = handle->options.batch_invariant;
        break;
      case CUFLASH_OPTION_SM_MARGIN:
        *value = handle->options.sm_margin;
        break;
      case CUFLASH_OPTION_CPU_THREADS:
        *value = handle->options.cpu_threads;
        break;
      default:
        *value = handle->options.check_pointers;
    }
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_option_bounds(int32_t key, int64_t* minimum, int64_t* maximum) {
  return entry(__func__, [&]() -> Status {
    const OptionRow* row = find_option(key);
    if (row == nullptr) return unknown_option(key);
    if (minimum != nullptr) *minimum = row->minimum;
    if (maximum != nullptr) *maximum = row->maximum;
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_set_kernel(cuflash_handle_t handle, const char* name) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(handle != nullptr, CUFLASH_ERROR_NULL_POINTER,
                  "handle: is NULL; for the default handle set CUFLASH_KERNEL or problem.kernel");
    const bool none = name == nullptr || name[0] == '\0';
    if (!none && !is_kernel_name(all_variants(), name))
      return fail_unknown_kernel(all_variants(), name, "name");
    handle->kernel = none ? "" : name;
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_set_allocator(cuflash_handle_t handle, cuflash_alloc_fn allocate,
                                       cuflash_free_fn release, void* user) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(handle != nullptr, CUFLASH_ERROR_NULL_POINTER, "handle: is NULL");
    CUFLASH_CHECK((allocate == nullptr) == (release == nullptr), CUFLASH_ERROR_NULL_POINTER,
                  "%s: is NULL while the other is not",
                  allocate == nullptr ? "allocate" : "release");
    handle->allocator = {allocate, release, user};
    return CUFLASH_SUCCESS;
  });
}

void cuflash_set_log_callback(cuflash_log_fn callback, void* user, int32_t level) {
  try {
    set_log_callback(callback, user, level);
  } catch (...) {  // a mutex that cannot be locked: logging stays as it was
    return;
  }
}

}  // extern "C"
