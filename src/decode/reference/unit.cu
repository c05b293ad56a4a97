// The reference decode on CUDA: one warp per query row and part of the keys; combine.cu merges the parts.
#include "decode/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"
#include "core/split.hpp"
#include "decode/combine.hpp"

namespace cuflash {
namespace decode_reference {

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    decode_kernel(const __grid_constant__ Problem p) {
  for_each_warp_row(query_rows(p),
                    [&](const WarpLanes& lanes, int64_t i) { forward_index<T>(lanes, p, i); });
}

template <class T>
__global__ void __launch_bounds__(kWarpRowThreads)
    split_kernel(const __grid_constant__ Problem p,
                 const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row(scratch.num_splits * query_rows(p), [&](const WarpLanes& lanes, int64_t i) {
    split_index<T>(lanes, p, scratch, i);
  });
}

}  // namespace decode_reference

Status launch_dec_reference(const Problem& p, const Plan& plan, const LaunchContext& context) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const int64_t rows = query_rows(p);
    if (plan.num_splits == 1)
      return device::launch(decode_reference::decode_kernel<T>, "dec_reference",
                            warp_rows_shape(rows), context.stream, p);
    ReferenceScratch scratch;
    scratch.num_splits = plan.num_splits;
    scratch.parts = split_merge(p, plan.num_splits, context.workspace);
    CUFLASH_TRY(device::launch(decode_reference::split_kernel<T>, "dec_reference",
                               warp_rows_shape(plan.num_splits * rows), context.stream, p,
                               scratch));
    return combine_parts(scratch.parts, context);
  });
}

Status preload_dec_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    CUFLASH_TRY(dispatch_dtype(dtype, [](auto tag) {
      using T = typename decltype(tag)::Type;
      CUFLASH_TRY(device::load_kernel(decode_reference::decode_kernel<T>, "dec_reference"));
      return device::load_kernel(decode_reference::split_kernel<T>, "dec_reference");
    }));
  return preload_combine();
}

}  // namespace cuflash
