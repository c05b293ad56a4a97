// A tile of rows of any element type, from global memory to fp32 in shared memory.
#pragma once

#include <cstdint>

#include "device/ptx/cp_async.cuh"
#include "device/vector4.cuh"

namespace cuflash::device {

// Four elements of a row, as load4() takes them, to shared memory. Copies of fp32 are asynchronous.
template <class Element>
__device__ __forceinline__ void copy4_to_shared(float* s_destination, const Element* g_source,
                                                int count, bool vector_access) {
  if constexpr (sizeof(Element) != 4) {
    float x[4];
    load4(g_source, count, vector_access, x);
    store_packed4(s_destination, x);
  } else if (vector_access) {
    ptx::cp_async_16_zfill(s_destination, g_source, count > 0);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::cp_async_4_zfill(s_destination + i, g_source + i, i < count);
  }
}

// Copies the first min(rows, kRows) rows of `columns` elements, at most kColumns, to s_tile[kRows][kLd]. The rest
// of the tile's kRows x kColumns becomes zero: nothing there, not even NaN, reaches a product.
//
// vector_access: g_tile and row_stride are multiples of four elements, and so is `columns`. Copies of fp32 are
// asynchronous and join the thread's open group of cp.async; 16-bit elements are converted on their way
// through registers. All kThreads threads take part; the tile is complete after each has waited for its
// group, and a barrier.
template <int kThreads, int kRows, int kColumns, int kLd, class Element>
__device__ __forceinline__ void load_tile_f32(float* s_tile, const Element* g_tile,
                                              int64_t row_stride, int rows, int columns,
                                              bool vector_access) {
  constexpr int kChunks = kColumns / 4;
  constexpr int kRowsPerPass = kThreads / kChunks;
  static_assert(kColumns % 4 == 0 && kLd % 4 == 0);
  static_assert(kThreads % kChunks == 0 && kRows % kRowsPerPass == 0);

  // This thread's part: from row `first` on every kRowsPerPass-th, from `column` on four elements.
  const unsigned first = threadIdx.x / kChunks;
  const unsigned column = threadIdx.x % kChunks * 4;
  const int valid_rows = rows - static_cast<int>(first);
  const int valid_columns = columns - static_cast<int>(column);
  float* s_chunk = s_tile + (first * kLd + column);
  const Element* g_chunk = g_tile + first * row_stride + column;
  const auto copy_rows = [&](int row, bool vectors) {
    copy4_to_shared(s_chunk, g_chunk, row < valid_rows ? valid_columns : 0, vectors);
    s_chunk += kRowsPerPass * kLd;
    g_chunk += kRowsPerPass * row_stride;
  };
  // Two loops: in one, the predicates of either way stay in registers for the other.
  if (vector_access) {
#pragma unroll 8
    for (int row = 0; row < kRows; row += kRowsPerPass) copy_rows(row, true);
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kRowsPerPass) copy_rows(row, false);
  }
}

}  // namespace cuflash::device
