// Blocked attention on the CPU: which tiles there are, who works on them, where their rows lie. The arithmetic is in
// level.hpp.
//
// A tile of lanes is one task, and its result does not depend on the others: the same bits for any number of threads.
// Tiles of steps begin at multiples of kSteps, and steps that a lane does not see leave it as it is: its bits do
// not depend on its neighbours either.
#include "cpu/blocked/kernel.hpp"

#include <algorithm>
#include <atomic>

#include "attention/key_range.hpp"
#include "attention/online_softmax.hpp"
#include "attention/reference.hpp"
#include "common/thread_pool.hpp"
#include "core/plans.hpp"
#include "cpu/reference.hpp"

namespace cuflash::cpu_blocked {
namespace {

// ---- tiles of lanes -------------------------------------------------------------------------------------

int64_t heads_of_group(const Problem& p) { return p.heads_q / p.heads_kv; }

// Query rows of all heads that share a key head, row by row and head by head: decode of grouped heads fills a
// tile, and neighbours see nearly the same keys.
int64_t query_tiles_of_head(const Problem& p) {
  return ceil_div(p.len_q * heads_of_group(p), kLanes);
}
int64_t query_tiles(const Problem& p) {
  return p.heads_kv == 0 ? 0 : p.batch * p.heads_kv * query_tiles_of_head(p);
}

class QueryTile {
 public:
  QueryTile(const Problem& p, int64_t index) : group_(heads_of_group(p)) {
    const RowIndex i = row_index(index, p.heads_kv, query_tiles_of_head(p));
    b = i.batch, head_kv = i.head, first_ = i.row * kLanes;
    count = static_cast<int>(min64(kLanes, p.len_q * group_ - first_));
  }
  int64_t row(int lane) const { return (first_ + lane) / group_; }
  int64_t head(int lane) const { return head_kv * group_ + (first_ + lane) % group_; }

  int64_t b, head_kv;
  int count;

 private:
  int64_t group_, first_;
};

int64_t key_tiles_of_head(const Problem& p) { return ceil_div(p.len_k, kLanes); }
int64_t key_tiles(const Problem& p) { return p.batch * p.heads_kv * key_tiles_of_head(p); }

struct KeyTile {
  KeyTile(const Problem& p, int64_t index) {
    const RowIndex i = row_index(index, p.heads_kv, key_tiles_of_head(p));
    b = i.batch, head_kv = i.head, first = i.row * kLanes;
    count = static_cast<int>(min64(kLanes, p.len_k - first));
  }
  int64_t b, head_kv, first;
  int count;
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

  // Calls f(first step, number, visible) for the tiles that some lane sees; visible is null where all see all.
  template <class F>
  void for_tiles(F f) const {
    Visible visible;
    for (int64_t begin = any_.begin, end; begin < any_.end; begin = end) {
      end = min64((begin / kSteps + 1) * kSteps, any_.end);
      const bool is_full = all_.begin <= begin && end <= all_.end;
      for (int lane = 0; lane < kLanes && !is_full; ++lane) {
        visible.begin[lane] = static_cast<int32_t>(clamp64(lanes_[lane].begin - begin, 0, kSteps));
        visible.end[lane] = static_cast<int32_t>(clamp64(lanes_[lane].end - begin, 0, kSteps));
      }
      f(begin, static_cast<int>(end - begin), is_full ? nullptr : &visible);
    }
  }

 private:
  Range lanes_[kLanes];
  Range any_, all_;
};

// ---- memory ---------------------------------------------------------------------------------------------

int leading(const Problem& p) { return static_cast<int>(round_up(p.head_dim, kChannelPad)); }

// One array of rows or lanes, in floats; one of scores.
int64_t tile_floats(const Problem& p) { return int64_t{kLanes} * leading(p); }
constexpr int64_t kScoreFloats = int64_t{kSteps} * kLanes;

// Arrays of a thread; the sizes in the plans follow from them.
constexpr int kForwardTiles = 3, kForwardScores = 1;  // q, o; panel
constexpr int kQueryTiles = 5, kQueryScores = 2;      // q, dO, dq; k, v
constexpr int kKeyTiles = 6, kKeyScores = 2;          // k, v, dk, dv; q, dO

int64_t scratch_floats(const Problem& p, int tiles, int scores) {
  return tiles * tile_floats(p) + scores * kScoreFloats;
}

class Scratch {
 public:
  Scratch(const Problem& p, float* memory) : tile_(tile_floats(p)), next_(memory) {}
  float* tile() { return take(tile_); }
  float* scores() { return take(kScoreFloats); }

