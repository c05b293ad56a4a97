// The keys and values of a decode case in a cache that keeps them in dtypes of its own, with scales and zero points.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/caches.hpp"
#include "kernels/targets.hpp"
#include "support/stored.hpp"

namespace cuflash_test {

// How a cache keeps its elements, and where.
struct CacheSpec {
  int32_t k = CUFLASH_FP8_E4M3, v = CUFLASH_FP8_E4M3;
  bool scales = true, zeros = false;  // zeros of what is an integer
  bool per_page = false, per_head = false, per_slot = false;
  int64_t group = 0;
  Dtype scale_dtype = Dtype::kF32;
  int32_t layout = CUFLASH_CACHE_CONTIGUOUS;
  int64_t page_size = 0;
  bool entries = false;  // sequences choose theirs
  bool wide_ids = false;
  int32_t unused_id = 0x7fffffff;  // of table entries past a sequence's pages
  bool slots_outermost = false;    // [page, slot, head, channel]
  bool v_is_k_prefix = false;
  int64_t gap = 0;  // elements after each row
  uint64_t seed = 1;
  unsigned char garbage = 0xff;  // NaN in fp8, f16, bf16 and f32

  bool paged() const { return layout != CUFLASH_CACHE_CONTIGUOUS; }
  bool zeros_of_k() const { return zeros && is_integer(k); }
  bool zeros_of_v() const { return zeros && is_integer(v) && !v_is_k_prefix; }
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

// Inputs from which a call can be made whose cache comes later: with keys and values that the problem's dtype can hold.
inline Inputs with_rounded_keys(const Case& c, Inputs inputs) {
  round_values(inputs.k, c.dtype);
  round_values(inputs.v, c.dtype);
  return inputs;
}

class QuantisedCache {
 public:
  // Takes the keys and values of `inputs` as well as its dtypes can, and leaves there what it took.
  QuantisedCache(const Case& c, Inputs& inputs, const CacheSpec& spec)
      : case_(c), spec_(spec), random_(spec.seed) {
    cuflash_kv_cache_init(&cache_, sizeof cache_);
    place_sequences();
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
    if (spec.v_is_k_prefix)
      set(inputs.v, [&](auto b, auto h, auto r, auto ch) { return inputs.k.at(b, h, r, ch); });
    else
      fill(inputs.v, spec.v, 1, &cache_.v);
    if (spec.scales) {
      cache_.k_scale = scales_[0]->upload(c.device);
      if (!spec.v_is_k_prefix) cache_.v_scale = scales_[1]->upload(c.device);
    }
    if (spec.zeros_of_k()) cache_.k_zero = scales_[2]->upload(c.device);
    if (spec.zeros_of_v()) cache_.v_zero = scales_[3]->upload(c.device);
    if (spec.scales || cache_.k_zero != nullptr || cache_.v_zero != nullptr) {
      cache_.scale_page_stride = page_stride;
      cache_.scale_head_stride = head_stride;
      cache_.scale_slot_stride = slot_stride;
      cache_.scale_group = spec.group;
      cache_.scale_dtype = static_cast<int32_t>(spec.scale_dtype);
    }
  }

  cuflash_kv_cache_t& cache() { return cache_; }
  bool unchanged() const { return sides_[0].unchanged() && sides_[1].unchanged(); }

  // Makes a call read the cache.
  void install(Call& call) const {
    const int32_t* lengths = call.cache().lengths;
    call.cache() = cache_;
    call.cache().lengths = lengths;
    if (spec_.v_is_k_prefix) call.problem().flags |= CUFLASH_PROBLEM_V_IS_K_PREFIX;
  }

  Results run(const Inputs& inputs) const {
    Call call(case_, with_rounded_keys(case_, inputs));
    install(call);
    call.use_pool();
    const cuflash_status_t status = call.launch();
    EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
    synchronize(case_.device);
    EXPECT_TRUE(unchanged());
    Outcome outcome = call.collect(status);
    EXPECT_EQ(outcome.damage, "");
    return outcome.results;
  }

