// The frame of every fallible entry point: clears the thread's message, lets nothing but a status out, and
// logs refusals.
#pragma once

#include <exception>
#include <new>

#include "api/log.hpp"
#include "common/status.hpp"

namespace cuflash {

template <class F>
Status entry(const char* function, F f) noexcept {
  clear_error();
  Status status;
  try {
    status = f();
  } catch (const std::bad_alloc&) {
    status = fail(CUFLASH_ERROR_HOST_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    status = fail(CUFLASH_ERROR_INTERNAL, "internal error: %s", error.what());
  } catch (...) {
    status = fail(CUFLASH_ERROR_INTERNAL, "internal error");
  }
  // A helper may have failed and been recovered from: a success leaves no message.
  if (status == CUFLASH_SUCCESS) {
    clear_error();
    return status;
  }
  try {
    log_line(CUFLASH_LOG_ERROR, "%s: %s: %s", function, cuflash_status_name(status), last_error());
  } catch (...) {
    return status;
  }
  return status;
}

}  // namespace cuflash
