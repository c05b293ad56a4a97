// Element types of the tests: rounding and storage, written from the formats' definitions and not from the
// library's conversions.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "cuflash.h"

namespace cuflash_test {

enum class Dtype : int32_t { kF32 = CUFLASH_F32, kF16 = CUFLASH_F16, kBf16 = CUFLASH_BF16 };
constexpr Dtype kAllDtypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};
constexpr Dtype kHalfDtypes[] = {Dtype::kF16, Dtype::kBf16};

const char* name_of(Dtype dtype);
void PrintTo(Dtype dtype, std::ostream* out);  // for GoogleTest
int bytes_of(Dtype dtype);

// The nearest value of the type, ties to even; infinity past the largest.
double round_to(Dtype dtype, double x);
// The distance between neighbours at |x|: of the binade of x, the smallest subnormal for 0.
double ulp(Dtype dtype, double x);

// `x` must be a value of the type (see round_to), infinity or NaN.
void store(Dtype dtype, double x, void* memory);
double load(Dtype dtype, const void* memory);

}  // namespace cuflash_test
