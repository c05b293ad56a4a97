// The table of the cpu family.
#include "cpu/blocked/variants.hpp"

#include "core/plans.hpp"
#include "cpu/blocked/kernel.hpp"
#include "cuflash_built.hpp"

namespace cuflash {
namespace cpu_blocked {
namespace {

// The fastest level of this processor, found by the first call.
const TileOps& best_level() {
  static const TileOps& best = []() -> const TileOps& {
    const TileOps* levels[kMaxLevels];
    return *levels[supported_levels(levels) - 1];
  }();
  return best;
}

[[maybe_unused]] Status launch_forward(const Problem& p, const Plan&,
                                       const LaunchContext& context) {
  return forward(best_level(), p, context);
}

[[maybe_unused]] Status launch_backward(const Problem& p, const Plan&,
                                        const LaunchContext& context) {
  return backward(best_level(), p, context);
}

[[maybe_unused]] Status launch_decode(const Problem& p, const Plan& plan,
                                      const LaunchContext& context) {
  return decode(best_level(), p, plan, context);
}

constexpr int kRank = 10;

constexpr Variant kRows[] = {
    {"fwd_cpu", "cpu", Operation::kForward, true, kLanes, kSteps, 0, 0, kRank, accept_all,
     plan_forward, CUFLASH_ENTRY_fwd_cpu(launch_forward), nullptr},
    {"bwd_cpu", "cpu", Operation::kBackward, true, kLanes, kSteps, 0, 0, kRank, accept_all,
     plan_backward, CUFLASH_ENTRY_bwd_cpu(launch_backward), nullptr},
    {"dec_cpu", "cpu", Operation::kDecode, true, kLanes, kSteps, 0, 0, kRank, accept_all,
     plan_decode, CUFLASH_ENTRY_dec_cpu(launch_decode), nullptr},
};

}  // namespace
}  // namespace cpu_blocked

extern const VariantSpan kCpuBlocked = span_of(cpu_blocked::kRows);

}  // namespace cuflash
