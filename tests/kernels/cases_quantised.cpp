// Caches that keep K and V in dtypes of their own, with scales and zero points. The oracle attends over the numbers that
// the codes stand for; and a cache of those numbers in fp32 gives the same bits.
#include <cmath>
#include <memory>
#include <numeric>

#include "kernels/targets.hpp"
#include "support/stored.hpp"

namespace cuflash_test {
namespace {

// How a cache keeps its elements, and where.
struct CacheSpec {
  int32_t k = CUFLASH_FP8_E4M3, v = CUFLASH_FP8_E4M3;
  bool scales = true, zeros = false;  // zeros of what is an integer
  bool per_page = false, per_head = false, per_slot = false;
  int64_t group = 0;
  Dtype scale_dtype = Dtype::kF32;
  int32_t layout = CUFLASH_CACHE_CONTIGUOUS;
  int64_t page_size = 0;
  bool entries = false;          // sequences choose theirs
  bool slots_outermost = false;  // [page, slot, head, channel]
  int64_t gap = 0;               // elements after each row
  uint64_t seed = 1;
  unsigned char garbage = 0xff;  // NaN in fp8, f16, bf16 and f32

  bool paged() const { return layout != CUFLASH_CACHE_CONTIGUOUS; }
};

// Scales or zero points, drawn where an element first asks for one. All others are NaN.
class Scales {
 public:
  Scales(const CacheSpec& spec, int64_t page_stride, int64_t head_stride, int64_t slot_stride,
         int64_t size)
      : spec_(spec),
        page_stride_(page_stride),
        head_stride_(head_stride),
        slot_stride_(slot_stride),
        values_(static_cast<size_t>(size), std::nan("")) {}

  template <class F>
  double at(int64_t page, int64_t head, int64_t slot, int64_t channel, F draw) {
    const int64_t group = spec_.group == 0 ? 0 : channel / spec_.group;
    double& value = values_[static_cast<size_t>(page * page_stride_ + head * head_stride_ +
                                                slot * slot_stride_ + group)];
    if (std::isnan(value)) value = round_to(spec_.scale_dtype, draw());
    return value;
  }

  const void* upload(Device device) {
    const int bytes = bytes_of(spec_.scale_dtype);
    std::vector<unsigned char> image(values_.size() * static_cast<size_t>(bytes));
    for (size_t n = 0; n < values_.size(); ++n)
      store(spec_.scale_dtype, values_[n], &image[n * static_cast<size_t>(bytes)]);
    memory_ = std::make_unique<DeviceArray<unsigned char>>(device, image);
    return memory_->data();
  }

 private:
  CacheSpec spec_;
  int64_t page_stride_, head_stride_, slot_stride_;
  std::vector<double> values_;
  std::unique_ptr<DeviceArray<unsigned char>> memory_;
};

class QuantisedCache {
 public:
  // Takes the keys and values of `inputs` as well as its dtypes can, and leaves there what it took.
  QuantisedCache(const Case& c, Inputs& inputs, const CacheSpec& spec)
      : case_(c), spec_(spec), random_(spec.seed) {
    cuflash_kv_cache_init(&cache_, sizeof cache_);
    place_pages();
    const int64_t heads = c.shape.heads_kv, most = std::max(c.shape.head_dim, c.shape.dim_v());
    const int64_t groups = spec.group == 0 ? 1 : (most + spec.group - 1) / spec.group;
    // Where a scale is for one head, it may still lie with a gap.
    const int64_t slot_stride = spec.per_slot ? groups + 1 : 0;
    const int64_t head_stride = spec.per_head ? groups + slots_ * slot_stride + 2 : 0;
    const int64_t page_stride =
        spec.per_page ? groups + slots_ * slot_stride + heads * head_stride : 0;
    const int64_t size = groups + pages_ * page_stride + heads * head_stride + slots_ * slot_stride;
    for (int n = 0; n < 4; ++n)
      scales_.push_back(
          std::make_unique<Scales>(spec, page_stride, head_stride, slot_stride, size));
    fill(inputs.k, spec.k, 0, &cache_.k);
    const bool prefix = (c.flags & CUFLASH_PROBLEM_V_IS_K_PREFIX) != 0;
    if (prefix)
      set(inputs.v, [&](auto b, auto h, auto r, auto ch) { return inputs.k.at(b, h, r, ch); });
    else
      fill(inputs.v, spec.v, 1, &cache_.v);
    if (spec.scales) {
      cache_.k_scale = scales_[0]->upload(c.device);
      if (!prefix) cache_.v_scale = scales_[1]->upload(c.device);
    }
    if (has_zeros(spec.k)) cache_.k_zero = scales_[2]->upload(c.device);
    if (has_zeros(spec.v) && !prefix) cache_.v_zero = scales_[3]->upload(c.device);
    if (spec.scales || cache_.k_zero != nullptr || cache_.v_zero != nullptr) {
      cache_.scale_page_stride = page_stride;
      cache_.scale_head_stride = head_stride;
      cache_.scale_slot_stride = slot_stride;
      cache_.scale_group = spec.group;
      cache_.scale_dtype = static_cast<int32_t>(spec.scale_dtype);
    }
  }

