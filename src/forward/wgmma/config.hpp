// Tiles and shared memory of the wgmma forward kernels, one configuration for each head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/wgmma_tile.hpp"

namespace cuflash::forward_wgmma {

constexpr int kWarpgroupRows = 64;  // of queries: the m of wgmma

struct Tile {
  int head_dim;   // the bucket: a smaller head_dim is padded with zeros
  int consumers;  // warpgroups that compute, kWarpgroupRows rows each
  int tile_n;     // keys
  int stages;     // of K and of V
  const char* why;
};

constexpr Tile kTiles[] = {
    {64, 3, 128, 2, "144 keys spill: S, P and O alone need 140 of 160 registers"},
    {96, 2, 128, 2, ""},
    {128, 2, 128, 2, "160 keys are 4 % faster from 4096 keys on and 10 % slower up to 1024"},
    {192, 2, 112, 2, "the most that 227 KB hold"},
    {256, 2, 80, 2, "the most that 227 KB hold"},
};

constexpr Tile tile_of(int head_dim) {
  for (const Tile& tile : kTiles)
    if (tile.head_dim == head_dim) return tile;
  return {};
}

template <int kHeadDimBucket>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kPanels =
      (kHeadDim + device::kPanelColumns - 1) / device::kPanelColumns;  // the last may be half
  static constexpr int kConsumers = tile_of(kHeadDim).consumers;
  static constexpr int kTileM = kConsumers * kWarpgroupRows;
  static constexpr int kTileN = tile_of(kHeadDim).tile_n;
  static constexpr int kStages = tile_of(kHeadDim).stages;
  static constexpr int kThreads = (1 + kConsumers) * 128;
  // O has a place of its own where there is room, and the next Q arrives while O leaves; else O takes the place of Q.
  static constexpr bool kOInQ = kHeadDim > 128;

  // Of a thread: what the producer gives up the consumers take. 65,536 in all.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536);
  static_assert(kHeadDim % 32 == 0 && kTileM <= 256 && kTileN % 16 == 0);
  static_assert((kStages & (kStages - 1)) == 0, "tiles are counted modulo 2^32");
};

// The whole of a block's shared memory, 1024-byte aligned. The panels of a tile follow one another.
template <class Config, class Element>
struct SharedStorage {
  using QTile = Element[Config::kPanels][Config::kTileM][device::kPanelColumns];
  using KvTile = Element[Config::kPanels][Config::kTileN][device::kPanelColumns];

  struct Nothing {};

  QTile q;
  KvTile k[Config::kStages];
  KvTile v[Config::kStages];
  std::conditional_t<Config::kOInQ, Nothing, QTile> o;
  uint64_t q_full, q_free;
  uint64_t k_full[Config::kStages], k_free[Config::kStages];
  uint64_t v_full[Config::kStages], v_free[Config::kStages];
};

template <int kHeadDim>
constexpr int kSharedBytes = sizeof(SharedStorage<KernelConfig<kHeadDim>, uint16_t>);

}  // namespace cuflash::forward_wgmma
