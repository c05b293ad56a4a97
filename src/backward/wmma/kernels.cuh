// Backward on tensor cores through nvcuda::wmma, in two passes: dQ (and delta), then dK and dV. f16 from sm_70,
// bf16 from sm_80; any strides, masks, lengths, GQA ratios; head_dim and head_dim_v up to the bucket, padded with zeros.
//
// Both kernels are templates of their Call: a Problem, or a FullProblem, which has sequences of their own lengths and
// places, modified scores, dropout, delta of the caller and a gradient of the LSE (attention/tile_gradients.hpp).
//
// Each pass sums in registers and writes its rows once: no atomics, no fp32 copies of gradients, the same bits from
// run to run. The price is 7 products in place of 5, since both passes make S and dP.
#pragma once

#include "backward/wmma/dkv_kernel.cuh"
#include "backward/wmma/dq_kernel.cuh"
#include "core/variant.hpp"
#include "device/launch.cuh"
#include "device/once_per_device.hpp"

namespace cuflash::backward_wmma {

template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(kThreads, DqConfig<kHeadDim>::kMinBlocks)
    dq_kernel(const __grid_constant__ Call problem, float* delta, bool vector_access) {
  if constexpr (device::kHasWmma<Element>) {
    dq_block<Element, DqConfig<kHeadDim>>(problem, delta, vector_access);
  } else {
    __trap();  // bf16 needs sm_80; the table refuses such GPUs
  }
}

template <class Element, int kHeadDim, class Call>
__global__ void __launch_bounds__(kThreads, DkvConfig<kHeadDim>::kMinBlocks)
    dkv_kernel(const __grid_constant__ Call problem, const float* delta, bool vector_access) {
  if constexpr (device::kHasWmma<Element>) {
    dkv_block<Element, DkvConfig<kHeadDim>>(problem, delta, vector_access);
  } else {
    __trap();
  }
}

template <class Element, int kHeadDim, class Call>
Status load_kernels(const char* name) {
  CUFLASH_TRY(
      device::load_kernel(dq_kernel<Element, kHeadDim, Call>, name, kDqSharedBytes<kHeadDim>));
  return device::load_kernel(dkv_kernel<Element, kHeadDim, Call>, name, kDkvSharedBytes<kHeadDim>);
}

template <class Element, int kHeadDim>
Status preload(const char* name, int device) {
  static device::OncePerDevice once;
  return once.run(device, [&] {
    CUFLASH_TRY((load_kernels<Element, kHeadDim, Problem>(name)));
    return load_kernels<Element, kHeadDim, FullProblem>(name);
  });
}

template <class Element, int kHeadDim, class Call>
Status launch_passes(const char* name, const Call& problem, const LaunchContext& context) {
  auto* delta = static_cast<float*>(context.workspace);
  const bool vector_access =
      problem.aligned16 && problem.head_dim % 8 == 0 && value_dim(problem) % 8 == 0;
  const int64_t m_tiles = ceil_div(problem.len_q, kTileRows);
  const int64_t n_tiles = ceil_div(problem.len_k, kTileRows);
  CUFLASH_TRY(device::launch(
      dq_kernel<Element, kHeadDim, Call>, name,
      {m_tiles * problem.batch * problem.heads_q, kThreads, kDqSharedBytes<kHeadDim>},
      context.stream, problem, delta, vector_access));
  return device::launch(
      dkv_kernel<Element, kHeadDim, Call>, name,
      {n_tiles * problem.batch * problem.heads_kv, kThreads, kDkvSharedBytes<kHeadDim>},
      context.stream, problem, delta, vector_access);
}

template <class Element, int kHeadDim>
Status launch(const char* name, const Problem& problem, const LaunchContext& context) {
  static_assert(sizeof(DqStorage<DqConfig<kHeadDim>, Element>) == kDqSharedBytes<kHeadDim>);
  static_assert(sizeof(DkvStorage<DkvConfig<kHeadDim>, Element>) == kDkvSharedBytes<kHeadDim>);
  CUFLASH_TRY((preload<Element, kHeadDim>(name, context.device)));
  if (problem.features == nullptr) return launch_passes<Element, kHeadDim>(name, problem, context);
  return launch_passes<Element, kHeadDim>(name, FullProblem(problem), context);
}

}  // namespace cuflash::backward_wmma
