// Random problems with one thing wrong: refused with the status of that thing and a message, and nothing is written.
//
//   CUFLASH_TEST_INVALID_DRAWS  of each operation (300)
//   CUFLASH_TEST_SEED and CUFLASH_TEST_DRAW as in grid.cpp
#include <algorithm>
#include <limits>

#include "kernels/draws.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

struct Victim {
  const Draw& draw;
  cuflash_problem_t& p;
  cuflash_gradients_t& g;
  cuflash_kv_cache_t& c;

  bool is(Operation operation) const { return draw.c.operation == operation; }
  bool paged() const { return draw.pool.has_value(); }
  bool has_scales() const { return c.k_scale || c.v_scale || c.k_zero || c.v_zero; }
  size_t workspace_bytes() const {
    const cuflash_handle_t handle = handle_of(draw.c.device);
    size_t bytes = 0;
    if (is(Operation::kForward)) cuflash_forward_workspace_size(handle, &p, &bytes);
    if (is(Operation::kBackward)) cuflash_backward_workspace_size(handle, &p, &g, &bytes);
    if (is(Operation::kDecode)) cuflash_decode_workspace_size(handle, &p, &c, &bytes);
    return bytes;
  }
};

struct Mistake {
  const char* name;
  cuflash_status_t status;
  bool (*make)(Victim&);  // false: not on this draw
};

constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;

