// libFuzzer target: any call through the C ABI is carried out, writing its outputs and nothing else, or is refused with a
// documented status and a message, having written nothing.
//
// An input is a legal problem with some of its fields, sizes and pointers overwritten. Pointers that a call may follow
// come from a few buffers in the middle of vast unreadable regions: whatever reaches out of a buffer, the library must
// refuse. Structs and strings lie in allocations of exactly their size, where AddressSanitizer watches.
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuflash.h"

namespace {

using Input = FuzzedDataProvider;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_calls: %s; last error \"%s\"\n", what, cuflash_last_error());
  std::abort();
}

// ---- memory -------------------------------------------------------------------------------------

enum Buffer { kQ, kK, kV, kO, kLse, kDo, kDq, kDk, kDv, kLengths, kOffsets, kScratch, kBuffers };

class Memory {
 public:
  static constexpr size_t kBytes = 16384;
  static constexpr size_t kReach = size_t{1}
                                   << 38;  // bytes after a buffer that are certainly unreadable

  Memory() : image_(kBuffers * kBytes) {
    for (size_t n = 0; n < image_.size(); n += 2) {
      const uint16_t small_number = static_cast<uint16_t>(0x3c00 + n * 37 % 512);  // in any dtype
      std::memcpy(&image_[n], &small_number, 2);
    }
    for (size_t n = 0; n < 2 * kBytes; n += 4) {
      const int32_t number = static_cast<int32_t>(n % 44 / 4) - 2;
      std::memcpy(&image_[kLengths * kBytes + n], &number, 4);
    }
    for (int b = 0; b < kBuffers; ++b) {
      void* region =
          mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      require(region != MAP_FAILED, "no address space");
      // No round distance between two: a claim of 2^40 bytes must not end in the next one.
      base_[b] =
          static_cast<char*>(region) + kRegion / 2 + size_t{4096} * 37 * static_cast<size_t>(b * b);
      require(mprotect(base_[b], kBytes, PROT_READ | PROT_WRITE) == 0, "mprotect");
      restore(b);
    }
  }

  char* at(int buffer) const { return base_[buffer]; }
  char* unreadable() const { return base_[0] + 2 * kBytes; }

  // A pointer that is usually `usual`, else any other kind.
  void* pick(Input& in, Buffer usual) const {
    constexpr size_t kOffsetsInside[] = {0, 4, 16, 256, 1, 2, kBytes / 2, kBytes - 4};
    const uint8_t choice = in.ConsumeIntegral<uint8_t>();
    if (choice < 208) return base_[usual];
    if (choice < 216) return nullptr;
    if (choice < 220) return unreadable();
    if (choice < 224) return reinterpret_cast<void*>(uintptr_t{64});
    return base_[choice % kBuffers] + in.PickValueInArray(kOffsetsInside);
  }

  // What a call that succeeded has written, and what it has read.
  void wrote(const void* data, size_t bytes) { written_.push_back(locate(data, bytes)); }
  void read(const void* data, size_t bytes) { read_.push_back(locate(data, bytes)); }

  // Outputs overlap neither each other nor an input, and nothing else has changed; puts the first contents back.
  void check_and_restore() {
    std::sort(written_.begin(), written_.end());
    for (size_t n = 1; n < written_.size(); ++n)
      require(written_[n - 1].end() <= written_[n].begin, "outputs that overlap");
    for (const Piece& piece : read_) {
      const auto next = std::upper_bound(written_.begin(), written_.end(), piece);
      require(next == written_.end() || piece.end() <= next->begin, "an output over an input");
      require(next == written_.begin() || std::prev(next)->end() <= piece.begin,
              "an output over an input");
    }
    for (const Piece& piece : written_)
      std::memcpy(base_[piece.begin / kBytes] + piece.begin % kBytes, &image_[piece.begin],
                  piece.bytes);
    written_.clear();
    read_.clear();
    for (int b = 0; b < kBuffers; ++b) {
      const bool same =
          std::memcmp(base_[b], &image_[static_cast<size_t>(b) * kBytes], kBytes) == 0;
      require(same, "written outside the outputs, or by a refused call");
    }
  }

 private:
  struct Piece {
    size_t begin, bytes;  // in the image
    size_t end() const { return begin + bytes; }
    bool operator<(const Piece& other) const { return begin < other.begin; }
  };

  Piece locate(const void* data, size_t bytes) const {
    const auto* first = static_cast<const char*>(data);
    for (size_t b = 0; b < kBuffers; ++b) {
      if (first < base_[b] || first >= base_[b] + kBytes) continue;
      const auto offset = static_cast<size_t>(first - base_[b]);
      require(bytes <= kBytes - offset, "a call succeeded beyond the end of a buffer");
      return {b * kBytes + offset, bytes};
    }
    require(false, "a call succeeded outside the buffers");
    return {};
  }

  static constexpr size_t kRegion = size_t{1} << 40;

  void restore(int b) { std::memcpy(base_[b], &image_[static_cast<size_t>(b) * kBytes], kBytes); }

  char* base_[kBuffers] = {};
  std::vector<uint8_t> image_;  // the first contents of all buffers
  std::vector<Piece> written_, read_;
};

Memory& memory() {
  static Memory* const instance = new Memory;
  return *instance;
}

// ---- statuses -----------------------------------------------------------------------------------

int log_lines;

// The status of the call before: known, with a message and a log line exactly where it is an error.
cuflash_status_t checked(cuflash_status_t status) {
  require(log_lines == (status != CUFLASH_SUCCESS), "log and status disagree");
  log_lines = 0;
  require(status >= CUFLASH_SUCCESS && status <= CUFLASH_ERROR_ASYNCHRONOUS, "an unknown status");
  require(status != CUFLASH_ERROR_INTERNAL, "an internal error");
  const std::string message = cuflash_last_error();
  require(message.empty() == (status == CUFLASH_SUCCESS), "message and status disagree");
  require(cuflash_last_cuda_error() == 0, "a CUDA error of the CPU device");
  return status;
}

// ---- values -------------------------------------------------------------------------------------

int64_t odd_value(Input& in) {
  constexpr int64_t kExtremes[] = {-1, INT64_MIN, INT64_MAX, 65535, 65536, 70000};
  switch (in.ConsumeIntegralInRange(0, 3)) {
    case 0:
      return in.ConsumeIntegralInRange<int64_t>(-2, 300);
    case 1:  // at a power of two
      return (int64_t{1} << in.ConsumeIntegralInRange(0, 62)) + in.ConsumeIntegralInRange(-1, 1);
    case 2:
      return in.PickValueInArray(kExtremes);
    default:
      return in.ConsumeIntegral<int64_t>();
  }
}

// Overwrites some 4- or 8-byte fields.
template <class T>
void overwrite_fields(Input& in, T* object) {
  for (int n = in.ConsumeIntegralInRange(0, 3); n > 0; --n) {
    const size_t width = in.ConsumeBool() ? 8 : 4;
    const size_t word = in.ConsumeIntegralInRange<size_t>(0, sizeof(T) / width - 1);
    const int64_t value = odd_value(in);
    std::memcpy(reinterpret_cast<char*>(object) + word * width, &value, width);
  }
}

uint32_t claimed_size(Input& in, size_t right) {
  const int64_t sizes[] = {0,
                           4,
                           8,
                           40,
                           48,
                           56,
                           static_cast<int64_t>(right) - 8,
                           static_cast<int64_t>(right) + 8,
                           static_cast<int64_t>(right) + 4,
                           4096,
                           65536,
                           65544,
                           odd_value(in)};
  if (in.ConsumeIntegral<uint8_t>() < 224) return static_cast<uint32_t>(right);
  return static_cast<uint32_t>(in.PickValueInArray(sizes));
}

// A struct as the caller has it: in an allocation of the size that it claims, sometimes NULL.
template <class T>
class Passed {
 public:
  Passed(Input& in, T object) : seen_{} {
    object.struct_size = claimed_size(in, sizeof(T));
    const bool readable = object.struct_size <= 65536;  // the library reads no longer one
    bytes_.resize(readable && object.struct_size > 8 ? object.struct_size : 8);
    std::memcpy(bytes_.data(), &object, std::min(bytes_.size(), sizeof(T)));
    if (bytes_.size() > sizeof(T) && in.ConsumeBool()) bytes_.back() = 1;
    std::memcpy(&seen_, &object, std::min<size_t>(object.struct_size, sizeof(T)));
    null_ = in.ConsumeIntegral<uint8_t>() == 255;
    before_ = bytes_;
  }
  ~Passed() { require(bytes_ == before_, "an input struct was written"); }
  Passed(const Passed&) = delete;
  Passed& operator=(const Passed&) = delete;

