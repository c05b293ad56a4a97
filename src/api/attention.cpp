// The operations: check, choose a kernel, find workspace, launch.
#include <unistd.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdlib>

#include "api/calls.hpp"
#include "api/entry.hpp"
#include "api/known_blocks.hpp"
#include "api/tables.hpp"
#include "cpu/reference.hpp"
#ifdef CUFLASH_WITH_CUDA
#include "forward/reference/weights.hpp"
#include "merge/merge.hpp"
#endif

namespace cuflash {
namespace {

// ---- where pointers live ---------------------------------------------------------------------------------

thread_local KnownBlocks t_known_blocks;

// Without this check a wrong pointer is a fault in a kernel, and the context is lost.
Status check_cuda_pointer(const MemoryUse::Entry& entry, const Session& session) {
  if (t_known_blocks.contains(entry.first, session.device)) return CUFLASH_SUCCESS;
  device::PointerInfo info;
  CUFLASH_TRY(device::query_pointer(entry.first, &info));
  switch (info.place) {
    case device::Place::kDevice:
      CUFLASH_CHECK(info.device == session.device, CUFLASH_ERROR_WRONG_DEVICE,
                    "%s: %p is memory of device %d, the call runs on device %d", entry.name,
                    entry.first, info.device, session.device);
      t_known_blocks.add(entry.first, session.device);
      break;
    case device::Place::kUnknown:
      CUFLASH_CHECK(device::reads_pageable_memory(session.device), CUFLASH_ERROR_INVALID_VALUE,
                    "%s: %p is not device memory (for host memory there is CUFLASH_DEVICE_CPU)",
                    entry.name, entry.first);
      break;
    case device::Place::kManaged:
    case device::Place::kPinnedHost:
      break;
  }
  return CUFLASH_SUCCESS;
}

// Asks the kernel to copy the first and last byte of the memory: an address that this process cannot read
// (a device pointer, a wild one) gives EFAULT instead of a fault.
Status check_host_pointer(const MemoryUse::Entry& entry) {
  char bytes[2];
  const iovec local[] = {{bytes, 2}};
  const iovec remote[] = {{const_cast<void*>(entry.first), 1}, {const_cast<void*>(entry.last), 1}};
  const ssize_t copied = process_vm_readv(getpid(), local, 1, remote, 2, 0);
  // EPERM or ENOSYS where a sandbox forbids the call: then nothing is known.
  const bool readable = copied == 2 || (copied < 0 && errno != EFAULT);
  CUFLASH_CHECK(readable, CUFLASH_ERROR_INVALID_VALUE,
                "%s: %p to %p is not readable host memory (the CPU device takes host pointers)",
                entry.name, entry.first, entry.last);
  return CUFLASH_SUCCESS;
}

Status check_pointers(const Session& session, const MemoryUse& memory) {
  if (!session.options.check_pointers) return CUFLASH_SUCCESS;
  for (int i = 0; i < memory.count; ++i)
    CUFLASH_TRY(session.is_cpu ? check_host_pointer(memory.entries[i])
                               : check_cuda_pointer(memory.entries[i], session));
  return CUFLASH_SUCCESS;
}

// ---- workspace ----------------------------------------------------------------------------------------

// The caller's workspace, or a block of the allocator or the pool that goes back on the same stream.
class Workspace {
 public:
  Workspace(const Session& session, cuflash_stream_t stream) : session_(session), stream_(stream) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { (void)release(); }

  Status acquire(const CallOptions& options, size_t bytes) {
    if (options.workspace != nullptr) {
      CUFLASH_CHECK(options.workspace_size >= bytes, CUFLASH_ERROR_WORKSPACE_TOO_SMALL,
                    "problem.workspace_size: %llu bytes; this call needs %zu",
                    static_cast<unsigned long long>(options.workspace_size), bytes);
      memory_ = options.workspace;
      return CUFLASH_SUCCESS;
    }
    if (bytes == 0) return CUFLASH_SUCCESS;
    if (session_.allocator.allocate != nullptr) {
      memory_ =
          session_.allocator.allocate(session_.allocator.user, bytes, session_.device, stream_);
      CUFLASH_CHECK(memory_ != nullptr,
                    session_.is_cpu ? CUFLASH_ERROR_HOST_MEMORY : CUFLASH_ERROR_OUT_OF_MEMORY,
                    "the allocator gave no workspace of %zu bytes", bytes);
      owned_ = true;
      CUFLASH_CHECK(reinterpret_cast<uintptr_t>(memory_) % 256 == 0, CUFLASH_ERROR_MISALIGNED,
                    "the allocator gave %p, not a multiple of 256", memory_);
      return CUFLASH_SUCCESS;
    }
    if (session_.is_cpu) {
      memory_ = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
      CUFLASH_CHECK(memory_ != nullptr, CUFLASH_ERROR_HOST_MEMORY,
                    "no host memory for a workspace of %zu bytes", bytes);
    } else {
      CUFLASH_TRY(device::pool_allocate(bytes, session_.device, stream_, &memory_));
    }
    owned_ = true;
    return CUFLASH_SUCCESS;
  }

