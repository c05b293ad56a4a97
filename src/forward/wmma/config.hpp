// Tiles and shared memory of the wmma forward kernels, one configuration for each head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include <cstdint>

#include "device/wmma_shape.hpp"

namespace cuflash::forward_wmma {

using device::kFragment;

constexpr int kWarps = 4;  // of a block; more would only wait longer at the barriers
constexpr int kThreads = 32 * kWarps;

struct Tile {
  int head_dim;    // the bucket: a smaller head_dim is padded with zeros
  int strips;      // of 16 query rows for each warp
  int tile_n;      // keys
  int min_blocks;  // resident on an SM: bounds the registers of a thread to 512 / min_blocks
  const char* why;
};

// A strip needs head_dim * 3/4 registers for Q and O and tile_n / 2 for scores, beside about 50 for addresses
// and temporaries. All rows fit the 64 KB of sm_75. The reasons are what nvcc 13.0 does for sm_90.
constexpr Tile kTiles[] = {
    {32, 2, 64, 3, "2 strips halve the reads of K and V: +15 % over 1 strip in 4 blocks"},
    {64, 2, 64, 2, "the same: +11 %"},
    {96, 2, 64, 2, "the same: +18 %"},
    {128, 1, 64, 3,
     "4 blocks spill, with 32 keys too; 2 strips need more registers than there are"},
    {192, 1, 32, 2, "64 keys need 70 KB, more than sm_75 has"},
    {256, 1, 32, 2, "64 keys need 86 KB and spill"},
};

constexpr Tile tile_of(int head_dim) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim) return tile;
  return {};
}

template <int kHeadDimBucket>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kStrips = tile_of(kHeadDim).strips;
  static constexpr int kWarpRows = kStrips * kFragment;
  static constexpr int kTileM = kWarps * kWarpRows;
  static constexpr int kTileN = tile_of(kHeadDim).tile_n;
  static constexpr int kMinBlocks = tile_of(kHeadDim).min_blocks;

  // Leading dimensions, padded by 8 elements: the eight 16-byte rows that a fragment load reads at a time,
  // and the rows of scores that two lanes each read, then lie in different banks.
  static constexpr int kLdTile = kHeadDim + 8;
  static constexpr int kLdScores = kTileN + 8;

  static_assert(kHeadDim % 32 == 0 && kTileN % 32 == 0);
  static_assert(kTileM <= 2 * kTileN, "Q passes through the room of K and V");
};

// The whole of a block's shared memory. WMMA wants its pointers aligned to 32 bytes: every 16 rows of
// every array are.
template <class Config, class Element>
struct SharedStorage {
  alignas(32) Element k[Config::kTileN][Config::kLdTile];  // before the first tile: Q, over k and v
  alignas(32) Element v[Config::kTileN][Config::kLdTile];
  struct Warp {
    union {  // weights are half as long: they lie over scores that have been read
      alignas(32) float scores[Config::kWarpRows][Config::kLdScores];
      alignas(32) Element weights[Config::kWarpRows][Config::kLdScores];
    };
    float row_factors[Config::kWarpRows];
  } warps[kWarps];
};

template <int kHeadDim>
constexpr int kSharedBytes = sizeof(SharedStorage<KernelConfig<kHeadDim>, uint16_t>);

}  // namespace cuflash::forward_wmma
