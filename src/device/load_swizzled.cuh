// A tile of rows of 16-bit elements, from global memory to the places that ldmatrix reads (mma_tile.hpp).
#pragma once

#include <cstdint>

#include "device/mma_tile.hpp"
#include "device/ptx/cp_async.cuh"

namespace cuflash::device {

// Copies the first min(rows, kRows) rows of `columns` elements, at most kColumns, to s_tile. The rest of the tile's
// kRows x kColumns becomes zero: nothing there, not even NaN, reaches a product.
//
// vector_access: g_tile and row_stride are multiples of 16 bytes and `columns` of 8; then the copies are
// asynchronous and join the thread's open group of cp.async. Without it they go element by element.
//
// By kThreads threads. The tile is complete after each has waited for its group, and a barrier.
template <int kThreads, int kRows, int kColumns, class Element>
__device__ __forceinline__ void load_swizzled(Element* s_tile, const Element* g_tile,
                                              int64_t row_stride, int rows, int columns,
                                              bool vector_access) {
  using Tile = MmaTile<kColumns>;
  constexpr int kChunk = Tile::kChunkElements;
  constexpr int kChunks = Tile::kChunks;
  // A power of two of threads for each row, so that a thread keeps its column; with 96 or 192 columns a
  // quarter of them have nothing to do.
  constexpr int kRowThreads = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  constexpr int kRowsPerPass = kThreads / kRowThreads;
  static_assert(sizeof(Element) == 2 && kChunks <= 32 && kRows % kRowsPerPass == 0);

  // This thread's part: from row `first` on every kRowsPerPass-th, one chunk of each.
  const unsigned first = threadIdx.x / kRowThreads;
  const unsigned chunk = threadIdx.x % kRowThreads;
  if (chunk >= kChunks) return;
  const int column = static_cast<int>(chunk) * kChunk;
  const int valid_rows = rows - static_cast<int>(first);
  const int valid_columns = columns - column;
  const Element* g_chunk = g_tile + first * row_stride + column;
  const int64_t step = kRowsPerPass * row_stride;
  const auto s_chunk = [&](int row) {
    // Rows 8 further on are permuted alike: said so, the addresses are a register for each of the passes over 8 rows
    // and constants.
    const uint32_t offset = Tile::offset(first + row % 8, chunk) + row / 8 * (8 * Tile::kRowBytes);
    return reinterpret_cast<Element*>(reinterpret_cast<unsigned char*>(s_tile) + offset);
  };
  if (vector_access && rows >= kRows && valid_columns > 0) {  // most tiles, without a question
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsPerPass, g_chunk += step)
      ptx::cp_async_16(s_chunk(row), g_chunk);
  } else if (vector_access) {
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsPerPass, g_chunk += step)
      ptx::cp_async_16_zfill(s_chunk(row), g_chunk, row < valid_rows && valid_columns > 0);
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kRowsPerPass, g_chunk += step) {
      Element* s = s_chunk(row);
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        s[i] = row < valid_rows && i < valid_columns ? g_chunk[i] : Element(0.0f);
    }
  }
}

}  // namespace cuflash::device
