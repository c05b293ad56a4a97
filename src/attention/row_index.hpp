// The index of a [batch, head, row] triple and back.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"

namespace cuflash {

struct RowIndex {
  int64_t batch, head, row;
};
CUFLASH_HOST_DEVICE RowIndex row_index(int64_t i, int64_t heads, int64_t rows) {
  return {i / rows / heads, i / rows % heads, i % rows};
}

}  // namespace cuflash
