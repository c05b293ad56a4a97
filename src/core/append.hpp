// New tokens for a cache: what an append has beside the dtype and the extents of Problem. Plain data, passed to kernels by
// value.
#pragma once

#include "core/features.hpp"

namespace cuflash {

// Rotary embedding of the first `dim` channels of a row, by the angle of its token's position.
struct Rotary {
  const float* cos = nullptr;  // device [max_position, dim / 2]
  const float* sin = nullptr;
  int64_t max_position = 0;
  int32_t dim = 0;           // even; 0: none
  bool interleaved = false;  // pairs (2i, 2i + 1), not (i, i + dim / 2)

  CUFLASH_HOST_DEVICE bool reaches(int64_t position) const {
    return dim == 0 || (position >= 0 && position < max_position);
  }
};

struct AppendProblem {
  int64_t batch = 0, len = 0;            // `len` new tokens of each sequence
  int64_t heads_q = 0, heads_kv = 0;     // heads_q 0: no queries
  int64_t head_dim = 0, head_dim_v = 0;  // head_dim_v 0: no values
  TensorView q, k, v, q_out;             // [batch, head, token, channel]; q_out may be q
  TensorView cache_k, cache_v;           // [entry or page, head, slot, channel]
  // Where tokens go: to slots of the whole cache, or by their positions to those of their sequences.
  const int64_t* slot_mapping = nullptr;  // device [batch, len]; null: by position
  const int32_t* positions = nullptr;     // device [batch, len]; null: after `lengths`
  const int32_t* lengths = nullptr;       // device [batch]
  Paging paging;
  CacheFormat format;
  int64_t max_len = 0;                   // slots of a sequence
  int64_t entries = 0, entry_slots = 0;  // entries or pages that there are, and the slots of each
  Rotary rotary;
  const void* q_norm = nullptr;  // device [head_dim], weights of an RMS norm; null: none
  const void* k_norm = nullptr;
  float epsilon = 0;

  CUFLASH_HOST_DEVICE int64_t heads() const {
    return heads_q + (head_dim_v > 0 ? 2 : 1) * heads_kv;
  }
  CUFLASH_HOST_DEVICE int64_t rows() const { return batch * len * heads(); }
};

}  // namespace cuflash
