#include "api/tables.hpp"

#include "backward/reference/variants.hpp"
#include "cpu/reference.hpp"
#include "decode/reference/variants.hpp"
#include "forward/reference/variants.hpp"
#include "forward/wmma/variants.hpp"

namespace cuflash {

VariantTables all_variants() {
  // Copied, not pointed to: the spans are constant-initialised in other units.
  static const VariantSpan spans[] = {
      kForwardWmma, kForwardReference, kBackwardReference, kDecodeReference, kCpuReference,
  };
  return {spans, sizeof spans / sizeof spans[0]};
}

}  // namespace cuflash
