// Tiles and shared memory of the scalar backward kernels, one configuration of each pass for each head-dim bucket. No
// CUDA header: the variant table reads it too.
#pragma once

#include "device/warp_grid.hpp"

namespace cuflash::backward_scalar {

// One pass. A block keeps tile_m rows in shared memory (queries for dQ; keys for dK and dV) and passes over the
// others, tile_n at a time.
struct Tile {
  int head_dim;     // the bucket: a smaller head_dim is padded with zeros
  int warps;        // of a block, one below the other
  int thread_rows;  // of tile_m for each thread; a warp has four times as many
  int tile_n;
  int pass_groups;  // of 32 channels: those of which a gradient is summed at a time
  int min_blocks;   // resident on an SM: bounds the registers of a thread
  const char* why;
};

// A thread keeps thread_rows * head_dim / 8 sums of dQ, or twice as many of dK and dV, thread_rows * pass_groups * 4
// more while it adds a tile to them, and 2 * thread_rows * tile_n / 8 scores and their gradients. All rows
// fit the 64 KB of sm_75.
constexpr Tile kQueryTiles[] = {
    {32, 2, 8, 32, 1, 4, "5 blocks leave 168 registers, which spill"},
    {64, 2, 8, 32, 2, 4, "8 x 8 sums of dQ; shared memory ends at 4 blocks"},
    {128, 2, 4, 16, 4, 4, "4 x 16 sums of dQ; 32 keys need 66 KB, more than sm_75 has"},
    {256, 2, 2, 8, 8, 4, "2 x 32 sums of dQ; 16 keys need 65 KB"},
};
constexpr Tile kKeyTiles[] = {
    {32, 2, 8, 32, 1, 4, "5 blocks leave 168 registers, which spill"},
    {64, 4, 4, 32, 2, 3, "8 rows leave room for 6 warps on an SM instead of 12"},
    {128, 2, 4, 16, 2, 4, "2 * 4 x 16 sums of dK and dV; 4 groups at a time spill"},
    {256, 2, 2, 8, 4, 4, "2 * 2 x 32 sums of dK and dV"},
};

template <int kCount>
constexpr Tile tile_of(const Tile (&tiles)[kCount], int head_dim) {
  for (const Tile& tile : tiles)
    if (tile.head_dim == head_dim) return tile;
  return {};
}

template <int kHeadDimBucket, bool kOfKeys>
struct PassConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr Tile kTile = tile_of(kOfKeys ? kKeyTiles : kQueryTiles, kHeadDim);
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kThreadRows = kTile.thread_rows;
  static constexpr int kWarpRows = kThreadRows * device::WarpGrid::kRows;
  static constexpr int kTileM = kTile.warps * kWarpRows;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kThreadColumns = kTileN / device::WarpGrid::kColumns;
  static constexpr int kThreadGroups = kHeadDim / (4 * device::WarpGrid::kColumns);
  static constexpr int kPassGroups = kTile.pass_groups;
  static constexpr int kMinBlocks = kTile.min_blocks;
  static constexpr int kLd = device::ld_of_operand(kHeadDim);
  static constexpr int kLdWeights = device::ld_of_weights(kTileN);

  static_assert(kHeadDim % 32 == 0 && kTileN % 8 == 0 && kThreadGroups % kPassGroups == 0);
};
template <int kHeadDim>
using QueryConfig = PassConfig<kHeadDim, false>;
template <int kHeadDim>
using KeyConfig = PassConfig<kHeadDim, true>;

// The whole of a block's shared memory, in the pass over keys that makes dQ ...
template <class Config>
struct QueryStorage {
  alignas(16) float q[Config::kTileM][Config::kLd];
  alignas(16) float d_o[Config::kTileM][Config::kLd];
  alignas(16) float k[Config::kTileN][Config::kLd];
  union {  // gradients of scores lie over values that have been multiplied
    alignas(16) float v[Config::kTileN][Config::kLd];
    alignas(16) float d_s[Config::kTileM][Config::kLdWeights];
  };
};

// ... and in the pass over query rows that makes dK and dV.
template <class Config>
struct KeyStorage {
  alignas(16) float k[Config::kTileM][Config::kLd];
  alignas(16) float v[Config::kTileM][Config::kLd];
  alignas(16) float q[Config::kTileN][Config::kLd];
  alignas(16) float d_o[Config::kTileN][Config::kLd];
  alignas(16) float weights[Config::kTileM][Config::kLdWeights];  // P, then dS
};

template <int kHeadDim>
constexpr int kQueryBytes = sizeof(QueryStorage<QueryConfig<kHeadDim>>);
template <int kHeadDim>
constexpr int kKeyBytes = sizeof(KeyStorage<KeyConfig<kHeadDim>>);
template <int kHeadDim>
constexpr int kSharedBytes =
    kQueryBytes<kHeadDim> > kKeyBytes<kHeadDim> ? kQueryBytes<kHeadDim> : kKeyBytes<kHeadDim>;

}  // namespace cuflash::backward_scalar
