// cuflash-bench: how long the library takes, on problems whose results are right.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>

#include "flags.hpp"

namespace cuflash_bench {
namespace {

constexpr int kWrongResult = 1;
constexpr int kBadCommandLine = 2;

using Clock = std::chrono::steady_clock;
const Clock::time_point kStart = Clock::now();

double seconds_gone() { return std::chrono::duration<double>(Clock::now() - kStart).count(); }

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  gmtime_r(&now, &parts);
  char text[40];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S+00:00", &parts);
  return text;
}

// The library does not know its commit: --commit tells it.
Json run_line(const Flags& flags, Device* device) {
  const char* forced = std::getenv("CUFLASH_KERNEL");
  Json run = {{"schema", 1}, {"program", "cuflash-bench"}, {"date", utc_now()}};
  run.update(device->describe());
  if (flags.plan.copy_speed) run["copy_gb_s"] = rounded(*flags.plan.copy_speed);
  for (const auto& [dtype, speed] : flags.plan.matrix_speed) {
    run["matrix_tflops"][dtype] = rounded(speed.tflops);
    run["matrix_instruction"][dtype] = speed.instruction;
  }
  run["cuflash"] = cuflash_build_info();
  run["commit"] = flags.commit.empty() ? Json() : Json(flags.commit);
  run["versions"] = {{"cuflash-bench", version()}};
  run["flags"] = flags.given;
  run["forced_kernel"] = forced != nullptr ? Json(forced) : Json();
  run["not_measured"] = Json::object();
  return {{"run", run}};
}

// One line for each point, with the time that is left by what the points took so far.
class Progress {
 public:
  Progress(size_t total, double seconds)
      : total_(static_cast<double>(total)), seconds_(seconds), begin_(seconds_gone()) {}

  double left() const { return seconds_ - seconds_gone(); }

  // Of the time that is left, what the next point may take.
  double share() const { return left() / (total_ - done_); }

  void show(const Point& point, const std::vector<Json>& lines) {
    ++done_;
    std::vector<std::string> results, notes;
    for (const Json& line : lines) {
      const std::string name = line["contestant"];
      if (line.contains("failed")) {
        results.push_back(name + " FAILED");
        notes.push_back(name + ": " + line["failed"].get<std::string>());
        continue;
      }
      results.push_back(name + " " + significant(line["tflops"], 4) + percent_of_matrix(line));
      if (line.contains("host_us"))
        notes.push_back(name + ": " + significant(line["host_us"], 3) +
                        " us of the host, an empty launch " +
                        significant(line["empty_launch_us"], 3));
      if (line.value("host_ms", 0.0) > 0.9 * line["ms"].get<double>())
        notes.push_back(name +
                        ": as long as the host takes to launch; --graph measures the device alone");
    }
    const double gone = seconds_gone();
    const double eta = std::min((gone - begin_) / done_ * (total_ - done_), std::max(left(), 0.0));
    std::fprintf(stderr, "[%.0f/%.0f] %s: %s TFLOP/s; %.0f s gone, %.0f s to go\n", done_, total_,
                 words_of(point).c_str(), joined(results, ", ").c_str(), gone, eta);
    for (const std::string& note : notes) std::fprintf(stderr, "    %s\n", note.c_str());
  }

 private:
  static std::string percent_of_matrix(const Json& line) {
    if (!line.contains("percent_of_matrix")) return "";
    return " (" + significant(line["percent_of_matrix"], 3) + "%)";
  }

  double total_, seconds_, begin_, done_ = 0;
};

std::vector<Json> lines_of(const Point& point, const Flags& flags, Device* device,
                           const Progress& progress) {
  std::string reason = "no time left";
  if (progress.left() > 0) {
    const double end = seconds_gone() + progress.share();
    try {
      return measure(point, flags.kernels, device, flags.plan,
                     [end] { return end - seconds_gone(); });
    } catch (const std::exception& error) {  // such as memory for the inputs
      reason = error.what();
    }
  }
  std::vector<Json> lines;
  for (const std::string& kernel : flags.kernels)
    lines.push_back(failed_line(point, kernel, reason));
  return lines;
}

std::unique_ptr<Device> open_device(const std::string& name) {
  if (name == "cpu") return cpu_device();
  try {
    return cuda_device();
  } catch (const std::exception& error) {
    throw UsageError("--device cuda: " + std::string(error.what()) +
                     "; --device cpu measures the CPU device");
  }
}

int run(Flags flags) {
  const std::unique_ptr<Device> device = open_device(flags.device);
  std::ofstream file;
  if (!flags.output.empty()) {
    file.open(flags.output);
    if (!file) throw UsageError("--output: cannot write " + flags.output);
  }
  std::ostream& output = flags.output.empty() ? std::cout : file;
  const auto write = [&](const Json& line) {
    output << line.dump() << '\n' << std::flush;
    if (!output) throw std::runtime_error("the output cannot be written");
  };
  flags.plan.copy_speed = device->copy_speed();
  for (const Point& point : flags.points) {
    if (flags.plan.matrix_speed.count(point.dtype) > 0) continue;
    if (const auto speed = device->matrix_speed(point.dtype))
      flags.plan.matrix_speed[point.dtype] = *speed;
  }
  write(run_line(flags, device.get()));
  bool complete = true;
  Progress progress(flags.points.size(), flags.seconds);
  for (const Point& point : flags.points) {
    const std::vector<Json> lines = lines_of(point, flags, device.get(), progress);
    for (const Json& line : lines) {
      write(line);
      complete &= !line.contains("failed");
    }
    progress.show(point, lines);
  }
  return complete ? 0 : kWrongResult;
}

}  // namespace
}  // namespace cuflash_bench

int main(int argc, char** argv) {
  try {
    auto flags = cuflash_bench::parse_flags(argc, argv);
    return flags ? cuflash_bench::run(*std::move(flags)) : 0;
  } catch (const cuflash_bench::UsageError& error) {
    std::fprintf(stderr, "cuflash-bench: %s\n", error.what());
    return cuflash_bench::kBadCommandLine;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuflash-bench: %s\n", error.what());
    return cuflash_bench::kWrongResult;
  }
}
