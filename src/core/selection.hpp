// Choosing a kernel: a pure function of the problem, the device's capabilities and a forced name, so
// all of dispatch is tested without a GPU.
#pragma once

#include "core/variant.hpp"

namespace cuflash {

struct VariantTables {
  const VariantSpan* spans;
  size_t count;
};

// Calls visit(const Variant&) for every variant, in table order.
template <class Visit>
void for_each_variant(const VariantTables& tables, Visit visit) {
  for (size_t i = 0; i < tables.count; ++i)
    for (size_t j = 0; j < tables.spans[i].count; ++j) visit(tables.spans[i].data[j]);
}

// The variant's reason to refuse: not built, other operation or device, else its own.
Refusal refusal_of(const Variant& variant, const Problem& problem, const Capabilities& caps);

// Whether `name` is the name of a variant or of a family; "" and null are none.
bool is_kernel_name(const VariantTables& tables, const char* name);
// 8 with a message that lists the names.
Status fail_unknown_kernel(const VariantTables& tables, const char* name, const char* source);

// Takes the highest rank among the variants that accept (ties: the first). With `forced` (a name or a family)
// only those are considered, and a refusal is returned as a status with its reason, never replaced; `source` says
// in messages who asked for it.
// A batch-invariant problem takes the kernel that a sequence of it alone would take, or none.
// 10 nothing accepts; 18 only variants that are not built would; 8 unknown forced name.
Status select(const VariantTables& tables, const Problem& problem, const Capabilities& caps,
              const char* forced, const char* source, const Variant** chosen);

}  // namespace cuflash
