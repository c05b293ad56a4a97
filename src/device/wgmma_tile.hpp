// How tiles of 16-bit elements lie in shared memory for wgmma and TMA: panels of 64 columns, each [rows][64] with its
// 16-byte chunks swizzled by 128 bytes. Host arithmetic, tested there.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"
#include "common/tensor_view.hpp"

namespace cuflash::device {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

// Where TMA and wgmma look for the byte at this shared address: a function of the address itself, so any
// multiple of 128 bytes can begin a tile.
CUFLASH_HOST_DEVICE constexpr uint32_t swizzle_128(uint32_t address) {
  return address ^ (((address >> 7) & 7) << 4);
}

// The operand whose rows lie along the inner dimension of the product (Q, and K of K^T), from this shared address on.
// advance() to the next 16 columns: 2, next panel: panel bytes / 16, next row: 8.
CUFLASH_HOST_DEVICE constexpr uint64_t k_major_descriptor(uint32_t address) {
  return uint64_t{0x40000040} << 32 | 0x00010000 | (address & 0x3ffff) >> 4;
}

// The operand whose columns are the result's (V): panels of `rows` rows. advance() to the next 16 rows: 128.
CUFLASH_HOST_DEVICE constexpr uint64_t mn_major_descriptor(uint32_t address, uint32_t rows) {
  return uint64_t{0x40000040} << 32 | uint64_t{rows * kPanelRowBytes >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}

// The descriptor so many steps of 16 bytes further on. Addresses end below the descriptor's bit 14: nothing carries, and a
// compiler that knows it adds in one 32-bit instruction where it took four.
CUFLASH_HOST_DEVICE constexpr uint64_t advance(uint64_t descriptor, uint32_t steps) {
  return (descriptor & 0xffffffff00000000) | (static_cast<uint32_t>(descriptor) + steps);
}

// What TMA takes of a tensor of 16-bit elements beyond strides of 16 bytes: strides below 2^40 bytes, and coordinates
// are signed 32-bit numbers.
inline bool fits_tensor_map(const TensorView& tensor, int64_t batch, int64_t heads, int64_t rows) {
  constexpr int64_t kMaxStride = int64_t{1} << 39;
  constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 256;  // with room for a tile past the end
  return tensor.row_stride < kMaxStride && tensor.head_stride < kMaxStride &&
         tensor.batch_stride < kMaxStride && rows <= kMaxExtent && heads <= kMaxExtent &&
         batch <= kMaxExtent;
}

}  // namespace cuflash::device
