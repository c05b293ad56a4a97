// Calls from many threads at once.
#include <atomic>
#include <thread>

#include "api/problem.hpp"
#include "support/runner.hpp"

namespace cuflash_test {
namespace {

template <class F>
void on_threads(int count, F body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back([=] { body(t); });
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, MessagesAreTheirOwn) {
  SmallProblem good;
  good.problem.head_dim = 600;
  ASSERT_EQ(good.forward(), CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
  const std::string before = cuflash_last_error();
  on_threads(8, [](int t) {
    EXPECT_STREQ(cuflash_last_error(), "");
    for (int n = 0; n < 100; ++n) {
      SmallProblem s;
      s.problem.head_dim = 1000 + t;
      EXPECT_EQ(s.forward(), CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
      EXPECT_TRUE(message_names(std::to_string(1000 + t)));
    }
  });
  EXPECT_EQ(cuflash_last_error(), before);
}

// One handle, mixed operations and shapes, first use included.
TEST(Threads, OneHandleServesAll) {
  cuflash_handle_t handle = nullptr;
  ASSERT_EQ(cuflash_create(&handle, CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  SmallProblem expected;
  ASSERT_EQ(expected.forward(), CUFLASH_SUCCESS);
  ASSERT_EQ(expected.backward(), CUFLASH_SUCCESS);
  SmallProblem expected_decode;
  ASSERT_EQ(expected_decode.decode(), CUFLASH_SUCCESS);
  on_threads(8, [&](int t) {
    for (int n = 0; n < 50; ++n) {
      SmallProblem s;
      if ((t + n) % 3 == 0) {
        ASSERT_EQ(cuflash_attention_decode(handle, &s.decode_problem, &s.cache, nullptr),
                  CUFLASH_SUCCESS);
        ASSERT_EQ(s.o, expected_decode.o);
        continue;
      }
      ASSERT_EQ(cuflash_attention_forward(handle, &s.problem, nullptr), CUFLASH_SUCCESS);
      ASSERT_EQ(cuflash_attention_backward(handle, &s.problem, &s.gradients, nullptr),
                CUFLASH_SUCCESS);
      ASSERT_EQ(s.o, expected.o);
      ASSERT_EQ(s.lse, expected.lse);
      ASSERT_EQ(s.dq, expected.dq);
      ASSERT_EQ(s.dk, expected.dk);
      ASSERT_EQ(s.dv, expected.dv);
    }
  });
  EXPECT_EQ(cuflash_destroy(handle), CUFLASH_SUCCESS);
}

TEST(Threads, HandlesComeAndGo) {
  on_threads(8, [](int) {
    for (int n = 0; n < 20; ++n) {
      cuflash_handle_t handle = nullptr;
      ASSERT_EQ(cuflash_create(&handle, CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
      SmallProblem s;
      ASSERT_EQ(cuflash_attention_forward(handle, &s.problem, nullptr), CUFLASH_SUCCESS);
      ASSERT_EQ(cuflash_destroy(handle), CUFLASH_SUCCESS);
    }
  });
}

TEST(Threads, LogCallbacksRunOnTheCallingThread) {
  static std::atomic<int> lines{0};
  static thread_local int mine = 0;
  lines = 0;
  cuflash_set_log_callback([](void*, int32_t, const char*) { ++lines, ++mine; }, nullptr,
                           CUFLASH_LOG_ERROR);
  on_threads(8, [](int) {
    mine = 0;
    for (int n = 0; n < 50; ++n) {
      SmallProblem s;
      s.problem.batch = -1;
      EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_DIMENSION);
    }
    EXPECT_EQ(mine, 50);
  });
  cuflash_set_log_callback(nullptr, nullptr, 0);
  EXPECT_EQ(lines, 400);
}

}  // namespace
}  // namespace cuflash_test
