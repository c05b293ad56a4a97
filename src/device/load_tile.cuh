// A tile of rows of 16-bit elements, from global to shared memory.
#pragma once

#include <cstdint>

#include "device/ptx/cp_async.cuh"

namespace cuflash::device {

// Copies the first min(rows, kRows) rows of `columns` elements, at most kColumns, to s_tile[kRows][kLd]. The rest
// of the tile's kRows x kColumns becomes zero: nothing there, not even NaN, reaches a product.
//
// vector_access: g_tile and row_stride are multiples of 16 bytes and `columns` of 8; then the copies are
// asynchronous and join the thread's open group of cp.async. Without it they go element by element.
//
// kThreads threads take part, each with its number among them. The tile is complete after each has waited for its
// group, and a barrier.
template <int kThreads, int kRows, int kColumns, int kLd, class Element>
__device__ __forceinline__ void load_tile(Element* s_tile, const Element* g_tile,
                                          int64_t row_stride, int rows, int columns,
                                          bool vector_access, unsigned thread = threadIdx.x) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = kColumns / kChunk;
  // A power of two of threads for each row, so that a thread keeps its column; with 96 or 192 columns a
  // quarter of them have nothing to do.
  constexpr int kRowThreads = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  constexpr int kRowsPerPass = kThreads / kRowThreads;
  static_assert(sizeof(Element) == 2 && kColumns % kChunk == 0 && kChunks <= 32);
  static_assert(kLd % kChunk == 0 && kRows % kRowsPerPass == 0);

  // This thread's part: from row `first` on every kRowsPerPass-th, from `column` on a chunk.
  const unsigned first = thread / kRowThreads;
  const unsigned column = thread % kRowThreads * kChunk;
  if (column >= kColumns) return;
  const int valid_rows = rows - static_cast<int>(first);
  const int valid_columns = columns - static_cast<int>(column);
  Element* s_chunk = s_tile + (first * kLd + column);
  const Element* g_chunk = g_tile + first * row_stride + column;
  if (vector_access) {
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsPerPass) {
      ptx::cp_async_16_zfill(s_chunk + row * kLd, g_chunk, row < valid_rows && valid_columns > 0);
      g_chunk += kRowsPerPass * row_stride;
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kRowsPerPass) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        s_chunk[i] = row < valid_rows && i < valid_columns ? g_chunk[i] : Element(0.0f);
      s_chunk += kRowsPerPass * kLd;
      g_chunk += kRowsPerPass * row_stride;
    }
  }
}

// The same where each row lies by itself: row r begins offset_of(r) elements past g_tensor, or is zero where that is
// negative. Offsets are multiples of 16 bytes for vector_access. All threads ask for a row at the same time, so that
// offset_of may be a shuffle.
template <int kThreads, int kRows, int kColumns, int kLd, class Element, class OffsetOf>
__device__ __forceinline__ void load_tile_rows(Element* s_tile, const Element* g_tensor,
                                               OffsetOf offset_of, int columns, bool vector_access,
                                               unsigned thread = threadIdx.x) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = kColumns / kChunk;
  constexpr int kRowsPerPass = kThreads / kChunks;
  static_assert(sizeof(Element) == 2 && kColumns % kChunk == 0 && kLd % kChunk == 0);
  static_assert(kThreads % kChunks == 0 && kRows % kRowsPerPass == 0, "no thread without a row");

  // This thread's part: from row `first` on every kRowsPerPass-th, from `column` on a chunk.
  const unsigned first = thread / kChunks;
  const unsigned column = thread % kChunks * kChunk;
  const int valid_columns = columns - static_cast<int>(column);
  Element* s_chunk = s_tile + (first * kLd + column);
  if (vector_access) {
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsPerPass) {
      const int64_t offset = offset_of(first + row);
      const bool valid = offset >= 0 && valid_columns > 0;
      ptx::cp_async_16_zfill(s_chunk + row * kLd, g_tensor + (valid ? offset + column : 0), valid);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kRowsPerPass) {
      const int64_t offset = offset_of(first + row);
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        s_chunk[i] =
            offset >= 0 && i < valid_columns ? g_tensor[offset + column + i] : Element(0.0f);
      s_chunk += kRowsPerPass * kLd;
    }
  }
}

}  // namespace cuflash::device
