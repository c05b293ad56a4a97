// A warp as a grid of 4 x 8 threads over a matrix: thread (row, column) holds the elements of rows row + 4 i and
// columns column + 8 j, or, of a matrix of channels, groups of four from channel 4 column + 32 g on.
//
// Which lane is which thread matters to reads of 16 bytes from shared memory: two quarters of a warp are served at
// once where lanes l and l ^ 1, or lanes l and l ^ 2, read the same address. Rows leave out bit 0 of the lane and
// columns bit 1, so that reads by row and reads by column both have that form.
#pragma once

#include "common/host_device.hpp"

namespace cuflash::device {

struct WarpGrid {
  static constexpr int kRows = 4, kColumns = 8;

  int row, column;

  CUFLASH_HOST_DEVICE explicit constexpr WarpGrid(unsigned lane)
      : row(static_cast<int>(lane >> 1 & 3)),
        column(static_cast<int>((lane & 1) | (lane >> 2 & 6))) {}
};

// Floats from one row of a matrix in shared memory to the next. Rows of `columns` floats that are read 16 bytes
// at a time, neighbouring rows by neighbouring threads: 4 more than a multiple of 32, eight rows in eight groups of
// banks. Rows that are written a float at a time by the whole grid and read by 4 rows: 8 more than a multiple
// of 16, four rows of eight columns in 32 banks.
constexpr int ld_of_operand(int columns) { return columns + 4; }
constexpr int ld_of_weights(int columns) { return columns % 16 == 0 ? columns + 8 : columns; }

}  // namespace cuflash::device
