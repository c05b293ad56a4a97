// What is measured: points, and the axes that they are products of.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "text.hpp"

namespace cuflash_bench {

// A command line that cannot be answered; the text says why.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The keys that a row sees: begin to before end.
struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// Attention of `batch` sequences of one length, in dense tensors.
struct Point {
  std::string dtype;
  std::string mask;    // "full", "causal" or "window"
  int64_t window = 0;  // with "window": keys that a row sees at most, up to its centre
  int64_t batch = 0, heads = 0, heads_kv = 0, len_q = 0, len_k = 0, head_dim = 0;

  int64_t queries() const { return batch * heads * len_q; }
  int64_t keys() const { return batch * heads_kv * len_k; }

  KeyRange seen_by(int64_t q_row) const;

  // Pairs of a row and a key that it sees, in one head. Under a causal mask the diagonal counts half: a square problem is
  // half of the full one then, which is how speeds of attention are commonly given.
  double pairs() const;

  // Of the two products of forward.
  double forward_flops() const;

  // The fewest that forward has to move: q, k and v read once, o and LSE written once.
  double forward_bytes() const;
};

size_t bytes_of(const std::string& dtype);

// In the words of cuflash-info: "bf16 causal B4 H32 Hkv8 S4096 D128".
std::string words_of(const Point& point);

// With the keys of benchmarks/compare.py; length_k only where there are not as many keys as rows.
Json json_of(const Point& point);

// Lists, every combination of which is a point. What is empty follows from the others.
struct Axes {
  std::vector<std::string> dtype, mask;
  std::vector<int64_t> window, len, len_q, len_k, head_dim, batch, heads, heads_kv;
  int64_t tokens = 0, hidden = 0;  // 0: not given
};

struct Preset {
  const char* name;
  const char* about;
  Axes axes;
};
const std::vector<Preset>& presets();

// Of the axes that are given, else those of the preset, else the defaults; throws UsageError where they do not fit
// together.
std::vector<Point> points_of(const Preset& preset, const Axes& given);

}  // namespace cuflash_bench
