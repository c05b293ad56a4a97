// What a device offers. Filled once per device; faked in the tests of selection.
#pragma once

#include <cstdint>

namespace cuflash {

struct Capabilities {
  bool is_cpu = false;
  int arch = 0;                     // 75, 80, 86, 89, 90, 100, 120
  int sm_count = 0;                 // after the SM margin
  int shared_memory_per_block = 0;  // bytes, the opt-in maximum
  int cpu_threads = 1;
};

}  // namespace cuflash
