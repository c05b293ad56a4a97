// Whether strided tensors share an element: exact, so that interleaved layouts (packed QKV, its packed
// gradient) pass while every true overlap is found.
#pragma once

#include <cstdint>

namespace cuflash {

// The elements base + sum_d index[d] * stride[d] (bytes) with 0 <= index[d] < extent[d], each element_bytes
// long. Extents are positive, strides are not negative.
struct Box {
  static constexpr int kDims = 4;
  uint64_t base = 0;
  int64_t extent[kDims] = {1, 1, 1, 1};
  int64_t stride[kDims] = {0, 0, 0, 0};
  int64_t element_bytes = 1;  // a run of contiguous channels may count as one element
};

enum class Overlap { kNone, kYes, kTooComplex };

// Two different tensors. kTooComplex: strides so irregular that the search was given up.
Overlap boxes_overlap(const Box& a, const Box& b);

// One tensor: whether two of its indices name the same memory.
Overlap box_overlaps_itself(const Box& box);

}  // namespace cuflash