 private:
  float* take(int64_t floats) {
    float* const here = next_;
    next_ += floats;
    return here;
  }
  int64_t tile_;
  float* next_;
};

void* address(const TensorView& t, int64_t b, int64_t head, int64_t row) {
  const int64_t offset = b * t.batch_stride + head * t.head_stride + row * t.row_stride;
  return static_cast<char*>(t.data) + offset * dtype_bytes(t.dtype);
}

// The problem's tiles as arrays of floats.
class Loader {
 public:
  Loader(const TileOps& ops, const Problem& p)
      : ops_(ops), head_dim_(static_cast<int>(p.head_dim)), ld_(leading(p)) {}

  // Rows of one head, one after the other.
  void rows(const TensorView& t, int64_t b, int64_t head, int64_t first, int count,
            float* panel) const {
    const void* rows[kSteps];
    for (int i = 0; i < count; ++i) rows[i] = address(t, b, head, first + i);
    ops_.load_rows(t.dtype, rows, count, head_dim_, panel, ld_);
  }
  // Lanes through `panel`, which is overwritten. row_of(lane) is an address.
  template <class F>
  void lanes(Dtype dtype, int count, F row_of, float* panel, float* lanes) const {
    const void* rows[kLanes];
    for (int i = 0; i < count; ++i) rows[i] = row_of(i);
    ops_.load_rows(dtype, rows, count, head_dim_, panel, ld_);
    ops_.transpose(panel, ld_, count, head_dim_, vectors(count), lanes);
  }
  template <class F>
  void store(const float* lanes, const LaneValues& factors, Dtype dtype, int count,
             F row_of) const {
    void* rows[kLanes];
    for (int i = 0; i < count; ++i) rows[i] = row_of(i);
    ops_.store_rows(dtype, lanes, factors, count, head_dim_, rows);
  }
  int vectors(int count) const { return (count + ops_.width - 1) / ops_.width; }

