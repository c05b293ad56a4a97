// Problems of tens of millions of elements with simple contents. A Tensor holds a double for each element and converts it on
// its way to and from the device, which takes seconds for each call; here a tensor is an image of its dense memory,
// made of copies and compared as bytes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/targets.hpp"

namespace cuflash_test {

using Image = std::vector<unsigned char>;

// Fills `bytes` bytes with copies of their first `period`.
inline void repeat_first(unsigned char* memory, size_t period, size_t bytes) {
  for (size_t done = period; done < bytes; done += std::min(done, bytes - done))
    std::memcpy(memory + done, memory, std::min(done, bytes - done));
}

// A case without features that have tensors of their own, and its memory: written once, for all kernels that take it.
class BulkCall {
 public:
  explicit BulkCall(const Case& c) : case_(c), call_(smallest(c), zero_inputs(smallest(c))) {
    if (is_backward()) roles_.insert(roles_.end(), {kDo, kDq, kDk, kDv});
    for (const Role role : roles_)
      memory_[role] = std::make_unique<Buffer>(c.device, bytes_of_all(role));
    attach();
  }

  // Each element of a role: `values` in turn, over and over.
  void fill(Role role, const std::vector<double>& values) {
    Image& image = image_of(role);
    const size_t period = std::min(values.size() * item_bytes(role), image.size());
    for (size_t n = 0; n < period / item_bytes(role); ++n)
      store(dtype_of(role), round_to(dtype_of(role), values[n]), &image[n * item_bytes(role)]);
    repeat_first(image.data(), period, image.size());
    memory_[role]->upload(image.data());
  }

  // f(b, h) in all elements of a head.
  template <class F>
  void fill_heads(Role role, F f) {
    const Extents e = case_.extents(role);
    Image& image = image_of(role);
    const size_t head_bytes = static_cast<size_t>(e.rows * e.dim) * item_bytes(role);
    unsigned char* head = image.data();
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h = 0; h < e.heads; ++h, head += head_bytes) {
        store(dtype_of(role), round_to(dtype_of(role), f(b, h)), head);
        repeat_first(head, item_bytes(role), head_bytes);
      }
    memory_[role]->upload(image.data());
  }

  // What another call computed.
  void write(Role role, Image image) {
    images_[role] = std::move(image);
    memory_[role]->upload(images_[role].data());
  }

  // Whether a kernel, or one of a family, takes the case. It is then the one that runs.
  bool choose(const std::string& kernel) {
    case_.kernel = kernel;
    cuflash_problem_t& problem = call_.problem();
    problem.kernel = case_.kernel.c_str();
    size_t bytes = 0;
    const cuflash_status_t status = workspace_size(&bytes);
    EXPECT_TRUE(status == CUFLASH_SUCCESS || status == CUFLASH_ERROR_UNSUPPORTED)
        << cuflash_last_error() << "\n  " << describe(case_);
    if (status != CUFLASH_SUCCESS) return false;
    workspace_ = std::make_unique<Buffer>(case_.device, bytes);
    workspace_->fill(0xff);
    problem.workspace = workspace_->data();
    problem.workspace_size = bytes;
    return true;
  }