const Mistake kMistakes[] = {
    {"struct_size", CUFLASH_ERROR_STRUCT_SIZE, [](Victim& v) { return v.p.struct_size = 3, true; }},
    {"unknown flag", CUFLASH_ERROR_UNSUPPORTED,
     [](Victim& v) { return v.p.flags |= 1u << 30, true; }},
    {"unknown flag of a tensor", CUFLASH_ERROR_UNSUPPORTED,
     [](Victim& v) { return v.p.o.flags |= 1u << 30, !v.is(kBackward) || v.p.o.data != nullptr; }},
    {"negative batch", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) { return v.p.batch = -1, true; }},
    {"len_q of 2^31", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) { return v.p.len_q = int64_t{1} << 31, true; }},
    {"negative keys", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) { return (v.is(kDecode) ? v.c.max_len : v.p.len_k) = -1, true; }},
    {"heads that do not divide", CUFLASH_ERROR_DIMENSION_MISMATCH,
     [](Victim& v) { return v.p.heads_q = 2 * v.p.heads_kv + 1, v.p.heads_kv > 1; }},
    {"head_dim of 0", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
     [](Victim& v) { return v.p.head_dim = 0, true; }},
    {"head_dim of 577", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
     [](Victim& v) { return v.p.head_dim = 577, true; }},
    {"head_dim_v of 257, backward", CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
     [](Victim& v) { return v.p.head_dim_v = 257, v.is(kBackward); }},
    {"no dtype", CUFLASH_ERROR_UNSUPPORTED_DTYPE, [](Victim& v) { return v.p.q.dtype = 0, true; }},
    {"dtype of the keys", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) {
       v.p.k.dtype = v.p.q.dtype == CUFLASH_F16 ? CUFLASH_BF16 : CUFLASH_F16;
       return !v.is(kDecode);
     }},
    {"dtype of the cache", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.c.k.dtype = CUFLASH_INT4 + 1, v.is(kDecode); }},
    {"int8 queries", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.p.q.dtype = CUFLASH_INT8, true; }},
    {"no q", CUFLASH_ERROR_NULL_POINTER, [](Victim& v) { return v.p.q.data = nullptr, true; }},
    {"no keys", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) { return (v.is(kDecode) ? v.c.k : v.p.k).data = nullptr, true; }},
    {"no LSE", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) { return v.p.lse = nullptr, v.is(kBackward); }},
    {"misaligned q", CUFLASH_ERROR_MISALIGNED,
     [](Victim& v) { return v.p.q.data = static_cast<char*>(v.p.q.data) + 1, true; }},
    {"negative stride", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.q.row_stride = -8, (v.p.q.flags & CUFLASH_TENSOR_DENSE) == 0; }},
    {"output that repeats", CUFLASH_ERROR_ALIASING,
     [](Victim& v) {
       cuflash_tensor_t& out = v.is(kBackward) ? v.g.dq : v.p.o;
       out.head_stride = 0;
       return (out.flags & CUFLASH_TENSOR_DENSE) == 0 && v.draw.c.shape.heads_q > 1;
     }},
    {"output over an input", CUFLASH_ERROR_ALIASING,
     [](Victim& v) {
       const bool wide = v.draw.c.wide && v.draw.c.dtype != Dtype::kF32;
       if (v.is(kBackward))
         v.g.dq.data = v.p.q.data;
       else
         v.p.o.data = v.p.q.data;
       return !wide;
     }},
    {"mask", CUFLASH_ERROR_INVALID_VALUE, [](Victim& v) { return v.p.mask = 2, true; }},
    {"alignment of the mask", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.mask_align = 4, true; }},
    {"device offsets without an array", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) {
       v.p.mask = CUFLASH_MASK_CAUSAL;
       v.p.mask_offset = 0;
       v.p.mask_offsets = nullptr;
       return v.p.mask_align = CUFLASH_ALIGN_DEVICE_OFFSETS, true;
     }},
    {"negative window", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) {
       v.p.flags |= CUFLASH_PROBLEM_WINDOW;
       return v.p.window_left = -2, true;
     }},
    {"scale that is not finite", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) {
       v.p.flags |= CUFLASH_PROBLEM_SCALE_SET;
       return v.p.scale = std::numeric_limits<float>::quiet_NaN(), true;
     }},
    {"scale beyond powers of 2", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) {
       v.p.flags |= CUFLASH_PROBLEM_SCALE_SET;
       return v.p.scale = 0x1.8p127f, true;
     }},
    {"softcap", CUFLASH_ERROR_INVALID_VALUE, [](Victim& v) { return v.p.softcap = -1, true; }},
    {"dropout", CUFLASH_ERROR_INVALID_VALUE, [](Victim& v) { return v.p.dropout_p = 1.5f, true; }},
    {"bias dtype", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.p.bias_dtype = CUFLASH_INT8, v.p.bias != nullptr; }},
    {"bias stride without a bias", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.bias_row_stride = 8, v.p.bias == nullptr; }},
    {"slopes dtype", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.p.alibi_dtype = 77, v.p.alibi_slopes != nullptr; }},
    {"sinks dtype", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.p.sinks_dtype = -1, v.p.sinks != nullptr; }},
    {"tree mask, backward", CUFLASH_ERROR_UNSUPPORTED,
     [](Victim& v) {
       return v.p.tree_mask = static_cast<const uint32_t*>(v.p.q.data), v.is(kBackward);
     }},
    {"negative bits of a tree mask", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.tree_mask_len = -1, v.p.tree_mask != nullptr; }},
    {"negative stride of a tree mask", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.tree_mask_row_stride = -1, v.p.tree_mask != nullptr; }},
    {"bits without a tree mask", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.tree_mask_len = 5, v.p.tree_mask == nullptr; }},
    {"misaligned tree mask", CUFLASH_ERROR_MISALIGNED,
     [](Victim& v) {
       const auto address = reinterpret_cast<uintptr_t>(v.p.tree_mask);
       return v.p.tree_mask = reinterpret_cast<const uint32_t*>(address + 2), address != 0;
     }},
    {"left padding without an array", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) {
       v.p.leftpad_k = nullptr;
       return v.p.flags |= CUFLASH_PROBLEM_LEFT_PADDED, true;
     }},
    {"packed without a total", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) { return v.p.total_q = -1, v.p.cu_seqlens_q != nullptr; }},
    {"number of parts", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.num_splits = v.is(kDecode) ? 1025 : 2, true; }},
    {"SM margin", CUFLASH_ERROR_INVALID_VALUE, [](Victim& v) { return v.p.sm_margin = -1, true; }},
    {"target_arch of a call", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.target_arch = 90, true; }},
    {"math mode", CUFLASH_ERROR_UNSUPPORTED, [](Victim& v) { return v.p.math_mode = 2, true; }},
    {"kernel that is not there", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.kernel = "fwd_magic", true; }},
    {"kernel of another operation", CUFLASH_ERROR_UNSUPPORTED,
     [](Victim& v) {
       const bool forward = v.is(Operation::kForward);
       if (v.draw.c.device == Device::kCpu)
         v.p.kernel = forward ? "bwd_reference_cpu" : "fwd_reference_cpu";
       else
         v.p.kernel = forward ? "bwd_reference" : "fwd_reference";
       return true;
     }},
    {"workspace too small", CUFLASH_ERROR_WORKSPACE_TOO_SMALL,
     [](Victim& v) {
       const size_t bytes = v.workspace_bytes();
       v.p.workspace_size = bytes - 1;
       return bytes > 0 && v.p.workspace != nullptr;
     }},
    {"v beside the prefix of k", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) {
       if (v.draw.v_is_k_prefix || v.draw.c.shape.dim_v() > v.draw.c.shape.head_dim) return false;
       return v.p.flags |= CUFLASH_PROBLEM_V_IS_K_PREFIX, !v.is(kBackward);
     }},
    {"prefix of k, backward", CUFLASH_ERROR_UNSUPPORTED,
     [](Victim& v) { return v.p.flags |= CUFLASH_PROBLEM_V_IS_K_PREFIX, v.is(kBackward); }},
    {"accumulation into 16 bits", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) {
       if (v.draw.c.wide || v.draw.c.dtype == Dtype::kF32) return false;
       if (v.is(kBackward))
         v.g.flags |= CUFLASH_GRADIENTS_ACCUMULATE;
       else
         v.p.flags |= CUFLASH_PROBLEM_ACCUMULATE;
       return true;
     }},
    {"delta given but not there", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) {
       v.g.flags |= CUFLASH_GRADIENTS_DELTA_GIVEN;
       return v.g.delta = nullptr, v.is(kBackward);
     }},
    {"keys of the problem in decode", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.p.k = v.c.k, v.is(kDecode); }},
    {"layout of the cache", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.layout = 3, v.is(kDecode); }},
    {"width of the ids", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.id_bits = 16, v.is(kDecode); }},
    {"pages without slots", CUFLASH_ERROR_INVALID_DIMENSION,
     [](Victim& v) { return v.c.page_size = 0, v.paged(); }},
    {"page size of a contiguous cache", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.page_size = 16, v.is(kDecode) && !v.paged(); }},
    {"no block table", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) { return v.c.block_table = nullptr, v.paged() && !v.draw.pool->csr; }},
    {"no page list", CUFLASH_ERROR_NULL_POINTER,
     [](Victim& v) { return v.c.page_indptr = nullptr, v.paged() && v.draw.pool->csr; }},
    {"chosen entries of pages", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.cache_batch_idx = v.c.lengths, v.paged() && v.c.lengths; }},
    {"fewer entries than sequences", CUFLASH_ERROR_DIMENSION_MISMATCH,
     [](Victim& v) {
       v.c.num_pages = v.p.batch - 1;
       return v.is(kDecode) && !v.paged() && !v.draw.chosen_entries && v.p.batch > 1;
     }},
    {"odd stride of int4", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return ++v.c.k.batch_stride, v.c.k.dtype == CUFLASH_INT4 && v.p.batch > 1; }},
    {"zero points of floats", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) {
       v.c.k_zero = v.p.q.data;
       return v.is(kDecode) && !is_integer(v.c.k.dtype);
     }},
    {"scales of v beside the prefix of k", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.v_scale = v.p.q.data, v.is(kDecode) && v.draw.v_is_k_prefix; }},
    {"channels of a scale", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.scale_group = 16, v.c.k_scale != nullptr; }},
    {"stride of scales that are not there", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.scale_head_stride = 1, v.is(kDecode) && !v.has_scales(); }},
    {"negative stride of scales", CUFLASH_ERROR_INVALID_VALUE,
     [](Victim& v) { return v.c.scale_slot_stride = -1, v.has_scales(); }},
    {"dtype of the scales", CUFLASH_ERROR_UNSUPPORTED_DTYPE,
     [](Victim& v) { return v.c.scale_dtype = CUFLASH_FP8_E4M3, v.has_scales(); }},
};

