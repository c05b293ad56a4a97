// Appends to a cache through the struct API on a device, with everything around the call guarded, and what they must
// write, in fp64 from the header's text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/data.hpp"
#include "support/device.hpp"
#include "support/layout.hpp"
#include "support/stored.hpp"

namespace cuflash_test {

struct AppendCase {
  Device device = Device::kCpu;
  Dtype dtype = Dtype::kF32;         // of the new rows
  int32_t dtype_k = 0, dtype_v = 0;  // of the cache, of enum cuflash_dtype; 0: the same
  int64_t batch = 1, heads_q = 0, heads_kv = 1, len = 1;
  int64_t dim = 8, dim_v = 8;  // dim_v 0: no values
  // The cache.
  int64_t max_len = 16;
  int64_t page_size = 0;               // 0: contiguous
  bool scales = false, zeros = false;  // zeros of what is an integer
  bool one_scale = false;              // else one for each group of each slot
  int64_t scale_group = 0;
  Dtype scale_dtype = Dtype::kF32;
  bool csr = false, wide_ids = false;
  bool slots_outermost = false;  // [page, slot, head, channel]
  std::vector<int64_t> pages;    // ids, [batch, columns]; empty: some of the pool in a random order
  std::vector<int32_t> indptr;   // of CSR; empty: all columns of each sequence
  std::vector<int32_t> entries;  // cache_batch_idx of a cache with one entry more than sequences
  // Where the tokens go: one of them, or positions or lengths with slots for the angles.
  std::vector<int32_t> lengths, positions;
  std::vector<int64_t> slots;
  // What is done to the rows.
  int64_t rotary_dim = 0, max_position = 0;  // rotary_dim 0: no rotation
  bool interleaved = false;
  bool norm_q = false, norm_k = false;
  float epsilon = 0;
  bool in_place = false;
  double amplitude = 1;      // of the new rows
  uint64_t layout_seed = 0;  // not 0: each tensor has a random layout
  uint64_t seed = 1;

  int32_t stored_k() const { return dtype_k != 0 ? dtype_k : static_cast<int32_t>(dtype); }
  int32_t stored_v() const { return dtype_v != 0 ? dtype_v : static_cast<int32_t>(dtype); }
  int64_t columns() const { return page_size == 0 ? 0 : (max_len + page_size - 1) / page_size; }
  int64_t pool() const;  // pages or entries
  int64_t entry_slots() const { return page_size == 0 ? max_len : page_size; }
};

// One line from which a case can be built again.
std::string describe(const AppendCase& c);

// A side of a cache on the device, as codes. What lies between and around them is 0xff.
class StoredTensor {
 public:
  StoredTensor(Device device, int32_t dtype, const Extents& extents, const Layout& layout);

  void write(const std::vector<uint32_t>& codes);
  std::vector<uint32_t> read() const;
  bool surroundings_intact() const;
  cuflash_tensor_t tensor() const;

 private:
  template <class F>
  void for_each_element(F f) const;  // f(logical index, element in memory)

  int32_t dtype_;
  Extents extents_;
  Layout layout_;
  std::vector<unsigned char> image_;
  Buffer buffer_;
};

// A case with its memory on the device. Rows of k and v that the call must not read are NaN.
class AppendCall {
 public:
  explicit AppendCall(const AppendCase& c);
  AppendCall(const AppendCall&) = delete;
  AppendCall& operator=(const AppendCall&) = delete;

  cuflash_status_t launch(cuflash_stream_t stream = nullptr) const;
  // After the work is done: every channel is what it must be, all else is as it was. Failures are reported. The largest
  // error, as a part of the error allowed.
  double expect_right() const;
  // The cache and q_out as before the call; on the device only.
  void reset();
  // Other numbers on the device, and what must come of them.
  void set_lengths(const std::vector<int32_t>& lengths);

  const AppendCase& spec() const { return case_; }
  cuflash_kv_cache_t& cache() { return cache_; }
  cuflash_kv_append_t& append() { return append_; }
  const Tensor& q() const { return q_; }
  const Tensor& k() const { return k_; }
  const Tensor& v() const { return v_; }
  // As codes, [page or entry, head, slot, channel].
  std::vector<uint32_t> cache_k() const { return k_side_.memory->read(); }
  std::vector<uint32_t> cache_v() const { return v_side_.memory->read(); }
  Tensor q_out() const { return (case_.in_place ? new_q_ : q_out_)->read(); }

 private:
  struct Place {
    int64_t entry, slot;
  };
  // Where a token must go; none: it is skipped.
  std::optional<Place> place_of(int64_t b, int64_t i) const;
  int64_t position_of(int64_t b, int64_t i) const;
  bool has_angle(int64_t b, int64_t i) const;
  // One row as it must become, and how far off fp32 arithmetic may be.
  struct Row {
    std::vector<double> x, error;
  };
  Row changed(const double* row, const std::vector<double>& weights) const;
  Row changed_at(const Tensor& t, const std::vector<double>& weights, int64_t b, int64_t h,
                 int64_t i) const;
  void poison_skipped_rows();
  // K or V of the cache, with its scales and zero points [page or entry, head, slot, group], and what it held before.
  struct Side {
    const char* name;
    int32_t dtype;
    int64_t dim;
    std::vector<uint32_t> before;
    Tensor scale, zero;  // empty: 1 and 0
    std::unique_ptr<StoredTensor> memory;
    std::unique_ptr<StridedTensor> device_scale, device_zero;
  };
  void make_side(Side& side, uint32_t t, Random& layouts);
  double expect_side(const Side& side, const Tensor& rows) const;
  double expect_queries() const;
  template <class T>
  const T* on_device(const std::vector<T>& values, std::unique_ptr<DeviceArray<T>>& array);

  AppendCase case_;
  std::vector<int64_t> pages_;
  std::vector<int32_t> indptr_;
  Tensor k_, v_, q_;
  Side k_side_, v_side_;
  std::vector<float> cos_, sin_;
  std::vector<double> weights_q_, weights_k_;
  std::unique_ptr<StridedTensor> new_k_, new_v_, new_q_, q_out_, norm_q_, norm_k_;
  std::unique_ptr<DeviceArray<float>> device_cos_, device_sin_;
  std::unique_ptr<DeviceArray<int64_t>> device_slots_, wide_pages_;
  std::unique_ptr<DeviceArray<int32_t>> device_positions_, device_lengths_, device_pages_,
      device_indptr_, device_entries_;
  cuflash_kv_cache_t cache_;
  cuflash_kv_append_t append_;
};

// Launch, wait, and expect all to be right; the largest error as above.
double expect_append(const AppendCase& c);

}  // namespace cuflash_test
