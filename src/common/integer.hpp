// Integer arithmetic shared by host and device.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"

namespace cuflash {

CUFLASH_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
CUFLASH_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
CUFLASH_HOST_DEVICE constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
CUFLASH_HOST_DEVICE constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
CUFLASH_HOST_DEVICE constexpr int64_t clamp64(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : (x > hi ? hi : x);
}

}  // namespace cuflash
