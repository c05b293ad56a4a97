// Caches in pages: whatever the page size, the order of the pages and the way of naming them, decode gives the bits of a
// contiguous cache.
#include <cmath>
#include <limits>

#include "kernels/caches.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

class CasesOfPages : public FullFamilyTest {
 protected:
  // A case that only a kernel with pages takes.
  static Case decode(const FullFamily& family, const Shape& shape,
                     const std::vector<int32_t>& lengths, const MaskSpec& mask = {}) {
    Case c = make_case(family, Operation::kDecode, shape, mask);
    c.lengths = lengths;
    c.kernel = family.family;
    return c;
  }
};
CUFLASH_FOR_FULL_FAMILIES(CasesOfPages);

TEST_P(CasesOfPages, B48_TheRestOfTheLastPageIsNan) {
  for (const int32_t length : {1, 5, 15, 16, 17, 31}) {
    const Case c = decode(GetParam(), {1, 2, 1, 1, 64, 32}, {length});
    const Inputs inputs = make_inputs(c, DataKind::kHash);
    expect_same_bits(Pool(c, inputs, {}).run(c, inputs), run_ok(c, inputs));
  }
}

TEST_P(CasesOfPages, B101_UnusedEntriesOfTheTable) {
  const Case c = decode(GetParam(), {2, 2, 1, 1, 128, 16}, {20, 0});
  const Inputs inputs = make_inputs(c, DataKind::kHash);
  const Results contiguous = run_ok(c, inputs);
  for (const int32_t unused : {-1, 0x7fffffff, 3, std::numeric_limits<int32_t>::min()}) {
    PoolSpec spec;
    spec.unused_id = unused;
    expect_same_bits(Pool(c, inputs, spec).run(c, inputs), contiguous);
  }
}

// In use an id that the pool does not have hides its keys.
TEST_P(CasesOfPages, B101_IdsOutsideThePool) {
  const Case c = decode(GetParam(), {1, 1, 1, 1, 48, 8}, {48});
  Inputs inputs = zero_inputs(c);
  set(inputs.v, [](auto, auto, int64_t key, auto) { return key / 16; });
  for (const int32_t bad : {-1, 4, 0x7fffffff}) {
    Pool pool(c, inputs, {});
    std::vector<int32_t> ids = pool.pages().ids();
    ids[1] = bad;
    const DeviceArray<int32_t> table(c.device, ids);
    pool.cache().block_table = table.data();
    const Results results = pool.run(c, inputs);
    EXPECT_NEAR(results.lse.at(0, 0, 0), std::log(32.0), 1e-6);
  }
}

TEST_P(CasesOfPages, B102_AnyPageSize) {
  for (const Dtype dtype : kAllDtypes)
    for (const int64_t size : {1, 2, 3, 16, 19, 48, 256})
      for (const bool csr : {false, true}) {
        Case c = decode(GetParam(), {3, 4, 2, 2, 300, 64}, {1, 97, 300}, causal_mask());
        c.dtype = dtype;
        c.num_splits = 1 + static_cast<int32_t>(size % 3);
        const Inputs inputs = make_inputs(c, DataKind::kHash);
        PoolSpec spec{size, csr, size % 2 == 0, size % 3 == 0, -7};
        expect_same_bits(Pool(c, inputs, spec).run(c, inputs), run_ok(c, inputs));
      }
}

TEST_P(CasesOfPages, B103_PackedQueriesOverPagesInParts) {
  for (const int32_t splits : {1, 2, 5}) {
    Case c = decode(GetParam(), {3, 2, 1, 3, 300, 16}, {40, 300, 77}, causal_mask());
    c.lengths_q = {1, 2, 3};
    c.packing_q.packed = true;
    c.num_splits = splits;
    Inputs inputs = zero_inputs(c);
    set(inputs.v, [](int64_t b, auto, int64_t key, auto) { return 100 * b + key % 2; });
    const Results results = Pool(c, inputs, {}).run(c, inputs);
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t row = 0; row < c.rows_of(b); ++row)
        EXPECT_NEAR(results.o.at(b, 1, row, 5), 100.0 * static_cast<double>(b) + 0.5, 0.02);
    expect_same_bits(results, run_ok(c, inputs));
  }
}

