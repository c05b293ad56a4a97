// Elements of the dtypes, and tensors of normally distributed values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuflash_bench {

enum class Dtype { kF32, kF16, kBf16 };

Dtype dtype_of(const std::string& name);  // "f32", "f16", "bf16"
size_t size_of(Dtype dtype);

// The value as the dtype holds it, rounded to nearest even.
uint32_t encode(double value, Dtype dtype);
double decode(uint32_t bits, Dtype dtype);

// Whether the bits are those of NaN or infinity.
bool is_special(uint32_t bits, Dtype dtype);

// Elements in memory, little-endian as on every platform of the library.
uint32_t load(const void* data, int64_t index, Dtype dtype);
void store(void* data, int64_t index, uint32_t bits, Dtype dtype);

// A tensor of any size: one block of values over and over, whose length, a prime, shares no factor with any extent.
// Drawing a number takes longer than reading it from memory by far, and a host copy of a tensor may be large.
class NormalValues {
 public:
  NormalValues(Dtype dtype, unsigned seed);

  double at(int64_t index) const;
  std::vector<double> range(int64_t begin, int64_t count) const;
  const std::vector<unsigned char>& block() const { return block_; }  // as elements of the dtype

 private:
  Dtype dtype_;
  std::vector<unsigned char> block_;
};

}  // namespace cuflash_bench
