// One warp per index, for the reference kernels.
#pragma once

#include <type_traits>

#include "attention/lanes.hpp"
#include "device/launch.cuh"

namespace cuflash {

constexpr int kWarpRowThreads = 128;

// Any count fits: the grid stops at a bound and each warp strides on.
inline device::LaunchShape warp_rows_shape(int64_t count) {
  constexpr int64_t kWarps = kWarpRowThreads / 32, kMaxGrid = int64_t{1} << 24;
  const int64_t blocks = (count + kWarps - 1) / kWarps;
  return {blocks < kMaxGrid ? blocks : kMaxGrid, kWarpRowThreads};
}

// Calls f with std::integral_constant of a bound of both head dims, for kernels that are templates of it.
template <class F>
auto dispatch_row_width(int64_t head_dim, int64_t head_dim_v, F f) {
  if (head_dim <= kMaxTiledHeadDim && head_dim_v <= kMaxTiledHeadDim)
    return f(std::integral_constant<int, kMaxTiledHeadDim>{});
  return f(std::integral_constant<int, kMaxHeadDim>{});
}

template <int kMaxDim, class F>
__device__ __forceinline__ void for_each_warp_row(int64_t count, F f) {
  const WarpLanes<kMaxDim> lanes{static_cast<int>(threadIdx.x % 32)};
  const int64_t warps = int64_t{gridDim.x} * (kWarpRowThreads / 32);
  int64_t index = (int64_t{blockIdx.x} * kWarpRowThreads + threadIdx.x) / 32;
  for (; index < count; index += warps) f(lanes, index);
}

}  // namespace cuflash
