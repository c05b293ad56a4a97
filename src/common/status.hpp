// Statuses inside the library and the message that goes with them.
#pragma once

#include <cstddef>

#include "cuflash.h"

namespace cuflash {

using Status = cuflash_status_t;

// Writes this thread's message (printf form) and returns `status`.
[[gnu::format(printf, 2, 3)]] Status fail(Status status, const char* format, ...);

// As fail(), for a failed CUDA call whose cudaError_t the caller may ask for.
[[gnu::format(printf, 3, 4)]] Status fail_cuda(Status status, int cuda_error, const char* format,
                                               ...);

// Start of an entry point: no message, no CUDA error.
void clear_error();

const char* last_error();
int last_cuda_error();

// The counter gives each expansion its own name: the expression may hold a lambda that uses the macro too.
#define CUFLASH_TRY(expression) CUFLASH_TRY_COUNTED_(expression, __COUNTER__)
#define CUFLASH_TRY_COUNTED_(expression, counter) CUFLASH_TRY_NAMED_(expression, counter)
#define CUFLASH_TRY_NAMED_(expression, counter)                                       \
  do {                                                                                \
    const ::cuflash::Status cuflash_status_##counter = (expression);                  \
    if (cuflash_status_##counter != CUFLASH_SUCCESS) return cuflash_status_##counter; \
  } while (0)

#define CUFLASH_CHECK(condition, status, ...)                        \
  do {                                                               \
    if (!(condition)) return ::cuflash::fail((status), __VA_ARGS__); \
  } while (0)

}  // namespace cuflash
