// The keys and values of a decode case in other caches than one entry for each sequence in turn: in pages, or in entries
// that the sequences choose.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "support/runner.hpp"

namespace cuflash_test {

// 0 to n - 1 in random order.
inline std::vector<int64_t> shuffled(int64_t n, Random& random) {
  std::vector<int64_t> list(static_cast<size_t>(n));
  std::iota(list.begin(), list.end(), 0);
  for (int64_t i = n; i > 1; --i)
    std::swap(list[static_cast<size_t>(i - 1)], list[static_cast<size_t>(random.below(i))]);
  return list;
}

struct PageSpec {
  int64_t page_size;
  bool csr, wide_ids;
  int32_t unused_id;  // of entries past a sequence's pages
};

// The pages that hold each sequence of a decode case, in random order out of a pool with one more that nobody uses, and the
// table or lists that tell them.
class Pages {
 public:
  Pages(const Case& c, const PageSpec& spec, Random& random) : spec_(spec) {
    const auto pages_for = [&](int64_t slots) {
      return (slots + spec.page_size - 1) / spec.page_size;
    };
    columns_ = pages_for(c.shape.len_k);
    std::vector<int64_t> used;
    for (int64_t b = 0; b < c.shape.batch; ++b)
      used.push_back(pages_for(c.pad_of(b) + c.keys_of(b)));
    count_ = std::accumulate(used.begin(), used.end(), int64_t{1});
    std::vector<int64_t> free = shuffled(count_, random);
    for (int64_t b = 0; b < c.shape.batch; ++b) {
      const int64_t needed = used[static_cast<size_t>(b)];
      // A list may be longer than its sequence needs: every second is.
      const int64_t listed = spec.csr ? std::min(columns_, needed + b % 2) : columns_;
      indptr_.push_back(static_cast<int32_t>(ids_.size()));
      for (int64_t n = 0; n < listed; ++n) {
        ids_.push_back(n < needed ? free.back() : spec.unused_id);
        if (n < needed) free.pop_back();
      }
    }
    indptr_.push_back(static_cast<int32_t>(ids_.size()));
    if (ids_.empty()) ids_.push_back(spec.unused_id);  // of lists without pages; never read
    ids64_ = std::make_unique<DeviceArray<int64_t>>(c.device, ids_);
    ids32_ = std::make_unique<DeviceArray<int32_t>>(c.device, ids());
    lists_ = std::make_unique<DeviceArray<int32_t>>(c.device, indptr_);
  }

  int64_t count() const { return count_; }  // of the pool
  // Which holds slot `slot` of sequence b.
  int64_t page_of(int64_t b, int64_t slot) const {
    return ids_[static_cast<size_t>(indptr_[static_cast<size_t>(b)] + slot / spec_.page_size)];
  }

  std::vector<int32_t> ids() const { return std::vector<int32_t>(ids_.begin(), ids_.end()); }
  void set_ids(const std::vector<int32_t>& ids) { ids32_->upload(ids); }

  // All of a cache that concerns pages.
  void install(cuflash_kv_cache_t& cache) const {
    cache.num_pages = count_;
    cache.page_size = spec_.page_size;
    cache.id_bits = spec_.wide_ids ? 64 : 32;
    const void* ids = spec_.wide_ids ? static_cast<void*>(ids64_->data()) : ids32_->data();
    cache.layout = spec_.csr ? CUFLASH_CACHE_PAGED_CSR : CUFLASH_CACHE_PAGED;
    if (spec_.csr) {
      cache.page_indptr = lists_->data();
      cache.page_indices = ids;
    } else {
      cache.block_table = ids;
      cache.block_table_stride = columns_;
    }
  }

