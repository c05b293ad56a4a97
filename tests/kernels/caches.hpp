// The keys and values of a decode case in other caches than one entry for each sequence in turn: in pages, or in entries
// that the sequences choose.
#pragma once

#include <gtest/gtest.h>

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

struct PoolSpec {
  int64_t page_size = 16;
  bool csr = false, wide_ids = false;
  bool slots_outermost = false;  // [page, slot, head, channel]
  int32_t unused_id = 0x7fffffff;
  uint64_t layout_seed = 0;  // not 0: random strides
};

// The keys and values moved into a pool of pages in random order, with one page that nobody uses. What no sequence uses is
// NaN, and entries of the table past a sequence's pages are `unused_id`.
class Pool {
 public:
  Pool(const Case& c, const Inputs& inputs, const PoolSpec& spec, uint64_t seed = 1) {
    const int64_t size = spec.page_size, columns = (c.shape.len_k + size - 1) / size;
    std::vector<int64_t> pages_of;
    for (int64_t b = 0; b < c.shape.batch; ++b)
      pages_of.push_back((c.pad_of(b) + c.keys_of(b) + size - 1) / size);
    const int64_t pages = std::accumulate(pages_of.begin(), pages_of.end(), int64_t{1});
    Random random(seed);
    std::vector<int64_t> free = shuffled(pages, random);

    const Extents k_extents{pages, c.shape.heads_kv, size, c.shape.head_dim};
    const Extents v_extents{pages, c.shape.heads_kv, size, c.shape.dim_v()};
    Tensor k(pages, c.shape.heads_kv, size, k_extents.dim, std::nan(""));
    Tensor v(pages, c.shape.heads_kv, size, v_extents.dim, std::nan(""));
    std::vector<int64_t> ids;
    std::vector<int32_t> indptr = {0};
    for (int64_t b = 0; b < c.shape.batch; ++b) {
      const int64_t used = pages_of[static_cast<size_t>(b)];
      for (int64_t n = 0; n < (spec.csr ? used : columns); ++n) {
        ids.push_back(n < used ? free.back() : spec.unused_id);
        if (n >= used) continue;
        const int64_t page = free.back();
        free.pop_back();
        for (int64_t slot = 0; slot < size; ++slot) {
          const int64_t key = n * size + slot - c.pad_of(b);
          if (key < 0 || key >= c.keys_of(b)) continue;
          for (int64_t head = 0; head < c.shape.heads_kv; ++head) {
            std::copy_n(inputs.k.row(b, head, key), k.dim, k.row(page, head, slot));
            std::copy_n(inputs.v.row(b, head, key), v.dim, v.row(page, head, slot));
          }
        }
      }
      indptr.push_back(static_cast<int32_t>(ids.size()));
    }
    if (ids.empty()) ids.push_back(spec.unused_id);  // of a list without pages; never read
    const auto layout = [&](const Extents& e) {
      return spec.layout_seed != 0  ? random_layout(e, random)
             : spec.slots_outermost ? bshd_layout(e)
                                    : bhsd_layout(e);
    };
    k_ = std::make_unique<StridedTensor>(c.device, c.dtype, k_extents, layout(k_extents));
    v_ = std::make_unique<StridedTensor>(c.device, c.dtype, v_extents, layout(v_extents));
    k_->write(k);
    v_->write(v);
    ids64_ = std::make_unique<DeviceArray<int64_t>>(c.device, ids);
    ids_.assign(ids.begin(), ids.end());
    ids32_ = std::make_unique<DeviceArray<int32_t>>(c.device, ids_);
    indptr_ = std::make_unique<DeviceArray<int32_t>>(c.device, indptr);
    cuflash_kv_cache_init(&cache_, sizeof cache_);
    cache_.k = k_->tensor();
    cache_.v = v_->tensor();
    cache_.max_len = c.shape.len_k;
    cache_.num_pages = pages;
    cache_.page_size = size;
    cache_.id_bits = spec.wide_ids ? 64 : 32;
    const void* list = spec.wide_ids ? static_cast<void*>(ids64_->data()) : ids32_->data();
    cache_.layout = spec.csr ? CUFLASH_CACHE_PAGED_CSR : CUFLASH_CACHE_PAGED;
    if (spec.csr) {
      cache_.page_indptr = indptr_->data();
      cache_.page_indices = list;
    } else {
      cache_.block_table = list;
      cache_.block_table_stride = columns;
    }
  }

  cuflash_kv_cache_t& cache() { return cache_; }
  const std::vector<int32_t>& ids() const { return ids_; }
  void set_ids(const std::vector<int32_t>& ids) { ids32_->upload(ids); }
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
  std::unique_ptr<StridedTensor> k_, v_;
  std::unique_ptr<DeviceArray<int64_t>> ids64_;
  std::unique_ptr<DeviceArray<int32_t>> ids32_, indptr_;
  std::vector<int32_t> ids_;
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
