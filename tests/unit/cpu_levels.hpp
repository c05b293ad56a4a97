// The vector levels of the CPU device that this machine has, as parameters of tests.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cpu/blocked/tile_ops.hpp"

namespace cuflash::cpu_blocked {

inline std::vector<const TileOps*> levels_here() {
  const TileOps* levels[kMaxLevels];
  const int count = supported_levels(levels);
  return {levels, levels + count};
}

class OnEveryLevel : public testing::TestWithParam<const TileOps*> {
 protected:
  const TileOps& ops() const { return *GetParam(); }
};

#define CUFLASH_FOR_LEVELS(suite)                                     \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(levels_here()), \
                           [](const auto& test) { return test.param->name; })

}  // namespace cuflash::cpu_blocked
