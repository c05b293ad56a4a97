// Which of the last keys of a sequence a query row sees, by packed bits. The one home of that rule; it joins the intervals
// of key_range.hpp.
#pragma once

#include "core/features.hpp"

namespace cuflash {

// Bit t of a row stands for key len_k - tree.len + t of its sequence, which has len_k keys. Earlier keys have no bit and are
// seen.
CUFLASH_HOST_DEVICE bool tree_shows(const TreeMask& tree, int64_t batch, int64_t row, int64_t len_k,
                                    int64_t key) {
  if (tree.words == nullptr) return true;
  const int64_t bit = key - (len_k - tree.len);
  if (bit < 0) return true;
  const uint32_t word = tree.words[batch * tree.batch_stride + row * tree.row_stride + bit / 32];
  return (word >> (bit % 32) & 1u) != 0;
}

}  // namespace cuflash
