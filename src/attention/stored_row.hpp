// The elements of a key or of its value, whatever the cache keeps them as. The one home of where scales lie.
#pragma once

#include "attention/paging.hpp"
#include "common/quantised.hpp"
#include "core/features.hpp"

namespace cuflash {

// Scale and zero point number `scale`.
CUFLASH_HOST_DEVICE Quantisation quantisation_of(const CacheFormat::Side& side, int64_t scale) {
  Quantisation q;
  if (side.scale.data != nullptr) q.scale = side.scale.load(scale);
  if (side.zero.data != nullptr) q.zero = side.zero.load(scale);
  return q;
}

// Element `index` of K or V, whose scale is number `scale`. A call: inlined and unrolled over the channels of a row, the
// dtypes took the compiler 43 s instead of 12 and the kernels up to 19 registers more.
CUFLASH_HOST_DEVICE_CALL float stored_element(const CacheFormat::Side& side, const void* data,
                                              int64_t index, int64_t scale) {
  return dequantise(side.dtype, stored_code(side.dtype, data, index), quantisation_of(side, scale));
}

// A row of a quantised cache; channels are read as those of an array of floats.
struct QuantisedRow {
  const CacheFormat::Side& side;
  void* data;
  int64_t first, first_scale;  // of the row, in elements
  int group;

  CUFLASH_HOST_DEVICE int64_t scale_of(int channel) const {
    return first_scale + (group == 0 ? 0 : channel / group);
  }
  CUFLASH_HOST_DEVICE float operator[](int channel) const {
    return stored_element(side, data, first + channel, scale_of(channel));
  }
};

CUFLASH_HOST_DEVICE QuantisedRow quantised_row(const CacheFormat& format,
                                               const CacheFormat::Side& side, const TensorView& t,
                                               const KeySlot& at, int64_t head) {
  return {side, t.data, at.entry * t.batch_stride + head * t.head_stride + at.slot * t.row_stride,
          at.entry * format.page_stride + head * format.head_stride + at.slot * format.slot_stride,
          format.group};
}

// f of the row of a key in `t`, which is K or V and kept as `side`.
template <class T, class F>
CUFLASH_HOST_DEVICE auto with_stored_row(const FullProblem& p, const TensorView& t,
                                         const CacheFormat::Side& side, const KeySlot& at,
                                         int64_t head, F f) {
  if ((p.f.used & kQuantisedCache) == 0) {
    const T* row = t.row<T>(at.entry, head, at.slot);
    return f(row);
  }
  return f(quantised_row(p.f.format, side, t, at, head));
}

}  // namespace cuflash
