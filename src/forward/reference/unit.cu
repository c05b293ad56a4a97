// The reference forward on CUDA: one warp per query row.
#include "forward/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace forward_reference {

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    forward_kernel(const __grid_constant__ Problem p) {
  for_each_warp_row(query_rows(p),
                    [&](const WarpLanes& lanes, int64_t i) { forward_index<T>(lanes, p, i); });
}

}  // namespace forward_reference

Status launch_fwd_reference(const Problem& p, const Plan&, const LaunchContext& context) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    return device::launch(forward_reference::forward_kernel<typename decltype(tag)::Type>,
                          "fwd_reference", warp_rows_shape(query_rows(p)), context.stream, p);
  });
}

Status preload_fwd_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      return device::load_kernel(forward_reference::forward_kernel<typename decltype(tag)::Type>,
                                 "fwd_reference");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
