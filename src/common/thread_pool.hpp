// Threads of the CPU device: started by the first call that can use them, owned by a handle.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace cuflash {

class ThreadPool {
 public:
  ThreadPool();
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls f(begin, end) over pieces that cover [0, count), on up to `threads` threads, the caller's among
  // them, and returns when all are done. f must not throw. Where the pool is busy with another caller's work,
  // in a forked child, or where threads cannot be started, the caller does all of it alone.
  void parallel_for(int64_t count, int threads, const std::function<void(int64_t, int64_t)>& f);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The number of processors that this process may use.
int available_cpus();

}  // namespace cuflash
