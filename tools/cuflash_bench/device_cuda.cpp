// The current CUDA device: all work on one stream, times are of CUDA events.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "device.hpp"
#include "empty_kernel.hpp"
#include "matrix_products.hpp"

namespace cuflash_bench {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// ---- owners ---------------------------------------------------------------------------------------------

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  double ms_since(const Event& begin) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Graph {
 public:
  // While it lives, what the stream is given is captured.
  class Capture {
   public:
    explicit Capture(cudaStream_t stream) : stream_(stream) {
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
    }
    // A call that throws leaves the stream usable.
    ~Capture() {
      if (stream_ == nullptr) return;
      cudaGraph_t graph = nullptr;
      if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
    }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;

    cudaGraph_t end() {
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph), "cudaStreamEndCapture");
      return graph;
    }

   private:
    cudaStream_t stream_;
  };

  explicit Graph(cudaGraph_t graph) {
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(cudaStream_t stream) const {
    check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// ---- what nvidia-smi knows ------------------------------------------------------------------------------

std::string identifier_of(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += byte;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

// The driver and what bounds the clocks; nothing where nvidia-smi does not say.
Json nvidia_smi(const cudaUUID_t& uuid) {
  constexpr const char* kKeys[] = {"driver", "power_limit", "max_clock", "clock", "temperature"};
  const std::string command =
      "nvidia-smi -i " + identifier_of(uuid) +
      " --query-gpu=driver_version,power.limit,clocks.max.sm,clocks.sm,temperature.gpu"
      " --format=csv,noheader 2>/dev/null";
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return Json::object();
  char line[400] = "";
  const bool read = std::fgets(line, sizeof line, output) != nullptr;
  if (pclose(output) != 0 || !read) return Json::object();
  Json found = Json::object();
  std::istringstream values(line);
  std::string value;
  for (const char* key : kKeys) {
    if (!std::getline(values >> std::ws, value, ',')) return Json::object();
    value.erase(value.find_last_not_of(" \n") + 1);
    found[key] = value;
  }
  return found;
}

// ---- the device -----------------------------------------------------------------------------------------

class CudaDevice : public Device {
 public:
  CudaDevice() {
    check(cudaGetDevice(&ordinal_), "cudaGetDevice");
    check(cudaGetDeviceProperties(&properties_, ordinal_), "cudaGetDeviceProperties");
    cuflash::check(handle_.create(ordinal_));
    check(cudaStreamCreateWithFlags(&cuda_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    stream_ = cuda_stream_;
  }
  ~CudaDevice() override { cudaStreamDestroy(cuda_stream_); }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  Json describe() override {
    int runtime = 0;
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    Json described = {
        {"device", properties_.name},
        {"arch", properties_.major * 10 + properties_.minor},
        {"multiprocessors", properties_.multiProcessorCount},
        {"l2_bytes", properties_.l2CacheSize},
        {"cuda", std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10)}};
    described.update(nvidia_smi(properties_.uuid));
    return described;
  }

  std::optional<double> copy_speed() override {
    constexpr int kCopies = 20;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    const size_t bytes = std::min<size_t>(size_t{1} << 30, free / 4);
    const Memory from = allocate(bytes), to = allocate(bytes);
    check(cudaMemsetAsync(from.get(), 0x5a, bytes, cuda_stream_), "cudaMemsetAsync");
    Times copies = times(
        [&] {
          check(
              cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, cuda_stream_),
              "cudaMemcpyAsync");
        },
        kCopies, false);
    return 2 * static_cast<double>(bytes) / median(copies.ms) * 1e-6;
  }

  std::optional<MatrixSpeed> matrix_speed(const std::string& dtype) override {
    constexpr int kLaunches = 300;  // of about a millisecond; the clocks settle in the first half
    const MatrixProducts* products =
        matrix_products(dtype, properties_.major * 10 + properties_.minor);
    if (products == nullptr) return std::nullopt;
    const Memory never = allocate(sizeof(float));
    const int blocks = products->blocks * properties_.multiProcessorCount;
    const auto launch = [&] {
      return products->launch(blocks, static_cast<float*>(never.get()), cuda_stream_);
    };
    const cudaError_t error = launch();
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();  // so that nobody else finds it
      return std::nullopt;
    }
    check(error, products->instruction);
    Times launches = times([&] { check(launch(), products->instruction); }, kLaunches, false);
    launches.ms.erase(launches.ms.begin(), launches.ms.begin() + kLaunches / 2);
    return MatrixSpeed{blocks * products->flops / median(launches.ms) * 1e-9,
                       products->instruction};
  }

  Memory allocate(size_t bytes) override {
    void* data = nullptr;
    check(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "cudaMalloc");
    return {data, [](void* memory) { cudaFree(memory); }};
  }
  void write(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cuda_stream_),
          "copying to the device");
    synchronize();
  }
  void read(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda_stream_),
          "copying from the device");
    synchronize();
  }
  void fill_with_nan(void* to, size_t bytes) override {
    check(cudaMemsetAsync(to, 0xff, bytes, cuda_stream_), "cudaMemsetAsync");
  }
  void synchronize() override {
    check(cudaStreamSynchronize(cuda_stream_), "cudaStreamSynchronize");
  }

  Times times(const Call& call, int count, bool cold) override {
    return cold ? cold_times(call, count) : warm_times(call, count);
  }

  double host_us(const Call& call, int count) override {
    // Far fewer than a stream takes before a launch waits.
    constexpr int kCallsUntilSync = 100;
    std::vector<double> us;
    // A processor that has just woken takes longer: the first tenth, in addition, does not count.
    for (int i = -count / 10; i < count; ++i) {
      const auto start = Clock::now();
      call();
      const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
      if (i >= 0) us.push_back(elapsed.count());
      if (i % kCallsUntilSync == 0) synchronize();
    }
    synchronize();
    return median(std::move(us));
  }
  void empty_launch() override { check(launch_empty_kernel(cuda_stream_), "empty kernel"); }

  Call graph(const Call& call, int count) override {
    Graph::Capture capture(cuda_stream_);
    for (int i = 0; i < count; ++i) call();
    const auto graph = std::make_shared<Graph>(capture.end());
    return [this, graph] { graph->replay(cuda_stream_); };
  }

 private:
  // From the end of each call to the end of the next.
  Times warm_times(const Call& call, int count) {
    Event* events = some_events(count + 1);
    call();  // while it runs the host gets ahead of the device
    events[0].record(cuda_stream_);
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) {
      call();
      events[i + 1].record(cuda_stream_);
    }
    Times times;
    times.host_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count() / count;
    synchronize();
    for (size_t i = 0; i < static_cast<size_t>(count); ++i)
      times.ms.push_back(events[i + 1].ms_since(events[i]));
    return times;
  }

  // Before each call a buffer of twice the cache is written, which also lets the host get ahead.
  Times cold_times(const Call& call, int count) {
    Event* events = some_events(2 * count);
    const size_t bytes = 2 * static_cast<size_t>(properties_.l2CacheSize);
    if (scrub_ == nullptr) scrub_ = allocate(bytes);
    double host_ms = 0;
    for (int i = 0; i < count; ++i) {
      check(cudaMemsetAsync(scrub_.get(), i, bytes, cuda_stream_), "cudaMemsetAsync");
      events[2 * i].record(cuda_stream_);
      const auto start = Clock::now();
      call();
      host_ms += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
      events[2 * i + 1].record(cuda_stream_);
    }
    synchronize();
    Times times;
    times.host_ms = host_ms / count;
    for (int i = 0; i < count; ++i) times.ms.push_back(events[2 * i + 1].ms_since(events[2 * i]));
    return times;
  }

  // Made once: making one takes the host about as long as recording it.
  Event* some_events(int count) {
    if (static_cast<int>(event_count_) < count) {
      event_count_ = static_cast<size_t>(count);
      events_ = std::make_unique<Event[]>(event_count_);
    }
    return events_.get();
  }

  int ordinal_ = 0;
  cudaDeviceProp properties_ = {};
  cudaStream_t cuda_stream_ = nullptr;
  size_t event_count_ = 0;
  std::unique_ptr<Event[]> events_;
  Memory scrub_;
};

}  // namespace

std::unique_ptr<Device> cuda_device() {
  // The library says best why there is no device to use.
  cuflash::Handle handle;
  cuflash::check(handle.create(CUFLASH_DEVICE_CURRENT));
  return std::make_unique<CudaDevice>();
}

}  // namespace cuflash_bench
