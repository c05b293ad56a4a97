// A [batch, head, row, channel] tensor inside the library: address and strides in elements, channels
// contiguous. Plain data, passed to kernels by value.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"

namespace cuflash {

enum class Dtype : int32_t { kF32 = 1, kF16 = 2, kBf16 = 3 };  // the values of cuflash_dtype

constexpr int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
  Dtype dtype = Dtype::kF32;

  template <class T>
  CUFLASH_HOST_DEVICE T* row(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<T*>(data) + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// fp32 [batch, head, row]: LSE and delta. data may be null where the output is not wanted.
struct RowStatsView {
  float* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  CUFLASH_HOST_DEVICE float* at(int64_t batch, int64_t head, int64_t row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

}  // namespace cuflash
