// Blocked attention on the CPU: what is done with a tile, and who works on which. The arithmetic is in level.hpp, where tiles
// lie in lane_tiles.hpp and rows.hpp.
//
// A tile of lanes is one task, and its result does not depend on the others: the same bits for any number of threads.
// Tiles of steps begin at multiples of kSteps, and steps that a lane does not see leave it as it is: its bits do
// not depend on its neighbours either.
#include "cpu/blocked/kernel.hpp"

#include <algorithm>
#include <atomic>

#include "attention/reference_rows.hpp"
#include "common/dtype_dispatch.hpp"
#include "common/thread_pool.hpp"
#include "core/plans.hpp"
#include "cpu/blocked/pairs.hpp"
#include "cpu/blocked/rows.hpp"

namespace cuflash::cpu_blocked {
namespace {

// ---- memory ---------------------------------------------------------------------------------------------

// One array of rows or lanes, in floats; one of scores.
int64_t tile_floats(const Problem& p) {
  return int64_t{kLanes} * leading(max64(p.head_dim, p.head_dim_v));
}
constexpr int64_t kScoreFloats = int64_t{kSteps} * kLanes;

// Arrays of a thread; the sizes in the plans follow from them.
constexpr int kForwardTiles = 3, kForwardScores = 2;  // q, o; panel
constexpr int kQueryTiles = 5, kQueryScores = 4;      // q, dO, dq; k, v
constexpr int kKeyTiles = 6, kKeyScores = 4;          // k, v, dk, dv; q, dO

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

// ---- one tile -------------------------------------------------------------------------------------------

// Part `split` of num_splits of the keys, and where its result goes.
struct Part {
  int64_t split, num_splits;
  TensorView o;
  RowStatsView lse;
};

// Folds rows, with the softmax state of each, into the O and LSE that are there.
void fold_outputs(const FullProblem& p, const QueryTile& tile, const OnlineSoftmax* softmax,
                  const LaneValues& factors, const float* acc) {
  dispatch_dtype(p.dtype, [&](auto tag) {
    for (int lane = 0; lane < tile.count; ++lane) {
      float row[kMaxHeadDim];
      for (int64_t c = 0; c < p.head_dim_v; ++c) row[c] = acc[c * kLanes + lane] * factors.x[lane];
      store_output<typename decltype(tag)::Type>(SingleLane{}, p, tile.rows[lane], softmax[lane],
                                                 row);
    }
  });
}

void forward_tile(const TileOps& ops, const FullProblem& p, const QueryTile& tile, const Part& part,
                  Scratch scratch) {
  const Sequence& s = tile.sequence;
  const Rows qk(ops, p.head_dim, tile.count), vo(ops, p.head_dim_v, tile.count);
  float* const q = scratch.tile();
  float* const acc = scratch.tile();
  float* const panel = scratch.tile();  // keys, then values: half the cache for both
  float* const scores = scratch.scores();
  float* const kept = scratch.scores();

  Keys keys(p, s, tile.head_kv);
  const Steps steps(tile.count, [&](int lane) {
    return split_range(tile.rows[lane].keys, part.split, part.num_splits, p.least_part());
  });
  qk.load_lanes(p.q.dtype, queries_of(tile, p.q), panel, q);
  std::fill(acc, acc + vo.floats(), 0.0f);
  LaneValues m = all_lanes(negative_infinity()), l = all_lanes(0), factors;

  steps.for_tiles([&](int64_t first, int count, Seen& seen) {
    const Pairs pairs = Pairs::of_query_lanes(tile.rows, tile.count, first, count);
    keys.find(first, count, seen);
    hide_by_tree(p, pairs, s.len_k, seen);
    const bool modified = (p.f.used & kModifiers) != 0;
    keys.load_keys(qk, panel);
    qk.products(panel, count, q, modified ? 1.0f : p.scale, scores);
    if (modified) to_scores(p, pairs, seen, scores, nullptr);
    ops.softmax(count, qk.vectors(), seen.visible(), scores, &m, &l, &factors);
    if (p.f.used & kDropout) {  // of O alone: the sum is that before dropout
      dropout_factors(pairs, seen, kept);
      multiply(count, kept, scores);
    }
    keys.load_values(vo, panel);
    vo.accumulate(scores, count, panel, seen.visible(), factors, acc);
  });

  OnlineSoftmax softmax[kLanes];
  for (int lane = 0; lane < tile.count; ++lane) {
    softmax[lane] = {m.x[lane], l.x[lane]};
    factors.x[lane] = 1;
    float weight;  // of the sink, which has no value
    if (p.f.sinks.data != nullptr && part.split == 0)
      factors.x[lane] = softmax[lane].update(p.f.sinks.load(tile.rows[lane].head), &weight);
  }
  if (p.f.accumulate_o && part.num_splits == 1) return fold_outputs(p, tile, softmax, factors, acc);
  for (int lane = 0; lane < tile.count; ++lane) {
    const QueryRow& r = tile.rows[lane];
    factors.x[lane] *= softmax[lane].inverse_sum();
    if (part.lse.data != nullptr)
      *part.lse.at(r.sequence.batch, r.head, r.token) = softmax[lane].lse();
  }
  vo.store_lanes(acc, factors, part.o.dtype, queries_of(tile, part.o));
}

// What P is rebuilt with. A row that sees nothing, by a bias of -inf, has only scores of -inf: their weights are 0.
float lse_of(const FullProblem& p, int64_t b, int64_t head, int64_t token) {
  const float lse = *p.lse.at(b, head, token);
  return lse == negative_infinity() ? 0.0f : lse;
}

// What a tile of the backward makes of its two products, Q K' not yet scaled where there are modifiers: P in `scores` and
// dS, times the derivative of the score, in `d_p`. With dropout `scores` become what O was made with.
class PairGradients {
 public:
  PairGradients(const FullProblem& p, Scratch& scratch)
      : p_(p), derivatives_(scratch.scores()), kept_(scratch.scores()) {}

