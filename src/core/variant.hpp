// A kernel as a value. Each family exports one ordered table of these; nothing else may choose a kernel.
#pragma once

#include <cstddef>

#include "common/capabilities.hpp"
#include "common/status.hpp"
#include "core/problem.hpp"

namespace cuflash {

class ThreadPool;

// Why a variant refuses a problem; null text means it accepts. The text completes "refused: ...".
struct Refusal {
  const char* reason = nullptr;
  explicit operator bool() const { return reason != nullptr; }
};

// What a launch may use. The workspace has the bytes that the variant asked for.
struct LaunchContext {
  Capabilities capabilities;
  int device = 0;          // CUDA ordinal
  void* stream = nullptr;  // cudaStream_t
  void* workspace = nullptr;
  uint32_t* counter = nullptr;  // of a plan that counts tiles; 0
  ThreadPool* pool = nullptr;   // CPU device
};

// What a variant will do for a problem: pure, host only.
struct Plan {
  size_t workspace_bytes = 0;
  int launches = 1;
  int32_t num_splits = 1;
  int64_t blocks = 0;         // of a kernel whose blocks take tile after tile
  bool counts_tiles = false;  // by LaunchContext::counter, which the kernel leaves at 0
};

// Begins every workspace, whatever the operation, so that a prepared one stays so: the counter, and no kernel's data.
constexpr size_t kWorkspaceHeader = 256;

struct Variant {
  const char* name;  // stable and unique: fwd_wmma_f16_d64
  const char* family;
  Operation operation;
  bool on_cpu;
  int tile_m, tile_n, threads, shared_memory;
  int rank;  // preference among the variants that accept
  Refusal (*accepts)(const Variant&, const Problem&, const Capabilities&);
  Plan (*plan)(const Problem&, const Capabilities&);
  // Never allocates, never synchronises. Null: not in this build.
  Status (*launch)(const Problem&, const Plan&, const LaunchContext&);
  // Loads the kernels on the current device and sets their attributes; null: nothing to load.
  Status (*preload)(int device);
  // The preference where it depends on the problem, at most `rank`; null: `rank`.
  int (*rank_for)(const Problem&) = nullptr;
};

constexpr Variant with_rank_for(Variant variant, int (*rank_for)(const Problem&)) {
  variant.rank_for = rank_for;
  return variant;
}

// The lengths of a batch-invariant problem may be those of a sequence's longest neighbour: they do not count.
inline int rank_of(const Variant& variant, const Problem& problem) {
  const bool fixed = variant.rank_for == nullptr || problem.batch_invariant;
  return fixed ? variant.rank : variant.rank_for(problem);
}

// A table, and what all its rows have in common, so that a choice need not look at each of them.
struct VariantSpan {
  const Variant* data = nullptr;
  size_t count = 0;
  unsigned operations = 0;  // bits 1 << operation of those that have a row
  bool on_cpu = false;
  int best_rank = 0;
};

// The rows are all of one device.
constexpr VariantSpan span_of(const Variant* rows, size_t count) noexcept {
  VariantSpan span = {rows, count, 0, count > 0 && rows[0].on_cpu, 0};
  for (size_t i = 0; i < count; ++i) {
    span.operations |= 1u << static_cast<unsigned>(rows[i].operation);
    if (rows[i].rank > span.best_rank) span.best_rank = rows[i].rank;
  }
  return span;
}
template <size_t kRows>
constexpr VariantSpan span_of(const Variant (&rows)[kRows]) noexcept {
  return span_of(rows, kRows);
}

}  // namespace cuflash
