// The overloads as CUDA's own types see them, whichever header comes first. Only compiled.
#ifdef CUFLASH_HEADER_LAST
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#endif
#include <cuflash.hpp>
#ifndef CUFLASH_HEADER_LAST
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#endif

namespace {

using cuflash::FlashAttentionError;

// The signatures of releases up to 0.6; and that one function of this type exists.
template <class T>
struct Older {
  using Forward = FlashAttentionError(const T*, const T*, const T*, T*, float*, int, int, int, int,
                                      float, bool, cudaStream_t);
  using Backward = FlashAttentionError(const T*, const T*, const T*, const T*, const float*,
                                       const T*, T*, T*, T*, int, int, int, int, float, bool,
                                       cudaStream_t);
  using Decode = FlashAttentionError(const T*, const T*, const T*, T*, float*, int, int, int, int,
                                     float, int, cudaStream_t);
  Forward* forward = cuflash::flash_attention_forward;
  Backward* backward = cuflash::flash_attention_backward;
  Decode* decode = cuflash::flash_attention_decode;
};

static_assert(cuflash::dtype_of<half>::value == CUFLASH_F16, "");
static_assert(cuflash::dtype_of<__nv_bfloat16>::value == CUFLASH_BF16, "");
static_assert(cuflash::dtype_of<__nv_fp8_e4m3>::value == CUFLASH_FP8_E4M3, "");
static_assert(cuflash::dtype_of<__nv_fp8_e5m2>::value == CUFLASH_FP8_E5M2, "");

}  // namespace

int main() {
  const Older<float> f32;
  const Older<half> f16;
  const Older<__nv_bfloat16> bf16;
  return f32.forward == nullptr || f16.backward == nullptr || bf16.decode == nullptr;
}
