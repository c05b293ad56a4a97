#include "merge/merge.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"

namespace cuflash {
namespace merge {

template <class In, class Out, int kMaxDim>
__global__ void __launch_bounds__(kWarpRowThreads)
    merge_kernel(const __grid_constant__ MergeProblem p) {
  for_each_warp_row<kMaxDim>(p.batch * p.heads * p.len, [&](const auto& lanes, int64_t i) {
    merge_index<In, Out>(lanes, p, i);
  });
}

// Calls f with the kernel for the dtypes of the parts and of o and for a head dim.
template <class F>
Status with_kernel(Dtype in_dtype, Dtype out_dtype, int64_t head_dim, F f) {
  return dispatch_dtype(in_dtype, [&](auto in) {
    return dispatch_dtype(out_dtype, [&](auto out) {
      return dispatch_row_width(head_dim, head_dim, [&](auto width) -> Status {
        return f(merge_kernel<typename decltype(in)::Type, typename decltype(out)::Type,
                              decltype(width)::value>);
      });
    });
  });
}

}  // namespace merge

Status merge_states_cuda(const MergeProblem& p, const LaunchContext& context) {
  return merge::with_kernel(p.parts.dtype, p.o.dtype, p.head_dim, [&](auto* kernel) {
    return device::launch(kernel, "merge", warp_rows_shape(p.batch * p.heads * p.len),
                          context.stream, p);
  });
}

Status preload_merge(int) {
  for (const Dtype in : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    for (const Dtype out : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
      for (const int head_dim : {kMaxTiledHeadDim, kMaxHeadDim})
        CUFLASH_TRY(merge::with_kernel(
            in, out, head_dim, [](auto* kernel) { return device::load_kernel(kernel, "merge"); }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
