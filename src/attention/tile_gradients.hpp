// What the tiled backward kernels need beyond tile_rows.hpp to take calls with features and calls without from one source;
// of a Problem everything here comes to nothing. Backward has no tree mask, and sinks are in it through LSE alone.
#pragma once

#include "attention/tile_rows.hpp"

namespace cuflash {

// ---- pairs of a row and a key -----------------------------------------------------------------------

// Whether a score is more than its scaled product, or a weight more than its power.
CUFLASH_HOST_DEVICE bool modifies_pairs(const Problem&) { return false; }
CUFLASH_HOST_DEVICE bool modifies_pairs(const FullProblem& p) {
  return (p.f.used & (kSoftcap | kAlibi | kBias | kDropout)) != 0;
}

// What P = exp(score - LSE) and dS = P * (kept * dP - delta) * derivative need of one pair. A score of -infinity has P = 0,
// whatever LSE is.
struct PairScore {
  float score;
  float derivative;  // of the score by the scaled product
  float kept;        // the factor of dropout
};

// Of a pair that the mask shows and that both sequences have: others have no bias to read.
CUFLASH_HOST_DEVICE PairScore pair_score(const Problem&, const ScoreRow&, int64_t, float product) {
  return {product, 1.0f, 1.0f};
}
// A call: a thread has up to 32 pairs of a tile in its registers, and this is some 200 instructions.
CUFLASH_HOST_DEVICE_CALL PairScore pair_score(const FullProblem& p, ScoreRow r, int64_t key,
                                              float product) {
  const Score score = score_of(p.f.score, p.scale, product, r, key);
  const DropoutRow dropout = dropout_row(p.f.dropout, r.batch * p.heads_q + r.head, r.row);
  return {score.value, score.derivative, dropout.factor(key)};
}

CUFLASH_HOST_DEVICE float kept_factor(const Problem&) { return 1.0f; }
CUFLASH_HOST_DEVICE float kept_factor(const FullProblem& p) { return kept_factor(p.f.dropout); }

// ---- rows -----------------------------------------------------------------------------------------

// Lengths of keys are a feature here, unlike in decode.
CUFLASH_HOST_DEVICE Sequence backward_sequence(const Problem& p, int64_t b) {
  return {b, 0, p.len_q, 0, p.len_k};
}
CUFLASH_HOST_DEVICE Sequence backward_sequence(const FullProblem& p, int64_t b) {
  return sequence_of(p, b);
}

// The channels of V, dV, O and dO.
CUFLASH_HOST_DEVICE int64_t value_dim(const Problem& p) { return p.head_dim; }
CUFLASH_HOST_DEVICE int64_t value_dim(const FullProblem& p) { return p.head_dim_v; }

// Where the workspace has delta of a sequence's first row; the others follow. By rows of the queries' tensors, as plan_delta
// counts them.
CUFLASH_HOST_DEVICE int64_t first_delta(const Problem& p, const Sequence& s, int64_t head) {
  return (s.batch * p.heads_q + head) * p.len_q;
}
CUFLASH_HOST_DEVICE int64_t first_delta(const FullProblem& p, const Sequence& s, int64_t head) {
  const RowExtents e = query_extents(p, p.f.ragged);
  return ((e.batch == 1 ? 0 : s.batch) * e.heads + head) * e.rows + s.first_q;
}

CUFLASH_HOST_DEVICE bool delta_is_given(const Problem&) { return false; }
CUFLASH_HOST_DEVICE bool delta_is_given(const FullProblem& p) { return p.f.delta_given; }

// delta - dLSE, what each dP of a row is reduced by. `delta` = rowsum(O * dO), where it is not given; where it is wanted one
// thread of the row's, which `writes`, returns it to the caller. `token` is the row in its tensors.
CUFLASH_HOST_DEVICE float reduced_delta(const Problem&, const Sequence&, int64_t, int64_t,
                                        float delta, bool) {
  return delta;
}
CUFLASH_HOST_DEVICE float reduced_delta(const FullProblem& p, const Sequence& s, int64_t head,
                                        int64_t token, float delta, bool writes) {
  if (p.f.delta_given)
    delta = *p.f.delta.at(s.batch, head, token);
  else if (p.f.delta.data != nullptr && writes)
    *p.f.delta.at(s.batch, head, token) = delta;
  return p.f.d_lse.data == nullptr ? delta : delta - *p.f.d_lse.at(s.batch, head, token);
}

}  // namespace cuflash
