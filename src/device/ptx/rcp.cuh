// 1 / x on the special-function unit. PTX ISA: "Floating Point Instructions: rcp.approx.ftz.f32": one unit in the last place.
#pragma once

namespace cuflash::device::ptx {

__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::device::ptx
