#include "kernels/draws.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr int64_t kLongLengths[] = {1025, 1100, 1536, 2048, 2049, 4100};
constexpr int64_t kHeadDims[] = {1, 8, 32, 40, 64, 72, 80, 96, 128};
constexpr int64_t kLargeHeadDims[] = {129, 136, 160, 192, 200, 256};
constexpr int64_t kValueDims[] = {1, 16, 40, 64, 128, 200, 256};

bool one_in(Random& random, int64_t n) { return random.below(n) == 0; }

// Multiply-adds of the widest product, or about as much.
int64_t work(const Shape& s) {
  return s.batch * s.heads_q * s.len_q * s.len_k * std::max({s.head_dim, s.dim_v(), int64_t{32}});
}

// The number of keys and head_dim are drawn first and kept: few rows and heads make up for many keys. Most problems are
// small, so that many fit into the time.
Shape random_shape(Random& random, Operation operation, bool every_feature) {
  Shape s;
  s.len_k = one_in(random, 6) ? random.pick(kLongLengths) : random.pick(kLengths);
  s.head_dim = one_in(random, 3)    ? random.pick(kLargeHeadDims)
               : one_in(random, 10) ? 1 + random.below(256)
                                    : random.pick(kHeadDims);
  if (every_feature && one_in(random, 5)) {
    const bool backward = operation == Operation::kBackward;
    if (!backward && one_in(random, 4)) s.head_dim = one_in(random, 2) ? 512 : 576;
    s.head_dim_v = !backward && one_in(random, 8) ? 512 : random.pick(kValueDims);
  }
  const int64_t limit = one_in(random, 40) ? 20'000'000 : 2'000'000;
  do {
    const Heads& heads = random.pick(kHeads);
    s.batch = one_in(random, 100) ? 0 : 1 + random.below(3);
    s.heads_q = heads.q, s.heads_kv = heads.kv;
    s.len_q = one_in(random, operation == Operation::kDecode ? 4 : 16) ? random.pick(kLengths)
              : operation == Operation::kDecode                        ? 1 + random.below(4)
                                                                       : random.below(140);
  } while (work(s) > limit && (s.len_q > 1 || s.heads_q > 1 || s.batch > 1));
  return s;
}

MaskSpec random_mask(Random& random, const Shape& s) {
  MaskSpec mask;
  const int64_t kind = random.below(5);
  if (kind == 0) return mask;
  mask.causal = kind <= 2 || kind == 4;
  mask.window = kind >= 3;
  mask.align = static_cast<int32_t>(random.below(4));
  const int64_t span = std::max(s.len_q, s.len_k) + 2;
  mask.offset = random.below(2 * span) - span;
  for (int64_t b = 0; b < s.batch; ++b)
    mask.offsets.push_back(static_cast<int32_t>(random.below(2 * span) - span));
  constexpr int64_t kReaches[] = {-1, 0, 1, 7, 64, 100};
  mask.left = random.below(4) ? random.pick(kReaches) : random.below(span);
  mask.right = random.below(4) ? random.pick(kReaches) : random.below(span);
  if (mask.align != CUFLASH_ALIGN_OFFSET) mask.offset = 0;
  if (mask.align != CUFLASH_ALIGN_DEVICE_OFFSETS) mask.offsets.clear();
  return mask;
}

std::vector<int32_t> random_lengths(Random& random, int64_t batch, int64_t most) {
  std::vector<int32_t> list;
  for (int64_t b = 0; b < batch; ++b)
    list.push_back(static_cast<int32_t>(one_in(random, 4) ? 0 : random.below(most + 1)));
  return list;
}

// How a quantised cache keeps its elements.
CacheSpec random_elements(Random& random) {
  constexpr int64_t kGroups[] = {0, 0, 32, 64, 128};
  CacheSpec spec;
  spec.k = random.pick(kStoredDtypes);
  spec.v = one_in(random, 3) ? spec.k : random.pick(kStoredDtypes);
  spec.scales = !one_in(random, 4);
  spec.zeros = one_in(random, 2);
  spec.per_page = one_in(random, 2);
  spec.per_head = one_in(random, 2);
  spec.per_slot = one_in(random, 2);
  spec.group = random.pick(kGroups);
  spec.scale_dtype = random.pick(kAllDtypes);
  spec.gap = random.below(5);
  return spec;
}

