// From a run-time dtype to a storage type: f is called with a TypeTag<float>, <Half> or <Bfloat16>.
#pragma once

#include "common/float16.hpp"
#include "common/tensor_view.hpp"

namespace cuflash {

template <class T>
struct TypeTag {
  using Type = T;
};

template <class F>
auto dispatch_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kF16:
      return f(TypeTag<Half>{});
    case Dtype::kBf16:
      return f(TypeTag<Bfloat16>{});
    case Dtype::kF32:
      break;
  }
  return f(TypeTag<float>{});
}

}  // namespace cuflash
