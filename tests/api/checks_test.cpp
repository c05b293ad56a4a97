// Argument checks of the struct calls: each bad field gives its status, a message that names it, and no write.
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>

#include "api/problem.hpp"

namespace cuflash_test {
namespace {

struct BadField {
  const char* name;  // in the message
  cuflash_status_t status;
  std::function<void(SmallProblem&)> spoil;
};

void expect_forward_and_backward(const std::vector<BadField>& rows) {
  for (const BadField& row : rows) {
    SCOPED_TRACE(row.name);
    SmallProblem forward, backward;
    row.spoil(forward);
    EXPECT_EQ(forward.forward(), row.status) << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(forward.nothing_written());
    row.spoil(backward);
    EXPECT_EQ(backward.backward(), row.status) << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(backward.nothing_written());
  }
}

TEST(Checks, TheProblemItselfIsLegal) {
  SmallProblem p;
  EXPECT_EQ(p.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_EQ(p.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_EQ(p.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_STREQ(cuflash_last_error(), "");
}

TEST(Checks, Extents) {
  constexpr auto kDimension = CUFLASH_ERROR_INVALID_DIMENSION;
  expect_forward_and_backward({
      {"batch", kDimension, [](SmallProblem& s) { s.problem.batch = -1; }},
      {"heads_q", kDimension, [](SmallProblem& s) { s.problem.heads_q = -1; }},
      {"heads_kv", kDimension, [](SmallProblem& s) { s.problem.heads_kv = -1; }},
      {"len_q", kDimension, [](SmallProblem& s) { s.problem.len_q = -1; }},
      {"len_k", kDimension, [](SmallProblem& s) { s.problem.len_k = -1; }},
      {"batch", kDimension, [](SmallProblem& s) { s.problem.batch = int64_t{1} << 31; }},
      {"len_k", kDimension, [](SmallProblem& s) { s.problem.len_k = INT64_MAX; }},
      {"len_q", kDimension,
       [](SmallProblem& s) {
         s.problem.batch = s.problem.heads_q = s.problem.len_q = 0x7fffffff, s.problem.heads_kv = 0;
       }},
      {"heads_kv", CUFLASH_ERROR_DIMENSION_MISMATCH,
       [](SmallProblem& s) { s.problem.heads_kv = 3; }},
      {"heads_kv", CUFLASH_ERROR_DIMENSION_MISMATCH,
       [](SmallProblem& s) { s.problem.heads_kv = 8; }},
      {"head_dim", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallProblem& s) { s.problem.head_dim = 0; }},
      {"head_dim", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallProblem& s) { s.problem.head_dim = 577; }},
      {"head_dim_v", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallProblem& s) { s.problem.head_dim_v = 577; }},
      {"head_dim_v", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallProblem& s) { s.problem.head_dim_v = -1; }},
      {"head_dim", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallProblem& s) { s.problem.head_dim = -8; }},
  });
}

TEST(Checks, TheBackwardPassTakesSmallerHeadDims) {
  for (int64_t cuflash_problem_t::*dim :
       {&cuflash_problem_t::head_dim, &cuflash_problem_t::head_dim_v}) {
    SmallProblem s;
    s.problem.*dim = 257;
    EXPECT_EQ(s.backward(), CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
    EXPECT_TRUE(message_names("256"));
    EXPECT_TRUE(s.nothing_written());
  }
}

TEST(Checks, Scale) {
  for (const float scale :
       {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    expect_forward_and_backward({{"scale", CUFLASH_ERROR_INVALID_DIMENSION, [&](SmallProblem& s) {
                                    s.problem.flags = CUFLASH_PROBLEM_SCALE_SET;
                                    s.problem.scale = scale;
                                  }}});
  expect_forward_and_backward({{"scale", CUFLASH_ERROR_INVALID_VALUE, [](SmallProblem& s) {
                                  s.problem.scale = 0.5f;  // without the flag
                                }}});
  SmallProblem zero;
  zero.problem.flags = CUFLASH_PROBLEM_SCALE_SET;
  EXPECT_EQ(zero.forward(), CUFLASH_SUCCESS);
  EXPECT_NEAR(zero.lse[0], std::log(5.0f), 1e-6);  // 0 means 0: every key alike
}

TEST(Checks, Pointers) {
  constexpr auto kNull = CUFLASH_ERROR_NULL_POINTER;
  expect_forward_and_backward({
      {"problem.q", kNull, [](SmallProblem& s) { s.problem.q.data = nullptr; }},
      {"problem.k", kNull, [](SmallProblem& s) { s.problem.k.data = nullptr; }},
      {"problem.v", kNull, [](SmallProblem& s) { s.problem.v.data = nullptr; }},
      {"problem.o", kNull, [](SmallProblem& s) { s.problem.o.data = nullptr; }},
  });
  const std::pair<const char*, cuflash_tensor_t cuflash_gradients_t::*> tensors[] = {
      {"d_o", &cuflash_gradients_t::d_o},
      {"dq", &cuflash_gradients_t::dq},
      {"dk", &cuflash_gradients_t::dk},
      {"dv", &cuflash_gradients_t::dv}};
  for (const auto& [name, member] : tensors) {
    SmallProblem s;
    (s.gradients.*member).data = nullptr;
    EXPECT_EQ(s.backward(), kNull);
    EXPECT_TRUE(message_names(name));
    EXPECT_TRUE(s.nothing_written());
  }
  SmallProblem s;
  s.problem.lse = nullptr;  // optional in forward, needed by backward
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  EXPECT_EQ(s.backward(), kNull);
  EXPECT_TRUE(message_names("lse"));
  const cuflash_handle_t cpu = handle_of(Device::kCpu);
  EXPECT_EQ(cuflash_attention_forward(cpu, nullptr, nullptr), kNull);
  EXPECT_EQ(cuflash_attention_backward(cpu, nullptr, &s.gradients, nullptr), kNull);
  EXPECT_EQ(cuflash_attention_backward(cpu, &s.problem, nullptr, nullptr), kNull);
  EXPECT_EQ(cuflash_attention_decode(cpu, &s.decode_problem, nullptr, nullptr), kNull);
  EXPECT_EQ(cuflash_attention_decode(cpu, nullptr, &s.cache, nullptr), kNull);
  EXPECT_EQ(cuflash_merge_states(cpu, nullptr, nullptr), kNull);
}

TEST(Checks, PointersThatNobodyOwns) {
  SmallProblem s;
  s.problem.k.data = reinterpret_cast<void*>(uintptr_t{64});
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_TRUE(message_names("problem.k"));
  EXPECT_TRUE(s.nothing_written());
}

TEST(Checks, Alignment) {
  const auto shift = [](void*& pointer, int bytes) {
    pointer = static_cast<char*>(pointer) + bytes;
  };
  constexpr auto kMisaligned = CUFLASH_ERROR_MISALIGNED;
  expect_forward_and_backward({
      {"problem.q", kMisaligned, [&](SmallProblem& s) { shift(s.problem.q.data, 1); }},
      {"problem.k", kMisaligned, [&](SmallProblem& s) { shift(s.problem.k.data, 2); }},
      {"problem.o", kMisaligned, [&](SmallProblem& s) { shift(s.problem.o.data, 3); }},
      {"lse", kMisaligned,
       [](SmallProblem& s) {
         s.problem.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(s.problem.lse) + 2);
       }},
      {"workspace", kMisaligned,
       [](SmallProblem& s) {
         s.problem.workspace = reinterpret_cast<void*>(uintptr_t{1000});
         s.problem.workspace_size = 1000;
       }},
  });
  SmallProblem s;
  s.cache.lengths = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(s.lengths.data()) + 1);
  EXPECT_EQ(s.decode(), kMisaligned);
  EXPECT_TRUE(message_names("lengths"));
}

TEST(Checks, Dtypes) {
  constexpr auto kDtype = CUFLASH_ERROR_UNSUPPORTED_DTYPE;
  expect_forward_and_backward({
      {"problem.q", kDtype, [](SmallProblem& s) { s.problem.q.dtype = 0; }},
      {"problem.q", kDtype, [](SmallProblem& s) { s.problem.q.dtype = CUFLASH_FP8_E4M3; }},
      {"problem.q", kDtype, [](SmallProblem& s) { s.problem.q.dtype = 99; }},
      {"problem.q", kDtype, [](SmallProblem& s) { s.problem.q.dtype = -1; }},
      {"problem.k", kDtype, [](SmallProblem& s) { s.problem.k.dtype = CUFLASH_F16; }},
      {"problem.v", kDtype, [](SmallProblem& s) { s.problem.v.dtype = CUFLASH_BF16; }},
      {"problem.o", kDtype, [](SmallProblem& s) { s.problem.o.dtype = CUFLASH_F16; }},
  });
  SmallProblem s;
  s.problem.k.dtype = s.problem.v.dtype = s.problem.o.dtype = 0;  // as q
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  s.gradients.dq.dtype = CUFLASH_F16;
  EXPECT_EQ(s.backward(), kDtype);
  EXPECT_TRUE(message_names("dq"));
}

TEST(Checks, Strides) {
  const auto by_strides = [](cuflash_tensor_t& t, int64_t rows) {
    t.flags = 0;
    t.batch_stride = 4 * rows * 8;
    t.head_stride = rows * 8;
    t.row_stride = 8;
  };
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  expect_forward_and_backward({
      {"problem.q.row_stride", kValue,
       [&](SmallProblem& s) {
         by_strides(s.problem.q, 3);
         s.problem.q.row_stride = -8;
       }},
      {"problem.k.head_stride", kValue,
       [&](SmallProblem& s) {
         by_strides(s.problem.k, 5);
         s.problem.k.head_stride = -1;
       }},
      {"problem.v.batch_stride", kValue,
       [&](SmallProblem& s) {
         by_strides(s.problem.v, 5);
         s.problem.v.batch_stride = INT64_MAX;
       }},
      {"problem.q.flags", CUFLASH_ERROR_UNSUPPORTED,
       [](SmallProblem& s) { s.problem.q.flags |= 2; }},
      {"problem.q.reserved", CUFLASH_ERROR_UNSUPPORTED,
       [](SmallProblem& s) { s.problem.q.reserved[1] = 1; }},
  });
  // An output cannot repeat, and its rows cannot overlap.
  SmallProblem s;
  by_strides(s.problem.o, 3);
  s.problem.o.head_stride = 0;
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_ALIASING);
  EXPECT_TRUE(message_names("problem.o"));
  by_strides(s.problem.o, 3);
  s.problem.o.row_stride = 4;
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_ALIASING);
  by_strides(s.problem.o, 3);
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  s.problem.lse_row_stride = s.problem.lse_batch_stride = 12;  // head_stride 0, extent 4
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_ALIASING);
  EXPECT_TRUE(message_names("lse"));
}