  const T* pointer() const { return null_ ? nullptr : reinterpret_cast<const T*>(bytes_.data()); }
  const T& seen() const { return seen_; }  // as the library must understand it

 private:
  std::vector<uint8_t> bytes_, before_;
  T seen_;
  bool null_ = false;
};

const char* kernel_name(Input& in) {
  static const std::string long_name(3000, 'x');
  static const char* const kNames[] = {"",
                                       "cpu",
                                       "reference",
                                       "fwd_cpu",
                                       "bwd_cpu",
                                       "dec_cpu",
                                       "fwd_reference_cpu",
                                       "bwd_reference_cpu",
                                       "dec_reference_cpu",
                                       "append_reference_cpu",
                                       "wmma",
                                       "fwd_wmma_f16_d64",
                                       "no such kernel",
                                       "%s%n",
                                       long_name.c_str()};
  return in.ConsumeIntegral<uint8_t>() < 160 ? nullptr : in.PickValueInArray(kNames);
}

// ---- problems -----------------------------------------------------------------------------------

cuflash_tensor_t make_tensor(Input& in, int64_t heads, int64_t rows, int64_t dim, int32_t dtype) {
  cuflash_tensor_t t = {};
  t.dtype = dtype;
  switch (in.ConsumeIntegralInRange(0, 4)) {
    case 0:  // [batch, row, head, channel] with a gap
      t.row_stride = heads * dim + 3, t.head_stride = dim, t.batch_stride = rows * t.row_stride;
      break;
    case 1:  // [batch, head, row, channel] with gaps
      t.row_stride = dim + 1, t.head_stride = rows * t.row_stride + 8,
      t.batch_stride = heads * t.head_stride;
      break;
    case 2:  // repeated
      break;
    default:
      t.flags = CUFLASH_TENSOR_DENSE;
  }
  return t;
}

struct Shape {
  int64_t batch, heads_q, heads_kv, len_q, len_k, dim;
  int32_t dtype;

  explicit Shape(Input& in) {
    constexpr int64_t kDims[] = {1, 3, 8, 16, 40, 64, 128, 256};
    batch = in.ConsumeIntegralInRange(0, 3);
    heads_kv = in.ConsumeIntegralInRange(0, 3);
    heads_q = heads_kv * in.ConsumeIntegralInRange(0, 3);
    len_q = in.ConsumeIntegralInRange(0, 9);
    len_k = in.ConsumeIntegralInRange(0, 9);
    dim = in.PickValueInArray(kDims);
    dtype = in.ConsumeIntegralInRange(1, 3);
  }
};

cuflash_tensor_t row_stats(float* data, int64_t batch_stride, int64_t head_stride,
                           int64_t row_stride) {
  cuflash_tensor_t t = {};
  t.data = data;
  t.batch_stride = batch_stride, t.head_stride = head_stride, t.row_stride = row_stride;
  if (batch_stride == 0 && head_stride == 0 && row_stride == 0) t.flags = CUFLASH_TENSOR_DENSE;
  return t;
}

// Two kinds of legal calls are kept from running, by a pointer that is refused. Those that take hours, as strides of 0
// repeat a few keys for ever:
bool is_heavy(double batch, double heads, double rows, double keys, double dim) {
  return batch * heads * rows * keys * dim > 300000;
}
// and those that end beyond the unreadable memory around a buffer, where anything may lie.
bool is_far(double elements) { return elements * 4 > Memory::kReach; }
void* unless_far(const cuflash_tensor_t& t, int64_t batch, int64_t heads, int64_t rows,
                 int64_t dim) {
  const auto b = static_cast<double>(batch), h = static_cast<double>(heads),
             r = static_cast<double>(rows);
  const auto d = static_cast<double>(dim);
  const bool dense = (t.flags & CUFLASH_TENSOR_DENSE) != 0;
  const double reach = dense ? b * h * r * d
                             : b * static_cast<double>(t.batch_stride) +
                                   h * static_cast<double>(t.head_stride) +
                                   r * static_cast<double>(t.row_stride) + d;
  return t.data != nullptr && is_far(reach) ? memory().unreadable() : t.data;
}

int64_t heads_kv_of(const cuflash_problem_t& p) { return p.heads_kv == 0 ? p.heads_q : p.heads_kv; }
int64_t dim_v_of(const cuflash_problem_t& p) {
  return p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
}

int64_t tree_words(const cuflash_problem_t& p) {
  const int64_t bits = p.tree_mask_len == 0 ? p.len_q : p.tree_mask_len;
  return bits / 32 + (bits % 32 != 0);
}

// Rows as the tensors have them: packed ones have a single batch entry.
struct Rows {
  int64_t batch, rows;
};
Rows query_rows(const cuflash_problem_t& p) {
  return p.cu_seqlens_q != nullptr ? Rows{1, p.total_q} : Rows{p.batch, p.len_q};
}
Rows key_rows(const cuflash_problem_t& p, int64_t len_k) {
  return p.cu_seqlens_k != nullptr ? Rows{1, p.total_k} : Rows{p.batch, len_k};
}
Rows cache_rows(const cuflash_problem_t& p, const cuflash_kv_cache_t& cache) {
  if (cache.layout != CUFLASH_CACHE_CONTIGUOUS) return {cache.num_pages, cache.page_size};
  const bool entries = cache.cache_batch_idx != nullptr && cache.num_pages > 0;
  return {entries ? cache.num_pages : p.batch, cache.max_len};
}
cuflash_tensor_t scales_of(const cuflash_kv_cache_t& cache, const void* data) {
  cuflash_tensor_t t = {};
  t.data = const_cast<void*>(data);
  t.batch_stride = cache.scale_page_stride, t.head_stride = cache.scale_head_stride;
  t.row_stride = cache.scale_slot_stride;
  return t;
}
// Of each pass: rows of queries with the keys of their sequences, keys with their rows, entries of the bias.
bool is_heavy(const cuflash_problem_t& p, int64_t len_k) {
  const Rows q = query_rows(p), k = key_rows(p, len_k);
  const auto dim = static_cast<double>(p.head_dim > dim_v_of(p) ? p.head_dim : dim_v_of(p));
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  return is_heavy(number(q.batch), number(p.heads_q), number(q.rows), number(len_k), dim) ||
         is_heavy(number(k.batch), number(p.heads_q), number(k.rows), number(p.len_q), dim) ||
         is_heavy(number(p.batch), number(p.heads_q), number(p.len_q), number(len_k), dim);
}

