// Caches that keep K and V in dtypes of their own, with scales and zero points. The oracle attends over the numbers that
// the codes stand for; and a cache of those numbers in fp32 gives the same bits.
#include "kernels/quantised_cache.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

class CasesOfQuantisedCaches : public FullFamilyTest {
 protected:
  static Case decode(const FullFamily& family, const Shape& shape, const MaskSpec& mask = {}) {
    Case c = make_case(family, Operation::kDecode, shape, mask);
    c.kernel = family.family;
    return c;
  }

  // Right, and what a cache of the same numbers in fp32 gives.
  static Results expect_right(const Case& c, const CacheSpec& spec) {
    SCOPED_TRACE(describe(c) + " k " + std::to_string(spec.k) + " v " + std::to_string(spec.v) +
                 " seed " + std::to_string(spec.seed));
    Inputs inputs = make_inputs(c, DataKind::kNormal, spec.seed);
    const Results results = QuantisedCache(c, inputs, spec).run(inputs);
    EXPECT_TRUE(judge(c, inputs, results).ok);
    CacheSpec wide;
    wide.k = wide.v = CUFLASH_F32;
    wide.scales = false;
    round_values(inputs.k, Dtype::kF32);
    round_values(inputs.v, Dtype::kF32);
    const Results of_wide = QuantisedCache(c, inputs, wide).run(inputs);
    EXPECT_TRUE(judge(c, inputs, of_wide).ok);
    // On a GPU the two ways of reading leave other multiplications and additions to be fused.
    if (c.device == Device::kCpu) expect_same_bits(of_wide, results);
    return results;
  }
};
CUFLASH_FOR_FULL_FAMILIES(CasesOfQuantisedCaches);

TEST_P(CasesOfQuantisedCaches, EveryPairOfDtypes) {
  uint64_t turn = 0;
  for (const int32_t k : kStoredDtypes)
    for (const int32_t v : kStoredDtypes)
      for (const bool scales : {true, false}) {
        Case c = decode(GetParam(), {2, 4, 2, 2, 37, 24}, causal_mask());
        c.dtype = kAllDtypes[++turn % 3];
        c.lengths = {37, 20};
        CacheSpec spec;
        spec.k = k, spec.v = v, spec.scales = scales;
        spec.zeros = turn % 2 == 0;
        spec.seed = turn;
        expect_right(c, spec);
      }
}

TEST_P(CasesOfQuantisedCaches, EveryShapeOfScales) {
  constexpr int64_t kDims[] = {1, 31, 64, 129, 256};
  constexpr int32_t kFormats[] = {CUFLASH_INT8, CUFLASH_FP8_E4M3, CUFLASH_INT4, CUFLASH_FP8_E5M2};
  uint64_t turn = 0;
  for (int shape = 0; shape < 8; ++shape)
    for (const int64_t group : {0, 32, 64, 128})
      for (const Dtype scale_dtype : kAllDtypes) {
        Case c = decode(GetParam(), {2, 6, 3, 1, 41, kDims[++turn % 5]});
        c.dtype = kAllDtypes[turn % 3];
        c.lengths = {30, 41};
        CacheSpec spec;
        spec.k = kFormats[turn % 4], spec.v = kFormats[turn / 4 % 4];
        spec.per_page = shape & 1, spec.per_head = shape & 2, spec.per_slot = shape & 4;
        spec.group = group, spec.scale_dtype = scale_dtype, spec.zeros = true;
        if (turn % 2) spec.layout = CUFLASH_CACHE_PAGED, spec.page_size = 7;
        spec.seed = turn;
        expect_right(c, spec);
      }
}

TEST_P(CasesOfQuantisedCaches, EveryLayout) {
  uint64_t turn = 0;
  for (const int32_t dtype : {CUFLASH_INT4, CUFLASH_INT8, CUFLASH_FP8_E4M3, CUFLASH_BF16})
    for (const int32_t layout :
         {CUFLASH_CACHE_CONTIGUOUS, CUFLASH_CACHE_PAGED, CUFLASH_CACHE_PAGED_CSR})
      for (const int64_t dim : {1, 15, 40})
        for (const bool slots_outermost : {false, true}) {
          Case c = decode(GetParam(), {3, 4, 2, 3, 50, dim}, causal_mask());
          c.lengths = {50, 0, 17};
          c.num_splits = 1 + static_cast<int32_t>(++turn % 3);
          CacheSpec spec;
          spec.k = spec.v = dtype;
          spec.layout = layout;
          spec.page_size =
              layout == CUFLASH_CACHE_CONTIGUOUS ? 0 : 1 + 5 * static_cast<int>(turn % 4);
          spec.entries = layout == CUFLASH_CACHE_CONTIGUOUS && turn % 2 == 0;
          spec.slots_outermost = slots_outermost;
          spec.gap = static_cast<int64_t>(turn % 3);
          spec.per_slot = spec.per_head = spec.per_page = true;
          spec.seed = turn;
          expect_right(c, spec);
        }
}

// What lies in slots that no sequence uses, in their scales and between the rows, changes no bit.
TEST_P(CasesOfQuantisedCaches, GarbageInUnusedSlots) {
  for (const int32_t dtype : {CUFLASH_FP8_E4M3, CUFLASH_INT4, CUFLASH_INT8}) {
    Case c = decode(GetParam(), {2, 2, 1, 1, 40, 19}, window_mask(9, 0));
    c.lengths = {23, 39};
    c.left_pad = {4, 0};
    CacheSpec spec;
    spec.k = spec.v = dtype;
    spec.per_slot = true;
    spec.gap = 3;
    const Inputs inputs = make_inputs(c, DataKind::kNormal);
    Inputs a = inputs, b = inputs;
    const Results results = QuantisedCache(c, a, spec).run(a);
    spec.garbage = 0x35;
    expect_same_bits(QuantisedCache(c, b, spec).run(b), results);
  }
}

// A 16-bit cache of the problem's dtype with scales of 1 gives the bits of one without.
TEST_P(CasesOfQuantisedCaches, ScalesOfOne) {
  for (const Dtype dtype : kAllDtypes) {
    Case c = decode(GetParam(), {2, 4, 1, 2, 300, 64}, causal_mask());
    c.dtype = dtype;
    c.lengths = {300, 90};
    Inputs inputs = make_inputs(c, DataKind::kHash);
    CacheSpec spec;
    spec.k = spec.v = static_cast<int32_t>(dtype);
    spec.scales = false;
    QuantisedCache cache(c, inputs, spec);
    const Results plain_cache = cache.run(inputs);
    expect_same_bits(plain_cache, run_ok(c, inputs));
    const DeviceArray<float> ones(c.device, {1.0f});
    cache.cache().k_scale = cache.cache().v_scale = ones.data();
    expect_same_bits(cache.run(inputs), plain_cache);
  }
}

TEST_P(CasesOfQuantisedCaches, ValuesThatAreAPrefixOfTheKeys) {
  for (const int32_t dtype : {CUFLASH_FP8_E4M3, CUFLASH_INT8, CUFLASH_INT4})
    for (const int64_t dim_v : {40, 64, 72}) {
      Case c = decode(GetParam(), {2, 8, 1, 1, 100, 72, dim_v});
      c.lengths = {100, 33};
      CacheSpec spec;
      spec.k = dtype;
      spec.v_is_k_prefix = true;
      spec.zeros = true;
      spec.per_slot = true;
      spec.group = 32;
      spec.layout = CUFLASH_CACHE_PAGED;
      spec.page_size = 16;
      expect_right(c, spec);
    }
}

}  // namespace
}  // namespace cuflash_test
