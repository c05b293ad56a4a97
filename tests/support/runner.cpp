#include "support/runner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace cuflash_test {
namespace {

const char* const kRoleNames[kRoleCount] = {"q",    "k",     "v",     "o",     "lse",    "dO",
                                            "dq",   "dk",    "dv",    "bias",  "slopes", "sinks",
                                            "dlse", "delta", "dbias", "dsinks"};

// Of the tensors that the oracle knows.
Tensor Inputs::*const kInputs[kRoleCount] = {
    &Inputs::q,     &Inputs::k,     &Inputs::v,  &Inputs::o,    &Inputs::lse,    &Inputs::d_o,
    &Inputs::dq,    &Inputs::dk,    &Inputs::dv, &Inputs::bias, &Inputs::slopes, &Inputs::sinks,
    &Inputs::d_lse, &Inputs::delta, nullptr,     nullptr};
Tensor Results::*const kResults[kRoleCount] = {
    nullptr,      nullptr,         nullptr,          &Results::o,      &Results::lse, nullptr,
    &Results::dq, &Results::dk,    &Results::dv,     nullptr,          nullptr,       nullptr,
    nullptr,      &Results::delta, &Results::d_bias, &Results::d_sinks};

bool is_input(Role role, const Case& c) {
  const bool backward = c.operation == Operation::kBackward;
  switch (role) {
    case kO:
    case kLse:
      return backward;
    case kDelta:
      return c.delta == Delta::kGiven;
    case kDq:
    case kDk:
    case kDv:
    case kDbias:
    case kDsinks:
      return false;
    default:
      return true;
  }
}

// Whether an output has contents before the call.
bool is_updated(Role role, const Case& c) {
  if (role == kO || role == kLse) return c.accumulates();
  return (role == kDq || role == kDk || role == kDv) &&
         (c.gradient_flags & CUFLASH_GRADIENTS_ACCUMULATE) != 0;
}

bool is_used(Role role, const Case& c) {
  const bool backward = c.operation == Operation::kBackward;
  switch (role) {
    case kQ:
    case kK:
    case kV:
      return true;
    case kO:
      return c.delta != Delta::kGiven;
    case kLse:
      return c.want_lse || backward;
    case kBias:
      return c.bias.has_value();
    case kSlopes:
      return c.slopes.has_value();
    case kSinks:
      return c.sinks.has_value();
    case kDlse:
      return backward && c.d_lse;
    case kDelta:
      return backward && c.delta != Delta::kNone;
    case kDbias:
      return backward && c.bias.has_value();
    case kDsinks:
      return backward && c.sinks.has_value();
    default:
      return backward;
  }
}

Dtype dtype_of(Role role, const Case& c) {
  switch (role) {
    case kLse:
    case kDlse:
    case kDelta:
      return Dtype::kF32;
    case kO:
    case kDq:
    case kDk:
    case kDv:
      return c.output_dtype();
    case kBias:
    case kDbias:
      return c.bias->dtype;
    case kSlopes:
      return c.slopes->dtype;
    case kSinks:
    case kDsinks:
      return *c.sinks;
    default:
      return c.dtype;
  }
}

std::string join(const std::vector<int32_t>& list) {
  std::string text;
  for (const int32_t value : list) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

}  // namespace

Extents Case::extents(Role role) const {
  const Shape& s = shape;
  switch (role) {
    case kQ:
    case kDq:
      return {s.batch, s.heads_q, s.len_q, s.head_dim};
    case kO:
    case kDo:
      return {s.batch, s.heads_q, s.len_q, s.dim_v()};
    case kK:
    case kDk:
      return {s.batch, s.heads_kv, s.len_k, s.head_dim};
    case kV:
    case kDv:
      return {s.batch, s.heads_kv, s.len_k, s.dim_v()};
    case kBias:
    case kDbias: {
      const BiasSpec spec = bias.value_or(BiasSpec{});
      return {spec.per_batch ? s.batch : 1, spec.per_head ? s.heads_q : 1,
              spec.per_row ? s.len_q : 1, s.len_k};
    }
    case kSlopes:
      return {slopes && slopes->per_batch ? s.batch : 1, s.heads_q, 1, 1};
    case kSinks:
    case kDsinks:
      return {1, s.heads_q, 1, 1};
    default:
      return {s.batch, s.heads_q, s.len_q, 1};
  }
}

namespace {

bool has_query_rows(Role role) {
  return role == kQ || role == kO || role == kLse || role == kDo || role == kDq || role == kDlse ||
         role == kDelta;
}
bool has_key_rows(Role role) { return role == kK || role == kV || role == kDk || role == kDv; }

}  // namespace

std::vector<int32_t> Case::offsets(bool of_queries) const {
  const int64_t gap = (of_queries ? packing_q : packing_k).gap;
  std::vector<int32_t> list = {0};
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t rows = of_queries ? rows_of(b) : pad_of(b) + keys_of(b);
    list.push_back(static_cast<int32_t>(list.back() + rows + gap));
  }
  return list;
}