  cuflash_kv_cache_t& cache() { return cache_; }

  Results run(const Inputs& inputs) {
    Inputs rounded = inputs;  // of no use but to make the call
    round_values(rounded.k, case_.dtype);
    round_values(rounded.v, case_.dtype);
    Call call(case_, rounded);
    const int32_t* lengths = call.cache().lengths;
    call.cache() = cache_;
    call.cache().lengths = lengths;
    call.use_pool();
    const cuflash_status_t status = call.launch();
    EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
    synchronize(case_.device);
    Outcome outcome = call.collect(status);
    EXPECT_EQ(outcome.damage, "");
    return outcome.results;
  }

 private:
  bool has_zeros(int32_t dtype) const { return spec_.zeros && is_integer(dtype); }

  // Which page and slot holds slot n of sequence b.
  void place_pages() {
    const int64_t batch = case_.shape.batch, len = case_.shape.len_k;
    cache_.max_len = len;
    cache_.layout = spec_.layout;
    slots_ = spec_.paged() ? spec_.page_size : len;
    const int64_t columns = spec_.paged() ? (len + slots_ - 1) / slots_ : 1;
    pages_ = batch * columns + 2;
    std::vector<int32_t> order(static_cast<size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    if (spec_.paged() || spec_.entries)
      for (size_t n = order.size(); n > 1; --n)
        std::swap(order[n - 1], order[static_cast<size_t>(random_.below(static_cast<int64_t>(n)))]);
    order.resize(static_cast<size_t>(batch * columns));
    page_of_ = order;
    columns_ = columns;
    cache_.num_pages = pages_;
    ids_ = std::make_unique<DeviceArray<int32_t>>(case_.device, order);
    if (spec_.entries) cache_.cache_batch_idx = ids_->data();
    if (!spec_.paged()) return;
    cache_.page_size = spec_.page_size;
    if (spec_.layout == CUFLASH_CACHE_PAGED) {
      cache_.block_table = ids_->data();
      cache_.block_table_stride = columns;
      return;
    }
    std::vector<int32_t> indptr;
    for (int64_t b = 0; b <= batch; ++b) indptr.push_back(static_cast<int32_t>(b * columns));
    indptr_ = std::make_unique<DeviceArray<int32_t>>(case_.device, indptr);
    cache_.page_indptr = indptr_->data();
    cache_.page_indices = ids_->data();
  }

  // Memory of K (side 0) or V (side 1), all garbage but the elements of keys in use.
  void fill(Tensor& t, int32_t dtype, int side, cuflash_tensor_t* tensor) {
    const int64_t heads = t.heads, bits = bits_of_stored(dtype);
    int64_t row = t.dim + spec_.gap;
    if (bits < 8) row += row % 2;
    cuflash_tensor_t& out = *tensor;
    out.dtype = dtype;
    out.row_stride = spec_.slots_outermost ? heads * row : row;
    out.head_stride = spec_.slots_outermost ? row : slots_ * row;
    out.batch_stride = slots_ * heads * row;
    std::vector<unsigned char> image(static_cast<size_t>(pages_ * out.batch_stride * bits + 7) / 8,
                                     spec_.garbage);
    // Codes that use much of the format for values of about 1.
    const double unit = spec_.scales ? 4 / (dtype < CUFLASH_FP8_E4M3 ? 4 : largest_of(dtype)) : 1;
    const auto draw_scale = [&] { return unit * (0.5 + random_.uniform()); };
    const auto draw_zero = [&] { return std::floor(9 * random_.uniform()) / 2 - 2; };
    for (int64_t b = 0; b < t.batch; ++b)
      for (int64_t key = 0; key < case_.keys_of(b); ++key) {
        const int64_t n = case_.pad_of(b) + key;
        const int64_t page = page_of_[static_cast<size_t>(b * columns_ + n / slots_)];
        const int64_t slot = n % slots_;
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t ch = 0; ch < t.dim; ++ch) {
            double &x = t.at(b, head, key, ch), scale = 1, zero = 0;
            if (spec_.scales)
              scale = scales_[static_cast<size_t>(side)]->at(page, head, slot, ch, draw_scale);
            if (has_zeros(dtype))
              zero = scales_[static_cast<size_t>(2 + side)]->at(page, head, slot, ch, draw_zero);
            const uint32_t code = nearest_code(dtype, x / scale + zero);
            x = (value_of_code(dtype, code) - zero) * scale;
            put_code(dtype, image.data(),
                     page * out.batch_stride + head * out.head_stride + slot * out.row_stride + ch,
                     code);
          }
      }
    memory_[side] = std::make_unique<DeviceArray<unsigned char>>(case_.device, image);
    out.data = memory_[side]->data();
  }

