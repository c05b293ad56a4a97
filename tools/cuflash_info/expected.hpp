// Attention as its definition says, in double precision: what the self-test compares with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuflash_info {

using Values = std::vector<double>;

// Dense tensors: q and o [batch, heads_q, len_q, head_dim], k and v [batch, heads_kv, len_k, head_dim].
struct Shape {
  int64_t batch, heads_q, heads_kv, len_q, len_k, head_dim;
  bool causal;  // bottom-right

  size_t queries() const { return static_cast<size_t>(batch * heads_q * len_q); }
  size_t keys() const { return static_cast<size_t>(batch * heads_kv * len_k); }
  size_t channels() const { return static_cast<size_t>(head_dim); }
};

struct Inputs {
  Values q, k, v, d_o;
};

struct Outputs {
  Values o, lse;
};

struct Gradients {
  Values dq, dk, dv;
};

// lengths: the keys of each batch entry, the first of its len_k.
Outputs expected_forward(const Shape& shape, const Inputs& in, const std::vector<int32_t>& lengths);

// For batch entries that have all len_k keys.
Gradients expected_backward(const Shape& shape, const Inputs& in);

}  // namespace cuflash_info
