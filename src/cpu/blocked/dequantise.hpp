// A row of a quantised cache as floats. The rules are those of the reference, which takes the channels one by one: here the
// dtype is known to the compiler and a group's scale is read once (README.md has what that saves).
#pragma once

#include "attention/stored_row.hpp"

namespace cuflash::cpu_blocked {

template <StoredDtype kStored>
void dequantise_row_of(const QuantisedRow& row, int channels, float* out) {
  const int group = row.group == 0 ? channels : row.group;
  for (int first = 0; first < channels; first += group) {
    const Quantisation q = quantisation_of(row.side, row.scale_of(first));
    const int end = first + group < channels ? first + group : channels;
    for (int c = first; c < end; ++c)
      out[c] = dequantise(kStored, stored_code(kStored, row.data, row.first + c), q);
  }
}

inline void dequantise_row(const QuantisedRow& row, int channels, float* out) {
  switch (row.side.dtype) {
    case StoredDtype::kF32:
      return dequantise_row_of<StoredDtype::kF32>(row, channels, out);
    case StoredDtype::kF16:
      return dequantise_row_of<StoredDtype::kF16>(row, channels, out);
    case StoredDtype::kBf16:
      return dequantise_row_of<StoredDtype::kBf16>(row, channels, out);
    case StoredDtype::kE4m3:
      return dequantise_row_of<StoredDtype::kE4m3>(row, channels, out);
    case StoredDtype::kE5m2:
      return dequantise_row_of<StoredDtype::kE5m2>(row, channels, out);
    case StoredDtype::kInt8:
      return dequantise_row_of<StoredDtype::kInt8>(row, channels, out);
    case StoredDtype::kInt4:
      return dequantise_row_of<StoredDtype::kInt4>(row, channels, out);
  }
}

}  // namespace cuflash::cpu_blocked
