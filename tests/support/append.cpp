#include "support/append.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

namespace cuflash_test {
namespace {

template <class T>
void list(std::ostringstream& text, const char* name, const std::vector<T>& values) {
  if (values.empty()) return;
  text << ' ' << name << '{';
  for (size_t n = 0; n < values.size(); ++n) text << (n ? "," : "") << values[n];
  text << '}';
}

// Of codes; those of int4 lie two a byte, and rows begin with a byte.
Layout layout_of_codes(int32_t dtype, const Extents& e, bool slots_outermost, bool random,
                       Random& layouts) {
  const bool halves = bits_of_stored(dtype) == 4;
  Extents units = e;
  if (halves) units.dim = (e.dim + 1) / 2;
  Layout layout = random            ? random_layout(units, layouts)
                  : slots_outermost ? bshd_layout(units)
                  : halves          ? bhsd_layout(units)
                                    : dense_layout(units);
  if (halves)
    for (int64_t* stride :
         {&layout.offset, &layout.batch_stride, &layout.head_stride, &layout.row_stride})
      *stride *= 2;
  return layout;
}

size_t span_bytes(int32_t dtype, const Extents& e, const Layout& l) {
  if (e.batch * e.heads * e.rows * e.dim == 0) return 0;
  const int64_t elements = l.offset + (e.batch - 1) * l.batch_stride +
                           (e.heads - 1) * l.head_stride + (e.rows - 1) * l.row_stride + e.dim;
  return static_cast<size_t>((elements * bits_of_stored(dtype) + 7) / 8);
}

uint32_t get_code(int32_t dtype, const unsigned char* memory, int64_t index) {
  const int bits = bits_of_stored(dtype);
  if (bits == 4) return memory[index / 2] >> (index % 2 * 4) & 0xfu;
  uint32_t code = 0;
  std::memcpy(&code, memory + index * (bits / 8), static_cast<size_t>(bits / 8));
  return code;
}

}  // namespace

StoredTensor::StoredTensor(Device device, int32_t dtype, const Extents& extents,
                           const Layout& layout)
    : dtype_(dtype),
      extents_(extents),
      layout_(layout),
      image_(span_bytes(dtype, extents, layout), 0xff),
      buffer_(device, image_.size()) {}

template <class F>
void StoredTensor::for_each_element(F f) const {
  size_t n = 0;
  for (int64_t b = 0; b < extents_.batch; ++b)
    for (int64_t h = 0; h < extents_.heads; ++h)
      for (int64_t r = 0; r < extents_.rows; ++r)
        for (int64_t c = 0; c < extents_.dim; ++c)
          f(n++, layout_.offset + b * layout_.batch_stride + h * layout_.head_stride +
                     r * layout_.row_stride + c);
}

void StoredTensor::write(const std::vector<uint32_t>& codes) {
  for_each_element([&](size_t n, int64_t at) { put_code(dtype_, image_.data(), at, codes[n]); });
  buffer_.upload(image_.data());
}

std::vector<uint32_t> StoredTensor::read() const {
  std::vector<unsigned char> memory(image_.size());
  buffer_.download(memory.data());
  std::vector<uint32_t> codes;
  for_each_element([&](auto, int64_t at) { codes.push_back(get_code(dtype_, memory.data(), at)); });
  return codes;
}

bool StoredTensor::surroundings_intact() const {
  std::vector<unsigned char> memory(image_.size()), expected(image_);
  buffer_.download(memory.data());
  for_each_element([&](auto, int64_t at) {
    put_code(dtype_, memory.data(), at, 0);
    put_code(dtype_, expected.data(), at, 0);
  });
  return memory == expected && buffer_.guards_intact();
}

cuflash_tensor_t StoredTensor::tensor() const {
  cuflash_tensor_t t = {};
  t.data = static_cast<char*>(buffer_.data()) + layout_.offset * bits_of_stored(dtype_) / 8;
  t.dtype = dtype_;
  if (layout_.dense) {
    t.flags = CUFLASH_TENSOR_DENSE;
  } else {
    t.batch_stride = layout_.batch_stride;
    t.head_stride = layout_.head_stride;
    t.row_stride = layout_.row_stride;
  }
  return t;
}

int64_t AppendCase::pool() const {
  if (page_size > 0) return batch * columns() + 1;  // one page that nobody uses
  return entries.empty() ? batch : batch + 1;
}

std::string describe(const AppendCase& c) {
  std::ostringstream text;
  text << name_of(c.device) << ' ' << name_of(c.dtype) << " into " << c.stored_k() << '/'
       << c.stored_v() << " B" << c.batch << " Hq" << c.heads_q << " Hkv" << c.heads_kv << " len"
       << c.len << " D" << c.dim << '/' << c.dim_v << " max" << c.max_len << " page" << c.page_size
       << (c.csr ? " csr" : "") << (c.wide_ids ? " wide" : "") << (c.slots_outermost ? " nhd" : "")
       << " rotary" << c.rotary_dim << (c.interleaved ? " interleaved" : "") << " of "
       << c.max_position << " scales" << c.scales << c.zeros << c.one_scale << " of "
       << c.scale_group << ' ' << name_of(c.scale_dtype) << " norms" << c.norm_q << c.norm_k
       << " eps" << c.epsilon << (c.in_place ? " in place" : "") << " amplitude" << c.amplitude
       << " layout" << c.layout_seed << " seed" << c.seed;
  list(text, "lengths", c.lengths);
  list(text, "positions", c.positions);
  list(text, "slots", c.slots);
  list(text, "entries", c.entries);
  list(text, "pages", c.pages);
  list(text, "indptr", c.indptr);
  return text.str();
}

template <class T>
const T* AppendCall::on_device(const std::vector<T>& values,
                               std::unique_ptr<DeviceArray<T>>& array) {
  array = std::make_unique<DeviceArray<T>>(case_.device, values);
  return array->data();
}

void AppendCall::make_side(Side& side, uint32_t t, Random& layouts) {
  const AppendCase& c = case_;
  const Extents e = {c.pool(), c.heads_kv, c.entry_slots(), side.dim};
  Random random(c.seed * 64 + t);
  const int64_t count = e.batch * e.heads * e.rows * e.dim;
  for (int64_t n = 0; n < count; ++n)
    side.before.push_back(nearest_code(side.dtype, random.normal()));
  side.memory = std::make_unique<StoredTensor>(
      c.device, side.dtype, e,
      layout_of_codes(side.dtype, e, c.slots_outermost, c.layout_seed != 0, layouts));
  side.memory->write(side.before);

  // As many of K as of V, which share the strides.
  const int64_t most = std::max(c.dim, c.dim_v);
  const int64_t groups = c.scale_group == 0 ? 1 : (most + c.scale_group - 1) / c.scale_group;
  const auto draw = [&](std::unique_ptr<StridedTensor>& device, double least, double range) {
    const Extents of =
        c.one_scale ? Extents{1, 1, 1, groups} : Extents{e.batch, e.heads, e.rows, groups};
    Tensor values = Tensor::from(of.batch, of.heads, of.rows, of.dim, [&](auto...) {
      return round_to(c.scale_dtype, least + range * random.uniform());
    });
    device = std::make_unique<StridedTensor>(c.device, c.scale_dtype, of, dense_layout(of));
    device->write(values);
    return values;
  };
  if (c.scales) side.scale = draw(side.device_scale, 0.02, 0.3);
  if (c.zeros && is_integer(side.dtype)) side.zero = draw(side.device_zero, -3, 6);
}

AppendCall::AppendCall(const AppendCase& c) : case_(c) {
  Random random(c.seed * 64 + 7);
  // Which pages each sequence has.
  pages_ = c.pages;
  if (pages_.empty() && c.page_size > 0) {
    std::vector<int64_t> free(static_cast<size_t>(c.pool()));
    std::iota(free.begin(), free.end(), 0);
    for (size_t n = free.size(); n > 1; --n)
      std::swap(free[n - 1], free[static_cast<size_t>(random.below(static_cast<int64_t>(n)))]);
    pages_.assign(free.begin(), free.end() - 1);
  }
  indptr_ = c.indptr;
  for (int64_t b = 0; indptr_.empty() || (c.indptr.empty() && b <= c.batch); ++b)
    indptr_.push_back(static_cast<int32_t>(b * c.columns()));

  const auto make = [&](int64_t batch, int64_t heads, int64_t rows, int64_t dim, uint32_t t,
                        Dtype dtype) {
    Tensor values(batch, heads, rows, dim);
    fill(values, DataKind::kNormal, t, c.seed, -1, dtype);
    return values;
  };
  const auto scaled = [&](Tensor values) {
    for (double& x : values.x) x = round_to(c.dtype, x * c.amplitude);
    return values;
  };
  k_ = scaled(make(c.batch, c.heads_kv, c.len, c.dim, 1, c.dtype));
  v_ = scaled(make(c.batch, c.heads_kv, c.len, c.dim_v, 2, c.dtype));
  q_ = scaled(make(c.batch, c.heads_q, c.len, c.dim, 3, c.dtype));
  weights_q_ = c.norm_q ? make(1, 1, 1, c.dim, 6, c.dtype).x : std::vector<double>();
  weights_k_ = c.norm_k ? make(1, 1, 1, c.dim, 7, c.dtype).x : std::vector<double>();
  for (int64_t position = 0; position < c.max_position; ++position)
    for (int64_t pair = 0; pair < c.rotary_dim / 2; ++pair) {
      const double angle =
          static_cast<double>(position) *
          std::pow(100.0, -2.0 * static_cast<double>(pair) / static_cast<double>(c.rotary_dim));
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  poison_skipped_rows();

  Random layouts(c.layout_seed * 64 + 3);
  const auto place = [&](const Tensor& values) {
    const Extents e = {values.batch, values.heads, values.rows, values.dim};
    auto tensor = std::make_unique<StridedTensor>(
        c.device, c.dtype, e, c.layout_seed != 0 ? random_layout(e, layouts) : dense_layout(e));
    tensor->write(values);
    return tensor;
  };
  new_k_ = place(k_);
  k_side_ = {"cache.k", c.stored_k(), c.dim, {}, {}, {}, nullptr, nullptr, nullptr};
  make_side(k_side_, 4, layouts);
  if (c.dim_v > 0) {
    new_v_ = place(v_);
    v_side_ = {"cache.v", c.stored_v(), c.dim_v, {}, {}, {}, nullptr, nullptr, nullptr};
    make_side(v_side_, 5, layouts);
  }
  if (c.heads_q > 0) {
    new_q_ = place(q_);
    if (!c.in_place) {
      q_out_ = place(q_);
      q_out_->poison();
    }
  }

  cuflash_kv_cache_init(&cache_, sizeof cache_);
  const auto attach = [&](const Side& side, cuflash_tensor_t& tensor, const void*& scale,
                          const void*& zero) {
    if (!side.memory) return;
    tensor = side.memory->tensor();
    if (side.device_scale) scale = side.device_scale->data();
    if (side.device_zero) zero = side.device_zero->data();
    if (!side.device_scale && !side.device_zero) return;
    const Tensor& any = side.device_scale ? side.scale : side.zero;
    cache_.scale_group = c.scale_group;
    cache_.scale_dtype = static_cast<int32_t>(c.scale_dtype);
    if (c.one_scale) return;
    cache_.scale_slot_stride = any.dim;
    cache_.scale_head_stride = any.rows * any.dim;
    cache_.scale_page_stride = any.heads * any.rows * any.dim;
  };
  attach(k_side_, cache_.k, cache_.k_scale, cache_.k_zero);
  attach(v_side_, cache_.v, cache_.v_scale, cache_.v_zero);
  cache_.max_len = c.max_len;
  cache_.num_pages = c.pool();
  if (!c.lengths.empty()) cache_.lengths = on_device(c.lengths, device_lengths_);
  if (!c.entries.empty()) cache_.cache_batch_idx = on_device(c.entries, device_entries_);
  if (c.page_size > 0) {
    cache_.page_size = c.page_size;
    cache_.id_bits = c.wide_ids ? 64 : 32;
    const void* ids =
        c.wide_ids ? static_cast<const void*>(on_device(pages_, wide_pages_))
                   : on_device(std::vector<int32_t>(pages_.begin(), pages_.end()), device_pages_);
    cache_.layout = c.csr ? CUFLASH_CACHE_PAGED_CSR : CUFLASH_CACHE_PAGED;
    if (c.csr) {
      cache_.page_indptr = on_device(indptr_, device_indptr_);
      cache_.page_indices = ids;
    } else {
      cache_.block_table = ids;
      cache_.block_table_stride = c.columns();
    }
  }

  cuflash_kv_append_init(&append_, sizeof append_);
  append_.flags = c.interleaved ? CUFLASH_APPEND_INTERLEAVED : 0;
  append_.batch = c.batch;
  append_.heads_q = c.heads_q;
  append_.heads_kv = c.heads_kv;
  append_.len = c.len;
  append_.head_dim = c.dim;
  append_.head_dim_v = c.dim_v;
  append_.k = new_k_->tensor();
  if (new_v_) append_.v = new_v_->tensor();
  if (new_q_) {
    append_.q = new_q_->tensor();
    append_.q_out = c.in_place ? append_.q : q_out_->tensor();
  }
  if (!c.positions.empty()) append_.positions = on_device(c.positions, device_positions_);
  if (!c.slots.empty()) append_.slot_mapping = on_device(c.slots, device_slots_);
  if (c.rotary_dim > 0) {
    append_.rotary_dim = c.rotary_dim;
    append_.max_position = c.max_position;
    append_.cos = on_device(cos_, device_cos_);
    append_.sin = on_device(sin_, device_sin_);
  }
  const auto norm = [&](const std::vector<double>& weights, std::unique_ptr<StridedTensor>& array) {
    Tensor values(1, 1, 1, c.dim);
    values.x = weights;
    array = place(values);
    return array->data();
  };
  if (c.norm_q) append_.q_norm_weight = norm(weights_q_, norm_q_);
  if (c.norm_k) append_.k_norm_weight = norm(weights_k_, norm_k_);
  append_.norm_epsilon = c.epsilon;
}

// ---- where tokens go ----------------------------------------------------------------------------

int64_t AppendCall::position_of(int64_t b, int64_t i) const {
  if (!case_.positions.empty()) return case_.positions[static_cast<size_t>(b * case_.len + i)];
  if (case_.lengths.empty()) return 0;  // slots alone
  const int64_t length = case_.lengths[static_cast<size_t>(b)];
  return length < 0 ? -1 : length + i;
}

bool AppendCall::has_angle(int64_t b, int64_t i) const {
  const int64_t position = position_of(b, i);
  return case_.rotary_dim == 0 || (position >= 0 && position < case_.max_position);
}

std::optional<AppendCall::Place> AppendCall::place_of(int64_t b, int64_t i) const {
  const AppendCase& c = case_;
  if (!has_angle(b, i)) return {};
  if (!c.slots.empty()) {
    const int64_t slot = c.slots[static_cast<size_t>(b * c.len + i)];
    if (slot < 0 || slot >= c.pool() * c.entry_slots()) return {};
    return Place{slot / c.entry_slots(), slot % c.entry_slots()};
  }
  const int64_t position = position_of(b, i);
  if (position < 0 || position >= c.max_len) return {};
  Place place = {b, position};
  if (!c.entries.empty()) place.entry = c.entries[static_cast<size_t>(b)];
  if (c.page_size > 0) {
    const int64_t column = position / c.page_size;
    int64_t at = b * c.columns() + column;
    if (c.csr) {
      at = indptr_[static_cast<size_t>(b)] + column;
      if (at >= indptr_[static_cast<size_t>(b) + 1]) return {};
    }
    place = {pages_[static_cast<size_t>(at)], position % c.page_size};
  }
  if (place.entry < 0 || place.entry >= c.pool()) return {};
  return place;
}

void AppendCall::poison_skipped_rows() {
  const double nan = std::nan("");
  const auto poison = [&](Tensor& t, auto skipped) {
    t.for_each([&](int64_t b, auto, int64_t i, auto, double& x) {
      if (skipped(b, i)) x = nan;
    });
  };
  const auto placeless = [&](int64_t b, int64_t i) { return !place_of(b, i); };
  poison(k_, placeless);
  poison(v_, placeless);
  poison(q_, [&](int64_t b, int64_t i) { return !has_angle(b, i); });
}

// ---- what must come of a row --------------------------------------------------------------------

AppendCall::Row AppendCall::changed(const double* row, const std::vector<double>& weights) const {
  const auto dim = static_cast<size_t>(case_.dim);
  constexpr double kRounding = 0x1p-24;  // of an fp32 operation, relative
  Row r;
  r.x.assign(row, row + dim);
  r.error.assign(dim, 0);
  if (!weights.empty()) {
    double sum = 0;
    for (const double x : r.x) sum += x * x;
    const double square = sum / static_cast<double>(dim) + static_cast<double>(case_.epsilon);
    for (size_t c = 0; c < dim; ++c) {
      r.x[c] = square == 0 ? 0 : r.x[c] / std::sqrt(square) * weights[c];
      // A sum of dim squares, halved by the root, and some single operations.
      r.error[c] = std::abs(r.x[c]) * kRounding * (static_cast<double>(dim) / 2 + 8);
    }
  }
  return r;
}

AppendCall::Row AppendCall::changed_at(const Tensor& t, const std::vector<double>& weights,
                                       int64_t b, int64_t h, int64_t i) const {
  Row r = changed(t.row(b, h, i), weights);
  const auto half = static_cast<size_t>(case_.rotary_dim / 2);
  const auto first = static_cast<size_t>(position_of(b, i)) * half;
  for (size_t pair = 0; pair < half; ++pair) {
    const size_t cx = case_.interleaved ? 2 * pair : pair;
    const size_t cy = case_.interleaved ? 2 * pair + 1 : pair + half;
    const double x = r.x[cx], y = r.x[cy], ex = r.error[cx], ey = r.error[cy];
    const double cos = static_cast<double>(cos_[first + pair]),
                 sin = static_cast<double>(sin_[first + pair]);
    r.x[cx] = x * cos - y * sin;
    r.x[cy] = x * sin + y * cos;
    // Two products and a sum.
    const double along = std::abs(x * cos) + std::abs(y * sin),
                 across = std::abs(x * sin) + std::abs(y * cos);
    r.error[cx] = ex * std::abs(cos) + ey * std::abs(sin) + 0x1p-23 * along;
    r.error[cy] = ex * std::abs(sin) + ey * std::abs(cos) + 0x1p-23 * across;
  }
  return r;
}

namespace {

// The error as a part of that allowed: of what rounds to the stored number at most `error` away from `want`. Of formats
// without a spacing only whether.
double part_of_allowed(int32_t dtype, uint32_t code, double want, double error) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  const double got = value_of_code(dtype, code);
  const double least = value_of_code(dtype, nearest_code(dtype, want - error)),
               most = value_of_code(dtype, nearest_code(dtype, want + error));
  if (!(got >= least && got <= most)) return kWrong;
  if (dtype > CUFLASH_BF16 || error == 0) return 0;
  return std::abs(got - want) / (error + ulp(static_cast<Dtype>(dtype), want) / 2);
}

}  // namespace

double AppendCall::expect_side(const Side& side, const Tensor& rows) const {
  EXPECT_TRUE(side.memory->surroundings_intact())
      << side.name << ": something outside the slots was written";
  const std::vector<uint32_t> codes = side.memory->read();
  std::vector<char> named(codes.size(), 0);
  int wrong = 0;
  double worst = 0;
  for (int64_t b = 0; b < case_.batch; ++b)
    for (int64_t i = 0; i < case_.len; ++i) {
      const std::optional<Place> place = place_of(b, i);
      if (!place) continue;
      for (int64_t h = 0; h < case_.heads_kv; ++h) {
        Row row = {{rows.row(b, h, i), rows.row(b, h, i) + side.dim},
                   std::vector<double>(static_cast<size_t>(side.dim))};
        if (&side == &k_side_) row = changed_at(rows, weights_k_, b, h, i);
        for (int64_t c = 0; c < side.dim; ++c) {
          const auto at = static_cast<size_t>(
              ((place->entry * case_.heads_kv + h) * case_.entry_slots() + place->slot) * side.dim +
              c);
          named[at] = 1;
          double want = row.x[static_cast<size_t>(c)], error = row.error[static_cast<size_t>(c)];
          const auto number = [&](const Tensor& t) {
            const int64_t group = case_.scale_group == 0 ? 0 : c / case_.scale_group;
            return case_.one_scale ? t.at(0, 0, 0, group)
                                   : t.at(place->entry, h, place->slot, group);
          };
          if (side.device_scale) {
            const double scale = number(side.scale);
            want /= scale;
            error = error / scale + std::abs(want) * 0x1p-24;
          }
          if (side.device_zero) {
            want += number(side.zero);
            error += std::abs(want) * 0x1p-24;
          }
          const double part = part_of_allowed(side.dtype, codes[at], want, error);
          worst = std::max(worst, part);
          if (part <= 1 || ++wrong > 1) continue;
          ADD_FAILURE() << side.name << "[entry " << place->entry << " h" << h << " slot "
                        << place->slot << " channel " << c << "] is "
                        << value_of_code(side.dtype, codes[at]) << ", not " << want << " (token "
                        << i << " of sequence " << b << ")";
        }
      }
    }
  EXPECT_EQ(wrong, 0) << side.name;
  size_t changed_elsewhere = 0;
  for (size_t n = 0; n < codes.size(); ++n)
    changed_elsewhere += !named[n] && codes[n] != side.before[n];
  EXPECT_EQ(changed_elsewhere, 0u) << side.name << ": other slots were written";
  return worst;
}

double AppendCall::expect_queries() const {
  const StridedTensor& out = case_.in_place ? *new_q_ : *q_out_;
  EXPECT_TRUE(out.surroundings_intact()) << "q_out: something outside its rows was written";
  if (!case_.in_place) {
    EXPECT_TRUE(new_q_->unchanged()) << "q was written";
  }
  const Tensor values = out.read();
  const auto dtype = static_cast<int32_t>(case_.dtype);
  int wrong = 0;
  double worst = 0;
  for (int64_t b = 0; b < case_.batch; ++b)
    for (int64_t h = 0; h < case_.heads_q; ++h)
      for (int64_t i = 0; i < case_.len; ++i) {
        Row row = {std::vector<double>(static_cast<size_t>(case_.dim)),
                   std::vector<double>(static_cast<size_t>(case_.dim))};
        if (has_angle(b, i)) row = changed_at(q_, weights_q_, b, h, i);
        for (int64_t c = 0; c < case_.dim; ++c) {
          const auto n = static_cast<size_t>(c);
          const double part = part_of_allowed(dtype, nearest_code(dtype, values.at(b, h, i, c)),
                                              row.x[n], row.error[n]);
          worst = std::max(worst, part);
          if (part <= 1 || ++wrong > 1) continue;
          ADD_FAILURE() << "q_out[b" << b << " h" << h << " token " << i << " channel " << c
                        << "] is " << values.at(b, h, i, c) << ", not " << row.x[n];
        }
      }
  EXPECT_EQ(wrong, 0) << "q_out";
  return worst;
}

// ---- the call -----------------------------------------------------------------------------------

cuflash_status_t AppendCall::launch(cuflash_stream_t stream) const {
  return cuflash_kv_cache_append(handle_of(case_.device), &cache_, &append_, stream);
}

double AppendCall::expect_right() const {
  double worst = expect_side(k_side_, k_);
  EXPECT_TRUE(new_k_->unchanged()) << "k was written";
  if (new_v_) {
    worst = std::max(worst, expect_side(v_side_, v_));
    EXPECT_TRUE(new_v_->unchanged()) << "v was written";
  }
  return new_q_ ? std::max(worst, expect_queries()) : worst;
}

void AppendCall::reset() {
  for (Side* side : {&k_side_, &v_side_})
    if (side->memory) side->memory->write(side->before);
  if (new_q_) new_q_->write(q_);
  if (q_out_) q_out_->poison();
}

void AppendCall::set_lengths(const std::vector<int32_t>& lengths) {
  case_.lengths = lengths;
  device_lengths_->upload(lengths);
}

double expect_append(const AppendCase& c) {
  SCOPED_TRACE(describe(c));
  AppendCall call(c);
  const cuflash_status_t status = call.launch();
  EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
  synchronize(c.device);
  return call.expect_right();
}

}  // namespace cuflash_test
