// Offsets past 2^31 and 2^32 elements: strides so large that a tensor of a few kilobytes spans gigabytes. On the CPU device
// that is address space alone; on CUDA it is memory, and the test is skipped where there is not enough.
#include <sys/mman.h>

#include <cstring>

#include "kernels/targets.hpp"

#if defined(CUFLASH_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace cuflash_test {
namespace {

// Memory of a device without guards; data() is null where there is not so much.
class FarMemory {
 public:
  FarMemory(Device device, size_t bytes) : device_(device), bytes_(bytes) {
    if (device == Device::kCpu) {
      data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data_ == MAP_FAILED) data_ = nullptr;
      return;
    }
#if defined(CUFLASH_WITH_CUDA)
    if (cudaMalloc(&data_, bytes) == cudaSuccess) return;
    data_ = nullptr;
    cudaGetLastError();
#endif
  }
  ~FarMemory() {
    if (data_ == nullptr) return;
    if (device_ == Device::kCpu) munmap(data_, bytes_);
#if defined(CUFLASH_WITH_CUDA)
    if (device_ == Device::kCuda) cudaFree(data_);
#endif
  }
  FarMemory(const FarMemory&) = delete;
  FarMemory& operator=(const FarMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

  void copy(void* target, const void* source, size_t bytes) const {
    if (device_ == Device::kCpu) std::memcpy(target, source, bytes);
#if defined(CUFLASH_WITH_CUDA)
    if (device_ == Device::kCuda) {
      ASSERT_EQ(cudaMemcpy(target, source, bytes, cudaMemcpyDefault), cudaSuccess);
    }
#endif
  }

 private:
  Device device_;
  size_t bytes_;
  void* data_ = nullptr;
};

enum Dimension { kBatch, kHead, kRow };

// Three rows, as the distance of the last is twice the stride; two of the others.
Shape shape_for(Dimension dimension) {
  return dimension == kRow ? Shape{2, 2, 2, 3, 3, 64} : Shape{2, 2, 2, 33, 65, 64};
}

// One dimension has the stride, the others lie densely between.
Layout far_layout(const Extents& e, Dimension dimension, int64_t stride) {
  Layout layout;
  layout.dense = false;
  switch (dimension) {
    case kBatch:
      layout.row_stride = e.dim, layout.head_stride = e.rows * e.dim, layout.batch_stride = stride;
      break;
    case kHead:
      layout.row_stride = e.dim, layout.batch_stride = e.rows * e.dim, layout.head_stride = stride;
      break;
    case kRow:
      layout.head_stride = e.dim, layout.batch_stride = e.heads * e.dim, layout.row_stride = stride;
      break;
  }
  return layout;
}

constexpr int64_t kStrides[] = {(int64_t{1} << 31) - 8, int64_t{1} << 31, (int64_t{1} << 32) + 8};
constexpr size_t kLargest = kStrides[2];

class FarStrides : public DeviceTest {
 protected:
  // One tensor after the other of each call is far apart; the results are those of the dense call.
  void expect_same_bits_in(Dimension dimension) {
    // LSE in fp32 reaches farthest.
    const FarMemory far(GetParam(), (dimension == kRow ? 2 : 1) * kLargest * 4 + (1 << 20));
    if (far.data() == nullptr) GTEST_SKIP() << "not enough memory for strides of 2^32 elements";
    for (const int64_t stride : kStrides)
      for (const Operation operation :
           {Operation::kForward, Operation::kBackward, Operation::kDecode})
        on_every_kernel(make_case(GetParam(), operation, shape_for(dimension)), kEveryDtype,
                        [&](const Case& c) { spread_each_tensor(c, far, dimension, stride); });
  }

 private:
  // Copies a dense tensor out to its far layout, or back.
  static void spread(const FarMemory& far, char* dense, const Extents& e, const Layout& layout,
                     size_t item_bytes, bool out) {
    const size_t row_bytes = static_cast<size_t>(e.dim) * item_bytes;
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h = 0; h < e.heads; ++h)
        for (int64_t r = 0; r < e.rows; ++r, dense += row_bytes) {
          char* place =
              far.data() + static_cast<size_t>(b * layout.batch_stride + h * layout.head_stride +
                                               r * layout.row_stride) *
                               item_bytes;
          out ? far.copy(place, dense, row_bytes) : far.copy(dense, place, row_bytes);
        }
  }

