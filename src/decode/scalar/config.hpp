// How the scalar decode kernels share out their work, one configuration for each type and head-dim bucket. No CUDA
// header: the variant table reads it too.
#pragma once

#include "core/split.hpp"

namespace cuflash::decode_scalar {

constexpr int kWarps =
    4;  // of a block; each has keys of its own, so more would only make the merge longer
constexpr int kThreads = 32 * kWarps;

// A lane keeps this many 16-byte loads of K under way, and as many of V.
constexpr int kLoads = 4;

template <int kElementBytes, int kHeadDimBucket>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kChunk = 16 / kElementBytes;  // elements of a load
  static constexpr int kLanes = kHeadDim / kChunk < 32 ? kHeadDim / kChunk : 32;  // of a key
  static constexpr int kChunks = kHeadDim / (kLanes * kChunk);                    // of a lane
  static constexpr int kChannels = kChunks * kChunk;                              // of a lane
  static constexpr int kPassKeys = kWarps * (32 / kLanes);  // that the block takes at the same time
  static constexpr int kPasses = kLoads / kChunks;          // of a step
  static constexpr int kStepKeys = kPassKeys * kPasses;

  // Rows of the pack that a block takes; a problem with one row has a kernel of its own. q, O and its totals take 3
  // registers for each row and channel of a lane: with 32 of these, 3 blocks on an SM spill.
  static constexpr int kMaxRows = 16 / kChannels;
  // Resident on an SM, by rows: bounds the registers of a thread to 512 / kBlocks. One more spills on some GPU.
  static constexpr int kBlocksOfOneRow = 5, kBlocks = 3;
  // The same for calls with features, whose places and scores take more registers.
  static constexpr int kFullBlocksOfOneRow = kElementBytes == 4 ? 4 : 3, kFullBlocks = 3;

  static_assert(kLanes * kChannels == kHeadDim && kPasses * kChunks == kLoads);
};

// 3 blocks of 4 warps have 24 to 48 KB of loads under way on an SM.
template <class Config>
constexpr SplitShape kSplitShape = {Config::kMaxRows, Config::kBlocks};

template <class Config, int kRows, bool kFeatures>
constexpr int kBlocksOf = kRows == 1
                              ? (kFeatures ? Config::kFullBlocksOfOneRow : Config::kBlocksOfOneRow)
                              : (kFeatures ? Config::kFullBlocks : Config::kBlocks);

// What the warps of a block leave for each other at the end.
template <class Config, int kRows>
struct SharedStorage {
  float m[kWarps][kRows], l[kWarps][kRows];
  float o[kWarps][kRows][Config::kHeadDim];
};
template <class Config>
constexpr int kSharedBytes = sizeof(SharedStorage<Config, Config::kMaxRows>);

}  // namespace cuflash::decode_scalar
