// Fused multiply-adds, and mma.sync with all operands in registers.
#include "device/ptx/mma.cuh"
#include "matrix_products.cuh"
#include "matrix_products.hpp"

namespace cuflash_bench {

constexpr int kThreads = 256;

// ---- f32 ------------------------------------------------------------------------------------------------

constexpr int kFmaPasses = 4096, kFmaRows = 4, kFmaColumns = 4, kFmaDepth = 2;

// Each thread: D[4][4] += A[4][2] B[2][4], over and over.
__global__ void __launch_bounds__(kThreads, 4) fma_products(float* never) {
  float a[kFmaDepth][kFmaRows], b[kFmaDepth][kFmaColumns], d[kFmaRows * kFmaColumns] = {};
  const uint32_t seed = threadIdx.x * 64;
#pragma unroll
  for (int k = 0; k < kFmaDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kFmaRows; ++i) a[k][i] = random_value<float>(seed + k * kFmaRows + i);
#pragma unroll
    for (int j = 0; j < kFmaColumns; ++j)
      b[k][j] = random_value<float>(seed + 32 + k * kFmaColumns + j);
  }
#pragma unroll 4
  for (int pass = 0; pass < kFmaPasses; ++pass) {
#pragma unroll
    for (int k = 0; k < kFmaDepth; ++k)
#pragma unroll
      for (int i = 0; i < kFmaRows; ++i)
#pragma unroll
        for (int j = 0; j < kFmaColumns; ++j)
          d[i * kFmaColumns + j] = fmaf(a[k][i], b[k][j], d[i * kFmaColumns + j]);
  }
  use(d, never);
}

cudaError_t launch_fma(int blocks, float* never, cudaStream_t stream) {
  return launch_products(fma_products, blocks, kThreads, never, stream);
}

constexpr MatrixProducts kFmaProducts = {
    "fma.f32", 4, 2.0 * kThreads* kFmaPasses* kFmaRows* kFmaColumns* kFmaDepth, launch_fma};

// ---- f16 and bf16 ---------------------------------------------------------------------------------------

constexpr int kMmaPasses = 2048, kMmaRows = 2, kMmaColumns = 4, kMmaDepth = 2;  // in products

// Each warp: D[32][32] += A[32][32] B[32][32], over and over.
template <class Element>
__global__ void __launch_bounds__(kThreads, 2) mma_products(float* never) {
  uint32_t a[kMmaDepth][kMmaRows][4], b[kMmaDepth][kMmaColumns][2];
  float d[kMmaRows * kMmaColumns * 4] = {};
  const uint32_t seed = threadIdx.x * 64;
#pragma unroll
  for (int k = 0; k < kMmaDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kMmaRows * 4; ++i)
      a[k][i / 4][i % 4] = random_pair<Element>(seed + k * kMmaRows * 4 + i);
#pragma unroll
    for (int j = 0; j < kMmaColumns * 2; ++j)
      b[k][j / 2][j % 2] = random_pair<Element>(seed + 32 + k * kMmaColumns * 2 + j);
  }
#pragma unroll 2
  for (int pass = 0; pass < kMmaPasses; ++pass) {
#pragma unroll
    for (int k = 0; k < kMmaDepth; ++k)
#pragma unroll
      for (int i = 0; i < kMmaRows; ++i)
#pragma unroll
        for (int j = 0; j < kMmaColumns; ++j)
          cuflash::device::ptx::mma_m16n8k16<Element>(d + (i * kMmaColumns + j) * 4, a[k][i],
                                                      b[k][j][0], b[k][j][1]);
  }
  use(d, never);
}

template <class Element>
cudaError_t launch_mma(int blocks, float* never, cudaStream_t stream) {
  return launch_products(mma_products<Element>, blocks, kThreads, never, stream);
}

template <class Element>
constexpr MatrixProducts kMmaProducts = {
    "mma.sync.m16n8k16", 2,
    2.0 * (16 * 8 * 16) * (kThreads / 32) * kMmaPasses* kMmaRows* kMmaColumns* kMmaDepth,
    launch_mma<Element>};

// ---- which ----------------------------------------------------------------------------------------------

const MatrixProducts* matrix_products(const std::string& dtype, int arch) {
  if (dtype == "f32") return &kFmaProducts;
#if CUFLASH_BENCH_WGMMA
  if (arch == 90) return dtype == "f16" ? &kWgmmaProductsF16 : &kWgmmaProductsBf16;
#endif
  if (arch < 80) return nullptr;
  return dtype == "f16" ? &kMmaProducts<__half> : &kMmaProducts<__nv_bfloat16>;
}

}  // namespace cuflash_bench
