// Tiles and shared memory of the scalar forward kernels, one configuration for each head-dim bucket. No CUDA header:
// the variant table reads it too.
#pragma once

#include "device/warp_grid.hpp"

namespace cuflash::forward_scalar {

struct Tile {
  int head_dim;     // the bucket: a smaller head_dim is padded with zeros
  int warps;        // of a block, one below the other
  int thread_rows;  // query rows of a thread; a warp has four times as many
  int tile_n;       // keys
  int pass_groups;  // of 32 channels: those of which O is summed at a time
  int min_blocks;   // resident on an SM: bounds the registers of a thread
  const char* why;
};

// A thread keeps thread_rows * head_dim / 8 sums of O, thread_rows * pass_groups * 4 more while it adds a tile to
// them, and thread_rows * tile_n / 8 scores. All rows fit the 64 KB of sm_75.
constexpr Tile kTiles[] = {
    {32, 2, 8, 64, 1, 4, "5 blocks leave 168 registers, which spill"},
    {64, 2, 8, 64, 2, 4, "8 x 8 sums of either product; shared memory ends at 4 blocks"},
    {128, 4, 4, 24, 2, 3, "32 keys need 66 KB, more than sm_75 has; 4 groups at a time spill"},
    {256, 2, 2, 16, 8, 4, "2 x 32 sums of O"},
};

constexpr Tile tile_of(int head_dim) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim) return tile;
  return {};
}

template <int kHeadDimBucket>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kWarps = tile_of(kHeadDim).warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kThreadRows = tile_of(kHeadDim).thread_rows;
  static constexpr int kWarpRows = kThreadRows * device::WarpGrid::kRows;
  static constexpr int kTileM = kWarps * kWarpRows;
  static constexpr int kTileN = tile_of(kHeadDim).tile_n;
  static constexpr int kThreadKeys = kTileN / device::WarpGrid::kColumns;
  static constexpr int kThreadGroups = kHeadDim / (4 * device::WarpGrid::kColumns);
  static constexpr int kPassGroups = tile_of(kHeadDim).pass_groups;
  static constexpr int kMinBlocks = tile_of(kHeadDim).min_blocks;
  static constexpr int kLd = device::ld_of_operand(kHeadDim);
  static constexpr int kLdWeights = device::ld_of_weights(kTileN);

  static_assert(kHeadDim % 32 == 0 && kTileN % 8 == 0 && kThreadGroups % kPassGroups == 0);
};

// The whole of a block's shared memory.
template <class Config>
struct SharedStorage {
  alignas(16) float q[Config::kTileM][Config::kLd];
  union {  // weights lie over keys that have been multiplied
    alignas(16) float k[Config::kTileN][Config::kLd];
    alignas(16) float weights[Config::kTileM][Config::kLdWeights];
  };
  alignas(16) float v[Config::kTileN][Config::kLd];
};

template <int kHeadDim>
constexpr int kSharedBytes = sizeof(SharedStorage<KernelConfig<kHeadDim>>);

}  // namespace cuflash::forward_scalar
