// Where calls are made: memory, and how the time of a call is taken.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuflash.hpp"
#include "text.hpp"

namespace cuflash_bench {

using Call = std::function<void()>;
using Memory = std::shared_ptr<void>;  // frees itself; not after its Device

struct Times {
  std::vector<double> ms;         // of each call
  std::optional<double> host_ms;  // of each call on average, where the device works beside the host
};

// How fast products alone are.
struct MatrixSpeed {
  double tflops;
  std::string instruction;
};

class Device {
 public:
  virtual ~Device() = default;

  // The keys of benchmarks/compare.py: "device" and what else there is to say.
  virtual Json describe() = 0;
  // GB/s, bytes read and bytes written together, of a large copy; nothing where that says little.
  virtual std::optional<double> copy_speed() = 0;
  // Of the products by which forward multiplies this dtype; nothing where there are none that say much.
  virtual std::optional<MatrixSpeed> matrix_speed(const std::string& dtype) = 0;

  virtual Memory allocate(size_t bytes) = 0;
  virtual void write(void* to, const void* from, size_t bytes) = 0;
  virtual void read(void* to, const void* from, size_t bytes) = 0;
  // Every bit set is NaN in every dtype: what is not written shows.
  virtual void fill_with_nan(void* to, size_t bytes) = 0;

  virtual void synchronize() = 0;
  // One call after the other; cold: with nothing of what they read in the L2 cache.
  virtual Times times(const Call& call, int count, bool cold) = 0;
  // The median time in microseconds that the host takes to enqueue a call, of `count`, with room in the queue.
  virtual double host_us(const Call& call, int count) = 0;
  // Enqueues a kernel that does nothing: the least that a call can cost the host.
  virtual void empty_launch() = 0;
  // `count` calls as one replay of a CUDA graph.
  virtual Call graph(const Call& call, int count) = 0;

  cuflash_handle_t handle() const { return handle_; }
  cuflash_stream_t stream() const { return stream_; }

 protected:
  cuflash::Handle handle_;
  cuflash_stream_t stream_ = nullptr;
};

// Both throw where the device cannot be used.
std::unique_ptr<Device> cpu_device();
std::unique_ptr<Device> cuda_device();  // the current one

}  // namespace cuflash_bench
