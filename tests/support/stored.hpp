// What caches may store, written from the formats' definitions and not from the library's conversions. A dtype is one of
// enum cuflash_dtype, a code the bits of an element.
#pragma once

#include <cstdint>

#include "cuflash.h"

namespace cuflash_test {

constexpr int32_t kStoredDtypes[] = {CUFLASH_F32,      CUFLASH_F16,  CUFLASH_BF16, CUFLASH_FP8_E4M3,
                                     CUFLASH_FP8_E5M2, CUFLASH_INT8, CUFLASH_INT4};

int bits_of_stored(int32_t dtype);
bool is_integer(int32_t dtype);
double largest_of(int32_t dtype);  // finite, of fp8 and integers

double value_of_code(int32_t dtype, uint32_t code);
// The code whose value is nearest to x, ties to the even code. fp8 and integers saturate. x is not NaN.
uint32_t nearest_code(int32_t dtype, double x);

// Element `index` of an array; of int4 there are two a byte, the even one in the low half.
void put_code(int32_t dtype, void* memory, int64_t index, uint32_t code);

}  // namespace cuflash_test
