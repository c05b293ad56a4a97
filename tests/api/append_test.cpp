// What cuflash_kv_cache_append() refuses, with which words, and its queries.
#include <functional>

#include "api/problem.hpp"

namespace cuflash_test {
namespace {

const cuflash_handle_t kCpu = handle_of(Device::kCpu);

// A small legal append on the CPU device, to be spoilt one field at a time.
struct SmallAppend {
  static constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kLen = 3, kMaxLen = 5, kDim = 8;
  static constexpr int64_t kPositions = 6;
  static constexpr size_t kNew = kBatch * kHeadsKv * kLen * kDim,
                          kSlots = kBatch * kHeadsKv * kMaxLen * kDim;
  static constexpr float kUntouched = -77;

  std::vector<float> k = std::vector<float>(kNew, 1), v = std::vector<float>(kNew, 2),
                     q = std::vector<float>(2 * kNew, 3);
  std::vector<float> q_out = std::vector<float>(2 * kNew, kUntouched),
                     cache_k = std::vector<float>(kSlots, kUntouched),
                     cache_v = std::vector<float>(kSlots, kUntouched);
  std::vector<float> cos = std::vector<float>(kPositions * kDim / 2, 1),
                     sin = std::vector<float>(kPositions * kDim / 2, 0),
                     weight = std::vector<float>(kDim, 1);
  std::vector<int32_t> lengths = {0, 2}, positions = {0, 1, 2, 2, 3, 4}, pages = {0, 1, 2, 3};
  std::vector<int64_t> slots = {0, 1, 2, 3, 4, 5};
  cuflash_kv_cache_t cache;
  cuflash_kv_append_t append;

  SmallAppend() {
    cuflash_kv_cache_init(&cache, sizeof cache);
    cache.k = SmallProblem::dense(cache_k.data());
    cache.v = SmallProblem::dense(cache_v.data());
    cache.max_len = kMaxLen;
    cache.lengths = lengths.data();
    cuflash_kv_append_init(&append, sizeof append);
    append.batch = kBatch;
    append.heads_q = kHeadsQ;
    append.heads_kv = kHeadsKv;
    append.len = kLen;
    append.head_dim = kDim;
    append.max_position = kPositions;
    append.k = SmallProblem::dense(k.data());
    append.v = SmallProblem::dense(v.data());
    append.q = SmallProblem::dense(q.data());
    append.q_out = SmallProblem::dense(q_out.data());
    append.cos = cos.data();
    append.sin = sin.data();
    append.q_norm_weight = append.k_norm_weight = weight.data();
    append.norm_epsilon = 1e-6f;
  }
  SmallAppend(const SmallAppend&) = delete;
  SmallAppend& operator=(const SmallAppend&) = delete;

  cuflash_status_t run() { return cuflash_kv_cache_append(kCpu, &cache, &append, nullptr); }
  void page() {
    cache.layout = CUFLASH_CACHE_PAGED;
    cache.page_size = 3;
    cache.num_pages = 3;
    cache.block_table = pages.data();
    cache.block_table_stride = 2;
  }
  void without_queries() {
    append.q = append.q_out = cuflash_tensor_t{};
    append.q_norm_weight = nullptr;
    append.heads_q = 0;
  }
  bool nothing_written() const {
    for (const std::vector<float>* output : {&q_out, &cache_k, &cache_v})
      for (const float value : *output)
        if (value != kUntouched) return false;
    return true;
  }
};

struct Spoil {
  const char* words;
  cuflash_status_t status;
  std::function<void(SmallAppend&)> spoil;
};

void expect_refusals(const std::vector<Spoil>& table) {
  for (const Spoil& row : table) {
    SmallAppend s;
    row.spoil(s);
    EXPECT_EQ(s.run(), row.status) << row.words << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.words));
    EXPECT_TRUE(s.nothing_written()) << row.words;
  }
}

void expect_accepted(const std::vector<std::function<void(SmallAppend&)>>& changes) {
  for (const auto& change : changes) {
    SmallAppend s;
    change(s);
    EXPECT_EQ(s.run(), CUFLASH_SUCCESS) << cuflash_last_error();
  }
}