  Status release() {
    if (!owned_) return CUFLASH_SUCCESS;
    owned_ = false;
    if (session_.allocator.release != nullptr)
      session_.allocator.release(session_.allocator.user, memory_, session_.device, stream_);
    else if (session_.is_cpu)
      std::free(memory_);
    else
      return device::pool_free(memory_, stream_);
    return CUFLASH_SUCCESS;
  }

  void* memory() const { return memory_; }

 private:
  const Session& session_;
  cuflash_stream_t stream_;
  void* memory_ = nullptr;
  bool owned_ = false;
};

// ---- running --------------------------------------------------------------------------------------------

bool is_empty(const Problem& p) {
  if (p.operation == Operation::kAppend) return p.append->rows() == 0;
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  const int64_t keys = p.batch * p.heads_kv * p.len_k;
  if (p.operation != Operation::kBackward) return rows == 0;
  const Features* f = p.features;
  const bool sums = f != nullptr && (f->d_bias.data != nullptr || f->d_sinks.data != nullptr);
  return rows == 0 && keys == 0 && !sums;
}

Status check_stream(const Session& session, cuflash_stream_t stream) {
  CUFLASH_CHECK(!session.is_cpu || stream == nullptr, CUFLASH_ERROR_INVALID_VALUE,
                "stream: %p; the CPU device takes NULL", static_cast<void*>(stream));
  return CUFLASH_SUCCESS;
}

LaunchContext launch_context(const Session& session, cuflash_stream_t stream, void* workspace) {
  LaunchContext context;
  context.capabilities = session.capabilities;
  context.device = session.device;
  context.stream = stream;
  if (workspace != nullptr) {
    context.workspace = static_cast<char*>(workspace) + kWorkspaceHeader;
    context.counter = static_cast<uint32_t*>(workspace);
  }
  context.pool = session.pool;
  return context;
}

Status run(cuflash_handle_t handle, CheckedProblem* checked, cuflash_stream_t stream) {
  Session session;
  CUFLASH_TRY(session.open(handle, checked->options.sm_margin));
  CUFLASH_TRY(check_stream(session, stream));
  apply_options(session, &checked->problem);
  Choice choice;
  CUFLASH_TRY(choose(session, *checked, &choice));
  if (is_empty(checked->problem)) return CUFLASH_SUCCESS;
  CUFLASH_TRY(check_pointers(session, checked->memory));
  Workspace workspace(session, stream);
  CUFLASH_TRY(workspace.acquire(checked->options, choice.plan.workspace_bytes));
  log_line(CUFLASH_LOG_CALLS, "%s: B%lld Hq%lld Hkv%lld Sq%lld Sk%lld D%lld", choice.variant->name,
           static_cast<long long>(checked->problem.batch),
           static_cast<long long>(checked->problem.heads_q),
           static_cast<long long>(checked->problem.heads_kv),
           static_cast<long long>(checked->problem.len_q),
           static_cast<long long>(checked->problem.len_k),
           static_cast<long long>(checked->problem.head_dim));
  const LaunchContext context = launch_context(session, stream, workspace.memory());
  if (choice.plan.counts_tiles && !checked->problem.workspace_prepared)
    CUFLASH_TRY(device::fill_zero(context.counter, sizeof *context.counter, stream));
  CUFLASH_TRY(choice.variant->launch(checked->problem, choice.plan, context));
  return workspace.release();
}

Status run_merge(cuflash_handle_t handle, const CheckedMerge& checked, cuflash_stream_t stream) {
  Session session;
  CUFLASH_TRY(session.open(handle, 0));
  CUFLASH_TRY(check_stream(session, stream));
  const MergeProblem& p = checked.problem;
  if (p.batch * p.heads * p.len == 0) return CUFLASH_SUCCESS;
  CUFLASH_TRY(check_pointers(session, checked.memory));
  const LaunchContext context = launch_context(session, stream, nullptr);
  if (session.is_cpu) return merge_states_cpu(p, context);
#ifdef CUFLASH_WITH_CUDA
  return merge_states_cuda(p, context);
#else
  return fail(CUFLASH_ERROR_NOT_BUILT, "this library was built without CUDA");
#endif
}

Status run_weights(cuflash_handle_t handle, const CheckedWeights& weights,
                   cuflash_stream_t stream) {
  Session session;
  CUFLASH_TRY(session.open(handle, 0));
  CUFLASH_TRY(check_stream(session, stream));
  const Problem& p = weights.checked.problem;
  if (p.batch * p.heads_q * weights.out.num_rows == 0) return CUFLASH_SUCCESS;
  CUFLASH_TRY(check_pointers(session, weights.checked.memory));
  const LaunchContext context = launch_context(session, stream, nullptr);
  if (session.is_cpu) return attention_weights_cpu(p, weights.out, context);
#ifdef CUFLASH_WITH_CUDA
  return attention_weights_cuda(p, weights.out, context);
#else
  return fail(CUFLASH_ERROR_NOT_BUILT, "this library was built without CUDA");
#endif
}

// A problem of this dtype and head_dim for each operation, to ask variants whether they may ever take one.
Status preload_variants(const Session& session, const Problem* like) {
  Status status = CUFLASH_SUCCESS;
  for_each_variant(all_variants(), [&](const Variant& variant) {
    if (status != CUFLASH_SUCCESS || variant.preload == nullptr || variant.launch == nullptr)
      return;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
      Problem p;
      p.operation = variant.operation;
      p.batch = p.heads_q = p.heads_kv = p.len_q = p.len_k = 1;
      p.aligned16 = true;
      p.dtype = like != nullptr ? like->dtype : dtype;
      for (int64_t head_dim = 1; head_dim <= 256; ++head_dim) {
        p.head_dim = p.head_dim_v = like != nullptr ? like->head_dim : head_dim;
        if (refusal_of(variant, p, session.capabilities)) continue;
        status = variant.preload(session.device);
        return;
      }
    }
  });
  return status;
}

}  // namespace

