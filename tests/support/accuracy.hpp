// The accuracy rule. For each (batch, head, block of 64 rows) of a result, against the fp64 oracle:
//     max|err| <= 2 max|plain err| + 1/2 ulp of the block's largest |reference|
//     rms(err) <= 1.5 rms(plain err) + 1/4 ulp
// and for LSE |err| <= 2 |plain err| + 1e-5 max(1, |LSE|), 1e-6 for fp32 problems. Blocks keep small late rows
// from hiding behind large early ones. NaN never passes and infinities must match exactly.
//
// One run of the plain algorithm is one sample of its error, and in a block of few numbers that sample may be tiny by
// luck. judge() therefore takes more samples (see plain()) where the first does not excuse an error, and the
// largest counts. For a backward pass half of them work from the O that it was given: with few channels the error of that,
// which is the forward's, may be most of dQ's. In f16 as many again round what is below the normal numbers,
// and as many keep the order of memory in about half of their sums.
#pragma once

#include <string>
#include <vector>

#include "support/oracle.hpp"

namespace cuflash_test {

struct Accuracy {
  bool ok = true;
  double worst = 0;   // the largest error / bound
  std::string where;  // of the worst: tensor, batch, head, rows

  void fold(const Accuracy& other);
};

constexpr int64_t kBlockRows = 64;

// `plain` holds one or more samples.
using Samples = std::vector<const Tensor*>;
Accuracy check_tensor(const char* name, const Tensor& got, const Tensor& reference,
                      const Samples& plain, Dtype dtype);
Accuracy check_lse(const Tensor& got, const Tensor& reference, const Samples& plain, Dtype dtype);

// Judges everything that the problem's operation returns: o and lse, or dq, dk and dv. An empty `got.lse` was not asked
// for.
Accuracy judge(const Problem& problem, const Inputs& inputs, const Results& got);

}  // namespace cuflash_test
