// The CPU device: times are of the clock.
#include <sched.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>

#include "device.hpp"

namespace cuflash_bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::align_val_t kAlignment{256};  // that of a workspace

std::string processor_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != line.npos)
      return line.substr(line.find(": ") + 2);
  return "a CPU";
}

class CpuDevice : public Device {
 public:
  CpuDevice() { cuflash::check(handle_.create(CUFLASH_DEVICE_CPU)); }

  Json describe() override {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    const int processors =
        sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 0;
    return {{"device", processor_model()}, {"processors", processors}};
  }

  // One thread's copy is no bound for the library's threads.
  std::optional<double> copy_speed() override { return std::nullopt; }
  // What the widest instructions reach depends on the processor, and the library's choice of them too.
  std::optional<MatrixSpeed> matrix_speed(const std::string&) override { return std::nullopt; }

  Memory allocate(size_t bytes) override {
    return {::operator new(bytes, kAlignment),
            [](void* data) { ::operator delete(data, kAlignment); }};
  }
  void write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void fill_with_nan(void* to, size_t bytes) override { std::memset(to, 0xff, bytes); }
  void synchronize() override {}  // calls return when they are done

  Times times(const Call& call, int count, bool cold) override {
    if (cold) throw std::logic_error("cold caches: on CUDA devices only");
    Times times;
    for (int i = 0; i < count; ++i) {
      const auto start = Clock::now();
      call();
      times.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    return times;
  }

  double host_us(const Call&, int) override {
    throw std::logic_error("host costs: on CUDA devices only");
  }
  void empty_launch() override { throw std::logic_error("host costs: on CUDA devices only"); }
  Call graph(const Call&, int) override { throw std::logic_error("graphs: on CUDA devices only"); }
};

}  // namespace

std::unique_ptr<Device> cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace cuflash_bench
