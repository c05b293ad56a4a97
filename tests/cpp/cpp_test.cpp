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
}

}  // namespace
