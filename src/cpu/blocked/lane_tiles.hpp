// Which tiles there are: what is in the lanes of one, and which of its steps each lane sees.
#pragma once

#include <cstring>

#include "attention/reference_rows.hpp"
#include "cpu/blocked/tile_ops.hpp"

namespace cuflash::cpu_blocked {

// ---- tiles of lanes -------------------------------------------------------------------------------------

inline int64_t heads_of_group(const Problem& p) { return p.heads_q / p.heads_kv; }

// The rows of queries or of keys, cut into tiles of kLanes lanes. No tile holds rows of two sequences.
class Tiling {
 public:
  static Tiling of_queries(const FullProblem& p) {
    const Ragged& r = p.f.ragged;
    return {p, query_extents(p, r).rows, r.offsets_q, p.heads_kv == 0 ? 0 : heads_of_group(p)};
  }
  static Tiling of_keys(const FullProblem& p) {
    return {p, key_extents(p, p.f.ragged).rows, p.f.ragged.offsets_k, 1};
  }

  int64_t count() const { return heads_ * (offsets_ == nullptr ? batch_ * per_head_ : per_head_); }

  struct Place {
    int64_t batch, head_kv, first_lane;  // of the lanes of this sequence and head
  };
  Place place(int64_t index) const {
    if (offsets_ == nullptr) {
      const RowIndex i = row_index(index, heads_, per_head_);
      return {i.batch, i.head, i.row * kLanes};
    }
    const int64_t tile = index % per_head_;
    int64_t below = 0, above = batch_;
    while (above - below > 1) {
      const int64_t middle = below + (above - below) / 2;
      (first_tile(middle) <= tile ? below : above) = middle;
    }
    // Tiles before the first sequence hold none of its rows: as if past them.
    const int64_t number = tile - first_tile(below);
    return {below, index / per_head_, number < 0 ? rows_ * lanes_of_row_ : number * kLanes};
  }

  // How many of the rows [first, first + count) of a sequence's tensor are its own. All are, unless offsets decrease: then
  // sequences overlap, and two tasks would write the same row.
  int64_t owned(int64_t batch, int64_t first, int64_t count) const {
    if (offsets_ == nullptr || count <= 0) return count;
    const auto owns = [&](int64_t row) { return sequence_at(offsets_, batch_, row) == batch; };
    if (!owns(first)) return 0;
    while (!owns(first + count - 1)) --count;
    return count;
  }

 private:
  Tiling(const FullProblem& p, int64_t rows, const int32_t* offsets, int64_t lanes_of_row)
      : offsets_(offsets),
        rows_(rows),
        lanes_of_row_(lanes_of_row),
        batch_(p.batch),
        heads_(p.batch == 0 ? 0 : p.heads_kv),
        per_head_(offsets == nullptr ? ceil_div(rows * lanes_of_row, kLanes)
                                     : rows * lanes_of_row / kLanes + p.batch) {}

  // Of a packed sequence. One more for each sequence before it leaves room for their last tiles, which are not full.
  int64_t first_tile(int64_t b) const {
    return clamp64(offsets_[b], 0, rows_) * lanes_of_row_ / kLanes + b;
  }

  const int32_t* offsets_;  // null: padded
  int64_t rows_, lanes_of_row_, batch_, heads_;
  int64_t per_head_;  // tiles of a head of each sequence or, packed, of all
};

// Query rows of all heads that share a key head, row by row and head by head: decode of grouped heads fills a tile, and
// neighbours see nearly the same keys.
struct QueryTile {
  QueryTile(const FullProblem& p, int64_t index) {
    const Tiling tiling = Tiling::of_queries(p);
    const Tiling::Place place = tiling.place(index);
    const int64_t group = heads_of_group(p), begin = place.first_lane;
    sequence = sequence_of(p, place.batch);
    head_kv = place.head_kv;
    const int64_t end = min64(begin + kLanes, sequence.len_q * group);
    int64_t row = begin / group, head = begin % group;  // of the group
    const int64_t owned =
        tiling.owned(place.batch, sequence.first_q + row, ceil_div(end, group) - row);
    count = static_cast<int>(clamp64((row + owned) * group - begin, 0, max64(0, end - begin)));
    for (int lane = 0; lane < count; ++lane) {
      rows[lane] = query_row(p, sequence, head_kv * group + head, row);
      if (++head == group) head = 0, ++row;
    }
  }

