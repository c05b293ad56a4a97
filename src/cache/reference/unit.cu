// The reference append on CUDA: one warp per row of a new token.
#include "cache/reference/unit.hpp"

#include "attention/append.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace append_reference {

// A row is read and written in passes of a warp's width and is nowhere as a whole: any head dim will do.
template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    append_kernel(const __grid_constant__ AppendProblem p) {
  for_each_warp_row<kMaxHeadDim>(
      p.rows(), [&](const auto& lanes, int64_t i) { append_index<T>(lanes, p, i); });
}

}  // namespace append_reference

Status launch_append_reference(const Problem& problem, const Plan&, const LaunchContext& context) {
  const AppendProblem& p = *problem.append;
  return dispatch_dtype(problem.dtype, [&](auto tag) {
    return device::launch(append_reference::append_kernel<typename decltype(tag)::Type>,
                          "append_reference", warp_rows_shape(p.rows()), context.stream, p);
  });
}

Status preload_append_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      return device::load_kernel(append_reference::append_kernel<typename decltype(tag)::Type>,
                                 "append_reference");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
