// Appending to a cache: each token in its slot and nothing else written, rotation and norms against fp64, and attention
// over what was appended. The runner compares every element of the cache, of its gaps and of q_out.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/targets.hpp"
#include "support/append.hpp"

namespace cuflash_test {
namespace {

class CasesOfAppend : public DeviceTest {
 protected:
  static AppendCase on(Device device, const std::vector<int32_t>& lengths, int64_t len) {
    AppendCase c;
    c.device = device;
    c.batch = static_cast<int64_t>(lengths.size());
    c.lengths = lengths;
    c.len = len;
    return c;
  }
  AppendCase after(const std::vector<int32_t>& lengths, int64_t len) const {
    return on(GetParam(), lengths, len);
  }
  AppendCase rotated(int64_t dim, int64_t rotary_dim, bool interleaved) const {
    AppendCase c = after({0, 9}, 5);
    c.heads_q = 6, c.heads_kv = 3;
    c.dim = c.dim_v = dim;
    c.rotary_dim = rotary_dim, c.max_position = 16;
    c.interleaved = interleaved;
    return c;
  }
};
CUFLASH_FOR_DEVICES(CasesOfAppend);

// ---- slots --------------------------------------------------------------------------------------

TEST_P(CasesOfAppend, P32_EveryTokenInItsSlot) {
  for (const Dtype dtype : kAllDtypes)
    for (const int64_t page_size : {0, 1, 3, 16, 64})
      for (const bool csr : {false, true})
        for (const uint64_t layout : {0, 1, 2, 3}) {
          if (csr && page_size == 0) continue;
          AppendCase c = after({0, 30, 11}, 7);
          c.dtype = dtype;
          c.heads_q = 4, c.heads_kv = 2;
          c.dim = 40, c.dim_v = 24;
          c.max_len = 40;
          c.page_size = page_size, c.csr = csr, c.wide_ids = layout % 2 == 1;
          c.slots_outermost = csr, c.layout_seed = layout;
          expect_append(c);
        }
}

TEST_P(CasesOfAppend, P32_EveryHeadDim) {
  for (int64_t dim = 1; dim <= 576; dim += dim < 80 ? 1 : 31) {
    AppendCase c = after({3, 0}, 2);
    c.dtype = kAllDtypes[dim % 3];
    c.heads_kv = 2;
    c.dim = dim, c.dim_v = 577 - dim;
    expect_append(c);
  }
}

// A cache may be of other types than the new rows, each side of its own.
TEST_P(CasesOfAppend, CachesOfOtherTypes) {
  for (const Dtype dtype : kAllDtypes)
    for (const int32_t dtype_k : kStoredDtypes)
      for (const int32_t dtype_v : kStoredDtypes) {
        AppendCase c = after({2}, 3);
        c.dtype = dtype, c.dtype_k = dtype_k, c.dtype_v = dtype_v;
        c.dim = c.dim_v = 33;
        expect_append(c);
      }
}

TEST_P(CasesOfAppend, QuantisedCaches) {
  for (const int32_t stored : kStoredDtypes)
    for (const int64_t group : {0, 32, 64, 128})
      for (const Dtype scale_dtype : kAllDtypes)
        for (const bool one_scale : {false, true})
          for (const bool rotate : {false, true}) {
            AppendCase c = rotated(130, rotate ? 128 : 0, false);
            if (!rotate) c.max_position = 0;
            c.dtype_k = stored, c.dtype_v = CUFLASH_INT4;
            c.dim_v = 77;
            c.scales = true, c.zeros = group != 64;
            c.scale_group = group, c.scale_dtype = scale_dtype, c.one_scale = one_scale;
            c.page_size = rotate ? 4 : 0;
            expect_append(c);
          }
}

// What is beyond the largest number becomes it.
TEST_P(CasesOfAppend, QuantisedValuesSaturate) {
  for (const int32_t stored : {CUFLASH_FP8_E4M3, CUFLASH_FP8_E5M2, CUFLASH_INT8, CUFLASH_INT4}) {
    AppendCase c = after({2}, 3);
    c.dtype_k = c.dtype_v = stored;
    c.amplitude = 1e30;
    expect_append(c);
  }
}

TEST_P(CasesOfAppend, PositionsAndSlotMappings) {
  AppendCase c = after({0, 0}, 3);
  c.lengths = {};
  c.positions = {5, 0, 15, 2, 1, 7};
  for (const int64_t page_size : {0, 4}) {
    c.page_size = page_size;
    expect_append(c);
  }
  c.positions = {};
  c.slots = {31, 0, 17, 5, 6, 2};
  for (const int64_t page_size : {0, 4}) {
    c.page_size = page_size;
    expect_append(c);
    c.csr = true;  // page tables are not read
  }
}

// Sequences of one token each, more of them than entries.
TEST_P(CasesOfAppend, SlotMappingsOfFewerEntriesThanSequences) {
  AppendCase c = after({0, 0, 0, 0}, 1);
  c.slots = {15, 0, 7, 3};
  AppendCall call(c);
  call.cache().num_pages = 1;
  ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(GetParam());
  call.expect_right();
}

TEST_P(CasesOfAppend, EntriesOfAContiguousCache) {
  AppendCase c = after({3, 0, 8}, 2);
  c.entries = {3, 0, 1};
  expect_append(c);
  c.entries = {-1, 2, 4};  // of 0 to 3
  expect_append(c);
}

// What is skipped is neither read nor written: rows of skipped tokens are NaN.
TEST_P(CasesOfAppend, SkippedTokens) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  AppendCase c = after({14, 16, kMost, -1, kLeast}, 4);
  for (const int64_t page_size : {0, 4}) {
    c.page_size = page_size;
    expect_append(c);
  }
  c.lengths = {};
  c.batch = 2;
  c.positions = {-1, 16, 3, kMost, kLeast, 15, 0, 17};
  for (const int64_t page_size : {0, 4, 5}) {
    c.page_size = page_size;
    expect_append(c);
  }
  c.csr = true;  // whose pages have slots past max_len
  expect_append(c);
  c.csr = false;
  c.positions = {};
  constexpr int64_t kMostSlots = std::numeric_limits<int64_t>::max();
  for (const int64_t page_size : {0, 4, 5}) {
    c.page_size = page_size;
    const int64_t all = c.pool() * c.entry_slots();
    c.slots = {-1, all, 3, kMostSlots, std::numeric_limits<int64_t>::min(), all - 1, 0, all + 1};
    expect_append(c);
  }
}

TEST_P(CasesOfAppend, PagesOutsideThePool) {
  AppendCase c = after({0, 2}, 10);
  c.page_size = 4;
  for (const int64_t bad : {int64_t{-1}, int64_t{9}, int64_t{0x7fffffff}}) {
    c.pages = {5, bad, 2, 0, bad, 1, 3, bad};
    for (const bool wide : {false, true}) {
      c.wide_ids = wide;
      expect_append(c);
    }
  }
  c.wide_ids = true;
  c.pages[1] = int64_t{1} << 32;
  expect_append(c);
  // Past a sequence's pages, and where its offsets fall.
  c.csr = true;
  c.pages = {5, 4, 2, 0, 7, 1, 3, 6};
  c.indptr = {0, 2, 4};
  expect_append(c);
  c.indptr = {0, 2, 1};
  expect_append(c);
}

TEST_P(CasesOfAppend, NothingToAppend) {
  AppendCase c = after({1}, 2);
  c.max_len = 0;
  expect_append(c);
  c.lengths = {};
  c.slots = {0, -1};
  expect_append(c);
  AppendCall call(after({1, 2}, 3));
  for (int64_t cuflash_kv_append_t::*extent :
       {&cuflash_kv_append_t::batch, &cuflash_kv_append_t::len}) {
    cuflash_kv_append_t& append = call.append();
    const cuflash_kv_append_t kept = append;
    append.*extent = 0;
    append.k.data = append.v.data = nullptr;
    EXPECT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
    append = kept;
  }
  synchronize(GetParam());
  EXPECT_EQ(call.cache_k(), AppendCall(call.spec()).cache_k());
}

TEST_P(CasesOfAppend, KeysAlone) {
  AppendCase c = after({1, 5}, 3);
  c.dim_v = 0;
  expect_append(c);
}

// Rotation and norms of the queries without any keys.
TEST_P(CasesOfAppend, QueriesAlone) {
  AppendCase c = rotated(32, 32, false);
  c.heads_kv = 0;
  c.norm_q = true;
  expect_append(c);
}

TEST_P(CasesOfAppend, B105_SeveralTokensSeeTheEarlierOnes) {
  Case c = make_case(GetParam(), Operation::kDecode, {1, 1, 1, 2, 8, 4}, causal_mask());
  c.lengths = {5};
  c.kernel = "reference";
  Inputs inputs = zero_inputs(c);
  set(inputs.v, [](auto, auto, int64_t key, auto) {
    return key < 3 ? static_cast<double>(key) : std::nan("");
  });
  Call call(c, inputs);
  const Extents e = {1, 1, 2, 4};
  StridedTensor k(c.device, c.dtype, e, dense_layout(e)), v(c.device, c.dtype, e, dense_layout(e));
  k.write(Tensor(1, 1, 2, 4));
  v.write(Tensor::from(1, 1, 2, 4, [](auto, auto, int64_t i, auto) { return 3 + i; }));
  const DeviceArray<int32_t> before(c.device, {3});
  cuflash_kv_cache_t cache = call.cache();
  cache.lengths = before.data();
  cuflash_kv_append_t append;
  cuflash_kv_append_init(&append, sizeof append);
  append.batch = append.heads_kv = 1, append.len = 2, append.head_dim = 4;
  append.k = k.tensor(), append.v = v.tensor();
  ASSERT_EQ(cuflash_kv_cache_append(handle_of(c.device), &cache, &append, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(c.device);
  const Tensor o = call.tensor(kO).read(), values = call.tensor(kV).read();
  EXPECT_NEAR(o.at(0, 0, 0, 1), 1.5, 1e-6);
  EXPECT_NEAR(o.at(0, 0, 1, 1), 2.0, 1e-6);
  EXPECT_EQ(values.at(0, 0, 3, 2), 3);
  EXPECT_EQ(values.at(0, 0, 4, 2), 4);
  EXPECT_TRUE(std::isnan(values.at(0, 0, 5, 2)));
}

// Decode gives the bits of a cache that held the keys from the start.
TEST_P(CasesOfAppend, P32_AppendAndAttendIsAttend) {
  for (const Dtype dtype : kAllDtypes)
    for (const int64_t len : {1, 4}) {
      Case c = make_case(GetParam(), Operation::kDecode, {2, 4, 2, len, 60, 40}, causal_mask());
      c.dtype = dtype;
      c.lengths = {60, 23};
      const Inputs inputs = make_inputs(c, DataKind::kNormal);
      Inputs without = inputs;
      const auto rows_of = [&](const Tensor& t) {
        return Tensor::from(2, 2, len, 40, [&](int64_t b, auto h, int64_t i, auto ch) {
          return t.at(b, h, c.keys_of(b) - len + i, ch);
        });
      };
      for (Tensor* t : {&without.k, &without.v})
        t->for_each([&](int64_t b, auto, int64_t key, auto, double& x) {
          if (key >= c.keys_of(b) - len) x = std::nan("");
        });
      Call call(c, without);
      const Extents e = {2, 2, len, 40};
      StridedTensor k(c.device, dtype, e, dense_layout(e)), v(c.device, dtype, e, dense_layout(e));
      k.write(rows_of(inputs.k));
      v.write(rows_of(inputs.v));
      const auto length = static_cast<int32_t>(len);
      const DeviceArray<int32_t> before(c.device, {60 - length, 23 - length});
      cuflash_kv_cache_t cache = call.cache();
      cache.lengths = before.data();
      cuflash_kv_append_t append;
      cuflash_kv_append_init(&append, sizeof append);
      append.batch = append.heads_kv = 2, append.len = len, append.head_dim = 40;
      append.k = k.tensor(), append.v = v.tensor();
      ASSERT_EQ(cuflash_kv_cache_append(handle_of(c.device), &cache, &append, nullptr),
                CUFLASH_SUCCESS)
          << cuflash_last_error();
      ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
      synchronize(c.device);
      const Results expected = run_ok(c, inputs);
      EXPECT_EQ(call.tensor(kO).read().x, expected.o.x);
      EXPECT_EQ(call.tensor(kLse).read().x, expected.lse.x);
    }
}

TEST_P(CasesOfAppend, B106_RowsThatAreNotAligned) {
  for (const int64_t dim : {46, 44, 34, 48, 64}) {
    AppendCase c;
    c.device = GetParam();
    c.dtype = Dtype::kBf16;
    c.len = 18, c.heads_q = 2;
    c.dim = c.dim_v = dim;
    c.max_len = 32, c.page_size = 16;
    c.slots.resize(18);
    std::iota(c.slots.begin(), c.slots.end(), 0);
    expect_append(c);
    c.slots = {};
    c.lengths = {0};
    c.rotary_dim = 20, c.max_position = 32;
    expect_append(c);
  }
}

// K and V in one buffer [page, 2, slot, head, channel].
TEST_P(CasesOfAppend, B107_InterleavedKeysAndValues) {
  AppendCase c = after({3, 9}, 6);
  c.heads_kv = 2;
  c.page_size = 8;
  AppendCall apart(c), call(c);
  const Extents both{2 * c.pool(), 2, 8, 8};
  StoredTensor memory(c.device, CUFLASH_F32, both, bshd_layout(both));
  const auto interleave = [&](const std::vector<uint32_t>& k, const std::vector<uint32_t>& v) {
    constexpr size_t kPage = 2 * 8 * 8;  // codes
    std::vector<uint32_t> codes;
    for (size_t first = 0; first < k.size(); first += kPage)
      for (const std::vector<uint32_t>* side : {&k, &v})
        codes.insert(codes.end(), &(*side)[first], &(*side)[first] + kPage);
    return codes;
  };
  memory.write(interleave(apart.cache_k(), apart.cache_v()));
  const cuflash_tensor_t pool = memory.tensor();
  call.cache().k = call.cache().v = pool;
  call.cache().v.data = static_cast<float*>(pool.data) + pool.batch_stride;
  call.cache().k.batch_stride = call.cache().v.batch_stride = 2 * pool.batch_stride;
  ASSERT_EQ(apart.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(c.device);
  apart.expect_right();
  EXPECT_EQ(memory.read(), interleave(apart.cache_k(), apart.cache_v()));
}

// ---- rotation and norms -------------------------------------------------------------------------

TEST_P(CasesOfAppend, Rotation) {
  for (const Dtype dtype : kAllDtypes)
    for (const bool interleaved : {false, true})
      for (const auto& [dim, rotary_dim] : {std::pair<int64_t, int64_t>{2, 2},
                                            {8, 6},
                                            {33, 2},
                                            {64, 64},
                                            {80, 32},
                                            {127, 126},
                                            {256, 64},
                                            {576, 574}}) {
        AppendCase c = rotated(dim, rotary_dim, interleaved);
        c.dtype = dtype;
        expect_append(c);
      }
}

TEST_P(CasesOfAppend, RotationByPositionsBesideASlotMapping) {
  AppendCase c = rotated(16, 8, false);
  c.slots = {3, -1, 7, 9, 30, 0, 1, -1, 11, 12};
  expect_append(c);  // after the lengths
  c.lengths = {};
  c.positions = {3, 1, 4, 1, 5, 9, 2, 6, 15, 3};
  expect_append(c);
}

// A position that the table lacks skips the token and gives a query of zeros; the query of a skipped token is rotated.
TEST_P(CasesOfAppend, PositionsOutsideTheTable) {
  for (const bool norm : {false, true}) {
    AppendCase c = rotated(16, 16, false);
    c.max_position = 11;
    c.norm_q = norm;
    expect_append(c);
    c.slots = {3, -1, 7, 9, 31, 0, 1, -1, 11, 12};
    c.positions = {10, 11, -1, 0, 5, 0x7fffffff, std::numeric_limits<int32_t>::min(), 6, 10, 3};
    expect_append(c);
  }
}

TEST_P(CasesOfAppend, QueriesInPlace) {
  for (const Dtype dtype : kAllDtypes)
    for (const bool interleaved : {false, true})
      for (const uint64_t layout : {0, 1, 2}) {
        AppendCase c = rotated(96, 72, interleaved);
        c.dtype = dtype;
        c.norm_q = c.norm_k = true, c.epsilon = 1e-6f;
        c.in_place = true;
        c.layout_seed = layout;
        expect_append(c);
      }
}

TEST_P(CasesOfAppend, Norms) {
  for (const Dtype dtype : kAllDtypes)
    for (const bool rotate : {false, true})
      for (const int64_t dim : {2, 46, 128, 576})
        for (const float epsilon : {0.0f, 1e-6f, 0.5f}) {
          AppendCase c = rotated(dim, rotate ? dim : 0, false);
          if (!rotate) c.max_position = 0;
          c.dtype = dtype;
          c.norm_q = dim != 2, c.norm_k = true;
          c.epsilon = epsilon;
          expect_append(c);
        }
}

// Squares beyond fp32, below it, and a row of zeros.
TEST_P(CasesOfAppend, NormsOfExtremeRows) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16})
    for (const double amplitude : {1e37, 1e25, 1e19, 1e-15, 1e-25, 1e-36, 0.0})
      for (const float epsilon : {0.0f, 1e-6f}) {
        AppendCase c = rotated(64, 32, true);
        c.dtype = dtype;
        c.norm_q = c.norm_k = true;
        c.epsilon = epsilon;
        c.amplitude = amplitude;
        expect_append(c);
      }
}

TEST_P(CasesOfAppend, NormsOfSubnormalRows) {
  for (const double amplitude : {1e-39, 1e-43, 4e-45}) {
    AppendCase c = rotated(46, 32, true);
    c.norm_q = c.norm_k = true;
    c.amplitude = amplitude;
    expect_append(c);
  }
}

// Q, K and V in one tensor [batch, token, head, channel], the queries in place.
TEST_P(CasesOfAppend, PackedProjections) {
  const AppendCase c = rotated(32, 32, false);
  AppendCall apart(c), packed(c);
  const Extents all = {2, 12, 5, 32};
  StridedTensor memory(c.device, c.dtype, all, bshd_layout(all));
  memory.write(Tensor::from(2, 12, 5, 32, [&](int64_t b, int64_t h, auto i, auto ch) {
    return h < 6   ? apart.q().at(b, h, i, ch)
           : h < 9 ? apart.k().at(b, h - 6, i, ch)
                   : apart.v().at(b, h - 9, i, ch);
  }));
  cuflash_kv_append_t& append = packed.append();
  append.q = append.q_out = append.k = append.v = memory.tensor();
  append.k.data = static_cast<float*>(append.q.data) + 6 * 32;
  append.v.data = static_cast<float*>(append.q.data) + 9 * 32;
  ASSERT_EQ(apart.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  ASSERT_EQ(packed.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(c.device);
  apart.expect_right();
  EXPECT_EQ(packed.cache_k(), apart.cache_k());
  EXPECT_EQ(packed.cache_v(), apart.cache_v());
  const Tensor got = memory.read(), q_out = apart.q_out();
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < 12; ++h)
      for (int64_t i = 0; i < 5; ++i)
        for (int64_t ch = 0; ch < 32; ++ch)
          ASSERT_EQ(got.at(b, h, i, ch), h < 6   ? q_out.at(b, h, i, ch)
                                         : h < 9 ? apart.k().at(b, h - 6, i, ch)
                                                 : apart.v().at(b, h - 9, i, ch));
}

// ---- random appends -----------------------------------------------------------------------------

// The seed is all that a failure's case is made from.
AppendCase draw(Device device, uint64_t seed) {
  Random random(seed);
  const auto coin = [&] { return random.below(2) == 1; };
  constexpr int64_t kDims[] = {1, 2, 7, 16, 33, 46, 64, 80, 128, 192, 256, 576};
  AppendCase c;
  c.device = device;
  c.dtype = random.pick(kAllDtypes);
  if (coin()) c.dtype_k = random.pick(kStoredDtypes);
  if (coin()) c.dtype_v = random.pick(kStoredDtypes);
  c.batch = 1 + random.below(5);
  c.len = 1 + random.below(9);
  c.heads_kv = 1 + random.below(3);
  if (coin()) c.heads_q = c.heads_kv * (1 + random.below(7));
  c.dim = random.pick(kDims);
  c.dim_v = coin() ? c.dim : random.below(4) == 0 ? 0 : random.pick(kDims);
  c.max_len = 1 + random.below(70);
  if (random.below(3) > 0) {
    c.page_size = 1 + random.below(20);
    c.csr = coin(), c.wide_ids = coin();
  }
  c.slots_outermost = coin();
  c.layout_seed = static_cast<uint64_t>(random.below(3)) * seed;
  c.seed = seed;
  if (c.page_size == 0 && coin()) {
    for (int64_t b = 0; b <= c.batch; ++b) c.entries.push_back(static_cast<int32_t>(b));
    std::swap(c.entries[0], c.entries[static_cast<size_t>(random.below(c.batch + 1))]);
    c.entries.pop_back();
  }
  // Past what is there by a few on each side; no slot twice.
  if (coin())
    for (int64_t b = 0; b < c.batch; ++b)
      c.lengths.push_back(static_cast<int32_t>(random.below(c.max_len + 4) - 2));
  if (c.lengths.empty() || random.below(3) == 0)
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t first = random.below(c.max_len + 4) - 2, step = coin() ? 1 : -1;
      for (int64_t i = 0; i < c.len; ++i)
        c.positions.push_back(static_cast<int32_t>(first + step * i));
    }
  if (random.below(3) == 0) {
    const int64_t all = c.pool() * c.entry_slots(), first = random.below(all + 4) - 2;
    for (int64_t n = 0; n < c.batch * c.len; ++n) c.slots.push_back(first + 3 * n);
  }
  if (c.dim > 1 && coin()) {
    c.rotary_dim = 2 * (1 + random.below(c.dim / 2));
    c.max_position = c.max_len - random.below(c.max_len);
    c.interleaved = coin();
  }
  constexpr int64_t kGroups[] = {0, 32, 64, 128};
  c.scales = coin(), c.zeros = coin(), c.one_scale = coin();
  c.scale_group = random.pick(kGroups);
  c.scale_dtype = random.pick(kAllDtypes);
  c.norm_k = random.below(3) == 0;
  c.norm_q = c.heads_q > 0 && random.below(3) == 0;
  if (c.norm_k || c.norm_q) c.epsilon = coin() ? 1e-6f : 0.0f;
  c.in_place = c.heads_q > 0 && coin();
  return c;
}

// What the tools take for the draws and the features of this kernel, by their names (grid.cpp has those of the others).
struct AppendTarget {
  Device device;
  const char* kernel;
  int64_t shard;
};
std::vector<AppendTarget> append_targets(int64_t shards) {
  std::vector<AppendTarget> list;
  for (int64_t shard = 0; shard < shards; ++shard) {
    list.push_back({Device::kCpu, "append_reference_cpu", shard});
    list.push_back({Device::kCuda, "append_reference", shard});
  }
  return list;
}
std::string append_target_name(const testing::TestParamInfo<AppendTarget>& test) {
  return std::string(name_of(test.param.device)) + "_" + test.param.kernel + "_shard" +
         std::to_string(test.param.shard);
}

class AppendGrid : public testing::TestWithParam<AppendTarget> {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(GetParam().device); }
  void try_case(const AppendCase& c) {
    ++ran_;
    worst_ = std::max(worst_, expect_append(c));
  }
  void report() {
    RecordProperty("ran", ran_);
    RecordProperty("worst_ratio", std::to_string(worst_));
  }

