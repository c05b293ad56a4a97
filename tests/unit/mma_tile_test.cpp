#include "device/mma_tile.hpp"

#include <gtest/gtest.h>

#include <set>

namespace cuflash::device {
namespace {

template <class Tile>
class MmaTileOfColumns : public ::testing::Test {};
using Tiles = ::testing::Types<MmaTile<32>, MmaTile<64>, MmaTile<96>, MmaTile<128>, MmaTile<192>,
                               MmaTile<256>>;
TYPED_TEST_SUITE(MmaTileOfColumns, Tiles);

constexpr uint32_t kRows = 64;

TYPED_TEST(MmaTileOfColumns, ChunksStayInTheirRow) {
  using Tile = TypeParam;
  for (uint32_t row = 0; row < kRows; ++row) {
    std::set<uint32_t> places;
    for (uint32_t chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const uint32_t offset = Tile::offset(row, chunk);
      EXPECT_EQ(offset / Tile::kRowBytes, row);
      EXPECT_EQ(offset % 16, 0u);
      places.insert(offset);
    }
    EXPECT_EQ(places.size(), Tile::kChunks);
  }
}

// What ldmatrix reads at a time: the same chunk of eight rows, from a multiple of eight on.
TYPED_TEST(MmaTileOfColumns, EightRowsOfOneChunkLieInDifferentBanks) {
  using Tile = TypeParam;
  for (uint32_t first = 0; first < kRows; first += 8)
    for (uint32_t chunk = 0; chunk < Tile::kChunks; ++chunk) {
      std::set<uint32_t> banks;
      for (uint32_t row = first; row < first + 8; ++row)
        banks.insert(Tile::offset(row, chunk) % 128 / 16);
      EXPECT_EQ(banks.size(), 8u) << first << " " << chunk;
    }
}

TYPED_TEST(MmaTileOfColumns, AdvanceGoesFromOneChunkToAnother) {
  using Tile = TypeParam;
  for (const uint32_t tile : {0x400u, 0x480u, 0x8400u})
    for (uint32_t row = 0; row < 16; ++row)
      for (uint32_t chunk = 0; chunk < 2; ++chunk)
        for (uint32_t strip = 0; strip < kRows / 16; ++strip)
          for (uint32_t step = 0; step < Tile::kChunks / 2; ++step)
            EXPECT_EQ(Tile::advance(tile + Tile::offset(row, chunk), strip, step),
                      tile + Tile::offset(row + 16 * strip, chunk + 2 * step));
}

// As two warps do that share rows, each with every second 16 channels (forward/mma/pair.cuh).
TYPED_TEST(MmaTileOfColumns, AdvanceByFourChunksBeginsAtAnyOfTheFirstFour) {
  using Tile = TypeParam;
  for (const uint32_t tile : {0x400u, 0x480u, 0x8400u})
    for (uint32_t row = 0; row < 16; ++row)
      for (uint32_t chunk = 0; chunk < 4; ++chunk)
        for (uint32_t strip = 0; strip < kRows / 16; ++strip)
          for (uint32_t step = 0; step < Tile::kChunks / 2; step += 2)
            EXPECT_EQ(Tile::advance(tile + Tile::offset(row, chunk), strip, step),
                      tile + Tile::offset(row + 16 * strip, chunk + 2 * step));
}

}  // namespace
}  // namespace cuflash::device