// Features that need not be in every kernel.
void add_features(Random& random, Draw& draw) {
  Case& c = draw.c;
  Shape& s = c.shape;
  const bool backward = c.operation == Operation::kBackward,
             decode = c.operation == Operation::kDecode;
  const auto chance = [&](int64_t n) { return one_in(random, n); };
  if (chance(2)) {  // ragged
    if (chance(2)) c.lengths_q = random_lengths(random, s.batch, s.len_q);
    if (!decode && chance(2)) c.lengths = random_lengths(random, s.batch, s.len_k);
    if (chance(2)) c.packing_q = {true, random.below(3), random.below(3)};
    if (!decode && chance(2)) c.packing_k = {true, random.below(3), random.below(3)};
    if (chance(3)) c.left_pad = random_lengths(random, s.batch, std::min<int64_t>(s.len_k, 5));
  }
  if (chance(4)) c.softcap = chance(2) ? 0.5f : 20;
  if (chance(4)) c.bias = {chance(2), chance(2), chance(2), random.pick(kAllDtypes)};
  if (chance(4)) c.slopes = {chance(2), random.pick(kAllDtypes)};
  if (chance(4)) c.sinks = random.pick(kAllDtypes);
  if (chance(4)) c.dropout = {chance(8) ? 1 : 0.25f, random.bits(), chance(2) ? 0 : random.bits()};
  if (!backward && chance(4)) {
    const int64_t bits = chance(3) ? s.len_q : 1 + random.below(chance(4) ? 1100 : 70);
    c.tree = random_tree(s, bits, chance(2), random.bits());
    c.tree_spare = random.below(3);
  }
  c.wide = chance(3);
  if (backward) {
    c.d_lse = chance(4);
    c.delta = chance(4) ? Delta::kWanted : chance(3) ? Delta::kGiven : Delta::kNone;
    draw.accumulates = chance(6);
  } else {
    draw.accumulates = c.want_lse && chance(6);
    draw.v_is_k_prefix = s.dim_v() <= s.head_dim && chance(6);
  }
  c.wide = c.wide || draw.accumulates;
  if (decode && chance(2)) {
    constexpr int64_t kPageSizes[] = {1, 2, 3, 16, 19, 64};
    PoolSpec pool;
    pool.page_size = chance(3) ? 1 + random.below(64) : random.pick(kPageSizes);
    pool.csr = chance(2);
    pool.wide_ids = chance(3);
    pool.slots_outermost = chance(2);
    constexpr int32_t kUnused[] = {0x7fffffff, -1, 0, std::numeric_limits<int32_t>::min()};
    pool.unused_id = random.pick(kUnused);
    if (chance(3)) pool.layout_seed = 1 + random.bits() % 1000000;
    draw.pool = pool;
  } else if (decode) {
    draw.chosen_entries = chance(3);
  }
  if (decode && chance(2)) draw.stored = random_elements(random);
}

Extents memory_of(const Case& c, Role role) {
  return memory_extents(c.extents(role), c.rows(role));
}

// q, k and v as rows [B, S, Hq + 2 Hkv, D] of one tensor would lie; likewise their gradients.
void pack_qkv(Case& c) {
  const Shape& s = c.shape;
  const auto place = [&](Role role, int64_t first_head) {
    const int64_t row = (s.heads_q + 2 * s.heads_kv) * s.head_dim;
    c.layouts[role] =
        Layout{first_head * s.head_dim, memory_of(c, role).rows * row, s.head_dim, row, false};
  };
  for (const Role role : {kQ, kDq}) place(role, 0);
  for (const Role role : {kK, kDk}) place(role, s.heads_q);
  for (const Role role : {kV, kDv}) place(role, s.heads_q + s.heads_kv);
}