 private:
  const TileOps& ops_;
  int head_dim_, ld_;
};

LaneValues all_lanes(float x) {
  LaneValues values;
  std::fill(values.x, values.x + kLanes, x);
  return values;
}

// ---- one tile -------------------------------------------------------------------------------------------

// Part `split` of num_splits of a tile of query rows, to o and, if it is wanted, lse.
void forward_tile(const TileOps& ops, const Problem& p, const QueryTile& tile, int64_t split,
                  int64_t num_splits, const TensorView& o, const RowStatsView& lse,
                  Scratch scratch) {
  const int head_dim = static_cast<int>(p.head_dim), ld = leading(p);
  const Loader loader(ops, p);
  const int vectors = loader.vectors(tile.count);
  float* const q = scratch.tile();
  float* const acc = scratch.tile();
  float* const panel = scratch.tile();  // keys, then values: half the cache for both
  float* const scores = scratch.scores();

  const int64_t len_k = p.keys_of(tile.b);
  const int64_t shift = centre_shift(p.mask, tile.b, p.len_q, len_k);
  const Steps keys(tile.count, [&](int lane) {
    return split_range(visible_keys(p.mask, shift, tile.row(lane), len_k), split, num_splits,
                       p.least_part());
  });
  const auto row_of = [&](const TensorView& t) {
    return [&](int lane) { return address(t, tile.b, tile.head(lane), tile.row(lane)); };
  };
  loader.lanes(p.q.dtype, tile.count, row_of(p.q), panel, q);
  std::fill(acc, acc + tile_floats(p), 0.0f);
  LaneValues m = all_lanes(negative_infinity()), l = all_lanes(0), factors;

  keys.for_tiles([&](int64_t first, int count, const Visible* visible) {
    loader.rows(p.k, tile.b, tile.head_kv, first, count, panel);
    ops.products(panel, ld, count, q, head_dim, vectors, p.scale, scores);
    ops.softmax(count, vectors, visible, scores, &m, &l, &factors);
    loader.rows(p.v, tile.b, tile.head_kv, first, count, panel);
    const bool guarded = visible != nullptr && !ops.is_finite(panel, ld, count, head_dim);
    ops.accumulate(scores, count, panel, ld, head_dim, vectors, guarded ? visible : nullptr,
                   factors, acc);
  });

  for (int lane = 0; lane < tile.count; ++lane) {
    OnlineSoftmax softmax;
    softmax.m = m.x[lane], softmax.l = l.x[lane];
    factors.x[lane] = softmax.inverse_sum();
    if (lse.data != nullptr) *lse.at(tile.b, tile.head(lane), tile.row(lane)) = softmax.lse();
  }
  loader.store(acc, factors, o.dtype, tile.count, row_of(o));
}

int64_t delta_index(const Problem& p, int64_t b, int64_t head, int64_t row) {
  return (b * p.heads_q + head) * p.len_q + row;
}

// dQ of a tile of query rows, and their delta for the tiles of keys.
void dq_tile(const TileOps& ops, const Problem& p, const QueryTile& tile, float* delta,
             Scratch scratch) {
  const int head_dim = static_cast<int>(p.head_dim), ld = leading(p);
  const Loader loader(ops, p);
  const int vectors = loader.vectors(tile.count);
  float* const q = scratch.tile();
  float* const d_o = scratch.tile();
  float* const dq = scratch.tile();
  float* const k = scratch.tile();
  float* const v = scratch.tile();
  float* const scores = scratch.scores();
  float* const d_p = scratch.scores();

  const int64_t shift = centre_shift(p.mask, tile.b, p.len_q, p.len_k);
  const auto range_of = [&](int lane) {
    return visible_keys(p.mask, shift, tile.row(lane), p.len_k);
  };
  const auto row_of = [&](const TensorView& t) {
    return [&](int lane) { return address(t, tile.b, tile.head(lane), tile.row(lane)); };
  };
  loader.lanes(p.q.dtype, tile.count, row_of(p.q), k, q);
  loader.lanes(p.d_o.dtype, tile.count, row_of(p.d_o), k, d_o);
  loader.lanes(p.o.dtype, tile.count, row_of(p.o), k, dq);  // O, until delta is known
  LaneValues lane_delta, lse = all_lanes(0);
  ops.dot(dq, d_o, head_dim, vectors, &lane_delta);
  for (int lane = 0; lane < tile.count; ++lane) {
    const int64_t head = tile.head(lane), row = tile.row(lane);
    delta[delta_index(p, tile.b, head, row)] = lane_delta.x[lane];
    if (!range_of(lane).empty()) lse.x[lane] = *p.lse.at(tile.b, head, row);
  }
  std::fill(dq, dq + tile_floats(p), 0.0f);

  const LaneValues ones = all_lanes(1);
  Steps(tile.count, range_of).for_tiles([&](int64_t first, int count, const Visible* visible) {
    loader.rows(p.k, tile.b, tile.head_kv, first, count, k);
    loader.rows(p.v, tile.b, tile.head_kv, first, count, v);
    ops.products(k, ld, count, q, head_dim, vectors, p.scale, scores);
    ops.products(v, ld, count, d_o, head_dim, vectors, 1.0f, d_p);
    ops.gradients_by_lane(count, vectors, visible, lse, lane_delta, scores, d_p);
    const bool guarded = visible != nullptr && !ops.is_finite(k, ld, count, head_dim);
    ops.accumulate(d_p, count, k, ld, head_dim, vectors, guarded ? visible : nullptr, ones, dq);
  });
  loader.store(dq, all_lanes(p.scale), p.dq.dtype, tile.count, row_of(p.dq));
}

// dK and dV of a tile of keys: sums over the rows that see them, in all query heads of the group.
void dkv_tile(const TileOps& ops, const Problem& p, const KeyTile& tile, const float* delta,
              Scratch scratch) {
  const int head_dim = static_cast<int>(p.head_dim), ld = leading(p);
  const Loader loader(ops, p);
  const int vectors = loader.vectors(tile.count);
  float* const k = scratch.tile();
  float* const v = scratch.tile();
  float* const dk = scratch.tile();
  float* const dv = scratch.tile();
  float* const q = scratch.tile();
  float* const d_o = scratch.tile();
  float* const scores = scratch.scores();
  float* const d_p = scratch.scores();

  const int64_t shift = centre_shift(p.mask, tile.b, p.len_q, p.len_k);
  const Steps rows(tile.count, [&](int lane) {
    return visible_rows(p.mask, shift, tile.first + lane, p.len_q);
  });
  const auto row_of = [&](const TensorView& t) {
    return [&](int lane) { return address(t, tile.b, tile.head_kv, tile.first + lane); };
  };
  loader.lanes(p.k.dtype, tile.count, row_of(p.k), q, k);
  loader.lanes(p.v.dtype, tile.count, row_of(p.v), q, v);
  std::fill(dk, dk + tile_floats(p), 0.0f);
  std::fill(dv, dv + tile_floats(p), 0.0f);

  const LaneValues ones = all_lanes(1);
  const int64_t group = heads_of_group(p);
  for (int64_t head = tile.head_kv * group; head < (tile.head_kv + 1) * group; ++head)
    rows.for_tiles([&](int64_t first, int count, const Visible* visible) {
      StepValues lse, step_delta;
      for (int s = 0; s < count; ++s) {
        lse.x[s] = *p.lse.at(tile.b, head, first + s);
        step_delta.x[s] = delta[delta_index(p, tile.b, head, first + s)];
      }
      loader.rows(p.q, tile.b, head, first, count, q);
      loader.rows(p.d_o, tile.b, head, first, count, d_o);
      ops.products(q, ld, count, k, head_dim, vectors, p.scale, scores);
      ops.products(d_o, ld, count, v, head_dim, vectors, 1.0f, d_p);
      ops.gradients_by_step(count, vectors, visible, lse, step_delta, scores, d_p);
      const auto guard = [&](const float* panel) {
        return visible != nullptr && !ops.is_finite(panel, ld, count, head_dim) ? visible : nullptr;
      };
      ops.accumulate(scores, count, d_o, ld, head_dim, vectors, guard(d_o), ones, dv);
      ops.accumulate(d_p, count, q, ld, head_dim, vectors, guard(q), ones, dk);
    });
  loader.store(dk, all_lanes(p.scale), p.dk.dtype, tile.count, row_of(p.dk));
  loader.store(dv, ones, p.dv.dtype, tile.count, row_of(p.dv));
}

// ---- threads --------------------------------------------------------------------------------------------

int workers_of(int64_t tasks, const Capabilities& capabilities) {
  return static_cast<int>(min64(tasks, capabilities.cpu_threads));
}

// Calls f(task, the scratch of its thread) for every task. A worker takes the next task when it has done one: under
// a causal mask they differ in cost.
template <class F>
void for_each_task(const Problem& p, const LaunchContext& context, int64_t tasks,
                   int64_t scratch_floats, F f) {
  const int workers = workers_of(tasks, context.capabilities);
  std::atomic<int64_t> next{0};
  context.pool->parallel_for(workers, workers, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
        f(task, Scratch(p, static_cast<float*>(context.workspace) + worker * scratch_floats));
  });
}

size_t scratch_bytes(int64_t tasks, int64_t floats, const Capabilities& capabilities) {
  return static_cast<size_t>(workers_of(tasks, capabilities) * floats) * sizeof(float);
}

int64_t forward_floats(const Problem& p) {
  return scratch_floats(p, kForwardTiles, kForwardScores);
}
int64_t dq_floats(const Problem& p) { return scratch_floats(p, kQueryTiles, kQueryScores); }
int64_t dkv_floats(const Problem& p) { return scratch_floats(p, kKeyTiles, kKeyScores); }

size_t backward_scratch_bytes(const Problem& p, const Capabilities& capabilities) {
  return std::max(scratch_bytes(query_tiles(p), dq_floats(p), capabilities),
                  scratch_bytes(key_tiles(p), dkv_floats(p), capabilities));
}

size_t decode_scratch_bytes(const Problem& p, int32_t num_splits,
                            const Capabilities& capabilities) {
  return scratch_bytes(num_splits * query_tiles(p), forward_floats(p), capabilities);
}

// Work for this many threads, in parts of no fewer than this many keys. What the parts are follows from the shape alone,
// so that the bits of a result do not depend on the number of threads.
constexpr int64_t kDecodeTasks = 64, kPartKeys = 1024;

int32_t decode_splits(const Problem& p) {
  if (p.num_splits > 0) return p.num_splits;
  if (p.batch_invariant) return invariant_splits(p.len_k);
  const int64_t tiles = p.batch * p.heads_kv;
  if (tiles == 0) return 1;
  return static_cast<int32_t>(
      clamp64(min64(p.len_k / kPartKeys, ceil_div(kDecodeTasks, tiles)), 1, kDecodeTasks));
}

char* behind(const LaunchContext& context, size_t bytes) {
  return static_cast<char*>(context.workspace) + bytes;
}

}  // namespace