  static void spread_each_tensor(const Case& each, const FarMemory& far, Dimension dimension,
                                 int64_t stride) {
    const Inputs in = make_inputs(each, DataKind::kNormal);
    Call call(each, in);
    const cuflash_status_t status = call.launch();
    synchronize(each.device);
    const Results expected = call.collect(status).results;
    const auto run_far = [&](Role role, bool output, auto set_layout) {
      SCOPED_TRACE(static_cast<int>(role));
      const Layout layout = far_layout(each.extents(role), dimension, stride);
      const auto item_bytes = static_cast<size_t>(role == kLse ? 4 : bytes_of(each.dtype));
      auto* const dense = static_cast<char*>(call.tensor(role).data());
      if (output) call.poison_outputs();
      spread(far, dense, each.extents(role), layout, item_bytes, true);
      const auto put_back = set_layout(layout);
      ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
      synchronize(each.device);
      put_back();
      if (output) spread(far, dense, each.extents(role), layout, item_bytes, false);
      const Outcome outcome = call.collect(CUFLASH_SUCCESS);
      EXPECT_EQ(outcome.damage, "");
      expect_same_bits(outcome.results, expected);
    };
    const auto run_tensor = [&](Role role, bool output, cuflash_tensor_t& tensor) {
      run_far(role, output, [&](const Layout& layout) {
        const cuflash_tensor_t kept = tensor;
        tensor.flags = 0;
        tensor.data = far.data();
        tensor.batch_stride = layout.batch_stride;
        tensor.head_stride = layout.head_stride;
        tensor.row_stride = layout.row_stride;
        return [&tensor, kept] { tensor = kept; };
      });
    };
    cuflash_problem_t& problem = call.problem();
    const bool backward = each.operation == Operation::kBackward;
    run_tensor(kQ, false, problem.q);
    run_tensor(kO, !backward, problem.o);
    run_far(kLse, !backward, [&](const Layout& layout) {
      const cuflash_problem_t kept = problem;
      problem.lse = reinterpret_cast<float*>(far.data());
      problem.lse_batch_stride = layout.batch_stride;
      problem.lse_head_stride = layout.head_stride;
      problem.lse_row_stride = layout.row_stride;
      return [&problem, kept] { problem = kept; };
    });
    const bool decode = each.operation == Operation::kDecode;
    run_tensor(kK, false, decode ? call.cache().k : problem.k);
    run_tensor(kV, false, decode ? call.cache().v : problem.v);
    if (!backward) return;
    run_tensor(kDo, false, call.gradients().d_o);
    run_tensor(kDq, true, call.gradients().dq);
    run_tensor(kDk, true, call.gradients().dk);
    run_tensor(kDv, true, call.gradients().dv);
  }
};
CUFLASH_FOR_DEVICES(FarStrides);

TEST_P(FarStrides, P19_Batches) { expect_same_bits_in(kBatch); }
TEST_P(FarStrides, P19_Heads) { expect_same_bits_in(kHead); }
TEST_P(FarStrides, P19_Rows) { expect_same_bits_in(kRow); }

