// Which keys a query row sees, and which rows see a key. The one home of the mask rule: a row's keys are
// an interval, so are those of a tile of rows.
#pragma once

#include "common/integer.hpp"
#include "core/problem.hpp"

namespace cuflash {

// Half-open; begin == end where nothing is seen.
struct Range {
  int64_t begin = 0, end = 0;

  CUFLASH_HOST_DEVICE bool empty() const { return begin >= end; }
  CUFLASH_HOST_DEVICE bool contains(int64_t x) const { return begin <= x && x < end; }
};

// The centre of row i is i + centre_shift. Reads device memory for Align::kDeviceOffsets.
CUFLASH_HOST_DEVICE int64_t centre_shift(const Mask& mask, int64_t b, int64_t len_q,
                                         int64_t len_k) {
  switch (mask.align) {
    case Align::kTopLeft:
      return 0;
    case Align::kOffset:
      return mask.offset;
    case Align::kDeviceOffsets:
      return mask.offsets[b];
    case Align::kBottomRight:
      break;
  }
  return len_k - len_q;
}

// The keys that row `row` would see of an endless sequence; those of row + i lie i further on.
CUFLASH_HOST_DEVICE Range uncut_keys(const Mask& mask, int64_t shift, int64_t row) {
  const int64_t centre = row + shift;
  return {centre - mask.left, centre + mask.right + 1};
}

// The keys that row `row` sees. Both ends never decrease from row to row, empty rows included.
CUFLASH_HOST_DEVICE Range visible_keys(const Mask& mask, int64_t shift, int64_t row,
                                       int64_t len_k) {
  const Range uncut = uncut_keys(mask, shift, row);
  const int64_t begin = clamp64(uncut.begin, 0, len_k);
  const int64_t end = clamp64(uncut.end, 0, len_k);
  return {begin, max64(begin, end)};
}

// The rows that see key `key`: i + shift - left <= key <= i + shift + right.
CUFLASH_HOST_DEVICE Range visible_rows(const Mask& mask, int64_t shift, int64_t key,
                                       int64_t len_q) {
  const int64_t begin = clamp64(key - shift - mask.right, 0, len_q);
  const int64_t end = clamp64(key - shift + mask.left + 1, 0, len_q);
  return {begin, max64(begin, end)};
}

// For the rows [row_begin, row_end), at least one: the keys that some row sees lie in `any`; every row sees
// all of `all`, so a tile inside it needs no mask.
struct TileRange {
  Range any, all;
};

CUFLASH_HOST_DEVICE TileRange tile_keys(const Mask& mask, int64_t shift, int64_t row_begin,
                                        int64_t row_end, int64_t len_k) {
  const Range first = visible_keys(mask, shift, row_begin, len_k);
  const Range last = visible_keys(mask, shift, row_end - 1, len_k);
  return {{first.begin, last.end}, {last.begin, max64(last.begin, first.end)}};
}

// The same for the rows that the keys [key_begin, key_end), at least one, are seen by.
CUFLASH_HOST_DEVICE TileRange tile_rows(const Mask& mask, int64_t shift, int64_t key_begin,
                                        int64_t key_end, int64_t len_q) {
  const Range first = visible_rows(mask, shift, key_begin, len_q);
  const Range last = visible_rows(mask, shift, key_end - 1, len_q);
  return {{first.begin, last.end}, {last.begin, max64(last.begin, first.end)}};
}

// Part `split` of `num_splits` nearly equal parts of a range, of no fewer than `least` elements; parts past its length are
// empty.
CUFLASH_HOST_DEVICE Range split_range(Range range, int64_t split, int64_t num_splits,
                                      int64_t least) {
  const int64_t length = max64(0, range.end - range.begin);
  const int64_t part = max64(ceil_div(length, num_splits), least);
  const int64_t begin = min64(range.begin + split * part, range.begin + length);
  return {begin, min64(begin + part, range.begin + length)};
}

}  // namespace cuflash
