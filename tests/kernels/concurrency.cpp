// Calls at the same time: from many threads, and through handles that want different things. Streams are in cuda/.
//   CUFLASH_TEST_REPEATS  of a call under load (20 on the CPU, 200 on CUDA)
#include <atomic>
#include <thread>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr Operation kOperations[] = {Operation::kForward, Operation::kBackward, Operation::kDecode};

class Concurrency : public DeviceTest {
 protected:
  static Case small(Operation operation, Dtype dtype) {
    Case c = make_case(GetParam(), operation, {2, 4, 2, 33, 130, 64}, causal_mask());
    c.dtype = dtype;
    if (operation == Operation::kDecode) c.num_splits = 3;
    return c;
  }
};
CUFLASH_FOR_DEVICES(Concurrency);

TEST_P(Concurrency, EightThreads) {
  struct Job {
    Case c;
    Inputs in;
    Results expected;
  };
  std::vector<Job> jobs;
  for (const Operation operation : kOperations)
    for (const Dtype dtype : kEveryDtype)
      for (const std::string& kernel : accepting_kernels(small(operation, dtype))) {
        Job job{small(operation, dtype), {}, {}};
        job.c.kernel = kernel;
        job.in = make_inputs(job.c, DataKind::kNormal, jobs.size() + 1);
        job.expected = run_ok(job.c, job.in);
        jobs.push_back(std::move(job));
      }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (size_t n = 0; n < jobs.size(); ++n) {
        const Job& job = jobs[(n + t * 3) % jobs.size()];  // each thread elsewhere in the list
        expect_same_bits(run_ok(job.c, job.in), job.expected);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// A call gives the same bits again and again while other threads keep the device busy.
TEST_P(Concurrency, P27_DeterministicUnderLoad) {
  std::atomic<bool> done{false};
  std::vector<std::thread> load;
  for (uint64_t t = 0; t < 2; ++t)
    load.emplace_back([&done, t] {
      const Case c = small(Operation::kBackward, Dtype::kBf16);
      Call call(c, make_inputs(c, DataKind::kNormal, t + 1));
      while (!done) {
        EXPECT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
        synchronize(c.device);
      }
    });
  const int64_t repeats = setting("CUFLASH_TEST_REPEATS", GetParam() == Device::kCpu ? 20 : 200);
  for (const Operation operation : kOperations) {
    Case base = small(operation, Dtype::kF32);
    base.flags = CUFLASH_PROBLEM_DETERMINISTIC;
    on_every_family(base, kEveryDtype, [&](const Case& c) {
      Call call(c, make_inputs(c, DataKind::kNormal));
      Results first;
      for (int64_t n = 0; n < repeats; ++n) {
        call.poison_outputs();
        synchronize(c.device);
        const cuflash_status_t status = call.launch();
        synchronize(c.device);
        Outcome outcome = call.collect(status);
        EXPECT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
        if (n == 0)
          first = std::move(outcome.results);
        else
          expect_same_bits(outcome.results, first);
      }
    });
  }
  done = true;
  for (std::thread& thread : load) thread.join();
}

// Each handle keeps its kernel and its options while the other is in use.
TEST_P(Concurrency, TwoHandles) {
  struct User {
    std::string kernel;
    cuflash_handle_t handle = nullptr;
  };
  for (const Operation operation : kOperations) {
    const Case c = small(operation, Dtype::kF16);
    const std::vector<std::string> kernels = accepting_kernels(c);
    ASSERT_GE(kernels.size(), 2u);
    User users[2];
    std::vector<std::thread> threads;
    for (int u = 0; u < 2; ++u) {
      User& user = users[u];
      user.kernel = u == 0 ? kernels.front() : kernels.back();
      const int32_t device = GetParam() == Device::kCpu ? int32_t{CUFLASH_DEVICE_CPU} : 0;
      ASSERT_EQ(cuflash_create(&user.handle, device), CUFLASH_SUCCESS);
      ASSERT_EQ(cuflash_set_kernel(user.handle, user.kernel.c_str()), CUFLASH_SUCCESS);
      ASSERT_EQ(cuflash_set_option(user.handle, CUFLASH_OPTION_CPU_THREADS, u + 1),
                CUFLASH_SUCCESS);
      threads.emplace_back([&user, c] {
        Case forced = c;
        forced.kernel = user.kernel;
        const Inputs in = make_inputs(forced, DataKind::kNormal);
        const Results expected = run_ok(forced, in);
        Call call(c, in);  // forces nothing: the handle does
        call.use_pool();
        for (int n = 0; n < 30; ++n) {
          call.poison_outputs();
          synchronize(c.device);
          cuflash_problem_t& p = call.problem();
          const cuflash_status_t status =
              c.operation == Operation::kForward
                  ? cuflash_attention_forward(user.handle, &p, nullptr)
              : c.operation == Operation::kBackward
                  ? cuflash_attention_backward(user.handle, &p, &call.gradients(), nullptr)
                  : cuflash_attention_decode(user.handle, &p, &call.cache(), nullptr);
          ASSERT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
          synchronize(c.device);
          const Outcome outcome = call.collect(status);
          EXPECT_EQ(outcome.damage, "");
          expect_same_bits(outcome.results, expected);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const User& user : users) cuflash_destroy(user.handle);
  }
}

}  // namespace
}  // namespace cuflash_test