  // Every output begins as NaN; what is not an output must stay as it is.
  void run() {
    for (const Role role : roles_)
      if (is_output(role)) memory_[role]->fill(0xff);
    EXPECT_EQ(call_.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
    synchronize(case_.device);
    for (const Role role : roles_) {
      EXPECT_TRUE(memory_[role]->guards_intact()) << "role " << role;
      if (is_output(role)) continue;
      EXPECT_TRUE(download(role) == images_[role]) << "role " << role << " changed";
    }
    EXPECT_TRUE(workspace_->guards_intact());
  }

  Image read(Role role) const { return download(role); }

  bool is_finite(Role role) const {
    const Image& image = download(role);
    for (size_t at = 0; at < image.size(); at += item_bytes(role))
      if (!std::isfinite(load(dtype_of(role), &image[at]))) return false;
    return true;
  }

  // As expect_values, with one value for each row: f(b, h, row).
  template <class F>
  void expect_rows(const char* name, Role role, F expected, double ulps = 1,
                   double absolute = 0) const {
    check_rows(name, role, expected, [&](double value, double want) {
      return is_near(value, want, dtype_of(role), ulps, absolute);
    });
  }
  // As expect_lse.
  template <class F>
  void expect_lse(F expected) const {
    check_rows("lse", kLse, expected, is_near_lse);
  }

  const Case& problem() const { return case_; }

 private:
  // All that a call has besides extents and memory.
  static Case smallest(Case c) {
    c.shape = {1, 1, 1, 1, 1, c.shape.head_dim};
    return c;
  }

  bool is_backward() const { return case_.operation == Operation::kBackward; }
  bool is_output(Role role) const { return role >= (is_backward() ? kDq : kO); }
  Dtype dtype_of(Role role) const { return role == kLse ? Dtype::kF32 : case_.dtype; }
  size_t item_bytes(Role role) const { return static_cast<size_t>(bytes_of(dtype_of(role))); }
  size_t bytes_of_all(Role role) const {
    const Extents e = case_.extents(role);
    return static_cast<size_t>(e.batch * e.heads * e.rows * e.dim) * item_bytes(role);
  }
  Image& image_of(Role role) {
    images_[role].resize(bytes_of_all(role));
    return images_[role];
  }

  // Valid until the next one. New memory for each would take longer than the copy: the system clears its pages one by one.
  const Image& download(Role role) const {
    downloaded_.resize(memory_[role]->size());
    memory_[role]->download(downloaded_.data());
    return downloaded_;
  }

  void attach() {
    const Shape& s = case_.shape;
    const auto data = [&](Role role) { return memory_[role]->data(); };
    cuflash_problem_t& problem = call_.problem();
    problem.batch = s.batch;
    problem.heads_q = s.heads_q;
    problem.heads_kv = s.heads_kv;
    problem.len_q = s.len_q;
    problem.q.data = data(kQ);
    problem.o.data = data(kO);
    problem.lse = static_cast<float*>(data(kLse));
    if (case_.operation == Operation::kDecode) {
      call_.cache().max_len = s.len_k;
      call_.cache().k.data = data(kK);
      call_.cache().v.data = data(kV);
      return;
    }
    problem.len_k = s.len_k;
    problem.k.data = data(kK);
    problem.v.data = data(kV);
    if (!is_backward()) return;
    call_.gradients().d_o.data = data(kDo);
    call_.gradients().dq.data = data(kDq);
    call_.gradients().dk.data = data(kDk);
    call_.gradients().dv.data = data(kDv);
  }

  cuflash_status_t workspace_size(size_t* bytes) {
    const cuflash_handle_t handle = handle_of(case_.device);
    const cuflash_problem_t* problem = &call_.problem();
    if (case_.operation == Operation::kForward)
      return cuflash_forward_workspace_size(handle, problem, bytes);
    if (is_backward())
      return cuflash_backward_workspace_size(handle, problem, &call_.gradients(), bytes);
    return cuflash_decode_workspace_size(handle, problem, &call_.cache(), bytes);
  }

  // The first element that is not right(value, expected(b, h, row)) is reported. Most rows are equal to the one before, and
  // then need no conversion.
  template <class F, class Right>
  void check_rows(const char* name, Role role, F expected, Right right) const {
    const Extents e = case_.extents(role);
    const size_t item = item_bytes(role), row_bytes = static_cast<size_t>(e.dim) * item;
    const Image& image = download(role);
    double want_before = 0;
    size_t at = 0;
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h = 0; h < e.heads; ++h)
        for (int64_t r = 0; r < e.rows; ++r, at += row_bytes) {
          const double want = expected(b, h, r);
          const bool as_before = at > 0 && want == want_before &&
                                 std::memcmp(&image[at], &image[at - row_bytes], row_bytes) == 0;
          want_before = want;
          if (as_before) continue;
          for (int64_t ch = 0; ch < e.dim; ++ch) {
            const double value = load(dtype_of(role), &image[at + static_cast<size_t>(ch) * item]);
            if (right(value, want)) continue;
            ADD_FAILURE() << name << "[b" << b << " h" << h << " row " << r << " channel " << ch
                          << "] is " << value << ", not " << want;
            return;
          }
        }
  }

  Case case_;
  Call call_;
  std::vector<Role> roles_ = {kQ, kK, kV, kO, kLse};
  std::unique_ptr<Buffer> memory_[kRoleCount], workspace_;
  Image images_[kRoleCount];  // of what is read
  mutable Image downloaded_;
};

// Equal scores, and values of 1: o is 1 wherever there is a key.
inline void fill_with_ones(BulkCall& call) {
  call.fill(kQ, {0});
  call.fill(kK, {0});
  call.fill(kV, {1});
}

// Runs the call on each of the kernels, or families, that take it, then `body()`. At least one must.
template <class F>
void on_each(BulkCall& call, const std::vector<std::string>& kernels, F body) {
  int taken = 0;
  for (const std::string& kernel : kernels) {
    if (!call.choose(kernel)) continue;
    ++taken;
    SCOPED_TRACE(describe(call.problem()));
    call.run();
    body();
  }
  EXPECT_GT(taken, 0) << "no kernel takes " << describe(call.problem());
}

template <class F>
void on_every_kernel(BulkCall& call, F body) {
  on_each(call, kernels_of(call.problem().operation, call.problem().device), body);
}

template <class F>
void on_every_family(BulkCall& call, F body) {
  on_each(call, families_of(call.problem().operation, call.problem().device), body);
}

}  // namespace cuflash_test
