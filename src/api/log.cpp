// No lock anywhere: a fork() while another thread logs would leave it locked in the child for ever.
#include "api/log.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace cuflash {
namespace {

int32_t level_of_environment() {
  const char* text = std::getenv("CUFLASH_LOG_LEVEL");
  if (text == nullptr) return CUFLASH_LOG_OFF;
  return static_cast<int32_t>(
      std::clamp<long>(std::strtol(text, nullptr, 10), CUFLASH_LOG_OFF, CUFLASH_LOG_CALLS));
}

struct Callback {
  cuflash_log_fn function;
  void* user;
  const Callback* older;  // keeps all that were ever set reachable
};

struct Log {
  // Callbacks are never freed: another thread may be about to call the one that was replaced.
  std::atomic<const Callback*> newest{nullptr};
  std::atomic<const Callback*> callback{nullptr};  // the one in force, null: none
  // What log_enabled() reads: the callback's level while there is one, else the environment's.
  std::atomic<int32_t> level{level_of_environment()};
};

// Never destroyed: calls may still run while the process exits.
Log& log() {
  static Log* instance = new Log();
  return *instance;
}

// CUFLASH_LOG_FILE, opened for each line: lines are few, and no descriptor outlives a fork or an exec.
int open_file() {
  const char* pattern = std::getenv("CUFLASH_LOG_FILE");
  if (pattern == nullptr || pattern[0] == '\0') return -1;
  std::string name = pattern;
  const std::string process = std::to_string(getpid());
  for (size_t at = name.find("%p"); at != std::string::npos; at = name.find("%p", at))
    name.replace(at, 2, process);
  return open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
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
  if (const Callback* callback = log().callback.load(std::memory_order_acquire)) {
    callback->function(callback->user, level, text);
    return;
  }
  const std::string line = "cuflash[" + std::to_string(getpid()) + "]: " + text + "\n";
  const int file = open_file();
  // One write a line, so that lines of several threads do not mix. A log that cannot be written is no
  // reason to fail a call.
  const ssize_t written = write(file >= 0 ? file : STDERR_FILENO, line.data(), line.size());
  (void)written;
  if (file >= 0) close(file);
}

void set_log_callback(cuflash_log_fn callback, void* user, int32_t level) {
  Log& out = log();
  const Callback* made = nullptr;
  if (callback != nullptr) {
    auto* fresh = new Callback{callback, user, out.newest.load(std::memory_order_relaxed)};
    while (!out.newest.compare_exchange_weak(fresh->older, fresh, std::memory_order_relaxed)) {
    }
    made = fresh;
  }
  out.callback.store(made, std::memory_order_release);
  out.level.store(callback != nullptr ? level : level_of_environment(), std::memory_order_relaxed);
}

}  // namespace cuflash
