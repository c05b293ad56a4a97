// What the oracle and the plain algorithm say of a problem, remembered: many kernels run the same problems, and
// computing this takes most of the tests' time.
#pragma once

#include <vector>

#include "support/oracle.hpp"

namespace cuflash_test {

struct Expected {
  Results reference;  // oracle()
  std::vector<Results>
      plain;  // at least plain(problem, inputs), then its variations 1, 2, ... as they were asked for
};

// Valid until the next call of the thread.
Expected& expected_of(const Problem& problem, const Inputs& inputs);

// Up to this many bytes of results are kept by each thread; the oldest go first.
constexpr size_t kExpectedBytes = size_t{256} << 20;

}  // namespace cuflash_test
