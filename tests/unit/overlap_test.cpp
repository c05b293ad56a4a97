// Overlap of strided tensors against the set of their bytes.
#include "common/overlap.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "support/data.hpp"

namespace cuflash {
namespace {

template <class F>
void for_each_byte(const Box& box, F f) {
  for (int64_t a = 0; a < box.extent[0]; ++a)
    for (int64_t b = 0; b < box.extent[1]; ++b)
      for (int64_t c = 0; c < box.extent[2]; ++c)
        for (int64_t d = 0; d < box.extent[3]; ++d)
          for (int64_t byte = 0; byte < box.element_bytes; ++byte)
            f(box.base + static_cast<uint64_t>(a * box.stride[0] + b * box.stride[1] +
                                               c * box.stride[2] + d * box.stride[3] + byte));
}

bool brute_overlap(const Box& a, const Box& b) {
  std::set<uint64_t> bytes;
  for_each_byte(a, [&](uint64_t at) { bytes.insert(at); });
  bool found = false;
  for_each_byte(b, [&](uint64_t at) { found = found || bytes.count(at) > 0; });
  return found;
}

bool brute_overlaps_itself(const Box& box) {
  std::map<uint64_t, int> count;
  bool found = false;
  for_each_byte(box, [&](uint64_t at) { found = ++count[at] > 1 || found; });
  return found;
}

Box random_box(cuflash_test::Random& random) {
  Box box;
  box.base = static_cast<uint64_t>(1000 + random.below(60));
  box.element_bytes = 1 + random.below(6);
  for (int d = 0; d < Box::kDims; ++d) {
    box.extent[d] = 1 + random.below(4);
    box.stride[d] = random.below(random.below(2) ? 8 : 40);
  }
  return box;
}

TEST(Overlap, RandomPairs) {
  cuflash_test::Random random(1);
  int overlapping = 0;
  for (int n = 0; n < 40000; ++n) {
    const Box a = random_box(random), b = random_box(random);
    const Overlap got = boxes_overlap(a, b);
    ASSERT_NE(got, Overlap::kTooComplex);
    ASSERT_EQ(got == Overlap::kYes, brute_overlap(a, b)) << n;
    ASSERT_EQ(got, boxes_overlap(b, a));
    overlapping += got == Overlap::kYes;
  }
  EXPECT_GT(overlapping, 4000);
  EXPECT_LT(overlapping, 39000);
}

TEST(Overlap, RandomSingles) {
  cuflash_test::Random random(2);
  int overlapping = 0;
  for (int n = 0; n < 40000; ++n) {
    Box box = random_box(random);
    if (random.below(2))  // more that do not
      for (int d = 0; d < Box::kDims; ++d) box.stride[d] *= 7;
    const Overlap got = box_overlaps_itself(box);
    ASSERT_NE(got, Overlap::kTooComplex);
    ASSERT_EQ(got == Overlap::kYes, brute_overlaps_itself(box)) << n;
    overlapping += got == Overlap::kYes;
  }
  EXPECT_GT(overlapping, 4000);
  EXPECT_LT(overlapping, 39000);
}

Box tensor(uint64_t base, int64_t batch, int64_t heads, int64_t rows, int64_t batch_stride,
           int64_t head_stride, int64_t row_stride, int64_t bytes) {
  Box box;
  box.base = base;
  box.extent[0] = batch, box.extent[1] = heads, box.extent[2] = rows;
  box.stride[0] = batch_stride, box.stride[1] = head_stride, box.stride[2] = row_stride;
  box.element_bytes = bytes;
  return box;
}

TEST(Overlap, PackedQkvIsLegal) {
  // [B 8, S 4096, 3, H 32, D 128] in two bytes: q, k and v interleaved.
  const int64_t head = 256, token = 3 * 32 * head, sequence = 4096 * token;
  const auto part = [&](int64_t which) {
    return tensor(static_cast<uint64_t>(0x7f0000000000 + which * 32 * head), 8, 32, 4096, sequence,
                  head, token, head);
  };
  EXPECT_EQ(boxes_overlap(part(0), part(1)), Overlap::kNone);
  EXPECT_EQ(boxes_overlap(part(0), part(2)), Overlap::kNone);
  EXPECT_EQ(boxes_overlap(part(1), part(2)), Overlap::kNone);
  EXPECT_EQ(box_overlaps_itself(part(0)), Overlap::kNone);
  Box shifted = part(1);
  shifted.base -= 2;  // one element
  EXPECT_EQ(boxes_overlap(part(0), shifted), Overlap::kYes);
}

TEST(Overlap, LargeStridesAndTouchingEnds) {
  const Box a = tensor(uint64_t{1} << 40, 2, 1, 10, int64_t{1} << 50, 0, 256, 256);
  Box b = a;
  b.base += 2560;
  EXPECT_EQ(boxes_overlap(a, b), Overlap::kNone);
  b.base -= 1;
  EXPECT_EQ(boxes_overlap(a, b), Overlap::kYes);
  b.base = a.base + (uint64_t{1} << 50) + 2560 - 1;
  EXPECT_EQ(boxes_overlap(a, b), Overlap::kYes);
}

}  // namespace
}  // namespace cuflash