 private:
  struct Side {
    std::vector<unsigned char> image;
    std::unique_ptr<Buffer> memory;  // none: V is a prefix of K

    bool unchanged() const {
      if (!memory) return true;
      std::vector<unsigned char> now(image.size());
      memory->download(now.data());
      return now == image && memory->guards_intact();
    }
  };

  // Pages, or an entry of the cache for each sequence among some that are nobody's.
  void place_sequences() {
    cache_.max_len = case_.shape.len_k;
    if (spec_.paged()) {
      const bool csr = spec_.layout == CUFLASH_CACHE_PAGED_CSR;
      table_ = std::make_unique<Pages>(
          case_, PageSpec{spec_.page_size, csr, spec_.wide_ids, spec_.unused_id}, random_);
      table_->install(cache_);
      slots_ = spec_.page_size;
      pages_ = table_->count();
      return;
    }
    slots_ = case_.shape.len_k;
    pages_ = cache_.num_pages = case_.shape.batch + 2;
    entries_ = shuffled(pages_, random_);
    if (!spec_.entries) {
      std::sort(entries_.begin(), entries_.end());
      return;
    }
    chosen_ = std::make_unique<DeviceArray<int32_t>>(
        case_.device, std::vector<int32_t>(entries_.begin(), entries_.begin() + case_.shape.batch));
    cache_.cache_batch_idx = chosen_->data();
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
    std::vector<unsigned char>& image = sides_[side].image;
    image.assign(static_cast<size_t>(pages_ * out.batch_stride * bits + 7) / 8, spec_.garbage);
    const bool zeros = side == 0 ? spec_.zeros_of_k() : spec_.zeros_of_v();
    // Codes that use much of the format for values of about 1.
    const double unit = spec_.scales ? 4 / (dtype < CUFLASH_FP8_E4M3 ? 4 : largest_of(dtype)) : 1;
    const auto draw_scale = [&] { return unit * (0.5 + random_.uniform()); };
    const auto draw_zero = [&] { return std::floor(9 * random_.uniform()) / 2 - 2; };
    for (int64_t b = 0; b < t.batch; ++b)
      for (int64_t key = 0; key < case_.keys_of(b); ++key) {
        const int64_t n = case_.pad_of(b) + key;
        const int64_t page = table_ ? table_->page_of(b, n) : entries_[static_cast<size_t>(b)];
        const int64_t slot = n % slots_;
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t ch = 0; ch < t.dim; ++ch) {
            double &x = t.at(b, head, key, ch), scale = 1, zero = 0;
            if (spec_.scales)
              scale = scales_[static_cast<size_t>(side)]->at(page, head, slot, ch, draw_scale);
            if (zeros)
              zero = scales_[static_cast<size_t>(2 + side)]->at(page, head, slot, ch, draw_zero);
            const uint32_t code = nearest_code(dtype, x / scale + zero);
            x = (value_of_code(dtype, code) - zero) * scale;
            put_code(dtype, image.data(),
                     page * out.batch_stride + head * out.head_stride + slot * out.row_stride + ch,
                     code);
          }
      }
    sides_[side].memory = std::make_unique<Buffer>(case_.device, image.size());
    sides_[side].memory->upload(image.data());
    out.data = sides_[side].memory->data();
  }

  Case case_;
  CacheSpec spec_;
  Random random_;
  int64_t pages_ = 0, slots_ = 0;  // of the cache, of each page; entries are pages too
  std::unique_ptr<Pages> table_;   // where there are pages
  std::vector<int64_t> entries_;   // otherwise those of the sequences come first
  std::unique_ptr<DeviceArray<int32_t>> chosen_;
  std::vector<std::unique_ptr<Scales>> scales_;  // of k and v, then zero points of k and v
  Side sides_[2];                                // of k and v
  cuflash_kv_cache_t cache_;
};

}  // namespace cuflash_test