struct Target {
  Device device;
  Operation operation;
};
void PrintTo(const Target& target, std::ostream* out) { *out << name_of(target.operation); }

class InvalidDraws : public testing::TestWithParam<Target> {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(GetParam().device); }
};

TEST_P(InvalidDraws, Refused) {
  const int64_t draws = setting("CUFLASH_TEST_INVALID_DRAWS", 300);
  const int64_t seed = setting("CUFLASH_TEST_SEED", 1), only = setting("CUFLASH_TEST_DRAW", -1);
  int64_t refused = 0;
  for (int64_t n = 0; n < 20 * draws && refused < draws; ++n) {
    Random random(static_cast<uint64_t>(seed * 1'000'000 + n));
    const Draw draw = random_draw(random, GetParam().device, GetParam().operation, true);
    const Mistake& mistake = random.pick(kMistakes);
    if (only >= 0 && n != only) continue;
    const Shape& s = draw.c.shape;
    const int64_t rows = draw.c.packing_q.packed ? draw.c.rows(kQ).memory_rows : s.len_q;
    const int64_t keys = draw.c.packing_k.packed ? draw.c.rows(kK).memory_rows : s.len_k;
    if (s.batch * s.len_q * rows * keys == 0)
      continue;  // nothing is done then, whatever the pointers are
    DrawnCall drawn(draw, zero_inputs(draw.c));
    Call& call = drawn.call();
    Victim victim{draw, call.problem(), call.gradients(), call.cache()};
    if (!mistake.make(victim)) continue;
    ++refused;
    const Outcome outcome = drawn.run();
    EXPECT_EQ(outcome.status, mistake.status) << outcome.message;
    EXPECT_NE(outcome.message, "");
    if (!HasFailure()) continue;
    ADD_FAILURE() << mistake.name << ": " << describe(draw) << "\n  CUFLASH_TEST_SEED=" << seed
                  << " CUFLASH_TEST_DRAW=" << n
                  << " test_kernels --gtest_filter='InvalidDraws.Refused/"
                  << name_of(GetParam().device) << '_' << name_of(GetParam().operation) << "'";
    break;
  }
  RecordProperty("refused_draws", static_cast<int>(refused));
  if (only < 0) {
    EXPECT_EQ(refused, draws);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , InvalidDraws,
    testing::Values(Target{Device::kCpu, Operation::kForward}, Target{Device::kCpu, kBackward},
                    Target{Device::kCpu, kDecode}, Target{Device::kCuda, Operation::kForward},
                    Target{Device::kCuda, kBackward}, Target{Device::kCuda, kDecode}),
    [](const testing::TestParamInfo<Target>& test) {
      return std::string(name_of(test.param.device)) + "_" + name_of(test.param.operation);
    });

}  // namespace
}  // namespace cuflash_test
