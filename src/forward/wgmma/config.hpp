// Tiles and shared memory of the wgmma forward kernels, one configuration for each head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include <cstdint>

#include "device/wgmma_tile.hpp"

namespace cuflash::forward_wgmma {

constexpr int kWarpgroupRows = 64;  // of queries: the m of wgmma
constexpr int kMaxTileRows = 192;

enum TileSize {
  kLarge,
  kSmall,  // for few rows, or few keys of which many are masked
  kLong,   // for many keys
};

struct Tile {
  int head_dim, head_dim_v;  // the bucket: smaller ones are padded with zeros
  TileSize size;
  int consumers;  // warpgroups that compute, kWarpgroupRows rows each
  int tile_n;     // keys
  int stages;     // of K and of V
  int blocks;     // on an SM
  const char* why;
};

constexpr Tile kTiles[] = {
    {64, 64, kLarge, 3, 128, 2, 1, "144 keys spill: S, P and O alone need 140 of 160 registers"},
    {64, 64, kSmall, 1, 64, 2, 3,
     "causal 512: 239 TFLOP/s; 96 keys 223, two blocks of 64 or 128 keys 205"},
    {96, 96, kLarge, 3, 112, 2, 1, "660 TFLOP/s; two consumers and 128 keys 583"},
    {128, 128, kLarge, 2, 128, 2, 1, "160 keys are 10 % slower up to 1024 keys"},
    {128, 128, kLong, 2, 160, 2, 1, "4 % faster from 4096 keys on"},
    {192, 128, kLarge, 2, 128, 2, 1, "10 % faster than with room for 192 channels of V"},
    {192, 192, kLarge, 2, 112, 2, 1, "the most that 227 KB hold"},
    {256, 256, kLarge, 2, 80, 2, 1, "the most that 227 KB hold"},
};

constexpr Tile tile_of(int head_dim, int head_dim_v, TileSize size) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim && tile.head_dim_v == head_dim_v && tile.size == size)
      return tile;
  return {};
}

// Of a thread, given up by the producer or left to it, and taken by the consumers.
struct Registers {
  int consumers, blocks, of_producer, of_consumer;
};
constexpr Registers kRegisters[] = {{1, 3, 32, 128}, {2, 1, 40, 232}, {3, 1, 32, 160}};

constexpr Registers registers_of(int consumers, int blocks) {
  for (const Registers& row : kRegisters)
    if (row.consumers == consumers && row.blocks == blocks) return row;
  return {};
}

// Of a row of so many columns; the last may be half.
constexpr int panels_of(int columns) {
  return (columns + device::kPanelColumns - 1) / device::kPanelColumns;
}

template <int kHeadDimBucket, int kHeadDimVBucket, TileSize kSize>
struct KernelConfig {
  static constexpr Tile kTile = tile_of(kHeadDimBucket, kHeadDimVBucket, kSize);
  static constexpr int kHeadDim = kHeadDimBucket, kHeadDimV = kHeadDimVBucket;
  static constexpr int kPanels = panels_of(kHeadDim), kPanelsV = panels_of(kHeadDimV);
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kTileM = kConsumers * kWarpgroupRows;
  static constexpr int kTileN = kTile.tile_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocks = kTile.blocks;
  static constexpr int kThreads = (1 + kConsumers) * 128;
  // A second place for Q where there is room: the next tile's arrives while this one's is still read.
  static constexpr int kQPlaces = kHeadDim > 128 ? 1 : 2;
  // What is known of a tile is read until its O is written, when its Q has long been released, and the slowest consumer may
  // be a tile behind the first.
  static constexpr int kWorkPlaces = kQPlaces + 2;

  static constexpr Registers kRegisters = registers_of(kConsumers, kBlocks);
  // What the block is launched with, a multiple of 8 for each thread, is all that its warpgroups can share out: with more
  // asked for, the last of them waits for ever.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;
  static_assert(kRegisters.of_producer + kConsumers * kRegisters.of_consumer <=
                (1 + kConsumers) * kLaunchRegisters);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kTileM <= kMaxTileRows &&
                kTileN % 16 == 0);
  static_assert((kStages & (kStages - 1)) == 0, "tiles are counted modulo 2^32");
};

// What the consumers of a tile of O need to know, left by the producer beside its Q: it has the time for divisions.
struct TileWork {
  void* o;     // of the tile's first row
  float* lse;  // likewise, or null
  int b, head;
  int rows;             // 0: there is no tile more
  int keys, num_tiles;  // that any row sees, and the tiles of them
  // What the first row would see of an endless sequence, at most kFarKey away; each later row sees one more and one less.
  int seen_begin, seen_end;
  float centre;  // of the first row
};
constexpr int64_t kFarKey = (int64_t{1} << 31) - 256;  // no extent is larger (fits_tensor_map)

// The whole of a block's shared memory, 1024-byte aligned. The panels of a tile follow one another.
template <class Config, class Element>
struct SharedStorage {
  using QTile = Element[Config::kPanels][kWarpgroupRows][device::kPanelColumns];  // of a consumer
  using KTile = Element[Config::kPanels][Config::kTileN][device::kPanelColumns];
  using VTile = Element[Config::kPanelsV][Config::kTileN][device::kPanelColumns];

  QTile q[Config::kConsumers][Config::kQPlaces];
  KTile k[Config::kStages];
  VTile v[Config::kStages];
  uint64_t q_full[Config::kConsumers][Config::kQPlaces];
  uint64_t q_free[Config::kConsumers][Config::kQPlaces];
  uint64_t k_full[Config::kStages], k_free[Config::kStages];
  uint64_t v_full[Config::kStages], v_free[Config::kStages];
  TileWork work[Config::kWorkPlaces];
};

template <class Config>
constexpr int kSharedBytes = sizeof(SharedStorage<Config, uint16_t>);

// A call with features has room behind that for the order of its sequences: of each its first tile of rows, counted over all
// sequences, and which it is, in one word.
constexpr int kSequenceBits = 9;
constexpr int kMaxSequences = 1 << kSequenceBits;
constexpr int64_t kMaxRaggedTiles = (int64_t{1} << (32 - kSequenceBits)) - 1;
template <class Config>
constexpr int kSharedBytesOfRagged = kSharedBytes<Config> + 4 * (kMaxSequences + 1);

}  // namespace cuflash::forward_wgmma
