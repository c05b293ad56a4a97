// The operations of the cpu family on a given vector level.
#pragma once

#include "core/variant.hpp"
#include "cpu/blocked/tile_ops.hpp"

namespace cuflash::cpu_blocked {

// Workspace: the tiles of each thread that has work, then delta of the backward or the parts of a split decode.
Plan plan_forward(const Problem& problem, const Capabilities& capabilities);
Plan plan_backward(const Problem& problem, const Capabilities& capabilities);
Plan plan_decode(const Problem& problem, const Capabilities& capabilities);

Status forward(const TileOps& ops, const Problem& problem, const LaunchContext& context);
Status backward(const TileOps& ops, const Problem& problem, const LaunchContext& context);
Status decode(const TileOps& ops, const Problem& problem, const Plan& plan,
              const LaunchContext& context);

}  // namespace cuflash::cpu_blocked