void arrange(Random& random, Draw& draw) {
  Case& c = draw.c;
  const Shape& s = c.shape;
  constexpr Arrangement kAll[] = {Arrangement::kDense, Arrangement::kRowsOutermost,
                                  Arrangement::kPackedQkv, Arrangement::kRandom,
                                  Arrangement::kRandom};
  draw.arrangement = random.pick(kAll);
  if (draw.arrangement == Arrangement::kPackedQkv &&
      (c.operation == Operation::kDecode || s.dim_v() != s.head_dim || draw.v_is_k_prefix))
    draw.arrangement = Arrangement::kRandom;
  if (draw.arrangement == Arrangement::kPackedQkv) pack_qkv(c);
  if (draw.arrangement == Arrangement::kRandom) c.layout_seed = 1 + random.bits() % 1000000;
  if (draw.arrangement == Arrangement::kRowsOutermost)
    for (const Role role : {kQ, kK, kV, kO, kLse, kDo, kDq, kDk, kDv})
      c.layouts[role] = bshd_layout(memory_of(c, role));
  if (draw.arrangement == Arrangement::kPackedQkv || !one_in(random, 5)) return;
  for (size_t n = 0; n < 4; ++n) {
    const Role role = kRepeatable[n];
    if (one_in(random, 2) || (role == kDo && c.operation != Operation::kBackward)) continue;
    // The sequences of a packed tensor are rows of one batch entry; left padding puts keys of different numbers at one place.
    const bool aligned = !c.rows(role).packed && c.left_pad.empty();
    draw.repeats[n] = {aligned && one_in(random, 2), one_in(random, 2), one_in(random, 6)};
    Layout layout = c.layout(role);
    layout.dense = false;
    if (draw.repeats[n].batch) layout.batch_stride = 0;
    if (draw.repeats[n].head) layout.head_stride = 0;
    if (draw.repeats[n].row) layout.row_stride = 0;
    c.layouts[role] = layout;
  }
}

// The quantised cache of a draw that has one.
CacheSpec cache_of(const Draw& draw) {
  CacheSpec spec = *draw.stored;
  if (draw.pool) {
    spec.layout = draw.pool->csr ? CUFLASH_CACHE_PAGED_CSR : CUFLASH_CACHE_PAGED;
    spec.page_size = draw.pool->page_size;
    spec.wide_ids = draw.pool->wide_ids;
    spec.slots_outermost = draw.pool->slots_outermost;
    spec.unused_id = draw.pool->unused_id;
  } else {
    spec.slots_outermost = draw.arrangement == Arrangement::kRowsOutermost;
  }
  spec.entries = draw.chosen_entries;
  spec.v_is_k_prefix = draw.v_is_k_prefix;
  spec.seed = draw.seed;
  return spec;
}

bool repeats_something(const Draw& draw) {
  return std::any_of(std::begin(draw.repeats), std::end(draw.repeats),
                     [](const Repeats& repeats) { return repeats.any(); });
}

// Elements that lie at the same place have the same value: that of the first sequence, head or row.
void repeat_values(const Draw& draw, Inputs& inputs) {
  Tensor* const tensors[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.d_o};
  for (size_t n = 0; n < 4; ++n) {
    const Repeats& repeats = draw.repeats[n];
    if (!repeats.any()) continue;
    const Tensor source = *tensors[n];
    const bool one_sequence = repeats.batch || (repeats.row && draw.c.rows(kRepeatable[n]).packed);
    *tensors[n] = Tensor::from(
        source.batch, source.heads, source.rows, source.dim, [&](auto b, auto h, auto r, auto ch) {
          return source.at(one_sequence ? 0 : b, repeats.head ? 0 : h, repeats.row ? 0 : r, ch);
        });
  }
}

}  // namespace

std::string describe(const Draw& draw) {
  std::ostringstream text;
  text << describe(draw.c) << " data=" << static_cast<int>(draw.kind) << " seed=" << draw.seed;
  for (size_t n = 0; n < 4; ++n)
    if (const Repeats& r = draw.repeats[n]; r.any())
      text << " repeats" << n << '(' << (r.batch ? "B" : "") << (r.head ? "H" : "")
           << (r.row ? "S" : "") << ')';
  if (draw.pool)
    text << " pages(" << draw.pool->page_size << (draw.pool->csr ? " csr" : "")
         << (draw.pool->wide_ids ? " int64" : "")
         << (draw.pool->slots_outermost ? " slots outermost" : "") << ')';
  if (draw.chosen_entries) text << " chosen_entries";
  if (draw.stored)
    text << " stored(" << draw.stored->k << ' ' << draw.stored->v
         << (draw.stored->scales ? " scales" : "") << (draw.stored->zeros ? " zeros" : "")
         << (draw.stored->per_page ? " P" : " 1") << (draw.stored->per_head ? "H" : "1")
         << (draw.stored->per_slot ? "S" : "1") << " group " << draw.stored->group << ' '
         << name_of(draw.stored->scale_dtype) << " gap " << draw.stored->gap << ')';
  if (draw.v_is_k_prefix) text << " v_is_k_prefix";
  if (draw.accumulates) text << " accumulates";
  return text.str();
}

