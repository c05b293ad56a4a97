// Tiles and shared memory of the wmma backward kernels, one configuration for each head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include <cstdint>

#include "device/wmma_shape.hpp"

namespace cuflash::backward_wmma {

using device::kFragment;

// A strip is 16 rows of what a block owns: queries for dQ, keys for dK and dV. Two warps work on each, so that
// the sums of 256 channels fit their registers.
enum Role : int { kWeights = 0, kGradients = 1 };
constexpr int kStrips = 2;
constexpr int kTileRows = kStrips * kFragment;
constexpr int kThreads = kStrips * 2 * 32;

struct Tile {
  int head_dim;       // the bucket: a smaller head_dim is padded with zeros
  int keys;           // streamed past a block of dQ
  int dq_min_blocks;  // resident on an SM: bounds the registers of a thread to 512 / min_blocks
  int queries;        // streamed past a block of dK and dV
  int dkv_min_blocks;
  const char* why;
};

// All rows fit the 64 KB of sm_75. The reasons are what nvcc 13.0 does for sm_90.
constexpr Tile kTiles[] = {
    {32, 64, 3, 64, 4, "4 blocks of dQ spill"},
    {64, 64, 3, 64, 3, "4 blocks of dQ spill, 4 of dK and dV need more than 228 KB"},
    {96, 32, 3, 32, 3, "64 queries need 71 KB, more than sm_75 has; 4 blocks of dQ spill"},
    {128, 32, 3, 32, 3, "64 rows need more than sm_75 has"},
    {192, 32, 2, 32, 2, "the registers of the sums"},
    {256, 32, 2, 16, 2, "32 queries need 78 KB, more than sm_75 has"},
};

constexpr Tile tile_of(int head_dim) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim) return tile;
  return {};
}

// What both kernels share: kTileN rows stream past kTileRows rows that the block owns.
template <int kHeadDimBucket, int kStreamedRows>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kTileN = kStreamedRows;
  static constexpr int kChannelFragments = kHeadDim / kFragment;
  static constexpr int kTileFragments = kTileN / kFragment;

  // Leading dimensions, padded by 8 elements: the eight 16-byte rows that a fragment load reads at a time then lie
  // in different banks, and so do four rows of fp32.
  static constexpr int kLdTile = kHeadDim + 8;
  static constexpr int kLdStrip = kTileN + 8;

  static_assert(kHeadDim % 32 == 0 && kTileN % kFragment == 0);
  static_assert(kTileRows <= 2 * kTileN,
                "the block's own rows pass through two tiles of the stream");
};

template <int kHeadDim>
struct DqConfig : KernelConfig<kHeadDim, tile_of(kHeadDim).keys> {
  static constexpr int kMinBlocks = tile_of(kHeadDim).dq_min_blocks;
};
template <int kHeadDim>
struct DkvConfig : KernelConfig<kHeadDim, tile_of(kHeadDim).queries> {
  static constexpr int kMinBlocks = tile_of(kHeadDim).dkv_min_blocks;
};

// What the two warps of a strip hand to each other and to themselves.
template <class Config, class Element>
struct StripStorage {
  struct Exchange {
    alignas(32) float p[kFragment][Config::kLdStrip];             // for the gradients' warp
    alignas(32) Element factors[2][kFragment][Config::kLdStrip];  // P and dS, rounded, by role
  };
  union {
    Exchange in_loop;
    alignas(32) float staging[2][kFragment][Config::kLdStrip];  // before and after it, by role
  };
};

// The rows of the stream that one own row sees: [begin, end), counted from the first that any of them sees.
struct RowBounds {
  int begin[kTileRows], end[kTileRows];
};

// The whole of a block's shared memory. WMMA wants its pointers aligned to 32 bytes: every 16 rows of
// every array are.
template <class Config, class Element>
struct DqStorage {
  alignas(32) Element k[2][Config::kTileN][Config::kLdTile];  // before the first tile: Q
  alignas(32) Element v[Config::kTileN][Config::kLdTile];     // before the first tile: dO
  StripStorage<Config, Element> strips[kStrips];
  RowBounds seen;
  float lse[kTileRows], delta[kTileRows];
};

template <class Config, class Element>
struct DkvStorage {
  alignas(32) Element q[2][Config::kTileN][Config::kLdTile];    // before the first tile: K
  alignas(32) Element d_o[2][Config::kTileN][Config::kLdTile];  // before the first tile: V
  StripStorage<Config, Element> strips[kStrips];
  RowBounds seen;
  float lse[2][Config::kTileN], delta[2][Config::kTileN];
};

template <int kHeadDim>
constexpr int kDqSharedBytes = sizeof(DqStorage<DqConfig<kHeadDim>, uint16_t>);
template <int kHeadDim>
constexpr int kDkvSharedBytes = sizeof(DkvStorage<DkvConfig<kHeadDim>, uint16_t>);
template <int kHeadDim>
constexpr int kSharedBytes =
    kDqSharedBytes<kHeadDim> > kDkvSharedBytes<kHeadDim> ? kDqSharedBytes<kHeadDim>
                                                         : kDkvSharedBytes<kHeadDim>;

}  // namespace cuflash::backward_wmma
