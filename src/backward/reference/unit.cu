// The reference backward on CUDA: one warp per query row for delta and dQ, then one warp per key for dK
// and dV, then, where they are wanted, one per entry of the bias's gradient and one per sink. No atomics, so gradients
// are bitwise equal from run to run.
#include "backward/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace backward_reference {

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    dq_kernel(const __grid_constant__ FullProblem p,
              const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row<kMaxTiledHeadDim>(
      query_rows(p), [&](const auto& lanes, int64_t i) { dq_index<T>(lanes, p, scratch, i); });
}

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    dkv_kernel(const __grid_constant__ FullProblem p,
               const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row<kMaxTiledHeadDim>(
      key_rows(p), [&](const auto& lanes, int64_t i) { dkv_index<T>(lanes, p, scratch, i); });
}

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    modifier_kernel(const __grid_constant__ FullProblem p,
                    const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row<kMaxTiledHeadDim>(modifier_gradients(p), [&](const auto& lanes, int64_t i) {
    modifier_index<T>(lanes, p, scratch, i);
  });
}

}  // namespace backward_reference

Status launch_bwd_reference(const Problem& problem, const Plan&, const LaunchContext& context) {
  const FullProblem p(problem);
  ReferenceScratch scratch;
  scratch.delta = delta_scratch(p, context.workspace);
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    CUFLASH_TRY(device::launch(backward_reference::dq_kernel<T>, "bwd_reference",
                               warp_rows_shape(query_rows(p)), context.stream, p, scratch));
    CUFLASH_TRY(device::launch(backward_reference::dkv_kernel<T>, "bwd_reference",
                               warp_rows_shape(key_rows(p)), context.stream, p, scratch));
    return device::launch(backward_reference::modifier_kernel<T>, "bwd_reference",
                          warp_rows_shape(modifier_gradients(p)), context.stream, p, scratch);
  });
}

Status preload_bwd_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      using T = typename decltype(tag)::Type;
      CUFLASH_TRY(device::load_kernel(backward_reference::dq_kernel<T>, "bwd_reference"));
      CUFLASH_TRY(device::load_kernel(backward_reference::dkv_kernel<T>, "bwd_reference"));
      return device::load_kernel(backward_reference::modifier_kernel<T>, "bwd_reference");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
