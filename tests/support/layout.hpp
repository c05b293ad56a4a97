// Strided tensors in device memory. Whatever lies between and around the logical elements is poisoned: inputs
// must not read it, outputs must not write it.
#pragma once

#include <cstdint>
#include <vector>

#include "support/data.hpp"
#include "support/device.hpp"
#include "support/dtype.hpp"
#include "support/tensor.hpp"

namespace cuflash_test {

struct Layout {
  int64_t offset = 0;  // of the first element in its buffer
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
  bool dense = true;  // strides are those of dense [batch, head, row, channel], said by flag
};

struct Extents {
  int64_t batch, heads, rows, dim;
};

struct RowMap;
// The extents in memory.
Extents memory_extents(const Extents& logical, const RowMap& rows);
RowMap whole_rows(const Extents& extents);  // each logical row is there

Layout dense_layout(const Extents& extents);                     // by flag
Layout bhsd_layout(const Extents& extents, int64_t offset = 0);  // the same by strides
Layout bshd_layout(const Extents& extents, int64_t offset = 0);
// [batch, head, row] in a random order with random gaps at each level and a random offset of 0 to 7 elements.
Layout random_layout(const Extents& extents, Random& random);

// Which rows in memory hold the logical rows of each batch entry: `count` of them from `first` on, of the entry's own
// memory or, packed, of a single one. Rows of the logical tensor beyond them are not in memory; they read as 0.
struct RowMap {
  struct Entry {
    int64_t first, count;
  };
  bool packed = false;
  int64_t memory_rows = 0;
  std::vector<Entry> entries;  // one for each batch entry
};

class StridedTensor {
 public:
  // All memory is 0xFF: NaN in each type. The layout is that of the memory: [1, heads, memory rows, dim] if packed.
  StridedTensor(Device device, Dtype dtype, const Extents& extents, const Layout& layout);
  StridedTensor(Device device, Dtype dtype, const Extents& extents, const Layout& layout,
                RowMap rows);

  void write(const Tensor& values);  // values of the dtype; the gaps keep their poison
  Tensor read() const;
  void poison();
  // The memory outside the logical elements is as it was, and so are the guards.
  bool surroundings_intact() const;
  // All of the memory is as write() left it.
  bool unchanged() const;

  cuflash_tensor_t tensor() const;
  void* data() const;
  const Layout& layout() const { return layout_; }

 private:
  template <class F>
  void for_each_element(F f) const;  // f(logical index, byte offset)

  Dtype dtype_;
  Extents extents_;
  Layout layout_;
  RowMap rows_;
  std::vector<unsigned char> image_;  // what the host wrote last
  Buffer buffer_;
};

}  // namespace cuflash_test
