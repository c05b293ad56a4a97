#include "common/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace cuflash {
namespace {

TEST(ThreadPool, EveryIndexOnce) {
  ThreadPool pool;
  for (const int64_t count : {0, 1, 2, 3, 7, 100, 10007})
    for (const int threads : {1, 2, 3, 8, 64}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      pool.parallel_for(count, threads, [&](int64_t begin, int64_t end) {
        ASSERT_LE(0, begin);
        ASSERT_LE(end, count);
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const auto& hit : hits) ASSERT_EQ(hit, 1);
    }
}

TEST(ThreadPool, OneThreadIsTheCaller) {
  ThreadPool pool;
  pool.parallel_for(100, 1, [](int64_t, int64_t) {
    static const std::thread::id first = std::this_thread::get_id();
    EXPECT_EQ(std::this_thread::get_id(), first);
  });
}

TEST(ThreadPool, AtMostTheThreadsAskedFor) {
  ThreadPool pool;
  std::mutex mutex;
  std::set<std::thread::id> seen;
  for (int n = 0; n < 50; ++n)
    pool.parallel_for(64, 3, [&](int64_t, int64_t) {
      const std::lock_guard<std::mutex> lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
  EXPECT_GE(seen.size(), 1u);
  EXPECT_LE(seen.size(), 3u);
}

TEST(ThreadPool, ManyCallersAtOnce) {
  ThreadPool pool;
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int c = 0; c < 8; ++c)
    callers.emplace_back([&] {
      for (int n = 0; n < 200; ++n) {
        std::atomic<int64_t> sum{0};
        pool.parallel_for(100, 4, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        ASSERT_EQ(sum, 4950);
        total += sum;
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 8 * 200 * 4950);
}

TEST(ThreadPool, ManyPoolsComeAndGo) {
  for (int n = 0; n < 50; ++n) {
    ThreadPool pool;
    std::atomic<int> sum{0};
    pool.parallel_for(10, 4,
                      [&](int64_t begin, int64_t end) { sum += static_cast<int>(end - begin); });
    ASSERT_EQ(sum, 10);
  }
}

TEST(ThreadPool, ProcessorsAreCounted) { EXPECT_GE(available_cpus(), 1); }

}  // namespace
}  // namespace cuflash