cuflash_problem_t make_problem(Input& in, const Shape& s, bool decode) {
  cuflash_problem_t p = {};
  p.batch = s.batch, p.heads_q = s.heads_q, p.heads_kv = s.heads_kv;
  p.len_q = s.len_q, p.len_k = decode ? 0 : s.len_k, p.head_dim = s.dim;
  p.q = make_tensor(in, s.heads_q, s.len_q, s.dim, s.dtype);
  p.o = make_tensor(in, s.heads_q, s.len_q, s.dim, 0);
  if (!decode) {
    p.k = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
    p.v = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
  }
  p.mask = in.ConsumeIntegralInRange(0, 1);
  p.mask_align = in.ConsumeIntegralInRange(0, 3);
  if (p.mask_align == CUFLASH_ALIGN_OFFSET) p.mask_offset = in.ConsumeIntegralInRange(-9, 9);
  if (in.ConsumeBool()) {
    p.flags |= CUFLASH_PROBLEM_WINDOW;
    p.window_left = in.ConsumeIntegralInRange(-1, 9);
    p.window_right = in.ConsumeIntegralInRange(-1, 9);
  }
  if (in.ConsumeBool()) {
    p.flags |= CUFLASH_PROBLEM_SCALE_SET;
    p.scale = in.ConsumeFloatingPointInRange(0.0f, 4.0f);
  }
  if (decode) p.num_splits = in.ConsumeIntegralInRange(0, 5);
  // Features, each by a bit.
  const uint32_t features = in.ConsumeBool() ? in.ConsumeIntegral<uint32_t>() : 0;
  const auto has = [&](int bit) { return (features >> bit & 1) != 0; };
  if (has(0)) p.head_dim_v = in.ConsumeIntegralInRange(1, 40);
  if (has(1)) p.total_q = in.ConsumeIntegralInRange(0, 20);
  if (has(2) && !decode) p.total_k = in.ConsumeIntegralInRange(0, 20);
  if (has(3)) p.flags |= CUFLASH_PROBLEM_LEFT_PADDED;
  if (has(4)) p.softcap = in.ConsumeFloatingPointInRange(0.0f, 9.0f);
  if (has(5)) p.dropout_p = in.ConsumeFloatingPointInRange(0.0f, 1.0f);
  if (has(6)) {
    p.bias_row_stride = in.ConsumeBool() ? s.len_k : 0;
    p.bias_head_stride = in.ConsumeBool() ? s.len_q * s.len_k : 0;
    p.bias_batch_stride = in.ConsumeBool() ? s.heads_q * s.len_q * s.len_k : 0;
  }
  if (has(7)) p.o.dtype = CUFLASH_F32;
  if (has(8)) p.flags |= CUFLASH_PROBLEM_ACCUMULATE;
  if (has(9)) p.alibi_batch_stride = in.ConsumeBool() ? s.heads_q : 0;
  if (has(15)) {
    p.tree_mask_len = in.ConsumeIntegralInRange(0, 70);
    p.tree_mask_row_stride = in.ConsumeIntegralInRange(0, 3);
    p.tree_mask_batch_stride = in.ConsumeIntegralInRange(0, 30);
  }
  overwrite_fields(in, &p);
  // Last, so that no other bytes become a pointer that is followed.
  const Memory& m = memory();
  p.q.data = m.pick(in, kQ), p.o.data = m.pick(in, kO);
  p.k.data = decode ? nullptr : m.pick(in, kK);
  p.v.data = decode ? nullptr : m.pick(in, kV);
  p.lse = in.ConsumeBool() ? static_cast<float*>(m.pick(in, kLse)) : nullptr;
  const bool offsets =
      p.mask_align == CUFLASH_ALIGN_DEVICE_OFFSETS || in.ConsumeIntegral<uint8_t>() == 255;
  p.mask_offsets = offsets ? static_cast<int32_t*>(m.pick(in, kOffsets)) : nullptr;
  const auto integers = [&](bool wanted) {
    return wanted ? static_cast<const int32_t*>(m.pick(in, kLengths)) : nullptr;
  };
  p.cu_seqlens_q = integers(has(1)), p.cu_seqlens_k = integers(has(2) && !decode);
  p.leftpad_k = integers(has(3));
  p.seqused_q = integers(has(10)), p.seqused_k = integers(has(11) && !decode);
  p.bias = has(6) ? m.pick(in, kOffsets) : nullptr;
  p.alibi_slopes = has(9) ? m.pick(in, kOffsets) : nullptr;
  p.sinks = has(12) ? m.pick(in, kOffsets) : nullptr;
  p.dropout_seed_ptr = has(13) ? static_cast<uint64_t*>(m.pick(in, kOffsets)) : nullptr;
  p.dropout_offset_ptr = has(14) ? static_cast<uint64_t*>(m.pick(in, kOffsets)) : nullptr;
  p.tree_mask = has(15) ? static_cast<uint32_t*>(m.pick(in, kOffsets)) : nullptr;
  p.q_descale = p.k_descale = p.v_descale = nullptr;
  p.workspace = in.ConsumeBool() ? m.pick(in, kScratch) : nullptr;
  p.workspace_size = p.workspace == nullptr && in.ConsumeBool()
                         ? 0
                         : in.ConsumeIntegralInRange<uint64_t>(0, 20000);
  p.kernel = kernel_name(in);
  const int64_t heads_kv = heads_kv_of(p);
  const Rows q = query_rows(p), k = key_rows(p, p.len_k);
  p.q.data = unless_far(p.q, q.batch, p.heads_q, q.rows, p.head_dim);
  p.k.data = unless_far(p.k, k.batch, heads_kv, k.rows, p.head_dim);
  p.v.data = unless_far(p.v, k.batch, heads_kv, k.rows, dim_v_of(p));
  p.o.data = unless_far(p.o, q.batch, p.heads_q, q.rows, dim_v_of(p));
  p.lse = static_cast<float*>(
      unless_far(row_stats(p.lse, p.lse_batch_stride, p.lse_head_stride, p.lse_row_stride), q.batch,
                 p.heads_q, q.rows, 1));
  const cuflash_tensor_t bias =
      row_stats(nullptr, p.bias_batch_stride, p.bias_head_stride, p.bias_row_stride);
  const auto as_number = [](int64_t n) { return static_cast<double>(n); };
  if (p.bias != nullptr && is_far(as_number(p.batch) * as_number(bias.batch_stride) +
                                  as_number(p.heads_q) * as_number(bias.head_stride) +
                                  as_number(p.len_q) * as_number(bias.row_stride)))
    p.bias = m.unreadable();
  if (p.tree_mask != nullptr &&
      is_far(as_number(p.batch) * as_number(p.tree_mask_batch_stride) +
             as_number(p.len_q) * as_number(p.tree_mask_row_stride) + as_number(tree_words(p))))
    p.tree_mask = reinterpret_cast<const uint32_t*>(m.unreadable());
  if (p.alibi_slopes != nullptr && is_far(as_number(p.batch) * as_number(p.alibi_batch_stride)))
    p.alibi_slopes = m.unreadable();
  return p;
}

bool is_empty(int64_t batch, int64_t heads, int64_t rows) {
  return batch == 0 || heads == 0 || rows == 0;
}

// f(data, bytes) for each row of a tensor.
template <class F>
void for_each_row(const cuflash_tensor_t& t, int64_t batch, int64_t heads, int64_t rows,
                  int64_t dim, int64_t item_bytes, F f) {
  if (is_empty(batch, heads, rows)) return;
  const bool dense = (t.flags & CUFLASH_TENSOR_DENSE) != 0;
  const int64_t row_stride = dense ? dim : t.row_stride,
                head_stride = dense ? rows * dim : t.head_stride,
                batch_stride = dense ? heads * rows * dim : t.batch_stride;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rows; ++r)
        f(static_cast<char*>(t.data) +
              (b * batch_stride + h * head_stride + r * row_stride) * item_bytes,
          static_cast<size_t>(dim * item_bytes));
}

void wrote(const cuflash_tensor_t& t, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
           int64_t item_bytes) {
  for_each_row(t, batch, heads, rows, dim, item_bytes,
               [](const void* data, size_t bytes) { memory().wrote(data, bytes); });
}

void read(const cuflash_tensor_t& t, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
          int64_t item_bytes) {
  for_each_row(t, batch, heads, rows, dim, item_bytes,
               [](const void* data, size_t bytes) { memory().read(data, bytes); });
}

int64_t bytes_of(int32_t dtype) { return dtype == CUFLASH_F32 ? 4 : dtype <= CUFLASH_BF16 ? 2 : 1; }

// read() or wrote() of K or V of a cache. Of int4 there are two a byte.
template <class Touch>
void touched_stored(Touch touched, cuflash_tensor_t t, int32_t dtype, int64_t batch, int64_t heads,
                    int64_t rows, int64_t dim) {
  if (dtype != CUFLASH_INT4) return touched(t, batch, heads, rows, dim, bytes_of(dtype));
  if ((t.flags & CUFLASH_TENSOR_DENSE) != 0) {
    t.flags = 0;
    t.row_stride = dim, t.head_stride = rows * dim, t.batch_stride = heads * rows * dim;
  }
  t.row_stride /= 2, t.head_stride /= 2, t.batch_stride /= 2;
  touched(t, batch, heads, rows, (dim + 1) / 2, 1);
}

cuflash_tensor_t lse_of(const cuflash_problem_t& p) {
  return row_stats(p.lse, p.lse_batch_stride, p.lse_head_stride, p.lse_row_stride);
}

int64_t bytes_of_output(const cuflash_problem_t& p, const cuflash_tensor_t& t) {
  return t.dtype == CUFLASH_F32 ? 4 : bytes_of(p.q.dtype);
}

void wrote_workspace(const cuflash_problem_t& p) {
  if (p.workspace_size > 0) memory().wrote(p.workspace, p.workspace_size);
}

