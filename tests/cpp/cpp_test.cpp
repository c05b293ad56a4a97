// cuflash.hpp on the CPU device: each overload is the C function of its dtype, a handle has one owner,
// errors carry the call's message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <cuflash.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/dtype.hpp"

namespace {

using cuflash::FlashAttentionError;
using cuflash_test::Dtype;
using testing::HasSubstr;

static_assert(!std::is_copy_constructible<cuflash::Handle>::value, "");
static_assert(!std::is_copy_assignable<cuflash::Handle>::value, "");
static_assert(std::is_nothrow_move_constructible<cuflash::Handle>::value, "");
static_assert(std::is_nothrow_move_assignable<cuflash::Handle>::value, "");

// Every extent differs from the others, so that none can stand in another's place.
constexpr int kBatch = 2, kHeads = 6, kHeadsKv = 3, kLenQ = 5, kLenK = 9, kDim = 16;
constexpr int kMany = kBatch * kHeads * kLenK * kDim;
constexpr float kScale = 0.25f;

// Host memory under the pointer type that CUDA's headers give to the dtype.
template <class T>
class Tensor {
 public:
  explicit Tensor(unsigned seed) : bytes_(static_cast<size_t>(kMany) * kSize) {
    for (size_t n = 0; n < kMany; ++n) {
      const double x = static_cast<double>((n * 37 + seed * 101) % 65) / 32 - 1;  // exact
      cuflash_test::store(kDtype, x, bytes_.data() + n * kSize);
    }
  }
  operator T*() { return reinterpret_cast<T*>(bytes_.data()); }
  bool operator==(const Tensor& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr Dtype kDtype = static_cast<Dtype>(cuflash::dtype_of<T>::value);
  static constexpr size_t kSize = kDtype == Dtype::kF32 ? 4 : 2;
  std::vector<unsigned char> bytes_;
};

// What a call reads, and a copy of all that it may write.
template <class T>
struct Operands {
  Tensor<T> q{1}, k{2}, v{3}, d_o{4}, o{5}, dq{6}, dk{7}, dv{8};
  std::vector<float> lse = std::vector<float>(kMany, 0.5f);
  std::vector<int32_t> lengths = {4, 7};
  bool operator==(const Operands& other) const {
    return o == other.o && dq == other.dq && dk == other.dk && dv == other.dv && lse == other.lse;
  }
};

// A dtype: its C++ element type and its C functions.
#define DTYPE(Name, T, suffix)                                                    \
  struct Name {                                                                   \
    using Element = T;                                                            \
    static constexpr auto forward = cuflash_attention_forward_##suffix;           \
    static constexpr auto backward = cuflash_attention_backward_##suffix;         \
    static constexpr auto decode = cuflash_attention_decode_##suffix;             \
    static constexpr auto forward_gqa = cuflash_attention_forward_gqa_##suffix;   \
    static constexpr auto backward_gqa = cuflash_attention_backward_gqa_##suffix; \
    static constexpr auto decode_gqa = cuflash_attention_decode_gqa_##suffix;     \
  };
DTYPE(F32, float, f32)
DTYPE(F16, __half, f16)
DTYPE(BF16, __nv_bfloat16, bf16)

template <class D>
class Overloads : public testing::Test {
 protected:
  void SetUp() override { cuflash_set_default_device(CUFLASH_DEVICE_CPU); }
  void TearDown() override { cuflash_set_default_device(CUFLASH_DEVICE_CURRENT); }