ForcedKernel forced_kernel(const Session& session, const char* problem_kernel) {
  if (problem_kernel != nullptr && problem_kernel[0] != '\0')
    return {problem_kernel, "problem.kernel"};
  return {session.kernel, session.kernel_source};
}

Status open_for_query(Session* session, cuflash_handle_t handle, const CallOptions& options) {
  if (options.target_arch != 0)
    return session->open_faked(handle, options.target_arch, options.sm_margin);
  return session->open(handle, options.sm_margin);
}

void apply_options(const Session& session, Problem* problem) {
  problem->deterministic = problem->deterministic || session.options.deterministic;
  problem->batch_invariant = problem->batch_invariant || session.options.batch_invariant;
}

Status choose(const Session& session, const CheckedProblem& checked, Choice* choice) {
  const ForcedKernel forced = forced_kernel(session, checked.options.kernel);
  CUFLASH_TRY(select(all_variants(), checked.problem, session.capabilities, forced.name,
                     forced.source, &choice->variant));
  choice->plan = choice->variant->plan(checked.problem, session.capabilities);
  Plan& plan = choice->plan;
  if (plan.workspace_bytes > 0 || plan.counts_tiles) plan.workspace_bytes += kWorkspaceHeader;
  if (is_empty(checked.problem)) plan.workspace_bytes = 0;  // as nothing is launched
  return CUFLASH_SUCCESS;
}

Status attention_forward(cuflash_handle_t handle, const cuflash_problem_t* problem,
                         cuflash_stream_t stream) {
  CheckedProblem checked;
  CUFLASH_TRY(check_forward(problem, Purpose::kCall, &checked));
  return run(handle, &checked, stream);
}

Status attention_backward(cuflash_handle_t handle, const cuflash_problem_t* problem,
                          const cuflash_gradients_t* gradients, cuflash_stream_t stream) {
  CheckedProblem checked;
  CUFLASH_TRY(check_backward(problem, gradients, Purpose::kCall, &checked));
  return run(handle, &checked, stream);
}

Status attention_decode(cuflash_handle_t handle, const cuflash_problem_t* problem,
                        const cuflash_kv_cache_t* cache, cuflash_stream_t stream) {
  CheckedProblem checked;
  CUFLASH_TRY(check_decode(problem, cache, Purpose::kCall, &checked));
  return run(handle, &checked, stream);
}

}  // namespace cuflash