// Forward, and decode with the cache's k and v. Without rows a call touches nothing.
void ran_forward(const cuflash_problem_t& p, const cuflash_tensor_t& k, const cuflash_tensor_t& v,
                 const Rows& keys) {
  if (is_empty(p.batch, p.heads_q, p.len_q)) return;
  const Rows rows = query_rows(p);
  const auto dtype_of = [&](const cuflash_tensor_t& t) {
    return t.dtype == CUFLASH_DTYPE_DEFAULT ? p.q.dtype : t.dtype;
  };
  read(p.q, rows.batch, p.heads_q, rows.rows, p.head_dim, bytes_of(p.q.dtype));
  touched_stored(read, k, dtype_of(k), keys.batch, heads_kv_of(p), keys.rows, p.head_dim);
  if ((p.flags & CUFLASH_PROBLEM_V_IS_K_PREFIX) == 0)
    touched_stored(read, v, dtype_of(v), keys.batch, heads_kv_of(p), keys.rows, dim_v_of(p));
  wrote(p.o, rows.batch, p.heads_q, rows.rows, dim_v_of(p), bytes_of_output(p, p.o));
  if (p.lse != nullptr) wrote(lse_of(p), rows.batch, p.heads_q, rows.rows, 1, 4);
  if (p.tree_mask != nullptr) {
    cuflash_tensor_t words = {};
    words.data = const_cast<uint32_t*>(p.tree_mask);
    words.batch_stride = p.tree_mask_batch_stride, words.row_stride = p.tree_mask_row_stride;
    read(words, p.batch, 1, p.len_q, tree_words(p), 4);
  }
  wrote_workspace(p);
}

// The scales and zero points of a call that succeeded.
void read_scales(const cuflash_problem_t& p, const cuflash_kv_cache_t& cache) {
  if (is_empty(p.batch, p.heads_q, p.len_q)) return;
  const Rows keys = cache_rows(p, cache);
  const int64_t item = cache.scale_dtype == 0 ? 4 : bytes_of(cache.scale_dtype);
  const auto read_one = [&](const void* data, int64_t dim) {
    if (data == nullptr) return;
    const int64_t groups =
        cache.scale_group == 0 ? 1 : (dim + cache.scale_group - 1) / cache.scale_group;
    read(scales_of(cache, data), keys.batch, heads_kv_of(p), keys.rows, groups, item);
  };
  for (const void* data : {cache.k_scale, cache.k_zero}) read_one(data, p.head_dim);
  for (const void* data : {cache.v_scale, cache.v_zero}) read_one(data, dim_v_of(p));
}

void ran_backward(const cuflash_problem_t& p, const cuflash_gradients_t& g) {
  const int64_t heads_kv = heads_kv_of(p), item = bytes_of(p.q.dtype);
  if (is_empty(p.batch, p.heads_q, p.len_q) && is_empty(p.batch, heads_kv, p.len_k) &&
      g.dbias == nullptr && g.dsinks == nullptr)
    return;
  const Rows rows = query_rows(p), keys = key_rows(p, p.len_k);
  const bool delta_given = (g.flags & CUFLASH_GRADIENTS_DELTA_GIVEN) != 0;
  read(p.q, rows.batch, p.heads_q, rows.rows, p.head_dim, item);
  read(g.d_o, rows.batch, p.heads_q, rows.rows, dim_v_of(p), item);
  if (!delta_given)
    read(p.o, rows.batch, p.heads_q, rows.rows, dim_v_of(p), bytes_of_output(p, p.o));
  read(p.k, keys.batch, heads_kv, keys.rows, p.head_dim, item);
  read(p.v, keys.batch, heads_kv, keys.rows, dim_v_of(p), item);
  read(lse_of(p), rows.batch, p.heads_q, rows.rows, 1, 4);
  wrote(g.dq, rows.batch, p.heads_q, rows.rows, p.head_dim, bytes_of_output(p, g.dq));
  wrote(g.dk, keys.batch, heads_kv, keys.rows, p.head_dim, bytes_of_output(p, g.dk));
  wrote(g.dv, keys.batch, heads_kv, keys.rows, dim_v_of(p), bytes_of_output(p, g.dv));
  if (g.delta != nullptr && !delta_given)
    wrote(row_stats(g.delta, p.lse_batch_stride, p.lse_head_stride, p.lse_row_stride), rows.batch,
          p.heads_q, rows.rows, 1, 4);
  if (g.dbias != nullptr && p.len_k > 0) {
    cuflash_tensor_t t = {};
    t.data = g.dbias;
    t.batch_stride = p.bias_batch_stride, t.head_stride = p.bias_head_stride;
    t.row_stride = p.bias_row_stride;
    wrote(t, t.batch_stride == 0 ? 1 : p.batch, t.head_stride == 0 ? 1 : p.heads_q,
          t.row_stride == 0 ? 1 : p.len_q, p.len_k,
          p.bias_dtype == 0 ? item : bytes_of(p.bias_dtype));
  }
  if (g.dsinks != nullptr && p.heads_q > 0)
    memory().wrote(g.dsinks, static_cast<size_t>(
                                 p.heads_q * (p.sinks_dtype == 0 ? 4 : bytes_of(p.sinks_dtype))));
  wrote_workspace(p);
}

// ---- handles ------------------------------------------------------------------------------------

struct Allocator {
  int mode = 0;  // 0 none, 1 right, 2 gives NULL, 3 misaligned
  int held = 0;

  static void* allocate(void* user, size_t bytes, int32_t device, cuflash_stream_t stream) {
    auto* self = static_cast<Allocator*>(user);
    require(device == CUFLASH_DEVICE_CPU && stream == nullptr, "the allocator's arguments");
    if (self->mode == 2) return nullptr;
    ++self->held;
    // Room for the misaligned kind too.
    char* block = static_cast<char*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
    return block + (self->mode == 3 ? 8 : 0);
  }
  static void release(void* user, void* block, int32_t, cuflash_stream_t) {
    auto* self = static_cast<Allocator*>(user);
    --self->held;
    std::free(static_cast<char*>(block) - (self->mode == 3 ? 8 : 0));
  }
};

