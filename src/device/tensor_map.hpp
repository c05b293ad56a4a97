// TMA's descriptions of tensors. Encoded for each call: 0.1 us each on the host, and nothing to keep.
#pragma once

#include <cuda.h>

#include "common/status.hpp"
#include "common/tensor_view.hpp"

namespace cuflash::device {

// [batch, head, row, channel] with extents in that order; boxes of `box_rows` rows, at most 256, of 64 channels of one
// head. 16-bit elements; the address and all strides are multiples of 16 bytes; no extent is 0.
Status encode_tensor_map(const TensorView& tensor, int64_t batch, int64_t heads, int64_t rows,
                         int64_t channels, int box_rows, CUtensorMap* map);

}  // namespace cuflash::device
