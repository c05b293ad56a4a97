// The table of the appends to a cache.
#include "cache/reference/variants.hpp"

#include "cache/reference/unit.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"

namespace cuflash {
namespace {

constexpr Variant kRows[] = {
    {"append_reference", "reference", Operation::kAppend, false, 1, 1, 128, 0, 0, accept_all,
     plan_nothing, CUFLASH_ENTRY_append_reference(launch_append_reference),
     CUFLASH_ENTRY_append_reference(preload_append_reference)},
};

}  // namespace

extern const VariantSpan kAppendReference = span_of(kRows);

}  // namespace cuflash