// A handle of the CPU device for one call, or NULL for the default one.
class Handle {
 public:
  explicit Handle(Input& in) {
    if (in.ConsumeBool()) return;
    require(checked(cuflash_create(&handle_, CUFLASH_DEVICE_CPU)) == CUFLASH_SUCCESS,
            "cuflash_create");
    // One thread: the same input takes the same way.
    require(cuflash_set_option(handle_, CUFLASH_OPTION_CPU_THREADS, 1) == CUFLASH_SUCCESS,
            "one thread");
    for (const int32_t option : {CUFLASH_OPTION_DETERMINISTIC, CUFLASH_OPTION_BATCH_INVARIANT})
      checked(cuflash_set_option(handle_, option, in.ConsumeBool()));
    checked(cuflash_set_kernel(handle_, kernel_name(in)));
    allocator_.mode = in.ConsumeIntegralInRange(0, 3);
    if (allocator_.mode != 0)
      checked(cuflash_set_allocator(handle_, Allocator::allocate, Allocator::release, &allocator_));
  }
  ~Handle() {
    require(allocator_.held == 0, "workspace of the allocator was not given back");
    checked(cuflash_destroy(handle_));
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  operator cuflash_handle_t() const { return handle_; }

 private:
  cuflash_handle_t handle_ = nullptr;
  Allocator allocator_;
};

cuflash_stream_t pick_stream(Input& in) {  // the CPU device takes NULL alone
  return in.ConsumeIntegral<uint8_t>() < 240 ? nullptr
                                             : reinterpret_cast<cuflash_stream_t>(uintptr_t{8});
}

// ---- entry points -------------------------------------------------------------------------------

// explain's text for a buffer of any length; the status must be that of the call with room enough.
template <class F>
void check_explain(Input& in, F explain) {
  std::vector<char> text(in.ConsumeIntegralInRange<size_t>(0, 300));
  size_t needed = 0;
  const cuflash_status_t status =
      checked(explain(text.empty() ? nullptr : text.data(), text.size(), &needed));
  if (status != CUFLASH_SUCCESS) return;
  require(needed > 1, "explain tells no length");
  if (!text.empty())
    require(std::strlen(text.data()) == std::min(text.size(), needed) - 1,
            "explain's text and length disagree");
  std::vector<char> all(needed);
  require(explain(all.data(), all.size(), nullptr) == CUFLASH_SUCCESS, "explain changed its mind");
  require(std::strlen(all.data()) == needed - 1, "explain's length is not that of its text");
}

// What a query says of a problem that a call has just carried out.
void check_size(cuflash_status_t call, cuflash_status_t query, const cuflash_problem_t& p,
                size_t bytes) {
  if (call != CUFLASH_SUCCESS) return;
  require(query == CUFLASH_SUCCESS, "the call succeeds, its ..._workspace_size does not");
  require(p.workspace == nullptr || bytes <= p.workspace_size,
          "a call took less workspace than it needs");
}

// Sometimes the workspace is exactly as large as the call needs, or one byte smaller.
template <class Query>
void fit_workspace(Input& in, cuflash_problem_t* problem, Query query) {
  if (in.ConsumeBool()) return;
  problem->struct_size = sizeof *problem;
  size_t bytes = 0;
  if (checked(query(&bytes)) == CUFLASH_SUCCESS && bytes > 0)
    problem->workspace_size = bytes - in.ConsumeBool();
}

void fuzz_forward(Input& in) {
  cuflash_problem_t problem = make_problem(in, Shape(in), false);
  if (is_heavy(problem, problem.len_k)) problem.q.data = memory().unreadable();
  const Passed<cuflash_problem_t> p(in, problem);
  const Handle handle(in);
  const cuflash_status_t status =
      checked(cuflash_attention_forward(handle, p.pointer(), pick_stream(in)));
  if (status == CUFLASH_SUCCESS)
    ran_forward(p.seen(), p.seen().k, p.seen().v, key_rows(p.seen(), p.seen().len_k));
  size_t bytes = 0;
  check_size(status, checked(cuflash_forward_workspace_size(handle, p.pointer(), &bytes)), p.seen(),
             bytes);
  check_explain(in, [&](char* buffer, size_t capacity, size_t* needed) {
    return cuflash_forward_explain(handle, p.pointer(), buffer, capacity, needed);
  });
  checked(cuflash_preload(handle, p.pointer()));
}

void fuzz_backward(Input& in) {
  const Shape s(in);
  cuflash_problem_t problem = make_problem(in, s, false);
  if (is_heavy(problem, problem.len_k)) problem.q.data = memory().unreadable();
  cuflash_gradients_t gradients = {};
  gradients.d_o = make_tensor(in, s.heads_q, s.len_q, s.dim, 0);
  gradients.dq = make_tensor(in, s.heads_q, s.len_q, s.dim, 0);
  gradients.dk = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
  gradients.dv = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
  overwrite_fields(in, &gradients);
  gradients.d_o.data = memory().pick(in, kDo), gradients.dq.data = memory().pick(in, kDq);
  gradients.dk.data = memory().pick(in, kDk), gradients.dv.data = memory().pick(in, kDv);
  const auto pointer = [&](Buffer usual) {
    return in.ConsumeIntegral<uint8_t>() < 64 ? memory().pick(in, usual) : nullptr;
  };
  gradients.dlse = static_cast<float*>(pointer(kOffsets));
  gradients.delta = static_cast<float*>(pointer(kScratch));
  gradients.dbias = problem.bias != nullptr ? pointer(kScratch) : nullptr;
  gradients.dsinks = problem.sinks != nullptr ? pointer(kScratch) : nullptr;
  if (problem.bias == memory().unreadable()) gradients.dbias = nullptr;
  if (in.ConsumeIntegral<uint8_t>() < 64) {
    gradients.flags |= CUFLASH_GRADIENTS_ACCUMULATE;
    gradients.dq.dtype = gradients.dk.dtype = gradients.dv.dtype = CUFLASH_F32;
  }
  const int64_t heads_kv = heads_kv_of(problem),
                most = std::max(problem.head_dim, dim_v_of(problem));
  const Rows rows = query_rows(problem), keys = key_rows(problem, problem.len_k);
  for (cuflash_tensor_t* t : {&gradients.d_o, &gradients.dq})
    t->data = unless_far(*t, rows.batch, problem.heads_q, rows.rows, most);
  for (cuflash_tensor_t* t : {&gradients.dk, &gradients.dv})
    t->data = unless_far(*t, keys.batch, heads_kv, keys.rows, most);
  gradients.struct_size = sizeof gradients;
  fit_workspace(in, &problem, [&](size_t* bytes) {
    return cuflash_backward_workspace_size(nullptr, &problem, &gradients, bytes);
  });
  const Passed<cuflash_problem_t> p(in, problem);
  const Passed<cuflash_gradients_t> g(in, gradients);
  const Handle handle(in);
  const cuflash_status_t status =
      checked(cuflash_attention_backward(handle, p.pointer(), g.pointer(), pick_stream(in)));
  if (status == CUFLASH_SUCCESS) ran_backward(p.seen(), g.seen());
  size_t bytes = 0;
  check_size(status,
             checked(cuflash_backward_workspace_size(handle, p.pointer(), g.pointer(), &bytes)),
             p.seen(), bytes);
  check_explain(in, [&](char* buffer, size_t capacity, size_t* needed) {
    return cuflash_backward_explain(handle, p.pointer(), g.pointer(), buffer, capacity, needed);
  });
}

cuflash_kv_cache_t make_cache(Input& in, const Shape& s) {
  cuflash_kv_cache_t cache = {};
  cache.k = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
  cache.v = make_tensor(in, s.heads_kv, s.len_k, s.dim, 0);
  cache.max_len = s.len_k;
  const int layout = in.ConsumeIntegralInRange(0, 4);
  if (layout == CUFLASH_CACHE_PAGED || layout == CUFLASH_CACHE_PAGED_CSR) {
    cache.layout = layout;
    cache.page_size = in.ConsumeIntegralInRange(1, 5);
    cache.num_pages = in.ConsumeIntegralInRange(0, 5);
    cache.id_bits = in.ConsumeIntegralInRange(0, 2) * 32;
    if (layout == CUFLASH_CACHE_PAGED) cache.block_table_stride = in.ConsumeIntegralInRange(0, 9);
  }
  const uint8_t scaled = in.ConsumeBool() ? in.ConsumeIntegral<uint8_t>() : 0;  // bits of arrays
  if (in.ConsumeBool()) {
    cache.k.dtype = in.ConsumeIntegralInRange(0, 7),
    cache.v.dtype = in.ConsumeIntegralInRange(0, 7);
    for (cuflash_tensor_t* t : {&cache.k, &cache.v}) {
      if (t->dtype != CUFLASH_INT4 || (t->flags & CUFLASH_TENSOR_DENSE) != 0) continue;
      for (int64_t* stride : {&t->row_stride, &t->head_stride, &t->batch_stride})
        *stride += *stride % 2;
    }
  }
  if ((scaled & 15) != 0) {
    constexpr int64_t kGroups[] = {0, 32, 64, 128};
    cache.scale_group = in.PickValueInArray(kGroups);
    cache.scale_dtype = in.ConsumeIntegralInRange(0, 3);
    cache.scale_slot_stride = in.ConsumeIntegralInRange(0, 4);
    cache.scale_head_stride = in.ConsumeIntegralInRange(0, 20);
    cache.scale_page_stride = in.ConsumeIntegralInRange(0, 40);
  }
  overwrite_fields(in, &cache);
  cache.k.data = memory().pick(in, kK), cache.v.data = memory().pick(in, kV);
  cache.lengths = in.ConsumeBool() ? static_cast<int32_t*>(memory().pick(in, kLengths)) : nullptr;
  cache.block_table = layout == CUFLASH_CACHE_PAGED ? memory().pick(in, kLengths) : nullptr;
  // Offsets into the indices cannot be checked: these, -2 to 8, stay inside the buffer of the indices.
  const bool csr = layout == CUFLASH_CACHE_PAGED_CSR;
  cache.page_indptr = csr ? reinterpret_cast<int32_t*>(memory().at(kLengths)) : nullptr;
  cache.page_indices = csr ? memory().at(kOffsets) + 256 : nullptr;
  cache.cache_batch_idx =
      layout == 3 ? static_cast<int32_t*>(memory().pick(in, kLengths)) : nullptr;
  const auto scales = [&](int bit) {
    return (scaled >> bit & 1) != 0 ? memory().pick(in, kOffsets) : nullptr;
  };
  cache.k_scale = scales(0), cache.v_scale = scales(1);
  cache.k_zero = scales(2), cache.v_zero = scales(3);
  return cache;
}

void fuzz_decode(Input& in) {
  const Shape s(in);
  cuflash_problem_t problem = make_problem(in, s, true);
  cuflash_kv_cache_t cache = make_cache(in, s);
  const Rows pool = cache_rows(problem, cache);
  for (cuflash_tensor_t* t : {&cache.k, &cache.v})
    t->data = unless_far(*t, pool.batch, heads_kv_of(problem), pool.rows,
                         std::max(problem.head_dim, dim_v_of(problem)));
  for (const void** scales : {&cache.k_scale, &cache.v_scale, &cache.k_zero, &cache.v_zero})
    *scales = unless_far(scales_of(cache, *scales), pool.batch, heads_kv_of(problem), pool.rows,
                         std::max(problem.head_dim, dim_v_of(problem)));
  // A pool of billions of slots costs the call nothing, but this target, which lists them.
  if (is_heavy(problem, cache.max_len) ||
      is_heavy(static_cast<double>(pool.batch), static_cast<double>(heads_kv_of(problem)),
               static_cast<double>(pool.rows), 1, 1))
    problem.q.data = memory().unreadable();
  cache.struct_size = sizeof cache;
  fit_workspace(in, &problem, [&](size_t* bytes) {
    return cuflash_decode_workspace_size(nullptr, &problem, &cache, bytes);
  });
  const Passed<cuflash_problem_t> p(in, problem);
  const Passed<cuflash_kv_cache_t> c(in, cache);
  const Handle handle(in);
  const cuflash_status_t status =
      checked(cuflash_attention_decode(handle, p.pointer(), c.pointer(), pick_stream(in)));
  if (status == CUFLASH_SUCCESS) {
    ran_forward(p.seen(), c.seen().k, c.seen().v, cache_rows(p.seen(), c.seen()));
    read_scales(p.seen(), c.seen());
  }
  size_t bytes = 0;
  check_size(status,
             checked(cuflash_decode_workspace_size(handle, p.pointer(), c.pointer(), &bytes)),
             p.seen(), bytes);
  check_explain(in, [&](char* buffer, size_t capacity, size_t* needed) {
    return cuflash_decode_explain(handle, p.pointer(), c.pointer(), buffer, capacity, needed);
  });
}

void fuzz_merge(Input& in) {
  const Shape s(in);
  cuflash_merge_t merge = {};
  merge.num_parts = in.ConsumeIntegralInRange(0, 4);
  merge.batch = s.batch, merge.heads = s.heads_q, merge.len = s.len_q, merge.head_dim = s.dim;
  merge.parts = make_tensor(in, s.heads_q, s.len_q, s.dim, s.dtype);
  merge.part_stride = in.ConsumeIntegralInRange(0, 1200);
  merge.lse_part_stride = in.ConsumeIntegralInRange(0, 100);
  merge.o = make_tensor(in, s.heads_q, s.len_q, s.dim, in.ConsumeIntegralInRange(0, 3));
  merge.flags = in.ConsumeBool();
  overwrite_fields(in, &merge);
  merge.parts.data = memory().pick(in, kQ), merge.o.data = memory().pick(in, kO);
  merge.lse_parts = static_cast<float*>(memory().pick(in, kScratch));
  merge.lse = in.ConsumeBool() ? static_cast<float*>(memory().pick(in, kLse)) : nullptr;
  const auto parts = static_cast<double>(merge.num_parts);
  if (is_heavy(merge.batch, merge.heads, merge.len, merge.num_parts, merge.head_dim) ||
      is_far(parts * static_cast<double>(merge.part_stride)) ||
      is_far(parts * static_cast<double>(merge.lse_part_stride)))
    merge.parts.data = memory().unreadable();
  merge.parts.data = unless_far(merge.parts, merge.batch, merge.heads, merge.len, merge.head_dim);
  merge.o.data = unless_far(merge.o, merge.batch, merge.heads, merge.len, merge.head_dim);
  const auto stats = [&](const float* data) {
    return static_cast<float*>(
        unless_far(row_stats(const_cast<float*>(data), merge.lse_batch_stride,
                             merge.lse_head_stride, merge.lse_row_stride),
                   merge.batch, merge.heads, merge.len, 1));
  };
  merge.lse_parts = stats(merge.lse_parts);
  merge.lse = stats(merge.lse);
  const Passed<cuflash_merge_t> m(in, merge);
  const Handle handle(in);
  const cuflash_status_t status =
      checked(cuflash_merge_states(handle, m.pointer(), pick_stream(in)));
  if (status != CUFLASH_SUCCESS) return;
  const cuflash_merge_t& seen = m.seen();
  wrote(seen.o, seen.batch, seen.heads, seen.len, seen.head_dim,
        bytes_of(seen.o.dtype == 0 ? seen.parts.dtype : seen.o.dtype));
  if (seen.lse != nullptr)
    wrote(row_stats(seen.lse, seen.lse_batch_stride, seen.lse_head_stride, seen.lse_row_stride),
          seen.batch, seen.heads, seen.len, 1, 4);
}

Rows cache_rows(const cuflash_kv_append_t& a, const cuflash_kv_cache_t& cache) {
  if (cache.layout != CUFLASH_CACHE_CONTIGUOUS) return {cache.num_pages, cache.page_size};
  const bool chosen = a.slot_mapping != nullptr || cache.cache_batch_idx != nullptr;
  return {chosen && cache.num_pages > 0 ? cache.num_pages : a.batch, cache.max_len};
}
int64_t dim_v_of(const cuflash_kv_append_t& a) {
  return a.head_dim_v == 0 ? a.head_dim : a.head_dim_v;
}
bool is_given(const cuflash_tensor_t& t) {
  constexpr cuflash_tensor_t kNone = {};
  return std::memcmp(&t, &kNone, sizeof t) != 0;
}

cuflash_kv_append_t make_append(Input& in, const Shape& s, cuflash_kv_cache_t* cache) {
  cuflash_kv_append_t a = {};
  const uint8_t parts = in.ConsumeIntegral<uint8_t>();
  const auto has = [&](int bit) { return (parts >> bit & 1) != 0; };
  a.batch = s.batch, a.heads_kv = s.heads_kv, a.len = s.len_q, a.head_dim = s.dim;
  a.k = make_tensor(in, s.heads_kv, s.len_q, s.dim, s.dtype);
  if (has(0)) a.v = make_tensor(in, s.heads_kv, s.len_q, s.dim, 0);
  if (has(1)) {
    a.heads_q = s.heads_q;
    a.q = make_tensor(in, s.heads_q, s.len_q, s.dim, s.dtype);
    a.q_out = has(2) ? a.q : make_tensor(in, s.heads_q, s.len_q, s.dim, 0);
  }
  if (has(3)) {
    a.rotary_dim = 2 * in.ConsumeIntegralInRange<int64_t>(0, s.dim / 2);
    a.max_position = in.ConsumeIntegralInRange(1, 9);
    a.flags = in.ConsumeBool() ? CUFLASH_APPEND_INTERLEAVED : 0;
  }
  if (has(4)) a.norm_epsilon = in.ConsumeFloatingPointInRange(0.0f, 1.0f);
  overwrite_fields(in, &a);
  const Memory& m = memory();
  a.k.data = m.pick(in, kDk);
  a.v.data = has(0) ? m.pick(in, kDv) : nullptr;
  a.q.data = has(1) ? m.pick(in, kQ) : nullptr;
  a.q_out.data = !has(1) ? nullptr : has(2) ? a.q.data : m.pick(in, kO);
  const auto floats = [&](bool wanted) {
    return static_cast<const float*>(wanted ? m.pick(in, kScratch) : nullptr);
  };
  a.cos = floats(has(3)), a.sin = floats(has(3));
  a.k_norm_weight = floats(has(4)), a.q_norm_weight = floats(has(4) && has(1));
  a.positions = has(5) ? static_cast<const int32_t*>(m.pick(in, kLengths)) : nullptr;
  a.slot_mapping = has(6) ? static_cast<const int64_t*>(m.pick(in, kLse)) : nullptr;

  const Rows rows = cache_rows(a, *cache);
  const int64_t most = std::max(a.head_dim, dim_v_of(a));
  for (cuflash_tensor_t* t : {&cache->k, &cache->v})
    t->data = unless_far(*t, rows.batch, a.heads_kv, rows.rows, most);
  for (const void** scales : {&cache->k_scale, &cache->v_scale, &cache->k_zero, &cache->v_zero})
    *scales = unless_far(scales_of(*cache, *scales), rows.batch, a.heads_kv, rows.rows, most);
  for (cuflash_tensor_t* t : {&a.k, &a.v})
    t->data = unless_far(*t, a.batch, a.heads_kv, a.len, most);
  for (cuflash_tensor_t* t : {&a.q, &a.q_out})
    t->data = unless_far(*t, a.batch, a.heads_q, a.len, most);
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  if (is_heavy(number(a.batch), number(std::max(a.heads_q, a.heads_kv)), number(a.len), 1,
               number(most)))
    a.k.data = a.q.data = a.q_out.data = memory().unreadable();
  if (is_far(number(a.max_position) * number(std::max(a.rotary_dim, a.head_dim))))
    a.cos = a.sin = reinterpret_cast<const float*>(memory().unreadable());
  if (is_far(2 * number(a.batch) * number(a.len))) a.k.data = memory().unreadable();
  return a;
}

void ran_append(const cuflash_kv_append_t& a, const cuflash_kv_cache_t& cache) {
  const bool queries = is_given(a.q), values = is_given(a.v);
  if (is_empty(a.batch, (queries ? a.heads_q : 0) + a.heads_kv, a.len)) return;
  const int64_t item = bytes_of(a.k.dtype);
  read(a.k, a.batch, a.heads_kv, a.len, a.head_dim, item);
  const Rows rows = cache_rows(a, cache);
  const auto wrote_side = [&](const cuflash_tensor_t& t, int64_t dim) {
    touched_stored(wrote, t, t.dtype == 0 ? a.k.dtype : t.dtype, rows.batch, a.heads_kv, rows.rows,
                   dim);
  };
  wrote_side(cache.k, a.head_dim);
  if (values) {
    read(a.v, a.batch, a.heads_kv, a.len, dim_v_of(a), item);
    wrote_side(cache.v, dim_v_of(a));
  }
  if (queries) {
    if (a.q.data != a.q_out.data) read(a.q, a.batch, a.heads_q, a.len, a.head_dim, item);
    wrote(a.q_out, a.batch, a.heads_q, a.len, a.head_dim, item);
  }
  const auto read_array = [](const void* data, int64_t count, int64_t item_bytes) {
    if (data != nullptr) memory().read(data, static_cast<size_t>(count * item_bytes));
  };
  const int64_t angles = a.max_position * (a.rotary_dim == 0 ? a.head_dim : a.rotary_dim) / 2;
  read_array(a.cos, angles, 4);
  read_array(a.sin, angles, 4);
  read_array(a.k_norm_weight, a.head_dim, item);
  read_array(a.q_norm_weight, a.head_dim, item);
  read_array(a.positions, a.batch * a.len, 4);
  read_array(a.slot_mapping, a.batch * a.len, 8);
}

void fuzz_append(Input& in) {
  const Shape s(in);
  cuflash_kv_cache_t cache = make_cache(in, s);
  const cuflash_kv_append_t append = make_append(in, s, &cache);
  const Passed<cuflash_kv_cache_t> c(in, cache);
  const Passed<cuflash_kv_append_t> a(in, append);
  const Handle handle(in);
  const cuflash_status_t status =
      checked(cuflash_kv_cache_append(handle, c.pointer(), a.pointer(), pick_stream(in)));
  if (status == CUFLASH_SUCCESS) ran_append(a.seen(), c.seen());
  size_t bytes = 1;
  if (checked(cuflash_append_workspace_size(handle, c.pointer(), a.pointer(), &bytes)) ==
      CUFLASH_SUCCESS)
    require(bytes == 0, "workspace of an append");
  check_explain(in, [&](char* buffer, size_t capacity, size_t* needed) {
    return cuflash_append_explain(handle, c.pointer(), a.pointer(), buffer, capacity, needed);
  });
}

void fuzz_weights(Input& in) {
  const Shape s(in);
  cuflash_problem_t problem = make_problem(in, s, false);
  cuflash_weights_t weights = {};
  weights.num_rows = in.ConsumeIntegralInRange(0, 9);
  overwrite_fields(in, &weights);
  weights.weights = static_cast<float*>(memory().pick(in, kO));
  weights.rows = in.ConsumeBool() ? static_cast<int32_t*>(memory().pick(in, kLengths)) : nullptr;
  weights.weights = static_cast<float*>(unless_far(
      row_stats(weights.weights, weights.batch_stride, weights.head_stride, weights.row_stride),
      problem.batch, problem.heads_q, weights.num_rows, problem.len_k));
  if (is_heavy(problem, problem.len_k) ||
      is_heavy(static_cast<double>(problem.batch), static_cast<double>(problem.heads_q),
               static_cast<double>(weights.num_rows), static_cast<double>(problem.len_k),
               static_cast<double>(problem.head_dim)))
    problem.q.data = memory().unreadable();
  const Passed<cuflash_problem_t> p(in, problem);
  const Passed<cuflash_weights_t> w(in, weights);
  const Handle handle(in);
  if (checked(cuflash_attention_weights(handle, p.pointer(), w.pointer(), pick_stream(in))) !=
          CUFLASH_SUCCESS ||
      p.seen().len_k == 0)
    return;
  const cuflash_weights_t& seen = w.seen();
  wrote(row_stats(seen.weights, seen.batch_stride, seen.head_stride, seen.row_stride),
        p.seen().batch, p.seen().heads_q, seen.num_rows == 0 ? p.seen().len_q : seen.num_rows,
        p.seen().len_k, 4);
}

void fuzz_workspace_prepare(Input& in) {
  void* workspace = memory().pick(in, kScratch);
  const size_t bytes = in.ConsumeBool() ? in.ConsumeIntegralInRange<size_t>(0, Memory::kBytes)
                                        : static_cast<size_t>(odd_value(in));
  if (bytes > Memory::kReach) workspace = memory().unreadable();
  const Handle handle(in);
  if (checked(cuflash_workspace_prepare(handle, workspace, bytes, pick_stream(in))) ==
          CUFLASH_SUCCESS &&
      bytes > 0)
    memory().wrote(workspace, bytes);
  checked(cuflash_trim(handle));
}

// ---- positional functions

int32_t pick_dimension(Input& in, int32_t small_limit) {
  if (in.ConsumeIntegral<uint8_t>() < 240) return in.ConsumeIntegralInRange(0, small_limit);
  return static_cast<int32_t>(odd_value(in));
}

struct Positional {
  int32_t batch, heads, heads_kv, len_q, len_k, dim;
  float scale;
  int32_t mask, splits;
  void *q, *k, *v, *o, *d_o, *dq, *dk, *dv;
  float* lse;
  const int32_t* lengths;
  cuflash_stream_t stream;
  int dtype;  // 0 f32, 1 f16, 2 bf16

