// What no product of tiles gives: the score modifiers, dropout and the tree mask, pair by pair of a query row and a key. A
// tile without them does none of this. The rules are those of the reference; they are scalar, and cost accordingly
// (README.md).
#pragma once

#include <algorithm>

#include "cpu/blocked/lane_tiles.hpp"

namespace cuflash::cpu_blocked {

// The modifiers that need the products before they are scaled.
constexpr uint32_t kModifiers = kSoftcap | kAlibi | kBias;

// The pairs of a tile: query rows as lanes and keys as steps, or the other way round.
class Pairs {
 public:
  static Pairs of_query_lanes(const QueryRow* rows, int lanes, int64_t first_key, int steps) {
    return {rows, lanes, first_key, steps, true};
  }
  static Pairs of_key_lanes(const QueryRow* rows, int steps, int64_t first_key, int lanes) {
    return {rows, steps, first_key, lanes, false};
  }

  int64_t end_key() const { return first_key_ + num_keys_; }

  // Calls f(row, key, lane, step) for the pairs that are seen.
  template <class F>
  void for_each(const Seen& seen, F f) const {
    for (int i = 0; i < num_rows_; ++i)
      for (int j = 0; j < num_keys_; ++j) {
        const int lane = rows_are_lanes_ ? i : j, step = rows_are_lanes_ ? j : i;
        if (seen.has(lane, step)) f(rows_[i], first_key_ + j, lane, step);
      }
  }

 private:
  Pairs(const QueryRow* rows, int num_rows, int64_t first_key, int num_keys, bool rows_are_lanes)
      : rows_(rows),
        first_key_(first_key),
        num_rows_(num_rows),
        num_keys_(num_keys),
        rows_are_lanes_(rows_are_lanes) {}

  const QueryRow* rows_;
  int64_t first_key_;
  int num_rows_, num_keys_;
  bool rows_are_lanes_;
};

// Hides what the rows do not see in the tree. Only the last keys have bits.
inline void hide_by_tree(const FullProblem& p, const Pairs& pairs, int64_t len_k, Seen& seen) {
  if (p.f.tree.words == nullptr || pairs.end_key() <= len_k - p.f.tree.len) return;
  pairs.for_each(seen, [&](const QueryRow& r, int64_t key, int lane, int step) {
    if (!sees_in_tree(p, r, key)) seen.hide(lane, step);
  });
}

// Products that are not yet scaled become scores. `derivatives`, if wanted, are those of the scores by the scaled
// products, and 1 for what is not seen.
inline void to_scores(const FullProblem& p, const Pairs& pairs, const Seen& seen, float* products,
                      float* derivatives) {
  if (derivatives != nullptr) std::fill(derivatives, derivatives + kSteps * kLanes, 1.0f);
  pairs.for_each(seen, [&](const QueryRow& r, int64_t key, int lane, int step) {
    float& x = products[step * kLanes + lane];
    const Score score = score_of(p.f.score, p.scale, x, r.score, key);
    x = score.value;
    if (derivatives != nullptr) derivatives[step * kLanes + lane] = score.derivative;
  });
}

// The factors of dropout, 1 for what is not seen.
inline void dropout_factors(const Pairs& pairs, const Seen& seen, float* kept) {
  std::fill(kept, kept + kSteps * kLanes, 1.0f);
  pairs.for_each(seen, [&](const QueryRow& r, int64_t key, int lane, int step) {
    kept[step * kLanes + lane] = r.dropout.factor(key);
  });
}

inline void multiply(int steps, const float* factors, float* x) {
  for (int n = 0; n < steps * kLanes; ++n) x[n] *= factors[n];
}

}  // namespace cuflash::cpu_blocked
