#include "common/thread_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace cuflash {

struct ThreadPool::State {
  std::mutex busy;  // held by the caller whose work runs

  std::mutex mutex;  // guards what follows
  std::condition_variable work_ready, work_done;
  uint64_t generation = 0;
  int running = 0;  // workers still in the current generation
  int wanted = 0;   // workers that the current generation uses
  bool stop = false;
  const std::function<void(int64_t, int64_t)>* f = nullptr;
  int64_t count = 0, piece = 0;
  std::atomic<int64_t> next{0};

  std::vector<std::thread> workers;
  std::atomic<pid_t> owner{0};  // the process whose threads these are

  bool is_forked() const {
    const pid_t process = owner.load(std::memory_order_relaxed);
    return process != 0 && process != getpid();
  }

  void take_pieces(const std::function<void(int64_t, int64_t)>& g) {
    for (;;) {
      const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= count) return;
      g(begin, std::min(begin + piece, count));
    }
  }

  void worker(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      work_ready.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      if (index >= wanted) continue;
      const auto* g = f;
      lock.unlock();
      take_pieces(*g);
      lock.lock();
      if (--running == 0) work_done.notify_one();
    }
  }
};

ThreadPool::ThreadPool() : state_(new State) {}

ThreadPool::~ThreadPool() {
  if (state_->is_forked()) {
    // A forked child: the threads are not here, and joining them would hang or abort.
    (void)state_.release();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->work_ready.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::parallel_for(int64_t count, int threads,
                              const std::function<void(int64_t, int64_t)>& f) {
  if (count <= 0) return;
  State& state = *state_;
  const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
  if (helpers < 1 || state.is_forked() || !state.busy.try_lock()) return f(0, count);
  const std::lock_guard<std::mutex> busy(state.busy, std::adopt_lock);

  std::unique_lock<std::mutex> lock(state.mutex);
  state.owner.store(getpid(), std::memory_order_relaxed);
  try {
    while (static_cast<int>(state.workers.size()) < helpers) {
      const int index = static_cast<int>(state.workers.size());
      state.workers.emplace_back(&State::worker, &state, index, state.generation);
    }
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
    // No more threads to be had: work with those that there are.
  }
  state.f = &f;
  state.count = count;
  // Several pieces a thread, since rows of a causal mask differ in cost.
  state.piece = std::max<int64_t>(1, count / (int64_t{8} * (helpers + 1)));
  state.next.store(0, std::memory_order_relaxed);
  state.wanted = std::min(helpers, static_cast<int>(state.workers.size()));
  state.running = state.wanted;
  ++state.generation;
  lock.unlock();
  state.work_ready.notify_all();
  state.take_pieces(f);
  lock.lock();
  state.work_done.wait(lock, [&] { return state.running == 0; });
}

int available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace cuflash