  Sequence sequence;
  int64_t head_kv;
  int count;
  QueryRow rows[kLanes];
};

struct KeyTile {
  KeyTile(const FullProblem& p, int64_t index) {
    const Tiling tiling = Tiling::of_keys(p);
    const Tiling::Place place = tiling.place(index);
    sequence = sequence_of(p, place.batch);
    head_kv = place.head_kv, first = place.first_lane;
    count = static_cast<int>(
        tiling.owned(place.batch, sequence.first_k + first, min64(kLanes, sequence.len_k - first)));
  }

  Sequence sequence;
  int64_t head_kv, first;
  int count;
};

// ---- steps ----------------------------------------------------------------------------------------------

// Which steps of one tile each lane sees.
class Seen {
 public:
  bool has(int lane, int step) const { return is_full_ || (word(lane, step) & bit(step)) != 0; }
  // Null where all lanes see all.
  const Visible* visible() const { return is_full_ ? nullptr : &visible_; }

  void show_all() { is_full_ = true; }
  // Lane `lane` sees [begin, end) and nothing else; for all lanes before anything is asked.
  void show(int lane, int64_t begin, int64_t end) {
    is_full_ = false;
    for (int w = 0; w < kVisibleWords; ++w)
      visible_.words[w][lane] = below(end - 32 * w) & ~below(begin - 32 * w);
  }
  void hide(int lane, int step) {
    if (is_full_) std::memset(&visible_, 0xff, sizeof visible_);
    is_full_ = false;
    word(lane, step) &= ~bit(step);
  }

 private:
  static uint32_t bit(int step) { return uint32_t{1} << step % 32; }
  // The lowest `bits` bits, of which there are 32.
  static uint32_t below(int64_t bits) {
    return static_cast<uint32_t>((uint64_t{1} << clamp64(bits, 0, 32)) - 1);
  }
  uint32_t& word(int lane, int step) { return visible_.words[step / 32][lane]; }
  const uint32_t& word(int lane, int step) const { return visible_.words[step / 32][lane]; }

  bool is_full_ = true;
  Visible visible_;
};

// What the lanes of a tile see, and the tiles of steps that follow from it.
class Steps {
 public:
  // range_of(lane): the steps of one lane. Lanes past `count` see what the last one sees.
  template <class F>
  Steps(int count, F range_of) {
    bool first = true;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Range range = lanes_[lane] = lane < count ? range_of(lane) : lanes_[lane - 1];
      all_.begin = lane == 0 ? range.begin : max64(all_.begin, range.begin);
      all_.end = lane == 0 ? range.end : min64(all_.end, range.end);
      if (range.empty()) continue;
      any_.begin = first ? range.begin : min64(any_.begin, range.begin);
      any_.end = max64(any_.end, range.end);
      first = false;
    }
  }

  // Calls f(first step, number, seen) for the tiles that some lane sees; f may hide more.
  template <class F>
  void for_tiles(F f) const {
    Seen seen;
    for (int64_t begin = any_.begin, end; begin < any_.end; begin = end) {
      end = min64((begin / kSteps + 1) * kSteps, any_.end);
      const bool is_full = all_.begin <= begin && end <= all_.end;
      seen.show_all();
      for (int lane = 0; lane < kLanes && !is_full; ++lane)
        seen.show(lane, lanes_[lane].begin - begin, lanes_[lane].end - begin);
      f(begin, static_cast<int>(end - begin), seen);
    }
  }

 private:
  Range lanes_[kLanes];
  Range any_, all_;
};

}  // namespace cuflash::cpu_blocked
