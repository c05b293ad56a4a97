// Which tiles of lanes the cpu family makes of ragged batches, against a list of every row, for legal offsets and for any
// others; and what the lanes of a tile see.
#include "cpu/blocked/lane_tiles.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "support/data.hpp"

namespace cuflash::cpu_blocked {
namespace {

using cuflash_test::Random;

constexpr int64_t kHeadsKv = 2;

// A problem whose queries and keys are packed by the same offsets.
FullProblem packed(const std::vector<int32_t>& offsets, int64_t total, int64_t group) {
  FullProblem p{Problem()};
  p.batch = static_cast<int64_t>(offsets.size()) - 1;
  p.heads_kv = kHeadsKv, p.heads_q = kHeadsKv * group;
  p.len_q = p.len_k = total;
  p.f.ragged.offsets_q = p.f.ragged.offsets_k = offsets.data();
  p.f.ragged.total_q = p.f.ragged.total_k = total;
  return p;
}

// (head, row of the packed tensor) of all lanes of queries, each once.
std::set<std::pair<int64_t, int64_t>> query_lanes(const FullProblem& p) {
  std::set<std::pair<int64_t, int64_t>> found;
  for (int64_t index = 0; index < Tiling::of_queries(p).count(); ++index) {
    const auto tile = std::make_unique<QueryTile>(p, index);
    for (int lane = 0; lane < tile->count; ++lane) {
      const QueryRow& r = tile->rows[lane];
      EXPECT_EQ(r.sequence.batch, tile->sequence.batch);
      EXPECT_EQ(r.head_kv, tile->head_kv);
      EXPECT_TRUE(0 <= r.token && r.token < p.f.ragged.total_q) << r.token;
      EXPECT_TRUE(found.insert({r.head, r.token}).second) << r.head << ' ' << r.token;
    }
  }
  return found;
}

std::set<std::pair<int64_t, int64_t>> key_lanes(const FullProblem& p) {
  std::set<std::pair<int64_t, int64_t>> found;
  for (int64_t index = 0; index < Tiling::of_keys(p).count(); ++index) {
    const KeyTile tile(p, index);
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      const int64_t token = tile.sequence.first_k + tile.first + lane;
      EXPECT_TRUE(0 <= token && token < p.f.ragged.total_k) << token;
      EXPECT_TRUE(found.insert({tile.head_kv, token}).second) << tile.head_kv << ' ' << token;
    }
  }
  return found;
}

TEST(CpuTiling, EveryRowOfPackedSequencesOnce) {
  for (const int64_t group : {1, 3, 64, 100})
    for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{0, 200},
                                                {0, 1, 2, 3, 67, 131, 132, 200},
                                                {5, 5, 70, 70, 70, 190},
                                                {0, 0, 0, 0},
                                                {199, 200}}) {
      const FullProblem p = packed(offsets, 200, group);
      std::set<std::pair<int64_t, int64_t>> queries, keys;
      for (int64_t token = offsets.front(); token < offsets.back(); ++token) {
        for (int64_t head = 0; head < p.heads_q; ++head) queries.insert({head, token});
        for (int64_t head = 0; head < p.heads_kv; ++head) keys.insert({head, token});
      }
      EXPECT_EQ(query_lanes(p), queries) << group;
      EXPECT_EQ(key_lanes(p), keys);
    }
}

// Where offsets are anything, sequences overlap: still two tasks never write the same row.
TEST(CpuTiling, NoRowTwiceWhateverTheOffsets) {
  Random random(21);
  for (int n = 0; n < 300; ++n) {
    std::vector<int32_t> offsets(2 + random.below(6));
    for (int32_t& offset : offsets) offset = static_cast<int32_t>(random.below(300)) - 30;
    const FullProblem p = packed(offsets, 200, 1 + static_cast<int64_t>(random.below(4)));
    query_lanes(p);
    key_lanes(p);
  }
}

TEST(CpuTiling, NothingOfNoSequence) {
  const std::vector<int32_t> none = {0};
  const FullProblem p = packed(none, 200, 2);
  EXPECT_EQ(Tiling::of_queries(p).count(), 0);
  EXPECT_EQ(Tiling::of_keys(p).count(), 0);
}

TEST(CpuSeen, IntervalsAndHiddenSteps) {
  const std::pair<int64_t, int64_t> intervals[] = {{0, 64},  {-100, 1}, {5, 5},    {31, 33},
                                                   {32, 64}, {0, 32},   {63, 900}, {-9, -3}};
  Seen seen;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& [begin, end] = intervals[lane % 8];
    seen.show(lane, begin, end);
  }
  const auto expect = [&](int hidden) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int step = 0; step < kSteps; ++step) {
        const auto& [begin, end] = intervals[lane % 8];
        ASSERT_EQ(seen.has(lane, step), begin <= step && step < end && step != hidden)
            << lane << ' ' << step;
      }
  };
  expect(-1);
  for (int lane = 0; lane < kLanes; ++lane) seen.hide(lane, 31);
  expect(31);
  seen.show_all();
  EXPECT_EQ(seen.visible(), nullptr);
  EXPECT_TRUE(seen.has(3, 31));
  seen.hide(3, 40);
  ASSERT_NE(seen.visible(), nullptr);
  EXPECT_FALSE(seen.has(3, 40));
  EXPECT_TRUE(seen.has(3, 39) && seen.has(3, 41) && seen.has(4, 40));
}

}  // namespace
}  // namespace cuflash::cpu_blocked
