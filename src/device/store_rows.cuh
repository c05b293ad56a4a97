// Rows of accumulators, from fragments through shared to global memory.
#pragma once

#include <cstdint>

#include "device/packed16.cuh"
#include "device/wmma_fragments.cuh"

namespace cuflash::device {

// Writes the first min(rows, 16) rows and `channels` columns, at most 16 * kCount, of a row of fragments. By a whole
// warp, kColumns columns at a time through s_staging, 16 rows of kLd >= kColumns floats of its own (16-byte
// aligned, kLd a multiple of 4), free on return.
//
// vector_access: g_rows and row_stride are multiples of 16 bytes and `channels` of 8.
template <int kColumns, int kLd, int kCount, class Element>
__device__ void store_rows(float* s_staging, unsigned lane, const Accumulator (&matrix)[kCount],
                           Element* g_rows, int64_t row_stride, int64_t rows, int channels,
                           bool vector_access) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = kColumns / kChunk;  // of a row
  static_assert(kCount * kFragment % kColumns == 0 && kColumns % kFragment == 0);
#pragma unroll
  for (int first = 0; first < kCount * kFragment; first += kColumns) {
#pragma unroll
    for (int column = 0; column < kColumns; column += kFragment)
      wmma::store_matrix_sync(s_staging + column, matrix[(first + column) / kFragment], kLd,
                              wmma::mem_row_major);
    __syncwarp();  // SAFETY: the columns are written before other lanes read them.
#pragma unroll
    for (unsigned i = lane; i < kFragment * kChunks; i += 32) {
      const unsigned row = i / kChunks;
      const unsigned column = i % kChunks * kChunk;
      const int channel = static_cast<int>(first + column);
      if (row >= rows) continue;
      float x[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[j] = s_staging[row * kLd + column + j];
      Element* g_chunk = g_rows + row * row_stride + channel;
      if (vector_access) {
        if (channel < channels) store_packed16(g_chunk, x);
      } else {
#pragma unroll
        for (int j = 0; j < kChunk; ++j)
          if (channel + j < channels) g_chunk[j] = Element(x[j]);
      }
    }
    __syncwarp();  // SAFETY: they are read before the next columns overwrite them.
  }
}

}  // namespace cuflash::device
