#include "forward/reference/weights.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace forward_reference {

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    weights_kernel(const __grid_constant__ FullProblem p,
                   const __grid_constant__ WeightsOutput out) {
  for_each_warp_row<kMaxHeadDim>(
      p.batch * p.heads_q * out.num_rows,
      [&](const auto& lanes, int64_t i) { weights_index<T>(lanes, p, out, i); });
}

}  // namespace forward_reference

Status attention_weights_cuda(const Problem& problem, const WeightsOutput& out,
                              const LaunchContext& context) {
  const FullProblem p(problem);
  return dispatch_dtype(p.dtype, [&](auto tag) {
    return device::launch(forward_reference::weights_kernel<typename decltype(tag)::Type>,
                          "weights", warp_rows_shape(p.batch * p.heads_q * out.num_rows),
                          context.stream, p, out);
  });
}

Status preload_weights() {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      return device::load_kernel(forward_reference::weights_kernel<typename decltype(tag)::Type>,
                                 "weights");
    }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