Plan plan_forward(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  plan.workspace_bytes = scratch_bytes(query_tiles(p), forward_floats(p), capabilities);
  return plan;
}

Plan plan_backward(const Problem& p, const Capabilities& capabilities) {
  Plan plan = plan_delta(p, capabilities);
  plan.workspace_bytes += backward_scratch_bytes(p, capabilities);
  return plan;
}

Plan plan_decode(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  plan.num_splits = decode_splits(p);
  plan.workspace_bytes = decode_scratch_bytes(p, plan.num_splits, capabilities) +
                         split_workspace(p, plan.num_splits).bytes;
  plan.launches = plan.num_splits > 1 ? 2 : 1;
  return plan;
}

Status forward(const TileOps& ops, const Problem& p, const LaunchContext& context) {
  for_each_task(p, context, query_tiles(p), forward_floats(p), [&](int64_t task, Scratch scratch) {
    forward_tile(ops, p, QueryTile(p, task), 0, 1, p.o, p.lse, scratch);
  });
  return CUFLASH_SUCCESS;
}

Status backward(const TileOps& ops, const Problem& p, const LaunchContext& context) {
  float* const delta =
      reinterpret_cast<float*>(behind(context, backward_scratch_bytes(p, context.capabilities)));
  for_each_task(p, context, query_tiles(p), dq_floats(p), [&](int64_t task, Scratch scratch) {
    dq_tile(ops, p, QueryTile(p, task), delta, scratch);
  });
  for_each_task(p, context, key_tiles(p), dkv_floats(p), [&](int64_t task, Scratch scratch) {
    dkv_tile(ops, p, KeyTile(p, task), delta, scratch);
  });
  return CUFLASH_SUCCESS;
}

Status decode(const TileOps& ops, const Problem& p, const Plan& plan,
              const LaunchContext& context) {
  if (plan.num_splits == 1) return forward(ops, p, context);
  const int64_t tiles = query_tiles(p);
  const MergeProblem parts =
      split_merge(p, plan.num_splits,
                  behind(context, decode_scratch_bytes(p, plan.num_splits, context.capabilities)));
  for_each_task(
      p, context, plan.num_splits * tiles, forward_floats(p), [&](int64_t task, Scratch scratch) {
        const int64_t split = task / tiles;
        TensorView o = parts.parts;
        o.data = static_cast<float*>(o.data) + split * parts.part_stride;
        RowStatsView lse = parts.lse_parts;
        lse.data += split * parts.lse_part_stride;
        forward_tile(ops, p, QueryTile(p, task % tiles), split, plan.num_splits, o, lse, scratch);
      });
  return merge_states_cpu(parts, context);
}

}  // namespace cuflash::cpu_blocked
