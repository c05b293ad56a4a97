// wgmma.m64n256k16 with both operands in shared memory, the largest product of sm_90a.
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/wgmma_tile.hpp"
#include "matrix_products.cuh"
#include "matrix_products.hpp"

namespace cuflash_bench {

namespace ptx = cuflash::device::ptx;

constexpr int kRows = 64, kColumns = 256, kDepth = 64;  // the depth is four products
constexpr int kGroups = 2;  // warpgroups: while one waits the other has work
constexpr int kPasses = 256, kPassesUntilWait = 8;

// Each warpgroup: D[64][256] += A[64][64] B[64][256], over and over, all of the same A and B.
template <class Element>
__global__ void __launch_bounds__(kGroups * 128, 1) wgmma_products(float* never) {
  // Where a value lies does not matter: they are all random.
  __shared__ alignas(1024) Element s_a[kRows * kDepth], s_b[kColumns * kDepth];
  for (int i = threadIdx.x; i < kRows * kDepth; i += kGroups * 128)
    s_a[i] = random_value<Element>(i);
  for (int i = threadIdx.x; i < kColumns * kDepth; i += kGroups * 128)
    s_b[i] = random_value<Element>(kRows * kDepth + i);
  // SAFETY: every thread makes its own values visible to the products, and the barrier orders those after all threads'.
  ptx::fence_async_shared();
  __syncthreads();
  const uint64_t a =
      cuflash::device::k_major_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(s_a)));
  const uint64_t b =
      cuflash::device::k_major_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(s_b)));
  float d[kColumns / 2] = {};
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kPassesUntilWait) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPassesUntilWait * kDepth / 16; ++i)
      ptx::wgmma_m64k16_ss<Element>(d, cuflash::device::advance(a, i % 4 * 2),
                                    cuflash::device::advance(b, i % 4 * 2), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  use(d, never);
}

template <class Element>
cudaError_t launch_wgmma(int blocks, float* never, cudaStream_t stream) {
  return launch_products(wgmma_products<Element>, blocks, kGroups * 128, never, stream);
}

constexpr double kFlops = 2.0 * kGroups * kRows * kColumns * kDepth * kPasses;
const MatrixProducts kWgmmaProductsF16 = {"wgmma.m64n256k16", 1, kFlops, launch_wgmma<__half>};
const MatrixProducts kWgmmaProductsBf16 = {"wgmma.m64n256k16", 1, kFlops,
                                           launch_wgmma<__nv_bfloat16>};

}  // namespace cuflash_bench
