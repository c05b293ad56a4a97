// Arrays whose element type is known at run time only.
#pragma once

#include "common/float16.hpp"
#include "common/tensor_view.hpp"

namespace cuflash {

struct Elements {
  void* data = nullptr;
  Dtype dtype = Dtype::kF32;

  CUFLASH_HOST_DEVICE float load(int64_t index) const {
    switch (dtype) {
      case Dtype::kF16:
        return to_float(static_cast<const Half*>(data)[index]);
      case Dtype::kBf16:
        return to_float(static_cast<const Bfloat16*>(data)[index]);
      case Dtype::kF32:
        break;
    }
    return static_cast<const float*>(data)[index];
  }

  CUFLASH_HOST_DEVICE void store(int64_t index, float x) const {
    switch (dtype) {
      case Dtype::kF16:
        static_cast<Half*>(data)[index] = from_float<Half>(x);
        return;
      case Dtype::kBf16:
        static_cast<Bfloat16*>(data)[index] = from_float<Bfloat16>(x);
        return;
      case Dtype::kF32:
        break;
    }
    static_cast<float*>(data)[index] = x;
  }
};

}  // namespace cuflash