TEST(Checks, Masks) {
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  const auto window = [](SmallProblem& s, int64_t left, int64_t right) {
    s.problem.flags = CUFLASH_PROBLEM_WINDOW;
    s.problem.window_left = left;
    s.problem.window_right = right;
  };
  expect_forward_and_backward({
      {"problem.mask", kValue, [](SmallProblem& s) { s.problem.mask = 2; }},
      {"problem.mask", kValue, [](SmallProblem& s) { s.problem.mask = -1; }},
      {"mask_align", kValue, [](SmallProblem& s) { s.problem.mask_align = 4; }},
      {"mask_align", kValue, [](SmallProblem& s) { s.problem.mask_align = -1; }},
      {"mask_offset", kValue,
       [](SmallProblem& s) {
         s.problem.mask_align = CUFLASH_ALIGN_OFFSET;
         s.problem.mask_offset = int64_t{1} << 32;
       }},
      {"mask_offset", kValue, [](SmallProblem& s) { s.problem.mask_offset = 1; }},
      {"mask_offsets", kValue, [](SmallProblem& s) { s.problem.mask_offsets = s.offsets.data(); }},
      {"mask_offsets", CUFLASH_ERROR_NULL_POINTER,
       [](SmallProblem& s) {
         s.problem.mask = CUFLASH_MASK_CAUSAL;
         s.problem.mask_align = CUFLASH_ALIGN_DEVICE_OFFSETS;
       }},
      {"window_left", kValue, [&](SmallProblem& s) { window(s, -2, 0); }},
      {"window_right", kValue, [&](SmallProblem& s) { window(s, 0, -2); }},
      {"window_left", kValue, [](SmallProblem& s) { s.problem.window_left = 4; }},
  });
}

