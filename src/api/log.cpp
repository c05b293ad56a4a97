#include "api/log.hpp"

#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace cuflash {
namespace {

int32_t level_of_environment() {
  const char* text = std::getenv("CUFLASH_LOG_LEVEL");
  return text == nullptr ? CUFLASH_LOG_OFF : static_cast<int32_t>(std::atoi(text));
}

struct Log {
  std::mutex mutex;  // guards the members below, not the callback while it runs
  cuflash_log_fn callback = nullptr;
  void* user = nullptr;
  FILE* file = nullptr;
  // What log_enabled() reads: the callback's level while there is one, else the environment's.
  std::atomic<int32_t> level{level_of_environment()};

  FILE* open_file() {
    if (file != nullptr) return file;
    const char* pattern = std::getenv("CUFLASH_LOG_FILE");
    if (pattern != nullptr && pattern[0] != '\0') {
      std::string name = pattern;
      for (size_t at = name.find("%p"); at != std::string::npos; at = name.find("%p", at))
        name.replace(at, 2, std::to_string(getpid()));
      file = std::fopen(name.c_str(), "a");
    }
    if (file == nullptr) file = stderr;
    return file;
  }
};

// Never destroyed: calls may still run while the process exits.
Log& log() {
  static Log* instance = new Log();
  return *instance;
}

}  // namespace

bool log_enabled(int32_t level) { return level <= log().level.load(std::memory_order_relaxed); }

void log_line(int32_t level, const char* format, ...) {
  if (!log_enabled(level)) return;
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Log& out = log();
  std::unique_lock<std::mutex> lock(out.mutex);
  if (out.callback != nullptr) {
    const cuflash_log_fn callback = out.callback;
    void* user = out.user;
    lock.unlock();
    callback(user, level, text);
    return;
  }
  FILE* file = out.open_file();
  std::fprintf(file, "cuflash[%d]: %s\n", static_cast<int>(getpid()), text);
  std::fflush(file);
}

void set_log_callback(cuflash_log_fn callback, void* user, int32_t level) {
  Log& out = log();
  const std::lock_guard<std::mutex> lock(out.mutex);
  out.callback = callback;
  out.user = user;
  out.level.store(callback != nullptr ? level : level_of_environment(), std::memory_order_relaxed);
}

}  // namespace cuflash