  // Both calls succeed, write something, and write the same bits.
  template <class Cpp, class CFunction>
  static void expect_same(Cpp cpp, CFunction c) {
    Operands<typename D::Element> by_cpp, by_c;
    EXPECT_EQ(static_cast<int32_t>(cpp(by_cpp)), CUFLASH_SUCCESS) << cuflash_last_error();
    EXPECT_EQ(c(by_c), CUFLASH_SUCCESS) << cuflash_last_error();
    EXPECT_FALSE(by_c == Operands<typename D::Element>());
    EXPECT_TRUE(by_cpp == by_c);
  }
};
using Dtypes = testing::Types<F32, F16, BF16>;
TYPED_TEST_SUITE(Overloads, Dtypes);

TYPED_TEST(Overloads, Forward) {
  using X = Operands<typename TypeParam::Element>;
  for (const bool causal : {false, true})
    this->expect_same(
        [=](X& x) {
          return cuflash::flash_attention_forward(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads,
                                                  kLenK, kDim, kScale, causal);
        },
        [=](X& x) {
          return TypeParam::forward(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads, kLenK, kDim,
                                    kScale, causal, nullptr);
        });
}

TYPED_TEST(Overloads, Backward) {
  using X = Operands<typename TypeParam::Element>;
  for (const bool causal : {false, true})
    this->expect_same(
        [=](X& x) {
          return cuflash::flash_attention_backward(x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq,
                                                   x.dk, x.dv, kBatch, kHeads, kLenK, kDim, kScale,
                                                   causal);
        },
        [=](X& x) {
          return TypeParam::backward(x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq, x.dk, x.dv,
                                     kBatch, kHeads, kLenK, kDim, kScale, causal, nullptr);
        });
}

TYPED_TEST(Overloads, Decode) {
  using X = Operands<typename TypeParam::Element>;
  this->expect_same(
      [](X& x) {
        return cuflash::flash_attention_decode(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads,
                                               kLenK, kDim, kScale, 3);
      },
      [](X& x) {
        return TypeParam::decode(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads, kLenK, kDim,
                                 kScale, 3, nullptr);
      });
}

TYPED_TEST(Overloads, ForwardGqa) {
  using X = Operands<typename TypeParam::Element>;
  for (const int causal : {0, 1, 2})
    this->expect_same(
        [=](X& x) {
          return cuflash::attention_forward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads,
                                                kHeadsKv, kLenQ, kLenK, kDim, kScale, causal);
        },
        [=](X& x) {
          return TypeParam::forward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads, kHeadsKv,
                                        kLenQ, kLenK, kDim, kScale, causal, nullptr);
        });
}

TYPED_TEST(Overloads, BackwardGqa) {
  using X = Operands<typename TypeParam::Element>;
  for (const int causal : {0, 1, 2})
    this->expect_same(
        [=](X& x) {
          return cuflash::attention_backward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq,
                                                 x.dk, x.dv, kBatch, kHeads, kHeadsKv, kLenQ, kLenK,
                                                 kDim, kScale, causal);
        },
        [=](X& x) {
          return TypeParam::backward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq, x.dk, x.dv,
                                         kBatch, kHeads, kHeadsKv, kLenQ, kLenK, kDim, kScale,
                                         causal, nullptr);
        });
}

TYPED_TEST(Overloads, DecodeGqa) {
  using X = Operands<typename TypeParam::Element>;
  for (const int causal : {0, 1, 2})
    this->expect_same(
        [=](X& x) {
          return cuflash::attention_decode_gqa(x.q, x.k, x.v, x.o, x.lse.data(), x.lengths.data(),
                                               kBatch, kHeads, kHeadsKv, kLenQ, kLenK, kDim, kScale,
                                               causal, 2);
        },
        [=](X& x) {
          return TypeParam::decode_gqa(x.q, x.k, x.v, x.o, x.lse.data(), x.lengths.data(), kBatch,
                                       kHeads, kHeadsKv, kLenQ, kLenK, kDim, kScale, causal, 2,
                                       nullptr);
        });
}

// The stream reaches the C function: the CPU device refuses any.
TYPED_TEST(Overloads, TakeAStream) {
  Operands<typename TypeParam::Element> x;
  const auto stream = reinterpret_cast<cuflash_stream_t>(x.lse.data());
  EXPECT_EQ(
      static_cast<int32_t>(cuflash::flash_attention_forward(
          x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads, kLenK, kDim, kScale, true, stream)),
      CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(static_cast<int32_t>(cuflash::flash_attention_backward(
                x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq, x.dk, x.dv, kBatch, kHeads, kLenK,
                kDim, kScale, true, stream)),
            CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(static_cast<int32_t>(cuflash::flash_attention_decode(
                x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads, kLenK, kDim, kScale, 0, stream)),
            CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuflash::attention_forward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), kBatch, kHeads,
                                           kHeadsKv, kLenQ, kLenK, kDim, kScale, 0, stream),
            CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuflash::attention_backward_gqa(x.q, x.k, x.v, x.o, x.lse.data(), x.d_o, x.dq, x.dk,
                                            x.dv, kBatch, kHeads, kHeadsKv, kLenQ, kLenK, kDim,
                                            kScale, 0, stream),
            CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuflash::attention_decode_gqa(x.q, x.k, x.v, x.o, x.lse.data(), nullptr, kBatch, kHeads,
                                          kHeadsKv, kLenQ, kLenK, kDim, kScale, 0, 0, stream),
            CUFLASH_ERROR_INVALID_VALUE);
}

