// What a call may ask for beyond Problem. It lies beside it: kernels that have none of this do not carry it in their
// parameters. Plain data; each part is what one header of src/attention works from.
#pragma once

#include "common/element.hpp"
#include "common/quantised.hpp"
#include "core/problem.hpp"

namespace cuflash {

// What a family may lack. A refusal names the first that it lacks.
enum Feature : uint32_t {
  kRaggedBatches = 1 << 0,
  kSoftcap = 1 << 1,
  kAlibi = 1 << 2,
  kBias = 1 << 3,
  kSinks = 1 << 4,
  kDropout = 1 << 5,
  kOwnValueDim = 1 << 6,  // head_dim_v is not head_dim
  kWideOutputs = 1 << 7,  // fp32 outputs of a 16-bit problem
  kAccumulation = 1 << 8,
  kDelta = 1 << 9,  // given, or wanted
  kLseGradient = 1 << 10,
  kPagedCache = 1 << 11,
  kCacheEntries = 1 << 12,    // sequences choose their entries of a contiguous cache
  kQuantisedCache = 1 << 13,  // elements of another dtype than the problem's, or with scales
  kTreeMask = 1 << 14,
};

// Sequences of lengths of their own. A packed tensor is [1, head, total, channel] and holds them one after the other; a
// padded one is [batch, head, length, channel]. Queries and keys are packed independently. The number of keys of a
// sequence is Problem::lengths_k. All pointers are of the device.
struct Ragged {
  const int32_t* offsets_q = nullptr;   // [batch + 1], packed: where each sequence begins
  const int32_t* offsets_k = nullptr;   // null: padded
  int64_t total_q = 0, total_k = 0;     // rows of the packed tensors
  const int32_t* lengths_q = nullptr;   // [batch], rows in use of each sequence; null: all
  const int32_t* left_pad_k = nullptr;  // [batch], slots before the first key of each sequence
};

// How the keys of decode lie in a cache, where not sequence b in its entry b. All pointers are of the device.
struct Paging {
  // Pages: slot s of a sequence is slot s % page_size of its page number s / page_size, k and v are [page, head, slot,
  // channel]. The page's id is table[b * table_stride + number] or, with indptr, table[indptr[b] + number].
  const void* table = nullptr;  // int32 or int64; null: contiguous
  const int32_t* indptr = nullptr;
  int64_t table_stride = 0, page_size = 0;
  bool wide_ids = false;
  // Contiguous: [batch], the entry of each sequence; null: b.
  const int32_t* entries = nullptr;
  int64_t num_pages = 0;  // pages or entries that there are
};

// What the elements of a cache are kept as. Scales and zero points lie by these strides: [page or entry, head, slot,
// group of channels].
struct CacheFormat {
  struct Side {
    StoredDtype dtype = StoredDtype::kF32;
    Elements scale, zero;  // data null: 1 and 0
  };
  Side k, v;
  int64_t page_stride = 0, head_stride = 0, slot_stride = 0;
  int32_t group = 0;  // channels that share a scale; 0: all
};

// Bits of the last `len` keys of each sequence: [batch, row, 32 keys].
struct TreeMask {
  const uint32_t* words = nullptr;  // device; null: none
  int64_t batch_stride = 0, row_stride = 0, len = 0;
};

// From the scaled product to the score, before the mask.
struct ScoreModifiers {
  float softcap = 0;  // 0: none
  TensorView bias;    // [batch, query head, row, key]; data null: none
  Elements slopes;    // ALiBi, [query head] or [batch, query head]; data null: none
  int64_t slopes_batch_stride = 0;
};

struct Dropout {
  float p = 0;
  uint64_t seed = 0, offset = 0;
  const uint64_t* seed_pointer = nullptr;  // device; instead of the value
  const uint64_t* offset_pointer = nullptr;
};

struct Features {
  uint32_t used = 0;  // bits of Feature
  Ragged ragged;
  Paging paging;
  CacheFormat format;  // with kQuantisedCache
  TreeMask tree;
  ScoreModifiers score;
  Elements sinks;  // [query head]; data null: none
  Dropout dropout;
  bool accumulate_o = false;  // fold into a running (O, LSE)

  // Backward.
  bool accumulate_gradients = false;  // add into dQ, dK and dV
  RowStatsView d_lse;                 // data null: zero
  RowStatsView delta;                 // of the caller; data null: none
  bool delta_given = false;           // delta is read, not written, and O is not read
  TensorView d_bias;                  // strides of 0 sum; data null: not wanted
  Elements d_sinks;                   // data null: not wanted
};

// Where the probabilities of chosen rows go: [batch, query head, number of the row, key].
struct WeightsOutput {
  RowStatsView rows;  // the first key of each
  const int32_t* chosen =
      nullptr;  // device [num_rows], rows of the sequences; null: the first num_rows
  int64_t num_rows = 0;
};

// A problem with its features in one value, for the kernels that take them.
struct FullProblem : Problem {
  Features f;

  explicit FullProblem(const Problem& p)
      : Problem(p), f(p.features != nullptr ? *p.features : Features{}) {
    features = nullptr;
  }
};

// Rows as the tensors have them: packed ones have a single batch entry.
struct RowExtents {
  int64_t batch, heads, rows;
  CUFLASH_HOST_DEVICE int64_t count() const { return batch * heads * rows; }
};
CUFLASH_HOST_DEVICE RowExtents query_extents(const Problem& p, const Ragged& ragged) {
  return ragged.offsets_q != nullptr ? RowExtents{1, p.heads_q, ragged.total_q}
                                     : RowExtents{p.batch, p.heads_q, p.len_q};
}
CUFLASH_HOST_DEVICE RowExtents key_extents(const Problem& p, const Ragged& ragged) {
  return ragged.offsets_k != nullptr ? RowExtents{1, p.heads_kv, ragged.total_k}
                                     : RowExtents{p.batch, p.heads_kv, p.len_k};
}
inline RowExtents query_extents(const Problem& p) {
  return query_extents(p, p.features != nullptr ? p.features->ragged : Ragged{});
}
inline RowExtents key_extents(const Problem& p) {
  return key_extents(p, p.features != nullptr ? p.features->ragged : Ragged{});
}

}  // namespace cuflash
