#include "cpu/blocked/level.hpp"

namespace cuflash::cpu_blocked {

extern const TileOps kAvx512 = CUFLASH_TILE_OPS("avx512");

}  // namespace cuflash::cpu_blocked
