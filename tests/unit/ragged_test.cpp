// Ragged addressing against a list of every row, for legal offsets and for any others.
#include "attention/ragged.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "support/data.hpp"

namespace cuflash {
namespace {

// A problem with two heads whose queries and keys have the same offsets and lengths.
struct Both {
  std::vector<int32_t> offsets, lengths, pad;
  FullProblem p;

  Both(int64_t batch, int64_t max_len, int64_t total, std::vector<int32_t> given_offsets,
       std::vector<int32_t> given_lengths = {}, std::vector<int32_t> given_pad = {})
      : offsets(std::move(given_offsets)),
        lengths(std::move(given_lengths)),
        pad(std::move(given_pad)),
        p(Problem{}) {
    p.batch = batch, p.heads_q = p.heads_kv = 2, p.len_q = p.len_k = max_len;
    Ragged& r = p.f.ragged;
    if (!offsets.empty()) {
      r.offsets_q = r.offsets_k = offsets.data();
      r.total_q = r.total_k = total;
    }
    if (!lengths.empty()) r.lengths_q = p.lengths_k = lengths.data();
    if (!pad.empty()) r.left_pad_k = pad.data();
  }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;

  // The valid (batch, head, row) of all items of work, each once.
  template <class PlaceOf>
  std::set<std::vector<int64_t>> places(int64_t count, PlaceOf place_of) const {
    std::set<std::vector<int64_t>> found;
    for (int64_t index = 0; index < count; ++index) {
      const Place place = place_of(p, index);
      if (place.valid)
        EXPECT_TRUE(found.insert({place.sequence.batch, place.head, place.row}).second);
    }
    return found;
  }
};

std::set<std::vector<int64_t>> rows_of(const std::vector<int64_t>& counts) {
  std::set<std::vector<int64_t>> rows;
  for (size_t b = 0; b < counts.size(); ++b)
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t row = 0; row < counts[b]; ++row)
        rows.insert({static_cast<int64_t>(b), head, row});
  return rows;
}

void expect_rows(const Both& both, const std::vector<int64_t>& queries,
                 const std::vector<int64_t>& keys) {
  const FullProblem& p = both.p;
  EXPECT_EQ(both.places(query_extents(p, p.f.ragged).count(), query_place), rows_of(queries));
  EXPECT_EQ(both.places(key_extents(p, p.f.ragged).count(), key_place), rows_of(keys));
}

TEST(Ragged, PaddedSequences) {
  expect_rows(Both(3, 4, 0, {}), {4, 4, 4}, {4, 4, 4});
  expect_rows(Both(3, 4, 0, {}, {4, 0, 2}), {4, 0, 2}, {4, 0, 2});
  expect_rows(Both(3, 4, 0, {}, {9, -5, 1}), {4, 0, 1}, {4, 0, 1});
  expect_rows(Both(3, 4, 0, {}, {4, 1, 2}, {1, 3, 0}), {4, 1, 2}, {3, 0, 2});
}

TEST(Ragged, PackedSequences) {
  expect_rows(Both(3, 9, 12, {0, 5, 5, 12}), {5, 0, 7}, {5, 0, 7});
  expect_rows(Both(4, 9, 15, {0, 0, 5, 12, 12}), {0, 5, 7, 0}, {0, 5, 7, 0});
  expect_rows(Both(3, 9, 20, {2, 5, 9, 12}, {2, 9, 3}), {2, 4, 3}, {2, 4, 3});
  expect_rows(Both(2, 4, 12, {0, 6, 12}), {4, 4}, {4, 4});  // cut to the longest
  expect_rows(Both(3, 9, 12, {0, 5, 5, 12}, {}, {2, 1, 7}), {5, 0, 7}, {3, 0, 0});
  expect_rows(Both(0, 9, 3, {0}), {}, {});
}

TEST(Ragged, WhereSequencesLie) {
  const Both both(3, 9, 12, {0, 5, 5, 12}, {4, 4, 6}, {1, 0, 2});
  const Sequence s = sequence_of(both.p, 2);
  EXPECT_EQ(s.first_q, 5);
  EXPECT_EQ(s.len_q, 6);
  EXPECT_EQ(s.first_k, 7);
  EXPECT_EQ(s.len_k, 4);
}

// No row outside the tensors, none twice.
TEST(Ragged, AnyOffsetsStayInside) {
  cuflash_test::Random random(1);
  constexpr int32_t kNumbers[] = {0, 1, 3, 7, 8, 9, -1, 0x7fffffff, INT32_MIN};
  for (int n = 0; n < 3000; ++n) {
    std::vector<int32_t> lists[3];
    for (auto& list : lists)
      for (int b = 0; b < 5; ++b) list.push_back(random.pick(kNumbers));
    const Both both(4, 6, 8, lists[0], lists[1], lists[2]);
    for (int64_t b = 0; b < 4; ++b) {
      const Sequence s = sequence_of(both.p, b);
      for (const auto& [first, count] : {std::pair{s.first_q, s.len_q}, {s.first_k, s.len_k}}) {
        EXPECT_GE(first, 0);
        EXPECT_GE(count, 0);
        EXPECT_LE(first + count, 8);
      }
    }
    both.places(16, query_place);
    both.places(16, key_place);
  }
}

}  // namespace
}  // namespace cuflash
