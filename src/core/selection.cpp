#include "core/selection.hpp"

#include <cstdio>
#include <cstring>

#include "common/integer.hpp"

namespace cuflash {
namespace {

constexpr char kNotBuilt[] = "not in this build of the library";

bool named(const Variant& variant, const char* name) {
  return std::strcmp(variant.name, name) == 0 || std::strcmp(variant.family, name) == 0;
}

const Variant& first_of_family(const VariantTables& tables, const char* family) {
  const Variant* first = nullptr;
  for_each_variant(tables, [&](const Variant& variant) {
    if (first == nullptr && std::strcmp(variant.family, family) == 0) first = &variant;
  });
  return *first;
}

}  // namespace

Refusal refusal_of(const Variant& variant, const Problem& problem, const Capabilities& caps) {
  if (variant.operation != problem.operation) return {"is for another operation"};
  if (variant.on_cpu != caps.is_cpu)
    return {variant.on_cpu ? "runs on the CPU device only" : "runs on CUDA devices only"};
  if (const Refusal refusal = variant.accepts(variant, problem, caps)) return refusal;
  if (variant.launch == nullptr) return {kNotBuilt};
  return {};
}

bool is_kernel_name(const VariantTables& tables, const char* name) {
  bool found = false;
  for_each_variant(tables, [&](const Variant& variant) { found = found || named(variant, name); });
  return found;
}

Status fail_unknown_kernel(const VariantTables& tables, const char* name, const char* source) {
  char list[3500] = "";  // of about 100 names; a message holds 4096 bytes
  size_t used = 0;
  const auto append = [&](const char* text) {
    const int n = std::snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", text);
    if (n > 0 && used + static_cast<size_t>(n) < sizeof list) used += static_cast<size_t>(n);
  };
  for_each_variant(tables, [&](const Variant& variant) {
    if (&first_of_family(tables, variant.family) == &variant) append(variant.family);
  });
  for_each_variant(tables, [&](const Variant& variant) { append(variant.name); });
  return fail(CUFLASH_ERROR_INVALID_VALUE, "%s: no kernel or family \"%.64s\"; there are: %s",
              source, name, list);
}

namespace {

// Of those with the name, or of all; null if none accepts.
const Variant* find_best(const VariantTables& tables, const Problem& problem,
                         const Capabilities& caps, const char* forced) {
  const unsigned operation = 1u << static_cast<unsigned>(problem.operation);
  const Variant* best = nullptr;
  int best_rank = -1;
  for (size_t i = 0; i < tables.count; ++i) {
    const VariantSpan& span = tables.spans[i];
    // Rows are passed over unseen where they can be: the caller's launch has emptied the caches, and reading one row of
    // each of a table's kernels took longer than the rest of the choice.
    if (!(span.operations & operation) || span.on_cpu != caps.is_cpu || span.best_rank <= best_rank)
      continue;
    for (size_t j = 0; j < span.count; ++j) {
      const Variant& variant = span.data[j];
      if (variant.rank <= best_rank || (forced != nullptr && !named(variant, forced))) continue;
      const int rank = rank_of(variant, problem);
      if (rank <= best_rank || refusal_of(variant, problem, caps)) continue;
      best = &variant, best_rank = rank;
    }
  }
  return best;
}

// Why none of them accepts, in the words of the one that comes nearest to the problem.
Status fail_all_refuse(const VariantTables& tables, const Problem& problem,
                       const Capabilities& caps, const char* forced, const char* source) {
  const Variant* refuser = nullptr;
  const char* reason = nullptr;
  int refusers = 0, not_built = 0;
  for_each_variant(tables, [&](const Variant& variant) {
    if (forced != nullptr && !named(variant, forced)) return;
    const Refusal refusal = refusal_of(variant, problem, caps);
    if (variant.operation != problem.operation || variant.on_cpu != caps.is_cpu) {
      if (refuser == nullptr) refuser = &variant, reason = refusal.reason;
      return;
    }
    ++refusers;
    const bool missing = refusal.reason == kNotBuilt;
    not_built += missing;
    if (refuser == nullptr || refusers == 1 || missing) refuser = &variant, reason = refusal.reason;
  });
  const Status status = not_built > 0 ? CUFLASH_ERROR_NOT_BUILT : CUFLASH_ERROR_UNSUPPORTED;
  if (refuser == nullptr) return fail(status, "this library holds no kernel for the operation");
  if (forced == nullptr)
    return fail(status,
                "no kernel takes this problem; %s: %s (the explain function lists all reasons)",
                refuser->name, reason);
  return fail(status, "%s asks for \"%.64s\"; %s: %s%s", source, forced, refuser->name, reason,
              refusers > 1 ? " (the explain function lists all reasons)" : "");
}

Problem one_sequence_of(Problem problem) {
  problem.batch = min64(problem.batch, 1);
  return problem;
}

}  // namespace

Status select(const VariantTables& tables, const Problem& problem, const Capabilities& caps,
              const char* forced, const char* source, const Variant** chosen) {
  if (forced != nullptr && forced[0] == '\0') forced = nullptr;
  const bool invariant = problem.batch_invariant;
  const Variant* best = invariant ? find_best(tables, one_sequence_of(problem), caps, forced)
                                  : find_best(tables, problem, caps, forced);
  if (best != nullptr && invariant && refusal_of(*best, problem, caps))
    return fail_all_refuse(tables, problem, caps, best->name, "batch invariance");
  *chosen = best;
  if (best != nullptr) return CUFLASH_SUCCESS;
  if (forced != nullptr && !is_kernel_name(tables, forced))
    return fail_unknown_kernel(tables, forced, source);
  return fail_all_refuse(tables, problem, caps, forced, source);
}

}  // namespace cuflash
