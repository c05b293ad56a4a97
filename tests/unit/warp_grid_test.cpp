// How the threads of a warp share a matrix in shared memory: that they cover it, and that no two of them meet in a bank.
#include "device/warp_grid.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "backward/scalar/config.hpp"
#include "forward/scalar/config.hpp"

namespace cuflash::device {
namespace {

constexpr unsigned kLanes = 32;
constexpr int kBanks = 32;  // of 4 bytes

TEST(WarpGrid, CoversFourByEight) {
  std::set<std::pair<int, int>> places;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const WarpGrid thread(lane);
    ASSERT_TRUE(0 <= thread.row && thread.row < WarpGrid::kRows);
    ASSERT_TRUE(0 <= thread.column && thread.column < WarpGrid::kColumns);
    places.insert({thread.row, thread.column});
  }
  EXPECT_EQ(places.size(), kLanes);
}

// What the exchange along a row counts on.
TEST(WarpGrid, ThreadsOfARowDifferInBits0And3And4) {
  for (unsigned lane = 0; lane < kLanes; ++lane)
    for (unsigned other = 0; other < kLanes; ++other)
      EXPECT_EQ(WarpGrid(lane).row == WarpGrid(other).row, ((lane ^ other) & ~0b11001u) == 0);
}

TEST(WarpGrid, NeighboursReadTheSameAddress) {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    EXPECT_EQ(WarpGrid(lane).row, WarpGrid(lane ^ 1).row);
    EXPECT_EQ(WarpGrid(lane).column, WarpGrid(lane ^ 2).column);
  }
}

// Whether the accesses of a warp, `width` floats from offset(thread) on, are either the same or in different banks.
template <class F>
bool is_free_of_conflicts(int width, F offset) {
  int owner[kBanks];
  for (int& o : owner) o = -1;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < width; ++i) {
      const int address = offset(WarpGrid(lane)) + i;
      int& o = owner[address % kBanks];
      if (o >= 0 && o != address) return false;
      o = address;
    }
  return true;
}

TEST(WarpGrid, NoConflicts) {
  for (const int columns : {32, 64, 128, 256}) {
    const int ld = ld_of_operand(columns);
    EXPECT_TRUE(is_free_of_conflicts(4, [&](WarpGrid t) { return t.row * ld; })) << columns;
    EXPECT_TRUE(is_free_of_conflicts(4, [&](WarpGrid t) { return t.column * ld; })) << columns;
  }
  EXPECT_TRUE(is_free_of_conflicts(4, [](WarpGrid t) { return 4 * t.column; }));
  for (const int columns : {8, 16, 24, 32, 64}) {
    const int ld = ld_of_weights(columns);
    EXPECT_TRUE(is_free_of_conflicts(1, [&](WarpGrid t) { return t.row * ld + t.column; }))
        << columns;
    EXPECT_TRUE(is_free_of_conflicts(4, [&](WarpGrid t) { return t.row * ld; })) << columns;
  }
  // The test would notice.
  EXPECT_FALSE(is_free_of_conflicts(4, [](WarpGrid t) { return t.column * 64; }));
  EXPECT_FALSE(is_free_of_conflicts(1, [](WarpGrid t) { return t.row * 68 + t.column; }));
}

TEST(ScalarTiles, FitTheSharedMemoryOfSm75) {
  constexpr int kLimit = 64 << 10;
  for (const int bytes : {forward_scalar::kSharedBytes<32>, forward_scalar::kSharedBytes<64>,
                          forward_scalar::kSharedBytes<128>, forward_scalar::kSharedBytes<256>,
                          backward_scalar::kSharedBytes<32>, backward_scalar::kSharedBytes<64>,
                          backward_scalar::kSharedBytes<128>, backward_scalar::kSharedBytes<256>})
    EXPECT_LE(bytes, kLimit);
}

}  // namespace
}  // namespace cuflash::device
