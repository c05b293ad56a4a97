#include "cpu/blocked/level.hpp"

namespace cuflash::cpu_blocked {

extern const TileOps kBaseline = CUFLASH_TILE_OPS("baseline");

}  // namespace cuflash::cpu_blocked
