// Where the rows of a sequence lie. The one home of ragged addressing. Offsets and lengths come from the device and may
// be anything: every row that they lead to lies inside its tensor, and no two sequences share one.
#pragma once

#include "attention/paging.hpp"
#include "attention/row_index.hpp"
#include "common/integer.hpp"
#include "core/features.hpp"

namespace cuflash {

// Rows [first_q, first_q + len_q) of q, o, LSE and their gradients, and [first_k, first_k + len_k) of k and v. The batch
// stride of packed tensors is 0, so that both kinds are addressed by (batch, head, first + row).
struct Sequence {
  int64_t batch, first_q, len_q, first_k, len_k;
};

struct Rows {
  int64_t first, count;
};

// The rows of sequence b: of a packed tensor where there are offsets, else all of its `max_len` rows.
CUFLASH_HOST_DEVICE Rows rows_of_sequence(const int32_t* offsets, int64_t total, int64_t max_len,
                                          const int32_t* lengths, int64_t b) {
  Rows rows{0, max_len};
  if (offsets != nullptr) {
    rows.first = clamp64(offsets[b], 0, total);
    rows.count =
        clamp64(int64_t{offsets[b + 1]} - rows.first, 0, min64(total - rows.first, max_len));
  }
  if (lengths != nullptr) rows.count = clamp64(lengths[b], 0, rows.count);
  return rows;
}

CUFLASH_HOST_DEVICE Sequence sequence_of(const FullProblem& p, int64_t b) {
  const Ragged& r = p.f.ragged;
  const Rows q = rows_of_sequence(r.offsets_q, r.total_q, p.len_q, r.lengths_q, b);
  Rows k = rows_of_sequence(r.offsets_k, r.total_k, p.len_k, p.lengths_k, b);
  k.count = min64(k.count, cache_capacity(p.f.paging, p.len_k, b));
  const int64_t pad = r.left_pad_k == nullptr ? 0 : clamp64(r.left_pad_k[b], 0, k.count);
  return {b, q.first, q.count, k.first + pad, k.count - pad};
}

// The last sequence that begins at or before row `token` of a packed tensor, else the first: where any sequence holds
// the row, this one does. Needs a sequence.
CUFLASH_HOST_DEVICE int64_t sequence_at(const int32_t* offsets, int64_t batch, int64_t token) {
  int64_t below = 0, above = batch;
  while (above - below > 1) {
    const int64_t middle = below + (above - below) / 2;
    if (offsets[middle] <= token)
      below = middle;
    else
      above = middle;
  }
  return below;
}

// One row of a tensor as an item of work.
struct Place {
  Sequence sequence;
  int64_t head, row;  // row of the sequence
  bool valid;         // false: a row of no sequence, which is neither read nor written
};

// Item `index` of all rows of a side's tensors; `first` and `count` are the side's members of Sequence.
CUFLASH_HOST_DEVICE Place place_of(const FullProblem& p, int64_t index, const RowExtents& extents,
                                   const int32_t* offsets, int64_t Sequence::*first,
                                   int64_t Sequence::*count) {
  if (p.batch == 0) return {};  // packed rows of no sequence
  RowIndex i = row_index(index, extents.heads, extents.rows);
  if (offsets != nullptr) i.batch = sequence_at(offsets, p.batch, i.row);
  const Sequence s = sequence_of(p, i.batch);
  const int64_t row = i.row - s.*first;
  return {s, i.head, row, row >= 0 && row < s.*count};
}

CUFLASH_HOST_DEVICE Place query_place(const FullProblem& p, int64_t index) {
  return place_of(p, index, query_extents(p, p.f.ragged), p.f.ragged.offsets_q, &Sequence::first_q,
                  &Sequence::len_q);
}
CUFLASH_HOST_DEVICE Place key_place(const FullProblem& p, int64_t index) {
  return place_of(p, index, key_extents(p, p.f.ragged), p.f.ragged.offsets_k, &Sequence::first_k,
                  &Sequence::len_k);
}

}  // namespace cuflash
