#include "common/overlap.hpp"

#include <algorithm>

namespace cuflash {
namespace {

// One term coefficient * index of the address difference of two elements, lo <= index <= hi.
struct Term {
  int64_t coefficient, lo, hi;
};

// Is there a choice of indices with  lo <= target + sum terms <= hi?  Depth first over the terms, largest
// coefficient first, keeping only the indices whose remainder the smaller terms can still reach: for
// nested strides (every layout in practice) that leaves one or two a level.
class Search {
 public:
  Search(int64_t lo, int64_t hi) : lo_(lo), hi_(hi) {}

  void add(int64_t coefficient, int64_t lo, int64_t hi) {
    if (coefficient == 0 || (lo == 0 && hi == 0)) return;
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].coefficient != coefficient) continue;
      terms_[i].lo += lo;  // equal strides: the sum of two intervals is an interval
      terms_[i].hi += hi;
      return;
    }
    terms_[count_++] = {coefficient, lo, hi};
  }

  Overlap run(int64_t target) {
    std::sort(terms_, terms_ + count_,
              [](const Term& a, const Term& b) { return a.coefficient > b.coefficient; });
    reach_lo_[count_] = -hi_, reach_hi_[count_] = -lo_;
    for (int i = count_ - 1; i >= 0; --i) {
      reach_lo_[i] = reach_lo_[i + 1] + terms_[i].coefficient * terms_[i].lo;
      reach_hi_[i] = reach_hi_[i + 1] + terms_[i].coefficient * terms_[i].hi;
    }
    const bool found = descend(0, target);
    if (found) return Overlap::kYes;
    return steps_ > kMaxSteps ? Overlap::kTooComplex : Overlap::kNone;
  }

 private:
  static constexpr int kMaxTerms = 2 * Box::kDims;
  static constexpr int kMaxSteps = 20000;

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0)); }

  // Can -remaining be reached by terms i and later?
  bool descend(int i, int64_t remaining) {
    if (++steps_ > kMaxSteps) return false;
    if (-remaining < reach_lo_[i] || -remaining > reach_hi_[i]) return false;
    if (i == count_) return true;
    const Term& term = terms_[i];
    // The rest must make up for -remaining - coefficient * index.
    const int64_t first =
        std::max(term.lo, -floor_div(remaining + reach_hi_[i + 1], term.coefficient));
    const int64_t last =
        std::min(term.hi, floor_div(-remaining - reach_lo_[i + 1], term.coefficient));
    for (int64_t index = first; index <= last; ++index)
      if (descend(i + 1, remaining + term.coefficient * index)) return true;
    return false;
  }

  int64_t lo_, hi_;
  Term terms_[kMaxTerms] = {};
  int count_ = 0;
  int64_t reach_lo_[kMaxTerms + 1] = {}, reach_hi_[kMaxTerms + 1] = {};
  int steps_ = 0;
};

int64_t last_offset(const Box& box) {
  int64_t offset = box.element_bytes - 1;
  for (int d = 0; d < Box::kDims; ++d) offset += (box.extent[d] - 1) * box.stride[d];
  return offset;
}

}  // namespace

Overlap boxes_overlap(const Box& a, const Box& b) {
  const uint64_t a_last = a.base + static_cast<uint64_t>(last_offset(a));
  const uint64_t b_last = b.base + static_cast<uint64_t>(last_offset(b));
  if (a_last < b.base || b_last < a.base) return Overlap::kNone;
  // Two runs of bytes meet where  -(bytes_b - 1) <= address_b - address_a <= bytes_a - 1.
  Search search(-(b.element_bytes - 1), a.element_bytes - 1);
  for (int d = 0; d < Box::kDims; ++d) {
    search.add(a.stride[d], -(a.extent[d] - 1), 0);
    search.add(b.stride[d], 0, b.extent[d] - 1);
  }
  return search.run(static_cast<int64_t>(b.base - a.base));
}

Overlap box_overlaps_itself(const Box& box) {
  // Sort by stride; where each stride clears the whole extent of the smaller ones, nothing can meet.
  int order[Box::kDims] = {0, 1, 2, 3};
  std::sort(order, order + Box::kDims, [&](int a, int b) { return box.stride[a] < box.stride[b]; });
  int64_t inner = box.element_bytes;
  bool nested = true;
  for (const int d : order) {
    if (box.extent[d] == 1) continue;
    if (box.stride[d] == 0) return Overlap::kYes;
    nested = nested && box.stride[d] >= inner;
    inner += (box.extent[d] - 1) * box.stride[d];
  }
  if (nested) return Overlap::kNone;
  // Two different indices meet iff their difference, not all zero, does; let dimension d be the first that
  // differs (by symmetry upwards) and the later ones be free.
  bool too_complex = false;
  for (int d = 0; d < Box::kDims; ++d) {
    if (box.extent[d] == 1) continue;
    Search search(-(box.element_bytes - 1), box.element_bytes - 1);
    search.add(box.stride[d], 0, box.extent[d] - 2);  // plus one, in the target
    for (int e = d + 1; e < Box::kDims; ++e)
      search.add(box.stride[e], -(box.extent[e] - 1), box.extent[e] - 1);
    const Overlap result = search.run(box.stride[d]);
    if (result == Overlap::kYes) return result;
    too_complex = too_complex || result == Overlap::kTooComplex;
  }
  return too_complex ? Overlap::kTooComplex : Overlap::kNone;
}

}  // namespace cuflash
