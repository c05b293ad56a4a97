// How tiles of 16-bit elements lie in shared memory for ldmatrix: rows without padding, the 16-byte chunks of each row
// permuted so that the eight rows that are read at a time lie in different banks. Host arithmetic, tested there.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"

namespace cuflash::device {

template <int kColumns>
struct MmaTile {
  static constexpr uint32_t kChunkElements = 8;
  static constexpr uint32_t kChunks = kColumns / kChunkElements;  // of a row
  static constexpr uint32_t kRowBytes = 2 * kColumns;
  // Chunks that change places with one another: the banks are eight chunks wide, but rows of 4 or 12 chunks are not
  // a multiple of that. Of those, each second begins in the middle of the banks, and four pairs of rows differ.
  static constexpr uint32_t kSwizzled = kChunks % 8 == 0 ? 8 : 4;
  static_assert(kColumns % 32 == 0);

  CUFLASH_HOST_DEVICE static constexpr uint32_t swizzle(uint32_t row) {
    return kSwizzled == 8 ? row % 8 : row / 2 % 4;
  }
  // In bytes from the tile's begin, a multiple of 128.
  CUFLASH_HOST_DEVICE static constexpr uint32_t offset(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + (chunk ^ swizzle(row)) * 16;
  }
  // From the address of a row's chunk 0 or 1 to that of chunk 2 * step further on, in the row 16 * strip further down: with
  // constants, one XOR and an offset that is part of the instruction.
  CUFLASH_HOST_DEVICE static constexpr uint32_t advance(uint32_t address, uint32_t strip,
                                                        uint32_t step) {
    const uint32_t within = 2 * step % kSwizzled;
    return (address ^ within * 16) + ((2 * step - within) * 16 + strip * 16 * kRowBytes);
  }
};

}  // namespace cuflash::device
