// What one index of each reference pass does: the loop bodies that the CPU threads and the CUDA warps share.
#pragma once

#include "attention/reference.hpp"

namespace cuflash {

// Where pass results that are not outputs go.
struct ReferenceScratch {
  MergeProblem parts;  // decode with more than one part
  int32_t num_splits = 1;
  RowStatsView delta;  // backward, by rows of the queries' tensors
};

CUFLASH_HOST_DEVICE int64_t query_rows(const FullProblem& p) {
  return query_extents(p, p.f.ragged).count();
}
CUFLASH_HOST_DEVICE int64_t key_rows(const FullProblem& p) {
  return key_extents(p, p.f.ragged).count();
}

// delta in a workspace, one number for each row of the queries' tensors.
CUFLASH_HOST_DEVICE RowStatsView delta_scratch(const FullProblem& p, void* workspace) {
  const RowExtents e = query_extents(p, p.f.ragged);
  // A single batch entry has a stride of 0, as in the tensors: sequences of a packed one count from its first row.
  return {static_cast<float*>(workspace), e.batch == 1 ? 0 : e.heads * e.rows, e.rows, 1};
}

// Forward and unsplit decode; index: a query row.
template <class T, class Team>
CUFLASH_HOST_DEVICE void forward_index(const Team& team, const FullProblem& p, int64_t index) {
  const Place place = query_place(p, index);
  if (!place.valid) return;
  const QueryRow r = query_row(p, place.sequence, place.head, place.row);
  float acc[Team::kSlots];
  const OnlineSoftmax softmax = reference_forward_row<T>(team, p, r, 0, 1, acc);
  store_output<T>(team, p, r, softmax, acc);
}

// Decode in parts; index: a query row of a part, parts outermost.
template <class T, class Team>
CUFLASH_HOST_DEVICE void split_index(const Team& team, const FullProblem& p,
                                     const ReferenceScratch& scratch, int64_t index) {
  const MergeProblem& parts = scratch.parts;
  const int64_t split = index / query_rows(p), row = index % query_rows(p);
  const Place place = query_place(p, row);
  if (!place.valid) return;
  const QueryRow r = query_row(p, place.sequence, place.head, place.row);
  float acc[Team::kSlots];
  const OnlineSoftmax softmax =
      reference_forward_row<T>(team, p, r, split, scratch.num_splits, acc);
  const RowIndex i = row_index(row, parts.heads, parts.len);
  store_row(team, acc, softmax.inverse_sum(), static_cast<int>(p.head_dim_v),
            parts.parts.row<float>(i.batch, i.head, i.row) + split * parts.part_stride);
  if (team.is_first())
    parts.lse_parts.at(i.batch, i.head, i.row)[split * parts.lse_part_stride] = softmax.lse();
}

// Decode in parts, second pass; index: a query row.
template <class T, class Team>
CUFLASH_HOST_DEVICE void combine_index(const Team& team, const FullProblem& p,
                                       const ReferenceScratch& scratch, int64_t index) {
  const Place place = query_place(p, index);
  if (!place.valid) return;
  const RowIndex i = row_index(index, scratch.parts.heads, scratch.parts.len);
  float acc[Team::kSlots];
  const OnlineSoftmax softmax =
      merge_parts<float>(team, scratch.parts, i.batch, i.head, i.row, acc);
  store_output<T>(team, p, query_row(p, place.sequence, place.head, place.row), softmax, acc);
}

template <class In, class Out, class Team>
CUFLASH_HOST_DEVICE void merge_index(const Team& team, const MergeProblem& p, int64_t index) {
  const RowIndex i = row_index(index, p.heads, p.len);
  merge_row<In, Out>(team, p, i.batch, i.head, i.row);
}

// Backward, first pass; index: a query row.
template <class T, class Team>
CUFLASH_HOST_DEVICE void dq_index(const Team& team, const FullProblem& p,
                                  const ReferenceScratch& scratch, int64_t index) {
  const Place place = query_place(p, index);
  if (!place.valid) return;
  const QueryRow r = query_row(p, place.sequence, place.head, place.row);
  const float delta = reference_delta_row<T>(team, p, r);
  if (team.is_first()) *scratch.delta.at(r.sequence.batch, r.head, r.token) = delta;
  reference_dq_row<T>(team, p, r, delta);
}

// Backward, after all of the first pass; index: a key.
template <class T, class Team>
CUFLASH_HOST_DEVICE void dkv_index(const Team& team, const FullProblem& p,
                                   const ReferenceScratch& scratch, int64_t index) {
  const Place place = key_place(p, index);
  if (!place.valid) return;
  reference_dkv_row<T>(team, p, place.sequence, place.head, place.row, scratch.delta);
}

// The gradients of the bias and of the sinks, after the first pass; index: an entry of the bias, then a head.
struct BiasEntries {
  int64_t batch, heads, rows, keys;
  CUFLASH_HOST_DEVICE int64_t count() const { return batch * heads * rows * keys; }
};
CUFLASH_HOST_DEVICE BiasEntries bias_entries(const FullProblem& p) {
  const TensorView& bias = p.f.d_bias;
  if (bias.data == nullptr) return {0, 0, 0, 0};
  return {bias.batch_stride == 0 ? 1 : p.batch, bias.head_stride == 0 ? 1 : p.heads_q,
          bias.row_stride == 0 ? 1 : p.len_q, p.len_k};
}
CUFLASH_HOST_DEVICE int64_t modifier_gradients(const FullProblem& p) {
  return bias_entries(p).count() + (p.f.d_sinks.data == nullptr ? 0 : p.heads_q);
}

template <class T, class Team>
CUFLASH_HOST_DEVICE void modifier_index(const Team& team, const FullProblem& p,
                                        const ReferenceScratch& scratch, int64_t index) {
  const BiasEntries e = bias_entries(p);
  if (index >= e.count()) return reference_d_sink(team, p, index - e.count(), scratch.delta);
  const RowIndex i = row_index(index / e.keys, e.heads, e.rows);
  reference_d_bias<T>(team, p, i.batch, i.head, i.row, index % e.keys, scratch.delta);
}

// Probabilities to look at; index: a chosen row. A row that its sequence lacks has none.
template <class T, class Team>
CUFLASH_HOST_DEVICE void weights_index(const Team& team, const FullProblem& p,
                                       const WeightsOutput& out, int64_t index) {
  const RowIndex i = row_index(index, p.heads_q, out.num_rows);
  const int64_t row = out.chosen != nullptr ? out.chosen[i.row] : i.row;
  const Sequence s = sequence_of(p, i.batch);
  float* weights = out.rows.at(i.batch, i.head, i.row);
  if (row >= 0 && row < s.len_q)
    return reference_weights_row<T>(team, p, query_row(p, s, i.head, row), weights);
  for (int64_t key = team.lane; key < p.len_k; key += Team::kLanes) weights[key] = 0;
}

}  // namespace cuflash