// K and V in one buffer [page, 2, slot, head, channel].
TEST_P(CasesOfPages, B107_InterleavedKeysAndValues) {
  const Case c = decode(GetParam(), {1, 4, 2, 1, 32, 128}, {32});
  const Inputs inputs = make_inputs(c, DataKind::kHash);
  const Extents both{4, 2, 16, 128};  // pages 2n hold keys, 2n + 1 values
  StridedTensor memory(c.device, c.dtype, both, bshd_layout(both));
  memory.write(Tensor::from(4, 2, 16, 128, [&](int64_t half, auto head, auto slot, auto ch) {
    return (half % 2 ? inputs.v : inputs.k).at(0, head, half / 2 * 16 + slot, ch);
  }));
  Pool pool(c, inputs, {});
  const DeviceArray<int32_t> table(c.device, {0, 1});
  cuflash_tensor_t k = memory.tensor();
  cuflash_tensor_t v = k;
  v.data = static_cast<char*>(k.data) + k.batch_stride * bytes_of(c.dtype);
  k.batch_stride = v.batch_stride = 2 * k.batch_stride;
  pool.cache().k = k;
  pool.cache().v = v;
  pool.cache().num_pages = 2;
  pool.cache().block_table = table.data();
  expect_same_bits(pool.run(c, inputs), run_ok(c, inputs));
}

// With a window, sinks, softcap, slopes, left padding and values that are a prefix of the keys.
TEST_P(CasesOfPages, FeaturesTogether) {
  Case c = decode(GetParam(), {2, 4, 1, 5, 90, 24}, {90, 33}, window_mask(20, 0));
  c.left_pad = {3, 30};
  c.softcap = 2;
  c.slopes = SlopesSpec{};
  c.sinks = Dtype::kF32;
  c.num_splits = 2;
  const Inputs inputs = make_inputs(c, DataKind::kNormal);
  const Results paged = Pool(c, inputs, {7}).run(c, inputs);
  EXPECT_TRUE(judge(c, inputs, paged).ok);
  expect_same_bits(paged, run_ok(c, inputs));
}

// Lengths beyond a sequence's list of pages are cut to it.
TEST_P(CasesOfPages, B100_LengthsBeyondThePages) {
  const Case c = decode(GetParam(), {2, 1, 1, 1, 40, 8}, {40, 40});
  const Inputs inputs = zero_inputs(c);
  PoolSpec spec;
  spec.csr = true;
  Pool pool(c, inputs, spec);
  const DeviceArray<int32_t> indptr(c.device, {0, 2, 2});
  pool.cache().page_indptr = indptr.data();
  const Results results = pool.run(c, inputs);
  EXPECT_NEAR(results.lse.at(0, 0, 0), std::log(32.0), 1e-6);
  EXPECT_EQ(results.lse.at(1, 0, 0), -std::numeric_limits<double>::infinity());
}

// Sequences that choose their entries of a contiguous cache; an entry that it lacks has no keys.
TEST_P(CasesOfPages, EntriesOfAContiguousCache) {
  const Case c = decode(GetParam(), {3, 2, 1, 1, 20, 16}, {20, 7, 11});
  const Inputs inputs = make_inputs(c, DataKind::kNormal);
  const std::vector<int32_t> entries = {4, 0, 9};
  const Extents e{5, 1, 20, 16};
  StridedTensor k(c.device, c.dtype, e, dense_layout(e)), v(c.device, c.dtype, e, dense_layout(e));
  const auto moved = [&](const Tensor& t) {
    return Tensor::from(5, 1, 20, 16, [&](int64_t entry, auto h, auto r, auto ch) {
      return entry == 4 ? t.at(0, h, r, ch) : entry == 0 ? t.at(1, h, r, ch) : std::nan("");
    });
  };
  k.write(moved(inputs.k));
  v.write(moved(inputs.v));
  const DeviceArray<int32_t> list(c.device, entries);
  Call call(c, inputs);
  call.cache().k = k.tensor();
  call.cache().v = v.tensor();
  call.cache().num_pages = 5;
  call.cache().cache_batch_idx = list.data();
  const cuflash_status_t status = call.launch();
  EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(c.device);
  const Results results = call.collect(status).results;
  Case without = c;
  without.lengths = {20, 7, 0};
  expect_same_bits(results, run_ok(without, inputs));
}

}  // namespace
}  // namespace cuflash_test