// Pages that begin 2^31 and 2^32 elements behind the first, K and V interleaved in them.
TEST_P(FarStrides, B62_B63_FarPages) {
  constexpr int64_t kSlots = 16, kHeads = 8, kDim = 128, kHalf = kSlots * kHeads * kDim;
  constexpr int64_t kPages = (int64_t{1} << 32) / (2 * kHalf) + 1;
  const FarMemory far(GetParam(), kPages * 2 * kHalf * 2);
  if (far.data() == nullptr) GTEST_SKIP() << "not enough memory for 2^32 elements of pages";
  Case c = make_case(GetParam(), Operation::kDecode, {1, 2 * kHeads, kHeads, 1, kSlots, kDim});
  c.dtype = Dtype::kBf16;
  int ran = 0;
  for (const std::string& kernel : kernels_of(c.operation, c.device)) {
    c.kernel = kernel;
    Inputs in = zero_inputs(c);
    set(in.v, [](auto...) { return 0.75; });
    Call call(c, in);
    call.use_pool();
    const auto put = [&](Role role, int64_t element) {
      far.copy(far.data() + element * 2, call.tensor(role).data(), kHalf * 2);
    };
    put(kK, 0);  // page 0 holds zeros
    put(kK, kHalf);
    cuflash_kv_cache_t& cache = call.cache();
    cache.layout = CUFLASH_CACHE_PAGED;
    cache.page_size = kSlots;
    cache.num_pages = kPages;
    cache.k.flags = 0;
    cache.k.data = far.data();
    cache.k.batch_stride = 2 * kHalf;
    cache.k.head_stride = kDim;
    cache.k.row_stride = kHeads * kDim;
    cache.v = cache.k;
    cache.v.data = far.data() + kHalf * 2;
    cache.block_table_stride = 1;
    for (const int32_t page : {65535, 65536, static_cast<int32_t>(kPages - 1)}) {
      put(kK, page * 2 * kHalf);
      put(kV, page * 2 * kHalf + kHalf);
      const DeviceArray<int32_t> table(c.device, {page});
      cache.block_table = table.data();
      call.poison_outputs();
      const cuflash_status_t status = call.launch();
      if (status == CUFLASH_ERROR_UNSUPPORTED) break;
      EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
      synchronize(c.device);
      expect_values(
          "o", call.collect(status).results.o, [](auto...) { return 0.75; }, c.dtype, 0);
      ++ran;
    }
  }
  EXPECT_GE(ran, 3);
}

// The parts of a merge are far apart, and so are those of its LSE.
TEST_P(FarStrides, P19_PartsOfAMerge) {
  const Device device = GetParam();
  constexpr int64_t kParts = 3, kRows = 2 * 3 * 5, kDim = 40;
  constexpr size_t kSpan = (kParts - 1) * kLargest;
  const FarMemory o_parts(device, (kSpan + kRows * kDim) * 2),
      lse_parts(device, (kSpan + kRows) * 4);
  if (o_parts.data() == nullptr || lse_parts.data() == nullptr)
    GTEST_SKIP() << "not enough memory for strides of 2^32 elements";
  std::vector<Results> parts(kParts);
  for (size_t n = 0; n < kParts; ++n) {
    parts[n].o = Tensor(2, 3, 5, kDim);
    parts[n].lse = Tensor(2, 3, 5, 1);
    fill(parts[n].o, DataKind::kNormal, 1, n, 0, Dtype::kF16);
    fill(parts[n].lse, DataKind::kNormal, 2, n, 0, Dtype::kF32);
  }
  const Outcome near = run_merge(device, Dtype::kF16, parts);
  ASSERT_EQ(near.status, CUFLASH_SUCCESS) << near.message;

  const Extents extents = {2, 3, 5, kDim}, rows = {2, 3, 5, 1};
  StridedTensor o(device, Dtype::kF16, extents, dense_layout(extents));
  StridedTensor lse(device, Dtype::kF32, rows, dense_layout(rows));
  cuflash_merge_t merge;
  cuflash_merge_init(&merge, sizeof merge);
  merge.num_parts = kParts;
  merge.batch = 2, merge.heads = 3, merge.len = 5, merge.head_dim = kDim;
  merge.parts = merge.o = o.tensor();
  merge.parts.data = o_parts.data();
  merge.lse_parts = reinterpret_cast<const float*>(lse_parts.data());
  merge.lse = static_cast<float*>(lse.data());
  for (const int64_t stride : kStrides) {
    for (size_t n = 0; n < kParts; ++n) {
      std::vector<uint16_t> o_bits(kRows * kDim);
      std::vector<float> lse_bits(kRows);
      for (size_t i = 0; i < o_bits.size(); ++i) store(Dtype::kF16, parts[n].o.x[i], &o_bits[i]);
      for (size_t i = 0; i < lse_bits.size(); ++i)
        store(Dtype::kF32, parts[n].lse.x[i], &lse_bits[i]);
      const size_t place = n * static_cast<size_t>(stride);
      o_parts.copy(o_parts.data() + place * 2, o_bits.data(), o_bits.size() * 2);
      lse_parts.copy(lse_parts.data() + place * 4, lse_bits.data(), lse_bits.size() * 4);
    }
    merge.part_stride = merge.lse_part_stride = stride;
    o.poison();
    lse.poison();
    ASSERT_EQ(cuflash_merge_states(handle_of(device), &merge, nullptr), CUFLASH_SUCCESS)
        << cuflash_last_error();
    synchronize(device);
    EXPECT_EQ(o.read().x, near.results.o.x);
    EXPECT_EQ(lse.read().x, near.results.lse.x);
  }
}

