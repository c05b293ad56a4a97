// What one index of each reference pass does: the loop bodies that the CPU threads and the CUDA warps share.
#pragma once

#include "attention/reference.hpp"

namespace cuflash {

// Where pass results that are not outputs go.
struct ReferenceScratch {
  MergeProblem parts;  // decode with more than one part
  int32_t num_splits = 1;
  float* delta = nullptr;  // backward
};

CUFLASH_HOST_DEVICE int64_t query_rows(const Problem& p) { return p.batch * p.heads_q * p.len_q; }
CUFLASH_HOST_DEVICE int64_t key_rows(const Problem& p) { return p.batch * p.heads_kv * p.len_k; }

// Forward and unsplit decode; index: a query row.
template <class T, class Team>
CUFLASH_HOST_DEVICE void forward_index(const Team& team, const Problem& p, int64_t index) {
  const RowIndex i = row_index(index, p.heads_q, p.len_q);
  float* lse = p.lse.data == nullptr ? nullptr : p.lse.at(i.batch, i.head, i.row);
  reference_forward_row<T>(team, p, i.batch, i.head, i.row, 0, 1,
                           p.o.row<T>(i.batch, i.head, i.row), lse);
}

// Decode in parts; index: a query row of a part, parts outermost.
template <class T, class Team>
CUFLASH_HOST_DEVICE void split_index(const Team& team, const Problem& p,
                                     const ReferenceScratch& scratch, int64_t index) {
  const MergeProblem& parts = scratch.parts;
  const int64_t split = index / query_rows(p);
  const RowIndex i = row_index(index % query_rows(p), p.heads_q, p.len_q);
  float* o = parts.parts.row<float>(i.batch, i.head, i.row) + split * parts.part_stride;
  float* lse = parts.lse_parts.at(i.batch, i.head, i.row) + split * parts.lse_part_stride;
  reference_forward_row<T>(team, p, i.batch, i.head, i.row, split, scratch.num_splits, o, lse);
}

template <class In, class Out, class Team>
CUFLASH_HOST_DEVICE void merge_index(const Team& team, const MergeProblem& p, int64_t index) {
  const RowIndex i = row_index(index, p.heads, p.len);
  merge_row<In, Out>(team, p, i.batch, i.head, i.row);
}

// Backward, first pass; index: a query row. delta is dense [batch, head, row].
template <class T, class Team>
CUFLASH_HOST_DEVICE void dq_index(const Team& team, const Problem& p,
                                  const ReferenceScratch& scratch, int64_t index) {
  const RowIndex i = row_index(index, p.heads_q, p.len_q);
  const float delta = reference_delta_row<T>(team, p, i.batch, i.head, i.row);
  if (team.is_first()) scratch.delta[index] = delta;
  reference_dq_row<T>(team, p, i.batch, i.head, i.row, delta);
}

// Backward, second pass, after all of the first; index: a key.
template <class T, class Team>
CUFLASH_HOST_DEVICE void dkv_index(const Team& team, const Problem& p,
                                   const ReferenceScratch& scratch, int64_t index) {
  const RowIndex i = row_index(index, p.heads_kv, p.len_k);
  reference_dkv_row<T>(team, p, i.batch, i.head, i.row, scratch.delta);
}

}  // namespace cuflash