TEST(Append, ExtentsAndValues) {
  constexpr auto kExtent = CUFLASH_ERROR_INVALID_DIMENSION;
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  expect_refusals({
      {"append.batch", kExtent, [](auto& s) { s.append.batch = -1; }},
      {"append.heads_q", kExtent, [](auto& s) { s.append.heads_q = int64_t{1} << 31; }},
      {"append.heads_kv", kExtent, [](auto& s) { s.append.heads_kv = -2; }},
      {"append.len", kExtent, [](auto& s) { s.append.len = -1; }},
      {"append.batch * heads_q * len", kExtent,
       [](auto& s) { s.append.batch = s.append.len = 0x7fffffff; }},
      {"append.batch * heads_kv * cache.max_len", kExtent,
       [](auto& s) { s.append.batch = s.cache.max_len = 0x7fffffff; }},
      {"append.heads_q", CUFLASH_ERROR_DIMENSION_MISMATCH, [](auto& s) { s.append.heads_q = 3; }},
      {"append.head_dim", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](auto& s) { s.append.head_dim = 577; }},
      {"append.head_dim_v", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](auto& s) { s.append.head_dim_v = -1; }},
      {"append.rotary_dim: 10", kExtent, [](auto& s) { s.append.rotary_dim = 10; }},
      {"append.rotary_dim: 3", kExtent, [](auto& s) { s.append.rotary_dim = 3; }},
      {"append.rotary_dim: 7", kExtent, [](auto& s) { s.append.head_dim = 7; }},
      {"append.max_position", kExtent, [](auto& s) { s.append.max_position = 0; }},
      {"append.max_position", kExtent, [](auto& s) { s.append.max_position = int64_t{1} << 31; }},
      {"append.norm_epsilon", kValue, [](auto& s) { s.append.norm_epsilon = -1; }},
      {"append.norm_epsilon", kValue, [](auto& s) { s.append.norm_epsilon = NAN; }},
      {"append.target_arch", kValue, [](auto& s) { s.append.target_arch = 90; }},
      {"append.flags", CUFLASH_ERROR_UNSUPPORTED, [](auto& s) { s.append.flags = 2; }},
      {"cache.flags", CUFLASH_ERROR_UNSUPPORTED, [](auto& s) { s.cache.flags = 1; }},
      {"cache.max_len", kExtent, [](auto& s) { s.cache.max_len = -1; }},
      {"cache.num_pages", CUFLASH_ERROR_DIMENSION_MISMATCH, [](auto& s) { s.cache.num_pages = 1; }},
      {"cache.page_size", kValue, [](auto& s) { s.cache.page_size = 4; }},
      {"cache.layout", kValue, [](auto& s) { s.cache.layout = 3; }},
      {"append", CUFLASH_ERROR_STRUCT_SIZE, [](auto& s) { s.append.struct_size = 8; }},
      {"cache", CUFLASH_ERROR_STRUCT_SIZE, [](auto& s) { s.cache.struct_size = 0; }},
  });
}

// What belongs to something that is not there.
TEST(Append, StrayFields) {
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  const auto unrotated = [](SmallAppend& s) {
    s.append.cos = s.append.sin = nullptr;
    s.append.max_position = 0;
  };
  expect_refusals({
      {"append.rotary_dim", kValue, [&](auto& s) { unrotated(s), s.append.rotary_dim = 4; }},
      {"append.max_position", kValue, [&](auto& s) { unrotated(s), s.append.max_position = 4; }},
      {"append.flags", kValue,
       [&](auto& s) { unrotated(s), s.append.flags = CUFLASH_APPEND_INTERLEAVED; }},
      {"append.norm_epsilon", kValue,
       [](auto& s) { s.append.q_norm_weight = s.append.k_norm_weight = nullptr; }},
      {"append.q_out", kValue, [](auto& s) { s.append.q = cuflash_tensor_t{}; }},
      {"append.heads_q", kValue, [](auto& s) { s.append.q = s.append.q_out = cuflash_tensor_t{}; }},
      {"append.q_norm_weight", kValue,
       [](auto& s) {
         s.append.q = s.append.q_out = cuflash_tensor_t{};
         s.append.heads_q = 0;
       }},
  });
  expect_accepted({unrotated, [](auto& s) { s.without_queries(); }});
}

