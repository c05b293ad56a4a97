#include "core/selection.hpp"

#include <cstdio>
#include <cstring>

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

Status select(const VariantTables& tables, const Problem& problem, const Capabilities& caps,
              const char* forced, const char* source, const Variant** chosen) {
  const bool any = forced == nullptr || forced[0] == '\0';
  if (!any && !is_kernel_name(tables, forced)) return fail_unknown_kernel(tables, forced, source);
  const Variant* best = nullptr;
  const Variant* refuser = nullptr;  // the forced variant that comes nearest to the problem
  const char* reason = nullptr;
  int refusers = 0, not_built = 0;
  for_each_variant(tables, [&](const Variant& variant) {
    if (!any && !named(variant, forced)) return;
    // Most variants are passed over here: asking all of them took a third of the checks' time.
    if (best != nullptr && variant.rank <= best->rank) return;
    const Refusal refusal = refusal_of(variant, problem, caps);
    if (!refusal) {
      best = &variant;
      return;
    }
    if (variant.operation != problem.operation || variant.on_cpu != caps.is_cpu) {
      if (refuser == nullptr) refuser = &variant, reason = refusal.reason;
      return;
    }
    ++refusers;
    const bool missing = refusal.reason == kNotBuilt;
    not_built += missing;
    if (refuser == nullptr || refusers == 1 || missing) refuser = &variant, reason = refusal.reason;
  });
  *chosen = best;
  if (best != nullptr) return CUFLASH_SUCCESS;
  const Status status = not_built > 0 ? CUFLASH_ERROR_NOT_BUILT : CUFLASH_ERROR_UNSUPPORTED;
  if (refuser == nullptr) return fail(status, "this library holds no kernel for the operation");
  if (any)
    return fail(status,
                "no kernel takes this problem; %s: %s (the explain function lists all reasons)",
                refuser->name, reason);
  return fail(status, "%s asks for \"%.64s\"; %s: %s%s", source, forced, refuser->name, reason,
              refusers > 1 ? " (the explain function lists all reasons)" : "");
}

}  // namespace cuflash
