// One point: every contestant is checked, timed in rounds that alternate between them, and checked again.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "operation.hpp"

namespace cuflash_bench {

// How long and how often; the same for all points of a run.
struct Plan {
  int rounds = 5;
  int max_calls = 100;               // in a round, of each contestant
  int graph = 0;                     // calls in a CUDA graph that is replayed as one; 0: no graph
  bool cold = false;                 // with nothing in the L2 cache
  bool host = false;                 // what a call costs the host, too
  std::optional<double> copy_speed;  // of the device, GB/s
  std::map<std::string, MatrixSpeed> matrix_speed;  // of the device, by dtype
};

// The lines of a point, one for each kernel, with the keys of benchmarks/compare.py. seconds_left() is what of the
// point's time is left.
std::vector<Json> measure(const Point& point, const std::vector<std::string>& kernels,
                          Device* device, const Plan& plan,
                          const std::function<double()>& seconds_left);

// What the line of a kernel is called: "cuflash", or "cuflash:mma" where it is forced.
std::string contestant_name(const std::string& kernel);

// A line of a kernel that has no time, and why.
Json failed_line(const Point& point, const std::string& kernel, const std::string& reason);

}  // namespace cuflash_bench
