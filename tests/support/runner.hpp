// Runs attention problems through the struct API on a device, with everything around the call guarded.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/accuracy.hpp"
#include "support/data.hpp"
#include "support/device.hpp"
#include "support/layout.hpp"
#include "support/oracle.hpp"

namespace cuflash_test {

enum Role {
  kQ,
  kK,
  kV,
  kO,
  kLse,
  kDo,
  kDq,
  kDk,
  kDv,
  kBias,
  kSlopes,
  kSinks,
  kDlse,
  kDelta,
  kDbias,
  kDsinks,
  kRoleCount
};

// How the rows of one side lie in memory.
struct Packing {
  bool packed = false;  // one sequence after the other, told by cu_seqlens
  int64_t gap = 0;      // unused rows after each packed sequence, told by seqused
  int64_t spare = 0;    // rows past the last packed sequence
};

enum class Delta { kNone, kWanted, kGiven };

// A problem with all that the way of calling adds.
struct Case : Problem {
  Device device = Device::kCpu;
  std::string kernel;  // a name to force; empty: the library chooses
  uint32_t flags = 0;  // further problem flags
  uint32_t gradient_flags = 0;
  int32_t num_splits = 0;
  Packing packing_q, packing_k;
  Delta delta = Delta::kNone;
  bool want_lse = true;
  int64_t tree_spare = 0;                     // words after each row of the tree mask
  uint64_t layout_seed = 0;                   // not 0: each tensor has a random layout
  std::optional<Layout> layouts[kRoleCount];  // for single tensors, stronger than the seed

  bool accumulates() const { return (flags & CUFLASH_PROBLEM_ACCUMULATE) != 0; }
  Extents extents(Role role) const;
  RowMap rows(Role role) const;
  std::vector<int32_t> offsets(bool of_queries) const;  // cu_seqlens
  Layout layout(Role role) const;
};

// One line from which a case can be built again.
std::string describe(const Case& c);
// Inputs of the case: q 1, k 2, v 3, dO 4 of the generators, and what its features need. For kBackward o and lse are those of the
// library's own forward, by the same family on the same device: P is rebuilt as exp(s - lse), so an LSE of scores
// that were rounded in another order shows, in fp32 or with huge scores, as an error that no kernel can avoid.
Inputs make_inputs(const Case& c, DataKind kind, uint64_t seed = 1);
Inputs zero_inputs(const Case& c);
// Fills inputs.o and inputs.lse as that forward gives them.
void add_forward_results(const Case& c, Inputs& inputs);

struct Outcome {
  cuflash_status_t status = CUFLASH_SUCCESS;
  std::string message;
  Results results;     // where the call succeeded
  std::string damage;  // what the call wrote that it must not have written; empty: nothing
};

// A case with its memory on the device, so that it can be launched again, on streams and under capture.
class Call {
 public:
  Call(const Case& c, const Inputs& inputs);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Without workspace of its own the library takes it from its pool.
  void use_pool();
  void poison_outputs();
  cuflash_status_t launch(cuflash_stream_t stream = nullptr);
  // After the work is done.
  Outcome collect(cuflash_status_t status);

  void set_lengths(const std::vector<int32_t>& lengths);
  void set_mask_offsets(const std::vector<int32_t>& offsets);
  StridedTensor& tensor(Role role) { return *tensors_[role]; }
  cuflash_problem_t& problem() { return problem_; }
  cuflash_gradients_t& gradients() { return gradients_; }
  cuflash_kv_cache_t& cache() { return cache_; }
  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  Case case_;
  std::unique_ptr<StridedTensor> tensors_[kRoleCount];
  // Sets what the features add to the structs.
  void add_features(const Case& c);
  const int32_t* integers(const std::vector<int32_t>& values);
  void add_tree_mask(const Case& c);
  void* data(Role role) const { return tensors_[role] ? tensors_[role]->data() : nullptr; }

  std::unique_ptr<DeviceArray<int32_t>> lengths_, mask_offsets_;
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> integers_;
  std::unique_ptr<Buffer> workspace_;
  size_t workspace_bytes_ = 0;
  cuflash_problem_t problem_;
  cuflash_gradients_t gradients_;
  cuflash_kv_cache_t cache_;
};

// Launch, wait, collect. Damage is a test failure.
Outcome run(const Case& c, const Inputs& inputs);
// As run(); a refusal is a test failure too.
Results run_ok(const Case& c, const Inputs& inputs);
// Runs the case and judges the results by the accuracy rule; failures name the case.
Accuracy expect_accurate(const Case& c, const Inputs& inputs);

// The built kernels of an operation on a device; `accepting`: those that take the case.
std::vector<std::string> kernels_of(Operation operation, Device device);
std::vector<std::string> accepting_kernels(const Case& c);
bool accepts(const Case& c, const std::string& kernel);

// n-way merge through cuflash_merge_states; parts must agree in shape. Storage of O in `dtype`.
Outcome run_merge(Device device, Dtype dtype, const std::vector<Results>& parts, bool base2 = false,
                  uint64_t layout_seed = 0);

}  // namespace cuflash_test
