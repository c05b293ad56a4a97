// Plans and checks that more than one family uses.
#pragma once

#include "core/split.hpp"
#include "core/variant.hpp"

namespace cuflash {

inline Refusal accept_all(const Variant&, const Problem&, const Capabilities&) { return {}; }

inline Plan plan_nothing(const Problem&, const Capabilities&) { return {}; }

// Decode in parts with fp32 partial results and a merge.
inline Plan plan_splits(const Problem& problem, const Capabilities& capabilities,
                        const SplitShape& shape) {
  Plan plan;
  plan.num_splits = choose_splits(problem, capabilities, shape);
  plan.workspace_bytes = split_workspace(problem, plan.num_splits).bytes;
  plan.launches = plan.num_splits > 1 ? 2 : 1;
  return plan;
}
inline Plan plan_splits(const Problem& problem, const Capabilities& capabilities) {
  return plan_splits(problem, capabilities, kRowOfAWarp);
}

// Backward that keeps delta (fp32 [batch, head, row]) between its two passes.
inline Plan plan_delta(const Problem& p, const Capabilities&) {
  Plan plan;
  plan.workspace_bytes = static_cast<size_t>(p.batch * p.heads_q * p.len_q) * sizeof(float);
  plan.launches = 2;
  return plan;
}

}  // namespace cuflash
