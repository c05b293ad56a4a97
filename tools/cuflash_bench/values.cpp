#include "values.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace cuflash_bench {
namespace {

constexpr int64_t kBlock = 1000003;

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint32_t encode_f16(double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000U : 0;
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
  // 11 bits of a normal number, multiples of 2^-24 below 2^-14.
  const int quantum = magnitude < 0x1p-14 ? -24 : exponent - 11;
  const double multiple = std::nearbyint(std::ldexp(magnitude, -quantum));
  if (std::ldexp(multiple, quantum) > 65504) return sign | 0x7c00;
  const auto fraction = static_cast<uint32_t>(multiple);
  if (quantum == -24) return sign | fraction;  // 0x400 of them are the smallest normal number
  // The leading bit of the fraction adds 1 to the exponent, a rounding up to 2^11 one more.
  return sign | ((static_cast<uint32_t>(quantum + 24) << 10) + fraction);
}

double decode_f16(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const int fraction = static_cast<int>(bits & 0x3ff);
  double magnitude = 0;
  if (exponent == 0x1f)
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  else if (exponent == 0)
    magnitude = std::ldexp(fraction, -24);
  else
    magnitude = std::ldexp(0x400 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

Dtype dtype_of(const std::string& name) {
  if (name == "f32") return Dtype::kF32;
  return name == "f16" ? Dtype::kF16 : Dtype::kBf16;
}

size_t size_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

uint32_t encode(double value, Dtype dtype) {
  if (dtype == Dtype::kF16) return encode_f16(value);
  const uint32_t bits = bits_of(static_cast<float>(value));
  if (dtype == Dtype::kF32) return bits;
  if (std::isnan(value)) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

double decode(uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kF16) return decode_f16(bits);
  if (dtype == Dtype::kBf16) bits <<= 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bool is_special(uint32_t bits, Dtype dtype) {
  const uint32_t exponent = dtype == Dtype::kF32   ? 0x7f800000
                            : dtype == Dtype::kF16 ? 0x7c00
                                                   : 0x7f80;
  return (bits & exponent) == exponent;
}

uint32_t load(const void* data, int64_t index, Dtype dtype) {
  const size_t size = size_of(dtype);
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const unsigned char*>(data) + static_cast<size_t>(index) * size,
              size);
  return bits;
}

void store(void* data, int64_t index, uint32_t bits, Dtype dtype) {
  const size_t size = size_of(dtype);
  std::memcpy(static_cast<unsigned char*>(data) + static_cast<size_t>(index) * size, &bits, size);
}

NormalValues::NormalValues(Dtype dtype, unsigned seed)
    : dtype_(dtype), block_(static_cast<size_t>(kBlock) * size_of(dtype)) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < kBlock; ++i)
    store(block_.data(), i, encode(normal(generator), dtype), dtype);
}

double NormalValues::at(int64_t index) const {
  return decode(load(block_.data(), index % kBlock, dtype_), dtype_);
}

std::vector<double> NormalValues::range(int64_t begin, int64_t count) const {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = at(begin + i);
  return values;
}

}  // namespace cuflash_bench
