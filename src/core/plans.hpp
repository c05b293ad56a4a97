// Plans and checks that more than one family uses.
#pragma once

#include "core/features.hpp"
#include "core/split.hpp"
#include "core/variant.hpp"

namespace cuflash {

// Head dims are bounded by the checks of each operation's arguments.
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

// Backward that keeps delta (fp32, by rows of the queries) between its two passes.
inline Plan plan_delta(const Problem& p, const Capabilities&) {
  Plan plan;
  plan.workspace_bytes = static_cast<size_t>(query_extents(p).count()) * sizeof(float);
  plan.launches = 2;
  return plan;
}

// That of the reference, whose third pass is for the gradients of the bias and of the sinks.
inline Plan plan_reference_backward(const Problem& p, const Capabilities& capabilities) {
  Plan plan = plan_delta(p, capabilities);
  const Features* f = p.features;
  if (f != nullptr && (f->d_bias.data != nullptr || f->d_sinks.data != nullptr)) plan.launches = 3;
  return plan;
}

}  // namespace cuflash
