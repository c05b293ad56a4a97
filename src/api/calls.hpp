// What the struct calls, the positional calls and the queries share: from a checked problem to a chosen
// kernel and its plan.
#pragma once

#include "api/checks.hpp"
#include "api/handle.hpp"

namespace cuflash {

struct Choice {
  const Variant* variant = nullptr;
  Plan plan;
};

// The name that forces a kernel, and where it came from for the message.
struct ForcedKernel {
  const char* name = nullptr;
  const char* source = "";
};
ForcedKernel forced_kernel(const Session& session, const char* problem_kernel);

// Opens the session that a query wants, a faked one for target_arch.
Status open_for_query(Session* session, cuflash_handle_t handle, const CallOptions& options);

// Adds the handle's options to a problem.
void apply_options(const Session& session, Problem* problem);

Status choose(const Session& session, const CheckedProblem& checked, Choice* choice);

// The struct calls without the frame of an entry point, which the positional functions have already.
Status attention_forward(cuflash_handle_t handle, const cuflash_problem_t* problem,
                         cuflash_stream_t stream);
Status attention_backward(cuflash_handle_t handle, const cuflash_problem_t* problem,
                          const cuflash_gradients_t* gradients, cuflash_stream_t stream);
Status attention_decode(cuflash_handle_t handle, const cuflash_problem_t* problem,
                        const cuflash_kv_cache_t* cache, cuflash_stream_t stream);

}  // namespace cuflash