  bool looks_at_pairs() const { return modified() || (p_.f.used & kDropout) != 0; }
  bool modified() const { return (p_.f.used & kModifiers) != 0; }
  float scale() const { return modified() ? 1.0f : p_.scale; }

  template <class F>  // gradients() turns scores and d_p into P and dS
  void operator()(const Pairs& pairs, const Seen& seen, int count, float* scores, float* d_p,
                  F gradients) const {
    const bool drops = (p_.f.used & kDropout) != 0, caps = (p_.f.used & kSoftcap) != 0;
    if (modified()) to_scores(p_, pairs, seen, scores, caps ? derivatives_ : nullptr);
    if (drops) {
      dropout_factors(pairs, seen, kept_);
      multiply(count, kept_, d_p);
    }
    gradients();
    if (caps) multiply(count, derivatives_, d_p);
    if (drops) multiply(count, kept_, scores);
  }

 private:
  const FullProblem& p_;
  float *derivatives_, *kept_;
};

// delta - dLSE of the lanes, where delta is rowsum(O * dO), given or of `o` and `d_o`: what each dP of a row is reduced by.
LaneValues reduced_delta(const FullProblem& p, const QueryTile& tile, const Rows& vo,
                         const float* o, const float* d_o) {
  LaneValues delta;
  if (!p.f.delta_given) vo.dot(o, d_o, &delta);
  for (int lane = 0; lane < tile.count; ++lane) {
    const QueryRow& r = tile.rows[lane];
    const int64_t b = r.sequence.batch;
    if (p.f.delta_given)
      delta.x[lane] = *p.f.delta.at(b, r.head, r.token);
    else if (p.f.delta.data != nullptr)
      *p.f.delta.at(b, r.head, r.token) = delta.x[lane];
    if (p.f.d_lse.data != nullptr) delta.x[lane] -= *p.f.d_lse.at(b, r.head, r.token);
  }
  return delta;
}

// dQ of a tile of query rows, and their delta for the tiles of keys.
void dq_tile(const TileOps& ops, const FullProblem& p, const QueryTile& tile,
             const RowStatsView& delta, Scratch scratch) {
  const Sequence& s = tile.sequence;
  const Rows qk(ops, p.head_dim, tile.count), vo(ops, p.head_dim_v, tile.count);
  float* const q = scratch.tile();
  float* const d_o = scratch.tile();
  float* const dq = scratch.tile();
  float* const k = scratch.tile();
  float* const v = scratch.tile();
  float* const scores = scratch.scores();
  float* const d_p = scratch.scores();
  const PairGradients pair_gradients(p, scratch);

  qk.load_lanes(p.q.dtype, queries_of(tile, p.q), k, q);
  vo.load_lanes(p.d_o.dtype, queries_of(tile, p.d_o), k, d_o);
  if (!p.f.delta_given)
    vo.load_lanes(p.o.dtype, queries_of(tile, p.o), k, dq);  // until delta is known
  const LaneValues lane_delta = reduced_delta(p, tile, vo, dq, d_o);
  LaneValues lse = all_lanes(0);
  for (int lane = 0; lane < tile.count; ++lane) {
    const QueryRow& r = tile.rows[lane];
    *delta.at(s.batch, r.head, r.token) = lane_delta.x[lane];
    if (!r.keys.empty()) lse.x[lane] = lse_of(p, s.batch, r.head, r.token);
  }
  std::fill(dq, dq + qk.floats(), 0.0f);

  const LaneValues ones = all_lanes(1);
  const Steps steps(tile.count, [&](int lane) { return tile.rows[lane].keys; });
  steps.for_tiles([&](int64_t first, int count, const Seen& seen) {
    qk.load(p.k, s.batch, tile.head_kv, s.first_k + first, count, k);
    vo.load(p.v, s.batch, tile.head_kv, s.first_k + first, count, v);
    qk.products(k, count, q, pair_gradients.scale(), scores);
    vo.products(v, count, d_o, 1.0f, d_p);
    pair_gradients(
        Pairs::of_query_lanes(tile.rows, tile.count, first, count), seen, count, scores, d_p, [&] {
          ops.gradients_by_lane(count, qk.vectors(), seen.visible(), lse, lane_delta, scores, d_p);
        });
    qk.accumulate(d_p, count, k, seen.visible(), ones, dq);
  });
  qk.store_gradient(dq, p.scale, p.f.accumulate_gradients, p.dq.dtype, queries_of(tile, p.dq), k,
                    q);
}

// dK and dV of a tile of keys: sums over the rows that see them, in all query heads of the group.
void dkv_tile(const TileOps& ops, const FullProblem& p, const KeyTile& tile,
              const RowStatsView& delta, Scratch scratch) {
  const Sequence& s = tile.sequence;
  const Rows qk(ops, p.head_dim, tile.count), vo(ops, p.head_dim_v, tile.count);
  float* const k = scratch.tile();
  float* const v = scratch.tile();
  float* const dk = scratch.tile();
  float* const dv = scratch.tile();
  float* const q = scratch.tile();
  float* const d_o = scratch.tile();
  float* const scores = scratch.scores();
  float* const d_p = scratch.scores();
  const PairGradients pair_gradients(p, scratch);

  const int64_t shift = centre_shift(p.mask, s.batch, s.len_q, s.len_k);
  const Steps rows(tile.count, [&](int lane) {
    return visible_rows(p.mask, shift, tile.first + lane, s.len_q);
  });
  qk.load_lanes(p.k.dtype, keys_of(tile, p.k), q, k);
  vo.load_lanes(p.v.dtype, keys_of(tile, p.v), q, v);
  std::fill(dk, dk + qk.floats(), 0.0f);
  std::fill(dv, dv + vo.floats(), 0.0f);

  const LaneValues ones = all_lanes(1);
  const int64_t group = heads_of_group(p);
  for (int64_t head = tile.head_kv * group; head < (tile.head_kv + 1) * group; ++head)
    rows.for_tiles([&](int64_t first, int count, const Seen& seen) {
      QueryRow step_rows[kSteps];
      StepValues lse, step_delta;
      for (int i = 0; i < count; ++i) {
        const int64_t token = s.first_q + first + i;
        lse.x[i] = lse_of(p, s.batch, head, token);
        step_delta.x[i] = *delta.at(s.batch, head, token);
        if (pair_gradients.looks_at_pairs()) step_rows[i] = query_row(p, s, head, first + i);
      }
      qk.load(p.q, s.batch, head, s.first_q + first, count, q);
      vo.load(p.d_o, s.batch, head, s.first_q + first, count, d_o);
      qk.products(q, count, k, pair_gradients.scale(), scores);
      vo.products(d_o, count, v, 1.0f, d_p);
      pair_gradients(Pairs::of_key_lanes(step_rows, count, tile.first, tile.count), seen, count,
                     scores, d_p, [&] {
                       ops.gradients_by_step(count, qk.vectors(), seen.visible(), lse, step_delta,
                                             scores, d_p);
                     });
      vo.accumulate(scores, count, d_o, seen.visible(), ones, dv);
      qk.accumulate(d_p, count, q, seen.visible(), ones, dk);
    });
  const bool accumulate = p.f.accumulate_gradients;
  qk.store_gradient(dk, p.scale, accumulate, p.dk.dtype, keys_of(tile, p.dk), q, k);
  vo.store_gradient(dv, 1.0f, accumulate, p.dv.dtype, keys_of(tile, p.dv), q, v);
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

// Calls f for every index of a pass of the reference, which needs no scratch.
template <class F>
void for_each_index(const LaunchContext& context, int64_t count, F f) {
  context.pool->parallel_for(count, context.capabilities.cpu_threads,
                             [&](int64_t begin, int64_t end) {
                               for (int64_t i = begin; i < end; ++i) f(i);
                             });
}

// ---- plans ----------------------------------------------------------------------------------------------

int64_t query_tiles(const FullProblem& p) { return Tiling::of_queries(p).count(); }
int64_t key_tiles(const FullProblem& p) { return Tiling::of_keys(p).count(); }

size_t scratch_bytes(int64_t tasks, int64_t floats, const Capabilities& capabilities) {
  return static_cast<size_t>(workers_of(tasks, capabilities) * floats) * sizeof(float);
}

int64_t forward_floats(const Problem& p) {
  return scratch_floats(p, kForwardTiles, kForwardScores);
}
int64_t dq_floats(const Problem& p) { return scratch_floats(p, kQueryTiles, kQueryScores); }
int64_t dkv_floats(const Problem& p) { return scratch_floats(p, kKeyTiles, kKeyScores); }

size_t backward_scratch_bytes(const FullProblem& p, const Capabilities& capabilities) {
  return std::max(scratch_bytes(query_tiles(p), dq_floats(p), capabilities),
                  scratch_bytes(key_tiles(p), dkv_floats(p), capabilities));
}

size_t decode_scratch_bytes(const FullProblem& p, int32_t num_splits,
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
  plan.workspace_bytes =
      scratch_bytes(query_tiles(FullProblem(p)), forward_floats(p), capabilities);
  return plan;
}

Plan plan_backward(const Problem& p, const Capabilities& capabilities) {
  Plan plan = plan_reference_backward(p, capabilities);
  plan.workspace_bytes += backward_scratch_bytes(FullProblem(p), capabilities);
  return plan;
}

Plan plan_decode(const Problem& p, const Capabilities& capabilities) {
  Plan plan;
  plan.num_splits = decode_splits(p);
  plan.workspace_bytes = decode_scratch_bytes(FullProblem(p), plan.num_splits, capabilities) +
                         split_workspace(p, plan.num_splits).bytes;
  plan.launches = plan.num_splits > 1 ? 2 : 1;
  return plan;
}

namespace {

void forward_part(const TileOps& ops, const FullProblem& p, int64_t task, const Part& part,
                  const Scratch& scratch) {
  const QueryTile tile(p, task);
  if (tile.count > 0) forward_tile(ops, p, tile, part, scratch);
}

}  // namespace

Status forward(const TileOps& ops, const Problem& problem, const LaunchContext& context) {
  const FullProblem p(problem);
  const Part all = {0, 1, p.o, p.lse};
  for_each_task(p, context, query_tiles(p), forward_floats(p),
                [&](int64_t task, Scratch scratch) { forward_part(ops, p, task, all, scratch); });
  return CUFLASH_SUCCESS;
}

Status backward(const TileOps& ops, const Problem& problem, const LaunchContext& context) {
  const FullProblem p(problem);
  ReferenceScratch passed;
  passed.delta = delta_scratch(p, behind(context, backward_scratch_bytes(p, context.capabilities)));
  for_each_task(p, context, query_tiles(p), dq_floats(p), [&](int64_t task, Scratch scratch) {
    const QueryTile tile(p, task);
    if (tile.count > 0) dq_tile(ops, p, tile, passed.delta, scratch);
  });
  for_each_task(p, context, key_tiles(p), dkv_floats(p), [&](int64_t task, Scratch scratch) {
    const KeyTile tile(p, task);
    if (tile.count > 0) dkv_tile(ops, p, tile, passed.delta, scratch);
  });
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    for_each_index(context, modifier_gradients(p), [&](int64_t i) {
      modifier_index<typename decltype(tag)::Type>(SingleLane{}, p, passed, i);
    });
    return CUFLASH_SUCCESS;
  });
}

Status decode(const TileOps& ops, const Problem& problem, const Plan& plan,
              const LaunchContext& context) {
  if (plan.num_splits == 1) return forward(ops, problem, context);
  const FullProblem p(problem);
  const int64_t tiles = query_tiles(p);
  ReferenceScratch passed;
  passed.num_splits = plan.num_splits;
  passed.parts =
      split_merge(problem, plan.num_splits,
                  behind(context, decode_scratch_bytes(p, plan.num_splits, context.capabilities)));
  Part first = {0, plan.num_splits, passed.parts.parts, passed.parts.lse_parts};
  // As in the tensors: sequences of a packed one count from its first row.
  if (passed.parts.batch == 1) first.o.batch_stride = first.lse.batch_stride = 0;
  for_each_task(
      p, context, plan.num_splits * tiles, forward_floats(p), [&](int64_t task, Scratch scratch) {
        Part part = first;
        part.split = task / tiles;
        part.o.data = static_cast<float*>(part.o.data) + part.split * passed.parts.part_stride;
        part.lse.data += part.split * passed.parts.lse_part_stride;
        forward_part(ops, p, task % tiles, part, scratch);
      });
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    for_each_index(context, query_rows(p), [&](int64_t i) {
      combine_index<typename decltype(tag)::Type>(SingleLane{}, p, passed, i);
    });
    return CUFLASH_SUCCESS;
  });
}

}  // namespace cuflash::cpu_blocked
