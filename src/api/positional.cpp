// The positional functions: their own checks in their own order, then the struct calls.
#include "api/calls.hpp"
#include "api/entry.hpp"
#include "cuflash.h"

namespace cuflash {
namespace {

// Dense [B, H, S, D] operands; what a function does not have stays null.
struct Operands {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;
  const float* lse = nullptr;
  const void *d_o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  const int32_t* lengths = nullptr;
};

struct Shape {
  int32_t batch, heads_q, heads_kv, len_q, len_k, head_dim;
  float scale;
  int32_t causal;  // 0 none, 1 bottom-right, 2 top-left
  int32_t num_splits;
};

struct NamedDimension {
  const char* name;
  int32_t value;
};

cuflash_tensor_t dense(const void* data, int32_t dtype) {
  cuflash_tensor_t tensor = {};
  tensor.data = const_cast<void*>(data);
  tensor.flags = CUFLASH_TENSOR_DENSE;
  tensor.dtype = dtype;
  return tensor;
}

Status fill(const Operands& t, const Shape& shape, int32_t dtype, cuflash_problem_t* problem) {
  CUFLASH_CHECK(shape.causal >= 0 && shape.causal <= 2, CUFLASH_ERROR_INVALID_VALUE,
                "causal: %d; 0 (none), 1 (bottom-right) or 2 (top-left)", shape.causal);
  const NamedDimension extents[] = {{"batch_size", shape.batch},
                                    {"num_heads", shape.heads_q},
                                    {"num_heads_kv", shape.heads_kv},
                                    {"len_q", shape.len_q},
                                    {"len_k", shape.len_k}};
  for (const NamedDimension& e : extents)
    CUFLASH_CHECK(e.value >= 0, CUFLASH_ERROR_INVALID_DIMENSION, "%s: %d; not negative", e.name,
                  e.value);
  CUFLASH_CHECK(shape.heads_kv != 0 || shape.heads_q == 0, CUFLASH_ERROR_DIMENSION_MISMATCH,
                "num_heads_kv: 0, but num_heads is %d", shape.heads_q);
  *problem = {};
  problem->struct_size = sizeof *problem;
  problem->flags = CUFLASH_PROBLEM_SCALE_SET;
  problem->scale = shape.scale;
  problem->batch = shape.batch;
  problem->heads_q = shape.heads_q, problem->heads_kv = shape.heads_kv;
  problem->len_q = shape.len_q, problem->len_k = shape.len_k;
  problem->head_dim = shape.head_dim;
  problem->mask = shape.causal == 0 ? CUFLASH_MASK_NONE : CUFLASH_MASK_CAUSAL;
  problem->mask_align = shape.causal == 2 ? CUFLASH_ALIGN_TOP_LEFT : CUFLASH_ALIGN_BOTTOM_RIGHT;
  problem->q = dense(t.q, dtype);
  problem->k = dense(t.k, dtype);
  problem->v = dense(t.v, dtype);
  problem->o = dense(t.o, dtype);
  problem->lse = const_cast<float*>(t.lse);
  return CUFLASH_SUCCESS;
}

Status forward(const Operands& t, const Shape& shape, int32_t dtype, cuflash_stream_t stream) {
  cuflash_problem_t problem;
  CUFLASH_TRY(fill(t, shape, dtype, &problem));
  return attention_forward(nullptr, &problem, stream);
}

Status backward(const Operands& t, const Shape& shape, int32_t dtype, cuflash_stream_t stream) {
  cuflash_problem_t problem;
  CUFLASH_TRY(fill(t, shape, dtype, &problem));
  cuflash_gradients_t gradients = {};
  gradients.struct_size = sizeof gradients;
  gradients.d_o = dense(t.d_o, dtype);
  gradients.dq = dense(t.dq, dtype);
  gradients.dk = dense(t.dk, dtype);
  gradients.dv = dense(t.dv, dtype);
  return attention_backward(nullptr, &problem, &gradients, stream);
}

Status decode(const Operands& t, const Shape& shape, int32_t dtype, cuflash_stream_t stream) {
  cuflash_problem_t problem;
  CUFLASH_TRY(fill(t, shape, dtype, &problem));
  cuflash_kv_cache_t cache = {};
  cache.struct_size = sizeof cache;
  cache.k = problem.k, cache.v = problem.v;
  cache.max_len = shape.len_k;
  cache.lengths = t.lengths;
  problem.k = problem.v = {};
  problem.len_k = 0;
  problem.num_splits = shape.num_splits;
  return attention_decode(nullptr, &problem, &cache, stream);
}

// The checks of releases up to 0.6, in their order.
struct NamedPointer {
  const char* name;
  const void* pointer;
};
template <size_t kPointers>
Status check_older(const NamedPointer (&pointers)[kPointers], const Shape& shape) {
  for (const NamedPointer& p : pointers)
    CUFLASH_CHECK(p.pointer != nullptr, CUFLASH_ERROR_NULL_POINTER, "%s: is NULL", p.name);
  const NamedDimension dimensions[] = {{"batch_size", shape.batch},
                                       {"num_heads", shape.heads_q},
                                       {"seq_len", shape.len_k},
                                       {"head_dim", shape.head_dim}};
  for (const NamedDimension& d : dimensions)
    CUFLASH_CHECK(d.value > 0, CUFLASH_ERROR_INVALID_DIMENSION, "%s: %d; must be positive", d.name,
                  d.value);
  CUFLASH_CHECK(shape.head_dim <= 256, CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM, "head_dim: %d; 1 to 256",
                shape.head_dim);
  return check_scale("scale", shape.scale);
}

// It was a bool: older callers set the low byte of the register only.
int32_t older_causal(int32_t causal) { return (causal & 0xff) != 0 ? 1 : 0; }

Status older_forward(const char* function, const Operands& t, const Shape& shape, int32_t dtype,
                     cuflash_stream_t stream) {
  return entry(function, [&]() -> Status {
    CUFLASH_TRY(check_older({{"Q", t.q}, {"K", t.k}, {"V", t.v}, {"O", t.o}, {"L", t.lse}}, shape));
    return forward(t, shape, dtype, stream);
  });
}

Status older_backward(const char* function, const Operands& t, const Shape& shape, int32_t dtype,
                      cuflash_stream_t stream) {
  return entry(function, [&]() -> Status {
    CUFLASH_TRY(check_older({{"dO", t.d_o},
                             {"dQ", t.dq},
                             {"dK", t.dk},
                             {"dV", t.dv},
                             {"Q", t.q},
                             {"K", t.k},
                             {"V", t.v},
                             {"O", t.o},
                             {"L", t.lse}},
                            shape));
    return backward(t, shape, dtype, stream);
  });
}

Status older_decode(const char* function, const Operands& t, const Shape& shape, int32_t dtype,
                    cuflash_stream_t stream) {
  return entry(function, [&]() -> Status {
    CUFLASH_TRY(check_older({{"Q", t.q}, {"K", t.k}, {"V", t.v}, {"O", t.o}, {"L", t.lse}}, shape));
    return decode(t, shape, dtype, stream);
  });
}

}  // namespace
}  // namespace cuflash