using namespace cuflash;

extern "C" {

cuflash_status_t cuflash_attention_forward(cuflash_handle_t handle,
                                           const cuflash_problem_t* problem,
                                           cuflash_stream_t stream) {
  return entry(__func__, [&] { return attention_forward(handle, problem, stream); });
}

cuflash_status_t cuflash_attention_backward(cuflash_handle_t handle,
                                            const cuflash_problem_t* problem,
                                            const cuflash_gradients_t* gradients,
                                            cuflash_stream_t stream) {
  return entry(__func__, [&] { return attention_backward(handle, problem, gradients, stream); });
}

cuflash_status_t cuflash_attention_decode(cuflash_handle_t handle, const cuflash_problem_t* problem,
                                          const cuflash_kv_cache_t* cache,
                                          cuflash_stream_t stream) {
  return entry(__func__, [&] { return attention_decode(handle, problem, cache, stream); });
}

cuflash_status_t cuflash_merge_states(cuflash_handle_t handle, const cuflash_merge_t* merge,
                                      cuflash_stream_t stream) {
  return entry(__func__, [&]() -> Status {
    CheckedMerge checked;
    CUFLASH_TRY(check_merge(merge, &checked));
    return run_merge(handle, checked, stream);
  });
}

cuflash_status_t cuflash_kv_cache_append(cuflash_handle_t handle, const cuflash_kv_cache_t* cache,
                                         const cuflash_kv_append_t* append,
                                         cuflash_stream_t stream) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_append(cache, append, Purpose::kCall, &checked));
    return run(handle, &checked, stream);
  });
}

cuflash_status_t cuflash_attention_weights(cuflash_handle_t handle,
                                           const cuflash_problem_t* problem,
                                           const cuflash_weights_t* weights,
                                           cuflash_stream_t stream) {
  return entry(__func__, [&]() -> Status {
    CheckedWeights checked;
    CUFLASH_TRY(check_weights(problem, weights, &checked));
    return run_weights(handle, checked, stream);
  });
}

cuflash_status_t cuflash_workspace_prepare(cuflash_handle_t handle, void* workspace, size_t bytes,
                                           cuflash_stream_t stream) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(workspace != nullptr || bytes == 0, CUFLASH_ERROR_NULL_POINTER,
                  "workspace: is NULL, but bytes is %zu", bytes);
    CUFLASH_CHECK(reinterpret_cast<uintptr_t>(workspace) % 256 == 0, CUFLASH_ERROR_MISALIGNED,
                  "workspace: address %p; a multiple of 256", workspace);
    CUFLASH_CHECK(bytes < (size_t{1} << 62), CUFLASH_ERROR_INVALID_VALUE, "bytes: %zu; below 2^62",
                  bytes);
    Session session;
    CUFLASH_TRY(session.open(handle, 0));
    CUFLASH_TRY(check_stream(session, stream));
    if (bytes == 0) return CUFLASH_SUCCESS;
    MemoryUse memory;
    memory.add("workspace", workspace, static_cast<int64_t>(bytes));
    CUFLASH_TRY(check_pointers(session, memory));
    if (!session.is_cpu) return device::fill_zero(workspace, bytes, stream);
    __builtin_memset(workspace, 0, bytes);
    return CUFLASH_SUCCESS;
  });
}

cuflash_status_t cuflash_preload(cuflash_handle_t handle, const cuflash_problem_t* problem) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    if (problem != nullptr) {
      // Only the dtype and head_dim count, and any operation's problem will do.
      CUFLASH_TRY(check_any(problem, &checked));
    }
    Session session;
    CUFLASH_TRY(session.open(handle, 0));
    if (session.is_cpu) return CUFLASH_SUCCESS;
    CUFLASH_TRY(preload_variants(session, problem != nullptr ? &checked.problem : nullptr));
#ifdef CUFLASH_WITH_CUDA
    CUFLASH_TRY(preload_merge(session.device));
    CUFLASH_TRY(preload_weights());
#endif
    return device::pool_prepare(session.device);
  });
}

cuflash_status_t cuflash_trim(cuflash_handle_t handle) {
  return entry(__func__, [&]() -> Status {
    Session session;
    CUFLASH_TRY(session.open(handle, 0));
    return session.is_cpu ? CUFLASH_SUCCESS : device::pool_trim(session.device);
  });
}

}  // extern "C"