TEST(Checks, Flags) {
  // Legal as they are, legal with more, and the unknown.
  constexpr uint32_t kAlone = CUFLASH_PROBLEM_SCALE_SET | CUFLASH_PROBLEM_WINDOW |
                              CUFLASH_PROBLEM_DETERMINISTIC | CUFLASH_PROBLEM_BATCH_INVARIANT |
                              CUFLASH_PROBLEM_WORKSPACE_PREPARED | CUFLASH_PROBLEM_ACCUMULATE;
  for (int bit = 0; bit < 32; ++bit) {
    SmallProblem s;
    s.problem.flags = uint32_t{1} << bit;
    const cuflash_status_t expected =
        (s.problem.flags & kAlone) != 0                    ? CUFLASH_SUCCESS
        : s.problem.flags == CUFLASH_PROBLEM_LEFT_PADDED   ? CUFLASH_ERROR_NULL_POINTER
        : s.problem.flags == CUFLASH_PROBLEM_V_IS_K_PREFIX ? CUFLASH_ERROR_INVALID_VALUE
                                                           : CUFLASH_ERROR_UNSUPPORTED;
    EXPECT_EQ(s.forward(), expected) << bit << ": " << cuflash_last_error();
    EXPECT_EQ(s.nothing_written(), expected != CUFLASH_SUCCESS);
  }
  SmallProblem s;
  s.gradients.flags = 4;
  EXPECT_EQ(s.backward(), CUFLASH_ERROR_UNSUPPORTED);
  s.cache.flags = 1;
  EXPECT_EQ(s.decode(), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_TRUE(s.nothing_written());
}

TEST(Checks, RaggedBatches) {
  static const int32_t kOffsets[] = {0, 1, 3};
  constexpr auto kNull = CUFLASH_ERROR_NULL_POINTER;
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  const auto odd = [](const int32_t* pointer) {
    return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(pointer) + 1);
  };
  expect_forward_and_backward({
      {"cu_seqlens_q", kNull, [](SmallProblem& s) { s.problem.total_q = 1; }},
      {"cu_seqlens_k", kNull, [](SmallProblem& s) { s.problem.total_k = 1; }},
      {"total_q", CUFLASH_ERROR_INVALID_DIMENSION,
       [](SmallProblem& s) { s.problem.cu_seqlens_q = kOffsets, s.problem.total_q = -1; }},
      {"total_k", CUFLASH_ERROR_INVALID_DIMENSION,
       [](SmallProblem& s) {
         s.problem.cu_seqlens_k = kOffsets, s.problem.total_k = int64_t{1} << 31;
       }},
      {"cu_seqlens_q", CUFLASH_ERROR_MISALIGNED,
       [&](SmallProblem& s) { s.problem.cu_seqlens_q = odd(kOffsets), s.problem.total_q = 3; }},
      {"seqused_q", CUFLASH_ERROR_MISALIGNED,
       [&](SmallProblem& s) { s.problem.seqused_q = odd(kOffsets); }},
      {"leftpad_k", kValue, [](SmallProblem& s) { s.problem.leftpad_k = kOffsets; }},
      {"leftpad_k", kNull, [](SmallProblem& s) { s.problem.flags = CUFLASH_PROBLEM_LEFT_PADDED; }},
  });
  SmallProblem s;
  s.decode_problem.cu_seqlens_k = kOffsets;
  EXPECT_EQ(s.decode(), kValue);
  EXPECT_TRUE(message_names("cu_seqlens_k"));
  s.decode_problem.cu_seqlens_k = nullptr;
  s.decode_problem.seqused_k = kOffsets;
  EXPECT_EQ(s.decode(), kValue);
  EXPECT_TRUE(message_names("seqused_k"));
  s.problem.seqused_k = reinterpret_cast<const int32_t*>(s.o.data());
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_ALIASING);
  EXPECT_TRUE(message_names("seqused_k"));
  EXPECT_TRUE(s.nothing_written());
}

TEST(Checks, ScoreModifiers) {
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  constexpr auto kDtype = CUFLASH_ERROR_UNSUPPORTED_DTYPE;
  static const float kFloats[64] = {};
  static const uint64_t kLong = 1;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  expect_forward_and_backward({
      {"softcap", kValue, [](SmallProblem& s) { s.problem.softcap = -1; }},
      {"softcap", kValue, [&](SmallProblem& s) { s.problem.softcap = kNan; }},
      {"softcap", kValue, [&](SmallProblem& s) { s.problem.softcap = kInfinity; }},
      {"alibi_batch_stride", kValue, [](SmallProblem& s) { s.problem.alibi_batch_stride = 4; }},
      {"alibi_dtype", kDtype,
       [](SmallProblem& s) {
         s.problem.alibi_slopes = kFloats, s.problem.alibi_dtype = CUFLASH_INT8;
       }},
      {"alibi_slopes", kValue,
       [](SmallProblem& s) {
         s.problem.alibi_slopes = kFloats, s.problem.alibi_batch_stride = -4;
       }},
      {"bias_dtype", kValue, [](SmallProblem& s) { s.problem.bias_dtype = CUFLASH_F32; }},
      {"bias_row_stride", kValue, [](SmallProblem& s) { s.problem.bias_row_stride = 5; }},
      {"bias_dtype", kDtype,
       [](SmallProblem& s) { s.problem.bias = kFloats, s.problem.bias_dtype = 99; }},
      {"problem.bias.head_stride", kValue,
       [](SmallProblem& s) { s.problem.bias = kFloats, s.problem.bias_head_stride = -1; }},
      {"problem.bias", CUFLASH_ERROR_MISALIGNED,
       [](SmallProblem& s) { s.problem.bias = reinterpret_cast<const char*>(kFloats) + 2; }},
      {"sinks_dtype", kValue, [](SmallProblem& s) { s.problem.sinks_dtype = CUFLASH_F16; }},
      {"problem.sinks", CUFLASH_ERROR_MISALIGNED,
       [](SmallProblem& s) { s.problem.sinks = reinterpret_cast<const char*>(kFloats) + 1; }},
      {"dropout_p", kValue, [](SmallProblem& s) { s.problem.dropout_p = 1.5f; }},
      {"dropout_p", kValue, [](SmallProblem& s) { s.problem.dropout_p = -0.5f; }},
      {"dropout_p", kValue, [&](SmallProblem& s) { s.problem.dropout_p = kNan; }},
      {"dropout_seed", kValue,
       [](SmallProblem& s) { s.problem.dropout_seed = 1, s.problem.dropout_seed_ptr = &kLong; }},
      {"dropout_offset", kValue,
       [](SmallProblem& s) {
         s.problem.dropout_offset = 1, s.problem.dropout_offset_ptr = &kLong;
       }},
  });
}

