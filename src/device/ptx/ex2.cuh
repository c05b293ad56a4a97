// Base-2 exponential on the special-function unit.
#pragma once

namespace cuflash::device::ptx {

// 2^x within 2 ulp of fp32; subnormal results become 0; -inf gives 0, NaN gives NaN.
// PTX ISA: "Floating Point Instructions: ex2".
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash::device::ptx