TEST(OlderErrors, KeepTheirValuesAndSentences) {
  const FlashAttentionError errors[] = {FlashAttentionError::SUCCESS,
                                        FlashAttentionError::INVALID_DIMENSION,
                                        FlashAttentionError::DIMENSION_MISMATCH,
                                        FlashAttentionError::NULL_POINTER,
                                        FlashAttentionError::CUDA_ERROR,
                                        FlashAttentionError::OUT_OF_MEMORY,
                                        FlashAttentionError::UNSUPPORTED_HEAD_DIM,
                                        FlashAttentionError::UNSUPPORTED_DTYPE};
  for (int value = 0; value < 8; ++value) EXPECT_EQ(static_cast<int>(errors[value]), value);
  EXPECT_STREQ(cuflash::get_error_string(FlashAttentionError::SUCCESS), "Success");
  EXPECT_STREQ(cuflash::get_error_string(FlashAttentionError::NULL_POINTER),
               "Null pointer: input or output pointer is null");
  EXPECT_STREQ(cuflash::get_error_string(static_cast<FlashAttentionError>(-5)), "Unknown error");
  const float* none = nullptr;
  EXPECT_EQ(cuflash::flash_attention_forward(none, nullptr, nullptr, nullptr, nullptr, 1, 1, 1, 8,
                                             1.0f, false),
            FlashAttentionError::NULL_POINTER);
}

