// Kernels that do nothing but the products that attention consists of, on data that is in registers or shared memory
// already: a speed that attention cannot pass, measured on the same GPU at the same clocks.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

namespace cuflash_bench {

struct MatrixProducts {
  const char* instruction;
  int blocks;    // of a multiprocessor, all of them at once
  double flops;  // of a block
  // Nothing is written to `never`, but the compiler cannot know.
  cudaError_t (*launch)(int blocks, float* never, cudaStream_t stream);
};

// Those by which forward multiplies this dtype on GPUs of this compute capability (10 * major + minor); NULL where this
// build has none.
//   f32        fused multiply-adds
//   f16, bf16  wgmma on sm_90, else mma.sync from sm_80 on; GPUs from sm_100 have products that are faster
const MatrixProducts* matrix_products(const std::string& dtype, int arch);

extern const MatrixProducts kWgmmaProductsF16, kWgmmaProductsBf16;  // of a unit for sm_90a alone

}  // namespace cuflash_bench
