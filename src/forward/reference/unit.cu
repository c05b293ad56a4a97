// The reference forward on CUDA: one warp per query row.
#include "forward/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace forward_reference {

template <class T, int kMaxDim>
__global__ void __launch_bounds__(kWarpRowThreads)
    forward_kernel(const __grid_constant__ FullProblem p) {
  for_each_warp_row<kMaxDim>(query_rows(p),
                             [&](const auto& lanes, int64_t i) { forward_index<T>(lanes, p, i); });
}

}  // namespace forward_reference

Status launch_fwd_reference(const Problem& problem, const Plan&, const LaunchContext& context) {
  const FullProblem p(problem);
  return dispatch_dtype(p.dtype, [&](auto tag) {
    return dispatch_row_width(p.head_dim, p.head_dim_v, [&](auto width) {
      return device::launch(
          forward_reference::forward_kernel<typename decltype(tag)::Type, decltype(width)::value>,
          "fwd_reference", warp_rows_shape(query_rows(p)), context.stream, p);
    });
  });
}

Status preload_fwd_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    for (const int dim : {kMaxTiledHeadDim, kMaxHeadDim})
      CUFLASH_TRY(dispatch_dtype(dtype, [&](auto tag) {
        return dispatch_row_width(dim, dim, [&](auto width) {
          return device::load_kernel(forward_reference::forward_kernel<typename decltype(tag)::Type,
                                                                       decltype(width)::value>,
                                     "fwd_reference");
        });
      }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
