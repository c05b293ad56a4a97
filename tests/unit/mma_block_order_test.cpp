#include "forward/mma/block_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace cuflash::forward_mma {
namespace {

TEST(MmaDivisor, DividesAsDivisionDoes) {
  constexpr uint32_t kEnd = uint32_t{1} << 31;
  for (uint32_t d = 1; d < 3000; ++d) {
    const Divisor divisor(d);
    for (const uint32_t x :
         {0u, 1u, d - 1, d, d + 1, 7 * d - 1, 7 * d, kEnd / d * d - 1, kEnd / d * d - d, kEnd - 1})
      ASSERT_EQ(divisor.quotient(std::min(x, kEnd - 1)), std::min(x, kEnd - 1) / d)
          << x << " / " << d;
  }
  for (const uint32_t d :
       {kEnd, kEnd - 1, kEnd / 2 + 1, kEnd / 2, kEnd / 3, 65535u, 65537u, 1u << 30})
    for (const uint32_t x : {0u, 1u, d - 1, d, kEnd / 2 - 1, kEnd / 2, kEnd - 2, kEnd - 1})
      ASSERT_EQ(Divisor(d).quotient(std::min(x, kEnd - 1)), std::min(x, kEnd - 1) / d)
          << x << " / " << d;
}

Problem problem_of(int64_t batch, int64_t heads_q, int64_t heads_kv) {
  Problem p;
  p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv;
  return p;
}

TEST(MmaBlockOrder, EachTileIsTakenOnceAndGroupsFollowOneAnother) {
  for (const int64_t batch : {1, 3})
    for (const auto& [heads_q, heads_kv] : {std::pair{1, 1}, {6, 2}, {7, 7}, {8, 1}})
      for (const int64_t tiles : {1, 2, 5})
        for (const int64_t together : {0, 1, 2, 4, 5, 7, 20, 1000}) {
          const Problem p = problem_of(batch, heads_q, heads_kv);
          const BlockOrder order(p, tiles, together);
          const int64_t heads = batch * heads_q, blocks = heads * tiles;
          std::set<std::tuple<uint32_t, uint32_t, uint32_t>> taken;
          std::set<uint32_t> begun, done;  // heads of all sequences
          uint32_t last_tile = 0;
          for (int64_t block = 0; block < blocks; ++block) {
            const BlockPlace at = order.place(static_cast<uint32_t>(block));
            ASSERT_LT(at.m_tile, tiles);
            ASSERT_LT(at.batch, batch);
            ASSERT_LT(at.head, heads_q);
            ASSERT_EQ(at.head_kv, p.head_kv(at.head));
            ASSERT_TRUE(taken.insert({at.m_tile, at.batch, at.head}).second);
            // Late rows first; a group begins when all heads of the one before have had their first rows.
            const uint32_t of_all = at.batch * static_cast<uint32_t>(heads_q) + at.head;
            if (at.m_tile > last_tile) {
              ASSERT_EQ(begun, done);
            }
            last_tile = at.m_tile;
            begun.insert(of_all);
            if (at.m_tile == 0) done.insert(of_all);
            ASSERT_LE(static_cast<int64_t>(begun.size() - done.size()),
                      std::max<int64_t>(together, 1));
          }
          EXPECT_EQ(static_cast<int64_t>(taken.size()), blocks);
        }
}

TEST(MmaBlockOrder, GroupsAreAsLargeAsTheCacheHolds) {
  Problem p = problem_of(32, 8, 8);
  p.len_q = p.len_k = 512, p.head_dim = p.head_dim_v = 256;  // 512 KB a head
  EXPECT_EQ(heads_together(p), 32);
  p.mask.right = 0;
  EXPECT_EQ(heads_together(p), 64);
  p.heads_kv = 2;
  EXPECT_EQ(heads_together(p), 256);
  p.len_k = 0;
  EXPECT_GT(heads_together(p), 256);
  p.heads_kv = 8;
  p.mask = {};
  p.len_k = 4096;  // 4 MB a head
  EXPECT_EQ(heads_together(p), 4);
  for (const int64_t len_k : {int64_t{8192}, int64_t{16384}, int64_t{1} << 31}) {
    p.len_k = len_k;
    EXPECT_EQ(heads_together(p), 256) << len_k;
  }
  p.len_k = 8191;
  EXPECT_EQ(heads_together(p), 2);
  p.len_k = 16384, p.head_dim = p.head_dim_v = 128;
  EXPECT_EQ(heads_together(p), 256);
  p.heads_kv = 4;  // 4 MB for each of the heads that share them
  EXPECT_EQ(heads_together(p), 4);
  Features features = {};
  features.used = kRaggedBatches;
  p.features = &features;
  EXPECT_EQ(heads_together(p), 256);
}

}  // namespace
}  // namespace cuflash::forward_mma