 private:
  PageSpec spec_;
  int64_t columns_ = 0, count_ = 0;
  std::vector<int64_t> ids_;     // of one sequence after the other
  std::vector<int32_t> indptr_;  // where those of each begin
  std::unique_ptr<DeviceArray<int64_t>> ids64_;
  std::unique_ptr<DeviceArray<int32_t>> ids32_, lists_;
};

struct PoolSpec {
  int64_t page_size = 16;
  bool csr = false, wide_ids = false;
  bool slots_outermost = false;  // [page, slot, head, channel]
  int32_t unused_id = 0x7fffffff;
  uint64_t layout_seed = 0;  // not 0: random strides
};

// The keys and values moved into a pool of pages. What no sequence uses is NaN.
class Pool {
 public:
  Pool(const Case& c, const Inputs& inputs, const PoolSpec& spec, uint64_t seed = 1)
      : random_(seed),
        pages_(c, {spec.page_size, spec.csr, spec.wide_ids, spec.unused_id}, random_) {
    const int64_t pages = pages_.count(), size = spec.page_size;
    const Extents k_extents{pages, c.shape.heads_kv, size, c.shape.head_dim};
    const Extents v_extents{pages, c.shape.heads_kv, size, c.shape.dim_v()};
    Tensor k(pages, c.shape.heads_kv, size, k_extents.dim, std::nan(""));
    Tensor v(pages, c.shape.heads_kv, size, v_extents.dim, std::nan(""));
    for (int64_t b = 0; b < c.shape.batch; ++b)
      for (int64_t key = 0; key < c.keys_of(b); ++key) {
        const int64_t slot = c.pad_of(b) + key, page = pages_.page_of(b, slot);
        for (int64_t head = 0; head < c.shape.heads_kv; ++head) {
          std::copy_n(inputs.k.row(b, head, key), k.dim, k.row(page, head, slot % size));
          std::copy_n(inputs.v.row(b, head, key), v.dim, v.row(page, head, slot % size));
        }
      }
    const auto layout = [&](const Extents& e) {
      return spec.layout_seed != 0  ? random_layout(e, random_)
             : spec.slots_outermost ? bshd_layout(e)
                                    : bhsd_layout(e);
    };
    k_ = std::make_unique<StridedTensor>(c.device, c.dtype, k_extents, layout(k_extents));
    v_ = std::make_unique<StridedTensor>(c.device, c.dtype, v_extents, layout(v_extents));
    k_->write(k);
    v_->write(v);
    cuflash_kv_cache_init(&cache_, sizeof cache_);
    cache_.k = k_->tensor();
    cache_.v = v_->tensor();
    cache_.max_len = c.shape.len_k;
    pages_.install(cache_);
  }

  cuflash_kv_cache_t& cache() { return cache_; }
  Pages& pages() { return pages_; }
  bool unchanged() const { return k_->unchanged() && v_->unchanged(); }

  // Makes a call read the pool.
  void install(Call& call) const {
    const int32_t* lengths = call.cache().lengths;
    call.cache() = cache_;
    call.cache().lengths = lengths;
  }

  // Decode over the pool.
  Results run(const Case& c, const Inputs& inputs) {
    Call call(c, inputs);
    install(call);
    call.use_pool();
    const cuflash_status_t status = call.launch();
    EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
    synchronize(c.device);
    EXPECT_TRUE(unchanged());
    Outcome outcome = call.collect(status);
    EXPECT_EQ(outcome.damage, "");
    return outcome.results;
  }

 private:
  Random random_;
  Pages pages_;
  std::unique_ptr<StridedTensor> k_, v_;
  cuflash_kv_cache_t cache_;
};

// The keys and values moved into entries of a contiguous cache in random order, among some that are NaN and nobody's.
class ChosenEntries {
 public:
  ChosenEntries(const Case& c, const Inputs& inputs, uint64_t seed) {
    Random random(seed);
    entries_ = c.shape.batch + random.below(3);
    const std::vector<int64_t> order = shuffled(entries_, random);
    Tensor k(entries_, c.shape.heads_kv, c.shape.len_k, c.shape.head_dim, std::nan(""));
    Tensor v(entries_, c.shape.heads_kv, c.shape.len_k, c.shape.dim_v(), std::nan(""));
    std::vector<int32_t> list;
    for (int64_t b = 0; b < c.shape.batch; ++b) {
      const int64_t entry = order[static_cast<size_t>(b)];
      list.push_back(static_cast<int32_t>(entry));
      for (int64_t head = 0; head < c.shape.heads_kv; ++head)
        for (int64_t key = 0; key < c.keys_of(b); ++key) {
          std::copy_n(inputs.k.row(b, head, key), k.dim, k.row(entry, head, c.pad_of(b) + key));
          std::copy_n(inputs.v.row(b, head, key), v.dim, v.row(entry, head, c.pad_of(b) + key));
        }
    }
    const auto place = [&](const Tensor& t) {
      const Extents e{t.batch, t.heads, t.rows, t.dim};
      auto placed = std::make_unique<StridedTensor>(c.device, c.dtype, e, random_layout(e, random));
      placed->write(t);
      return placed;
    };
    k_ = place(k);
    v_ = place(v);
    list_ = std::make_unique<DeviceArray<int32_t>>(c.device, list);
  }

  bool unchanged() const { return k_->unchanged() && v_->unchanged(); }

  void install(Call& call) const {
    call.cache().k = k_->tensor();
    call.cache().v = v_->tensor();
    call.cache().num_pages = entries_;
    call.cache().cache_batch_idx = list_->data();
  }

 private:
  int64_t entries_;
  std::unique_ptr<StridedTensor> k_, v_;
  std::unique_ptr<DeviceArray<int32_t>> list_;
};

}  // namespace cuflash_test
