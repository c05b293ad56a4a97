// Handles, options, forced kernels, allocators, the default device, logging, messages.
#include <array>
#include <cstdint>
#include <map>
#include <set>

#include "api/problem.hpp"

namespace cuflash_test {
namespace {

class Handle {
 public:
  explicit Handle(int32_t device = CUFLASH_DEVICE_CPU) {
    EXPECT_EQ(cuflash_create(&handle_, device), CUFLASH_SUCCESS) << cuflash_last_error();
  }
  ~Handle() { cuflash_destroy(handle_); }
  operator cuflash_handle_t() const { return handle_; }

 private:
  cuflash_handle_t handle_ = nullptr;
};

TEST(Handles, CreateAndDestroy) {
  EXPECT_EQ(cuflash_create(nullptr, CUFLASH_DEVICE_CPU), CUFLASH_ERROR_NULL_POINTER);
  EXPECT_EQ(cuflash_destroy(nullptr), CUFLASH_SUCCESS);
  cuflash_handle_t handle = reinterpret_cast<cuflash_handle_t>(uintptr_t{1});
  EXPECT_EQ(cuflash_create(&handle, -7), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(handle, nullptr);
  const Handle cpu;
  SmallProblem s;
  EXPECT_EQ(cuflash_attention_forward(cpu, &s.problem, nullptr), CUFLASH_SUCCESS);
}

// Without a GPU the library answers with a status that says so, and the message names the CPU device.
TEST(Handles, WithoutAGpuTheStatusSaysSo) {
  if (why_unavailable(Device::kCuda).empty()) GTEST_SKIP() << "there is a CUDA device";
#if defined(CUFLASH_WITH_CUDA)
  const std::set<cuflash_status_t> expected = {CUFLASH_ERROR_NO_DEVICE,
                                               CUFLASH_ERROR_DRIVER_TOO_OLD};
#else
  const std::set<cuflash_status_t> expected = {CUFLASH_ERROR_NOT_BUILT};
#endif
  cuflash_handle_t handle = nullptr;
  EXPECT_EQ(expected.count(cuflash_create(&handle, 0)), 1u) << cuflash_last_error();
  EXPECT_EQ(handle, nullptr);
  SmallProblem s;
  EXPECT_EQ(expected.count(cuflash_attention_forward(nullptr, &s.problem, nullptr)), 1u);
  EXPECT_TRUE(message_names("CPU"));
  EXPECT_TRUE(s.nothing_written());
  EXPECT_EQ(expected.count(cuflash_preload(nullptr, nullptr)), 1u);
}

TEST(Handles, DefaultDevice) {
  EXPECT_EQ(cuflash_set_default_device(-3), CUFLASH_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuflash_set_default_device(CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  SmallProblem by_default, by_handle;
  EXPECT_EQ(cuflash_attention_forward(nullptr, &by_default.problem, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  EXPECT_EQ(by_handle.forward(), CUFLASH_SUCCESS);
  EXPECT_EQ(by_default.o, by_handle.o);
  EXPECT_EQ(cuflash_set_default_device(CUFLASH_DEVICE_CURRENT), CUFLASH_SUCCESS);
}

TEST(Handles, Options) {
  const Handle handle;
  const std::map<int32_t, std::array<int64_t, 3>> expected = {
      // minimum, maximum, default
      {CUFLASH_OPTION_DETERMINISTIC, {0, 1, 0}},
      {CUFLASH_OPTION_BATCH_INVARIANT, {0, 1, 0}},
      {CUFLASH_OPTION_SM_MARGIN, {0, 1024, 0}},
      {CUFLASH_OPTION_CPU_THREADS, {0, 1024, 0}},
      {CUFLASH_OPTION_CHECK_POINTERS, {0, 1, 1}}};
  for (const auto& [key, row] : expected) {
    int64_t minimum = -1, maximum = -1, value = -1;
    EXPECT_EQ(cuflash_option_bounds(key, &minimum, &maximum), CUFLASH_SUCCESS);
    EXPECT_EQ(minimum, row[0]);
    EXPECT_EQ(maximum, row[1]);
    EXPECT_EQ(cuflash_get_option(nullptr, key, &value), CUFLASH_SUCCESS);
    EXPECT_EQ(value, row[2]);
    for (const int64_t set : {minimum, maximum}) {
      EXPECT_EQ(cuflash_set_option(handle, key, set), CUFLASH_SUCCESS);
      EXPECT_EQ(cuflash_get_option(handle, key, &value), CUFLASH_SUCCESS);
      EXPECT_EQ(value, set);
    }
    for (const int64_t bad : {minimum - 1, maximum + 1, INT64_MIN, INT64_MAX})
      EXPECT_EQ(cuflash_set_option(handle, key, bad), CUFLASH_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuflash_get_option(handle, key, &value), CUFLASH_SUCCESS);
    EXPECT_EQ(value, maximum);
    EXPECT_EQ(cuflash_set_option(nullptr, key, minimum), CUFLASH_ERROR_NULL_POINTER);
    EXPECT_EQ(cuflash_option_bounds(key, nullptr, nullptr), CUFLASH_SUCCESS);
  }
  int64_t value;
  for (const int32_t key : {0, 6, -1, INT32_MAX}) {
    EXPECT_EQ(cuflash_set_option(handle, key, 0), CUFLASH_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuflash_get_option(handle, key, &value), CUFLASH_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuflash_option_bounds(key, &value, &value), CUFLASH_ERROR_INVALID_VALUE);
  }
  EXPECT_EQ(cuflash_get_option(handle, CUFLASH_OPTION_CPU_THREADS, nullptr),
            CUFLASH_ERROR_NULL_POINTER);
}

TEST(Handles, AnyNumberOfCpuThreadsGivesTheSameBits) {
  SmallProblem expected;
  ASSERT_EQ(expected.forward(), CUFLASH_SUCCESS);
  ASSERT_EQ(expected.backward(), CUFLASH_SUCCESS);
  for (const int64_t threads : {1, 2, 3, 16}) {
    const Handle handle;
    ASSERT_EQ(cuflash_set_option(handle, CUFLASH_OPTION_CPU_THREADS, threads), CUFLASH_SUCCESS);
    SmallProblem s;
    EXPECT_EQ(cuflash_attention_forward(handle, &s.problem, nullptr), CUFLASH_SUCCESS);
    EXPECT_EQ(cuflash_attention_backward(handle, &s.problem, &s.gradients, nullptr),
              CUFLASH_SUCCESS);
    EXPECT_EQ(s.o, expected.o);
    EXPECT_EQ(s.dq, expected.dq);
    EXPECT_EQ(s.dk, expected.dk);
    EXPECT_EQ(s.dv, expected.dv);
  }
}

TEST(Handles, ForcedKernels) {
  const Handle handle;
  SmallProblem s;
  EXPECT_EQ(cuflash_set_kernel(nullptr, "reference"), CUFLASH_ERROR_NULL_POINTER);
  EXPECT_EQ(cuflash_set_kernel(handle, "no_such_kernel"), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_TRUE(message_names("fwd_reference_cpu"));  // the names are listed
  EXPECT_EQ(cuflash_set_kernel(handle, "fwd_reference_cpu"), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_attention_forward(handle, &s.problem, nullptr), CUFLASH_SUCCESS);
  // A forward kernel refuses a backward problem, and nothing takes its place.
  SmallProblem t;
  EXPECT_EQ(cuflash_attention_backward(handle, &t.problem, &t.gradients, nullptr),
            CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_TRUE(t.nothing_written());
  t.problem.kernel = "bwd_reference_cpu";  // the call is stronger than the handle
  EXPECT_EQ(cuflash_attention_backward(handle, &t.problem, &t.gradients, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  for (const char* none : {static_cast<const char*>(nullptr), ""}) {
    EXPECT_EQ(cuflash_set_kernel(handle, none), CUFLASH_SUCCESS);
    t.problem.kernel = none;
    EXPECT_EQ(cuflash_attention_backward(handle, &t.problem, &t.gradients, nullptr),
              CUFLASH_SUCCESS);
  }
  SmallProblem u;
  u.problem.kernel = "no_such_kernel";
  EXPECT_EQ(u.forward(), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_TRUE(message_names("no_such_kernel"));
  u.problem.kernel = "fwd_wmma_f16_d64";  // runs on CUDA
  EXPECT_EQ(u.forward(), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_TRUE(u.nothing_written());
}

struct CountingAllocator {
  int allocated = 0, released = 0;
  size_t bytes = 0;
  bool fail = false;
  Buffer* memory = nullptr;

  static void* allocate(void* user, size_t bytes, int32_t device, cuflash_stream_t stream) {
    auto& self = *static_cast<CountingAllocator*>(user);
    EXPECT_EQ(device, CUFLASH_DEVICE_CPU);
    EXPECT_EQ(stream, nullptr);
    ++self.allocated;
    self.bytes = bytes;
    if (self.fail) return nullptr;
    self.memory = new Buffer(Device::kCpu, bytes);
    self.memory->fill(0xff);
    return self.memory->data();
  }
  static void release(void* user, void* memory, int32_t, cuflash_stream_t) {
    auto& self = *static_cast<CountingAllocator*>(user);
    ++self.released;
    EXPECT_EQ(memory, self.memory->data());
    EXPECT_TRUE(self.memory->guards_intact());
    delete self.memory;
  }
};

TEST(Handles, Allocator) {
  const Handle handle;
  CountingAllocator counter;
  EXPECT_EQ(cuflash_set_allocator(nullptr, nullptr, nullptr, nullptr), CUFLASH_ERROR_NULL_POINTER);
  EXPECT_EQ(cuflash_set_allocator(handle, CountingAllocator::allocate, nullptr, &counter),
            CUFLASH_ERROR_NULL_POINTER);
  ASSERT_EQ(cuflash_set_allocator(handle, CountingAllocator::allocate, CountingAllocator::release,
                                  &counter),
            CUFLASH_SUCCESS);
  SmallProblem s;
  size_t bytes = 0;
  ASSERT_EQ(cuflash_backward_workspace_size(handle, &s.problem, &s.gradients, &bytes),
            CUFLASH_SUCCESS);
  ASSERT_EQ(cuflash_attention_backward(handle, &s.problem, &s.gradients, nullptr), CUFLASH_SUCCESS);
  EXPECT_EQ(counter.allocated, 1);
  EXPECT_EQ(counter.released, 1);
  EXPECT_EQ(counter.bytes, bytes);
  counter.fail = true;
  SmallProblem t;
  EXPECT_EQ(cuflash_attention_backward(handle, &t.problem, &t.gradients, nullptr),
            CUFLASH_ERROR_HOST_MEMORY);
  EXPECT_TRUE(t.nothing_written());
  EXPECT_EQ(counter.released, 1);
  EXPECT_EQ(cuflash_set_allocator(handle, nullptr, nullptr, nullptr), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_attention_backward(handle, &t.problem, &t.gradients, nullptr), CUFLASH_SUCCESS);
  EXPECT_EQ(counter.allocated, 2);
}

struct Lines {
  std::vector<std::pair<int32_t, std::string>> lines;
  static void take(void* user, int32_t level, const char* text) {
    static_cast<Lines*>(user)->lines.emplace_back(level, text);
  }
  bool has(int32_t level, const std::string& part) const {
    for (const auto& [of, text] : lines)
      if (of == level && text.find(part) != std::string::npos) return true;
    return false;
  }
};

TEST(Logging, Callback) {
  Lines all, errors;
  SmallProblem s;
  cuflash_set_log_callback(Lines::take, &all, CUFLASH_LOG_CALLS);
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  s.problem.batch = -1;
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_DIMENSION);
  cuflash_set_log_callback(Lines::take, &errors, CUFLASH_LOG_ERROR);
  s.problem.batch = 2;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  s.problem.batch = -1;
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_DIMENSION);
  cuflash_set_log_callback(nullptr, nullptr, 0);
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_DIMENSION);
  EXPECT_TRUE(all.has(CUFLASH_LOG_CALLS, "fwd_cpu"));
  EXPECT_TRUE(all.has(CUFLASH_LOG_ERROR, "batch"));
  ASSERT_EQ(errors.lines.size(), 1u);
  EXPECT_TRUE(errors.has(CUFLASH_LOG_ERROR, "batch"));
}

TEST(Messages, LastErrorAndItsCopy) {
  SmallProblem s;
  s.problem.head_dim = 600;
  ASSERT_EQ(s.forward(), CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
  const std::string message = cuflash_last_error();
  EXPECT_NE(message.find("600"), std::string::npos) << message;
  EXPECT_NE(message.find("576"), std::string::npos) << message;
  EXPECT_EQ(cuflash_last_cuda_error(), 0);
  EXPECT_EQ(cuflash_last_error_copy(nullptr, 0), message.size());
  char buffer[2000];
  std::memset(buffer, 'x', sizeof buffer);
  EXPECT_EQ(cuflash_last_error_copy(buffer, sizeof buffer), message.size());
  EXPECT_EQ(buffer, message);
  std::memset(buffer, 'x', sizeof buffer);
  EXPECT_EQ(cuflash_last_error_copy(buffer, 5), message.size());
  EXPECT_EQ(std::string(buffer), message.substr(0, 4));
  EXPECT_EQ(buffer[5], 'x');
  s.problem.head_dim = 8;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  EXPECT_STREQ(cuflash_last_error(), "");
}

TEST(Messages, NamesOfStatuses) {
  std::set<std::string> names, texts;
  for (cuflash_status_t status = 0; status <= 22; ++status) {
    names.insert(cuflash_status_name(status));
    texts.insert(cuflash_error_string(status));
  }
  EXPECT_EQ(names.size(), 23u);
  EXPECT_EQ(texts.size(), 23u);
  EXPECT_STREQ(cuflash_status_name(0), "CUFLASH_SUCCESS");
  EXPECT_STREQ(cuflash_status_name(22), "CUFLASH_ERROR_ASYNCHRONOUS");
  for (const int32_t unknown : {-1, 23, INT32_MAX, INT32_MIN}) {
    EXPECT_STREQ(cuflash_status_name(unknown), "CUFLASH_STATUS_UNKNOWN");
    EXPECT_STREQ(cuflash_error_string(unknown), "Unknown error");
  }
}

TEST(Messages, Version) {
  int32_t major = -1, minor = -1, patch = -1;
  cuflash_version(&major, &minor, &patch);
  EXPECT_EQ(major, CUFLASH_VERSION_MAJOR);
  EXPECT_EQ(minor, CUFLASH_VERSION_MINOR);
  EXPECT_EQ(patch, CUFLASH_VERSION_PATCH);
  cuflash_version(nullptr, nullptr, nullptr);
  EXPECT_GE(cuflash_abi_version(), 0);
  EXPECT_NE(std::string(cuflash_build_info()), "");
}

}  // namespace
}  // namespace cuflash_test
