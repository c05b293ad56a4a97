// Which vector levels this processor has. Asked at run time and not when the library is loaded.
#include "cpu/blocked/tile_ops.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace cuflash::cpu_blocked {

int supported_levels(const TileOps* (&levels)[kMaxLevels]) {
  int count = 0;
  levels[count++] = &kBaseline;
#if defined(__x86_64__)
  // __builtin_cpu_supports asks whether the system saves the registers too; clang 14 has no word for F16C there.
  unsigned eax, ebx, ecx, edx;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c) return count;
  levels[count++] = &kAvx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    levels[count++] = &kAvx512;
#endif
  return count;
}

}  // namespace cuflash::cpu_blocked
