// Who works on one output row of the reference: one thread of the CPU, or a warp. Channel c of a row
// belongs to lane c % kLanes and sits in that lane's slot c / kLanes.
#pragma once

#include "common/host_device.hpp"

namespace cuflash {

constexpr int kMaxHeadDim = 576;
constexpr int kMaxTiledHeadDim = 256;  // of backward, and of all families but the reference

struct SingleLane {
  static constexpr int kLanes = 1, kSlots = kMaxHeadDim;
  int lane = 0;

  // Calls f(slot, channel) for this lane's channels.
  template <class F>
  CUFLASH_HOST_DEVICE void for_channels(int head_dim, F f) const {
    for (int c = 0; c < head_dim; ++c) f(c, c);
  }
  CUFLASH_HOST_DEVICE float sum(float x) const { return x; }
  CUFLASH_HOST_DEVICE void sync() const {}
  CUFLASH_HOST_DEVICE bool is_first() const { return true; }
};

#if defined(__CUDACC__)
// kMaxDim bounds the head dims: it decides how many registers a row takes.
template <int kMaxDim>
struct WarpLanes {
  static constexpr int kLanes = 32, kSlots = kMaxDim / 32;
  int lane;

  // Unrolled with a predicate, so that arrays indexed by slot stay in registers.
  template <class F>
  __device__ __forceinline__ void for_channels(int head_dim, F f) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int channel = slot * 32 + lane;
      if (channel < head_dim) f(slot, channel);
    }
  }
  // The same bits in every lane: the butterfly adds in an order that does not depend on the lane.
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
  __device__ __forceinline__ void sync() const { __syncwarp(); }
  __device__ __forceinline__ bool is_first() const { return lane == 0; }
};
#endif

}  // namespace cuflash