Draw random_draw(Random& random, Device device, Operation operation, bool every_feature) {
  Draw draw;
  Case& c = draw.c;
  c.device = device;
  c.operation = operation;
  c.dtype = random.pick(kAllDtypes);
  c.shape = random_shape(random, operation, every_feature);
  const Shape& s = c.shape;
  c.mask = random_mask(random, s);
  if (one_in(random, 4)) {
    constexpr float kScales[] = {0, 0.25f, 1};
    c.scale_set = true;
    c.scale = random.pick(kScales);
  }
  if (operation == Operation::kDecode) {
    if (!one_in(random, 4))
      for (int64_t b = 0; b < s.batch; ++b)
        c.lengths.push_back(static_cast<int32_t>(random.below(s.len_k + 3) - 1));
    constexpr int32_t kSplits[] = {0, 1, 2, 3, 7, 64};
    c.num_splits = random.pick(kSplits);
  }
  if (operation != Operation::kBackward) c.want_lse = !one_in(random, 8);
  if (one_in(random, 4)) c.flags |= CUFLASH_PROBLEM_DETERMINISTIC;
  if (one_in(random, 4)) c.flags |= CUFLASH_PROBLEM_BATCH_INVARIANT;
  draw.library_workspace = one_in(random, 4);
  if (every_feature) add_features(random, draw);
  arrange(random, draw);
  draw.kind = random.pick(kAllDataKinds);
  draw.seed = 1 + random.bits() % 1000000;
  return draw;
}

DrawnCall::DrawnCall(const Draw& draw, const Inputs& inputs)
    : device_(draw.c.device),
      call_(draw.c, draw.stored ? with_rounded_keys(draw.c, inputs) : inputs) {
  if (draw.stored) {
    Inputs exact = inputs;  // and so left as they are
    stored_.emplace(draw.c, exact, cache_of(draw));
    stored_->install(call_);
  } else if (draw.pool) {
    pool_.emplace(draw.c, inputs, *draw.pool, draw.seed);
    pool_->install(call_);
  } else if (draw.chosen_entries) {
    entries_.emplace(draw.c, inputs, draw.seed);
    entries_->install(call_);
  }
  if (draw.v_is_k_prefix) {
    call_.problem().flags |= CUFLASH_PROBLEM_V_IS_K_PREFIX;
    call_.problem().v = call_.cache().v = {};
  }
  if (draw.library_workspace) call_.use_pool();
}

Outcome DrawnCall::run() {
  const cuflash_status_t status = call_.launch();
  synchronize(device_);
  Outcome outcome = call_.collect(status);
  if ((pool_ && !pool_->unchanged()) || (entries_ && !entries_->unchanged()) ||
      (stored_ && !stored_->unchanged()))
    outcome.damage += "the cache was written; ";
  EXPECT_EQ(outcome.damage, "");
  return outcome;
}

Inputs make_inputs(const Draw& draw) {
  const Case& c = draw.c;
  Inputs inputs = make_inputs(c, draw.kind, draw.seed);
  if (repeats_something(draw)) {
    repeat_values(draw, inputs);
    if (c.operation == Operation::kBackward) add_forward_results(c, inputs);
  }
  if (draw.stored) QuantisedCache(c, inputs, cache_of(draw));
  if (draw.v_is_k_prefix)
    inputs.v =
        Tensor::from(inputs.v.batch, inputs.v.heads, inputs.v.rows, inputs.v.dim,
                     [&](auto b, auto h, auto r, auto ch) { return inputs.k.at(b, h, r, ch); });
  if (c.delta == Delta::kGiven)
    inputs.delta = Tensor::from(inputs.lse.batch, inputs.lse.heads, inputs.lse.rows, 1,
                                [&](auto b, auto h, auto r, auto) {
                                  double sum = 0;
                                  for (int64_t ch = 0; ch < inputs.o.dim; ++ch)
                                    sum += inputs.o.at(b, h, r, ch) * inputs.d_o.at(b, h, r, ch);
                                  return static_cast<float>(sum);
                                });
  return inputs;
}