RowMap Case::rows(Role role) const {
  const Extents e = extents(role);
  if (!has_query_rows(role) && !has_key_rows(role)) return whole_rows(e);
  const bool queries = has_query_rows(role);
  const Packing& packing = queries ? packing_q : packing_k;
  const std::vector<int32_t> first = offsets(queries);
  RowMap map{packing.packed, packing.packed ? first.back() + packing.spare : e.rows, {}};
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t pad = queries ? 0 : pad_of(b);
    int64_t count = queries ? rows_of(b) : keys_of(b);
    // A cache has its slots whatever lengths a call is given.
    if (operation == Operation::kDecode && !queries) count = shape.len_k - pad;
    map.entries.push_back({(packing.packed ? first[static_cast<size_t>(b)] : 0) + pad, count});
  }
  return map;
}

Layout Case::layout(Role role) const {
  if (layouts[role]) return *layouts[role];
  if (role == kDlse || role == kDelta) return layout(kLse);
  if (role == kDbias) return layout(kBias);
  const Extents e = memory_extents(extents(role), rows(role));
  if (layout_seed == 0 || role == kSlopes || role == kSinks || role == kDsinks)
    return role == kBias ? bhsd_layout(e) : dense_layout(e);
  Random random(layout_seed * kRoleCount + role);
  return random_layout(e, random);
}

std::string describe(const Case& c) {
  std::ostringstream text;
  const Shape& s = c.shape;
  text << name_of(c.device) << ' ' << name_of(c.operation) << ' ' << name_of(c.dtype)
       << " kernel=" << (c.kernel.empty() ? "(chosen)" : c.kernel) << " B" << s.batch << " Hq"
       << s.heads_q << " Hkv" << s.heads_kv << " Sq" << s.len_q << " Sk" << s.len_k << " D"
       << s.head_dim;
  if (s.dim_v() != s.head_dim) text << " Dv" << s.head_dim_v;
  if (c.mask.causal) text << " causal";
  if (c.mask.causal || c.mask.window) text << " align=" << c.mask.align;
  if (c.mask.align == CUFLASH_ALIGN_OFFSET) text << " offset=" << c.mask.offset;
  if (c.mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS) text << " offsets=" << join(c.mask.offsets);
  if (c.mask.window) text << " window=(" << c.mask.left << ',' << c.mask.right << ')';
  if (c.scale_set) text << " scale=" << c.scale;
  if (!c.lengths.empty()) text << " lengths=" << join(c.lengths);
  if (!c.left_pad.empty()) text << " left_pad=" << join(c.left_pad);
  if (!c.lengths_q.empty()) text << " lengths_q=" << join(c.lengths_q);
  for (const Packing* packing : {&c.packing_q, &c.packing_k})
    if (packing->packed)
      text << (packing == &c.packing_q ? " packed_q" : " packed_k") << "(gap " << packing->gap
           << " spare " << packing->spare << ')';
  if (c.softcap > 0) text << " softcap=" << c.softcap;
  if (c.bias)
    text << " bias(" << name_of(c.bias->dtype) << (c.bias->per_batch ? " B" : " 1")
         << (c.bias->per_head ? "H" : "1") << (c.bias->per_row ? "S" : "1") << ')';
  if (c.slopes)
    text << " slopes(" << name_of(c.slopes->dtype) << (c.slopes->per_batch ? " per batch)" : ")");
  if (c.sinks) text << " sinks(" << name_of(*c.sinks) << ')';
  if (c.dropout.p > 0)
    text << " dropout(" << c.dropout.p << ' ' << c.dropout.seed << ' ' << c.dropout.offset << ')';
  if (c.tree)
    text << " tree(" << c.tree->bits << " bits" << (c.tree->per_batch ? "" : " for all")
         << " spare " << c.tree_spare << ')';
  if (c.wide) text << " wide";
  if (c.d_lse) text << " dlse";
  if (c.num_splits) text << " splits=" << c.num_splits;
  if (c.flags) text << " flags=" << c.flags;
  if (c.layout_seed) text << " layout_seed=" << c.layout_seed;
  for (int role = 0; role < kRoleCount; ++role)
    if (const auto& l = c.layouts[role])
      text << ' ' << kRoleNames[role] << "=(+" << l->offset << ' ' << l->batch_stride << ' '
           << l->head_stride << ' ' << l->row_stride << ')';
  if (!c.want_lse) text << " no_lse";
  return text.str();
}

