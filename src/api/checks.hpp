// From the caller's structs to a checked Problem. Every refusal names the argument, the value got and the
// values allowed. Nothing here touches a device.
#pragma once

#include <cstdint>

#include "core/append.hpp"
#include "core/features.hpp"
#include "common/status.hpp"
#include "cuflash.h"

namespace cuflash {

// kCall: pointers must be there, aligned and not overlapping. kQuery: only shapes and dtypes matter.
enum class Purpose { kCall, kQuery };

// The memory that one call may touch, for the checks that need a device.
struct MemoryUse {
  static constexpr int kMax = 28;  // the tensors and arrays of the backward pass with everything
  struct Entry {
    const char* name;
    const void* first;
    const void* last;  // last byte
  };
  Entry entries[kMax];
  int count = 0;

  void add(const char* name, const void* first, int64_t bytes) {
    if (first == nullptr || bytes <= 0) return;
    entries[count++] = {name, first, static_cast<const char*>(first) + bytes - 1};
  }
};

// Fields of a call that are not part of the mathematical problem.
struct CallOptions {
  void* workspace = nullptr;
  uint64_t workspace_size = 0;
  const char* kernel = nullptr;  // problem.kernel
  int32_t sm_margin = 0, target_arch = 0;
};

// Not copied: the problem points to its features, and to its append.
struct CheckedProblem {
  CheckedProblem() = default;
  CheckedProblem(const CheckedProblem&) = delete;
  CheckedProblem& operator=(const CheckedProblem&) = delete;

  Problem problem;
  Features features;
  AppendProblem append;
  CallOptions options;
  MemoryUse memory;
};

// What all operations share, of a problem whose operation is not known: no tensors but the dtype of q.
Status check_any(const cuflash_problem_t* problem, CheckedProblem* checked);
Status check_forward(const cuflash_problem_t* problem, Purpose purpose, CheckedProblem* checked);
Status check_backward(const cuflash_problem_t* problem, const cuflash_gradients_t* gradients,
                      Purpose purpose, CheckedProblem* checked);
Status check_decode(const cuflash_problem_t* problem, const cuflash_kv_cache_t* cache,
                    Purpose purpose, CheckedProblem* checked);
Status check_append(const cuflash_kv_cache_t* cache, const cuflash_kv_append_t* append,
                    Purpose purpose, CheckedProblem* checked);

struct CheckedMerge {
  MergeProblem problem;
  MemoryUse memory;
};
Status check_merge(const cuflash_merge_t* merge, CheckedMerge* checked);

struct CheckedWeights {
  CheckedProblem checked;  // its v and o have no part in it
  WeightsOutput out;
};
Status check_weights(const cuflash_problem_t* problem, const cuflash_weights_t* weights,
                     CheckedWeights* result);

// 0 to 2^127: finite times log2(e) as well, by which kernels that work with powers of 2 multiply it.
Status check_scale(const char* name, float scale);

// Zeroes `size` bytes and sets struct_size.
Status init_struct(void* pointer, size_t size, const char* name);

// The library's side of a sized output struct: how many bytes may be written.
Status check_output_size(uint32_t struct_size, size_t minimum, const char* name);

}  // namespace cuflash
