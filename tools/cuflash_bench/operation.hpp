// What is timed: an operation at one point, computed by contestants, which are kernels of the library.
#pragma once

#include <memory>
#include <string>

#include "device.hpp"
#include "points.hpp"

namespace cuflash_bench {

// One kernel at one point, with outputs of its own.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual void call() = 0;  // enqueues it once; throws cuflash::Error
  virtual void forget_result() = 0;
  // The worst error of the last call's result, in units of what rounding makes; throws Wrong.
  virtual double check() = 0;
  virtual const std::string& kernel() const = 0;
};

// The inputs at one point, which all contestants read, and what is expected of them.
class Problem {
 public:
  virtual ~Problem() = default;
  // With a kernel or a family to force, or "auto". Throws where that cannot compute this.
  virtual std::unique_ptr<Contestant> contestant(const std::string& kernel) = 0;
  virtual double flops() const = 0;
  virtual double bytes() const = 0;  // the fewest that have to be moved
};

std::unique_ptr<Problem> forward_problem(const Point& point, Device* device);

}  // namespace cuflash_bench
