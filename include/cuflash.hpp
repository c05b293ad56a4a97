/*
 * cuflash.hpp - cuflash.h for C++11 and later; header-only
 *
 * SPDX-License-Identifier: MIT
 *
 * The functions and structs of cuflash.h are used as they are; this header adds only what C++ makes
 * shorter and safer. It needs no CUDA header.
 *
 *   Handle              owns a cuflash_handle_t, and passes wherever one is asked for
 *   make<Struct>()      a struct of cuflash.h with every field at its default
 *   dense, strided      tensors that take their dtype from their pointer
 *   set_block_table, set_page_list   where the pages of a cache are, by ids of 32 or 64 bits
 *   check, Error        exceptions, by choice: check(status) throws where a status is an error.
 *                       Everything else returns statuses and is noexcept. With -fno-exceptions these
 *                       two and the constructor of Handle that throws are left out.
 *   attention_..._gqa   the positional functions with grouped heads, overloaded by dtype
 *   flash_attention_... the C++ functions of releases up to 0.6, as they were
 */
#ifndef CUFLASH_HPP
#define CUFLASH_HPP

#if !defined(__cplusplus) || __cplusplus < 201103L
#error "cuflash.hpp needs C++11; cuflash.h is for C and for older C++"
#endif

#include <type_traits>

#include "cuflash.h"

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define CUFLASH_CPP_EXCEPTIONS 1
#include <stdexcept>
#include <string>
#endif

// The 16-bit types of cuda_fp16.h and cuda_bf16.h. A program without those headers casts pointers to
// its own 16-bit data to these.
struct __half;
struct __nv_bfloat16;
// Those of cuda_fp8.h, for caches.
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;

/** The C++ interface, a thin layer over cuflash.h. */
namespace cuflash {

// ---- errors -------------------------------------------------------------------------------------

/** What the functions of releases up to 0.6 return: the older names of statuses 0 to 7. Other values
 * are those of enum cuflash_status. */
enum class FlashAttentionError : int32_t {
  SUCCESS = CUFLASH_SUCCESS,                                 /**< done, or enqueued */
  INVALID_DIMENSION = CUFLASH_ERROR_INVALID_DIMENSION,       /**< or a bad scale */
  DIMENSION_MISMATCH = CUFLASH_ERROR_DIMENSION_MISMATCH,     /**< extents do not fit together */
  NULL_POINTER = CUFLASH_ERROR_NULL_POINTER,                 /**< a required pointer is null */
  CUDA_ERROR = CUFLASH_ERROR_CUDA,                           /**< CUDA refused */
  OUT_OF_MEMORY = CUFLASH_ERROR_OUT_OF_MEMORY,               /**< device memory */
  UNSUPPORTED_HEAD_DIM = CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM, /**< 1 to 576; backward 256 */
  UNSUPPORTED_DTYPE = CUFLASH_ERROR_UNSUPPORTED_DTYPE        /**< not for this call */
};

/** A sentence for an error; static. cuflash_last_error() says which argument and why. */
inline const char* get_error_string(FlashAttentionError error) noexcept {
  return cuflash_error_string(static_cast<int32_t>(error));
}

#ifdef CUFLASH_CPP_EXCEPTIONS
/** A status that is not success, with the message of the call that returned it. */
class Error : public std::runtime_error {
 public:
  /** Takes this thread's message: make it before the thread's next call. check() does. */
  explicit Error(cuflash_status_t status) : std::runtime_error(describe(status)), status_(status) {}

  cuflash_status_t status() const noexcept { return status_; } /**< one of enum cuflash_status */

 private:
  static std::string describe(cuflash_status_t status) {
    std::string message = cuflash_last_error();
    if (message.empty()) message = cuflash_error_string(status);
    return std::string(cuflash_status_name(status)) + " (" + std::to_string(status) +
           "): " + message;
  }

  cuflash_status_t status_;
};

/** Throws Error unless the status is CUFLASH_SUCCESS. */
inline void check(cuflash_status_t status) {
  if (status != CUFLASH_SUCCESS) throw Error(status);
}

/** The same for the functions of releases up to 0.6. */
inline void check(FlashAttentionError error) { check(static_cast<cuflash_status_t>(error)); }
#endif

// ---- handles and structs ------------------------------------------------------------------------

/** Owns a handle. An empty one (not yet created, or moved from) is a NULL handle: the default device
 * with default options. */
class Handle {
 public:
  /** An empty handle. */
  Handle() noexcept : handle_(nullptr) {}

#ifdef CUFLASH_CPP_EXCEPTIONS
  /** As cuflash_create(); throws Error. */
  explicit Handle(int32_t device) : handle_(nullptr) { check(cuflash_create(&handle_, device)); }
#endif

