#pragma once

#include "core/variant.hpp"

namespace cuflash {

// The second launch of a decode in parts: one block per row merges its fp32 partial results. A part with
// LSE = -inf adds nothing, whatever its O holds.
Status combine_parts(const MergeProblem& problem, const LaunchContext& context);
Status preload_combine();

}  // namespace cuflash