  explicit Positional(Input& in) {
    batch = pick_dimension(in, 3), heads_kv = pick_dimension(in, 3);
    heads = in.ConsumeBool() ? heads_kv : pick_dimension(in, 9);
    len_q = pick_dimension(in, 9), len_k = pick_dimension(in, 9), dim = pick_dimension(in, 70);
    constexpr float kScales[] = {0.125f, 0, 1, -1, __builtin_inff(), __builtin_nanf("")};
    scale = in.PickValueInArray(kScales);
    mask = pick_dimension(in, 2), splits = pick_dimension(in, 4);
    const Memory& m = memory();
    q = m.pick(in, kQ), k = m.pick(in, kK), v = m.pick(in, kV), o = m.pick(in, kO);
    d_o = m.pick(in, kDo), dq = m.pick(in, kDq), dk = m.pick(in, kDk), dv = m.pick(in, kDv);
    lse = static_cast<float*>(m.pick(in, kLse));
    lengths = static_cast<int32_t*>(m.pick(in, kLengths));
    stream = pick_stream(in);
    dtype = in.ConsumeIntegralInRange(0, 2);
    const double rows = std::max(len_q, len_k), most_heads = std::max(heads, heads_kv);
    if (is_heavy(batch, heads, len_q, rows, dim)) q = m.unreadable();
    if (is_far(batch * most_heads * rows * dim)) q = k = dk = m.unreadable();
  }

