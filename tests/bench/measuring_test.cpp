// Lines of cuflash-bench, by the CPU device with a clock that always says the same.
#include <gtest/gtest.h>

#include "measuring.hpp"

namespace cuflash_bench {
namespace {

constexpr double kMs = 0.5, kHostUs = 3.25, kEmptyUs = 2.5;

class StoppedClock : public Device {
 public:
  StoppedClock() : real_(cpu_device()) { cuflash::check(handle_.create(CUFLASH_DEVICE_CPU)); }

  Json describe() override { return real_->describe(); }
  std::optional<double> copy_speed() override { return std::nullopt; }
  std::optional<MatrixSpeed> matrix_speed(const std::string&) override { return std::nullopt; }
  Memory allocate(size_t bytes) override { return real_->allocate(bytes); }
  void write(void* to, const void* from, size_t bytes) override { real_->write(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { real_->read(to, from, bytes); }
  void fill_with_nan(void* to, size_t bytes) override { real_->fill_with_nan(to, bytes); }
  void synchronize() override {}
  Times times(const Call& call, int count, bool) override {
    call();
    return {std::vector<double>(static_cast<size_t>(count), kMs), 0.01};
  }
  double host_us(const Call& call, int count) override {
    const int before = empty_launches;
    call();
    if (empty_launches > before) return kEmptyUs;
    host_counts.push_back(count);
    return kHostUs;
  }
  void empty_launch() override { ++empty_launches; }
  Call graph(const Call& call, int) override { return call; }

  int empty_launches = 0;
  std::vector<int> host_counts;

 private:
  const std::unique_ptr<Device> real_;
};

Point point_of(const std::string& mask, int64_t window = 0) {
  Point point;
  point.dtype = "f32";
  point.mask = mask;
  point.window = window;
  point.batch = 1;
  point.heads = point.heads_kv = 2;
  point.len_q = point.len_k = 10;
  point.head_dim = 8;
  return point;
}

class Measuring : public testing::Test {
 protected:
  // A build of some kernels alone may have none for the CPU device.
  void SetUp() override {
    const Json found = measure(point_of("full"), {"auto"}, &device_, {}, [] { return 0; }).at(0);
    if (found.value("failed", "").rfind("no kernel takes this", 0) == 0)
      GTEST_SKIP() << std::string(found["failed"]);
  }

  Json line(const Point& point, double seconds = 10) {
    Json found = measure(point, {"auto"}, &device_, plan_, [=] { return seconds; }).at(0);
    EXPECT_FALSE(found.contains("failed")) << found["failed"];
    return found;
  }

  StoppedClock device_;
  Plan plan_;
};

TEST_F(Measuring, SpeedsAreOfTheMarksOfTheRun) {
  plan_.matrix_speed["f32"] = {0.002, "by hand"};
  plan_.copy_speed = 0.01;
  Json found = line(point_of("full"));
  const double tflops = 4.0 * 2 * 10 * 10 * 8 / kMs * 1e-9;
  EXPECT_NEAR(found["tflops"], tflops, 1e-4 * tflops);
  EXPECT_NEAR(found["percent_of_matrix"], 100 * tflops / 0.002, 0.01);
  const double gb_s = (4.0 * 2 * 10 * 8 + 2 * 10) * 4 / kMs * 1e-6;
  EXPECT_NEAR(found["percent_of_copy"], 100 * gb_s / 0.01, 0.01);
  found = line(point_of("window", 3));
  EXPECT_NEAR(found["tflops"], 4.0 * 2 * (1 + 2 + 8 * 3) * 8 / kMs * 1e-9, 1e-4 * tflops);
}

TEST_F(Measuring, AMarkOfAnotherDtypeIsNone) {
  plan_.matrix_speed["bf16"] = {0.002, "by hand"};
  const Json found = line(point_of("full"));
  for (const char* key : {"percent_of_matrix", "percent_of_copy", "host_us", "empty_launch_us"})
    EXPECT_FALSE(found.contains(key)) << key;
  EXPECT_EQ(device_.empty_launches, 0);
}

TEST_F(Measuring, WhatTheHostTakes) {
  plan_.host = true;
  Json found = line(point_of("full"));
  EXPECT_EQ(found["host_us"], kHostUs);
  EXPECT_EQ(found["empty_launch_us"], kEmptyUs);
  EXPECT_EQ(found["host_calls"], 10000);  // half of ten seconds: enough for all
  found = line(point_of("full"), 0.5);
  EXPECT_EQ(found["host_calls"], 500);  // a quarter of a second, half a millisecond each
  found = line(point_of("full"), -1);
  EXPECT_EQ(found["host_calls"], 100);
  EXPECT_EQ(device_.host_counts, (std::vector<int>{10000, 500, 100}));
}

}  // namespace
}  // namespace cuflash_bench