TEST(Checks, OutputsAndGradients) {
  constexpr auto kDtype = CUFLASH_ERROR_UNSUPPORTED_DTYPE;
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  static const float kFloats[64] = {};
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } forward[] = {
      {"problem.lse", CUFLASH_ERROR_NULL_POINTER,
       [](SmallProblem& s) {
         s.problem.flags = CUFLASH_PROBLEM_ACCUMULATE, s.problem.lse = nullptr;
       }},
      {"problem.o", kDtype,
       [](SmallProblem& s) {
         s.problem.flags = CUFLASH_PROBLEM_ACCUMULATE;
         for (cuflash_tensor_t* t : {&s.problem.q, &s.problem.k, &s.problem.v, &s.problem.o})
           t->dtype = CUFLASH_F16;
       }},
      {"problem.v", kValue,
       [](SmallProblem& s) { s.problem.flags = CUFLASH_PROBLEM_V_IS_K_PREFIX; }},
      {"head_dim_v", CUFLASH_ERROR_DIMENSION_MISMATCH,
       [](SmallProblem& s) {
         s.problem.flags = CUFLASH_PROBLEM_V_IS_K_PREFIX, s.problem.v = {};
         s.problem.head_dim_v = 9;
       }},
  };
  for (const auto& row : forward) {
    SmallProblem s;
    row.spoil(s);
    EXPECT_EQ(s.forward(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } backward[] = {
      {"problem.flags", CUFLASH_ERROR_UNSUPPORTED,
       [](SmallProblem& s) { s.problem.flags = CUFLASH_PROBLEM_ACCUMULATE; }},
      {"problem.flags", CUFLASH_ERROR_UNSUPPORTED,
       [](SmallProblem& s) { s.problem.flags = CUFLASH_PROBLEM_V_IS_K_PREFIX; }},
      {"gradients.delta", CUFLASH_ERROR_NULL_POINTER,
       [](SmallProblem& s) { s.gradients.flags = CUFLASH_GRADIENTS_DELTA_GIVEN; }},
      {"gradients.delta", CUFLASH_ERROR_ALIASING,
       [](SmallProblem& s) { s.gradients.delta = s.lse.data(); }},
      {"gradients.dbias", kValue, [](SmallProblem& s) { s.gradients.dbias = s.d_o.data(); }},
      {"gradients.dsinks", kValue, [](SmallProblem& s) { s.gradients.dsinks = s.d_o.data(); }},
      {"gradients.dbias", CUFLASH_ERROR_ALIASING,
       [](SmallProblem& s) { s.problem.bias = kFloats, s.gradients.dbias = s.q.data(); }},
      {"gradients.dbias", CUFLASH_ERROR_ALIASING,  // its rows overlap
       [](SmallProblem& s) {
         s.problem.bias = kFloats, s.problem.bias_row_stride = 4, s.gradients.dbias = s.o.data();
       }},
      {"gradients.dsinks", CUFLASH_ERROR_ALIASING,
       [](SmallProblem& s) { s.problem.sinks = kFloats, s.gradients.dsinks = s.dq.data(); }},
      {"gradients.dk", kDtype,
       [](SmallProblem& s) {
         s.gradients.flags = CUFLASH_GRADIENTS_ACCUMULATE;
         for (cuflash_tensor_t* t : {&s.problem.q, &s.problem.k, &s.problem.v, &s.problem.o,
                                     &s.gradients.d_o, &s.gradients.dk, &s.gradients.dv})
           t->dtype = CUFLASH_F16;
       }},
  };
  for (const auto& row : backward) {
    SmallProblem s;
    row.spoil(s);
    EXPECT_EQ(s.backward(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
}

TEST(Checks, FieldsWithoutAKernelAreRefusedByName) {
  constexpr auto kUnsupported = CUFLASH_ERROR_UNSUPPORTED;
  static const float kFloat = 1;
  expect_forward_and_backward({
      {"q_descale", kUnsupported, [](SmallProblem& s) { s.problem.q_descale = &kFloat; }},
      {"k_descale", kUnsupported, [](SmallProblem& s) { s.problem.k_descale = &kFloat; }},
      {"v_descale", kUnsupported, [](SmallProblem& s) { s.problem.v_descale = &kFloat; }},
      {"math_mode", kUnsupported, [](SmallProblem& s) { s.problem.math_mode = CUFLASH_MATH_TF32; }},
  });
}

TEST(Checks, TreeMasks) {
  static const uint32_t kWords[64] = {};
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  SmallProblem legal;
  legal.problem.tree_mask = legal.decode_problem.tree_mask = kWords;
  legal.problem.tree_mask_len = 64;
  EXPECT_EQ(legal.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_EQ(legal.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  legal.problem.tree_mask_len = 0;
  EXPECT_EQ(legal.backward(), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_TRUE(message_names("problem.tree_mask"));
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } bad[] = {
      {"problem.tree_mask_len: 3 without", kValue,
       [](SmallProblem& s) { s.problem.tree_mask = nullptr, s.problem.tree_mask_len = 3; }},
      {"problem.tree_mask_row_stride: 1 without", kValue,
       [](SmallProblem& s) { s.problem.tree_mask = nullptr, s.problem.tree_mask_row_stride = 1; }},
      {"problem.tree_mask_batch_stride: -1", kValue,
       [](SmallProblem& s) { s.problem.tree_mask_batch_stride = -1; }},
      {"problem.tree_mask_row_stride", kValue,
       [](SmallProblem& s) { s.problem.tree_mask_row_stride = int64_t{1} << 49; }},
      {"problem.tree_mask_len", kValue,
       [](SmallProblem& s) { s.problem.tree_mask_len = int64_t{1} << 31; }},
      {"problem.tree_mask", CUFLASH_ERROR_MISALIGNED,
       [](SmallProblem& s) {
         s.problem.tree_mask =
             reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(kWords) + 2);
       }},
      {"problem.tree_mask", CUFLASH_ERROR_ALIASING,
       [](SmallProblem& s) {
         s.problem.tree_mask = reinterpret_cast<const uint32_t*>(s.lse.data());
       }},
  };
  for (const auto& row : bad) {
    SmallProblem s;
    s.problem.tree_mask = kWords;
    row.spoil(s);
    EXPECT_EQ(s.forward(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
  // The last word of the last row: a stride of 4 words, two sequences of three rows of two words.
  std::vector<uint32_t> memory(22 + SmallProblem::kQuerySize);
  SmallProblem s;
  s.problem.tree_mask = memory.data();
  s.problem.tree_mask_len = 33;
  s.problem.tree_mask_row_stride = 4, s.problem.tree_mask_batch_stride = 12;
  s.problem.o.data = memory.data() + 22;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  s.problem.o.data = memory.data() + 21;
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_ALIASING);
}

TEST(Checks, QuantisedCaches) {
  static const float kOnes[64] = {};
  static std::vector<float> joint(SmallProblem::kLenK + SmallProblem::kQuerySize);
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  const auto int4 = [](SmallProblem& s) {  // the memory of f32 has room for more
    s.cache.k.dtype = CUFLASH_INT4;
    s.cache.k_scale = s.cache.k_zero = kOnes;
  };
  const auto strided = [](SmallProblem& s) {
    s.cache.k.dtype = CUFLASH_INT4;
    s.cache.k.flags = 0;
    s.cache.k.row_stride = 10, s.cache.k.head_stride = 50, s.cache.k.batch_stride = 100;
  };
  const auto scaled = [](SmallProblem& s) { s.cache.v_scale = kOnes; };
  for (const std::function<void(SmallProblem&)>& change :
       {std::function<void(SmallProblem&)>(int4), std::function<void(SmallProblem&)>(strided),
        std::function<void(SmallProblem&)>(scaled)}) {
    SmallProblem s;
    change(s);
    EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  }
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } bad[] = {
      {"cache.k.dtype: 8", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
       [](SmallProblem& s) { s.cache.k.dtype = 8; }},
      {"cache.v.dtype: -1", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
       [](SmallProblem& s) { s.cache.v.dtype = -1; }},
      {"cache.k.row_stride: 9; even", kValue,
       [&](SmallProblem& s) { strided(s), s.cache.k.row_stride = 9; }},
      {"cache.k.head_stride: 51; even", kValue,
       [&](SmallProblem& s) { strided(s), s.cache.k.head_stride = 51; }},
      {"cache.k.head_stride: 35 of a dense tensor; even", kValue,
       [&](SmallProblem& s) { int4(s), s.decode_problem.head_dim = 7; }},
      {"cache.scale_head_stride: -1", kValue,
       [&](SmallProblem& s) { scaled(s), s.cache.scale_head_stride = -1; }},
      {"cache.scale_slot_stride", kValue,
       [&](SmallProblem& s) { scaled(s), s.cache.scale_slot_stride = int64_t{1} << 49; }},
      {"cache.scale_page_stride: 4 without scales", kValue,
       [](SmallProblem& s) { s.cache.scale_page_stride = 4; }},
      {"cache.scale_group: 32 without scales", kValue,
       [](SmallProblem& s) { s.cache.scale_group = 32; }},
      {"cache.scale_dtype: 1 without scales", kValue,
       [](SmallProblem& s) { s.cache.scale_dtype = CUFLASH_F32; }},
      {"cache.scale_group: 16", kValue,
       [&](SmallProblem& s) { scaled(s), s.cache.scale_group = 16; }},
      {"cache.scale_dtype: 4", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
       [&](SmallProblem& s) { scaled(s), s.cache.scale_dtype = CUFLASH_FP8_E4M3; }},
      {"cache.reserved", CUFLASH_ERROR_UNSUPPORTED, [](SmallProblem& s) { s.cache.reserved = 1; }},
      {"cache.k_zero: set, but the elements are f32", kValue,
       [](SmallProblem& s) { s.cache.k_zero = kOnes; }},
      {"cache.v_zero: set, but the elements are fp8 e5m2", kValue,
       [](SmallProblem& s) { s.cache.v.dtype = CUFLASH_FP8_E5M2, s.cache.v_zero = kOnes; }},
      {"cache.v_scale: set with CUFLASH_PROBLEM_V_IS_K_PREFIX", kValue,
       [&](SmallProblem& s) {
         scaled(s), s.cache.v = {}, s.decode_problem.flags = CUFLASH_PROBLEM_V_IS_K_PREFIX;
       }},
      {"cache.v_scale", CUFLASH_ERROR_MISALIGNED,
       [](SmallProblem& s) { s.cache.v_scale = reinterpret_cast<const char*>(kOnes) + 2; }},
      {"cache.v_scale", CUFLASH_ERROR_ALIASING,
       [](SmallProblem& s) { s.cache.v_scale = s.o.data(); }},
      {"cache.v_scale", CUFLASH_ERROR_ALIASING,  // only its last slots
       [](SmallProblem& s) {
         s.cache.v_scale = joint.data(), s.cache.scale_slot_stride = 1;
         s.decode_problem.o.data = joint.data() + SmallProblem::kLenK - 1;
       }},
  };
  for (const auto& row : bad) {
    SmallProblem s;
    row.spoil(s);
    EXPECT_EQ(s.decode(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
  // Elements of a byte need no alignment, and half a byte each reaches half as far.
  SmallProblem s;
  s.cache.k.dtype = CUFLASH_INT8;
  s.cache.k.data = reinterpret_cast<char*>(s.k.data()) + 1;
  EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  std::vector<unsigned char> both(SmallProblem::kKeySize / 2 + s.o.size() * sizeof(float));
  s.cache.k.dtype = CUFLASH_INT4;
  s.cache.k.data = both.data();
  s.decode_problem.o.data = both.data() + SmallProblem::kKeySize / 2;
  EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  s.decode_problem.o.data = both.data() + SmallProblem::kKeySize / 2 - 4;
  EXPECT_EQ(s.decode(), CUFLASH_ERROR_ALIASING);
}

TEST(Checks, LayoutsOfCaches) {
  static const int32_t kInts[] = {0, 0, 0, 0};
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  constexpr auto kNull = CUFLASH_ERROR_NULL_POINTER;
  const auto paged = [](SmallProblem& s) {  // two pages of 3 slots for each of two sequences
    s.cache.layout = CUFLASH_CACHE_PAGED;
    s.cache.page_size = 3;
    s.cache.num_pages = 3;
    s.cache.block_table = kInts;
    s.cache.block_table_stride = 2;
  };
  const auto csr = [&](SmallProblem& s) {
    paged(s);
    s.cache.layout = CUFLASH_CACHE_PAGED_CSR;
    s.cache.block_table = nullptr;
    s.cache.block_table_stride = 0;
    s.cache.page_indptr = kInts;
    s.cache.page_indices = kInts;
  };
  SmallProblem by_table, by_indices;
  paged(by_table);
  EXPECT_EQ(by_table.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  csr(by_indices);
  EXPECT_EQ(by_indices.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } bad[] = {
      {"cache.layout", kValue, [](SmallProblem& s) { s.cache.layout = 3; }},
      {"cache.id_bits", kValue, [](SmallProblem& s) { s.cache.id_bits = 64; }},
      {"cache.page_size", kValue, [](SmallProblem& s) { s.cache.page_size = 16; }},
      {"cache.block_table", kValue, [](SmallProblem& s) { s.cache.block_table = kInts; }},
      {"cache.page_indptr", kValue, [](SmallProblem& s) { s.cache.page_indptr = kInts; }},
      {"cache.id_bits", kValue, [&](SmallProblem& s) { paged(s), s.cache.id_bits = 16; }},
      {"cache.page_size", CUFLASH_ERROR_INVALID_DIMENSION,
       [&](SmallProblem& s) { paged(s), s.cache.page_size = 0; }},
      {"cache.num_pages", CUFLASH_ERROR_INVALID_DIMENSION,
       [&](SmallProblem& s) { paged(s), s.cache.num_pages = -1; }},
      {"cache.block_table_stride", kValue,
       [&](SmallProblem& s) { paged(s), s.cache.block_table_stride = -1; }},
      {"cache.block_table", kValue,  // 2^63 bytes, of sequences without queries
       [&](SmallProblem& s) {
         paged(s), s.cache.block_table_stride = 0x7fffffff;
         s.decode_problem.batch = 0x7fffffff, s.decode_problem.len_q = 0;
       }},
      {"cache.block_table", kNull,
       [&](SmallProblem& s) { paged(s), s.cache.block_table = nullptr; }},
      {"cache.block_table", CUFLASH_ERROR_MISALIGNED,
       [&](SmallProblem& s) {
         paged(s), s.cache.block_table = reinterpret_cast<const char*>(kInts) + 2;
       }},
      {"cache.cache_batch_idx", kValue,
       [&](SmallProblem& s) { paged(s), s.cache.cache_batch_idx = kInts; }},
      {"cache.page_indptr", kNull, [&](SmallProblem& s) { csr(s), s.cache.page_indptr = nullptr; }},
      {"cache.page_indices", kNull,
       [&](SmallProblem& s) { csr(s), s.cache.page_indices = nullptr; }},
      {"cache.block_table", kValue, [&](SmallProblem& s) { csr(s), s.cache.block_table = kInts; }},
      {"cache.num_pages", CUFLASH_ERROR_DIMENSION_MISMATCH,
       [](SmallProblem& s) { s.cache.num_pages = 1; }},
      {"problem.o", CUFLASH_ERROR_ALIASING,
       [&](SmallProblem& s) { paged(s), s.cache.block_table = s.o.data(); }},
  };
  for (const auto& row : bad) {
    SmallProblem s;
    row.spoil(s);
    EXPECT_EQ(s.decode(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
}

TEST(Checks, DecodeWithEveryArray) {
  static const int32_t kInts[64] = {};
  static const uint32_t kWords[64] = {};
  static const uint64_t kSeed = 1;
  static const float kFloats[64] = {};
  SmallProblem s;
  s.cache.layout = CUFLASH_CACHE_PAGED_CSR;
  s.cache.page_size = 5;
  s.cache.num_pages = 2;
  s.cache.page_indptr = kInts;
  s.cache.page_indices = kInts;
  s.cache.k.dtype = s.cache.v.dtype = CUFLASH_INT8;
  s.cache.k_scale = s.cache.v_scale = s.cache.k_zero = s.cache.v_zero = kFloats;
  cuflash_problem_t& p = s.decode_problem;
  p.cu_seqlens_q = p.seqused_q = p.leftpad_k = p.mask_offsets = kInts;
  p.total_q = 6;
  p.flags = CUFLASH_PROBLEM_LEFT_PADDED;
  p.mask = CUFLASH_MASK_CAUSAL;
  p.mask_align = CUFLASH_ALIGN_DEVICE_OFFSETS;
  p.tree_mask = kWords;
  p.alibi_slopes = p.bias = p.sinks = kFloats;
  p.dropout_p = 0.5f;
  p.dropout_seed_ptr = p.dropout_offset_ptr = &kSeed;
  p.num_splits = 3;
  size_t bytes = 0;
  ASSERT_EQ(cuflash_decode_workspace_size(handle_of(Device::kCpu), &p, &s.cache, &bytes),
            CUFLASH_SUCCESS)
      << cuflash_last_error();
  Buffer workspace(Device::kCpu, bytes);
  p.workspace = workspace.data();
  p.workspace_size = bytes;
  EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
}

TEST(Checks, DecodeHasItsKeysInTheCache) {
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallProblem&)> spoil;
  } rows[] = {
      {"problem.k", kValue, [](SmallProblem& s) { s.decode_problem.k = s.problem.k; }},
      {"problem.v", kValue, [](SmallProblem& s) { s.decode_problem.v.dtype = CUFLASH_F32; }},
      {"len_k", kValue, [](SmallProblem& s) { s.decode_problem.len_k = 5; }},
      {"layout", kValue, [](SmallProblem& s) { s.cache.layout = 3; }},
      {"num_splits", kValue, [](SmallProblem& s) { s.decode_problem.num_splits = 1025; }},
      {"num_splits", kValue, [](SmallProblem& s) { s.decode_problem.num_splits = -1; }},
      {"max_len", CUFLASH_ERROR_INVALID_DIMENSION, [](SmallProblem& s) { s.cache.max_len = -1; }},
      {"num_pages", CUFLASH_ERROR_DIMENSION_MISMATCH,
       [](SmallProblem& s) { s.cache.num_pages = 1; }},
      {"cache.k", CUFLASH_ERROR_NULL_POINTER, [](SmallProblem& s) { s.cache.k.data = nullptr; }},
  };
  for (const auto& row : rows) {
    SmallProblem s;
    row.spoil(s);
    EXPECT_EQ(s.decode(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_TRUE(s.nothing_written());
  }
  SmallProblem s;
  s.problem.num_splits = 2;  // elsewhere 0 or 1
  EXPECT_EQ(s.forward(), kValue);
  s.problem.num_splits = 1;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS);
  s.cache.num_pages = 7;
  EXPECT_EQ(s.decode(), CUFLASH_SUCCESS);
}

TEST(Checks, OtherValues) {
  expect_forward_and_backward({
      {"sm_margin", CUFLASH_ERROR_INVALID_VALUE, [](SmallProblem& s) { s.problem.sm_margin = -1; }},
      {"sm_margin", CUFLASH_ERROR_INVALID_VALUE,
       [](SmallProblem& s) { s.problem.sm_margin = 2000; }},
      {"target_arch", CUFLASH_ERROR_INVALID_VALUE,
       [](SmallProblem& s) { s.problem.target_arch = 90; }},
      {"workspace", CUFLASH_ERROR_NULL_POINTER,
       [](SmallProblem& s) { s.problem.workspace_size = 100; }},
  });
  SmallProblem s;
  EXPECT_EQ(cuflash_attention_forward(handle_of(Device::kCpu), &s.problem,
                                      reinterpret_cast<cuflash_stream_t>(uintptr_t{8})),
            CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_TRUE(message_names("stream"));
  EXPECT_TRUE(s.nothing_written());
}

// ---- struct_size ------------------------------------------------------------------------------------

TEST(Checks, StructSizes) {
  for (const uint32_t bad : {0u, 4u, 9u, uint32_t{sizeof(cuflash_problem_t)} + 1, 65544u}) {
    SmallProblem s;
    s.problem.struct_size = bad;
    EXPECT_EQ(s.forward(), CUFLASH_ERROR_STRUCT_SIZE) << bad;
    EXPECT_TRUE(s.nothing_written());
  }
  SmallProblem s;
  s.gradients.struct_size = 0;
  EXPECT_EQ(s.backward(), CUFLASH_ERROR_STRUCT_SIZE);
  s.cache.struct_size = 0;
  EXPECT_EQ(s.decode(), CUFLASH_ERROR_STRUCT_SIZE);
}

TEST(Checks, LongerStructsOfANewerHeader) {
  struct Newer {
    cuflash_problem_t problem;
    int64_t unknown[4];
  };
  SmallProblem s;
  Newer newer = {s.problem, {}};
  newer.problem.struct_size = sizeof newer;
  const cuflash_handle_t cpu = handle_of(Device::kCpu);
  EXPECT_EQ(cuflash_attention_forward(cpu, &newer.problem, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  EXPECT_FALSE(s.nothing_written());
  SmallProblem t;
  newer.problem = t.problem;
  newer.problem.struct_size = sizeof newer;
  newer.unknown[3] = int64_t{1} << 56;
  EXPECT_EQ(cuflash_attention_forward(cpu, &newer.problem, nullptr), CUFLASH_ERROR_STRUCT_SIZE);
  EXPECT_TRUE(t.nothing_written());
}

TEST(Checks, ShorterStructsOfAnOlderHeader) {
  // Cut after num_splits' eight bytes; what follows must be read as zero although it is not.
  SmallProblem s;
  s.problem.struct_size = offsetof(cuflash_problem_t, sm_margin);
  s.problem.sm_margin = -5;
  s.problem.target_arch = 1234;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  SmallProblem t;
  t.gradients.struct_size = offsetof(cuflash_gradients_t, dlse);
  t.gradients.delta = t.lse.data();
  EXPECT_EQ(t.forward(), CUFLASH_SUCCESS);
  EXPECT_EQ(t.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
}

TEST(Checks, InitFunctions) {
  cuflash_problem_t problem;
  std::memset(&problem, 0xff, sizeof problem);
  EXPECT_EQ(cuflash_problem_init(&problem, sizeof problem), CUFLASH_SUCCESS);
  cuflash_problem_t zero = {};
  zero.struct_size = sizeof zero;
  EXPECT_EQ(std::memcmp(&problem, &zero, sizeof zero), 0);
  EXPECT_EQ(cuflash_problem_init(nullptr, sizeof problem), CUFLASH_ERROR_NULL_POINTER);
  for (const size_t bad : {size_t{0}, size_t{4}, size_t{12}, size_t{65544}, SIZE_MAX})
    EXPECT_EQ(cuflash_problem_init(&problem, bad), CUFLASH_ERROR_STRUCT_SIZE) << bad;
  cuflash_gradients_t gradients;
  cuflash_kv_cache_t cache;
  cuflash_kv_append_t append;
  cuflash_merge_t merge;
  cuflash_weights_t weights;
  EXPECT_EQ(cuflash_gradients_init(&gradients, sizeof gradients), CUFLASH_SUCCESS);
  EXPECT_EQ(gradients.struct_size, sizeof gradients);
  EXPECT_EQ(cuflash_kv_cache_init(&cache, sizeof cache), CUFLASH_SUCCESS);
  EXPECT_EQ(cache.struct_size, sizeof cache);
  EXPECT_EQ(cuflash_kv_append_init(&append, sizeof append), CUFLASH_SUCCESS);
  EXPECT_EQ(append.struct_size, sizeof append);
  EXPECT_EQ(cuflash_merge_init(&merge, sizeof merge), CUFLASH_SUCCESS);
  EXPECT_EQ(merge.struct_size, sizeof merge);
  EXPECT_EQ(cuflash_weights_init(&weights, sizeof weights), CUFLASH_SUCCESS);
  EXPECT_EQ(weights.struct_size, sizeof weights);
}

TEST(Checks, Weights) {
  SmallProblem s;
  ASSERT_EQ(s.forward(), CUFLASH_SUCCESS);
  std::vector<float> out(
      SmallProblem::kBatch * SmallProblem::kHeadsQ * SmallProblem::kLenQ * SmallProblem::kLenK,
      SmallProblem::kUntouched);
  const std::vector<float> untouched = out;
  const std::vector<int32_t> rows = {2, 0};
  const auto run = [&](const std::function<void(cuflash_weights_t&)>& spoil) {
    cuflash_weights_t weights;
    cuflash_weights_init(&weights, sizeof weights);
    weights.weights = out.data();
    spoil(weights);
    return cuflash_attention_weights(handle_of(Device::kCpu), &s.problem, &weights, nullptr);
  };
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(cuflash_weights_t&)> spoil;
  } bad[] = {
      {"weights.num_rows", CUFLASH_ERROR_INVALID_DIMENSION,
       [](cuflash_weights_t& w) { w.num_rows = -1; }},
      {"weights.flags", CUFLASH_ERROR_UNSUPPORTED, [](cuflash_weights_t& w) { w.flags = 1; }},
      {"weights.weights", CUFLASH_ERROR_NULL_POINTER,
       [](cuflash_weights_t& w) { w.weights = nullptr; }},
      {"weights.weights", CUFLASH_ERROR_ALIASING,
       [&](cuflash_weights_t& w) { w.weights = s.k.data(); }},
      {"weights.weights.row_stride", CUFLASH_ERROR_ALIASING,
       [](cuflash_weights_t& w) { w.batch_stride = 60, w.head_stride = 15; }},
      {"weights.rows", CUFLASH_ERROR_MISALIGNED,
       [&](cuflash_weights_t& w) {
         w.rows = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(rows.data()) + 1);
       }},
      {"weights", CUFLASH_ERROR_STRUCT_SIZE, [](cuflash_weights_t& w) { w.struct_size = 8; }},
  };
  for (const auto& row : bad) {
    EXPECT_EQ(run(row.spoil), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    EXPECT_EQ(out, untouched);
  }
  EXPECT_EQ(run([](cuflash_weights_t&) {}), CUFLASH_SUCCESS) << cuflash_last_error();
  for (size_t row = 0; row < out.size(); row += SmallProblem::kLenK)
    EXPECT_NEAR(std::accumulate(&out[row], &out[row] + SmallProblem::kLenK, 0.0), 1, 1e-6);
}

// ---- empty problems -----------------------------------------------------------------------------------

TEST(Checks, EmptyProblemsNeedNoPointers) {
  for (int64_t cuflash_problem_t::*extent :
       {&cuflash_problem_t::batch, &cuflash_problem_t::heads_q, &cuflash_problem_t::len_q}) {
    SmallProblem s;
    s.problem.*extent = s.decode_problem.*extent = 0;
    if (extent == &cuflash_problem_t::heads_q) s.problem.heads_kv = s.decode_problem.heads_kv = 0;
    s.problem.q.data = s.problem.o.data = s.decode_problem.q.data = s.decode_problem.o.data =
        nullptr;
    EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
    EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
    EXPECT_TRUE(s.nothing_written());
  }
  SmallProblem s;
  s.problem.len_k = 0;
  s.problem.k.data = s.problem.v.data = nullptr;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const float o : s.o) EXPECT_EQ(o, 0);
  for (const float lse : s.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST(Checks, BackwardWithoutRowsClearsItsKeyGradients) {
  SmallProblem s;
  s.problem.len_q = 0;
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const float dk : s.dk) EXPECT_EQ(dk, 0);
  for (const float dv : s.dv) EXPECT_EQ(dv, 0);
}

// ---- aliasing ------------------------------------------------------------------------------------------

TEST(Checks, Aliasing) {
  constexpr auto kAliasing = CUFLASH_ERROR_ALIASING;
  const struct {
    const char* name;
    std::function<void(SmallProblem&)> spoil;
  } forward[] = {
      {"problem.o", [](SmallProblem& s) { s.problem.o.data = s.q.data(); }},
      {"problem.o", [](SmallProblem& s) { s.problem.o.data = s.k.data() + 8; }},
      {"problem.o", [](SmallProblem& s) { s.problem.o.data = s.v.data() + 159; }},
      {"problem.lse", [](SmallProblem& s) { s.problem.lse = s.q.data() + 191; }},
      {"problem.lse", [](SmallProblem& s) { s.problem.lse = s.o.data() + 191; }},
  };
  for (const auto& row : forward) {
    SmallProblem s;
    const std::vector<float> q = s.q, k = s.k, v = s.v;
    row.spoil(s);
    EXPECT_EQ(s.forward(), kAliasing) << row.name;
    EXPECT_TRUE(message_names("overlaps"));
    EXPECT_TRUE(s.nothing_written());
    EXPECT_EQ(s.q, q);
    EXPECT_EQ(s.k, k);
    EXPECT_EQ(s.v, v);
  }
  const std::function<void(SmallProblem&)> backward[] = {
      [](SmallProblem& s) { s.gradients.dq.data = s.q.data(); },
      [](SmallProblem& s) { s.gradients.dk.data = s.k.data(); },
      [](SmallProblem& s) { s.gradients.dv.data = s.dk.data(); },
      [](SmallProblem& s) { s.gradients.dq.data = s.d_o.data() + 1; },
      [](SmallProblem& s) { s.gradients.dq.data = s.o.data(); },
      [](SmallProblem& s) { s.gradients.dk.data = s.lse.data(); },
  };
  for (const auto& spoil : backward) {
    SmallProblem s;
    spoil(s);
    EXPECT_EQ(s.backward(), kAliasing) << cuflash_last_error();
    EXPECT_TRUE(s.nothing_written());
  }
  // Inputs may share memory.
  SmallProblem s;
  s.problem.v = s.problem.k;
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
}

TEST(Checks, WorkspaceIsNoOtherMemory) {
  SmallProblem s;
  size_t bytes = 0;
  ASSERT_EQ(
      cuflash_backward_workspace_size(handle_of(Device::kCpu), &s.problem, &s.gradients, &bytes),
      CUFLASH_SUCCESS);
  ASSERT_GT(bytes, 0u);
  Buffer both(Device::kCpu, bytes + 4096);
  s.problem.workspace = both.data();
  s.problem.workspace_size = bytes;
  s.gradients.dq.data = both.data();
  EXPECT_EQ(s.backward(), CUFLASH_ERROR_ALIASING);
  s.gradients.dq.data = static_cast<char*>(both.data()) + bytes;
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
}

// q, k, v (and their gradients) in one [batch, row, 3, head, channel] buffer.
TEST(Checks, InterleavedLayoutsAreLegal) {
  SmallProblem s;
  s.problem.heads_kv = 4;
  s.problem.len_k = 3;
  std::vector<float> packed(2 * 3 * 3 * 4 * 8, 0.5f), packed_gradient(packed.size(), -77);
  const auto part = [](std::vector<float>& buffer, int which) {
    cuflash_tensor_t t = {};
    t.data = buffer.data() + which * 4 * 8;
    t.row_stride = 3 * 4 * 8;
    t.head_stride = 8;
    t.batch_stride = 3 * t.row_stride;
    t.dtype = CUFLASH_F32;
    return t;
  };
  s.problem.q = part(packed, 0);
  s.problem.k = part(packed, 1);
  s.problem.v = part(packed, 2);
  EXPECT_EQ(s.forward(), CUFLASH_SUCCESS) << cuflash_last_error();
  s.gradients.dq = part(packed_gradient, 0);
  s.gradients.dk = part(packed_gradient, 1);
  s.gradients.dv = part(packed_gradient, 2);
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const float value : packed_gradient) EXPECT_NE(value, -77);
  // One channel of it over the neighbour's.
  s.gradients.dk.data = static_cast<float*>(s.gradients.dk.data) - 1;
  EXPECT_EQ(s.backward(), CUFLASH_ERROR_ALIASING);
}

// ---- merge ---------------------------------------------------------------------------------------------

struct SmallMerge {
  std::vector<float> parts = std::vector<float>(2 * 24, 1),
                     lse_parts = std::vector<float>(2 * 6, 0);
  std::vector<float> o = std::vector<float>(24, -77), lse = std::vector<float>(6, -77);
  cuflash_merge_t merge;
  SmallMerge() {
    cuflash_merge_init(&merge, sizeof merge);
    merge.num_parts = 2;
    merge.batch = 1;
    merge.heads = 2;
    merge.len = 3;
    merge.head_dim = 4;
    merge.parts = SmallProblem::dense(parts.data());
    merge.part_stride = 24;
    merge.lse_parts = lse_parts.data();
    merge.lse_part_stride = 6;
    merge.o = SmallProblem::dense(o.data());
    merge.lse = lse.data();
  }
  cuflash_status_t run() { return cuflash_merge_states(handle_of(Device::kCpu), &merge, nullptr); }
};

TEST(Checks, Merge) {
  const struct {
    const char* name;
    cuflash_status_t status;
    std::function<void(SmallMerge&)> spoil;
  } rows[] = {
      {"num_parts", CUFLASH_ERROR_INVALID_DIMENSION, [](SmallMerge& m) { m.merge.num_parts = -1; }},
      {"batch", CUFLASH_ERROR_INVALID_DIMENSION, [](SmallMerge& m) { m.merge.batch = -1; }},
      {"heads", CUFLASH_ERROR_INVALID_DIMENSION,
       [](SmallMerge& m) { m.merge.heads = int64_t{1} << 40; }},
      {"head_dim", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
       [](SmallMerge& m) { m.merge.head_dim = 577; }},
      {"parts", CUFLASH_ERROR_NULL_POINTER, [](SmallMerge& m) { m.merge.parts.data = nullptr; }},
      {"lse_parts", CUFLASH_ERROR_NULL_POINTER, [](SmallMerge& m) { m.merge.lse_parts = nullptr; }},
      {"merge.o", CUFLASH_ERROR_NULL_POINTER, [](SmallMerge& m) { m.merge.o.data = nullptr; }},
      {"parts", CUFLASH_ERROR_UNSUPPORTED_DTYPE, [](SmallMerge& m) { m.merge.parts.dtype = 0; }},
      {"merge.o", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
       [](SmallMerge& m) { m.merge.o.dtype = CUFLASH_INT8; }},
      {"flags", CUFLASH_ERROR_UNSUPPORTED, [](SmallMerge& m) { m.merge.flags = 2; }},
      {"part_stride", CUFLASH_ERROR_INVALID_VALUE,
       [](SmallMerge& m) { m.merge.part_stride = -24; }},
      {"merge.o", CUFLASH_ERROR_ALIASING,
       [](SmallMerge& m) { m.merge.o.data = m.parts.data() + 4; }},
      {"merge.lse", CUFLASH_ERROR_ALIASING, [](SmallMerge& m) { m.merge.lse = m.parts.data(); }},
      {"merge.lse", CUFLASH_ERROR_ALIASING,
       [](SmallMerge& m) { m.merge.lse = m.lse_parts.data() + 1; }},
      {"merge", CUFLASH_ERROR_STRUCT_SIZE, [](SmallMerge& m) { m.merge.struct_size = 8; }},
  };
  for (const auto& row : rows) {
    SmallMerge m;
    row.spoil(m);
    EXPECT_EQ(m.run(), row.status) << row.name << ": " << cuflash_last_error();
    EXPECT_TRUE(message_names(row.name));
    for (const float o : m.o) EXPECT_EQ(o, -77);
  }
  SmallMerge m;
  EXPECT_EQ(m.run(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const float o : m.o) EXPECT_EQ(o, 1);
  for (const float lse : m.lse) EXPECT_NEAR(lse, std::log(2.0f), 1e-6);
  m.merge.lse = nullptr;  // not wanted
  EXPECT_EQ(m.run(), CUFLASH_SUCCESS) << cuflash_last_error();
}

TEST(Checks, MergeOfNoParts) {
  SmallMerge m;
  m.merge.num_parts = 0;
  m.merge.parts.data = nullptr;
  m.merge.lse_parts = nullptr;
  ASSERT_EQ(m.run(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const float o : m.o) EXPECT_EQ(o, 0);
  for (const float lse : m.lse) EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
}

TEST(Checks, MergeIntoAnotherDtype) {
  SmallMerge m;
  std::vector<uint16_t> half(24, 0xffff);
  m.merge.o = SmallProblem::dense(half.data());
  m.merge.o.dtype = CUFLASH_F16;
  ASSERT_EQ(m.run(), CUFLASH_SUCCESS) << cuflash_last_error();
  for (const uint16_t bits : half) EXPECT_EQ(bits, 0x3c00);  // 1
}

}  // namespace
}  // namespace cuflash_test
