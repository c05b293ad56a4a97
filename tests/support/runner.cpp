#include "support/runner.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

namespace cuflash_test {
namespace {

const char* const kRoleNames[] = {"q", "k", "v", "o", "lse", "dO", "dq", "dk", "dv"};

bool is_input(Role role, Operation operation) {
  if (role == kQ || role == kK || role == kV || role == kDo) return true;
  return (role == kO || role == kLse) && operation == Operation::kBackward;
}

bool is_used(Role role, const Case& c) {
  if (role == kLse) return c.want_lse || c.operation == Operation::kBackward;
  return role <= kO || c.operation == Operation::kBackward;
}

std::string join(const std::vector<int32_t>& list) {
  std::string text;
  for (const int32_t value : list) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

}  // namespace

Extents Case::extents(Role role) const {
  const bool keys = role == kK || role == kV || role == kDk || role == kDv;
  return {shape.batch, keys ? shape.heads_kv : shape.heads_q, keys ? shape.len_k : shape.len_q,
          role == kLse ? 1 : shape.head_dim};
}

Layout Case::layout(Role role) const {
  if (layouts[role]) return *layouts[role];
  if (layout_seed == 0) return dense_layout(extents(role));
  Random random(layout_seed * kRoleCount + role);
  return random_layout(extents(role), random);
}

std::string describe(const Case& c) {
  std::ostringstream text;
  const Shape& s = c.shape;
  text << name_of(c.device) << ' ' << name_of(c.operation) << ' ' << name_of(c.dtype)
       << " kernel=" << (c.kernel.empty() ? "(chosen)" : c.kernel) << " B" << s.batch << " Hq"
       << s.heads_q << " Hkv" << s.heads_kv << " Sq" << s.len_q << " Sk" << s.len_k << " D"
       << s.head_dim;
  if (c.mask.causal) text << " causal";
  if (c.mask.causal || c.mask.window) text << " align=" << c.mask.align;
  if (c.mask.align == CUFLASH_ALIGN_OFFSET) text << " offset=" << c.mask.offset;
  if (c.mask.align == CUFLASH_ALIGN_DEVICE_OFFSETS) text << " offsets=" << join(c.mask.offsets);
  if (c.mask.window) text << " window=(" << c.mask.left << ',' << c.mask.right << ')';
  if (c.scale_set) text << " scale=" << c.scale;
  if (!c.lengths.empty()) text << " lengths=" << join(c.lengths);
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

// The forward of a backward case, by the same family, dense.
Case make_forward(const Case& backward) {
  Case forward = backward;
  forward.operation = Operation::kForward;
  forward.kernel = family_of(backward.kernel);
  forward.flags = 0;
  forward.want_lse = true;
  forward.layout_seed = 0;
  for (auto& layout : forward.layouts) layout.reset();
  return forward;
}

}  // namespace

Inputs zero_inputs(const Case& c) {
  const auto make = [&](Role role) {
    const Extents e = c.extents(role);
    return Tensor(e.batch, e.heads, e.rows, e.dim);
  };
  Inputs inputs;
  inputs.q = make(kQ);
  inputs.k = make(kK);
  inputs.v = make(kV);
  if (c.operation == Operation::kBackward) {
    inputs.d_o = make(kDo);
    inputs.o = make(kO);
    inputs.lse = make(kLse);
  }
  return inputs;
}

void add_forward_results(const Case& c, Inputs& inputs) {
  Case forward = make_forward(c);
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
  if (c.operation == Operation::kBackward) {
    fill(inputs.d_o, kind, 4, seed, -1, c.dtype);
    add_forward_results(c, inputs);
  }
  return inputs;
}

Call::Call(const Case& c, const Inputs& inputs) : case_(c) {
  const Tensor* values[kRoleCount] = {&inputs.q,   &inputs.k, &inputs.v, &inputs.o, &inputs.lse,
                                      &inputs.d_o, nullptr,   nullptr,   nullptr};
  for (int i = 0; i < kRoleCount; ++i) {
    const Role role = static_cast<Role>(i);
    if (!is_used(role, c)) continue;
    const Dtype dtype = role == kLse ? Dtype::kF32 : c.dtype;
    tensors_[i] = std::make_unique<StridedTensor>(c.device, dtype, c.extents(role), c.layout(role));
    if (is_input(role, c.operation)) tensors_[i]->write(*values[i]);
  }

  cuflash_problem_init(&problem_, sizeof problem_);
  problem_.flags = c.flags;
  problem_.batch = c.shape.batch;
  problem_.heads_q = c.shape.heads_q;
  problem_.heads_kv = c.shape.heads_kv;
  problem_.len_q = c.shape.len_q;
  problem_.head_dim = c.shape.head_dim;
  problem_.q = tensors_[kQ]->tensor();
  problem_.o = tensors_[kO]->tensor();
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

Call::~Call() = default;

void Call::use_pool() {
  problem_.workspace = nullptr;
  problem_.workspace_size = 0;
}

void Call::poison_outputs() {
  for (int i = 0; i < kRoleCount; ++i)
    if (tensors_[i] && !is_input(static_cast<Role>(i), case_.operation)) tensors_[i]->poison();
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
    const bool must_not_change =
        is_input(static_cast<Role>(i), case_.operation) || status != CUFLASH_SUCCESS;
    if (must_not_change ? !tensors_[i]->unchanged() : !tensors_[i]->surroundings_intact())
      outcome.damage += std::string(kRoleNames[i]) + ": written outside its elements; ";
  }
  if (workspace_ && !workspace_->guards_intact()) outcome.damage += "written past the workspace; ";
  if (status != CUFLASH_SUCCESS) return outcome;
  if (case_.operation == Operation::kBackward) {
    outcome.results.dq = tensors_[kDq]->read();
    outcome.results.dk = tensors_[kDk]->read();
    outcome.results.dv = tensors_[kDv]->read();
  } else {
    outcome.results.o = tensors_[kO]->read();
    if (tensors_[kLse]) outcome.results.lse = tensors_[kLse]->read();
  }
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

bool accepts(const Case& c, const std::string& kernel) {
  Case forced = c;
  forced.kernel = kernel;
  const cuflash_handle_t handle = handle_of(c.device);
  Call call(forced, zero_inputs(forced));
  size_t bytes = 0;
  const cuflash_status_t status =
      c.operation == Operation::kForward
          ? cuflash_forward_workspace_size(handle, &call.problem(), &bytes)
      : c.operation == Operation::kBackward
          ? cuflash_backward_workspace_size(handle, &call.problem(), &call.gradients(), &bytes)
          : cuflash_decode_workspace_size(handle, &call.problem(), &call.cache(), &bytes);
  EXPECT_TRUE(status == CUFLASH_SUCCESS || status == CUFLASH_ERROR_UNSUPPORTED)
      << cuflash_status_name(status) << ": " << cuflash_last_error() << "\n  " << describe(forced);
  EXPECT_EQ(status == CUFLASH_SUCCESS, *cuflash_last_error() == '\0') << describe(forced);
  return status == CUFLASH_SUCCESS;
}

std::vector<std::string> accepting_kernels(const Case& c) {
  std::vector<std::string> names;
  for (const std::string& kernel : kernels_of(c.operation, c.device))
    if (accepts(c, kernel)) names.push_back(kernel);
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
