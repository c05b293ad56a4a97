#include "merge/merge.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace merge {

template <class In, class Out>
__global__ void __launch_bounds__(kWarpRowThreads)
    merge_kernel(const __grid_constant__ MergeProblem p) {
  for_each_warp_row(p.batch * p.heads * p.len,
                    [&](const WarpLanes& lanes, int64_t i) { merge_index<In, Out>(lanes, p, i); });
}

}  // namespace merge

Status merge_states_cuda(const MergeProblem& p, const LaunchContext& context) {
  return dispatch_dtype(p.parts.dtype, [&](auto in) {
    return dispatch_dtype(p.o.dtype, [&](auto out) {
      using In = typename decltype(in)::Type;
      using Out = typename decltype(out)::Type;
      return device::launch(merge::merge_kernel<In, Out>, "merge",
                            warp_rows_shape(p.batch * p.heads * p.len), context.stream, p);
    });
  });
}

Status preload_merge(int) {
  for (const Dtype in_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    for (const Dtype out_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
      CUFLASH_TRY(dispatch_dtype(in_dtype, [&](auto in) {
        return dispatch_dtype(out_dtype, [&](auto out) {
          return device::load_kernel(
              merge::merge_kernel<typename decltype(in)::Type, typename decltype(out)::Type>,
              "merge");
        });
      }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
