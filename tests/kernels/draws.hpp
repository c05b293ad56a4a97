// Random problems over the whole of the problem struct: products of features, in any layout, over any cache. A seed always
// gives the same problem.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "kernels/caches.hpp"
#include "kernels/quantised_cache.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {

constexpr int64_t kLengths[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000};
struct Heads {
  int64_t q, kv;
};
constexpr Heads kHeads[] = {{1, 1}, {4, 4}, {3, 1}, {6, 2}, {7, 1}, {8, 1}, {24, 1}, {48, 2}};

enum class Arrangement { kDense, kRowsOutermost, kPackedQkv, kRandom };

// Dimensions along which a tensor repeats, by strides of 0.
struct Repeats {
  bool batch = false, head = false, row = false;
  bool any() const { return batch || head || row; }
};
constexpr Role kRepeatable[] = {kQ, kK, kV, kDo};

// A case, and what of a call the case does not describe.
struct Draw {
  Case c;
  DataKind kind = DataKind::kNormal;
  uint64_t seed = 1;
  Arrangement arrangement = Arrangement::kDense;
  Repeats repeats[4];  // of kRepeatable
  std::optional<PoolSpec> pool;
  bool chosen_entries = false;      // of a contiguous cache
  std::optional<CacheSpec> stored;  // how the elements are kept; where, pool and chosen_entries say
  bool v_is_k_prefix = false;
  bool accumulates = false;  // into what is there; checked against the call that does not
  bool library_workspace = false;
};

std::string describe(const Draw& draw);

// A problem that is small but for its keys, of which there may be many. `every_feature`: not only those that all kernels
// take.
Draw random_draw(Random& random, Device device, Operation operation, bool every_feature);

// The call of a draw with all its memory.
class DrawnCall {
 public:
  DrawnCall(const Draw& draw, const Inputs& inputs);
  Call& call() { return call_; }
  // Launch, wait, collect; also what of the cache the call must not have written.
  Outcome run();

 private:
  Device device_;
  Call call_;
  std::optional<Pool> pool_;
  std::optional<ChosenEntries> entries_;
  std::optional<QuantisedCache> stored_;
};

// What the oracle attends over: of a quantised cache the numbers that its codes stand for.
Inputs make_inputs(const Draw& draw);

// Whether the kernel of the case takes the draw.
bool accepts(const Draw& draw);

// Runs a draw that its kernel takes and judges what it gives. Failures are GoogleTest's.
Accuracy check_draw(const Draw& draw);

// ---- what draws have ----------------------------------------------------------------------------

// The features that are counted, by name.
const std::vector<std::string>& drawn_feature_names();
// Whether some draw can have both.
bool can_be_drawn_together(size_t a, size_t b);
std::vector<bool> features_of(const Draw& draw);

}  // namespace cuflash_test
