// The reference decode on CUDA: one warp per query row and part of the keys, then one per row that merges the parts.
#include "decode/reference/unit.hpp"

#include "attention/reference_rows.hpp"
#include "attention/warp_rows.cuh"
#include "common/dtype_dispatch.hpp"
#include "core/split.hpp"

namespace cuflash {
namespace decode_reference {

template <class T, int kMaxDim>
__global__ void __launch_bounds__(kWarpRowThreads)
    decode_kernel(const __grid_constant__ FullProblem p) {
  for_each_warp_row<kMaxDim>(query_rows(p),
                             [&](const auto& lanes, int64_t i) { forward_index<T>(lanes, p, i); });
}

template <class T, int kMaxDim>
__global__ void __launch_bounds__(kWarpRowThreads)
    split_kernel(const __grid_constant__ FullProblem p,
                 const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row<kMaxDim>(scratch.num_splits * query_rows(p), [&](const auto& lanes, int64_t i) {
    split_index<T>(lanes, p, scratch, i);
  });
}

template <class T, int kMaxDim>
__global__ void __launch_bounds__(kWarpRowThreads)
    combine_kernel(const __grid_constant__ FullProblem p,
                   const __grid_constant__ ReferenceScratch scratch) {
  for_each_warp_row<kMaxDim>(
      query_rows(p), [&](const auto& lanes, int64_t i) { combine_index<T>(lanes, p, scratch, i); });
}

}  // namespace decode_reference

Status launch_dec_reference(const Problem& problem, const Plan& plan,
                            const LaunchContext& context) {
  const FullProblem p(problem);
  return dispatch_dtype(p.dtype, [&](auto tag) {
    return dispatch_row_width(p.head_dim, p.head_dim_v, [&](auto width) {
      using T = typename decltype(tag)::Type;
      constexpr int kMaxDim = decltype(width)::value;
      const int64_t rows = query_rows(p);
      if (plan.num_splits == 1)
        return device::launch(decode_reference::decode_kernel<T, kMaxDim>, "dec_reference",
                              warp_rows_shape(rows), context.stream, p);
      ReferenceScratch scratch;
      scratch.num_splits = plan.num_splits;
      scratch.parts = split_merge(problem, plan.num_splits, context.workspace);
      CUFLASH_TRY(device::launch(decode_reference::split_kernel<T, kMaxDim>, "dec_reference",
                                 warp_rows_shape(plan.num_splits * rows), context.stream, p,
                                 scratch));
      return device::launch(decode_reference::combine_kernel<T, kMaxDim>, "dec_reference",
                            warp_rows_shape(rows), context.stream, p, scratch);
    });
  });
}

Status preload_dec_reference(int) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
    for (const int dim : {kMaxTiledHeadDim, kMaxHeadDim})
      CUFLASH_TRY(dispatch_dtype(dtype, [&](auto tag) {
        return dispatch_row_width(dim, dim, [&](auto width) {
          using T = typename decltype(tag)::Type;
          constexpr int kMaxDim = decltype(width)::value;
          CUFLASH_TRY(
              device::load_kernel(decode_reference::decode_kernel<T, kMaxDim>, "dec_reference"));
          CUFLASH_TRY(
              device::load_kernel(decode_reference::split_kernel<T, kMaxDim>, "dec_reference"));
          return device::load_kernel(decode_reference::combine_kernel<T, kMaxDim>, "dec_reference");
        });
      }));
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
