// What attention is, computed plainly: the fp64 oracle that every result is judged by, and the plain
// same-precision algorithm that says how large an error the precision itself makes. Both see the mask as a
// predicate on (row, key), written from the public header; no code of the library is used.
#pragma once

#include <array>
#include <optional>
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
  int64_t head_dim_v = 0;  // 0: head_dim

  int64_t dim_v() const { return head_dim_v == 0 ? head_dim : head_dim_v; }
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

// An additive bias [batch, query head, row, key]; it repeats along what it is not `per`.
struct BiasSpec {
  bool per_batch = true, per_head = true, per_row = true;
  Dtype dtype = Dtype::kF32;
};

struct SlopesSpec {
  bool per_batch = false;
  Dtype dtype = Dtype::kF32;
};

// Which of the last keys of its sequence a row sees, those before them aside.
struct TreeSpec {
  int64_t bits = 0;            // of each row, one for each of these keys
  bool per_batch = true;       // or the same for all sequences
  std::vector<uint8_t> shown;  // [batch or 1, len_q, bits]
};

struct DropoutSpec {
  float p = 0;
  uint64_t seed = 0, offset = 0;

  // The words of Philox4x32-10 for a block of four keys.
  std::array<uint32_t, 4> words(int64_t head_of_batch, int64_t row, int64_t key) const;
  bool drops(int64_t head_of_batch, int64_t row, int64_t key) const;
};

// One attention problem, without devices and layouts. Rows and keys of a sequence count from its first one: rows of the
// tensors past them belong to no sequence, and results there are 0.
struct Problem {
  Operation operation = Operation::kForward;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  MaskSpec mask;
  bool scale_set = false;
  float scale = 0;                 // where scale_set
  std::vector<int32_t> lengths;    // slots of keys in use of each batch entry; empty: len_k
  std::vector<int32_t> left_pad;   // of them before the first key; empty: none
  std::vector<int32_t> lengths_q;  // rows of each batch entry; empty: len_q
  float softcap = 0;
  std::optional<BiasSpec> bias;
  std::optional<SlopesSpec> slopes;
  std::optional<Dtype> sinks;
  DropoutSpec dropout;
  std::optional<TreeSpec> tree;
  bool wide = false;  // O and dQ, dK, dV in fp32
  bool d_lse = false;

  Dtype output_dtype() const { return wide ? Dtype::kF32 : dtype; }
  int64_t pad_of(int64_t b) const;
  int64_t keys_of(int64_t b) const;
  int64_t rows_of(int64_t b) const;
  int64_t centre(int64_t b, int64_t row) const;
  bool sees(int64_t b, int64_t row, int64_t key) const;
};

struct Inputs {
  Tensor q, k, v;
  Tensor d_o, o, lse;  // backward only
  Tensor bias{}, slopes{},
      sinks{};  // where the problem has them; slopes and sinks as [batch, head, 1, 1]
  Tensor d_lse{};
  Tensor delta{};           // where it is given
  Tensor dq{}, dk{}, dv{};  // where gradients are added to what is there
};

struct Results {
  Tensor o, lse;      // forward and decode; lse has one channel
  Tensor dq, dk, dv;  // backward
  Tensor d_bias{}, d_sinks{}, delta{};
};

// For kBackward both return O and LSE too. The oracle differentiates exactly and does not read inputs.o and
// inputs.lse; the plain algorithm takes delta and P from its own rounded O and fp32 LSE.
Results oracle(const Problem& problem, const Inputs& inputs);
// `variation` other than 0: an equally plain evaluation with other rounding errors. Sums run in other orders, products of
// rows with fused multiply-adds or without or, of 16-bit types, as tensor cores sum them, and P and dS are rounded at another
// scale between 1 and 2, where they are not below the normal numbers of f16; decode may merge up to 64 parts of the keys by
// their fp32 LSEs.
Results plain(const Problem& problem, const Inputs& inputs, uint64_t variation = 0);
// Variations of f16 that round P and dS below the normal numbers too. There an error is a large part of the value, and one
// evaluation of a block with one such value tells as little about it as any single number does.
Results plain_with_underflow(const Problem& problem, const Inputs& inputs, uint64_t variation);
// Variations in which about half of the sums keep the order of memory, as most loops do. Its partial sums may go much further
// than those of almost every other order.
Results plain_in_natural_orders(const Problem& problem, const Inputs& inputs, uint64_t variation);
// The same for kBackward with delta and P from inputs.o and inputs.lse, whose rounding errors are the forward pass's.
Results plain_from_given_forward(const Problem& problem, const Inputs& inputs, uint64_t variation);

// Merge of parts over disjoint keys in fp64: o and lse of all.
Results merge_oracle(const std::vector<Results>& parts, bool base2);

}  // namespace cuflash_test
