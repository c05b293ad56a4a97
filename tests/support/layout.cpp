#include "support/layout.hpp"

#include <algorithm>
#include <utility>

namespace cuflash_test {
namespace {

constexpr unsigned char kPoison = 0xff;

size_t span_bytes(Dtype dtype, const Extents& e, const Layout& l) {
  if (e.batch * e.heads * e.rows * e.dim == 0) return 0;
  const int64_t elements = l.offset + (e.batch - 1) * l.batch_stride +
                           (e.heads - 1) * l.head_stride + (e.rows - 1) * l.row_stride + e.dim;
  return static_cast<size_t>(elements * bytes_of(dtype));
}

}  // namespace

Layout bhsd_layout(const Extents& e, int64_t offset) {
  return {offset, e.heads * e.rows * e.dim, e.rows * e.dim, e.dim, false};
}

Layout dense_layout(const Extents& e) {
  Layout layout = bhsd_layout(e);
  layout.dense = true;
  return layout;
}

Layout bshd_layout(const Extents& e, int64_t offset) {
  return {offset, e.rows * e.heads * e.dim, e.dim, e.heads * e.dim, false};
}

Layout random_layout(const Extents& e, Random& random) {
  Layout layout;
  layout.dense = false;
  layout.offset = random.below(8);
  std::pair<int64_t, int64_t*> levels[] = {{e.batch, &layout.batch_stride},
                                           {e.heads, &layout.head_stride},
                                           {e.rows, &layout.row_stride}};
  for (int i = 2; i > 0; --i) std::swap(levels[i], levels[random.below(i + 1)]);
  // Gaps of 0 keep a row in 16-byte steps often enough that wide loads are tried too.
  constexpr int64_t kGaps[] = {0, 0, 8, 16, 1, 3};
  int64_t stride = e.dim + random.pick(kGaps);
  for (const auto& [extent, target] : levels) {
    *target = stride;
    stride = stride * std::max<int64_t>(extent, 1) + random.pick(kGaps);
  }
  return layout;
}

Extents memory_extents(const Extents& logical, const RowMap& rows) {
  return {rows.packed ? 1 : logical.batch, logical.heads, rows.memory_rows, logical.dim};
}

RowMap whole_rows(const Extents& e) {
  return {false, e.rows, std::vector<RowMap::Entry>(static_cast<size_t>(e.batch), {0, e.rows})};
}

StridedTensor::StridedTensor(Device device, Dtype dtype, const Extents& extents,
                             const Layout& layout)
    : StridedTensor(device, dtype, extents, layout, whole_rows(extents)) {}

StridedTensor::StridedTensor(Device device, Dtype dtype, const Extents& extents,
                             const Layout& layout, RowMap rows)
    : dtype_(dtype),
      extents_(extents),
      layout_(layout),
      rows_(std::move(rows)),
      image_(span_bytes(dtype, memory_extents(extents, rows_), layout), kPoison),
      buffer_(device, image_.size()) {
  buffer_.fill(kPoison);
}

template <class F>
void StridedTensor::for_each_element(F f) const {
  const int64_t bytes = bytes_of(dtype_);
  for (int64_t b = 0; b < extents_.batch; ++b) {
    const RowMap::Entry& rows = rows_.entries[static_cast<size_t>(b)];
    for (int64_t h = 0; h < extents_.heads; ++h)
      for (int64_t r = 0; r < rows.count; ++r) {
        const int64_t first = layout_.offset + (rows_.packed ? 0 : b * layout_.batch_stride) +
                              h * layout_.head_stride + (rows.first + r) * layout_.row_stride;
        auto n = static_cast<size_t>(((b * extents_.heads + h) * extents_.rows + r) * extents_.dim);
        for (int64_t c = 0; c < extents_.dim; ++c) f(n++, static_cast<size_t>((first + c) * bytes));
      }
  }
}

void StridedTensor::write(const Tensor& values) {
  for_each_element([&](size_t n, size_t at) { store(dtype_, values.x[n], &image_[at]); });
  buffer_.upload(image_.data());
}

void StridedTensor::poison() {
  std::fill(image_.begin(), image_.end(), kPoison);
  buffer_.fill(kPoison);
}

Tensor StridedTensor::read() const {
  std::vector<unsigned char> memory(image_.size());
  buffer_.download(memory.data());
  Tensor values(extents_.batch, extents_.heads, extents_.rows, extents_.dim);
  for_each_element([&](size_t n, size_t at) { values.x[n] = load(dtype_, &memory[at]); });
  return values;
}

bool StridedTensor::surroundings_intact() const {
  std::vector<unsigned char> memory(image_.size()), expected(image_);
  buffer_.download(memory.data());
  const auto forget = [&](size_t, size_t at) {
    for (int byte = 0; byte < bytes_of(dtype_); ++byte) memory[at + byte] = expected[at + byte] = 0;
  };
  for_each_element(forget);
  return memory == expected && buffer_.guards_intact();
}

bool StridedTensor::unchanged() const {
  std::vector<unsigned char> memory(image_.size());
  buffer_.download(memory.data());
  return memory == image_ && buffer_.guards_intact();
}

void* StridedTensor::data() const {
  return static_cast<char*>(buffer_.data()) + layout_.offset * bytes_of(dtype_);
}

cuflash_tensor_t StridedTensor::tensor() const {
  cuflash_tensor_t t = {};
  t.data = data();
  t.dtype = static_cast<int32_t>(dtype_);
  if (layout_.dense) {
    t.flags = CUFLASH_TENSOR_DENSE;
  } else {
    t.batch_stride = layout_.batch_stride;
    t.head_stride = layout_.head_stride;
    t.row_stride = layout_.row_stride;
  }
  return t;
}

}  // namespace cuflash_test
