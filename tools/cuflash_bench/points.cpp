#include "points.hpp"

#include <algorithm>

namespace cuflash_bench {

// ---- a point --------------------------------------------------------------------------------------------

KeyRange Point::seen_by(int64_t q_row) const {
  if (mask == "full") return {0, len_k};
  const int64_t centre = q_row + len_k - len_q;  // bottom-right
  const int64_t first = mask == "window" ? centre - window + 1 : 0;
  return {std::clamp(first, int64_t{0}, len_k), std::clamp(centre + 1, int64_t{0}, len_k)};
}

double Point::pairs() const {
  double sum = 0;
  for (int64_t row = 0; row < len_q; ++row) {
    const KeyRange seen = seen_by(row);
    sum += static_cast<double>(seen.end - seen.begin);
    // The last key that a row sees is its centre.
    if (mask == "causal" && !seen.empty()) sum -= 0.5;
  }
  return sum;
}

double Point::forward_flops() const {
  return 4 * static_cast<double>(batch * heads) * pairs() * static_cast<double>(head_dim);
}

double Point::forward_bytes() const {
  const auto rows = static_cast<double>(2 * queries() + 2 * keys());  // of q and o, of k and v
  return rows * static_cast<double>(head_dim) * static_cast<double>(bytes_of(dtype)) +
         static_cast<double>(queries()) * sizeof(float);
}

size_t bytes_of(const std::string& dtype) { return dtype == "f32" ? 4 : 2; }

namespace {

// The window as cuflash.h counts it, on either side of the centre.
std::string words_of_mask(const Point& point) {
  return point.mask == "window" ? "window " + std::to_string(point.window - 1) + ",0" : point.mask;
}

}  // namespace

std::string words_of(const Point& point) {
  std::string words = point.dtype + " " + words_of_mask(point) + " B" +
                      std::to_string(point.batch) + " H" + std::to_string(point.heads);
  if (point.heads_kv != point.heads) words += " Hkv" + std::to_string(point.heads_kv);
  if (point.len_q == point.len_k)
    words += " S" + std::to_string(point.len_q);
  else
    words += " Sq" + std::to_string(point.len_q) + " Sk" + std::to_string(point.len_k);
  return words + " D" + std::to_string(point.head_dim);
}

Json json_of(const Point& point) {
  Json json = {{"dtype", point.dtype},      {"mask", words_of_mask(point)}, {"batch", point.batch},
               {"heads", point.heads},      {"heads_kv", point.heads_kv},   {"length", point.len_q},
               {"head_dim", point.head_dim}};
  if (point.len_k != point.len_q) json["length_k"] = point.len_k;
  return json;
}

// ---- presets --------------------------------------------------------------------------------------------

namespace {

// The defaults of all axes: 16,384 tokens and 2,048 channels at every length and head dimension.
Axes default_axes() {
  Axes axes;
  axes.dtype = {"bf16"};
  axes.mask = {"full", "causal"};
  axes.len = {512, 1024, 2048, 4096, 8192, 16384};
  axes.head_dim = {64, 128, 256};
  axes.tokens = 16384;
  axes.hidden = 2048;
  return axes;
}

std::vector<Preset> make_presets() {
  std::vector<Preset> presets = {
      {"tokens16k", "16,384 tokens, 2,048 channels over all heads, at six lengths", {}},
      {"few-blocks", "one sequence of 8 heads: less work than a large GPU has SMs", {}},
      {"window", "16,384 tokens, of which each sees the last 1,024", {}},
      {"tiny", "seconds on the CPU device", {}},
  };
  Axes& few_blocks = presets[1].axes;
  few_blocks.batch = {1};
  few_blocks.heads = {8};
  few_blocks.len = {512, 1024, 2048};
  Axes& window = presets[2].axes;
  window.mask = {"window"};
  window.window = {1024};
  window.len = {16384};
  Axes& tiny = presets[3].axes;
  tiny.dtype = {"f32"};
  tiny.batch = {2};
  tiny.heads = {4};
  tiny.heads_kv = {2};
  tiny.len = {65, 130};
  tiny.head_dim = {32};
  return presets;
}

template <class Values>
void take_over(const Values& from, Values* to) {
  if (from != Values()) *to = from;
}

// What is set in `from` replaces what is set in *to.
void take_over(const Axes& from, Axes* to) {
  // Rows and keys come either together or each by itself.
  if (!from.len_q.empty()) to->len.clear();
  take_over(from.len, &to->len);
  take_over(from.len_q, &to->len_q);
  take_over(from.len_k, &to->len_k);
  // The window of a preset goes with its mask.
  if (!from.mask.empty() && std::count(from.mask.begin(), from.mask.end(), "window") == 0)
    to->window.clear();
  take_over(from.mask, &to->mask);
  take_over(from.window, &to->window);
  take_over(from.dtype, &to->dtype);
  take_over(from.head_dim, &to->head_dim);
  take_over(from.batch, &to->batch);
  take_over(from.heads, &to->heads);
  take_over(from.heads_kv, &to->heads_kv);
  take_over(from.tokens, &to->tokens);
  take_over(from.hidden, &to->hidden);
}

void check_lists(const Axes& axes) {
  if (!axes.len.empty() && !axes.len_q.empty())
    throw UsageError("--len and --len-q exclude each other");
  if (!axes.len_k.empty() && axes.len_q.empty()) throw UsageError("--len-k needs --len-q");
  const bool window_mask = std::count(axes.mask.begin(), axes.mask.end(), "window") > 0;
  if (window_mask && axes.window.empty()) throw UsageError("--mask window needs --window");
  if (!window_mask && !axes.window.empty()) throw UsageError("--window needs --mask window");
}

// ---- products -------------------------------------------------------------------------------------------

std::vector<int64_t> list_or(const std::vector<int64_t>& list, int64_t otherwise) {
  return list.empty() ? std::vector<int64_t>{otherwise} : list;
}

// Rows and keys.
std::vector<std::pair<int64_t, int64_t>> lengths_of(const Axes& axes) {
  std::vector<std::pair<int64_t, int64_t>> lengths;
  for (const int64_t len : axes.len) lengths.emplace_back(len, len);
  for (const int64_t len_q : axes.len_q)
    for (const int64_t len_k : list_or(axes.len_k, len_q)) lengths.emplace_back(len_q, len_k);
  return lengths;
}

// Masks with their windows.
std::vector<std::pair<std::string, int64_t>> masks_of(const Axes& axes) {
  std::vector<std::pair<std::string, int64_t>> masks;
  for (const std::string& mask : axes.mask) {
    if (mask != "window") {
      masks.emplace_back(mask, 0);
    } else {
      for (const int64_t window : axes.window) masks.emplace_back(mask, window);
    }
  }
  return masks;
}

// The heads of a point whose other extents are set.
void add_heads(const Axes& axes, Point point, std::vector<Point>* points) {
  for (const int64_t heads : list_or(axes.heads, axes.hidden / point.head_dim)) {
    if (point.batch < 1 || heads < 1)
      throw UsageError("length " + std::to_string(point.len_q) + ", head dim " +
                       std::to_string(point.head_dim) + ": more than --tokens " +
                       std::to_string(axes.tokens) + ", --hidden " + std::to_string(axes.hidden));
    for (const int64_t heads_kv : list_or(axes.heads_kv, heads)) {
      if (heads % heads_kv != 0)
        throw UsageError(std::to_string(heads) + " query heads are no multiple of " +
                         std::to_string(heads_kv) + " key/value heads");
      point.heads = heads;
      point.heads_kv = heads_kv;
      points->push_back(point);
    }
  }
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = make_presets();
  return all;
}

std::vector<Point> points_of(const Preset& preset, const Axes& given) {
  Axes axes = default_axes();
  take_over(preset.axes, &axes);
  if (!given.len.empty() && !given.len_q.empty())
    throw UsageError("--len and --len-q exclude each other");
  take_over(given, &axes);
  check_lists(axes);
  std::vector<Point> points;
  for (const std::string& dtype : axes.dtype) {
    for (const int64_t head_dim : axes.head_dim) {
      for (const auto& [len_q, len_k] : lengths_of(axes)) {
        for (const auto& [mask, window] : masks_of(axes)) {
          for (const int64_t batch : list_or(axes.batch, axes.tokens / len_q)) {
            Point point;
            point.dtype = dtype;
            point.mask = mask;
            point.window = window;
            point.batch = batch;
            point.len_q = len_q;
            point.len_k = len_k;
            point.head_dim = head_dim;
            add_heads(axes, point, &points);
          }
        }
      }
    }
  }
  return points;
}

}  // namespace cuflash_bench
