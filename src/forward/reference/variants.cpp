// The table of the reference family: accepts everything, ranks last.
#include "forward/reference/variants.hpp"

#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "forward/reference/unit.hpp"

namespace cuflash {
namespace {

constexpr Variant kRows[] = {
    {"fwd_reference", "reference", Operation::kForward, false, 1, 1, 128, 0, 0, accept_all,
     plan_nothing, CUFLASH_ENTRY_fwd_reference(launch_fwd_reference),
     CUFLASH_ENTRY_fwd_reference(preload_fwd_reference)},
};

}  // namespace

extern const VariantSpan kForwardReference = span_of(kRows);

}  // namespace cuflash