TEST(Append, Pointers) {
  constexpr auto kNull = CUFLASH_ERROR_NULL_POINTER;
  constexpr auto kMisaligned = CUFLASH_ERROR_MISALIGNED;
  const auto odd = [](const auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<const char*>(pointer) + 2);
  };
  expect_refusals({
      {"append.k", kNull, [](auto& s) { s.append.k.data = nullptr; }},
      {"append.v", kNull, [](auto& s) { s.append.v.data = nullptr; }},
      {"append.q", kNull, [](auto& s) { s.append.q.data = nullptr; }},
      {"append.q_out", kNull, [](auto& s) { s.append.q_out.data = nullptr; }},
      {"cache.k", kNull, [](auto& s) { s.cache.k.data = nullptr; }},
      {"cache.v", kNull, [](auto& s) { s.cache.v.data = nullptr; }},
      {"append.sin", kNull, [](auto& s) { s.append.sin = nullptr; }},
      {"append.cos", kNull, [](auto& s) { s.append.cos = nullptr; }},
      {"cache.lengths", kNull, [](auto& s) { s.cache.lengths = nullptr; }},
      {"for the angles", kNull,
       [](auto& s) {
         s.cache.lengths = nullptr;
         s.append.slot_mapping = s.slots.data();
       }},
      {"cache.block_table", kNull,
       [](auto& s) {
         s.page();
         s.cache.block_table = nullptr;
       }},
      {"append.cos", kMisaligned, [&](auto& s) { s.append.cos = odd(s.cos.data()); }},
      {"append.positions", kMisaligned,
       [&](auto& s) { s.append.positions = odd(s.positions.data()); }},
      {"append.slot_mapping", kMisaligned,
       [&](auto& s) { s.append.slot_mapping = odd(s.slots.data()); }},
      {"append.k_norm_weight", kMisaligned,
       [&](auto& s) { s.append.k_norm_weight = odd(s.weight.data()); }},
      {"cache.k", kMisaligned,
       [&](auto& s) { s.cache.k.data = const_cast<float*>(odd(s.cache_k.data())); }},
      {"append.k: 0x10", CUFLASH_ERROR_INVALID_VALUE,
       [](auto& s) { s.append.k.data = reinterpret_cast<void*>(uintptr_t{16}); }},
  });
  // Positions or slots for the lengths; slots need no table either.
  expect_accepted({
      [](auto& s) {
        s.cache.lengths = nullptr;
        s.append.positions = s.positions.data();
      },
      [](auto& s) {
        s.cache.lengths = nullptr;
        s.append.slot_mapping = s.slots.data();
        s.append.cos = s.append.sin = nullptr;
        s.append.max_position = 0;
      },
      [](auto& s) {
        s.page();
        s.cache.block_table = nullptr;
        s.append.slot_mapping = s.slots.data();
      },
  });
}

TEST(Append, Dtypes) {
  constexpr auto kDtype = CUFLASH_ERROR_UNSUPPORTED_DTYPE;
  expect_refusals({
      {"append.k.dtype", kDtype, [](auto& s) { s.append.k.dtype = 0; }},
      {"append.v.dtype", kDtype, [](auto& s) { s.append.v.dtype = CUFLASH_F16; }},
      {"append.q.dtype", kDtype, [](auto& s) { s.append.q.dtype = CUFLASH_BF16; }},
      {"append.q_out.dtype", kDtype, [](auto& s) { s.append.q_out.dtype = CUFLASH_F16; }},
      {"cache.k.dtype", kDtype, [](auto& s) { s.cache.k.dtype = 99; }},
      {"cache.v.dtype", kDtype, [](auto& s) { s.cache.v.dtype = -1; }},
  });
  expect_accepted({[](auto& s) { s.append.v.dtype = s.append.q.dtype = s.cache.k.dtype = 0; },
                   [](auto& s) { s.cache.k.dtype = CUFLASH_F16, s.cache.v.dtype = CUFLASH_BF16; }});
}

