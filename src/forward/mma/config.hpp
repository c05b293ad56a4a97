// Tiles and shared memory of the mma forward kernels, one configuration for each head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/mma_tile.hpp"

namespace cuflash::forward_mma {

constexpr int kStripRows = 16;  // the m of a product

enum TileSize {
  kStandard,
  kLong,  // for many keys: fewer blocks on an SM, of which each does a tile in fewer instructions
  kFew,   // for so few rows that larger tiles leave SMs without a block
  // Two warps share their rows (pair.cuh): for many rows, and GPUs with more than 99 KB of shared memory for a block.
  kPairs,
};
enum QPlace { kQShared, kQRegisters };  // where Q is read from for each tile of keys

struct Tile {
  int head_dim;  // the bucket: a smaller head_dim is padded with zeros
  TileSize size;
  int warps;
  int strips;  // of 16 query rows for each warp
  int tile_n;  // keys
  int stages;  // of K and V: with two the next tile arrives while this one is used, with one V arrives beside Q K^T
  QPlace q;
  int min_blocks;  // resident on an SM: bounds the registers of a thread
  int weighed_strips,
      weighed_keys;  // exponentiated before a product, and under one question whether m is kept
  const char* why;
  bool paired = false;  // two warps share their strips
};

// Two strips halve the reads of K and V: with one, shared memory ends at 473 TFLOP/s of an H200. All but pairs fits the 99 KB
// that a block may have on sm_86, 89 and 120. The reasons are what nvcc 13.0 does for sm_90.
constexpr Tile kTiles[] = {
    {32, kStandard, 4, 2, 64, 2, kQRegisters, 3, 1, 32,
     "4 blocks would leave 128 registers, of which O, S and Q take 112"},
    {64, kStandard, 4, 2, 64, 2, kQShared, 3, 1, 32,
     "the maxima of both strips asked for at once spill"},
    {64, kLong, 4, 2, 64, 2, kQRegisters, 2, 2, 32,
     "3 to 9 % faster from 2048 keys on, 6 to 9 % slower at 512"},
    {64, kFew, 4, 1, 64, 2, kQRegisters, 3, 1, 32, "half the rows: twice the blocks"},
    {96, kStandard, 4, 2, 64, 2, kQShared, 2, 2, 32,
     "3 blocks would leave 168 registers; O and S take 160"},
    {128, kStandard, 4, 2, 64, 2, kQShared, 2, 2, 32, "O and S take 192 registers"},
    {128, kFew, 4, 1, 64, 2, kQShared, 2, 1, 32, "half the rows: twice the blocks"},
    {192, kStandard, 8, 1, 64, 2, kQRegisters, 1, 1, 32,
     "2 strips would take 192 registers for O; Q has no room in 99 KB"},
    {256, kStandard, 4, 1, 64, 1, kQShared, 2, 1, 32,
     "2 strips would take 256 registers for O; a second stage has no room in 99 KB"},
    {256, kPairs, 8, 2, 64, 2, kQShared, 1, 2, 32,
     "2 strips, O in two warps: 26 KB from shared memory for 16 rows and 64 keys, not 72", true},
};

constexpr Tile tile_of(int head_dim, TileSize size) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim && tile.size == size) return tile;
  return {};
}

template <int kHeadDimBucket, TileSize kSize>
struct KernelConfig {
  static constexpr Tile kTile = tile_of(kHeadDimBucket, kSize);
  static_assert(kTile.head_dim == kHeadDimBucket, "no such row");
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kStrips = kTile.strips;
  static constexpr int kWarpRows = kStrips * kStripRows;
  // Warps that share rows: each makes the scores of its part of a tile's keys, and O of its part of the channels.
  static constexpr int kSharers = kTile.paired ? 2 : 1;
  static constexpr int kTileM = kTile.warps / kSharers * kWarpRows;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kWarpKeys = kTileN / kSharers;
  static constexpr int kWarpChannels = kHeadDim / kSharers;
  static constexpr int kStages = kTile.stages;
  static constexpr bool kQInRegisters = kTile.q == kQRegisters;
  static constexpr int kMinBlocks = kTile.min_blocks;

  using Layout = device::MmaTile<kHeadDim>;

  static_assert(kWarpKeys % 16 == 0 && kWarpKeys <= 64,
                "a bit for each of a thread's scores of a strip");
  static_assert(kStages == 1 || kStages == 2);
  static_assert(!kQInRegisters || (kStages == 2 && kTileM <= 2 * kTileN),
                "Q passes through the second stage");
  static_assert(kSharers == 1 ||
                    (kTile.weighed_strips == kStrips && kTile.weighed_keys == kWarpKeys),
                "a pair exchanges all its weights of a tile at once");
  static_assert(kSharers == 1 ||
                (!kQInRegisters && kTile.warps % 2 == 0 && kWarpChannels % 16 == 0));
};

// Where the two warps of a pair leave what they have for each other.
template <class Config>
struct PairStorage {
  static constexpr int kFragments = Config::kStrips * Config::kWarpKeys / 16;
  // One A operand of a product: what a lane holds of it is what the same lane of the partner needs.
  struct Fragment {
    alignas(16) uint32_t of_lane[32][4];
  };
  struct Row {
    float value;    // the greatest score of the keys of one warp; at the end its part of l
    uint32_t asks;  // whether that warp wants another m
  };
  Fragment weights[Config::kTile.warps][kFragments];
  Row rows[Config::kTile.warps][Config::kWarpRows];
  uint32_t asks[Config::kTile.warps];  // for a new m in any row
};

// The whole of a block's shared memory, 128-byte aligned; each tile lies as device::MmaTile says.
template <class Config, class Element>
struct SharedStorage {
  struct Stage {
    alignas(128) Element k[Config::kTileN * Config::kHeadDim];
    Element v[Config::kTileN * Config::kHeadDim];
  } stages[Config::kStages];
  struct Nothing {};
  struct QTile {
    Element elements[Config::kTileM * Config::kHeadDim];
  };
  struct QTileOfPairs : QTile {
    PairStorage<Config> pairs;
  };
  std::conditional_t<Config::kQInRegisters, Nothing,
                     std::conditional_t<Config::kSharers == 2, QTileOfPairs, QTile>>
      q;  // at the end: O
};

template <class Config>
constexpr int kSharedBytes = sizeof(SharedStorage<Config, uint16_t>);

}  // namespace cuflash::forward_mma
