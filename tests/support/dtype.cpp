#include "support/dtype.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <vector>

namespace cuflash_test {
namespace {

struct Format {
  const char* name;
  int bytes;
  int fraction_bits;
  int min_exponent;  // of normal numbers
  int max_exponent;
};

const Format& format_of(Dtype dtype) {
  static const Format kF32 = {"f32", 4, 23, -126, 127};
  static const Format kF16 = {"f16", 2, 10, -14, 15};
  static const Format kBf16 = {"bf16", 2, 7, -126, 127};
  return dtype == Dtype::kF32 ? kF32 : dtype == Dtype::kF16 ? kF16 : kBf16;
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double decode16(const Format& format, uint16_t bits) {
  const int exponent_bits = 15 - format.fraction_bits;
  const int exponent = (bits >> format.fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(fraction, format.min_exponent - format.fraction_bits);
  return sign * std::ldexp(fraction + (1 << format.fraction_bits),
                           exponent - 1 + format.min_exponent - format.fraction_bits);
}

const std::vector<double>& table16(Dtype dtype) {
  const auto make = [](Dtype type) {
    std::vector<double> table(65536);
    for (int bits = 0; bits < 65536; ++bits)
      table[bits] = decode16(format_of(type), static_cast<uint16_t>(bits));
    return table;
  };
  static const std::vector<double> f16 = make(Dtype::kF16), bf16 = make(Dtype::kBf16);
  return dtype == Dtype::kF16 ? f16 : bf16;
}

}  // namespace

const char* name_of(Dtype dtype) { return format_of(dtype).name; }
void PrintTo(Dtype dtype, std::ostream* out) { *out << name_of(dtype); }
int bytes_of(Dtype dtype) { return format_of(dtype).bytes; }

double ulp(Dtype dtype, double x) {
  const Format& format = format_of(dtype);
  const int exponent = x == 0 ? format.min_exponent : std::ilogb(x);
  return std::ldexp(1.0, std::max(exponent, format.min_exponent) - format.fraction_bits);
}

double round_to(Dtype dtype, double x) {
  if (!std::isfinite(x)) return x;
  const Format& format = format_of(dtype);
  const double smallest_normal = std::ldexp(1.0, format.min_exponent);
  if (std::fabs(x) < smallest_normal) {
    const double quantum = std::ldexp(smallest_normal, -format.fraction_bits);
    return std::copysign(std::nearbyint(x / quantum) * quantum, x);
  }
  // Drop the low bits of the double's fraction; a carry moves on to the next binade as it should.
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int drop = 52 - format.fraction_bits;
  bits += (uint64_t{1} << (drop - 1)) - 1 + ((bits >> drop) & 1);
  bits &= ~((uint64_t{1} << drop) - 1);
  std::memcpy(&x, &bits, sizeof x);
  return std::fabs(x) >= std::ldexp(1.0, format.max_exponent + 1) ? std::copysign(kInfinity, x) : x;
}

void store(Dtype dtype, double x, void* memory) {
  if (dtype == Dtype::kF32) {
    const float value = static_cast<float>(x);
    std::memcpy(memory, &value, sizeof value);
    return;
  }
  const Format& format = format_of(dtype);
  const int exponent_mask = (0x7fff >> format.fraction_bits) << format.fraction_bits;
  int bits;
  const double magnitude = std::fabs(x);
  if (std::isnan(x)) {
    bits = 0x7fff;
  } else if (std::isinf(x)) {
    bits = exponent_mask;
  } else if (magnitude < std::ldexp(1.0, format.min_exponent)) {
    bits = static_cast<int>(std::ldexp(magnitude, format.fraction_bits - format.min_exponent));
  } else {
    const int exponent = std::ilogb(magnitude);
    const int significand =
        static_cast<int>(std::ldexp(magnitude, format.fraction_bits - exponent));
    bits = ((exponent - format.min_exponent) << format.fraction_bits) + significand;
  }
  const uint16_t value = static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
  std::memcpy(memory, &value, sizeof value);
}

double load(Dtype dtype, const void* memory) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, memory, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, memory, sizeof bits);
  return table16(dtype)[bits];
}

}  // namespace cuflash_test