namespace {

std::string family_of(const std::string& kernel) {
  for (int32_t i = 0; i < cuflash_kernel_count(); ++i) {
    cuflash_kernel_info_t info = {};
    info.struct_size = sizeof info;
    if (cuflash_kernel_info(i, &info) == CUFLASH_SUCCESS && kernel == info.name) return info.family;
  }
  return kernel;
}

// The forward of a backward case, dense, by the same family where it takes that.
Case make_forward(const Case& backward) {
  Case forward = backward;
  forward.operation = Operation::kForward;
  forward.kernel = family_of(backward.kernel);
  forward.flags = 0;
  forward.delta = Delta::kNone;
  forward.want_lse = true;
  forward.layout_seed = 0;
  for (auto& layout : forward.layouts) layout.reset();
  return forward;
}

}  // namespace

Inputs zero_inputs(const Case& c) {
  Inputs inputs;
  for (int i = 0; i < kRoleCount; ++i) {
    const Role role = static_cast<Role>(i);
    if (!is_used(role, c) || !(is_input(role, c) || is_updated(role, c))) continue;
    const Extents e = c.extents(role);
    inputs.*kInputs[i] = Tensor(e.batch, e.heads, e.rows, e.dim);
  }
  return inputs;
}

void add_forward_results(const Case& c, Inputs& inputs) {
  Case forward = make_forward(c);
  if (!forward.kernel.empty() && !accepts(forward, forward.kernel)) forward.kernel.clear();
  Results results = run_ok(forward, inputs);
  inputs.o = std::move(results.o);
  inputs.lse = std::move(results.lse);
}

Inputs make_inputs(const Case& c, DataKind kind, uint64_t seed) {
  Inputs inputs = zero_inputs(c);
  const int64_t large_channel =
      static_cast<int64_t>(seed % static_cast<uint64_t>(c.shape.head_dim));
  fill(inputs.q, kind, 1, seed, large_channel, c.dtype);
  fill(inputs.k, kind, 2, seed, large_channel, c.dtype);
  fill(inputs.v, kind, 3, seed, -1, c.dtype);
  if (c.bias) {
    fill(inputs.bias, DataKind::kNormal, 5, seed, -1, c.bias->dtype);
    Random random(seed);  // a bias may also hide keys
    for (double& value : inputs.bias.x)
      if (random.below(8) == 0) value = -std::numeric_limits<double>::infinity();
  }
  if (c.slopes) {
    fill(inputs.slopes, DataKind::kNormal, 6, seed, -1, c.slopes->dtype);
    for (double& value : inputs.slopes.x) value = round_to(c.slopes->dtype, value / 8);
  }
  if (c.sinks) fill(inputs.sinks, DataKind::kNormal, 7, seed, -1, *c.sinks);
  if (c.d_lse) fill(inputs.d_lse, DataKind::kNormal, 8, seed, -1, Dtype::kF32);
  if (c.operation == Operation::kBackward) {
    fill(inputs.d_o, kind, 4, seed, -1, c.dtype);
    add_forward_results(c, inputs);
  }
  return inputs;
}