  void wrote_rows(void* data, int32_t head_count, int32_t rows) const {
    cuflash_tensor_t t = {};
    t.data = data;
    t.flags = CUFLASH_TENSOR_DENSE;
    wrote(t, batch, head_count, rows, dim, dtype == 0 ? 4 : 2);
  }
  void wrote_lse(int32_t rows) const {
    if (lse != nullptr) wrote(row_stats(lse, 0, 0, 0), batch, heads, rows, 1, 4);
  }
};

// The function of the problem's dtype, with arguments that f32 takes as float* and the others as void*.
#define CUFLASH_CALL(name, p, ...)                  \
  ((p).dtype == 0   ? call(name##_f32, __VA_ARGS__) \
   : (p).dtype == 1 ? call(name##_f16, __VA_ARGS__) \
                    : call(name##_bf16, __VA_ARGS__))

template <class... Parameters, class... Arguments>
cuflash_status_t call(cuflash_status_t (*function)(Parameters...), Arguments... arguments) {
  return checked(function((Parameters)(arguments)...));  // NOLINT: void* to float* and to const
}

void fuzz_positional_forward(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_forward, p, p.q, p.k, p.v, p.o, p.lse, p.batch, p.heads,
                   p.len_q, p.dim, p.scale, p.mask, p.stream) == CUFLASH_SUCCESS) {
    p.wrote_rows(p.o, p.heads, p.len_q);
    p.wrote_lse(p.len_q);
  }
}

void fuzz_positional_backward(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_backward, p, p.q, p.k, p.v, p.o, p.lse, p.d_o, p.dq, p.dk,
                   p.dv, p.batch, p.heads, p.len_q, p.dim, p.scale, p.mask,
                   p.stream) == CUFLASH_SUCCESS)
    for (void* gradient : {p.dq, p.dk, p.dv}) p.wrote_rows(gradient, p.heads, p.len_q);
}

void fuzz_positional_decode(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_decode, p, p.q, p.k, p.v, p.o, p.lse, p.batch, p.heads,
                   p.len_k, p.dim, p.scale, p.splits, p.stream) == CUFLASH_SUCCESS) {
    p.wrote_rows(p.o, p.heads, 1);
    p.wrote_lse(1);
  }
}

