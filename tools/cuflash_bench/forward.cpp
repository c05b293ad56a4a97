// Forward: cuflash_attention_forward().
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "operation.hpp"

namespace cuflash_bench {
namespace {

cuflash_dtype public_dtype(Dtype dtype) {
  if (dtype == Dtype::kF32) return CUFLASH_F32;
  return dtype == Dtype::kF16 ? CUFLASH_F16 : CUFLASH_BF16;
}

cuflash_tensor_t dense(void* data) {
  cuflash_tensor_t tensor = {};
  tensor.data = data;
  tensor.flags = CUFLASH_TENSOR_DENSE;
  return tensor;
}

// Without outputs and workspace.
cuflash_problem_t problem_of(const Point& point, void* q, void* k, void* v) {
  auto problem = cuflash::make<cuflash_problem_t>();
  problem.batch = point.batch;
  problem.heads_q = point.heads;
  problem.heads_kv = point.heads_kv;
  problem.len_q = point.len_q;
  problem.len_k = point.len_k;
  problem.head_dim = point.head_dim;
  problem.q = dense(q);
  problem.k = dense(k);
  problem.v = dense(v);
  problem.o = dense(nullptr);
  problem.q.dtype = public_dtype(dtype_of(point.dtype));
  if (point.mask == "causal") problem.mask = CUFLASH_MASK_CAUSAL;
  if (point.mask == "window") {
    problem.flags = CUFLASH_PROBLEM_WINDOW;
    problem.window_left = point.window - 1;
    problem.window_right = 0;
  }
  return problem;
}

Json explain(cuflash_handle_t handle, const cuflash_problem_t& problem) {
  size_t needed = 0;
  cuflash::check(cuflash_forward_explain(handle, &problem, nullptr, 0, &needed));
  std::string text(needed, '\0');
  cuflash::check(cuflash_forward_explain(handle, &problem, text.data(), text.size(), nullptr));
  text.pop_back();  // the NUL
  return Json::parse(text);
}

class ForwardContestant : public Contestant {
 public:
  ForwardContestant(const cuflash_problem_t& problem, const Point& point, const Expected& expected,
                    std::string forced, Device* device)
      : problem_(problem),
        expected_(expected),
        forced_(std::move(forced)),
        device_(*device),
        o_bytes_(static_cast<size_t>(point.queries() * point.head_dim) * bytes_of(point.dtype)),
        lse_(static_cast<size_t>(point.queries())),
        o_memory_(device->allocate(o_bytes_)),
        lse_memory_(device->allocate(lse_bytes())) {
    problem_.o.data = o_memory_.get();
    problem_.lse = static_cast<float*>(lse_memory_.get());
    if (forced_ != "auto") problem_.kernel = forced_.c_str();
    const Json answer = explain(device->handle(), problem_);
    if (!answer["kernel"].is_string())
      throw std::runtime_error("no kernel takes this; cuflash-info --explain \"forward " +
                               words_of(point) + "\" says why");
    kernel_ = answer["kernel"];
    size_t workspace = 0;
    cuflash::check(cuflash_forward_workspace_size(device->handle(), &problem_, &workspace));
    if (workspace > 0) workspace_memory_ = device->allocate(workspace);
    problem_.workspace = workspace_memory_.get();
    problem_.workspace_size = workspace;
  }

  void call() override {
    cuflash::check(cuflash_attention_forward(device_.handle(), &problem_, device_.stream()));
  }

  void forget_result() override {
    device_.fill_with_nan(o_memory_.get(), o_bytes_);
    device_.fill_with_nan(lse_memory_.get(), lse_bytes());
  }

  double check() override {
    std::vector<unsigned char> o(o_bytes_);
    device_.read(o.data(), o_memory_.get(), o_bytes_);
    device_.read(lse_.data(), lse_memory_.get(), lse_bytes());
    return expected_.check(o.data(), lse_);
  }

  const std::string& kernel() const override { return kernel_; }

 private:
  size_t lse_bytes() const { return lse_.size() * sizeof lse_[0]; }

  cuflash_problem_t problem_;
  const Expected& expected_;
  const std::string forced_;  // the problem points to it
  Device& device_;
  size_t o_bytes_;
  std::vector<float> lse_;
  Memory o_memory_, lse_memory_, workspace_memory_;
  std::string kernel_;
};

class ForwardProblem : public Problem {
 public:
  ForwardProblem(const Point& point, const Inputs& inputs, Device* device)
      : point_(point),
        expected_(point, inputs),
        device_(*device),
        q_(tensor(inputs.q, point.queries())),
        k_(tensor(inputs.k, point.keys())),
        v_(tensor(inputs.v, point.keys())) {}

  std::unique_ptr<Contestant> contestant(const std::string& kernel) override {
    return std::make_unique<ForwardContestant>(problem_of(point_, q_.get(), k_.get(), v_.get()),
                                               point_, expected_, kernel, &device_);
  }
  double flops() const override { return point_.forward_flops(); }
  double bytes() const override { return point_.forward_bytes(); }

 private:
  // The block of the values over and over.
  Memory tensor(const NormalValues& values, int64_t rows) {
    const auto bytes = static_cast<size_t>(rows * point_.head_dim) * bytes_of(point_.dtype);
    const std::vector<unsigned char>& block = values.block();
    Memory memory = device_.allocate(bytes);
    for (size_t at = 0; at < bytes; at += block.size())
      device_.write(static_cast<unsigned char*>(memory.get()) + at, block.data(),
                    std::min(block.size(), bytes - at));
    return memory;
  }

  const Point point_;
  const Expected expected_;
  Device& device_;
  Memory q_, k_, v_;
};

}  // namespace

std::unique_ptr<Problem> forward_problem(const Point& point, Device* device) {
  return std::make_unique<ForwardProblem>(point, Inputs(dtype_of(point.dtype)), device);
}

}  // namespace cuflash_bench
