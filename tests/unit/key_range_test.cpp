// The interval arithmetic of masks against the header's predicate, one key at a time.
#include "attention/key_range.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "support/oracle.hpp"

namespace cuflash {
namespace {

// The same mask twice: as the public header says it, and as the library holds it.
struct Sample {
  cuflash_test::Problem spec;
  Mask mask;
  int64_t len_q, len_k;

  bool sees(int64_t row, int64_t key) const { return spec.sees(0, row, key); }
  int64_t shift() const { return centre_shift(mask, 0, len_q, len_k); }
};

template <class F>
void for_each_sample(F f) {
  constexpr int64_t kReaches[] = {-1, 0, 1, 3, 8, int64_t{1} << 41};
  const std::vector<int32_t> offsets = {-3};
  for (int64_t len_q = 1; len_q <= 9; ++len_q)
    for (int64_t len_k = 0; len_k <= 9; ++len_k)
      for (int align = 0; align < 4; ++align)
        for (const bool causal : {false, true})
          for (const int64_t left : kReaches)
            for (const int64_t right : kReaches) {
              Sample s;
              s.len_q = len_q;
              s.len_k = len_k;
              s.spec.shape.len_q = len_q;
              s.spec.shape.len_k = len_k;
              s.spec.mask = cuflash_test::window_mask(left, right);
              s.spec.mask.causal = causal;
              s.spec.mask.align = align;
              s.spec.mask.offset = 2;
              s.spec.mask.offsets = offsets;
              s.mask.align = static_cast<Align>(align);
              s.mask.offset = 2;
              s.mask.offsets = offsets.data();
              if (left >= 0) s.mask.left = min64(left, Mask::kUnlimited);
              if (right >= 0) s.mask.right = min64(right, Mask::kUnlimited);
              if (causal) s.mask.right = 0;
              f(s);
            }
}

TEST(KeyRange, VisibleKeysAndRows) {
  for_each_sample([](const Sample& s) {
    for (int64_t row = 0; row < s.len_q; ++row) {
      const Range keys = visible_keys(s.mask, s.shift(), row, s.len_k);
      const Range uncut = uncut_keys(s.mask, s.shift(), 0);  // of row `row`, so much further on
      if (!keys.empty()) {
        ASSERT_EQ(max64(uncut.begin + row, 0), keys.begin);
        ASSERT_EQ(min64(uncut.end + row, s.len_k), keys.end);
      }
      ASSERT_LE(keys.begin, keys.end);
      for (int64_t key = 0; key < s.len_k; ++key) {
        ASSERT_EQ(keys.contains(key), s.sees(row, key));
        ASSERT_EQ(visible_rows(s.mask, s.shift(), key, s.len_q).contains(row), s.sees(row, key));
      }
      ASSERT_GE(keys.begin, 0);
      ASSERT_LE(keys.end, s.len_k);
    }
  });
}

TEST(KeyRange, TileKeys) {
  int64_t tiles = 0;
  for_each_sample([&](const Sample& s) {
    for (int64_t begin = 0; begin < s.len_q; ++begin)
      for (int64_t end = begin + 1; end <= s.len_q; ++end) {
        const TileRange range = tile_keys(s.mask, s.shift(), begin, end, s.len_k);
        ++tiles;
        for (int64_t key = 0; key < s.len_k; ++key) {
          bool any = false, all = true;
          for (int64_t row = begin; row < end; ++row) {
            any = any || s.sees(row, key);
            all = all && s.sees(row, key);
          }
          if (any) ASSERT_TRUE(range.any.contains(key));
          ASSERT_EQ(range.all.contains(key), all);
        }
        // No wasted key at the ends where some row sees something.
        const auto seen = [&](int64_t key) {
          for (int64_t row = begin; row < end; ++row)
            if (s.sees(row, key)) return true;
          return false;
        };
        bool nothing = true;
        for (int64_t key = 0; key < s.len_k; ++key) nothing = nothing && !seen(key);
        if (!nothing && !visible_keys(s.mask, s.shift(), begin, s.len_k).empty() &&
            !visible_keys(s.mask, s.shift(), end - 1, s.len_k).empty()) {
          ASSERT_TRUE(seen(range.any.begin));
          ASSERT_TRUE(seen(range.any.end - 1));
        }
      }
  });
  EXPECT_GT(tiles, 100000);
}

TEST(KeyRange, SplitsCoverOnceAndInOrder) {
  for (int64_t begin = 0; begin < 4; ++begin)
    for (int64_t length = 0; length < 40; ++length)
      for (int64_t splits = 1; splits <= 50; ++splits)
        for (const int64_t least : {1, 7, 64}) {
          const Range whole = {begin, begin + length};
          int64_t next = begin, longest = 0;
          for (int64_t split = 0; split < splits; ++split) {
            const Range part = split_range(whole, split, splits, least);
            ASSERT_LE(part.begin, part.end);
            if (part.empty()) continue;
            ASSERT_EQ(part.begin, next);
            next = part.end;
            ASSERT_TRUE(part.end - part.begin >= least || part.end == whole.end);
            longest = max64(longest, part.end - part.begin);
          }
          ASSERT_EQ(next, whole.end);
          ASSERT_LE(longest, max64(ceil_div(length, splits), least));
        }
}

// With parts for the longest sequence, each sequence is cut by its own length alone.
TEST(KeyRange, PartsOfAFixedLength) {
  constexpr int64_t kLeast = 8;
  for (int64_t length = 0; length < 100; ++length)
    for (int64_t longest = length; longest < 100; ++longest)
      for (int64_t split = 0; split * kLeast < longest; ++split) {
        const Range part = split_range({3, 3 + length}, split, ceil_div(longest, kLeast), kLeast);
        ASSERT_EQ(part.begin, 3 + min64(split * kLeast, length));
        ASSERT_EQ(part.end, 3 + min64((split + 1) * kLeast, length));
      }
}

TEST(KeyRange, FarAwayCentres) {
  Mask mask;
  mask.align = Align::kOffset;
  mask.right = 0;
  for (const int64_t offset : {-(int64_t{1} << 31), int64_t{1} << 31}) {
    mask.offset = offset;
    const Range keys = visible_keys(mask, centre_shift(mask, 0, 10, 10), 3, 10);
    EXPECT_EQ(keys.end - keys.begin, offset < 0 ? 0 : 10);
  }
}

}  // namespace
}  // namespace cuflash
