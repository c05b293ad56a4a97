// Tiles and shared memory of the wmma decode kernels, one configuration for each head-dim bucket. No CUDA header: the
// variant table reads it too.
#pragma once

#include <cstdint>

#include "core/split.hpp"
#include "device/wmma_shape.hpp"

namespace cuflash::decode_wmma {

using device::kFragment;

struct Tile {
  int head_dim;    // the bucket: a smaller head_dim is padded with zeros
  int warps;       // each with keys of its own
  int slots;       // of a warp, for 16 keys or values each
  int min_blocks;  // resident on an SM: bounds the registers of a thread
  const char* why;
};

// All fit the 64 KB of sm_75. All but one of a warp's slots are being filled at any time.
constexpr Tile kTiles[] = {
    {64, 4, 4, 4, "24 KB under way in a block"},
    {128, 4, 3, 3, "32 KB under way in a block; 4 slots need 79 KB"},
    {256, 2, 3, 3, "32 KB under way in a block; 4 warps need 114 KB"},
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
  static constexpr int kSlots = tile_of(kHeadDim).slots;
  static constexpr int kMinBlocks = tile_of(kHeadDim).min_blocks;
  static constexpr int kRows = kFragment;   // of the pack
  static constexpr int kTileN = kFragment;  // keys of a warp's step

  // Leading dimensions, padded by 8 elements: the rows that a fragment load reads at a time, and the rows of scores that
  // two lanes each read, then lie in different banks.
  static constexpr int kLdTile = kHeadDim + 8;
  static constexpr int kLdScores = kTileN + 8;
  static constexpr int kLdO = kHeadDim + 8;
};

// The whole of a block's shared memory. WMMA wants its pointers aligned to 32 bytes.
template <class Config, class Element>
struct SharedStorage {
  alignas(32) Element q[Config::kRows][Config::kLdTile];
  struct Warp {
    union {  // after the last key: the warp's O
      alignas(32) Element slots[Config::kSlots][Config::kTileN][Config::kLdTile];
      alignas(32) float o[Config::kRows][Config::kLdO];
    };
    union {  // weights are half as long: they lie over scores that have been read
      alignas(32) float scores[Config::kRows][Config::kLdScores];
      alignas(32) Element weights[Config::kRows][Config::kLdScores];
    };
    float row_factors[Config::kRows];
    float m[Config::kRows], l[Config::kRows];
  } warps[Config::kWarps];
};

template <int kHeadDim>
constexpr int kSharedBytes = sizeof(SharedStorage<KernelConfig<kHeadDim>, uint16_t>);

// Two blocks have more bytes under way on an SM than the memory of an H200 needs.
constexpr SplitShape kSplitShape = {kFragment, 2};

}  // namespace cuflash::decode_wmma