  Case case_;
  CacheSpec spec_;
  Random random_;
  int64_t pages_ = 0, slots_ = 0, columns_ = 1;
  std::vector<int32_t> page_of_;                 // [sequence, column]
  std::vector<std::unique_ptr<Scales>> scales_;  // of k and v, then zero points of k and v
  std::unique_ptr<DeviceArray<unsigned char>> memory_[2];
  std::unique_ptr<DeviceArray<int32_t>> ids_, indptr_;
  cuflash_kv_cache_t cache_;
};

class CasesOfQuantisedCaches : public DeviceTest {
 protected:
  static Case decode(Device device, const Shape& shape, const MaskSpec& mask = {}) {
    Case c = make_case(device, Operation::kDecode, shape, mask);
    c.kernel = "reference";
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
    Case same = c;
    same.flags &= ~uint32_t{CUFLASH_PROBLEM_V_IS_K_PREFIX};
    expect_same_bits(QuantisedCache(same, inputs, wide).run(inputs), results);
    return results;
  }
};
CUFLASH_FOR_DEVICES(CasesOfQuantisedCaches);

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
      c.flags = CUFLASH_PROBLEM_V_IS_K_PREFIX;
      c.lengths = {100, 33};
      CacheSpec spec;
      spec.k = dtype;
      spec.zeros = true;
      spec.per_slot = true;
      spec.group = 32;
      spec.layout = CUFLASH_CACHE_PAGED;
      spec.page_size = 16;
      expect_right(c, spec);
    }
}

// Everything at once, drawn.
TEST_P(CasesOfQuantisedCaches, RandomProducts) {
  const int draws = GetParam() == Device::kCpu ? 400 : 150;
  for (int draw = 1; draw <= draws; ++draw) {
    Random random(static_cast<uint64_t>(draw));
    const auto one_in = [&](int64_t n) { return random.below(n) == 0; };
    constexpr int64_t kDims[] = {1, 7, 16, 33, 64, 80, 127, 128, 192, 256, 320};
    constexpr int64_t kLengths[] = {1, 2, 17, 64, 129, 200};
    const int64_t heads_kv = 1 + random.below(3);
    Case c = decode(GetParam(), {1 + random.below(3), heads_kv * (1 + random.below(4)), heads_kv,
                                 1 + random.below(4), random.pick(kLengths), random.pick(kDims)});
    Shape& s = c.shape;
    if (one_in(3)) s.head_dim_v = random.pick(kDims);
    c.dtype = random.pick(kAllDtypes);
    if (one_in(2))
      c.mask = one_in(2) ? causal_mask() : window_mask(random.below(40), random.below(3));
    if (one_in(4)) c.mask.align = CUFLASH_ALIGN_TOP_LEFT;
    for (int64_t b = 0; b < s.batch; ++b)
      c.lengths.push_back(static_cast<int32_t>(random.below(s.len_k + 1)));
    if (one_in(3)) c.left_pad.assign(static_cast<size_t>(s.batch), 1);
    if (one_in(3)) {
      c.packing_q = {true, random.below(2), random.below(2)};
      for (int64_t b = 0; b < s.batch; ++b)
        c.lengths_q.push_back(static_cast<int32_t>(random.below(s.len_q + 1)));
    }
    if (one_in(3)) c.softcap = 3;
    if (one_in(3)) c.slopes = SlopesSpec{one_in(2), random.pick(kAllDtypes)};
    if (one_in(3)) c.bias = BiasSpec{one_in(2), one_in(2), one_in(2), random.pick(kAllDtypes)};
    if (one_in(3)) c.sinks = random.pick(kAllDtypes);
    if (one_in(3)) c.num_splits = static_cast<int32_t>(1 + random.below(9));
    if (one_in(3)) c.tree = random_tree(s, 1 + random.below(70), one_in(2), random.bits());
    c.wide = one_in(3);
    CacheSpec spec;
    spec.k = random.pick(kStoredDtypes), spec.v = random.pick(kStoredDtypes);
    spec.scales = !one_in(4), spec.zeros = one_in(2);
    spec.per_page = one_in(2), spec.per_head = one_in(2), spec.per_slot = one_in(2);
    constexpr int64_t kGroups[] = {0, 32, 64, 128};
    spec.group = random.pick(kGroups);
    spec.scale_dtype = random.pick(kAllDtypes);
    spec.layout = static_cast<int32_t>(random.below(3));
    if (spec.paged()) spec.page_size = 1 + random.below(40);
    spec.entries = !spec.paged() && one_in(2);
    spec.slots_outermost = one_in(2);
    spec.gap = random.below(5);
    spec.seed = static_cast<uint64_t>(draw);
    SCOPED_TRACE("draw " + std::to_string(draw));
    expect_right(c, spec);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace cuflash_test