// Slots of a cache that are far apart, as entries, heads or rows. Two of each but of the rows three.
class FarCache {
 public:
  static constexpr int64_t kDim = 24, kLen = 3;

  FarCache(Device device, const FarMemory& memory, const Layout& layout, int64_t entries)
      : device_(device), memory_(memory), layout_(layout), entries_(entries) {}

  // Appends kLen tokens to each entry but the first, of which every channel is 1 + 100 * entry + 10 * head + token.
  void append() const {
    const std::vector<uint16_t> poison(kDim, 0xffff);
    for_each_row([&](auto, auto, auto, char* row) { memory_.copy(row, poison.data(), kDim * 2); });
    const Extents e = {entries_, 2, kLen, kDim};
    StridedTensor k(device_, Dtype::kF16, e, dense_layout(e));
    k.write(Tensor::from(e.batch, e.heads, e.rows, e.dim, number));
    std::vector<int32_t> lengths(static_cast<size_t>(entries_), 0);
    lengths[0] = -1;  // skipped
    const DeviceArray<int32_t> device_lengths(device_, lengths);
    cuflash_kv_cache_t cache;
    cuflash_kv_cache_init(&cache, sizeof cache);
    cache.k.data = memory_.data();
    cache.k.batch_stride = layout_.batch_stride;
    cache.k.head_stride = layout_.head_stride;
    cache.k.row_stride = layout_.row_stride;
    cache.max_len = kLen;
    cache.lengths = device_lengths.data();
    cuflash_kv_append_t append;
    cuflash_kv_append_init(&append, sizeof append);
    append.batch = entries_, append.heads_kv = 2, append.len = kLen, append.head_dim = kDim;
    append.k = k.tensor();
    ASSERT_EQ(cuflash_kv_cache_append(handle_of(device_), &cache, &append, nullptr),
              CUFLASH_SUCCESS)
        << cuflash_last_error();
    synchronize(device_);
    for_each_row([&](int64_t b, int64_t h, int64_t i, char* row) {
      std::vector<uint16_t> got(kDim);
      memory_.copy(got.data(), row, kDim * 2);
      for (const uint16_t& bits : got) {
        if (b == 0)
          ASSERT_EQ(bits, 0xffff) << "head " << h << " row " << i;
        else
          ASSERT_EQ(load(Dtype::kF16, &bits), number(b, h, i, 0));
      }
    });
  }

 private:
  static double number(int64_t b, int64_t h, int64_t i, int64_t) {
    return static_cast<double>(1 + 100 * b + 10 * h + i);
  }
  template <class F>
  void for_each_row(F f) const {
    for (int64_t b = 0; b < entries_; ++b)
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t i = 0; i < kLen; ++i)
          f(b, h, i,
            memory_.data() + static_cast<size_t>(b * layout_.batch_stride +
                                                 h * layout_.head_stride + i * layout_.row_stride) *
                                 2);
  }

  Device device_;
  const FarMemory& memory_;
  Layout layout_;
  int64_t entries_;
};

TEST_P(FarStrides, P19_AppendedSlots) {
  const FarMemory far(GetParam(), 2 * kLargest * 2 + (1 << 20));
  if (far.data() == nullptr) GTEST_SKIP() << "not enough memory for strides of 2^32 elements";
  for (const Dimension dimension : {kBatch, kHead, kRow})
    for (const int64_t stride : kStrides) {
      const Layout layout = far_layout({2, 2, FarCache::kLen, FarCache::kDim}, dimension, stride);
      FarCache(GetParam(), far, layout, 2).append();
    }
}

TEST_P(FarStrides, B61_AppendToEntriesFarApart) {
  constexpr int64_t kStride = int64_t{1} << 30;
  const FarMemory far(GetParam(), 4 * kStride * 2 + (1 << 20));
  if (far.data() == nullptr) GTEST_SKIP() << "not enough memory for five entries of 2 GB";
  const Layout layout = far_layout({5, 2, FarCache::kLen, FarCache::kDim}, kBatch, kStride);
  FarCache(GetParam(), far, layout, 5).append();
}

}  // namespace
}  // namespace cuflash_test
