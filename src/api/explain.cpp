// Queries: workspace sizes, which kernel a call takes and why not another, and the tables themselves.
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "api/calls.hpp"
#include "api/entry.hpp"
#include "api/tables.hpp"

namespace cuflash {
namespace {

// Appends to a buffer of fixed capacity and counts what would have fitted. All text that reaches it is the
// library's own (names and reasons), without characters that JSON would escape.
class Text {
 public:
  Text(char* buffer, size_t capacity) : buffer_(buffer), capacity_(capacity) {
    if (capacity_ > 0) buffer_[0] = '\0';
  }

  [[gnu::format(printf, 2, 3)]] void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const size_t room = length_ < capacity_ ? capacity_ - length_ : 0;
    const int n = std::vsnprintf(room > 0 ? buffer_ + length_ : nullptr, room, format, arguments);
    va_end(arguments);
    if (n > 0) length_ += static_cast<size_t>(n);
  }

  size_t needed() const { return length_ + 1; }

 private:
  char* buffer_;
  size_t capacity_;
  size_t length_ = 0;
};

const char* operation_name(Operation operation) {
  switch (operation) {
    case Operation::kForward:
      return "forward";
    case Operation::kBackward:
      return "backward";
    case Operation::kDecode:
      return "decode";
    case Operation::kAppend:
      return "append";
    case Operation::kMerge:
      break;
  }
  return "merge";
}

Status explain(cuflash_handle_t handle, CheckedProblem* checked, char* buffer, size_t capacity,
               size_t* needed) {
  CUFLASH_CHECK(buffer != nullptr || capacity == 0, CUFLASH_ERROR_NULL_POINTER,
                "buffer: is NULL, but capacity is %zu", capacity);
  Session session;
  CUFLASH_TRY(open_for_query(&session, handle, checked->options));
  apply_options(session, &checked->problem);
  const Problem& problem = checked->problem;
  const Capabilities& caps = session.capabilities;
  Choice choice;
  const Status chosen = choose(session, *checked, &choice);
  // That nothing takes the problem is an answer; a kernel name that does not exist is a mistake.
  if (chosen != CUFLASH_SUCCESS && chosen != CUFLASH_ERROR_UNSUPPORTED &&
      chosen != CUFLASH_ERROR_NOT_BUILT)
    return chosen;

  Text text(buffer, capacity);
  text.add("{\"operation\": \"%s\", ", operation_name(problem.operation));
  if (caps.is_cpu)
    text.add("\"device\": \"cpu\", ");
  else
    text.add("\"device\": \"sm_%d\", ", caps.arch);
  if (chosen == CUFLASH_SUCCESS)
    text.add(
        "\"kernel\": \"%s\", \"family\": \"%s\", \"launches\": %d, \"workspace_bytes\": %zu, "
        "\"num_splits\": %d, ",
        choice.variant->name, choice.variant->family, choice.plan.launches,
        choice.plan.workspace_bytes, choice.plan.num_splits);
  else
    text.add(
        "\"kernel\": null, \"family\": null, \"launches\": 0, \"workspace_bytes\": 0, "
        "\"num_splits\": 0, ");
  text.add("\"kernels\": [");
  const char* separator = "";
  for_each_variant(all_variants(), [&](const Variant& variant) {
    if (variant.operation != problem.operation) return;
    const Refusal refusal = refusal_of(variant, problem, caps);
    text.add(
        "%s{\"name\": \"%s\", \"family\": \"%s\", \"rank\": %d, \"accepted\": %s, \"reason\": ",
        separator, variant.name, variant.family, rank_of(variant, problem),
        refusal ? "false" : "true");
    if (refusal)
      text.add("\"%s\"}", refusal.reason);
    else
      text.add("null}");
    separator = ", ";
  });
  text.add("]}");
  if (needed != nullptr) *needed = text.needed();
  return CUFLASH_SUCCESS;
}

Status workspace_size(cuflash_handle_t handle, CheckedProblem* checked, size_t* bytes) {
  CUFLASH_CHECK(bytes != nullptr, CUFLASH_ERROR_NULL_POINTER, "bytes: is NULL");
  Session session;
  CUFLASH_TRY(open_for_query(&session, handle, checked->options));
  apply_options(session, &checked->problem);
  Choice choice;
  CUFLASH_TRY(choose(session, *checked, &choice));
  *bytes = choice.plan.workspace_bytes;
  return CUFLASH_SUCCESS;
}

}  // namespace
}  // namespace cuflash