Call::Call(const Case& c, const Inputs& inputs) : case_(c) {
  for (int i = 0; i < kRoleCount; ++i) {
    const Role role = static_cast<Role>(i);
    if (!is_used(role, c)) continue;
    tensors_[i] = std::make_unique<StridedTensor>(c.device, dtype_of(role, c), c.extents(role),
                                                  c.layout(role), c.rows(role));
    if (is_input(role, c) || is_updated(role, c)) tensors_[i]->write(inputs.*kInputs[i]);
  }

  cuflash_problem_init(&problem_, sizeof problem_);
  problem_.flags = c.flags;
  problem_.batch = c.shape.batch;
  problem_.heads_q = c.shape.heads_q;
  problem_.heads_kv = c.shape.heads_kv;
  problem_.len_q = c.shape.len_q;
  problem_.head_dim = c.shape.head_dim;
  problem_.head_dim_v = c.shape.head_dim_v;
  problem_.q = tensors_[kQ]->tensor();
  if (tensors_[kO]) problem_.o = tensors_[kO]->tensor();
  if (tensors_[kLse]) {
    const Layout& layout = tensors_[kLse]->layout();
    problem_.lse = static_cast<float*>(tensors_[kLse]->data());
    if (!layout.dense) {
      problem_.lse_batch_stride = layout.batch_stride;
      problem_.lse_head_stride = layout.head_stride;
      problem_.lse_row_stride = layout.row_stride;
    }
  }
  problem_.mask = c.mask.causal ? CUFLASH_MASK_CAUSAL : CUFLASH_MASK_NONE;
  problem_.mask_align = c.mask.align;
  problem_.mask_offset = c.mask.offset;
  if (c.mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS) {
    mask_offsets_ = std::make_unique<DeviceArray<int32_t>>(c.device, c.mask.offsets);
    problem_.mask_offsets = mask_offsets_->data();
  }
  if (c.mask.window) {
    problem_.flags |= CUFLASH_PROBLEM_WINDOW;
    problem_.window_left = c.mask.left;
    problem_.window_right = c.mask.right;
  }
  if (c.scale_set) {
    problem_.flags |= CUFLASH_PROBLEM_SCALE_SET;
    problem_.scale = c.scale;
  }
  problem_.num_splits = c.num_splits;
  problem_.kernel = c.kernel.empty() ? nullptr : case_.kernel.c_str();

  cuflash_gradients_init(&gradients_, sizeof gradients_);
  cuflash_kv_cache_init(&cache_, sizeof cache_);
  add_features(c);
  const cuflash_handle_t handle = handle_of(c.device);
  if (c.operation == Operation::kDecode) {
    cache_.k = tensors_[kK]->tensor();
    cache_.v = tensors_[kV]->tensor();
    cache_.max_len = c.shape.len_k;
    lengths_ = std::make_unique<DeviceArray<int32_t>>(c.device, c.lengths);
    cache_.lengths = lengths_->data();
    cuflash_decode_workspace_size(handle, &problem_, &cache_, &workspace_bytes_);
  } else {
    problem_.len_k = c.shape.len_k;
    problem_.k = tensors_[kK]->tensor();
    problem_.v = tensors_[kV]->tensor();
    if (c.operation == Operation::kForward) {
      cuflash_forward_workspace_size(handle, &problem_, &workspace_bytes_);
    } else {
      gradients_.d_o = tensors_[kDo]->tensor();
      gradients_.dq = tensors_[kDq]->tensor();
      gradients_.dk = tensors_[kDk]->tensor();
      gradients_.dv = tensors_[kDv]->tensor();
      cuflash_backward_workspace_size(handle, &problem_, &gradients_, &workspace_bytes_);
    }
  }
  if (workspace_bytes_ > 0) {
    workspace_ = std::make_unique<Buffer>(c.device, workspace_bytes_);
    workspace_->fill(0xff);
    problem_.workspace = workspace_->data();
    problem_.workspace_size = workspace_bytes_;
  }
}

