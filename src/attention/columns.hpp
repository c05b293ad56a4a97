// The part of a tile of scores that one of its rows sees.
#pragma once

#include "attention/key_range.hpp"

namespace cuflash {

// The columns [begin, end) of the tile.
struct Columns {
  int begin, end;

  CUFLASH_HOST_DEVICE bool contain(unsigned column) const {
    return column - static_cast<unsigned>(begin) < static_cast<unsigned>(end - begin);
  }
};

// The part of `keys` (or of rows, where these are the columns) in the tile that starts at `first`.
template <int kTileN>
CUFLASH_HOST_DEVICE Columns columns_of(const Range& keys, int64_t first) {
  const int64_t begin = clamp64(keys.begin - first, 0, kTileN);
  const int64_t end = clamp64(keys.end - first, begin, kTileN);
  return {static_cast<int>(begin), static_cast<int>(end)};
}

}  // namespace cuflash
