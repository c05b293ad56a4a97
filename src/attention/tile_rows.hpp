// Tiled kernels that take calls with features and calls without, from one source: such a kernel is a template of its Call,
// Problem or FullProblem. This is the one home of what differs between them; of a Problem everything here comes to nothing.
#pragma once

#include <type_traits>

#include "attention/dropout.hpp"
#include "attention/online_softmax.hpp"
#include "attention/ragged.hpp"
#include "attention/score.hpp"
#include "attention/tree_mask.hpp"

namespace cuflash {

template <class Call>
constexpr bool kHasFeatures = std::is_same_v<Call, FullProblem>;

CUFLASH_HOST_DEVICE Sequence sequence_of(const Problem& p, int64_t b) {
  return {b, 0, p.len_q, 0, p.keys_of(b)};
}

CUFLASH_HOST_DEVICE bool is_ragged(const FullProblem& p) {
  return (p.f.used & kRaggedBatches) != 0;
}

// Whether a score is more than its scaled product, or a weight more than its power. Where not, a call with features is as
// fast as one without.
CUFLASH_HOST_DEVICE bool modifies_scores(const Problem&) { return false; }
CUFLASH_HOST_DEVICE bool modifies_scores(const FullProblem& p) {
  return (p.f.used & (kSoftcap | kAlibi | kBias | kSinks | kDropout | kTreeMask)) != 0;
}

// What the softmax multiplies its scores by: they are products, or finished scores.
template <class Call>
CUFLASH_HOST_DEVICE float factor_of_scores(const Call& p) {
  return modifies_scores(p) ? 1.0f : p.scale;
}

// The score of the key that each row of a query head sees without its being there.
CUFLASH_HOST_DEVICE float sink_of(const Problem&, int64_t) { return negative_infinity(); }
CUFLASH_HOST_DEVICE float sink_of(const FullProblem& p, int64_t head) {
  return p.f.sinks.data == nullptr ? negative_infinity() : p.f.sinks.load(head);
}

// What dropout makes of all outputs alike: the weights are only kept or not, since as factors of a product in 16 bits
// 1 / (1 - p) might be too large.
CUFLASH_HOST_DEVICE float factor_of_outputs(const Problem&) { return 1.0f; }
CUFLASH_HOST_DEVICE float factor_of_outputs(const FullProblem& p) {
  const DropoutRow dropout = dropout_row(p.f.dropout, 0, 0);
  return dropout.active ? dropout.kept : 1.0f;
}

// A row of a tile of scores where modifies_scores(). `first_key` is the key of column 0; only columns that the row sees may
// be asked for.
struct ModifiedRow {
  const FullProblem& p;
  ScoreRow row;
  DropoutRow dropout;
  int64_t len_k, first_key;

  CUFLASH_HOST_DEVICE ModifiedRow(const FullProblem& problem, const Sequence& s, int64_t shift,
                                  int64_t head, int64_t query, int64_t key)
      : p(problem),
        row{s.batch, head, query, query + shift},
        dropout(dropout_row(problem.f.dropout, s.batch * problem.heads_q + head, query)),
        len_k(s.len_k),
        first_key(key) {}

  // -infinity where the tree hides the key or its bias masks it.
  CUFLASH_HOST_DEVICE float score(float product, int64_t column) const {
    const int64_t key = first_key + column;
    if (!tree_shows(p.f.tree, row.batch, row.row, len_k, key)) return negative_infinity();
    return score_of(p.f.score, p.scale, product, row, key).value;
  }
  // By dropout.
  CUFLASH_HOST_DEVICE bool keeps(int64_t column) const {
    return dropout.factor(first_key + column) != 0;
  }
};

}  // namespace cuflash