namespace {

Results run_ok(const Draw& draw, const Inputs& inputs) {
  Outcome outcome = DrawnCall(draw, inputs).run();
  EXPECT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
  return std::move(outcome.results);
}

void expect_near(const char* name, const Tensor& got, const Tensor& want, const Tensor& scale) {
  for (size_t n = 0; n < got.x.size(); ++n) {
    if (got.x[n] == want.x[n]) continue;
    const double bound = 4e-7 * std::max(std::abs(scale.x[n]), std::abs(want.x[n])) + 1e-30;
    if (std::abs(got.x[n] - want.x[n]) <= bound) continue;
    ADD_FAILURE() << name << "[" << n << "] is " << got.x[n] << ", not " << want.x[n];
    return;
  }
}

Case accumulating(Case c) {
  if (c.operation == Operation::kBackward)
    c.gradient_flags |= CUFLASH_GRADIENTS_ACCUMULATE;
  else
    c.flags |= CUFLASH_PROBLEM_ACCUMULATE;
  return c;
}

// What the call adds to numbers that are there is what it gives without them.
void check_accumulation(const Draw& draw, const Inputs& inputs, const Results& written) {
  Draw adding = draw;
  adding.c = accumulating(draw.c);
  const Case& c = adding.c;
  Inputs before = inputs;
  const auto some = [&](const Tensor& like, uint32_t t) {
    Tensor x(like.batch, like.heads, like.rows, like.dim);
    fill(x, DataKind::kNormal, t, draw.seed, -1, Dtype::kF32);
    return x;
  };
  if (c.operation == Operation::kBackward) {
    before.dq = some(written.dq, 11);
    before.dk = some(written.dk, 12);
    before.dv = some(written.dv, 13);
    const Results sums = run_ok(adding, before);
    const auto check = [&](const char* name, Tensor Results::*result, const Tensor& was,
                           Role role) {
      const RowMap rows = c.rows(role);
      Tensor want = was;
      const Tensor& added = written.*result;
      for (size_t n = 0; n < want.x.size(); ++n) want.x[n] += added.x[n];
      // Rows that are not in memory read as 0.
      want.for_each([&](auto b, auto, auto r, auto, double& x) {
        if (r >= rows.entries[static_cast<size_t>(b)].count) x = 0;
      });
      expect_near(name, sums.*result, want, was);
    };
    check("dq", &Results::dq, before.dq, kDq);
    check("dk", &Results::dk, before.dk, kDk);
    check("dv", &Results::dv, before.dv, kDv);
    return;
  }
  before.o = some(written.o, 11);
  before.lse = some(written.lse, 12);
  // Some rows have nothing yet: an LSE of -infinity, whatever O holds.
  before.lse.for_each([&](auto b, auto h, auto r, auto, double& lse) {
    if ((b + h + r) % 3 != 0) return;
    lse = -kInfinity;
    for (int64_t ch = 0; ch < before.o.dim; ++ch) before.o.at(b, h, r, ch) = std::nan("");
  });
  const Results got = run_ok(adding, before);
  Results was;
  was.o = before.o;
  was.lse = before.lse;
  Results want = merge_oracle({was, written}, false);
  const RowMap rows = c.rows(kO);
  const auto outside = [&](int64_t b, int64_t r) {
    return r >= rows.entries[static_cast<size_t>(b)].count;
  };
  Tensor scale = written.o;
  scale.for_each([&](auto b, auto h, auto r, auto ch, double& x) {
    const double prior = before.o.at(b, h, r, ch);
    x = std::isnan(prior) ? std::abs(x) : std::max(std::abs(x), std::abs(prior));
    if (outside(b, r)) want.o.at(b, h, r, ch) = 0;
  });
  want.lse.for_each([&](auto b, auto, auto r, auto, double& x) {
    if (outside(b, r)) x = 0;
  });
  // Weights are exp of differences of LSEs, whose rounding counts.
  for (double& x : scale.x) x = 4 * std::abs(x) + 1e-6;
  Tensor one(want.lse.batch, want.lse.heads, want.lse.rows, 1, 4);
  for (size_t n = 0; n < one.x.size(); ++n)
    one.x[n] += std::isfinite(written.lse.x[n]) ? std::abs(written.lse.x[n]) : 0;
  double lse_scale = 1;
  for (const double x : one.x) lse_scale = std::max(lse_scale, x);
  for (double& x : scale.x) x *= lse_scale;
  expect_near("o", got.o, want.o, scale);
  expect_near("lse", got.lse, want.lse, one);
}

void check_delta(const Draw& draw, const Inputs& inputs, const Results& results) {
  const Case& c = draw.c;
  Tensor delta = results.delta;
  bool reported = false;
  delta.for_each([&](auto b, auto h, auto r, auto, double& got) {
    double sum = 0, sizes = 0;
    for (int64_t ch = 0; ch < inputs.o.dim; ++ch) {
      const double term = inputs.o.at(b, h, r, ch) * inputs.d_o.at(b, h, r, ch);
      sum += term;
      sizes += std::abs(term);
    }
    if (r >= c.rows_of(b)) sum = 0;
    if (reported || std::abs(got - sum) <= 1e-5 * sizes + 1e-37) return;
    reported = true;
    ADD_FAILURE() << "delta[" << b << ' ' << h << ' ' << r << "] is " << got << ", not " << sum;
  });
}

// The cache's numbers in fp32 give the same bits, on the CPU device: a GPU may fuse other operations of the two.
void check_stored(const Draw& draw, const Inputs& inputs, const Results& results) {
  Draw plain = draw;
  plain.stored = CacheSpec{};
  plain.stored->k = plain.stored->v = CUFLASH_F32;
  plain.stored->scales = false;
  Inputs rounded = inputs;
  round_values(rounded.k, Dtype::kF32);
  round_values(rounded.v, Dtype::kF32);
  expect_same_bits(run_ok(plain, rounded), results);
}

}  // namespace

