// Where the keys of a cache lie: in pages that a table names, or in an entry of their own. The one home of page addressing.
#pragma once

#include "common/integer.hpp"
#include "core/features.hpp"

namespace cuflash {

// The most slots that sequence b can have: those of its pages, or none where its entry is not in the cache.
CUFLASH_HOST_DEVICE int64_t cache_capacity(const Paging& paging, int64_t max_len, int64_t b) {
  if (paging.indptr != nullptr)
    return max64(0, int64_t{paging.indptr[b + 1]} - paging.indptr[b]) * paging.page_size;
  if (paging.entries != nullptr) {
    const int64_t entry = paging.entries[b];
    return entry >= 0 && entry < paging.num_pages ? max_len : 0;
  }
  return max_len;
}

// Indices of K and V: [entry, head, slot, channel].
struct KeySlot {
  int64_t entry, slot;
  bool valid;  // false: the page is not in the pool, and its keys are neither seen nor written
};

// Slot `slot` of sequence b. Of the table only entries of slots in use are read.
CUFLASH_HOST_DEVICE KeySlot key_slot(const Paging& paging, int64_t b, int64_t slot) {
  if (paging.entries != nullptr) return {paging.entries[b], slot, true};
  if (paging.table == nullptr) return {b, slot, true};
  const int64_t first = paging.indptr != nullptr ? paging.indptr[b] : b * paging.table_stride;
  // Both are below 2^31, and a GPU divides 32 bits much faster than 64.
  const auto slot32 = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(paging.page_size);
  const int64_t at = first + slot32 / size;
  const int64_t page = paging.wide_ids ? static_cast<const int64_t*>(paging.table)[at]
                                       : static_cast<const int32_t*>(paging.table)[at];
  return {page, slot32 % size, page >= 0 && page < paging.num_pages};
}

}  // namespace cuflash
