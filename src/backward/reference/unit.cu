// The reference backward on CUDA: one warp per query row for delta and dQ, then one warp per key for dK
// and dV. No atomics, so gradients are bitwise equal from run to run.
#include "backward/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace backward_reference {

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    dq_kernel(const __grid_constant__ Problem p, const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row(query_rows(p),
                    [&](const WarpLanes& lanes, int64_t i) { dq_index<T>(lanes, p, scratch, i); });
}

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    dkv_kernel(const __grid_constant__ Problem p,
               const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row(key_rows(p),
                    [&](const WarpLanes& lanes, int64_t i) { dkv_index<T>(lanes, p, scratch, i); });
}

}  // namespace backward_reference

Status launch_bwd_reference(const Problem& p, const Plan&, const LaunchContext& context) {
  ReferenceScratch scratch;
  scratch.delta = static_cast<float*>(context.workspace);
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    CUFLASH_TRY(device::launch(backward_reference::dq_kernel<T>, "bwd_reference",
                               warp_rows_shape(query_rows(p)), context.stream, p, scratch));
    return device::launch(backward_reference::dkv_kernel<T>, "bwd_reference",
                          warp_rows_shape(key_rows(p)), context.stream, p, scratch);
  });
}

Status preload_bwd_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      using T = typename decltype(tag)::Type;
      CUFLASH_TRY(device::load_kernel(backward_reference::dq_kernel<T>, "bwd_reference"));
      return device::load_kernel(backward_reference::dkv_kernel<T>, "bwd_reference");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
