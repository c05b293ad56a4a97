#include "cpu/blocked/level.hpp"

namespace cuflash::cpu_blocked {

extern const TileOps kAvx2 = CUFLASH_TILE_OPS("avx2");

}  // namespace cuflash::cpu_blocked
