// Texts with a number in them, made by the compiler: refusals are pointers to constants.
#pragma once

namespace cuflash {

struct ConstantText {
  char data[64] = {};
};

constexpr ConstantText constant_text(const char* before, int number, const char* after) {
  ConstantText result;
  int length = 0;
  while (*before != '\0') result.data[length++] = *before++;
  int unit = 1;
  while (number / unit >= 10) unit *= 10;
  for (; unit > 0; unit /= 10) result.data[length++] = static_cast<char>('0' + number / unit % 10);
  while (*after != '\0') result.data[length++] = *after++;
  return result;
}

// What the head-dim buckets of the tiled families say when they refuse.
template <int kHeadDim>
constexpr ConstantText kAboveBucket = constant_text("head_dim is above ", kHeadDim, "");
template <int kSharedBytes>
constexpr ConstantText kNeedsSharedBytes = constant_text("needs ", kSharedBytes,
                                                         " bytes of shared memory per block");

}  // namespace cuflash