using namespace cuflash;

extern "C" {

cuflash_status_t cuflash_forward_workspace_size(cuflash_handle_t handle,
                                                const cuflash_problem_t* problem, size_t* bytes) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_forward(problem, Purpose::kQuery, &checked));
    return workspace_size(handle, &checked, bytes);
  });
}

cuflash_status_t cuflash_backward_workspace_size(cuflash_handle_t handle,
                                                 const cuflash_problem_t* problem,
                                                 const cuflash_gradients_t* gradients,
                                                 size_t* bytes) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_backward(problem, gradients, Purpose::kQuery, &checked));
    return workspace_size(handle, &checked, bytes);
  });
}

cuflash_status_t cuflash_decode_workspace_size(cuflash_handle_t handle,
                                               const cuflash_problem_t* problem,
                                               const cuflash_kv_cache_t* cache, size_t* bytes) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_decode(problem, cache, Purpose::kQuery, &checked));
    return workspace_size(handle, &checked, bytes);
  });
}

cuflash_status_t cuflash_append_workspace_size(cuflash_handle_t handle,
                                               const cuflash_kv_cache_t* cache,
                                               const cuflash_kv_append_t* append, size_t* bytes) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_append(cache, append, Purpose::kQuery, &checked));
    return workspace_size(handle, &checked, bytes);
  });
}

cuflash_status_t cuflash_forward_explain(cuflash_handle_t handle, const cuflash_problem_t* problem,
                                         char* buffer, size_t capacity, size_t* needed) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_forward(problem, Purpose::kQuery, &checked));
    return explain(handle, &checked, buffer, capacity, needed);
  });
}

cuflash_status_t cuflash_backward_explain(cuflash_handle_t handle, const cuflash_problem_t* problem,
                                          const cuflash_gradients_t* gradients, char* buffer,
                                          size_t capacity, size_t* needed) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_backward(problem, gradients, Purpose::kQuery, &checked));
    return explain(handle, &checked, buffer, capacity, needed);
  });
}

cuflash_status_t cuflash_decode_explain(cuflash_handle_t handle, const cuflash_problem_t* problem,
                                        const cuflash_kv_cache_t* cache, char* buffer,
                                        size_t capacity, size_t* needed) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_decode(problem, cache, Purpose::kQuery, &checked));
    return explain(handle, &checked, buffer, capacity, needed);
  });
}

cuflash_status_t cuflash_append_explain(cuflash_handle_t handle, const cuflash_kv_cache_t* cache,
                                        const cuflash_kv_append_t* append, char* buffer,
                                        size_t capacity, size_t* needed) {
  return entry(__func__, [&]() -> Status {
    CheckedProblem checked;
    CUFLASH_TRY(check_append(cache, append, Purpose::kQuery, &checked));
    return explain(handle, &checked, buffer, capacity, needed);
  });
}

int32_t cuflash_kernel_count(void) {
  int32_t count = 0;
  for_each_variant(all_variants(), [&](const Variant&) { ++count; });
  return count;
}

cuflash_status_t cuflash_kernel_info(int32_t index, cuflash_kernel_info_t* info) {
  return entry(__func__, [&]() -> Status {
    CUFLASH_CHECK(info != nullptr, CUFLASH_ERROR_NULL_POINTER, "info: is NULL");
    const uint32_t size = info->struct_size;
    CUFLASH_TRY(check_output_size(size, offsetof(cuflash_kernel_info_t, operation), "info"));
    const Variant* found = nullptr;
    int32_t count = 0;
    for_each_variant(all_variants(), [&](const Variant& variant) {
      if (count++ == index) found = &variant;
    });
    CUFLASH_CHECK(found != nullptr, CUFLASH_ERROR_INVALID_VALUE, "index: %d; 0 to %d", index,
                  count - 1);
    cuflash_kernel_info_t filled = {};
    filled.struct_size = size;
    filled.built = found->launch != nullptr;
    filled.name = found->name;
    filled.family = found->family;
    filled.operation = static_cast<int32_t>(found->operation);
    filled.on_cpu = found->on_cpu;
    filled.tile_m = found->tile_m;
    filled.tile_n = found->tile_n;
    filled.threads = found->threads;
    filled.shared_memory = found->shared_memory;
    filled.rank = found->rank;
    std::memcpy(info, &filled, size < sizeof filled ? size : sizeof filled);
    return CUFLASH_SUCCESS;
  });
}

}  // extern "C"
