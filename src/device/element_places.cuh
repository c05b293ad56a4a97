// Where the elements of a WMMA accumulator lie. WMMA leaves open which of them a thread holds, but it holds the same
// ones in every accumulator: loading matrices of row and column numbers once tells.
#pragma once

#include <cstdint>

#include "device/packed16.cuh"
#include "device/wmma_fragments.cuh"

namespace cuflash::device {

struct ElementPlaces {
  uint32_t rows, columns;  // 4 bits for each of this thread's elements
  bool
      in_pairs;  // in every thread elements 2i and 2i + 1 are neighbours in a row, the first at an even column

  __device__ int row(int element) const { return rows >> (4 * element) & 15; }
  __device__ int column(int element) const { return columns >> (4 * element) & 15; }
};

// By a whole warp, over 16 rows of kLd floats of its own.
template <int kLd>
__device__ ElementPlaces learn_element_places(float* s_warp_scratch, unsigned lane) {
  ElementPlaces places;
  places.rows = learn_element_rows<kLd>(s_warp_scratch, lane);
  __syncwarp();  // SAFETY: all lanes have read the row numbers.
  for (unsigned i = lane; i < kFragment * kFragment; i += 32)
    s_warp_scratch[i / kFragment * kLd + i % kFragment] = static_cast<float>(i % kFragment);
  __syncwarp();  // SAFETY: the column numbers are written before other lanes read them.
  Accumulator columns;
  wmma::load_matrix_sync(columns, s_warp_scratch, kLd, wmma::mem_row_major);
  places.columns = 0;
  bool in_pairs = true;
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; ++e)
    places.columns |= static_cast<uint32_t>(columns.x[e]) << (4 * e);
#pragma unroll
  for (int e = 0; e < Accumulator::num_elements; e += 2)
    in_pairs = in_pairs && places.row(e) == places.row(e + 1) && places.column(e) % 2 == 0 &&
               places.column(e) + 1 == places.column(e + 1);
  places.in_pairs = __all_sync(0xffffffffu, in_pairs);
  return places;
}

// Stores an accumulator rounded to 16 bits, [16][kLd], s_matrix a multiple of 4 bytes and kLd even. Through
// store_matrix_sync it would have to go as fp32, be read back, rounded and written once more.
template <int kLd, class Element>
__device__ void store_rounded(Element* s_matrix, const Accumulator& matrix,
                              const ElementPlaces& places) {
  static_assert(kLd % 2 == 0);
  if (places.in_pairs) {
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; e += 2) {
      const float pair[2] = {matrix.x[e], matrix.x[e + 1]};
      store_packed16(s_matrix + places.row(e) * kLd + places.column(e), pair);
    }
  } else {
#pragma unroll
    for (int e = 0; e < Accumulator::num_elements; ++e)
      s_matrix[places.row(e) * kLd + places.column(e)] = Element(matrix.x[e]);
  }
}

}  // namespace cuflash::device
