#include "support/stored.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "support/dtype.hpp"

namespace cuflash_test {
namespace {

double value_of_fp8(bool e4m3, uint32_t code) {
  const int fraction_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, most = e4m3 ? 15 : 31;
  const int exponent = static_cast<int>(code & 0x7f) >> fraction_bits;
  const int fraction = static_cast<int>(code) & ((1 << fraction_bits) - 1);
  const double sign = code & 0x80 ? -1 : 1;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (exponent == most && e4m3 && fraction == 7) return kNan;
  if (exponent == most && !e4m3)
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : kNan;
  const double significand = fraction / std::ldexp(1.0, fraction_bits) + (exponent > 0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias);
}

bool is_narrow(int32_t dtype) { return dtype >= CUFLASH_FP8_E4M3; }

struct Number {
  double value;
  uint32_t code;
};

// The finite numbers of a narrow format in rising order; of two zeros the positive one.
const std::vector<Number>& numbers_of(int32_t dtype) {
  static const auto* const all = [] {
    auto* lists = new std::map<int32_t, std::vector<Number>>;
    for (int32_t d = CUFLASH_FP8_E4M3; d <= CUFLASH_INT4; ++d) {
      std::vector<Number>& list = (*lists)[d];
      for (uint32_t code = 0; code < 1u << bits_of_stored(d); ++code) {
        const double value = value_of_code(d, code);
        if (std::isfinite(value) && !(value == 0 && code != 0)) list.push_back({value, code});
      }
      std::sort(list.begin(), list.end(),
                [](const Number& a, const Number& b) { return a.value < b.value; });
    }
    return lists;
  }();
  return all->at(dtype);
}

}  // namespace

int bits_of_stored(int32_t dtype) {
  return dtype == CUFLASH_INT4 ? 4 : is_narrow(dtype) ? 8 : 8 * bytes_of(static_cast<Dtype>(dtype));
}

bool is_integer(int32_t dtype) { return dtype == CUFLASH_INT8 || dtype == CUFLASH_INT4; }

double largest_of(int32_t dtype) { return numbers_of(dtype).back().value; }

double value_of_code(int32_t dtype, uint32_t code) {
  if (dtype == CUFLASH_INT8) return static_cast<int8_t>(code);
  if (dtype == CUFLASH_INT4) return static_cast<int>(code) - (code < 8 ? 0 : 16);
  if (is_narrow(dtype)) return value_of_fp8(dtype == CUFLASH_FP8_E4M3, code);
  return load(static_cast<Dtype>(dtype), &code);  // little-endian
}

uint32_t nearest_code(int32_t dtype, double x) {
  if (!is_narrow(dtype)) {
    uint32_t code = 0;
    store(static_cast<Dtype>(dtype), round_to(static_cast<Dtype>(dtype), x), &code);
    return code;
  }
  const std::vector<Number>& list = numbers_of(dtype);
  const auto above =
      std::lower_bound(list.begin(), list.end(), x,
                       [](const Number& number, double value) { return number.value < value; });
  if (above == list.begin()) return above->code;
  const Number& below = *(above - 1);
  if (above == list.end()) return below.code;
  const double to_above = above->value - x, to_below = x - below.value;
  if (to_above == to_below) return above->code % 2 == 0 ? above->code : below.code;
  return to_above < to_below ? above->code : below.code;
}

void put_code(int32_t dtype, void* memory, int64_t index, uint32_t code) {
  auto* bytes = static_cast<unsigned char*>(memory);
  const int bits = bits_of_stored(dtype);
  if (bits >= 8) {
    std::memcpy(bytes + index * (bits / 8), &code, static_cast<size_t>(bits / 8));
    return;
  }
  unsigned char& byte = bytes[index / 2];
  const int shift = index % 2 == 0 ? 0 : 4;
  byte = static_cast<unsigned char>((byte & ~(0xf << shift)) | static_cast<int>(code) << shift);
}

}  // namespace cuflash_test
