// The one normalised description of a call, whatever its entry point. Everything here has been checked:
// extents are legal, strides resolved, defaults filled in. Plain data, passed to kernels by value.
#pragma once

#include <cstdint>

#include "common/tensor_view.hpp"

namespace cuflash {

enum class Operation : int32_t {
  kForward = 1,
  kBackward = 2,
  kDecode = 3,
  kAppend = 4,
  kMerge = 5
};

enum class Align : int32_t { kBottomRight = 0, kTopLeft = 1, kOffset = 2, kDeviceOffsets = 3 };

// Row i of a sequence sees the keys [c - left, c + right] with centre c, cut to its length.
struct Mask {
  static constexpr int64_t kUnlimited = int64_t{1} << 40;  // beyond any length and offset

  Align align = Align::kBottomRight;
  int64_t offset = 0;                // for kOffset
  const int32_t* offsets = nullptr;  // device [batch], for kDeviceOffsets
  int64_t left = kUnlimited, right = kUnlimited;

  CUFLASH_HOST_DEVICE bool is_full() const { return left == kUnlimited && right == kUnlimited; }
};

struct Features;       // core/features.hpp
struct AppendProblem;  // core/append.hpp

struct Problem {
  static constexpr int64_t kInvariantPart = 1024;

  Operation operation = Operation::kForward;
  Dtype dtype = Dtype::kF32;  // of q, k, v, o and their gradients (fp32 outputs are a feature)
  int64_t batch = 0, heads_q = 0, heads_kv = 0;
  int64_t len_q = 0, len_k = 0;          // decode: len_k is the cache's max_len
  int64_t head_dim = 0, head_dim_v = 0;  // different ones are a feature
  TensorView q, k, v, o;
  RowStatsView lse;
  Mask mask;
  float scale = 0;
  const int32_t* lengths_k = nullptr;  // device [batch], null: len_k; beside decode a feature
  TensorView d_o, dq, dk, dv;          // backward
  int32_t num_splits = 0;              // decode, 0: choose
  bool deterministic = false, batch_invariant = false;
  bool workspace_prepared = false;  // what must be 0 at first is 0, and is left so
  // Every pointer and stride of q, k, v and o (and of the gradients) is a multiple of 16 bytes.
  bool aligned16 = false;
  // Of the host, so not for kernels; null: none. A family that reads nothing of it must refuse a problem with features.
  const Features* features = nullptr;
  // All that there is to append, which has of this only the dtype and the extents. Of the host too.
  const AppendProblem* append = nullptr;

  CUFLASH_HOST_DEVICE int64_t head_kv(int64_t head_q) const {
    return head_q / (heads_q / heads_kv);
  }
  // The fewest keys in a part of decode, but for a sequence's last. Batch-invariant parts that the library chooses have this
  // many whatever the number of parts is: where they begin follows from the sequence alone.
  CUFLASH_HOST_DEVICE int64_t least_part() const {
    return batch_invariant && num_splits == 0 ? kInvariantPart : 1;
  }
  // The number of valid keys of a sequence; may read device memory.
  CUFLASH_HOST_DEVICE int64_t keys_of(int64_t b) const {
    if (lengths_k == nullptr) return len_k;
    const int64_t n = lengths_k[b];
    return n < 0 ? 0 : (n > len_k ? len_k : n);
  }
};

// Merge has its own: there is no q.
struct MergeProblem {
  int64_t num_parts = 0, batch = 0, heads = 0, len = 0, head_dim = 0;
  TensorView parts;
  int64_t part_stride = 0;
  RowStatsView lse_parts;
  int64_t lse_part_stride = 0;
  TensorView o;
  RowStatsView lse;
  bool base2 = false;
};

}  // namespace cuflash