  /** As cuflash_create(). *this is left as it was where that fails. */
  cuflash_status_t create(int32_t device) noexcept {
    cuflash_handle_t created = nullptr;
    const cuflash_status_t status = cuflash_create(&created, device);
    if (status == CUFLASH_SUCCESS) reset(created);
    return status;
  }

  /** Takes the other's handle and leaves it empty. */
  Handle(Handle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  /** Frees its own handle, takes the other's and leaves it empty. */
  Handle& operator=(Handle&& other) noexcept {
    const cuflash_handle_t taken = other.handle_;
    other.handle_ = nullptr;
    reset(taken);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { cuflash_destroy(handle_); }

  cuflash_handle_t get() const noexcept { return handle_; }      /**< the C handle */
  operator cuflash_handle_t() const noexcept { return handle_; } /**< passes as it */

 private:
  void reset(cuflash_handle_t handle) noexcept {
    cuflash_destroy(handle_);
    handle_ = handle;
  }

  cuflash_handle_t handle_;
};

/** A struct of cuflash.h (cuflash_problem_t, ...) with every field at its default, as its
 * cuflash_..._init() leaves it. */
template <class Struct>
Struct make() noexcept {
  Struct s = Struct();
  s.struct_size = sizeof(Struct);
  return s;
}

/** The dtype of an element type: dtype_of<float>::value is CUFLASH_F32. */
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<int32_t, CUFLASH_F32> {};
template <>
struct dtype_of<__half> : std::integral_constant<int32_t, CUFLASH_F16> {};
template <>
struct dtype_of<__nv_bfloat16> : std::integral_constant<int32_t, CUFLASH_BF16> {};
template <>
struct dtype_of<__nv_fp8_e4m3> : std::integral_constant<int32_t, CUFLASH_FP8_E4M3> {};
template <>
struct dtype_of<__nv_fp8_e5m2> : std::integral_constant<int32_t, CUFLASH_FP8_E5M2> {};
template <>
struct dtype_of<int8_t> : std::integral_constant<int32_t, CUFLASH_INT8> {};

/** A tensor by strides, in elements. */
template <class T>
cuflash_tensor_t strided(T* data, int64_t batch_stride, int64_t head_stride,
                         int64_t row_stride) noexcept {
  using Element = typename std::remove_const<T>::type;
  cuflash_tensor_t tensor = cuflash_tensor_t();
  tensor.data = const_cast<Element*>(data);
  tensor.batch_stride = batch_stride;
  tensor.head_stride = head_stride;
  tensor.row_stride = row_stride;
  tensor.dtype = dtype_of<Element>::value;
  return tensor;
}

/** A cache's tensor of int4, two channels a byte; strides in bytes. */
inline cuflash_tensor_t strided_int4(const void* data, int64_t batch_stride, int64_t head_stride,
                                     int64_t row_stride) noexcept {
  cuflash_tensor_t tensor =
      strided(static_cast<const int8_t*>(data), 2 * batch_stride, 2 * head_stride, 2 * row_stride);
  tensor.dtype = CUFLASH_INT4;
  return tensor;
}

/** A dense tensor [batch, head, row, channel]. */
template <class T>
cuflash_tensor_t dense(T* data) noexcept {
  cuflash_tensor_t tensor = strided(data, 0, 0, 0);
  tensor.flags = CUFLASH_TENSOR_DENSE;
  return tensor;
}

/** A cache in pages, named by a block table [batch, columns] of int32_t or int64_t; stride: from one of its rows to
 * the next. max_len / page_size columns, rounded up, are read. */
template <class Id>
void set_block_table(cuflash_kv_cache_t& cache, const Id* table, int64_t stride) noexcept {
  static_assert(std::is_integral<Id>::value && (sizeof(Id) == 4 || sizeof(Id) == 8),
                "page ids have 32 or 64 bits");
  cache.layout = CUFLASH_CACHE_PAGED;
  cache.id_bits = static_cast<int32_t>(8 * sizeof(Id));
  cache.block_table = table;
  cache.block_table_stride = stride;
}

/** Likewise by a list: those of sequence b at indices[indptr[b]] to before indices[indptr[b + 1]]. */
template <class Id>
void set_page_list(cuflash_kv_cache_t& cache, const int32_t* indptr, const Id* indices) noexcept {
  static_assert(std::is_integral<Id>::value && (sizeof(Id) == 4 || sizeof(Id) == 8),
                "page ids have 32 or 64 bits");
  cache.layout = CUFLASH_CACHE_PAGED_CSR;
  cache.id_bits = static_cast<int32_t>(8 * sizeof(Id));
  cache.page_indptr = indptr;
  cache.page_indices = indices;
}

// ---- positional functions, overloaded by dtype --------------------------------------------------
//
// Arguments, checks and statuses are those of the C functions with the dtype's suffix. They are
// overloads and not templates so that what converts to a pointer (nullptr, a buffer of the
// program's) can be passed.

#define CUFLASH_OVERLOADS(T, suffix)                                                              \
  inline FlashAttentionError flash_attention_forward(                                             \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t seq_len, int32_t head_dim, float scale, bool causal,                                \
      cuflash_stream_t stream = nullptr) noexcept {                                               \
    return static_cast<FlashAttentionError>(cuflash_attention_forward_##suffix(                   \
        Q, K, V, O, L, batch_size, num_heads, seq_len, head_dim, scale, causal, stream));         \
  }                                                                                               \
  inline FlashAttentionError flash_attention_backward(                                            \
      const T* Q, const T* K, const T* V, const T* O, const float* L, const T* dO, T* dQ, T* dK,  \
      T* dV, int32_t batch_size, int32_t num_heads, int32_t seq_len, int32_t head_dim,            \
      float scale, bool causal, cuflash_stream_t stream = nullptr) noexcept {                     \
    return static_cast<FlashAttentionError>(                                                      \
        cuflash_attention_backward_##suffix(Q, K, V, O, L, dO, dQ, dK, dV, batch_size, num_heads, \
                                            seq_len, head_dim, scale, causal, stream));           \
  }                                                                                               \
  inline FlashAttentionError flash_attention_decode(                                              \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t seq_len, int32_t head_dim, float scale, int32_t num_chunks,                         \
      cuflash_stream_t stream = nullptr) noexcept {                                               \
    return static_cast<FlashAttentionError>(cuflash_attention_decode_##suffix(                    \
        Q, K, V, O, L, batch_size, num_heads, seq_len, head_dim, scale, num_chunks, stream));     \
  }                                                                                               \
  inline cuflash_status_t attention_forward_gqa(                                                  \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t num_heads_kv, int32_t len_q, int32_t len_k, int32_t head_dim, float scale,          \
      int32_t causal, cuflash_stream_t stream = nullptr) noexcept {                               \
    return cuflash_attention_forward_gqa_##suffix(Q, K, V, O, L, batch_size, num_heads,           \
                                                  num_heads_kv, len_q, len_k, head_dim, scale,    \
                                                  causal, stream);                                \
  }                                                                                               \
  inline cuflash_status_t attention_backward_gqa(                                                 \
      const T* Q, const T* K, const T* V, const T* O, const float* L, const T* dO, T* dQ, T* dK,  \
      T* dV, int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q,          \
      int32_t len_k, int32_t head_dim, float scale, int32_t causal,                               \
      cuflash_stream_t stream = nullptr) noexcept {                                               \
    return cuflash_attention_backward_gqa_##suffix(Q, K, V, O, L, dO, dQ, dK, dV, batch_size,     \
                                                   num_heads, num_heads_kv, len_q, len_k,         \
                                                   head_dim, scale, causal, stream);              \
  }                                                                                               \
  inline cuflash_status_t attention_decode_gqa(                                                   \
      const T* Q, const T* K, const T* V, T* O, float* L, const int32_t* seq_lens,                \
      int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k,  \
      int32_t head_dim, float scale, int32_t causal, int32_t num_splits,                          \
      cuflash_stream_t stream = nullptr) noexcept {                                               \
    return cuflash_attention_decode_gqa_##suffix(Q, K, V, O, L, seq_lens, batch_size, num_heads,  \
                                                 num_heads_kv, len_q, len_k, head_dim, scale,     \
                                                 causal, num_splits, stream);                     \
  }

CUFLASH_OVERLOADS(float, f32)
CUFLASH_OVERLOADS(__half, f16)
CUFLASH_OVERLOADS(__nv_bfloat16, bf16)
#undef CUFLASH_OVERLOADS
#undef CUFLASH_CPP_EXCEPTIONS

}  // namespace cuflash

#endif  // CUFLASH_HPP
