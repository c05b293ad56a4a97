// What attention is, computed plainly: the fp64 oracle that every result is judged by, and the plain
// same-precision algorithm that says how large an error the precision itself makes. Both see the mask as a
// predicate on (row, key), written from the public header; no code of the library is used.
#pragma once

#include <vector>

#include "support/dtype.hpp"
#include "support/tensor.hpp"

namespace cuflash_test {

enum class Operation : int32_t {
  kForward = CUFLASH_OPERATION_FORWARD,
  kBackward = CUFLASH_OPERATION_BACKWARD,
  kDecode = CUFLASH_OPERATION_DECODE,
};
const char* name_of(Operation operation);

struct Shape {
  int64_t batch = 1, heads_q = 1, heads_kv = 1, len_q = 1, len_k = 1, head_dim = 64;
};

struct MaskSpec {
  bool causal = false;
  int32_t align = CUFLASH_ALIGN_BOTTOM_RIGHT;
  int64_t offset = 0;
  std::vector<int32_t> offsets;  // of each batch entry
  bool window = false;
  int64_t left = -1, right = -1;
};
MaskSpec causal_mask(int32_t align = CUFLASH_ALIGN_BOTTOM_RIGHT);
MaskSpec window_mask(int64_t left, int64_t right);

// One attention problem, without devices and layouts.
struct Problem {
  Operation operation = Operation::kForward;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  MaskSpec mask;
  bool scale_set = false;
  float scale = 0;               // where scale_set
  std::vector<int32_t> lengths;  // decode: valid keys of each batch entry; empty: len_k

  int64_t keys_of(int64_t b) const;
  bool sees(int64_t b, int64_t row, int64_t key) const;
};

struct Inputs {
  Tensor q, k, v;
  Tensor d_o, o, lse;  // backward only
};

struct Results {
  Tensor o, lse;      // forward and decode; lse has one channel
  Tensor dq, dk, dv;  // backward
};

// For kBackward both return O and LSE too. The oracle differentiates exactly and does not read inputs.o and
// inputs.lse; the plain algorithm takes delta and P from its own rounded O and fp32 LSE.
Results oracle(const Problem& problem, const Inputs& inputs);
// `variation` other than 0: an equally plain evaluation with other rounding errors. Sums run in other orders, and P and
// dS are rounded at another scale between 1 and 2.
Results plain(const Problem& problem, const Inputs& inputs, uint64_t variation = 0);

// Merge of parts over disjoint keys in fp64: o and lse of all.
Results merge_oracle(const std::vector<Results>& parts, bool base2);

}  // namespace cuflash_test