bool accepts(const Draw& draw) {
  if (!accepts(draw.accumulates ? accumulating(draw.c) : draw.c, draw.c.kernel)) return false;
  if (!draw.pool && !draw.chosen_entries && !draw.stored && !draw.v_is_k_prefix) return true;
  DrawnCall drawn(draw, zero_inputs(draw.c));
  size_t bytes;
  Call& call = drawn.call();
  const cuflash_handle_t handle = handle_of(draw.c.device);
  const cuflash_status_t status =
      draw.c.operation == Operation::kDecode
          ? cuflash_decode_workspace_size(handle, &call.problem(), &call.cache(), &bytes)
          : cuflash_forward_workspace_size(handle, &call.problem(), &bytes);
  EXPECT_TRUE(status == CUFLASH_SUCCESS || status == CUFLASH_ERROR_UNSUPPORTED)
      << cuflash_last_error() << "\n  " << describe(draw);
  return status == CUFLASH_SUCCESS;
}

Accuracy check_draw(const Draw& draw) {
  const Inputs inputs = make_inputs(draw);
  const Results results = run_ok(draw, inputs);
  if (testing::Test::HasFailure()) return {};
  const Accuracy accuracy = judge(draw.c, inputs, results);
  EXPECT_TRUE(accuracy.ok) << accuracy.where << ": " << accuracy.worst
                           << " times the allowed error";
  if (draw.c.delta == Delta::kWanted) check_delta(draw, inputs, results);
  if (draw.accumulates) check_accumulation(draw, inputs, results);
  if (draw.stored && draw.c.device == Device::kCpu) check_stored(draw, inputs, results);
  return accuracy;
}

// ---- what draws have ----------------------------------------------------------------------------