const int32_t* Call::integers(const std::vector<int32_t>& values) {
  integers_.push_back(std::make_unique<DeviceArray<int32_t>>(case_.device, values));
  return integers_.back()->data();
}

// The bits packed; those that stand for no key, and the words between rows, are garbage.
void Call::add_tree_mask(const Case& c) {
  const TreeSpec& tree = *c.tree;
  const int64_t words = (tree.bits + 31) / 32 + c.tree_spare;
  const int64_t rows = (tree.per_batch ? c.shape.batch : 1) * c.shape.len_q;
  // At least one word: without rows there is a mask too.
  std::vector<int32_t> packed(static_cast<size_t>(std::max<int64_t>(1, rows * words)), 0x5a5a5a5a);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t bit = 0; bit < tree.bits; ++bit) {
      int32_t& word = packed[static_cast<size_t>(row * words + bit / 32)];
      const auto one = static_cast<int32_t>(1u << (bit % 32));
      word = tree.shown[static_cast<size_t>(row * tree.bits + bit)] != 0 ? word | one : word & ~one;
    }
  problem_.tree_mask = reinterpret_cast<const uint32_t*>(integers(packed));
  problem_.tree_mask_row_stride = words;
  problem_.tree_mask_batch_stride = tree.per_batch ? c.shape.len_q * words : 0;
  problem_.tree_mask_len = tree.bits == c.shape.len_q ? 0 : tree.bits;
}

void Call::add_features(const Case& c) {
  if (c.tree) add_tree_mask(c);
  if (c.packing_q.packed) {
    problem_.cu_seqlens_q = integers(c.offsets(true));
    problem_.total_q = c.rows(kQ).memory_rows;
  }
  if (c.packing_k.packed) {
    problem_.cu_seqlens_k = integers(c.offsets(false));
    problem_.total_k = c.rows(kK).memory_rows;
  }
  const auto used = [&](const Packing& packing, const std::vector<int32_t>& lengths, int64_t most) {
    if (!packing.packed || (packing.gap > 0 && !lengths.empty())) return integers(lengths);
    if (packing.gap == 0) return static_cast<const int32_t*>(nullptr);
    return integers(
        std::vector<int32_t>(static_cast<size_t>(c.shape.batch), static_cast<int32_t>(most)));
  };
  problem_.seqused_q = used(c.packing_q, c.lengths_q, c.shape.len_q);
  if (c.operation != Operation::kDecode)
    problem_.seqused_k = used(c.packing_k, c.lengths, c.shape.len_k);
  if (!c.left_pad.empty()) {
    problem_.flags |= CUFLASH_PROBLEM_LEFT_PADDED;
    problem_.leftpad_k = integers(c.left_pad);
  }
  problem_.softcap = c.softcap;
  if (c.bias) {
    const Layout& layout = tensors_[kBias]->layout();
    problem_.bias = data(kBias);
    problem_.bias_dtype = static_cast<int32_t>(c.bias->dtype);
    problem_.bias_batch_stride = c.bias->per_batch ? layout.batch_stride : 0;
    problem_.bias_head_stride = c.bias->per_head ? layout.head_stride : 0;
    problem_.bias_row_stride = c.bias->per_row ? layout.row_stride : 0;
  }
  if (c.slopes) {
    problem_.alibi_slopes = data(kSlopes);
    problem_.alibi_dtype = static_cast<int32_t>(c.slopes->dtype);
    problem_.alibi_batch_stride = c.slopes->per_batch ? c.shape.heads_q : 0;
  }
  if (c.sinks) {
    problem_.sinks = data(kSinks);
    problem_.sinks_dtype = static_cast<int32_t>(*c.sinks);
  }
  problem_.dropout_p = c.dropout.p;
  problem_.dropout_seed = c.dropout.seed;
  problem_.dropout_offset = c.dropout.offset;
  gradients_.flags = c.gradient_flags;
  if (c.delta == Delta::kGiven) gradients_.flags |= CUFLASH_GRADIENTS_DELTA_GIVEN;
  gradients_.dlse = static_cast<const float*>(data(kDlse));
  gradients_.delta = static_cast<float*>(data(kDelta));
  gradients_.dbias = data(kDbias);
  gradients_.dsinks = data(kDsinks);
}