 private:
  int ran_ = 0;
  double worst_ = 0;
};

// What the sanitizers run: everything that has code of its own, in few small calls.
class AppendFeatures : public AppendGrid {};

TEST_P(AppendFeatures, Accurate) {
  for (const Dtype dtype : kAllDtypes)
    for (const int64_t page_size : {0, 5})
      for (const bool interleaved : {false, true}) {
        AppendCase c;
        c.device = GetParam().device;
        c.dtype = dtype;
        c.dtype_k = page_size == 0 ? CUFLASH_INT4 : CUFLASH_FP8_E4M3;
        c.dtype_v = interleaved ? CUFLASH_INT8 : CUFLASH_F16;
        c.scales = c.zeros = true, c.scale_group = 32;
        c.batch = 3, c.heads_q = 4, c.heads_kv = 2, c.len = 5;
        c.dim = 47, c.dim_v = 70;
        c.page_size = page_size, c.csr = interleaved, c.wide_ids = interleaved;
        c.lengths = {13, 0, -1};
        c.rotary_dim = 34, c.interleaved = interleaved, c.max_position = 15;
        c.norm_q = c.norm_k = true, c.epsilon = 1e-6f;
        c.in_place = interleaved;
        c.layout_seed = 1;
        try_case(c);
        c.slots = {3, 1, -1, 7, 9, 20, 1000, 21, 12, 13, 0, 2, 30, 31, 32};
        try_case(c);
      }
  report();
}
INSTANTIATE_TEST_SUITE_P(, AppendFeatures, testing::ValuesIn(append_targets(1)),
                         append_target_name);

constexpr int64_t kShards = 4;

class AppendDraws : public AppendGrid {};

TEST_P(AppendDraws, Accurate) {
  const int64_t draws = setting("CUFLASH_TEST_DRAWS", 400) / kShards;
  const int64_t shard = setting("CUFLASH_TEST_SEED", 1) * kShards + GetParam().shard;
  for (int64_t n = 0; n < draws && !HasFailure(); ++n)
    try_case(draw(GetParam().device, static_cast<uint64_t>(shard * 1'000'000 + n)));
  report();
}
INSTANTIATE_TEST_SUITE_P(, AppendDraws, testing::ValuesIn(append_targets(kShards)),
                         append_target_name);

}  // namespace
}  // namespace cuflash_test