TEST(Check, ThrowsTheMessageOfTheCall) {
  EXPECT_NO_THROW(cuflash::check(CUFLASH_SUCCESS));
  EXPECT_NO_THROW(cuflash::check(FlashAttentionError::SUCCESS));
  try {
    cuflash::check(cuflash_set_default_device(-99));
    FAIL() << "no exception";
  } catch (const cuflash::Error& error) {
    EXPECT_EQ(error.status(), CUFLASH_ERROR_INVALID_VALUE);
    EXPECT_THAT(error.what(), HasSubstr("CUFLASH_ERROR_INVALID_VALUE (8): "));
    EXPECT_THAT(error.what(), HasSubstr("device: -99"));
  }
  // After a success there is no message: the status has a sentence of its own.
  ASSERT_EQ(cuflash_set_default_device(CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  try {
    cuflash::check(FlashAttentionError::OUT_OF_MEMORY);
    FAIL() << "no exception";
  } catch (const cuflash::Error& error) {
    EXPECT_STREQ(error.what(),
                 "CUFLASH_ERROR_OUT_OF_MEMORY (5): Out of memory: insufficient GPU memory");
  }
  cuflash_set_default_device(CUFLASH_DEVICE_CURRENT);
}

TEST(Handle, HasOneOwner) {
  cuflash::Handle first(CUFLASH_DEVICE_CPU);
  const cuflash_handle_t raw = first.get();
  ASSERT_NE(raw, nullptr);
  EXPECT_EQ(cuflash_set_option(first, CUFLASH_OPTION_CPU_THREADS, 3), CUFLASH_SUCCESS);

  cuflash::Handle second(std::move(first));
  EXPECT_EQ(first.get(), nullptr);
  EXPECT_EQ(second.get(), raw);

  cuflash::Handle third(CUFLASH_DEVICE_CPU);
  third = std::move(second);
  EXPECT_EQ(second.get(), nullptr);
  EXPECT_EQ(third.get(), raw);
  cuflash::Handle& itself = third;
  third = std::move(itself);
  EXPECT_EQ(third.get(), raw);

  int64_t threads = 0;
  EXPECT_EQ(cuflash_get_option(third, CUFLASH_OPTION_CPU_THREADS, &threads), CUFLASH_SUCCESS);
  EXPECT_EQ(threads, 3);
}

TEST(Handle, ReportsAFailedCreation) {
  EXPECT_THROW(cuflash::Handle(-99), cuflash::Error);
  cuflash::Handle handle;
  EXPECT_EQ(handle.get(), nullptr);
  EXPECT_EQ(handle.create(CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  const cuflash_handle_t raw = handle;
  ASSERT_NE(raw, nullptr);
  EXPECT_EQ(handle.create(-99), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(handle.get(), raw);
}

template <class Struct, class Init>
void expect_as_init(Init init) {
  const Struct made = cuflash::make<Struct>();
  Struct by_init;
  ASSERT_EQ(init(&by_init, sizeof by_init), CUFLASH_SUCCESS);
  EXPECT_EQ(std::memcmp(&made, &by_init, sizeof made), 0);
}

TEST(Structs, MakeIsInit) {
  expect_as_init<cuflash_problem_t>(cuflash_problem_init);
  expect_as_init<cuflash_gradients_t>(cuflash_gradients_init);
  expect_as_init<cuflash_kv_cache_t>(cuflash_kv_cache_init);
  expect_as_init<cuflash_kv_append_t>(cuflash_kv_append_init);
  expect_as_init<cuflash_merge_t>(cuflash_merge_init);
  expect_as_init<cuflash_weights_t>(cuflash_weights_init);
}

TEST(Structs, TensorsTakeTheDtypeOfTheirPointer) {
  float values[4] = {};
  const float* const constant = values;
  const cuflash_tensor_t dense = cuflash::dense(constant);
  EXPECT_EQ(dense.data, values);
  EXPECT_EQ(dense.flags, uint32_t{CUFLASH_TENSOR_DENSE});
  EXPECT_EQ(dense.dtype, CUFLASH_F32);

  const cuflash_tensor_t strided = cuflash::strided(reinterpret_cast<__half*>(values), 30, 20, 10);
  EXPECT_EQ(strided.data, values);
  EXPECT_EQ(strided.flags, 0u);
  EXPECT_EQ(strided.dtype, CUFLASH_F16);
  EXPECT_EQ(strided.batch_stride, 30);
  EXPECT_EQ(strided.head_stride, 20);
  EXPECT_EQ(strided.row_stride, 10);
  EXPECT_EQ(cuflash::dense(reinterpret_cast<const __nv_bfloat16*>(values)).dtype, CUFLASH_BF16);
  EXPECT_EQ(cuflash::dense(reinterpret_cast<__nv_fp8_e4m3*>(values)).dtype, CUFLASH_FP8_E4M3);
  EXPECT_EQ(cuflash::dense(reinterpret_cast<__nv_fp8_e5m2*>(values)).dtype, CUFLASH_FP8_E5M2);
  EXPECT_EQ(cuflash::dense(reinterpret_cast<int8_t*>(values)).dtype, CUFLASH_INT8);

  const cuflash_tensor_t int4 = cuflash::strided_int4(values, 30, 20, 10);
  EXPECT_EQ(int4.data, values);
  EXPECT_EQ(int4.dtype, CUFLASH_INT4);
  EXPECT_EQ(int4.batch_stride, 60);
  EXPECT_EQ(int4.head_stride, 40);
  EXPECT_EQ(int4.row_stride, 20);
}

// ---- caches -------------------------------------------------------------------------------------------

constexpr int kPage = 4, kPages = 6, kSlots = 12;

// Keys of int8 and values of int4 in pages, with what each element stands for.
struct Pool {
  std::vector<int8_t> k =
      std::vector<int8_t>(static_cast<size_t>(kPages) * kHeadsKv * kPage * kDim);
  std::vector<unsigned char> v = std::vector<unsigned char>(k.size() / 2);
  std::vector<int64_t> table = {5, 0, 2, 1, 4, INT64_MAX};  // [kBatch, 3]; the last is not used
  std::vector<int32_t> lengths = {11, 6};
  float scale = 0.05f, zero = 1.5f;

  Pool() {
    for (size_t n = 0; n < k.size(); ++n) k[n] = static_cast<int8_t>((n * 37 + 11) % 255 - 127);
    for (size_t n = 0; n < v.size(); ++n) v[n] = static_cast<unsigned char>(n * 29 + 7);
  }

  cuflash_kv_cache_t cache() {
    auto cache = cuflash::make<cuflash_kv_cache_t>();
    cache.k = cuflash::dense(k.data());
    cache.v =
        cuflash::strided_int4(v.data(), kHeadsKv * kPage * kDim / 2, kPage * kDim / 2, kDim / 2);
    cache.num_pages = kPages;
    cache.page_size = kPage;
    cache.max_len = kSlots;
    cache.lengths = lengths.data();
    cache.k_scale = cache.v_scale = &scale;
    cache.k_zero = cache.v_zero = &zero;
    cuflash::set_block_table(cache, table.data(), 3);
    return cache;
  }

  // The elements of sequence b as floats, dense [1, kHeadsKv, length, kDim].
  std::vector<float> values(int b, bool of_v) const {
    std::vector<float> result;
    for (int head = 0; head < kHeadsKv; ++head)
      for (int slot = 0; slot < lengths[static_cast<size_t>(b)]; ++slot)
        for (int d = 0; d < kDim; ++d) {
          const int64_t page = table[static_cast<size_t>(b * 3 + slot / kPage)];
          const auto at =
              static_cast<size_t>(((page * kHeadsKv + head) * kPage + slot % kPage) * kDim + d);
          const int nibble = v[at / 2] >> (at % 2 * 4) & 15;
          const int stored = of_v ? (nibble ^ 8) - 8 : k[at];
          result.push_back((static_cast<float>(stored) - zero) * scale);
        }
    return result;
  }
};

cuflash_problem_t decode_problem(const std::vector<float>& q, std::vector<float>& o, int tokens) {
  auto problem = cuflash::make<cuflash_problem_t>();
  problem.batch = kBatch;
  problem.heads_q = kHeads;
  problem.heads_kv = kHeadsKv;
  problem.len_q = tokens;
  problem.head_dim = kDim;
  problem.q = cuflash::dense(q.data());
  problem.o = cuflash::dense(o.data());
  return problem;
}

std::vector<float> some(size_t count, unsigned seed) {
  std::vector<float> result;
  for (size_t n = 0; n < count; ++n)
    result.push_back(static_cast<float>((n * 53 + seed * 17) % 101) / 50 - 1);
  return result;
}

// The result of each sequence by itself over dense keys, by the positional function.
std::vector<float> alone(const std::vector<float>& q, const Pool& pool, int tokens, int causal) {
  std::vector<float> result;
  const size_t rows = static_cast<size_t>(kHeads) * static_cast<size_t>(tokens) * kDim;
  cuflash_set_default_device(CUFLASH_DEVICE_CPU);
  for (int b = 0; b < kBatch; ++b) {
    std::vector<float> o(rows);
    const std::vector<float> k = pool.values(b, false), v = pool.values(b, true);
    cuflash::check(cuflash::attention_forward_gqa(
        q.data() + rows * static_cast<size_t>(b), k.data(), v.data(), o.data(), nullptr, 1, kHeads,
        kHeadsKv, tokens, pool.lengths[static_cast<size_t>(b)], kDim, 0.25f, causal));
    result.insert(result.end(), o.begin(), o.end());
  }
  cuflash_set_default_device(CUFLASH_DEVICE_CURRENT);
  return result;
}

TEST(Caches, PagesByATableAndByAList) {
  const cuflash::Handle cpu(CUFLASH_DEVICE_CPU);
  Pool pool;
  const std::vector<float> q = some(kBatch * kHeads * kDim, 1);
  const std::vector<float> wanted = alone(q, pool, 1, 0);
  const int32_t indptr[] = {0, 3, 5}, indices[] = {5, 0, 2, 1, 4};
  for (const bool listed : {false, true}) {
    std::vector<float> o(q.size());
    cuflash_kv_cache_t cache = pool.cache();
    if (listed) {
      cache.block_table = nullptr;
      cache.block_table_stride = 0;
      cuflash::set_page_list(cache, indptr, indices);
    }
    const cuflash_problem_t problem = decode_problem(q, o, 1);
    cuflash::check(cuflash_attention_decode(cpu, &problem, &cache, nullptr));
    EXPECT_THAT(o, testing::Pointwise(testing::FloatNear(1e-5f), wanted));
  }
}

// A chain of tokens: what a causal mask shows.
TEST(Caches, TreeMask) {
  const cuflash::Handle cpu(CUFLASH_DEVICE_CPU);
  Pool pool;
  const std::vector<float> q = some(kBatch * kHeads * 3 * kDim, 2);
  std::vector<float> o(q.size());
  const uint32_t words[] = {1, 3, 7};
  cuflash_problem_t problem = decode_problem(q, o, 3);
  problem.tree_mask = words;
  problem.tree_mask_row_stride = 1;
  problem.flags = CUFLASH_PROBLEM_DETERMINISTIC | CUFLASH_PROBLEM_BATCH_INVARIANT;
  problem.sm_margin = 2;
  const cuflash_kv_cache_t cache = pool.cache();
  cuflash::check(cuflash_attention_decode(cpu, &problem, &cache, nullptr));
  EXPECT_THAT(o, testing::Pointwise(testing::FloatNear(1e-5f), alone(q, pool, 3, 1)));
}

// Tokens that the formats can hold exactly are found again where they were sent; then all attend.
TEST(Caches, AppendThenDecode) {
  const cuflash::Handle cpu(CUFLASH_DEVICE_CPU);
  Pool pool, before = pool;
  pool.lengths = {10, 5};
  std::vector<float> k, v;
  for (const bool of_v : {false, true})
    for (int n = 0; n < kBatch * kHeadsKv * kDim; ++n)
      (of_v ? v : k).push_back((static_cast<float>(n * 5 % 15 - 7) - pool.zero) * pool.scale);
  auto append = cuflash::make<cuflash_kv_append_t>();
  append.batch = kBatch;
  append.heads_kv = kHeadsKv;
  append.len = 1;
  append.head_dim = kDim;
  append.k = cuflash::dense(k.data());
  append.v = cuflash::dense(v.data());
  cuflash_kv_cache_t cache = pool.cache();
  cuflash::check(cuflash_kv_cache_append(cpu, &cache, &append, nullptr));
  EXPECT_EQ(pool.lengths, (std::vector<int32_t>{10, 5}));
  pool.lengths = {11, 6};
  for (int b = 0; b < kBatch; ++b)
    for (const bool of_v : {false, true}) {
      std::vector<float> wanted = before.values(b, of_v);
      const int length = pool.lengths[static_cast<size_t>(b)];
      for (int head = 0; head < kHeadsKv; ++head)
        for (int d = 0; d < kDim; ++d)
          wanted[static_cast<size_t>((head * length + length - 1) * kDim + d)] =
              (of_v ? v : k)[static_cast<size_t>((b * kHeadsKv + head) * kDim + d)];
      EXPECT_THAT(pool.values(b, of_v), testing::Pointwise(testing::FloatNear(1e-6f), wanted));
    }
  const std::vector<float> q = some(kBatch * kHeads * kDim, 3);
  std::vector<float> o(q.size());
  const cuflash_problem_t problem = decode_problem(q, o, 1);
  cache = pool.cache();
  cuflash::check(cuflash_attention_decode(cpu, &problem, &cache, nullptr));
  EXPECT_THAT(o, testing::Pointwise(testing::FloatNear(1e-5f), alone(q, pool, 1, 0)));
}

TEST(Caches, RefusalsAreExceptions) {
  const cuflash::Handle cpu(CUFLASH_DEVICE_CPU);
  Pool pool;
  const std::vector<float> q = some(kBatch * kHeads * kDim, 4);
  std::vector<float> o(q.size());
  const cuflash_problem_t problem = decode_problem(q, o, 1);
  cuflash_kv_cache_t cache = pool.cache();
  cuflash::set_block_table(cache, static_cast<const int32_t*>(nullptr), 3);
  EXPECT_EQ(cache.id_bits, 32);
  try {
    cuflash::check(cuflash_attention_decode(cpu, &problem, &cache, nullptr));
    FAIL() << "no exception";
  } catch (const cuflash::Error& error) {
    EXPECT_EQ(error.status(), CUFLASH_ERROR_NULL_POINTER);
    EXPECT_THAT(error.what(), HasSubstr("cache.block_table: is NULL"));
  }
}

}  // namespace