Call::~Call() = default;

void Call::use_pool() {
  problem_.workspace = nullptr;
  problem_.workspace_size = 0;
}

void Call::poison_outputs() {
  for (int i = 0; i < kRoleCount; ++i)
    if (tensors_[i] && !is_input(static_cast<Role>(i), case_)) tensors_[i]->poison();
}

void Call::set_lengths(const std::vector<int32_t>& lengths) { lengths_->upload(lengths); }
void Call::set_mask_offsets(const std::vector<int32_t>& offsets) { mask_offsets_->upload(offsets); }

cuflash_status_t Call::launch(cuflash_stream_t stream) {
  const cuflash_handle_t handle = handle_of(case_.device);
  if (case_.operation == Operation::kForward)
    return cuflash_attention_forward(handle, &problem_, stream);
  if (case_.operation == Operation::kBackward)
    return cuflash_attention_backward(handle, &problem_, &gradients_, stream);
  return cuflash_attention_decode(handle, &problem_, &cache_, stream);
}

Outcome Call::collect(cuflash_status_t status) {
  Outcome outcome;
  outcome.status = status;
  if (status != CUFLASH_SUCCESS) outcome.message = cuflash_last_error();
  for (int i = 0; i < kRoleCount; ++i) {
    if (!tensors_[i]) continue;
    const bool must_not_change = is_input(static_cast<Role>(i), case_) || status != CUFLASH_SUCCESS;
    if (must_not_change ? !tensors_[i]->unchanged() : !tensors_[i]->surroundings_intact())
      outcome.damage += std::string(kRoleNames[i]) + ": written outside its elements; ";
  }
  if (workspace_ && !workspace_->guards_intact()) outcome.damage += "written past the workspace; ";
  if (status != CUFLASH_SUCCESS) return outcome;
  for (int i = 0; i < kRoleCount; ++i)
    if (tensors_[i] && !is_input(static_cast<Role>(i), case_))
      outcome.results.*kResults[i] = tensors_[i]->read();
  return outcome;
}

Outcome run(const Case& c, const Inputs& inputs) {
  Call call(c, inputs);
  const cuflash_status_t status = call.launch();
  synchronize(c.device);
  Outcome outcome = call.collect(status);
  EXPECT_EQ(outcome.damage, "") << describe(c);
  return outcome;
}

Results run_ok(const Case& c, const Inputs& inputs) {
  Outcome outcome = run(c, inputs);
  EXPECT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message << "\n  " << describe(c);
  return std::move(outcome.results);
}

Accuracy expect_accurate(const Case& c, const Inputs& inputs) {
  const Results got = run_ok(c, inputs);
  const Accuracy accuracy = judge(c, inputs, got);
  EXPECT_TRUE(accuracy.ok) << accuracy.where << ": " << accuracy.worst
                           << " times the allowed error\n  " << describe(c);
  return accuracy;
}

std::vector<std::string> kernels_of(Operation operation, Device device) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < cuflash_kernel_count(); ++i) {
    cuflash_kernel_info_t info = {};
    info.struct_size = sizeof info;
    if (cuflash_kernel_info(i, &info) != CUFLASH_SUCCESS || !info.built) continue;
    if (info.operation == static_cast<int32_t>(operation) &&
        (info.on_cpu != 0) == (device == Device::kCpu))
      names.push_back(info.name);
  }
  return names;
}

