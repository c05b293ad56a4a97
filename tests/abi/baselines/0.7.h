/*
 * cuflash.h - exact attention as a system library
 *
 * SPDX-License-Identifier: MIT
 *
 * This header is the manual. It needs no CUDA header and compiles alone as C89 to C17 and C++98 to
 * C++20.
 *
 * WHAT IT COMPUTES. For each batch entry and query head, with scores s = scale * q.k:
 *
 *     O[i] = sum_j softmax(s[i])_j V[j]          LSE[i] = ln sum_j exp(s[i][j])
 *
 * over the keys j that row i may see, exactly, without storing the matrix of scores; its backward
 * pass; and the same over a cache of keys and values (decode).
 *
 * LEVELS. (1) Positional functions such as cuflash_attention_forward_f16(): plain pointers to dense
 * tensors, callable from any language without a struct. (2) Struct functions such as
 * cuflash_attention_forward(): every feature. (3) Queries: workspace sizes, which kernel a call
 * takes and why not another, what the library holds.
 *
 * CONVENTIONS
 *   Layout     Tensors are [batch, head, row, channel] through strides, counted in elements; the
 *              channels are contiguous. Names: B batch, Hq query heads, Hkv key/value heads, Sq
 *              query rows, Sk keys, D channels of a head (head_dim).
 *   GQA        Query head h reads key/value head h / (Hq / Hkv); Hq must be a multiple of Hkv.
 *   Scores     s = softcap(scale q.k) + bias - slope |c - j|, each part only where it is given, with
 *              softcap(x) = cap tanh(x / cap) and the centre c below; then the mask. A bias of -infinity
 *              masks too. A sink joins the sum of exponentials, and so LSE, without a value of its own.
 *              Dropout sets probabilities to 0 with probability p and multiplies the others by
 *              1 / (1 - p); LSE is that before dropout.
 *   Mask       The centre c of query row i is i + Sk - Sq (bottom-right, the default), i (top-left)
 *              or i + offset. Causal: key j is seen if j <= c. Window (left, right): seen if
 *              c - left <= j <= c + right, both ends included, -1 unlimited. Both: both must hold.
 *   Tree       With problem.tree_mask a row sees the last tree_mask_len keys of its sequence by its own bits: bit
 *              t % 32 of word t / 32 of row i stands for key Sk - tree_mask_len + t, and 0 hides it. Keys before
 *              those have no bit, bits before key 0 no key. Mask and window hold too: they count keys as they lie,
 *              not along the tree, so a tree of drafted tokens goes with CUFLASH_MASK_NONE. What a key holds that its
 *              bit hides from a row does not reach that row, NaN neither.
 *   No key     A row that sees no key has O = 0, LSE = -infinity (or its sink) and zero gradients.
 *   Ragged     Sequences with lengths of their own, of queries and of keys independently. With
 *              cu_seqlens_q the tensors of the queries (q, o, lse, their gradients) are packed: [1, head,
 *              total_q, channel], sequence b in the rows cu_seqlens_q[b] to before cu_seqlens_q[b + 1];
 *              likewise k and v with cu_seqlens_k. Without, sequence b is batch entry b of padded tensors.
 *              seqused_q and seqused_k give how many rows of a sequence are in use, leftpad_k how many of
 *              those slots of the keys come before the first key. len_q and len_k are the longest lengths:
 *              what is longer is cut. Rows i, keys j, masks, bias and dropout count from the first row and
 *              the first key of the sequence. Rows of no sequence are neither read nor written. Lengths
 *              and offsets lie on the device and are cut to what the tensors hold, whatever they are.
 *   LSE        Natural logarithm, always fp32.
 *   Extents    An extent of 0 is legal in the struct calls and the _gqa forms. Batch, heads,
 *              lengths and packed totals reach 2^31 - 1, B*Hq*Sq and B*Hkv*Sk reach 2^40; offsets are
 *              computed in 64 bits. head_dim and head_dim_v are 1 to 576, in the backward pass 1 to 256.
 *   Alignment  Pointers must be aligned to their element. Fast kernels read 16 bytes at a time where
 *              pointers and strides allow it and element by element where not; both are right.
 *   Garbage    Memory outside the valid region (past a length, between strided rows) is never read
 *              in a way that can change a result, and never written. NaN or infinity inside it, in a
 *              key or value that the mask hides from a row, may still reach that row.
 *
 * MODES. Deterministic: the same call gives the same bits in every run. All kernels of this version do.
 * Batch-invariant: what a sequence gives has the same bits alone and in any batch, wherever it stands in
 * it, given the same device, library, dtype, heads, head_dim, mask, features and alignment of the tensors. The
 * kernel is then chosen without regard to the lengths, and decode cuts the keys of a sequence into parts
 * of 1024 (of a 256th where there are more than 2^18), which neither max_len nor sm_margin moves; with num_splits
 * given, into that many. The gradients of what several sequences share (sinks, repeated bias) are sums over the
 * batch. A batch too large for the kernel of its sequences is refused with 10. SM margin: kernels that size their
 * grid by the device leave that many SMs free, down to one; those with a block for each tile do not heed it.
 *
 * STREAMS, CAPTURE. A CUDA call only enqueues work on the given stream: it never synchronises and
 * can be captured in a CUDA graph. Lengths given as device pointers are read when the kernel runs.
 * Work is ordered by the streams alone. A fault of an earlier kernel is reported as 22. CPU calls
 * (CUFLASH_DEVICE_CPU) are synchronous, take host pointers and NULL as the stream.
 *
 * MEMORY. A call that needs workspace takes the caller's (problem.workspace). Without one it takes a
 * block from a private stream-ordered pool and gives it back on the same stream; the pool may keep up
 * to 64 MiB for later calls, until cuflash_trim(). Under capture the block is memory of the graph. One
 * workspace serves one stream at a time.
 *
 * THREADS. All functions may be called from any thread at the same time, also with the same handle;
 * handles are immutable but for the cuflash_set_ functions and cuflash_destroy(), which must not
 * run while another thread uses that handle. cuflash_last_error() is per thread. The log callback
 * runs on the calling thread, may run on several at once, and must not call cuflash. After fork()
 * only functions that make no CUDA call may be used in the child.
 *
 * ERRORS. Functions return a status (0 is success) and leave a message in cuflash_last_error() that
 * names the argument, the value got and the values allowed. A call refused before launch has
 * written nothing. CUDA's own last-error state is neither set nor cleared for others.
 *
 * COMPATIBILITY. From 0.7.0 on a program linked against x.y runs with every x.z, z >= y. Within one
 * SONAME nothing is removed, renamed or retyped; structs only grow at the end. Until the tag v0.7.0
 * this header may change.
 */
/** @file
 * The public C header of cuflash. */
#ifndef CUFLASH_H
#define CUFLASH_H

#include <stddef.h>
#include <stdint.h>

#define CUFLASH_VERSION_MAJOR 0 /**< of this header; cuflash_version() is the library's */
#define CUFLASH_VERSION_MINOR 7 /**< of this header */
#define CUFLASH_VERSION_PATCH 0 /**< of this header */