TEST(Append, Aliasing) {
  constexpr auto kAliasing = CUFLASH_ERROR_ALIASING;
  expect_refusals({
      {"append.q_out: the output overlaps append.k", kAliasing,
       [](auto& s) { s.append.q_out.data = s.k.data(); }},
      {"append.q_out: the output overlaps append.q", kAliasing,
       [](auto& s) { s.append.q_out.data = s.q.data() + 8; }},
      {"cache.k: the output overlaps append.k", kAliasing,
       [](auto& s) { s.append.k.data = s.cache_k.data(); }},
      {"cache.v: the output overlaps append.v", kAliasing,
       [](auto& s) { s.append.v.data = s.cache_v.data() + 8; }},
      {"append.q_out: the output overlaps cache.k", kAliasing,
       [](auto& s) { s.append.q_out.data = s.cache_k.data(); }},
      {"cache.k: the output overlaps cache.v", kAliasing,
       [](auto& s) { s.cache.v.data = s.cache_k.data() + 8; }},
      {"cache.k: the output overlaps append.cos", kAliasing,
       [](auto& s) { s.append.cos = s.cache_k.data(); }},
      {"cache.v: the output overlaps append.k_norm_weight", kAliasing,
       [](auto& s) { s.append.k_norm_weight = s.cache_v.data() + 100; }},
      {"cache.k.head_stride: 0", kAliasing,
       [](auto& s) {
         s.cache.k.flags = 0;
         s.cache.k.batch_stride = 80, s.cache.k.row_stride = 8;
       }},
      {"append.k.row_stride", CUFLASH_ERROR_INVALID_VALUE,
       [](auto& s) {
         s.append.k.flags = 0;
         s.append.k.row_stride = -8;
       }},
  });
  expect_accepted({
      // In place, said by flag and by strides; inputs may repeat and share memory.
      [](auto& s) { s.append.q_out = s.append.q; },
      [](auto& s) {
        s.append.q_out = s.append.q;
        s.append.q_out.flags = 0;
        s.append.q_out.batch_stride = 96, s.append.q_out.head_stride = 24;
        s.append.q_out.row_stride = 8;
      },
      [](auto& s) { s.append.v = s.append.k; },
      [](auto& s) { s.append.k.flags = 0; },
      // K alone: of the cache's V nothing is looked at.
      [](auto& s) { s.append.v = cuflash_tensor_t{}, s.cache.v = cuflash_tensor_t{}; },
  });
}

TEST(Append, Queries) {
  SmallAppend s;
  size_t bytes = 1, needed = 0;
  ASSERT_EQ(cuflash_append_workspace_size(kCpu, &s.cache, &s.append, &bytes), CUFLASH_SUCCESS);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(cuflash_append_workspace_size(kCpu, &s.cache, &s.append, nullptr),
            CUFLASH_ERROR_NULL_POINTER);
  ASSERT_EQ(cuflash_append_explain(kCpu, &s.cache, &s.append, nullptr, 0, &needed),
            CUFLASH_SUCCESS);
  std::vector<char> text(needed);
  ASSERT_EQ(cuflash_append_explain(kCpu, &s.cache, &s.append, text.data(), needed, nullptr),
            CUFLASH_SUCCESS);
  const std::string json = text.data();
  EXPECT_NE(json.find("\"operation\": \"append\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"kernel\": \"append_reference_cpu\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"launches\": 1"), std::string::npos) << json;
  EXPECT_NE(json.find("runs on CUDA devices only"), std::string::npos) << json;
  // For a GPU that is not here, without any pointer.
  s.append.target_arch = 90;
  s.append.k.data = s.append.v.data = s.append.q.data = s.append.q_out.data = nullptr;
  s.cache.k.data = s.cache.v.data = nullptr;
  s.cache.lengths = nullptr;
  s.page();
  s.cache.block_table = nullptr;
  std::vector<char> buffer(1 << 14);
  ASSERT_EQ(
      cuflash_append_explain(nullptr, &s.cache, &s.append, buffer.data(), buffer.size(), nullptr),
      CUFLASH_SUCCESS)
      << cuflash_last_error();
  EXPECT_NE(std::strstr(buffer.data(), "\"device\": \"sm_90\""), nullptr) << buffer.data();
  EXPECT_TRUE(s.nothing_written());
}

TEST(Append, ForcedKernels) {
  cuflash_handle_t handle;
  ASSERT_EQ(cuflash_create(&handle, CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  SmallAppend s;
  ASSERT_EQ(cuflash_set_kernel(handle, "dec_reference_cpu"), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_kv_cache_append(handle, &s.cache, &s.append, nullptr),
            CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_TRUE(message_names("is for another operation"));
  EXPECT_TRUE(s.nothing_written());
  ASSERT_EQ(cuflash_set_kernel(handle, "reference"), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_kv_cache_append(handle, &s.cache, &s.append, nullptr), CUFLASH_SUCCESS);
  cuflash_destroy(handle);
}

}  // namespace
}  // namespace cuflash_test