using namespace cuflash;

// How many parts an older caller wants: any number was taken.
static int32_t older_chunks(int32_t num_chunks) {
  return num_chunks < 0 ? 0 : (num_chunks > 1024 ? 1024 : num_chunks);
}

// One definition of each function, for the three element types.
#define CUFLASH_POSITIONAL(suffix, T, dtype)                                                      \
  cuflash_status_t cuflash_attention_forward_##suffix(                                            \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t seq_len, int32_t head_dim, float scale, int32_t causal, cuflash_stream_t stream) {  \
    return older_forward(__func__, {Q, K, V, O, L},                                               \
                         {batch_size, num_heads, num_heads, seq_len, seq_len, head_dim, scale,    \
                          older_causal(causal), 0},                                               \
                         dtype, stream);                                                          \
  }                                                                                               \
  cuflash_status_t cuflash_attention_backward_##suffix(                                           \
      const T* Q, const T* K, const T* V, const T* O, const float* L, const T* dO, T* dQ, T* dK,  \
      T* dV, int32_t batch_size, int32_t num_heads, int32_t seq_len, int32_t head_dim,            \
      float scale, int32_t causal, cuflash_stream_t stream) {                                     \
    return older_backward(__func__, {Q, K, V, O, L, dO, dQ, dK, dV},                              \
                          {batch_size, num_heads, num_heads, seq_len, seq_len, head_dim, scale,   \
                           older_causal(causal), 0},                                              \
                          dtype, stream);                                                         \
  }                                                                                               \
  cuflash_status_t cuflash_attention_decode_##suffix(                                             \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t seq_len, int32_t head_dim, float scale, int32_t num_chunks,                         \
      cuflash_stream_t stream) {                                                                  \
    return older_decode(__func__, {Q, K, V, O, L},                                                \
                        {batch_size, num_heads, num_heads, 1, seq_len, head_dim, scale, 0,        \
                         older_chunks(num_chunks)},                                               \
                        dtype, stream);                                                           \
  }                                                                                               \
  cuflash_status_t cuflash_attention_forward_gqa_##suffix(                                        \
      const T* Q, const T* K, const T* V, T* O, float* L, int32_t batch_size, int32_t num_heads,  \
      int32_t num_heads_kv, int32_t len_q, int32_t len_k, int32_t head_dim, float scale,          \
      int32_t causal, cuflash_stream_t stream) {                                                  \
    return entry(__func__, [&] {                                                                  \
      return forward(                                                                             \
          {Q, K, V, O, L},                                                                        \
          {batch_size, num_heads, num_heads_kv, len_q, len_k, head_dim, scale, causal, 0}, dtype, \
          stream);                                                                                \
    });                                                                                           \
  }                                                                                               \
  cuflash_status_t cuflash_attention_backward_gqa_##suffix(                                       \
      const T* Q, const T* K, const T* V, const T* O, const float* L, const T* dO, T* dQ, T* dK,  \
      T* dV, int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q,          \
      int32_t len_k, int32_t head_dim, float scale, int32_t causal, cuflash_stream_t stream) {    \
    return entry(__func__, [&] {                                                                  \
      return backward(                                                                            \
          {Q, K, V, O, L, dO, dQ, dK, dV},                                                        \
          {batch_size, num_heads, num_heads_kv, len_q, len_k, head_dim, scale, causal, 0}, dtype, \
          stream);                                                                                \
    });                                                                                           \
  }                                                                                               \
  cuflash_status_t cuflash_attention_decode_gqa_##suffix(                                         \
      const T* Q, const T* K, const T* V, T* O, float* L, const int32_t* seq_lens,                \
      int32_t batch_size, int32_t num_heads, int32_t num_heads_kv, int32_t len_q, int32_t len_k,  \
      int32_t head_dim, float scale, int32_t causal, int32_t num_splits,                          \
      cuflash_stream_t stream) {                                                                  \
    return entry(__func__, [&] {                                                                  \
      return decode({Q, K, V, O, L, nullptr, nullptr, nullptr, nullptr, seq_lens},                \
                    {batch_size, num_heads, num_heads_kv, len_q, len_k, head_dim, scale, causal,  \
                     num_splits},                                                                 \
                    dtype, stream);                                                               \
    });                                                                                           \
  }

extern "C" {
CUFLASH_POSITIONAL(f32, float, CUFLASH_F32)
CUFLASH_POSITIONAL(f16, void, CUFLASH_F16)
CUFLASH_POSITIONAL(bf16, void, CUFLASH_BF16)
}