#if defined(_WIN32)
#error "cuflash supports Linux only"
#endif
#if defined(CUFLASH_BUILD) && defined(__GNUC__)
#define CUFLASH_API __attribute__((visibility("default")))
#else
#define CUFLASH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup types Types and constants
 * @{ */

/** A CUDA stream; cudaStream_t and CUstream pass without a cast. NULL is the legacy default stream.
 */
typedef struct CUstream_st* cuflash_stream_t;

/** A library handle: a device and options. NULL stands for the default device with default options.
 */
typedef struct cuflash_handle* cuflash_handle_t;

/** The result of a call, one of enum cuflash_status. Values are never reused. */
typedef int32_t cuflash_status_t;

/** Statuses. 0 to 7 keep the meaning that releases up to 0.6 gave them. */
enum cuflash_status {
  CUFLASH_SUCCESS = 0, /**< done, or enqueued */
  CUFLASH_ERROR_INVALID_DIMENSION =
      1, /**< an extent out of range; a scale negative, not finite or above 2^127 */
  CUFLASH_ERROR_DIMENSION_MISMATCH = 2,   /**< extents that do not fit together */
  CUFLASH_ERROR_NULL_POINTER = 3,         /**< a required pointer is NULL */
  CUFLASH_ERROR_CUDA = 4,                 /**< CUDA refused; see cuflash_last_cuda_error() */
  CUFLASH_ERROR_OUT_OF_MEMORY = 5,        /**< device memory */
  CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM = 6, /**< head_dim outside 1 to 576 (backward: 256) */
  CUFLASH_ERROR_UNSUPPORTED_DTYPE = 7,    /**< unknown, unset or unsuitable dtype */
  CUFLASH_ERROR_INVALID_VALUE = 8,        /**< any other bad argument */
  CUFLASH_ERROR_MISALIGNED = 9,           /**< a pointer not aligned to its element */
  CUFLASH_ERROR_UNSUPPORTED = 10,         /**< a field or combination that no kernel implements */
  CUFLASH_ERROR_WORKSPACE_TOO_SMALL = 11, /**< ask the ..._workspace_size function */
  CUFLASH_ERROR_NO_DEVICE = 12,           /**< no CUDA device or no driver; the CPU device works */
  CUFLASH_ERROR_UNSUPPORTED_ARCH = 13,    /**< the library holds no code for this GPU */
  CUFLASH_ERROR_STRUCT_SIZE = 14,         /**< struct_size too small, or an unknown field is set */
  CUFLASH_ERROR_ALIASING = 15,       /**< an output overlaps an input, another output, or itself */
  CUFLASH_ERROR_INTERNAL = 16,       /**< a bug in cuflash */
  CUFLASH_ERROR_WRONG_DEVICE = 17,   /**< memory of another device than the call's */
  CUFLASH_ERROR_NOT_BUILT = 18,      /**< left out of this build of the library */
  CUFLASH_ERROR_DRIVER_TOO_OLD = 19, /**< the driver is older than the CUDA runtime inside */
  CUFLASH_ERROR_HOST_MEMORY = 20,    /**< host memory */
  CUFLASH_ERROR_CAPTURE = 21,        /**< not possible during stream capture: preload first */
  CUFLASH_ERROR_ASYNCHRONOUS = 22    /**< an earlier kernel faulted; the context is lost */
};

/** Element types. 0 means: the same as q (for q: unset, an error). */
enum cuflash_dtype {
  CUFLASH_DTYPE_DEFAULT = 0, /**< same as q */
  CUFLASH_F32 = 1,           /**< IEEE binary32 */
  CUFLASH_F16 = 2,           /**< IEEE binary16 */
  CUFLASH_BF16 = 3,          /**< bfloat16 */
  CUFLASH_FP8_E4M3 = 4,      /**< OCP E4M3, which has no infinity; caches only */
  CUFLASH_FP8_E5M2 = 5,      /**< OCP E5M2; caches only */
  CUFLASH_INT8 = 6,          /**< two's complement; caches only */
  CUFLASH_INT4 =
      7 /**< two's complement, two a byte, the even channel in its low half; caches only */
};

/** Devices other than a CUDA ordinal. */
enum cuflash_device {
  CUFLASH_DEVICE_CPU = -1,    /**< host memory, synchronous */
  CUFLASH_DEVICE_CURRENT = -2 /**< the CUDA device that is current at each call */
};

/** problem.mask */
enum cuflash_mask {
  CUFLASH_MASK_NONE = 0,  /**< every key is seen (a window may still apply) */
  CUFLASH_MASK_CAUSAL = 1 /**< keys j <= c are seen */
};

/** problem.mask_align: where the centre c of query row i lies. Causal and windows share it. */
enum cuflash_align {
  CUFLASH_ALIGN_BOTTOM_RIGHT = 0, /**< c = i + Sk - Sq, with each sequence's own lengths */
  CUFLASH_ALIGN_TOP_LEFT = 1,     /**< c = i */
  CUFLASH_ALIGN_OFFSET = 2,       /**< c = i + problem.mask_offset */
  CUFLASH_ALIGN_DEVICE_OFFSETS =
      3 /**< c = i + problem.mask_offsets[b], read when the kernel runs */
};

/** problem.math_mode for f32 inputs. */
enum cuflash_math {
  CUFLASH_MATH_EXACT = 0, /**< fp32 multiply-add */
  CUFLASH_MATH_TF32 = 1   /**< tensor cores may round inputs to tf32; not implemented yet */
};

/** Bits of cuflash_tensor.flags. */
enum cuflash_tensor_flag {
  CUFLASH_TENSOR_DENSE = 1 /**< strides are ignored: dense [batch, head, row, channel] */
};

/** Bits of cuflash_problem.flags. An unknown bit is refused with 10. */
enum cuflash_problem_flag {
  CUFLASH_PROBLEM_SCALE_SET = 1, /**< use problem.scale; without it 1/sqrt(head_dim) */
  CUFLASH_PROBLEM_WINDOW = 2,    /**< use window_left and window_right */
  CUFLASH_PROBLEM_V_IS_K_PREFIX =
      4, /**< V is the first head_dim_v channels of K, v is all zero; not in the backward pass */
  CUFLASH_PROBLEM_DETERMINISTIC = 8,    /**< bitwise equal results from run to run */
  CUFLASH_PROBLEM_BATCH_INVARIANT = 16, /**< a row's bits do not depend on its batch; see MODES */
  CUFLASH_PROBLEM_ACCUMULATE =
      32, /**< fold into the O (fp32) and LSE that are there, as cuflash_merge_states() does */
  CUFLASH_PROBLEM_WORKSPACE_PREPARED =
      64,                           /**< the workspace went through cuflash_workspace_prepare() */
  CUFLASH_PROBLEM_LEFT_PADDED = 128 /**< use leftpad_k */
};

/** Bits of cuflash_gradients.flags. */
enum cuflash_gradients_flag {
  CUFLASH_GRADIENTS_ACCUMULATE = 1, /**< add into dq, dk and dv, which must be f32 */
  CUFLASH_GRADIENTS_DELTA_GIVEN = 2 /**< delta is an input, and problem.o is not read */
};

/** kv_cache.layout */
enum cuflash_cache_layout {
  CUFLASH_CACHE_CONTIGUOUS = 0, /**< entry b of the cache holds sequence b */
  CUFLASH_CACHE_PAGED = 1,      /**< a block table names the pages of each sequence */
  CUFLASH_CACHE_PAGED_CSR = 2   /**< indptr and indices name them */
};

/** Bits of cuflash_merge.flags. */
enum cuflash_merge_flag {
  CUFLASH_MERGE_LSE_BASE2 = 1 /**< LSE in and out are base-2 logarithms */
};

/** Bits of cuflash_kv_append.flags. */
enum cuflash_append_flag {
  CUFLASH_APPEND_INTERLEAVED = 1 /**< rotary pairs are (2i, 2i+1), not (i, i + rotary_dim/2) */
};

/** Operations, for cuflash_kernel_info. */
enum cuflash_operation {
  CUFLASH_OPERATION_FORWARD = 1,  /**< cuflash_attention_forward() */
  CUFLASH_OPERATION_BACKWARD = 2, /**< cuflash_attention_backward() */
  CUFLASH_OPERATION_DECODE = 3,   /**< cuflash_attention_decode() */
  CUFLASH_OPERATION_APPEND = 4,   /**< cuflash_kv_cache_append() */
  CUFLASH_OPERATION_MERGE = 5,    /**< cuflash_merge_states() */
  CUFLASH_OPERATION_WEIGHTS = 6   /**< cuflash_attention_weights() */
};

/** Keys of cuflash_set_option(). */
enum cuflash_option {
  CUFLASH_OPTION_DETERMINISTIC = 1,   /**< 0 or 1: as the problem flag, for every call */
  CUFLASH_OPTION_BATCH_INVARIANT = 2, /**< 0 or 1: as the problem flag, for every call */
  CUFLASH_OPTION_SM_MARGIN = 3,       /**< SMs to leave to others, 0 to 1024; see MODES */
  CUFLASH_OPTION_CPU_THREADS = 4,     /**< threads of the CPU device, 0 (all cores) to 1024 */
  CUFLASH_OPTION_CHECK_POINTERS = 5   /**< 0 or 1 (default): ask CUDA where each pointer lives */
};

/** Log levels, of CUFLASH_LOG_LEVEL and cuflash_set_log_callback(). */
enum cuflash_log_level {
  CUFLASH_LOG_OFF = 0,   /**< nothing (default) */
  CUFLASH_LOG_ERROR = 1, /**< each refused or failed call */
  CUFLASH_LOG_INFO = 2,  /**< handles, devices, options */
  CUFLASH_LOG_CALLS = 3  /**< each call and the kernel it took */
};

/** Called for each log line; text is valid during the call only. */
typedef void (*cuflash_log_fn)(void* user, int32_t level, const char* text);

/** Gives `bytes` of device memory (host memory on the CPU device), aligned to 256, usable on the
 *  stream; NULL if there is none. During capture it must be legal under capture. */
typedef void* (*cuflash_alloc_fn)(void* user, size_t bytes, int32_t device,
                                  cuflash_stream_t stream);

/** Takes back memory of cuflash_alloc_fn, after the work enqueued on the stream so far. */
typedef void (*cuflash_free_fn)(void* user, void* memory, int32_t device, cuflash_stream_t stream);

/** @} */

/** @defgroup structs Structs
 *
 * struct_size comes first and all-zero means default: zero the struct, set struct_size (or call the
 * init function), fill in what you need. A shorter struct of an older header is extended by zeros;
 * a longer one of a newer header is accepted if its unknown tail is zero, else 14. Fields whose
 * feature is not implemented yet must be zero: else 10 with the field's name.
 * @{ */

/** A [batch, head, row, channel] tensor, 64 bytes for ever. With CUFLASH_TENSOR_DENSE the strides
 * are ignored; without it they are literal, in elements, not negative, and 0 repeats (inputs only).
 * Along an extent of 1 any stride that is not negative will do. */
typedef struct cuflash_tensor {
  void* data;           /**< first element; inputs are not written through it */
  int64_t batch_stride; /**< elements from one batch entry (or page) to the next */
  int64_t head_stride;  /**< elements from one head to the next */
  int64_t row_stride;   /**< elements from one row (token, slot) to the next */
  uint32_t flags;       /**< bits of enum cuflash_tensor_flag */
  int32_t dtype;        /**< enum cuflash_dtype; 0: same as q */
  int64_t reserved[3];  /**< zero */
} cuflash_tensor_t;

/** One attention problem, for every operation. */
typedef struct cuflash_problem {
  uint32_t struct_size; /**< sizeof(cuflash_problem_t) of the caller's header */
  uint32_t flags;       /**< bits of enum cuflash_problem_flag */

  int64_t batch;      /**< B */
  int64_t heads_q;    /**< Hq */
  int64_t heads_kv;   /**< Hkv; 0: Hq */
  int64_t len_q;      /**< Sq (the maximum when ragged) */
  int64_t len_k;      /**< Sk (the maximum when ragged); decode: 0, the cache tells */
  int64_t head_dim;   /**< D of q and k, 1 to 576 (backward: 256) */
  int64_t head_dim_v; /**< channels of v and o, Dv; 0: head_dim; the same bounds */
  int64_t total_q;    /**< with cu_seqlens_q: rows of the packed q */
  int64_t total_k;    /**< with cu_seqlens_k: rows of the packed k and v */

  cuflash_tensor_t q; /**< [B, Hq, Sq, D], its dtype must be set */
  cuflash_tensor_t k; /**< [B, Hkv, Sk, D], dtype of q; decode: all zero */
  cuflash_tensor_t v; /**< [B, Hkv, Sk, Dv], dtype of q; decode: all zero */
  cuflash_tensor_t o; /**< [B, Hq, Sq, Dv], dtype of q or f32 (an output; an input of backward) */
  float* lse;         /**< [B, Hq, Sq]; forward and decode may have NULL, backward reads it */
  int64_t lse_batch_stride; /**< the three strides all zero: dense */
  int64_t lse_head_stride;  /**< elements */
  int64_t lse_row_stride;   /**< elements */

  const int32_t* cu_seqlens_q; /**< device [B+1], rising: where sequences begin in a packed q */
  const int32_t* cu_seqlens_k; /**< device [B+1], rising: the same of k and v; not in decode */
  const int32_t* seqused_q;    /**< device [B], rows in use; NULL: all */
  const int32_t* seqused_k;    /**< device [B], slots of keys in use; NULL: all; not in decode */
  const int32_t* leftpad_k; /**< with CUFLASH_PROBLEM_LEFT_PADDED: device [B], unused slots first */

  int32_t mask;                   /**< enum cuflash_mask */
  int32_t mask_align;             /**< enum cuflash_align */
  int64_t mask_offset;            /**< with CUFLASH_ALIGN_OFFSET; within +-2^31 */
  const int32_t* mask_offsets;    /**< with CUFLASH_ALIGN_DEVICE_OFFSETS: device [B] */
  int64_t window_left;            /**< with CUFLASH_PROBLEM_WINDOW: -1 unlimited, else >= 0 */
  int64_t window_right;           /**< with CUFLASH_PROBLEM_WINDOW: -1 unlimited, else >= 0 */
  const uint32_t* tree_mask;      /**< device [B, Sq, words], packed bits; not in backward */
  int64_t tree_mask_batch_stride; /**< 32-bit words; 0 repeats */
  int64_t tree_mask_row_stride;   /**< 32-bit words; 0 repeats */
  int64_t tree_mask_len;          /**< keys that the bits cover, the last ones; 0: len_q */

  float scale;                /**< with CUFLASH_PROBLEM_SCALE_SET: 0 to 2^127, 0 means 0 */
  float softcap;              /**< cap of cap * tanh(s / cap), finite; 0: none */
  const void* alibi_slopes;   /**< device [Hq] or [B, Hq]; NULL: none */
  int64_t alibi_batch_stride; /**< elements; 0: [Hq] */
  const void* bias;           /**< device [B, Hq, Sq, Sk] by strides, keys contiguous; NULL: none */
  int64_t bias_batch_stride;  /**< elements; 0 repeats */
  int64_t bias_head_stride;   /**< elements; 0 repeats */
  int64_t bias_row_stride;    /**< elements; 0 repeats */
  const void* sinks;          /**< device [Hq], natural logarithms; NULL: none */
  int32_t alibi_dtype;        /**< enum cuflash_dtype; 0: f32 */
  int32_t bias_dtype;         /**< enum cuflash_dtype; 0: same as q */
  int32_t sinks_dtype;        /**< enum cuflash_dtype; 0: f32 */
  float dropout_p;            /**< probability of dropping, 0 to 1; then B * Hq is at most 2^32 */
  uint64_t dropout_seed;      /**< key of Philox4x32-10 */
  uint64_t dropout_offset; /**< its counter: a call uses this to this + (Sk - 1) / 4, so calls that
                                add Sk / 4, rounded up, drop independently */
  const uint64_t* dropout_seed_ptr;   /**< device; instead of the value */
  const uint64_t* dropout_offset_ptr; /**< device; instead of the value */

  const float* q_descale;         /**< device; FP8 only, not implemented yet */
  const float* k_descale;         /**< device; FP8 only, not implemented yet */
  const float* v_descale;         /**< device; FP8 only, not implemented yet */
  int64_t q_descale_batch_stride; /**< elements; 0 repeats */
  int64_t q_descale_head_stride;  /**< elements; 0 repeats */
  int64_t k_descale_batch_stride; /**< elements; 0 repeats */
  int64_t k_descale_head_stride;  /**< elements; 0 repeats */
  int64_t v_descale_batch_stride; /**< elements; 0 repeats */
  int64_t v_descale_head_stride;  /**< elements; 0 repeats */

  void* workspace; /**< at least ..._workspace_size() bytes, aligned to 256; NULL: the pool */
  uint64_t workspace_size; /**< bytes */
  const char*
      kernel; /**< a kernel's or a family's name to force, NULL: choose (see cuflash_set_kernel) */
  int32_t math_mode; /**< enum cuflash_math */
  int32_t
      num_splits;    /**< decode: parts along the keys, 0: choose, at most 1024; elsewhere 0 or 1 */
  int32_t sm_margin; /**< SMs to leave to others, added to the handle's option; see MODES */
  int32_t
      target_arch; /**< queries only: answer for this GPU (90 for sm_90), 0: the handle's device */
} cuflash_problem_t;

/** Inputs and outputs of the backward pass beside the problem's q, k, v, o and lse. */
typedef struct cuflash_gradients {
  uint32_t struct_size; /**< sizeof(cuflash_gradients_t) of the caller's header */
  uint32_t flags;       /**< bits of enum cuflash_gradients_flag */
  cuflash_tensor_t d_o; /**< [B, Hq, Sq, Dv] in, dtype of q; strides of 0 are fine */
  cuflash_tensor_t dq;  /**< [B, Hq, Sq, D] out, dtype of q or f32 */
  cuflash_tensor_t
      dk; /**< [B, Hkv, Sk, D] out, dtype of q or f32: the sum over the group's query heads */
  cuflash_tensor_t dv; /**< [B, Hkv, Sk, Dv] out, dtype of q or f32 */
  const float* dlse; /**< gradient of LSE, [B, Hq, Sq] in, by the problem's lse strides; NULL: 0 */
  float* delta;      /**< rowsum(O * dO), [B, Hq, Sq] by the problem's lse strides; an output unless
                            CUFLASH_GRADIENTS_DELTA_GIVEN; NULL: not wanted */
  void* dbias;  /**< out, dtype and strides of the bias, summed along strides of 0; written as a
                            whole; NULL: not wanted */
  void* dsinks; /**< out [Hq], dtype of the sinks; NULL: not wanted */
} cuflash_gradients_t;

/** A cache of keys and values. k and v may each have any dtype. Their elements are those stored, or with scales
 * (stored - zero) * scale, where scale and zero of channel c of a slot lie at page * scale_page_stride + head *
 * scale_head_stride + slot * scale_slot_stride + c / scale_group (c / 0: 0), page being the entry of a contiguous cache:
 * strides of 0 give one scale to all pages, heads or slots. Those of slots that are not in use are not read. Int4 has
 * even strides; an odd head_dim leaves the last half byte of a row unused. */
typedef struct cuflash_kv_cache {
  uint32_t struct_size; /**< sizeof(cuflash_kv_cache_t) of the caller's header */
  uint32_t flags;       /**< zero */
  cuflash_tensor_t
      k; /**< contiguous: [entries, Hkv, max_len, D]; paged: [pages, Hkv, page_size, D] */
  cuflash_tensor_t v; /**< as k */
  int32_t layout;     /**< enum cuflash_cache_layout */
  int32_t id_bits;    /**< 0 or 32, or 64: width of page ids */
  int64_t
      max_len; /**< keys that a sequence can hold: sizes launches; longer lengths are cut to it */
  int64_t num_pages;      /**< pages in the pool; contiguous: entries, 0: the problem's batch */
  int64_t page_size;      /**< slots of a page; contiguous: 0 */
  const int32_t* lengths; /**< device [B], valid keys of each sequence; NULL: max_len */
  const int32_t* cache_batch_idx; /**< contiguous: device [B], entry of each sequence (one that the
                                       cache lacks: no keys); NULL: entry b */
  const void* block_table;        /**< device [B, columns]: page ids, max_len / page_size of them,
                                       rounded up */
  int64_t block_table_stride;     /**< ids from one row to the next */
  const int32_t* page_indptr;     /**< device [B+1], rising: the first index of each sequence */
  const void* page_indices;  /**< device [indptr[B]]: page ids; lengths are cut to their pages */
  const void* k_scale;       /**< device; NULL: 1 */
  const void* v_scale;       /**< device; NULL: 1; with CUFLASH_PROBLEM_V_IS_K_PREFIX those of k */
  const void* k_zero;        /**< device, int8 and int4 only; NULL: 0 */
  const void* v_zero;        /**< device, int8 and int4 only; NULL: 0 */
  int64_t scale_page_stride; /**< elements; 0 repeats */
  int64_t scale_head_stride; /**< elements; 0 repeats */
  int64_t scale_slot_stride; /**< elements; 0 repeats */
  int64_t scale_group;       /**< channels that share a scale: 0 (all), 32, 64 or 128 */
  int32_t scale_dtype;       /**< of scales and zeros: f32 (0 too), f16 or bf16 */
  int32_t reserved;          /**< zero */
} cuflash_kv_cache_t;

/** New keys and values for a cache; see cuflash_kv_cache_append(). */
typedef struct cuflash_kv_append {
  uint32_t struct_size;     /**< sizeof(cuflash_kv_append_t) of the caller's header */
  uint32_t flags;           /**< bits of enum cuflash_append_flag */
  int64_t batch;            /**< B */
  int64_t heads_q;          /**< Hq, where q is given */
  int64_t heads_kv;         /**< Hkv */
  int64_t len;              /**< new tokens of each sequence */
  int64_t head_dim;         /**< D of k and q, 1 to 576 */
  int64_t head_dim_v;       /**< channels of v, Dv; 0: head_dim; the same bounds */
  int64_t rotary_dim;       /**< channels rotated, even and at most D; 0: D where cos is given */
  int64_t max_position;     /**< with cos: its rows and those of sin */
  cuflash_tensor_t k;       /**< [B, Hkv, len, D], its dtype must be set */
  cuflash_tensor_t v;       /**< [B, Hkv, len, Dv], dtype of k; all zero: no values are written */
  cuflash_tensor_t q;       /**< [B, Hq, len, D], dtype of k; all zero: none */
  cuflash_tensor_t q_out;   /**< out [B, Hq, len, D], dtype of k; may be exactly q */
  const int32_t* positions; /**< device [B, len]; NULL: after the cache's lengths */
  const int64_t* slot_mapping; /**< device [B, len], slots in the whole cache; NULL: by position */
  const float* cos;            /**< device [max_position, rotary_dim / 2]; NULL: no rotation */
  const float* sin;            /**< device [max_position, rotary_dim / 2] */
  const void* q_norm_weight;   /**< device [D], dtype of k; NULL: no RMS norm of q */
  const void* k_norm_weight;   /**< device [D], dtype of k; NULL: no RMS norm of k */
  float norm_epsilon;          /**< added to the mean square; finite and >= 0 */
  int32_t target_arch;         /**< queries only, as the problem's */
} cuflash_kv_append_t;

/** Partial results over disjoint sets of keys, to be merged; see cuflash_merge_states(). */
typedef struct cuflash_merge {
  uint32_t struct_size;     /**< sizeof(cuflash_merge_t) of the caller's header */
  uint32_t flags;           /**< bits of enum cuflash_merge_flag */
  int64_t num_parts;        /**< 0 to 2^31 - 1; 0 gives O = 0, LSE = -infinity */
  int64_t batch;            /**< B */
  int64_t heads;            /**< Hq */
  int64_t len;              /**< Sq */
  int64_t head_dim;         /**< D, 1 to 576 */
  cuflash_tensor_t parts;   /**< part 0 of O: [B, Hq, Sq, D]; its dtype must be set */
  int64_t part_stride;      /**< elements from one part of O to the next */
  const float* lse_parts;   /**< part 0 of LSE */
  int64_t lse_part_stride;  /**< elements from one part of LSE to the next */
  int64_t lse_batch_stride; /**< of each part and of lse; the three all zero: dense [B, Hq, Sq] */
  int64_t lse_head_stride;  /**< elements */
  int64_t lse_row_stride;   /**< elements */
  cuflash_tensor_t o;       /**< out [B, Hq, Sq, D]; dtype 0: as parts; may be exactly a part */
  float* lse;               /**< out; may be exactly a part; NULL: not wanted */
} cuflash_merge_t;

/** Rows of softmax probabilities to look at; see cuflash_attention_weights(). */
typedef struct cuflash_weights {
  uint32_t struct_size; /**< sizeof(cuflash_weights_t) of the caller's header */
  uint32_t flags;       /**< zero */
  float* weights;       /**< out [B, Hq, num_rows, Sk], keys contiguous; 0 where nothing is seen */
  int64_t batch_stride; /**< the three strides all zero: dense */
  int64_t head_stride;  /**< elements */
  int64_t row_stride;   /**< elements */
  const int32_t* rows;  /**< device [num_rows], rows of each sequence; NULL: the first num_rows */
  int64_t num_rows;     /**< 0: Sq */
} cuflash_weights_t;

/** One kernel of the library; filled by cuflash_kernel_info(). Strings are static. */
typedef struct cuflash_kernel_info_s {
  uint32_t struct_size;  /**< in: sizeof(cuflash_kernel_info_t); no more is written */
  uint32_t built;        /**< 1 if this build holds it */
  const char* name;      /**< unique, e.g. "fwd_wmma_f16_d64" */
  const char* family;    /**< "reference", "wmma", ... */
  int32_t operation;     /**< enum cuflash_operation */
  int32_t on_cpu;        /**< 1: CPU device, 0: CUDA */
  int32_t tile_m;        /**< query rows of a tile */
  int32_t tile_n;        /**< keys of a tile */
  int32_t threads;       /**< threads of a block; 0 on the CPU */
  int32_t shared_memory; /**< dynamic bytes of a block */
  int32_t rank;          /**< among the kernels that accept a problem the highest is taken */
  int32_t reserved;      /**< zero */
} cuflash_kernel_info_t;

/** @} */

/** @defgroup messages Version, statuses and messages
 *
 * No CUDA call; callable at any time.
 * @{ */

/** The library's version; each pointer may be NULL. Since 0.7.0. */
CUFLASH_API void cuflash_version(int32_t* major, int32_t* minor, int32_t* patch);

/** The ABI number, that of the SONAME libcuflash.so.N. Since 0.7.0. */
CUFLASH_API int32_t cuflash_abi_version(void);

/** Version, CUDA version and architectures of this build, compiler; static. Since 0.7.0. */
CUFLASH_API const char* cuflash_build_info(void);

/** "CUFLASH_SUCCESS" and so on; "CUFLASH_STATUS_UNKNOWN" for other values; static. Since 0.7.0. */
CUFLASH_API const char* cuflash_status_name(cuflash_status_t status);

/** A sentence for a status; "Unknown error" for other values; static. As in 0.6. */
CUFLASH_API const char* cuflash_error_string(int32_t status);

/** This thread's last message: of its last failed call, "" after a call that succeeded. Valid until
 *  the thread's next cuflash call. Since 0.7.0. */
CUFLASH_API const char* cuflash_last_error(void);

/** Copies that message into buffer[capacity], cut and NUL-terminated; returns its length without
 * the NUL. buffer may be NULL if capacity is 0. Since 0.7.0. */
CUFLASH_API size_t cuflash_last_error_copy(char* buffer, size_t capacity);

/** The cudaError_t behind this thread's last failed call, 0 if CUDA had no part in it. Since 0.7.0.
 */
CUFLASH_API int32_t cuflash_last_cuda_error(void);

/** @} */

/** @defgroup handles Handles, options, logging
 * @{ */

/** Makes a handle for a CUDA ordinal, CUFLASH_DEVICE_CURRENT or CUFLASH_DEVICE_CPU. A call through it makes that device
 * current and restores the caller's. Makes no allocation on the device. 3 handle is NULL; 8 no such
 * device; 12 no driver or device; 18 built without CUDA. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_create(cuflash_handle_t* handle, int32_t device);

/** Frees a handle; NULL is fine. Makes no CUDA call. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_destroy(cuflash_handle_t handle);

/** What NULL handles mean in this process: CUFLASH_DEVICE_CURRENT (at start, unless the environment
 * has CUFLASH_DEVICE=cpu; other values than cpu and cuda there make calls return 8),
 * CUFLASH_DEVICE_CPU or a CUDA ordinal. 8 on other values; 12, 18 where there is no CUDA device.
 * Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_set_default_device(int32_t device);

/** Sets an option of enum cuflash_option. 3 handle is NULL; 8 unknown key or value out of bounds.
 */
CUFLASH_API cuflash_status_t cuflash_set_option(cuflash_handle_t handle, int32_t key,
                                                int64_t value);

/** Reads an option; a NULL handle gives the default. 3 value is NULL; 8 unknown key. Since 0.7.0.
 */
CUFLASH_API cuflash_status_t cuflash_get_option(cuflash_handle_t handle, int32_t key,
                                                int64_t* value);

/** Bounds of an option, both included; the pointers may be NULL. 8 unknown key. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_option_bounds(int32_t key, int64_t* minimum, int64_t* maximum);

/** Forces a kernel or a family by name for the calls through this handle, NULL or "" lifts it.
 * Stronger than CUFLASH_KERNEL in the environment, weaker than problem.kernel. A kernel that
 * refuses a problem is never replaced: the call returns 10 with its reason (18 if it is not in this
 * build). 3 handle is NULL; 8 unknown name (the message lists the names). Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_set_kernel(cuflash_handle_t handle, const char* name);

/** Takes workspace from these functions instead of the pool; both NULL: the pool again.
 *  3 handle is NULL or one function is. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_set_allocator(cuflash_handle_t handle,
                                                   cuflash_alloc_fn allocate,
                                                   cuflash_free_fn release, void* user);

/** Sends log lines up to `level` to a function instead of the file, for the whole process; NULL
 * goes back to CUFLASH_LOG_LEVEL and CUFLASH_LOG_FILE (`%p` in it is the process id; default stderr). Since
 * 0.7.0. */
CUFLASH_API void cuflash_set_log_callback(cuflash_log_fn callback, void* user, int32_t level);

/** Loads the kernels that the handle's device may take and sets their attributes, so that a first
 * call inside a capture loads nothing. problem NULL: all kernels; else those of its dtype and
 * head_dim. The CPU device has nothing to load. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_preload(cuflash_handle_t handle,
                                             const cuflash_problem_t* problem);

/** Gives unused memory of the pool of the handle's device back to CUDA. Since 0.7.0. */
CUFLASH_API cuflash_status_t cuflash_trim(cuflash_handle_t handle);

/** @} */

/** @defgroup defaults Defaults of structs
 *
 * Zero `size` bytes (8 to 65536, a multiple of 8) and set struct_size. 3 on NULL, 14 on size.
 * Since 0.7.0.
 * @{ */

/** Prepares a cuflash_problem_t. */
CUFLASH_API cuflash_status_t cuflash_problem_init(cuflash_problem_t* problem, size_t size);
/** Prepares a cuflash_gradients_t. */
CUFLASH_API cuflash_status_t cuflash_gradients_init(cuflash_gradients_t* gradients, size_t size);
/** Prepares a cuflash_kv_cache_t. */
CUFLASH_API cuflash_status_t cuflash_kv_cache_init(cuflash_kv_cache_t* cache, size_t size);
/** Prepares a cuflash_kv_append_t. */
CUFLASH_API cuflash_status_t cuflash_kv_append_init(cuflash_kv_append_t* append, size_t size);
/** Prepares a cuflash_merge_t. */
CUFLASH_API cuflash_status_t cuflash_merge_init(cuflash_merge_t* merge, size_t size);
/** Prepares a cuflash_weights_t. */
CUFLASH_API cuflash_status_t cuflash_weights_init(cuflash_weights_t* weights, size_t size);

/** @} */

/** @defgroup operations Operations
 *
 * All asynchronous on the stream and capture-safe on CUDA. Since 0.7.0.
 * @{ */

/** O = softmax(scale q.k, masked) V, and LSE where wanted.
 *  1 extents, scale; 2 Hq not a multiple of Hkv; 3 NULL tensors that have elements; 6 head_dim;
 *  7 dtypes; 8 strides, mask values, pointers to other memory; 9 alignment; 10 unimplemented fields,
 *  a forced kernel that refuses; 11 workspace; 14 struct_size; 15 o or lse overlaps; 17 memory or
 *  stream of another device; device statuses 4, 5, 12, 13, 18, 19, 20, 21, 22. */
CUFLASH_API cuflash_status_t cuflash_attention_forward(cuflash_handle_t handle,
                                                       const cuflash_problem_t* problem,
                                                       cuflash_stream_t stream);

/** dQ, dK, dV from dO and the forward's O and LSE. Statuses as forward. */
CUFLASH_API cuflash_status_t cuflash_attention_backward(cuflash_handle_t handle,
                                                        const cuflash_problem_t* problem,
                                                        const cuflash_gradients_t* gradients,
                                                        cuflash_stream_t stream);

/** Attention of len_q >= 0 new tokens over a cache; problem.k and problem.v must be all zero. With
 * the bottom-right alignment row i of sequence b sits at lengths[b] - len_q + i: append first, then
 *  attend. A length outside 0 to max_len is cut to that range. In a paged cache slot s of a sequence is
 *  slot s % page_size of its page number s / page_size; table entries past its length are not read, and
 *  an id outside 0 to num_pages - 1 hides its keys. Statuses as forward. */
CUFLASH_API cuflash_status_t cuflash_attention_decode(cuflash_handle_t handle,
                                                      const cuflash_problem_t* problem,
                                                      const cuflash_kv_cache_t* cache,
                                                      cuflash_stream_t stream);

/** Writes new keys and values into a cache, in one launch and without workspace: append first, then attend.
 *
 * The position of token i of sequence b is positions[b][i] or, without positions, lengths[b] + i: the cache's
 * lengths count what was there before, and the call does not change them. Without slot_mapping the token goes to
 * the slot of its sequence with the number of its position, as decode finds it; it is skipped if the position is
 * negative, not below max_len, past the pages of its sequence or on a page that is not in the pool, or if lengths[b]
 * is negative. With slot_mapping it goes to slot n = slot_mapping[b][i] of the whole cache, slot n % page_size of
 * page n / page_size (contiguous: max_len for page_size, the entry for the page), and is skipped if n is negative
 * or past the last slot; page tables are not read, nor is the position unless there is cos. Nothing of a skipped
 * token's k and v is read or written, and nothing else of the cache is written. What a slot holds that several
 * tokens are sent to is undefined.
 *
 * A row x of k is written as it is or, in this order: normed, x / sqrt(mean(x^2) + norm_epsilon) * k_norm_weight over
 * all of head_dim; its first rotary_dim channels rotated in pairs, (x, y) to (x cos - y sin, x sin + y cos) with
 * the pair's entries in the row of cos and sin of the token's position. Pair j is (j, j + rotary_dim / 2) or, with
 * CUFLASH_APPEND_INTERLEAVED, (2j, 2j + 1). So is q, with q_norm_weight, into q_out: of every token, also of those
 * that are skipped. A position that cos has no row for skips the token, and its rows of q_out are 0.
 *
 * All in fp32, rounded once, to the dtype of q_out or to what cache.k and cache.v keep (dtype 0: that of append.k): the
 * number nearest to x / scale + zero. fp8 and integers saturate; an integer is that of x = 0 where x is NaN, and so is any
 * number where scale is 0. A row of zeros is normed to zeros without epsilon too.
 *
 * Statuses as forward; 3 no positions and no cache.lengths where they are needed; 15 q_out or the cache overlaps. */
CUFLASH_API cuflash_status_t cuflash_kv_cache_append(cuflash_handle_t handle,
                                                     const cuflash_kv_cache_t* cache,
                                                     const cuflash_kv_append_t* append,
                                                     cuflash_stream_t stream);

/** Merges results over disjoint sets of keys: O = sum_p w_p O_p with w_p = exp(LSE_p - LSE) and
 *  LSE = ln sum_p exp(LSE_p). A part with LSE = -infinity adds nothing, whatever its O holds. o and
 * lse may be exactly one of the parts (same pointer, strides and dtype); any other overlap is 15.
 */
CUFLASH_API cuflash_status_t cuflash_merge_states(cuflash_handle_t handle,
                                                  const cuflash_merge_t* merge,
                                                  cuflash_stream_t stream);

/** Softmax probabilities, before dropout, of chosen rows from the problem's q, k and lse, for looking
 * at: simple and slow. v and o have no part in it. A row that a sequence does not have gets 0.
 * Statuses as forward; 15 weights overlaps. */
CUFLASH_API cuflash_status_t cuflash_attention_weights(cuflash_handle_t handle,
                                                       const cuflash_problem_t* problem,
                                                       const cuflash_weights_t* weights,
                                                       cuflash_stream_t stream);

/** @} */

/** @defgroup workspace Workspace
 *
 * ..._workspace_size: the exact bytes that the call needs for any lengths on the device; one byte
 * less is refused with 11. Host only: pointers in the structs are not read. Those of tensors may be
 * NULL; an optional one counts as given where it is not NULL. Since 0.7.0.
 * @{ */

/** Workspace of cuflash_attention_forward(). */
CUFLASH_API cuflash_status_t cuflash_forward_workspace_size(cuflash_handle_t handle,
                                                            const cuflash_problem_t* problem,
                                                            size_t* bytes);
/** Workspace of cuflash_attention_backward(). */
CUFLASH_API cuflash_status_t cuflash_backward_workspace_size(cuflash_handle_t handle,
                                                             const cuflash_problem_t* problem,
                                                             const cuflash_gradients_t* gradients,
                                                             size_t* bytes);
/** Workspace of cuflash_attention_decode(). */
CUFLASH_API cuflash_status_t cuflash_decode_workspace_size(cuflash_handle_t handle,
                                                           const cuflash_problem_t* problem,
                                                           const cuflash_kv_cache_t* cache,
                                                           size_t* bytes);
/** Workspace of cuflash_kv_cache_append(). */
CUFLASH_API cuflash_status_t cuflash_append_workspace_size(cuflash_handle_t handle,
                                                           const cuflash_kv_cache_t* cache,
                                                           const cuflash_kv_append_t* append,
                                                           size_t* bytes);

/** Clears a workspace once, so that calls with CUFLASH_PROBLEM_WORKSPACE_PREPARED need not clear
 * what they use. Without the flag any content is legal. */
CUFLASH_API cuflash_status_t cuflash_workspace_prepare(cuflash_handle_t handle, void* workspace,
                                                       size_t bytes, cuflash_stream_t stream);

/** @} */

/** @defgroup explain Which kernel, and why
 *
 * ..._explain: JSON in buffer[capacity], cut and NUL-terminated: {"operation", "device", "kernel",
 * "family", "launches", "workspace_bytes", "num_splits", "kernels": [{"name", "family", "rank",
 * "accepted", "reason"}]}; each kernel that refuses the problem has its own reason. *needed (may be
 * NULL) gets the whole length with the NUL. A problem that no kernel takes has "kernel": null and
 * still succeeds. buffer may be NULL if capacity is 0. With problem.target_arch no GPU is needed;
 * an architecture that the library does not know is 13. Host only, as the sizes of workspaces. Since
 * 0.7.0.
 * @{ */

/** Which kernel cuflash_attention_forward() would take, and why not the others. */
CUFLASH_API cuflash_status_t cuflash_forward_explain(cuflash_handle_t handle,
                                                     const cuflash_problem_t* problem, char* buffer,
                                                     size_t capacity, size_t* needed);
/** Which kernel cuflash_attention_backward() would take, and why not the others. */
CUFLASH_API cuflash_status_t cuflash_backward_explain(cuflash_handle_t handle,
                                                      const cuflash_problem_t* problem,
                                                      const cuflash_gradients_t* gradients,
                                                      char* buffer, size_t capacity,
                                                      size_t* needed);
/** Which kernel cuflash_attention_decode() would take, and why not the others. */
CUFLASH_API cuflash_status_t cuflash_decode_explain(cuflash_handle_t handle,
                                                    const cuflash_problem_t* problem,
                                                    const cuflash_kv_cache_t* cache, char* buffer,
                                                    size_t capacity, size_t* needed);
/** Which kernel cuflash_kv_cache_append() would take, and why not the others. */
CUFLASH_API cuflash_status_t cuflash_append_explain(cuflash_handle_t handle,
                                                    const cuflash_kv_cache_t* cache,
                                                    const cuflash_kv_append_t* append, char* buffer,
                                                    size_t capacity, size_t* needed);

/** Number of kernels in the tables, built or not. */
CUFLASH_API int32_t cuflash_kernel_count(void);

/** Describes kernel `index`, 0 to cuflash_kernel_count() - 1. 3 info is NULL; 8 index; 14
 * struct_size. */
CUFLASH_API cuflash_status_t cuflash_kernel_info(int32_t index, cuflash_kernel_info_t* info);

/** @} */

/** @defgroup older Positional functions of releases up to 0.6
 *
 * Dense tensors, plain pointers, the default device (see cuflash_set_default_device()). From
 * languages without a header: the pointers are `void *`, the dimensions 32-bit integers, `scale` a
 * float.
 *
 * Q, K, V, O, dO, dQ, dK, dV: [batch, heads, seq_len, head_dim] of the named type; L: [batch, heads,
 * seq_len] fp32, required. scale: 0 to 2^127, 0 means 0. causal: only the low byte is read (it
 * was a bool). Checks in this order: 3 pointers, 1 dimensions (all > 0), 6 head_dim (1 to 256; it
 * was 32, 64 or 128), 1 scale; then as the struct calls.
 * @{ */

/** Forward in fp32; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_f32(const float* Q, const float* K,
                                                           const float* V, float* O, float* L,
                                                           int32_t batch_size, int32_t num_heads,
                                                           int32_t seq_len, int32_t head_dim,
                                                           float scale, int32_t causal,
                                                           cuflash_stream_t stream);

/** Forward in fp16; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_f16(const void* Q, const void* K,
                                                           const void* V, void* O, float* L,
                                                           int32_t batch_size, int32_t num_heads,
                                                           int32_t seq_len, int32_t head_dim,
                                                           float scale, int32_t causal,
                                                           cuflash_stream_t stream);

/** Forward in bf16; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_bf16(const void* Q, const void* K,
                                                            const void* V, void* O, float* L,
                                                            int32_t batch_size, int32_t num_heads,
                                                            int32_t seq_len, int32_t head_dim,
                                                            float scale, int32_t causal,
                                                            cuflash_stream_t stream);

/** Backward in fp32; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_f32(
    const float* Q, const float* K, const float* V, const float* O, const float* L, const float* dO,
    float* dQ, float* dK, float* dV, int32_t batch_size, int32_t num_heads, int32_t seq_len,
    int32_t head_dim, float scale, int32_t causal, cuflash_stream_t stream);

/** Backward in fp16; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_f16(
    const void* Q, const void* K, const void* V, const void* O, const float* L, const void* dO,
    void* dQ, void* dK, void* dV, int32_t batch_size, int32_t num_heads, int32_t seq_len,
    int32_t head_dim, float scale, int32_t causal, cuflash_stream_t stream);

/** Backward in bf16; see above. As in 0.6. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_bf16(
    const void* Q, const void* K, const void* V, const void* O, const float* L, const void* dO,
    void* dQ, void* dK, void* dV, int32_t batch_size, int32_t num_heads, int32_t seq_len,
    int32_t head_dim, float scale, int32_t causal, cuflash_stream_t stream);

/** @} */

/** @defgroup decode_token Positional decode of one token
 *
 * Q and O [batch * heads, 1, head_dim], K and V [batch * heads, seq_len, head_dim], L [batch *
 * heads] fp32, required. num_chunks: parts along the keys, <= 0: choose. Checks as above. Since
 * 0.7.0.
 * @{ */

/** Decode in fp32; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_f32(const float* Q, const float* K,
                                                          const float* V, float* O, float* L,
                                                          int32_t batch_size, int32_t num_heads,
                                                          int32_t seq_len, int32_t head_dim,
                                                          float scale, int32_t num_chunks,
                                                          cuflash_stream_t stream);

/** Decode in fp16; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_f16(const void* Q, const void* K,
                                                          const void* V, void* O, float* L,
                                                          int32_t batch_size, int32_t num_heads,
                                                          int32_t seq_len, int32_t head_dim,
                                                          float scale, int32_t num_chunks,
                                                          cuflash_stream_t stream);

/** Decode in bf16; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_bf16(const void* Q, const void* K,
                                                           const void* V, void* O, float* L,
                                                           int32_t batch_size, int32_t num_heads,
                                                           int32_t seq_len, int32_t head_dim,
                                                           float scale, int32_t num_chunks,
                                                           cuflash_stream_t stream);

/** @} */

/** @defgroup gqa Positional functions with grouped heads
 *
 * Separate lengths too: Q and O [batch, heads, len_q, head_dim], K and V [batch, heads_kv, len_k,
 * head_dim], L [batch, heads, len_q] fp32 (forward and decode: may be NULL). causal: 0 none, 1
 * bottom-right, 2 top-left, else 8. Extents of 0 succeed. decode: K and V are caches of len_k slots,
 * seq_lens (device, [batch] int32, NULL: len_k) their valid keys; num_splits as
 * problem.num_splits. Statuses as the struct calls. Since 0.7.0.
 * @{ */

/** Forward in fp32 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_gqa_f32(
    const float* Q, const float* K, const float* V, float* O, float* L, int32_t batch_size,
    int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k, int32_t head_dim,
    float scale, int32_t causal, cuflash_stream_t stream);

/** Forward in fp16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_gqa_f16(
    const void* Q, const void* K, const void* V, void* O, float* L, int32_t batch_size,
    int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k, int32_t head_dim,
    float scale, int32_t causal, cuflash_stream_t stream);

/** Forward in bf16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_forward_gqa_bf16(
    const void* Q, const void* K, const void* V, void* O, float* L, int32_t batch_size,
    int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k, int32_t head_dim,
    float scale, int32_t causal, cuflash_stream_t stream);

/** Backward in fp32 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_gqa_f32(
    const float* Q, const float* K, const float* V, const float* O, const float* L, const float* dO,
    float* dQ, float* dK, float* dV, int32_t batch_size, int32_t num_heads, int32_t num_heads_kv,
    int32_t len_q, int32_t len_k, int32_t head_dim, float scale, int32_t causal,
    cuflash_stream_t stream);

/** Backward in fp16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_gqa_f16(
    const void* Q, const void* K, const void* V, const void* O, const float* L, const void* dO,
    void* dQ, void* dK, void* dV, int32_t batch_size, int32_t num_heads, int32_t num_heads_kv,
    int32_t len_q, int32_t len_k, int32_t head_dim, float scale, int32_t causal,
    cuflash_stream_t stream);

/** Backward in bf16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_backward_gqa_bf16(
    const void* Q, const void* K, const void* V, const void* O, const float* L, const void* dO,
    void* dQ, void* dK, void* dV, int32_t batch_size, int32_t num_heads, int32_t num_heads_kv,
    int32_t len_q, int32_t len_k, int32_t head_dim, float scale, int32_t causal,
    cuflash_stream_t stream);

/** Decode in fp32 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_gqa_f32(
    const float* Q, const float* K, const float* V, float* O, float* L, const int32_t* seq_lens,
    int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k,
    int32_t head_dim, float scale, int32_t causal, int32_t num_splits, cuflash_stream_t stream);

/** Decode in fp16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_gqa_f16(
    const void* Q, const void* K, const void* V, void* O, float* L, const int32_t* seq_lens,
    int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k,
    int32_t head_dim, float scale, int32_t causal, int32_t num_splits, cuflash_stream_t stream);

/** Decode in bf16 with grouped heads; see above. */
CUFLASH_API cuflash_status_t cuflash_attention_decode_gqa_bf16(
    const void* Q, const void* K, const void* V, void* O, float* L, const int32_t* seq_lens,
    int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k,
    int32_t head_dim, float scale, int32_t causal, int32_t num_splits, cuflash_stream_t stream);

/** @} */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* CUFLASH_H */