namespace {

constexpr unsigned bit(Operation operation) { return 1u << static_cast<unsigned>(operation); }
constexpr unsigned kForwards = bit(Operation::kForward), kBackwards = bit(Operation::kBackward),
                   kDecodes = bit(Operation::kDecode);
constexpr unsigned kPrefills = kForwards | kBackwards, kNotBackward = kForwards | kDecodes,
                   kAll = kForwards | kBackwards | kDecodes;

// No two features of a group are drawn together.
enum Group { kFree, kOperations, kDtypes, kAligns, kDeltas, kArrangements, kCaches };

struct DrawnFeature {
  const char* name;
  unsigned operations;
  Group group;
  bool (*present)(const Draw&);
};

// Whether K or V is kept in one of these dtypes.
bool keeps(const Draw& draw, bool (*wanted)(int32_t)) {
  return draw.stored && (wanted(draw.stored->k) || (!draw.v_is_k_prefix && wanted(draw.stored->v)));
}

constexpr DrawnFeature kFeatures[] = {
    {"forward", kForwards, kOperations,
     [](const Draw& d) { return d.c.operation == Operation::kForward; }},
    {"backward", kBackwards, kOperations,
     [](const Draw& d) { return d.c.operation == Operation::kBackward; }},
    {"decode", kDecodes, kOperations,
     [](const Draw& d) { return d.c.operation == Operation::kDecode; }},
    {"f32", kAll, kDtypes, [](const Draw& d) { return d.c.dtype == Dtype::kF32; }},
    {"f16", kAll, kDtypes, [](const Draw& d) { return d.c.dtype == Dtype::kF16; }},
    {"bf16", kAll, kDtypes, [](const Draw& d) { return d.c.dtype == Dtype::kBf16; }},
    {"more than 1024 keys", kAll, kFree, [](const Draw& d) { return d.c.shape.len_k > 1024; }},
    {"head_dim above 128", kAll, kFree, [](const Draw& d) { return d.c.shape.head_dim > 128; }},
    {"odd head_dim", kAll, kFree, [](const Draw& d) { return d.c.shape.head_dim % 2 != 0; }},
    {"head_dim_v of its own", kAll, kFree,
     [](const Draw& d) { return d.c.shape.dim_v() != d.c.shape.head_dim; }},
    {"grouped heads", kAll, kFree,
     [](const Draw& d) { return d.c.shape.heads_q != d.c.shape.heads_kv; }},
    {"an empty extent", kAll, kFree,
     [](const Draw& d) { return d.c.shape.batch * d.c.shape.len_q * d.c.shape.len_k == 0; }},
    {"causal", kAll, kFree, [](const Draw& d) { return d.c.mask.causal; }},
    {"window", kAll, kFree, [](const Draw& d) { return d.c.mask.window; }},
    {"top-left", kAll, kAligns,
     [](const Draw& d) { return d.c.mask.align == CUFLASH_ALIGN_TOP_LEFT; }},
    {"offset", kAll, kAligns, [](const Draw& d) { return d.c.mask.align == CUFLASH_ALIGN_OFFSET; }},
    {"device offsets", kAll, kAligns,
     [](const Draw& d) { return d.c.mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS; }},
    {"packed queries", kAll, kFree, [](const Draw& d) { return d.c.packing_q.packed; }},
    {"packed keys", kPrefills, kFree, [](const Draw& d) { return d.c.packing_k.packed; }},
    {"lengths of queries", kAll, kFree, [](const Draw& d) { return !d.c.lengths_q.empty(); }},
    {"lengths of keys", kAll, kFree, [](const Draw& d) { return !d.c.lengths.empty(); }},
    {"left padding", kAll, kFree, [](const Draw& d) { return !d.c.left_pad.empty(); }},
    {"scale given", kAll, kFree, [](const Draw& d) { return d.c.scale_set; }},
    {"softcap", kAll, kFree, [](const Draw& d) { return d.c.softcap > 0; }},
    {"bias", kAll, kFree, [](const Draw& d) { return d.c.bias.has_value(); }},
    {"slopes", kAll, kFree, [](const Draw& d) { return d.c.slopes.has_value(); }},
    {"sinks", kAll, kFree, [](const Draw& d) { return d.c.sinks.has_value(); }},
    {"dropout", kAll, kFree, [](const Draw& d) { return d.c.dropout.p > 0; }},
    {"tree mask", kNotBackward, kFree, [](const Draw& d) { return d.c.tree.has_value(); }},
    {"tree mask of all sequences", kNotBackward, kFree,
     [](const Draw& d) { return d.c.tree && !d.c.tree->per_batch; }},
    {"fp32 outputs", kAll, kFree,
     [](const Draw& d) { return d.c.wide && d.c.dtype != Dtype::kF32; }},
    {"accumulation", kAll, kFree, [](const Draw& d) { return d.accumulates; }},
    {"no LSE", kNotBackward, kFree, [](const Draw& d) { return !d.c.want_lse; }},
    {"gradient of the LSE", kBackwards, kFree, [](const Draw& d) { return d.c.d_lse; }},
    {"delta wanted", kBackwards, kDeltas,
     [](const Draw& d) { return d.c.delta == Delta::kWanted; }},
    {"delta given", kBackwards, kDeltas, [](const Draw& d) { return d.c.delta == Delta::kGiven; }},
    {"v is a prefix of k", kNotBackward, kFree, [](const Draw& d) { return d.v_is_k_prefix; }},
    {"block table", kDecodes, kCaches, [](const Draw& d) { return d.pool && !d.pool->csr; }},
    {"CSR pages", kDecodes, kCaches, [](const Draw& d) { return d.pool && d.pool->csr; }},
    {"chosen entries", kDecodes, kCaches, [](const Draw& d) { return d.chosen_entries; }},
    {"64-bit ids", kDecodes, kFree, [](const Draw& d) { return d.pool && d.pool->wide_ids; }},
    {"pages of 1 to 3 slots", kDecodes, kFree,
     [](const Draw& d) { return d.pool && d.pool->page_size <= 3; }},
    {"fp8 cache", kDecodes, kFree,
     [](const Draw& d) {
       return keeps(d, [](int32_t t) { return t == CUFLASH_FP8_E4M3 || t == CUFLASH_FP8_E5M2; });
     }},
    {"int8 cache", kDecodes, kFree,
     [](const Draw& d) { return keeps(d, [](int32_t t) { return t == CUFLASH_INT8; }); }},
    {"int4 cache", kDecodes, kFree,
     [](const Draw& d) { return keeps(d, [](int32_t t) { return t == CUFLASH_INT4; }); }},
    {"cache of floats by dtype", kDecodes, kFree,
     [](const Draw& d) { return keeps(d, [](int32_t t) { return t <= CUFLASH_BF16; }); }},
    {"k and v of two dtypes", kDecodes, kFree,
     [](const Draw& d) { return d.stored && !d.v_is_k_prefix && d.stored->k != d.stored->v; }},
    {"scales", kDecodes, kFree, [](const Draw& d) { return d.stored && d.stored->scales; }},
    {"zero points", kDecodes, kFree,
     [](const Draw& d) {
       return d.stored && (cache_of(d).zeros_of_k() || cache_of(d).zeros_of_v());
     }},
    {"scales of groups", kDecodes, kFree,
     [](const Draw& d) { return d.stored && d.stored->scales && d.stored->group > 0; }},
    {"scales of slots", kDecodes, kFree,
     [](const Draw& d) { return d.stored && d.stored->scales && d.stored->per_slot; }},
    {"parts given", kDecodes, kFree, [](const Draw& d) { return d.c.num_splits > 0; }},
    {"rows outermost", kAll, kArrangements,
     [](const Draw& d) { return d.arrangement == Arrangement::kRowsOutermost; }},
    {"packed qkv", kPrefills, kArrangements,
     [](const Draw& d) { return d.arrangement == Arrangement::kPackedQkv; }},
    {"random strides", kAll, kArrangements,
     [](const Draw& d) { return d.arrangement == Arrangement::kRandom; }},
    {"strides of 0", kAll, kFree, repeats_something},
    {"deterministic", kAll, kFree,
     [](const Draw& d) { return (d.c.flags & CUFLASH_PROBLEM_DETERMINISTIC) != 0; }},
    {"batch-invariant", kAll, kFree,
     [](const Draw& d) { return (d.c.flags & CUFLASH_PROBLEM_BATCH_INVARIANT) != 0; }},
    {"workspace of the library", kAll, kFree, [](const Draw& d) { return d.library_workspace; }},
};

// Beside those of a group.
constexpr std::array<const char*, 2> kNeverTogether[] = {
    {"f32", "fp32 outputs"},
    {"no LSE", "accumulation"},
    {"head_dim_v of its own", "packed qkv"},
    {"v is a prefix of k", "packed qkv"},
    {"v is a prefix of k", "k and v of two dtypes"},
    {"strides of 0", "packed qkv"},
    {"chosen entries", "64-bit ids"},
    {"chosen entries", "pages of 1 to 3 slots"},
};

}  // namespace

const std::vector<std::string>& drawn_feature_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const DrawnFeature& feature : kFeatures) list.push_back(feature.name);
    return list;
  }();
  return names;
}

bool can_be_drawn_together(size_t a, size_t b) {
  const DrawnFeature &x = kFeatures[a], &y = kFeatures[b];
  if ((x.operations & y.operations) == 0 || (x.group != kFree && x.group == y.group)) return false;
  const auto is = [](const DrawnFeature& feature, const char* name) {
    return std::string(feature.name) == name;
  };
  return std::none_of(std::begin(kNeverTogether), std::end(kNeverTogether), [&](const auto& pair) {
    return (is(x, pair[0]) && is(y, pair[1])) || (is(x, pair[1]) && is(y, pair[0]));
  });
}

std::vector<bool> features_of(const Draw& draw) {
  std::vector<bool> list;
  for (const DrawnFeature& feature : kFeatures) list.push_back(feature.present(draw));
  return list;
}

}  // namespace cuflash_test
