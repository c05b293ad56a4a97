// Rows of tensors and of caches as the arrays of a tile, and the products of those arrays.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/blocked/dequantise.hpp"
#include "cpu/blocked/lane_tiles.hpp"

namespace cuflash::cpu_blocked {

// Channels of a row of a panel, padding included.
constexpr int64_t leading(int64_t channels) { return round_up(channels, kChannelPad); }

inline void* address(const TensorView& t, int64_t b, int64_t head, int64_t row) {
  const int64_t offset = b * t.batch_stride + head * t.head_stride + row * t.row_stride;
  return static_cast<char*>(t.data) + offset * dtype_bytes(t.dtype);
}

// The address of a query row in `t`, by lanes; of a key.
inline auto queries_of(const QueryTile& tile, const TensorView& t) {
  return [&](int lane) {
    const QueryRow& r = tile.rows[lane];
    return address(t, r.sequence.batch, r.head, r.token);
  };
}
inline auto keys_of(const KeyTile& tile, const TensorView& t) {
  return [&](int lane) {
    const Sequence& s = tile.sequence;
    return address(t, s.batch, tile.head_kv, s.first_k + tile.first + lane);
  };
}

inline LaneValues all_lanes(float x) {
  LaneValues values;
  std::fill(values.x, values.x + kLanes, x);
  return values;
}

// The work on arrays of rows of `channels` channels beside `lanes` lanes: those of Q and K have head_dim channels, those
// of V and O head_dim_v.
class Rows {
 public:
  Rows(const TileOps& ops, int64_t channels, int lanes)
      : ops_(ops),
        channels_(static_cast<int>(channels)),
        ld_(static_cast<int>(leading(channels))),
        lanes_(lanes),
        vectors_((lanes + ops.width - 1) / ops.width) {}

  // Rows of one head, one after the other.
  void load(const TensorView& t, int64_t b, int64_t head, int64_t first, int count,
            float* panel) const {
    const void* rows[kSteps];
    for (int i = 0; i < count; ++i) rows[i] = address(t, b, head, first + i);
    ops_.load_rows(t.dtype, rows, count, channels_, panel, ld_);
  }
  // Rows in the slots of a cache. What is in none of its pages is 0.
  void load(const FullProblem& p, const TensorView& t, const CacheFormat::Side& side,
            const KeySlot* slots, int64_t head, int count, float* panel) const {
    if ((p.f.used & kQuantisedCache) == 0) {
      static constexpr float kZeros[kMaxHeadDim] = {};
      const void* rows[kSteps];
      for (int i = 0; i < count; ++i)
        rows[i] = slots[i].valid ? address(t, slots[i].entry, head, slots[i].slot) : kZeros;
      return ops_.load_rows(t.dtype, rows, count, channels_, panel, ld_);
    }
    std::fill(panel, panel + count * ld_, 0.0f);
    for (int i = 0; i < count; ++i)
      if (slots[i].valid)
        dequantise_row(quantised_row(p.f.format, side, t, slots[i], head), channels_,
                       panel + i * ld_);
  }
  // Lanes through `panel`, which is overwritten. row_of(lane) is an address.
  template <class F>
  void load_lanes(Dtype dtype, F row_of, float* panel, float* lanes) const {
    std::array<const void*, kLanes> rows{};
    for (int i = 0; i < lanes_; ++i) rows[static_cast<size_t>(i)] = row_of(i);
    ops_.load_rows(dtype, rows.data(), lanes_, channels_, panel, ld_);
    ops_.transpose(panel, ld_, lanes_, channels_, vectors_, lanes);
  }
  template <class F>
  void store_lanes(const float* lanes, const LaneValues& factors, Dtype dtype, F row_of) const {
    void* rows[kLanes];
    for (int i = 0; i < lanes_; ++i) rows[i] = row_of(i);
    ops_.store_rows(dtype, lanes, factors, lanes_, channels_, rows);
  }
  // A gradient, `scale` times the lanes: written, or added to what is there. `panel` and `there` are overwritten.
  template <class F>
  void store_gradient(float* lanes, float scale, bool accumulate, Dtype dtype, F row_of,
                      float* panel, float* there) const {
    if (!accumulate) return store_lanes(lanes, all_lanes(scale), dtype, row_of);
    load_lanes(dtype, row_of, panel, there);
    for (int n = 0; n < channels_ * kLanes; ++n) lanes[n] = lanes[n] * scale + there[n];
    store_lanes(lanes, all_lanes(1), dtype, row_of);
  }

  void dot(const float* a, const float* b, LaneValues* sums) const {
    ops_.dot(a, b, channels_, vectors_, sums);
  }
  void products(const float* panel, int count, const float* lanes, float scale,
                float* scores) const {
    ops_.products(panel, ld_, count, lanes, channels_, vectors_, scale, scores);
  }
  // Where the panel holds NaN or infinity, terms that a lane does not see are left out.
  void accumulate(const float* weights, int count, const float* panel, const Visible* visible,
                  const LaneValues& factors, float* acc) const {
    const bool guarded = visible != nullptr && !ops_.is_finite(panel, ld_, count, channels_);
    ops_.accumulate(weights, count, panel, ld_, channels_, vectors_, guarded ? visible : nullptr,
                    factors, acc);
  }

  int vectors() const { return vectors_; }
  int64_t floats() const { return int64_t{kLanes} * ld_; }

 private:
  const TileOps& ops_;
  int channels_, ld_, lanes_, vectors_;
};

// Keys and values of one sequence and head, a tile of steps at a time: rows of tensors, or in the slots of a cache.
class Keys {
 public:
  Keys(const FullProblem& p, const Sequence& s, int64_t head_kv)
      : p_(p),
        s_(s),
        head_kv_(head_kv),
        in_slots_((p.f.used & (kPagedCache | kCacheEntries | kQuantisedCache)) != 0) {}

  // Turns to the keys [first, first + count). Those in no page of the cache are hidden from all lanes.
  void find(int64_t first, int count, Seen& seen) {
    first_ = s_.first_k + first, count_ = count;
    for (int i = 0; i < count && in_slots_; ++i) {
      slots_[i] = key_slot(p_.f.paging, s_.batch, first_ + i);
      for (int lane = 0; lane < kLanes && !slots_[i].valid; ++lane) seen.hide(lane, i);
    }
  }
  void load_keys(const Rows& qk, float* panel) const { load(qk, p_.k, p_.f.format.k, panel); }
  void load_values(const Rows& vo, float* panel) const { load(vo, p_.v, p_.f.format.v, panel); }

 private:
  void load(const Rows& rows, const TensorView& t, const CacheFormat::Side& side,
            float* panel) const {
    if (in_slots_)
      rows.load(p_, t, side, slots_, head_kv_, count_, panel);
    else
      rows.load(t, s_.batch, head_kv_, first_, count_, panel);
  }

  const FullProblem& p_;
  const Sequence& s_;
  int64_t head_kv_, first_ = 0;
  int count_ = 0;
  bool in_slots_;
  KeySlot slots_[kSteps];
};

}  // namespace cuflash::cpu_blocked
