// The table of the reference family: accepts everything, ranks last.
#include "decode/reference/variants.hpp"

#include "core/plans.hpp"
#include "cuflash_built.hpp"
#include "decode/reference/unit.hpp"

namespace cuflash {
namespace {

constexpr Variant kRows[] = {
    {"dec_reference", "reference", Operation::kDecode, false, 1, 1, 128, 0, 0, accept_all,
     plan_splits, CUFLASH_ENTRY_dec_reference(launch_dec_reference),
     CUFLASH_ENTRY_dec_reference(preload_dec_reference)},
};

}  // namespace

extern const VariantSpan kDecodeReference = span_of(kRows);

}  // namespace cuflash
