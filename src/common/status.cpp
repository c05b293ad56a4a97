#include "common/status.hpp"

#include <cstdarg>
#include <cstdio>

namespace cuflash {
namespace {

// Trivially destructible on purpose: a destructor would be registered per thread and pin the library.
struct ThreadError {
  char message[4096];
  int cuda_error;
};
thread_local ThreadError t_error;

}  // namespace

Status fail(Status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(t_error.message, sizeof t_error.message, format, arguments);
  va_end(arguments);
  return status;
}

Status fail_cuda(Status status, int cuda_error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(t_error.message, sizeof t_error.message, format, arguments);
  va_end(arguments);
  t_error.cuda_error = cuda_error;
  return status;
}

void clear_error() {
  t_error.message[0] = '\0';
  t_error.cuda_error = 0;
}

const char* last_error() { return t_error.message; }
int last_cuda_error() { return t_error.cuda_error; }

}  // namespace cuflash
