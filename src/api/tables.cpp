#include "api/tables.hpp"

#include "backward/reference/variants.hpp"
#include "backward/scalar/variants.hpp"
#include "backward/wmma/variants.hpp"
#include "cache/reference/variants.hpp"
#include "cpu/blocked/variants.hpp"
#include "cpu/reference.hpp"
#include "decode/reference/variants.hpp"
#include "decode/scalar/variants.hpp"
#include "decode/wmma/variants.hpp"
#include "forward/mma/variants.hpp"
#include "forward/reference/variants.hpp"
#include "forward/scalar/variants.hpp"
#include "forward/wgmma/variants.hpp"
#include "forward/wmma/variants.hpp"

namespace cuflash {

VariantTables all_variants() {
  // Copied, not pointed to: the spans are constant-initialised in other units.
  static const VariantSpan spans[] = {
      kForwardWgmma,    kForwardMma,      kForwardWmma,       kForwardScalar, kForwardReference,
      kBackwardWmma,    kBackwardScalar,  kBackwardReference, kDecodeWmma,    kDecodeScalar,
      kDecodeReference, kAppendReference, kCpuBlocked,        kCpuReference,
  };
  return {spans, sizeof spans / sizeof spans[0]};
}

}  // namespace cuflash
