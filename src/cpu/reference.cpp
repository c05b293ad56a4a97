// The reference family on the CPU device: rows spread over threads.
#include "cpu/reference.hpp"

#include "attention/append.hpp"
#include "attention/reference_rows.hpp"
#include "common/dtype_dispatch.hpp"
#include "common/thread_pool.hpp"
#include "core/plans.hpp"
#include "cuflash_built.hpp"

namespace cuflash {
namespace {

template <class F>
void for_each_row(const LaunchContext& context, int64_t count, F f) {
  context.pool->parallel_for(count, context.capabilities.cpu_threads,
                             [&](int64_t begin, int64_t end) {
                               for (int64_t i = begin; i < end; ++i) f(SingleLane{}, i);
                             });
}

[[maybe_unused]] Status forward(const Problem& problem, const Plan&, const LaunchContext& context) {
  const FullProblem p(problem);
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::Type;
    for_each_row(context, query_rows(p),
                 [&](auto team, int64_t i) { forward_index<T>(team, p, i); });
    return CUFLASH_SUCCESS;
  });
}

[[maybe_unused]] Status backward(const Problem& problem, const Plan&,
                                 const LaunchContext& context) {
  const FullProblem p(problem);
  ReferenceScratch scratch;
  scratch.delta = delta_scratch(p, context.workspace);
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::Type;
    for_each_row(context, query_rows(p),
                 [&](auto team, int64_t i) { dq_index<T>(team, p, scratch, i); });
    for_each_row(context, key_rows(p),
                 [&](auto team, int64_t i) { dkv_index<T>(team, p, scratch, i); });
    for_each_row(context, modifier_gradients(p),
                 [&](auto team, int64_t i) { modifier_index<T>(team, p, scratch, i); });
    return CUFLASH_SUCCESS;
  });
}

[[maybe_unused]] Status decode(const Problem& problem, const Plan& plan,
                               const LaunchContext& context) {
  if (plan.num_splits == 1) return forward(problem, plan, context);
  const FullProblem p(problem);
  ReferenceScratch scratch;
  scratch.num_splits = plan.num_splits;
  scratch.parts = split_merge(problem, plan.num_splits, context.workspace);
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::Type;
    for_each_row(context, plan.num_splits * query_rows(p),
                 [&](auto team, int64_t i) { split_index<T>(team, p, scratch, i); });
    for_each_row(context, query_rows(p),
                 [&](auto team, int64_t i) { combine_index<T>(team, p, scratch, i); });
    return CUFLASH_SUCCESS;
  });
}

[[maybe_unused]] Status append(const Problem& problem, const Plan&, const LaunchContext& context) {
  const AppendProblem& p = *problem.append;
  return dispatch_dtype(problem.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::Type;
    for_each_row(context, p.rows(), [&](auto team, int64_t i) { append_index<T>(team, p, i); });
    return CUFLASH_SUCCESS;
  });
}

constexpr Variant kRows[] = {
    {"fwd_reference_cpu", "reference", Operation::kForward, true, 1, 1, 0, 0, 0, accept_all,
     plan_nothing, CUFLASH_ENTRY_fwd_reference_cpu(forward), nullptr},
    {"bwd_reference_cpu", "reference", Operation::kBackward, true, 1, 1, 0, 0, 0, accept_all,
     plan_reference_backward, CUFLASH_ENTRY_bwd_reference_cpu(backward), nullptr},
    {"dec_reference_cpu", "reference", Operation::kDecode, true, 1, 1, 0, 0, 0, accept_all,
     plan_splits, CUFLASH_ENTRY_dec_reference_cpu(decode), nullptr},
    {"append_reference_cpu", "reference", Operation::kAppend, true, 1, 1, 0, 0, 0, accept_all,
     plan_nothing, CUFLASH_ENTRY_append_reference_cpu(append), nullptr},
};

}  // namespace

extern const VariantSpan kCpuReference = span_of(kRows);

Status merge_states_cpu(const MergeProblem& p, const LaunchContext& context) {
  return dispatch_dtype(p.parts.dtype, [&](auto in) {
    return dispatch_dtype(p.o.dtype, [&](auto out) -> Status {
      for_each_row(context, p.batch * p.heads * p.len, [&](auto team, int64_t i) {
        merge_index<typename decltype(in)::Type, typename decltype(out)::Type>(team, p, i);
      });
      return CUFLASH_SUCCESS;
    });
  });
}

Status attention_weights_cpu(const Problem& problem, const WeightsOutput& out,
                             const LaunchContext& context) {
  const FullProblem p(problem);
  return dispatch_dtype(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::Type;
    for_each_row(context, p.batch * p.heads_q * out.num_rows,
                 [&](auto team, int64_t i) { weights_index<T>(team, p, out, i); });
    return CUFLASH_SUCCESS;
  });
}

}  // namespace cuflash
