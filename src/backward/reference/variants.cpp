// The table of the reference family: accepts everything, ranks last.
#include "backward/reference/variants.hpp"

#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "backward/reference/unit.hpp"

namespace cuflash {
namespace {

constexpr Variant kRows[] = {
    {"bwd_reference", "reference", Operation::kBackward, false, 1, 1, 128, 0, 0, accept_all,
     plan_reference_backward, CUFLASH_ENTRY_bwd_reference(launch_bwd_reference),
     CUFLASH_ENTRY_bwd_reference(preload_bwd_reference)},
};

}  // namespace

extern const VariantSpan kBackwardReference = span_of(kRows);

}  // namespace cuflash