void fuzz_gqa_forward(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_forward_gqa, p, p.q, p.k, p.v, p.o, p.lse, p.batch, p.heads,
                   p.heads_kv, p.len_q, p.len_k, p.dim, p.scale, p.mask,
                   p.stream) == CUFLASH_SUCCESS) {
    p.wrote_rows(p.o, p.heads, p.len_q);
    p.wrote_lse(p.len_q);
  }
}

void fuzz_gqa_backward(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_backward_gqa, p, p.q, p.k, p.v, p.o, p.lse, p.d_o, p.dq, p.dk,
                   p.dv, p.batch, p.heads, p.heads_kv, p.len_q, p.len_k, p.dim, p.scale, p.mask,
                   p.stream) == CUFLASH_SUCCESS) {
    p.wrote_rows(p.dq, p.heads, p.len_q);
    for (void* gradient : {p.dk, p.dv}) p.wrote_rows(gradient, p.heads_kv, p.len_k);
  }
}

void fuzz_gqa_decode(Input& in) {
  const Positional p(in);
  if (CUFLASH_CALL(cuflash_attention_decode_gqa, p, p.q, p.k, p.v, p.o, p.lse, p.lengths, p.batch,
                   p.heads, p.heads_kv, p.len_q, p.len_k, p.dim, p.scale, p.mask, p.splits,
                   p.stream) == CUFLASH_SUCCESS) {
    p.wrote_rows(p.o, p.heads, p.len_q);
    p.wrote_lse(p.len_q);
  }
}

// ---- everything else

template <class T>
void check_init(cuflash_status_t (*init)(T*, size_t), Input& in) {
  const size_t size = claimed_size(in, sizeof(T));
  std::vector<uint8_t> object(std::min<size_t>(size, 65544), 0xcc);
  T* pointer = object.empty() ? nullptr : reinterpret_cast<T*>(object.data());
  const cuflash_status_t status = checked(init(pointer, size));
  if (status != CUFLASH_SUCCESS) {
    for (const uint8_t byte : object) require(byte == 0xcc, "a refused init wrote");
    return;
  }
  uint32_t struct_size = 0;
  std::memcpy(&struct_size, object.data(), 4);
  require(struct_size == size, "init's struct_size");
  for (size_t n = 4; n < object.size(); ++n) require(object[n] == 0, "init left a byte");
}

void fuzz_inits(Input& in) {
  check_init(cuflash_problem_init, in);
  check_init(cuflash_gradients_init, in);
  check_init(cuflash_kv_cache_init, in);
  check_init(cuflash_kv_append_init, in);
  check_init(cuflash_merge_init, in);
  check_init(cuflash_weights_init, in);
}

void fuzz_handles(Input& in) {
  cuflash_handle_t handle = nullptr;
  const auto device = static_cast<int32_t>(in.ConsumeBool() ? -1 : odd_value(in));
  const cuflash_status_t created = checked(cuflash_create(&handle, device));
  require((created == CUFLASH_SUCCESS) == (handle != nullptr), "cuflash_create and its handle");
  for (int n = in.ConsumeIntegralInRange(0, 4); n > 0; --n) {
    const auto key =
        static_cast<int32_t>(in.ConsumeBool() ? in.ConsumeIntegralInRange(0, 6) : odd_value(in));
    const int64_t value = odd_value(in);
    int64_t minimum = 1, maximum = 0, read = 0;
    const bool known = checked(cuflash_option_bounds(key, &minimum, &maximum)) == CUFLASH_SUCCESS;
    const bool set = checked(cuflash_set_option(handle, key, value)) == CUFLASH_SUCCESS;
    require(set == (handle != nullptr && known && value >= minimum && value <= maximum),
            "an option and its bounds");
    require((checked(cuflash_get_option(handle, key, &read)) == CUFLASH_SUCCESS) == known,
            "a known option");
    require(!set || read == value, "an option that was set");
  }
  checked(cuflash_set_kernel(handle, kernel_name(in)));
  checked(cuflash_set_allocator(handle, in.ConsumeBool() ? Allocator::allocate : nullptr,
                                in.ConsumeBool() ? Allocator::release : nullptr, nullptr));
  checked(cuflash_preload(handle, nullptr));
  checked(cuflash_trim(handle));
  checked(cuflash_destroy(handle));
  checked(cuflash_create(nullptr, device));
  checked(cuflash_set_default_device(static_cast<int32_t>(odd_value(in))));
  require(checked(cuflash_set_default_device(CUFLASH_DEVICE_CPU)) == CUFLASH_SUCCESS,
          "the CPU as default device");
}

void fuzz_texts(Input& in) {
  const auto number = static_cast<int32_t>(odd_value(in));
  require(*cuflash_status_name(number) != '\0' && *cuflash_error_string(number) != '\0',
          "a status without text");
  std::vector<uint8_t> bytes(
      std::min<size_t>(claimed_size(in, sizeof(cuflash_kernel_info_t)), 65544) + 8);
  const auto size =
      static_cast<uint32_t>(bytes.size() - 8);  // 8 more: the field itself must be there
  std::memcpy(bytes.data(), &size, 4);
  const auto index =
      in.ConsumeBool() ? in.ConsumeIntegralInRange(0, cuflash_kernel_count()) : number;
  const cuflash_status_t status =
      checked(cuflash_kernel_info(index, reinterpret_cast<cuflash_kernel_info_t*>(bytes.data())));
  require(status != CUFLASH_SUCCESS || (index >= 0 && index < cuflash_kernel_count()),
          "a kernel that is not there");
  for (size_t n = size < 4 ? 4 : size; n < bytes.size(); ++n)
    require(bytes[n] == 0, "info beyond struct_size");
  checked(cuflash_kernel_info(index, nullptr));
  // The message of that last refusal, into any length.
  std::vector<char> text(in.ConsumeIntegralInRange<size_t>(0, 100));
  const size_t length = cuflash_last_error_copy(text.empty() ? nullptr : text.data(), text.size());
  require(length == std::strlen(cuflash_last_error()), "the length of the message");
  require(text.empty() || std::strlen(text.data()) == std::min(text.size() - 1, length),
          "the copied message");
  int32_t version[3] = {-1, -1, -1};
  cuflash_version(&version[0], in.ConsumeBool() ? &version[1] : nullptr, &version[2]);
  require(version[0] >= 0 && cuflash_abi_version() >= 0 && *cuflash_build_info() != '\0',
          "version");
}

constexpr void (*kEntryPoints[])(Input&) = {fuzz_forward,
                                            fuzz_backward,
                                            fuzz_decode,
                                            fuzz_merge,
                                            fuzz_append,
                                            fuzz_weights,
                                            fuzz_workspace_prepare,
                                            fuzz_positional_forward,
                                            fuzz_positional_backward,
                                            fuzz_positional_decode,
                                            fuzz_gqa_forward,
                                            fuzz_gqa_backward,
                                            fuzz_gqa_decode,
                                            fuzz_inits,
                                            fuzz_handles,
                                            fuzz_texts};

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  // How the library learns that a pointer leads nowhere; where that is forbidden it cannot.
  char byte;
  const iovec local = {&byte, 1}, remote = {memory().unreadable(), 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) >= 0 || errno != EFAULT) {
    std::printf("skipped: process_vm_readv is not possible here\n");
    std::exit(77);
  }
  // Not in the inputs: each callback stays allocated, as another thread may still run it.
  for (const int32_t level : {INT32_MIN, 0, 3, INT32_MAX, int32_t{CUFLASH_LOG_ERROR}})
    cuflash_set_log_callback([](void*, int32_t, const char* text) { log_lines += *text != '\0'; },
                             nullptr, level);
  require(checked(cuflash_set_default_device(CUFLASH_DEVICE_CPU)) == CUFLASH_SUCCESS,
          "the CPU as default");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  in.PickValueInArray(kEntryPoints)(in);
  memory().check_and_restore();
  return 0;
}