namespace {

// Whether a kernel takes a call of the case.
bool takes(Call& call, Case c, const std::string& kernel) {
  c.kernel = kernel;
  call.problem().kernel = c.kernel.c_str();
  const cuflash_handle_t handle = handle_of(c.device);
  size_t bytes = 0;
  const cuflash_status_t status =
      c.operation == Operation::kForward
          ? cuflash_forward_workspace_size(handle, &call.problem(), &bytes)
      : c.operation == Operation::kBackward
          ? cuflash_backward_workspace_size(handle, &call.problem(), &call.gradients(), &bytes)
          : cuflash_decode_workspace_size(handle, &call.problem(), &call.cache(), &bytes);
  EXPECT_TRUE(status == CUFLASH_SUCCESS || status == CUFLASH_ERROR_UNSUPPORTED)
      << cuflash_status_name(status) << ": " << cuflash_last_error() << "\n  " << describe(c);
  EXPECT_EQ(status == CUFLASH_SUCCESS, *cuflash_last_error() == '\0') << describe(c);
  return status == CUFLASH_SUCCESS;
}

}  // namespace

bool accepts(const Case& c, const std::string& kernel) {
  Call call(c, zero_inputs(c));
  return takes(call, c, kernel);
}

// One call for all: to make its tensors takes much longer than to ask.
std::vector<std::string> accepting_kernels(const Case& c) {
  Call call(c, zero_inputs(c));
  std::vector<std::string> names;
  for (const std::string& kernel : kernels_of(c.operation, c.device))
    if (takes(call, c, kernel)) names.push_back(kernel);
  return names;
}

Outcome run_merge(Device device, Dtype dtype, const std::vector<Results>& parts, bool base2,
                  uint64_t layout_seed) {
  const Tensor& first = parts[0].o;
  const Extents o_extents = {first.batch, first.heads, first.rows, first.dim};
  const Extents lse_extents = {first.batch, first.heads, first.rows, 1};
  // The parts lie one after the other, as a tensor of parts * batch entries.
  const int64_t count = static_cast<int64_t>(parts.size());
  const auto all_parts = [&](const Tensor Results::*member) {
    Tensor all(count * first.batch, first.heads, first.rows, (parts[0].*member).dim);
    size_t n = 0;
    for (const Results& part : parts)
      for (const double value : (part.*member).x) all.x[n++] = value;
    return all;
  };
  const Extents all_o = {count * first.batch, first.heads, first.rows, first.dim};
  const Extents all_lse = {count * first.batch, first.heads, first.rows, 1};
  StridedTensor o_parts(device, dtype, all_o, bhsd_layout(all_o));
  StridedTensor lse_parts(device, Dtype::kF32, all_lse, bhsd_layout(all_lse));
  o_parts.write(all_parts(&Results::o));
  lse_parts.write(all_parts(&Results::lse));
  Random random(layout_seed);
  StridedTensor o(device, dtype, o_extents,
                  layout_seed ? random_layout(o_extents, random) : dense_layout(o_extents));
  StridedTensor lse(device, Dtype::kF32, lse_extents, dense_layout(lse_extents));

  cuflash_merge_t merge;
  cuflash_merge_init(&merge, sizeof merge);
  merge.flags = base2 ? CUFLASH_MERGE_LSE_BASE2 : 0;
  merge.num_parts = count;
  merge.batch = first.batch;
  merge.heads = first.heads;
  merge.len = first.rows;
  merge.head_dim = first.dim;
  merge.parts = o_parts.tensor();
  merge.part_stride = first.batch * first.heads * first.rows * first.dim;
  merge.lse_parts = static_cast<const float*>(lse_parts.data());
  merge.lse_part_stride = first.batch * first.heads * first.rows;
  merge.o = o.tensor();
  merge.lse = static_cast<float*>(lse.data());

  Outcome outcome;
  outcome.status = cuflash_merge_states(handle_of(device), &merge, nullptr);
  if (outcome.status != CUFLASH_SUCCESS) outcome.message = cuflash_last_error();
  synchronize(device);
  if (!o_parts.unchanged() || !lse_parts.unchanged() || !o.surroundings_intact() ||
      !lse.surroundings_intact())
    outcome.damage = "merge wrote outside its output";
  EXPECT_EQ(outcome.damage, "");
  outcome.results.o = o.read();
  outcome.results.lse = lse.read();
  return outcome;
}

}  // namespace cuflash_test
