// Deterministic test data: equal numbers on every machine for equal arguments.
#pragma once

#include "support/dtype.hpp"
#include "support/tensor.hpp"

namespace cuflash_test {

// splitmix64; one seed gives one sequence, on every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double uniform();  // [0, 1)
  double normal();
  int64_t below(int64_t n);  // 0 .. n - 1
  template <class T, size_t N>
  const T& pick(const T (&list)[N]) {
    return list[below(static_cast<int64_t>(N))];
  }

 private:
  uint64_t state_;
};

// The hash generator of the case list: element n is a * (u - 0.5), u in [0, 1) a hash of (n, t). By
// convention t is 1 for q, 2 for k, 3 for v, 4 for dO.
double hash_value(uint64_t n, uint32_t t, double a = 1);

enum class DataKind {
  kHash,
  kNormal,
  kStructured
};  // structured: normal, one channel 30 times larger
constexpr DataKind kAllDataKinds[] = {DataKind::kHash, DataKind::kNormal, DataKind::kStructured};

void fill_hash(Tensor& tensor, uint32_t t, double a, Dtype dtype);
// `large_channel` is for kStructured: the same in q and k, so that it dominates the scores.
void fill(Tensor& tensor, DataKind kind, uint32_t t, uint64_t seed, int64_t large_channel,
          Dtype dtype);
void round_values(Tensor& tensor, Dtype dtype);

}  // namespace cuflash_test
