#include "api/checks.hpp"

#include <cmath>
#include <cstring>
#include <utility>

#include "common/integer.hpp"
#include "common/overlap.hpp"

namespace cuflash {
namespace {

using ll = long long;

constexpr int64_t kMaxExtent = 0x7fffffff;
constexpr int64_t kMaxRows = int64_t{1} << 40;
constexpr int64_t kMaxStride = int64_t{1} << 48;
constexpr int64_t kMaxHeadDim = 576, kMaxBackwardHeadDim = 256;
constexpr size_t kMinStructSize = 48;  // every struct of every version is longer
constexpr size_t kMaxStructSize = 65536;

// ---- structs --------------------------------------------------------------------------------------

// Copies a caller's struct: a shorter one of an older header is extended by zeros, a longer one of a newer
// header is accepted if its unknown tail is zero.
template <class T>
Status import_struct(const T* source, const char* name, T* copy) {
  CUFLASH_CHECK(source != nullptr, CUFLASH_ERROR_NULL_POINTER, "%s: is NULL", name);
  const size_t size = source->struct_size;
  CUFLASH_CHECK(size >= kMinStructSize, CUFLASH_ERROR_STRUCT_SIZE,
                "%s.struct_size: %zu; set it to sizeof the struct, %zu in this library", name, size,
                sizeof(T));
  CUFLASH_CHECK(size <= kMaxStructSize && size % 8 == 0, CUFLASH_ERROR_STRUCT_SIZE,
                "%s.struct_size: %zu; at most %zu and a multiple of 8", name, size, kMaxStructSize);
  const size_t known = size < sizeof(T) ? size : sizeof(T);
  std::memcpy(copy, source, known);
  std::memset(reinterpret_cast<char*>(copy) + known, 0, sizeof(T) - known);
  const char* bytes = reinterpret_cast<const char*>(source);
  for (size_t i = sizeof(T); i < size; ++i)
    CUFLASH_CHECK(bytes[i] == 0, CUFLASH_ERROR_STRUCT_SIZE,
                  "%s: byte %zu is set, a field that this library (%zu bytes) does not know", name,
                  i, sizeof(T));
  return CUFLASH_SUCCESS;
}

Status check_flags(const char* name, uint32_t flags, uint32_t known) {
  CUFLASH_CHECK((flags & ~known) == 0, CUFLASH_ERROR_UNSUPPORTED,
                "%s.flags: 0x%x has unknown bits 0x%x", name, flags, flags & ~known);
  return CUFLASH_SUCCESS;
}

Status not_implemented(const char* field) {
  return fail(CUFLASH_ERROR_UNSUPPORTED, "%s: not implemented yet; leave it zero", field);
}

// A field whose feature no kernel implements is refused by name, never ignored.
#define CUFLASH_REFUSE(object, field)                                                             \
  do {                                                                                            \
    if ((object).field != decltype((object).field){}) return not_implemented(#object "." #field); \
  } while (0)

bool is_zero(const cuflash_tensor_t& t) {
  constexpr cuflash_tensor_t kZero = {};
  return std::memcmp(&t, &kZero, sizeof t) == 0;
}

Status refuse_problem_fields(const cuflash_problem_t& problem) {
  CUFLASH_REFUSE(problem, q_descale);
  CUFLASH_REFUSE(problem, k_descale);
  CUFLASH_REFUSE(problem, v_descale);
  CUFLASH_REFUSE(problem, q_descale_batch_stride);
  CUFLASH_REFUSE(problem, q_descale_head_stride);
  CUFLASH_REFUSE(problem, k_descale_batch_stride);
  CUFLASH_REFUSE(problem, k_descale_head_stride);
  CUFLASH_REFUSE(problem, v_descale_batch_stride);
  CUFLASH_REFUSE(problem, v_descale_head_stride);
  CUFLASH_REFUSE(problem, math_mode);
  return CUFLASH_SUCCESS;
}

// ---- extents and values -----------------------------------------------------------------------------

Status check_extent(const char* name, int64_t value) {
  CUFLASH_CHECK(value >= 0 && value <= kMaxExtent, CUFLASH_ERROR_INVALID_DIMENSION,
                "%s: %lld; 0 to 2^31 - 1", name, static_cast<ll>(value));
  return CUFLASH_SUCCESS;
}

Status check_rows(const char* names, int64_t batch, int64_t heads, int64_t rows) {
  // batch * heads < 2^62, so only the second product can overflow. An extent of 0 must not hide that the
  // others overflow the strides of a dense tensor.
  int64_t product;
  const bool overflow =
      __builtin_mul_overflow(max64(1, batch) * max64(1, heads), max64(1, rows), &product);
  CUFLASH_CHECK(!overflow && product <= kMaxRows, CUFLASH_ERROR_INVALID_DIMENSION,
                "%s: %lld * %lld * %lld; at most 2^40 rows", names, static_cast<ll>(batch),
                static_cast<ll>(heads), static_cast<ll>(rows));
  return CUFLASH_SUCCESS;
}

Status check_head_dim(const char* name, int64_t head_dim, int64_t most) {
  CUFLASH_CHECK(head_dim >= 1 && head_dim <= most, CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM,
                "%s: %lld; 1 to %lld", name, static_cast<ll>(head_dim), static_cast<ll>(most));
  return CUFLASH_SUCCESS;
}

const char* dtype_name(int32_t dtype) {
  constexpr const char* kNames[] = {"unset",    "f32",      "f16",  "bf16",
                                    "fp8 e4m3", "fp8 e5m2", "int8", "int4"};
  return dtype >= 0 && dtype < 8 ? kNames[dtype] : "unknown";
}

Status check_compute_dtype(const char* name, int32_t dtype, Dtype* result) {
  CUFLASH_CHECK(dtype == CUFLASH_F32 || dtype == CUFLASH_F16 || dtype == CUFLASH_BF16,
                CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                "%s.dtype: %d (%s); CUFLASH_F32, CUFLASH_F16 or CUFLASH_BF16", name, dtype,
                dtype_name(dtype));
  *result = static_cast<Dtype>(dtype);
  return CUFLASH_SUCCESS;
}

Status check_mask(const cuflash_problem_t& problem, Purpose purpose, Mask* mask) {
  CUFLASH_CHECK(problem.mask == CUFLASH_MASK_NONE || problem.mask == CUFLASH_MASK_CAUSAL,
                CUFLASH_ERROR_INVALID_VALUE, "problem.mask: %d; 0 (none) or 1 (causal)",
                problem.mask);
  CUFLASH_CHECK(problem.mask_align >= CUFLASH_ALIGN_BOTTOM_RIGHT &&
                    problem.mask_align <= CUFLASH_ALIGN_DEVICE_OFFSETS,
                CUFLASH_ERROR_INVALID_VALUE,
                "problem.mask_align: %d; 0 (bottom-right), 1 (top-left), 2 (offset) or 3 (device "
                "offsets)",
                problem.mask_align);
  mask->align = static_cast<Align>(problem.mask_align);
  CUFLASH_CHECK(mask->align == Align::kOffset || problem.mask_offset == 0,
                CUFLASH_ERROR_INVALID_VALUE,
                "problem.mask_offset: %lld, but mask_align is %d; it needs CUFLASH_ALIGN_OFFSET",
                static_cast<ll>(problem.mask_offset), problem.mask_align);
  CUFLASH_CHECK(problem.mask_offset >= -kMaxExtent - 1 && problem.mask_offset <= kMaxExtent + 1,
                CUFLASH_ERROR_INVALID_VALUE, "problem.mask_offset: %lld; within +-2^31",
                static_cast<ll>(problem.mask_offset));
  mask->offset = problem.mask_offset;
  CUFLASH_CHECK(mask->align == Align::kDeviceOffsets || problem.mask_offsets == nullptr,
                CUFLASH_ERROR_INVALID_VALUE,
                "problem.mask_offsets: set, but mask_align is %d; it needs "
                "CUFLASH_ALIGN_DEVICE_OFFSETS",
                problem.mask_align);
  mask->offsets = problem.mask_offsets;

  const bool windowed = (problem.flags & CUFLASH_PROBLEM_WINDOW) != 0;
  const struct {
    const char* name;
    int64_t value;
    int64_t* bound;
  } sides[] = {{"problem.window_left", problem.window_left, &mask->left},
               {"problem.window_right", problem.window_right, &mask->right}};
  for (const auto& side : sides) {
    CUFLASH_CHECK(windowed || side.value == 0, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld without the flag CUFLASH_PROBLEM_WINDOW", side.name,
                  static_cast<ll>(side.value));
    CUFLASH_CHECK(side.value >= -1, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld; -1 (unlimited) or not negative", side.name,
                  static_cast<ll>(side.value));
    if (windowed && side.value >= 0) *side.bound = min64(side.value, Mask::kUnlimited);
  }
  if (problem.mask == CUFLASH_MASK_CAUSAL) mask->right = 0;
  // Without a mask and slopes the centre has no meaning; do not read it.
  const bool has_centre = !mask->is_full() || problem.alibi_slopes != nullptr;
  const bool needs_offsets = mask->align == Align::kDeviceOffsets && has_centre;
  CUFLASH_CHECK(!needs_offsets || problem.mask_offsets != nullptr || purpose == Purpose::kQuery ||
                    problem.batch == 0,
                CUFLASH_ERROR_NULL_POINTER,
                "problem.mask_offsets: is NULL with CUFLASH_ALIGN_DEVICE_OFFSETS");
  if (!has_centre) mask->align = Align::kTopLeft;
  return CUFLASH_SUCCESS;
}

Status resolve_scale(const cuflash_problem_t& problem, float* scale) {
  if ((problem.flags & CUFLASH_PROBLEM_SCALE_SET) == 0) {
    CUFLASH_CHECK(problem.scale == 0, CUFLASH_ERROR_INVALID_VALUE,
                  "problem.scale: %g without the flag CUFLASH_PROBLEM_SCALE_SET",
                  static_cast<double>(problem.scale));
    *scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
    return CUFLASH_SUCCESS;
  }
  CUFLASH_TRY(check_scale("problem.scale", problem.scale));
  *scale = problem.scale;
  return CUFLASH_SUCCESS;
}

// ---- tensors ------------------------------------------------------------------------------------------

enum class Role { kInput, kOutput };

struct Extents {
  int64_t batch, heads, rows, channels;
  bool empty() const { return batch == 0 || heads == 0 || rows == 0; }
};

// Items of less than a byte have strides of whole bytes.
Box make_box(const void* data, const Extents& extents, int64_t item_bits,
             const int64_t (&strides)[3]) {
  Box box;
  box.base = reinterpret_cast<uintptr_t>(data);
  box.element_bytes = ceil_div(extents.channels * item_bits, 8);
  const int64_t extent[] = {extents.batch, extents.heads, extents.rows};
  for (int d = 0; d < 3; ++d) {
    box.extent[d] = extent[d];
    box.stride[d] = extent[d] > 1 ? strides[d] * item_bits / 8 : 0;
  }
  return box;
}

struct NamedBox {
  const char* name;
  Box box;
};

// Collects what a call reads and writes while its tensors are checked, then looks for overlaps.
class Tensors {
 public:
  Tensors(Purpose purpose, MemoryUse* memory) : purpose_(purpose), memory_(memory) {}

  Status add(const char* name, const cuflash_tensor_t& t, const Extents& extents, Dtype dtype,
             Role role, TensorView* view) {
    view->dtype = dtype;
    return add_items(name, t, extents, dtype_bytes(dtype) * 8, role, view);
  }

  // The same of elements of any width; the view's dtype is left alone.
  Status add_items(const char* name, const cuflash_tensor_t& t, const Extents& extents,
                   int64_t item_bits, Role role, TensorView* view) {
    CUFLASH_CHECK((t.flags & ~uint32_t{CUFLASH_TENSOR_DENSE}) == 0, CUFLASH_ERROR_UNSUPPORTED,
                  "%s.flags: 0x%x; 0 or CUFLASH_TENSOR_DENSE", name, t.flags);
    for (const int64_t reserved : t.reserved)
      CUFLASH_CHECK(reserved == 0, CUFLASH_ERROR_UNSUPPORTED, "%s.reserved: must be zero", name);
    const bool dense = (t.flags & CUFLASH_TENSOR_DENSE) != 0;
    view->data = t.data;
    view->row_stride = dense ? extents.channels : t.row_stride;
    view->head_stride = dense ? extents.rows * extents.channels : t.head_stride;
    view->batch_stride = dense ? extents.heads * extents.rows * extents.channels : t.batch_stride;
    CUFLASH_TRY(add_box(name, t.data, extents, item_bits, view->batch_stride, view->head_stride,
                        view->row_stride, dense, role));
    // Along an extent of 1 callers may have any stride, and no kernel shall meet one that it cannot take: tensor maps and
    // asynchronous copies want multiples of 16 bytes also where they step nowhere.
    if (extents.rows <= 1) view->row_stride = 0;
    if (extents.heads <= 1) view->head_stride = 0;
    if (extents.batch <= 1) view->batch_stride = 0;
    return CUFLASH_SUCCESS;
  }

  Status add_row_stats(const char* name, float* data, int64_t batch_stride, int64_t head_stride,
                       int64_t row_stride, const Extents& rows, bool optional, Role role,
                       RowStatsView* view) {
    const Extents extents{rows.batch, rows.heads, rows.rows, 1};
    const bool dense = batch_stride == 0 && head_stride == 0 && row_stride == 0;
    *view = dense ? RowStatsView{data, extents.heads * extents.rows, extents.rows, 1}
                  : RowStatsView{data, batch_stride, head_stride, row_stride};
    if (data == nullptr && optional) return CUFLASH_SUCCESS;
    CUFLASH_TRY(add_box(name, data, extents, 32, view->batch_stride, view->head_stride,
                        view->row_stride, dense, role));
    if (extents.batch <= 1) view->batch_stride = 0;  // as of tensors: see ragged.hpp
    return CUFLASH_SUCCESS;
  }

  // The bias or its gradient, and other arrays like them. A stride of 0 repeats; in the gradient it sums.
  Status add_bias(const char* name, void* data, const Extents& extents, Dtype dtype, Role role,
                  TensorView* view) {
    Extents own = extents;
    if (view->batch_stride == 0) own.batch = 1;
    if (view->head_stride == 0) own.heads = 1;
    if (view->row_stride == 0) own.rows = 1;
    view->data = data;
    view->dtype = dtype;
    if (extents.channels > 0)
      CUFLASH_TRY(add_box(name, data, own, dtype_bytes(dtype) * 8, view->batch_stride,
                          view->head_stride, view->row_stride, false, role));
    if (own.batch == 1) view->batch_stride = 0;
    if (own.heads == 1) view->head_stride = 0;
    if (own.rows == 1) view->row_stride = 0;
    return CUFLASH_SUCCESS;
  }

  Status check_overlaps() const {
    for (int i = 0; i < outputs_; ++i) {
      CUFLASH_TRY(report(box_overlaps_itself(out_[i].box), out_[i].name, "itself"));
      for (int j = i + 1; j < outputs_; ++j)
        CUFLASH_TRY(report(boxes_overlap(out_[i].box, out_[j].box), out_[i].name, out_[j].name));
      for (int j = 0; j < inputs_; ++j)
        CUFLASH_TRY(report(boxes_overlap(out_[i].box, in_[j].box), out_[i].name, in_[j].name));
    }
    return CUFLASH_SUCCESS;
  }

  // A contiguous array; NULL is fine.
  Status add_array(const char* name, const void* data, int64_t count, int64_t item_bytes,
                   Role role) {
    CUFLASH_CHECK(purpose_ == Purpose::kQuery ||
                      reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item_bytes) == 0,
                  CUFLASH_ERROR_MISALIGNED, "%s: address %p; must be a multiple of %lld", name,
                  data, static_cast<ll>(item_bytes));
    if (purpose_ == Purpose::kQuery || data == nullptr || count <= 0) return CUFLASH_SUCCESS;
    CUFLASH_CHECK(count <= (int64_t{1} << 61) / item_bytes, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld elements reach past 2^61 bytes", name, static_cast<ll>(count));
    NamedBox& named = role == Role::kOutput ? out_[outputs_++] : in_[inputs_++];
    named.name = name;
    named.box.base = reinterpret_cast<uintptr_t>(data);
    named.box.element_bytes = count * item_bytes;
    memory_->add(name, data, count * item_bytes);
    return CUFLASH_SUCCESS;
  }
  template <class T>
  Status add_array(const char* name, const T* data, int64_t count, Role role = Role::kInput) {
    return add_array(name, data, count, sizeof(T), role);
  }

  bool aligned16() const { return aligned16_; }

 private:
  static constexpr int kMaxOutputs = 8,
                       kMaxInputs = 20;  // of backward and of decode with everything

  Status add_box(const char* name, const void* data, const Extents& extents, int64_t item_bits,
                 int64_t batch_stride, int64_t head_stride, int64_t row_stride, bool dense,
                 Role role) {
    const int64_t extent[] = {extents.batch, extents.heads, extents.rows};
    const int64_t stride[] = {batch_stride, head_stride, row_stride};
    constexpr const char* kNames[] = {"batch_stride", "head_stride", "row_stride"};
    int64_t bytes = ceil_div(extents.channels * item_bits, 8);
    for (int d = 0; d < 3; ++d) {
      CUFLASH_CHECK(stride[d] >= 0, CUFLASH_ERROR_INVALID_VALUE, "%s.%s: %lld; not negative", name,
                    kNames[d], static_cast<ll>(stride[d]));
      // Strides of an extent of 1 (or of a dense tensor, bounded by its extents) are never used.
      if (extent[d] <= 1) continue;
      CUFLASH_CHECK(dense || stride[d] <= kMaxStride, CUFLASH_ERROR_INVALID_VALUE,
                    "%s.%s: %lld; at most 2^48", name, kNames[d], static_cast<ll>(stride[d]));
      CUFLASH_CHECK(stride[d] * item_bits % 8 == 0, CUFLASH_ERROR_INVALID_VALUE,
                    "%s.%s: %lld%s; even for int4, as two share a byte", name, kNames[d],
                    static_cast<ll>(stride[d]), dense ? " of a dense tensor" : "");
      const int64_t stride_bytes = stride[d] * item_bits / 8;
      int64_t reach;
      const bool overflow = __builtin_mul_overflow(extent[d] - 1, stride_bytes, &reach) ||
                            __builtin_add_overflow(bytes, reach, &bytes);
      CUFLASH_CHECK(!overflow && bytes <= (int64_t{1} << 61), CUFLASH_ERROR_INVALID_VALUE,
                    "%s.%s: %lld reaches past 2^61 bytes", name, kNames[d],
                    static_cast<ll>(stride[d]));
      CUFLASH_CHECK(role == Role::kInput || stride[d] != 0 || extents.empty(),
                    CUFLASH_ERROR_ALIASING,
                    "%s.%s: 0 with an extent of %lld; an output cannot repeat", name, kNames[d],
                    static_cast<ll>(extent[d]));
      aligned16_ = aligned16_ && stride_bytes % 16 == 0;
    }
    if (extents.empty()) return CUFLASH_SUCCESS;
    const auto address = reinterpret_cast<uintptr_t>(data);
    aligned16_ = aligned16_ && address % 16 == 0;
    if (purpose_ == Purpose::kQuery) return CUFLASH_SUCCESS;
    CUFLASH_CHECK(data != nullptr, CUFLASH_ERROR_NULL_POINTER, "%s: is NULL", name);
    const int64_t alignment = max64(1, item_bits / 8);
    CUFLASH_CHECK(address % static_cast<uintptr_t>(alignment) == 0, CUFLASH_ERROR_MISALIGNED,
                  "%s: address %p; must be a multiple of %lld", name, data,
                  static_cast<ll>(alignment));
    NamedBox& named = role == Role::kOutput ? out_[outputs_++] : in_[inputs_++];
    named.name = name;
    named.box = make_box(data, extents, item_bits, stride);
    memory_->add(name, data, bytes);
    return CUFLASH_SUCCESS;
  }

  static Status report(Overlap overlap, const char* output, const char* other) {
    switch (overlap) {
      case Overlap::kNone:
        break;
      case Overlap::kYes:
        return fail(CUFLASH_ERROR_ALIASING, "%s: the output overlaps %s", output, other);
      case Overlap::kTooComplex:
        return fail(CUFLASH_ERROR_INVALID_VALUE,
                    "%s: strides too irregular to show that it does not overlap %s", output, other);
    }
    return CUFLASH_SUCCESS;
  }

  Purpose purpose_;
  MemoryUse* memory_;
  NamedBox out_[kMaxOutputs], in_[kMaxInputs];
  int outputs_ = 0, inputs_ = 0;
  bool aligned16_ = true;
};

Status check_tensor_dtype(const char* name, int32_t dtype, Dtype of_q) {
  CUFLASH_CHECK(dtype == CUFLASH_DTYPE_DEFAULT || dtype == static_cast<int32_t>(of_q),
                CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                "%s.dtype: %d (%s); 0 or that of problem.q, %d (%s)", name, dtype,
                dtype_name(dtype), static_cast<int>(of_q), dtype_name(static_cast<int32_t>(of_q)));
  return CUFLASH_SUCCESS;
}

// Of O and the gradients, which may be wider than q.
Status check_output_dtype(const char* name, int32_t dtype, Dtype of_q, Dtype* result) {
  *result = of_q;
  if (dtype == CUFLASH_F32) {
    *result = Dtype::kF32;
    return CUFLASH_SUCCESS;
  }
  CUFLASH_CHECK(dtype == CUFLASH_DTYPE_DEFAULT || dtype == static_cast<int32_t>(of_q),
                CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                "%s.dtype: %d (%s); 0, that of problem.q, %d (%s), or CUFLASH_F32", name, dtype,
                dtype_name(dtype), static_cast<int>(of_q), dtype_name(static_cast<int32_t>(of_q)));
  return CUFLASH_SUCCESS;
}

// Of the arrays beside the tensors; 0 stands for `otherwise`.
Status check_array_dtype(const char* name, int32_t dtype, Dtype otherwise, Dtype* result) {
  CUFLASH_CHECK(
      dtype >= CUFLASH_DTYPE_DEFAULT && dtype <= CUFLASH_BF16, CUFLASH_ERROR_UNSUPPORTED_DTYPE,
      "%s: %d (%s); 0, CUFLASH_F32, CUFLASH_F16 or CUFLASH_BF16", name, dtype, dtype_name(dtype));
  *result = dtype == CUFLASH_DTYPE_DEFAULT ? otherwise : static_cast<Dtype>(dtype);
  return CUFLASH_SUCCESS;
}

// Of K or V: that of q, in a cache any.
Status check_key_dtype(const char* name, int32_t dtype, const Problem& p, StoredDtype* result) {
  *result = static_cast<StoredDtype>(p.dtype);
  if (p.operation != Operation::kDecode && p.operation != Operation::kAppend)
    return check_tensor_dtype(name, dtype, p.dtype);
  CUFLASH_CHECK(
      dtype >= CUFLASH_DTYPE_DEFAULT && dtype <= CUFLASH_INT4, CUFLASH_ERROR_UNSUPPORTED_DTYPE,
      "%s.dtype: %d (%s); 0 or one of enum cuflash_dtype", name, dtype, dtype_name(dtype));
  if (dtype != CUFLASH_DTYPE_DEFAULT) *result = static_cast<StoredDtype>(dtype);
  return CUFLASH_SUCCESS;
}

// The parts of a merge, or one of its outputs as a series of one.
struct PartSeries {
  const char* name;
  Box box;  // the fourth dimension counts the parts

  PartSeries(const char* series_name, const TensorView& t, const Extents& extents,
             int64_t item_bytes, int64_t part_stride, int64_t num_parts)
      : name(series_name),
        box(make_box(t.data, extents, item_bytes * 8,
                     {t.batch_stride, t.head_stride, t.row_stride})) {
    box.extent[3] = num_parts;
    box.stride[3] = part_stride * item_bytes;
  }
  PartSeries(const char* series_name, const RowStatsView& t, const Extents& extents,
             int64_t part_stride, int64_t num_parts)
      : PartSeries(series_name, {t.data, t.batch_stride, t.head_stride, t.row_stride, Dtype::kF32},
                   {extents.batch, extents.heads, extents.rows, 1}, 4, part_stride, num_parts) {}

  int64_t bytes() const {
    int64_t last = box.element_bytes;
    for (int d = 0; d < Box::kDims; ++d) last += (box.extent[d] - 1) * box.stride[d];
    return last;
  }

  // The parts from `begin` to before `end`.
  Box slice(int64_t begin, int64_t end) const {
    Box part = box;
    part.base += static_cast<uint64_t>(begin * box.stride[3]);
    part.extent[3] = end - begin;
    return part;
  }
};

// That the last part begins below 2^61 bytes from the first; one part's own reach has been checked.
Status check_part_reach(const char* name, int64_t stride, int64_t num_parts, int64_t item_bytes) {
  int64_t reach;
  const bool overflow = __builtin_mul_overflow(num_parts - 1, stride * item_bytes, &reach);
  CUFLASH_CHECK(!overflow && reach < (int64_t{1} << 61), CUFLASH_ERROR_INVALID_VALUE,
                "%s: %lld with %lld parts reaches past 2^61 bytes", name, static_cast<ll>(stride),
                static_cast<ll>(num_parts));
  return CUFLASH_SUCCESS;
}

// An output of a merge may be exactly a part (each row is read before it is written); any other overlap
// would let one row's result destroy another row's input.
Status check_merge_output(const PartSeries& output, const PartSeries& parts, bool may_be_a_part) {
  const auto overlaps = [&](int64_t begin, int64_t end) {
    return begin < end && boxes_overlap(output.box, parts.slice(begin, end)) != Overlap::kNone;
  };
  const int64_t count = parts.box.extent[3];
  if (!overlaps(0, count)) return CUFLASH_SUCCESS;
  if (may_be_a_part) {
    const auto distance = static_cast<int64_t>(output.box.base - parts.box.base);
    const int64_t step = parts.box.stride[3];
    const int64_t part = step == 0 ? 0 : distance / step;
    bool same = part >= 0 && part < count && distance == part * step;
    for (int d = 0; d < 3; ++d) same = same && output.box.stride[d] == parts.box.stride[d];
    if (same && !overlaps(0, part) && !overlaps(part + 1, count)) return CUFLASH_SUCCESS;
  }
  return fail(CUFLASH_ERROR_ALIASING, "%s: overlaps %s%s", output.name, parts.name,
              may_be_a_part ? " without being exactly one of them" : "");
}

// ---- one problem --------------------------------------------------------------------------------------

constexpr uint32_t kProblemFlags = CUFLASH_PROBLEM_SCALE_SET | CUFLASH_PROBLEM_WINDOW |
                                   CUFLASH_PROBLEM_V_IS_K_PREFIX | CUFLASH_PROBLEM_DETERMINISTIC |
                                   CUFLASH_PROBLEM_BATCH_INVARIANT | CUFLASH_PROBLEM_ACCUMULATE |
                                   CUFLASH_PROBLEM_WORKSPACE_PREPARED | CUFLASH_PROBLEM_LEFT_PADDED;

// Raggedness of either side. An optional pointer that is not NULL counts as given, in queries too.
Status check_ragged(const cuflash_problem_t& problem, Purpose purpose, CheckedProblem* checked) {
  Problem& p = checked->problem;
  Ragged& r = checked->features.ragged;
  CUFLASH_TRY(check_extent("problem.total_q", problem.total_q));
  CUFLASH_TRY(check_extent("problem.total_k", problem.total_k));
  CUFLASH_CHECK(problem.total_q == 0 || problem.cu_seqlens_q != nullptr, CUFLASH_ERROR_NULL_POINTER,
                "problem.cu_seqlens_q: is NULL, but total_q is %lld",
                static_cast<ll>(problem.total_q));
  CUFLASH_CHECK(problem.total_k == 0 || problem.cu_seqlens_k != nullptr, CUFLASH_ERROR_NULL_POINTER,
                "problem.cu_seqlens_k: is NULL, but total_k is %lld",
                static_cast<ll>(problem.total_k));
  if (p.operation == Operation::kDecode) {
    CUFLASH_CHECK(problem.cu_seqlens_k == nullptr, CUFLASH_ERROR_INVALID_VALUE,
                  "problem.cu_seqlens_k: must be NULL in decode; the cache holds the keys");
    CUFLASH_CHECK(problem.seqused_k == nullptr, CUFLASH_ERROR_INVALID_VALUE,
                  "problem.seqused_k: must be NULL in decode; cache.lengths tells");
  }
  const bool left_padded = (problem.flags & CUFLASH_PROBLEM_LEFT_PADDED) != 0;
  CUFLASH_CHECK(left_padded || problem.leftpad_k == nullptr, CUFLASH_ERROR_INVALID_VALUE,
                "problem.leftpad_k: set without the flag CUFLASH_PROBLEM_LEFT_PADDED");
  CUFLASH_CHECK(
      !left_padded || problem.leftpad_k != nullptr || purpose == Purpose::kQuery || p.batch == 0,
      CUFLASH_ERROR_NULL_POINTER, "problem.leftpad_k: is NULL with CUFLASH_PROBLEM_LEFT_PADDED");
  r.offsets_q = problem.cu_seqlens_q, r.offsets_k = problem.cu_seqlens_k;
  r.total_q = problem.total_q, r.total_k = problem.total_k;
  r.lengths_q = problem.seqused_q, r.left_pad_k = problem.leftpad_k;
  p.lengths_k = problem.seqused_k;
  if (r.offsets_q != nullptr || r.offsets_k != nullptr || r.lengths_q != nullptr ||
      problem.seqused_k != nullptr || left_padded)
    checked->features.used |= kRaggedBatches;
  return CUFLASH_SUCCESS;
}

// A field that describes an array which is not there.
Status refuse_stray(const char* name, int64_t value, const char* array_name, const void* array) {
  CUFLASH_CHECK(value == 0 || array != nullptr, CUFLASH_ERROR_INVALID_VALUE, "%s: %lld without %s",
                name, static_cast<ll>(value), array_name);
  return CUFLASH_SUCCESS;
}

// The tree mask, but not where it lies.
Status check_tree_mask(const cuflash_problem_t& problem, CheckedProblem* checked) {
  const struct {
    const char* name;
    int64_t value, most;
  } fields[] = {{"problem.tree_mask_batch_stride", problem.tree_mask_batch_stride, kMaxStride},
                {"problem.tree_mask_row_stride", problem.tree_mask_row_stride, kMaxStride},
                {"problem.tree_mask_len", problem.tree_mask_len, kMaxExtent}};
  for (const auto& field : fields) {
    CUFLASH_TRY(refuse_stray(field.name, field.value, "problem.tree_mask", problem.tree_mask));
    CUFLASH_CHECK(field.value >= 0 && field.value <= field.most, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld; 0 to %lld", field.name, static_cast<ll>(field.value),
                  static_cast<ll>(field.most));
  }
  if (problem.tree_mask == nullptr) return CUFLASH_SUCCESS;
  CUFLASH_CHECK(checked->problem.operation != Operation::kBackward, CUFLASH_ERROR_UNSUPPORTED,
                "problem.tree_mask: not for the backward pass");
  checked->features.tree = {problem.tree_mask, problem.tree_mask_batch_stride,
                            problem.tree_mask_row_stride,
                            problem.tree_mask_len == 0 ? problem.len_q : problem.tree_mask_len};
  checked->features.used |= kTreeMask;
  return CUFLASH_SUCCESS;
}

// Softcap, slopes, bias, sinks and dropout, but not where their arrays lie.
Status check_modifiers(const cuflash_problem_t& problem, CheckedProblem* checked) {
  const Problem& p = checked->problem;
  Features& f = checked->features;
  CUFLASH_CHECK(std::isfinite(problem.softcap) && problem.softcap >= 0, CUFLASH_ERROR_INVALID_VALUE,
                "problem.softcap: %g; finite and not negative, 0 for none",
                static_cast<double>(problem.softcap));
  f.score.softcap = problem.softcap;
  if (problem.softcap > 0) f.used |= kSoftcap;

  const struct {
    const char* name;
    int64_t value;
    const char* array_name;
    const void* array;
  } described[] = {
      {"problem.alibi_dtype", problem.alibi_dtype, "problem.alibi_slopes", problem.alibi_slopes},
      {"problem.alibi_batch_stride", problem.alibi_batch_stride, "problem.alibi_slopes",
       problem.alibi_slopes},
      {"problem.bias_dtype", problem.bias_dtype, "problem.bias", problem.bias},
      {"problem.bias_batch_stride", problem.bias_batch_stride, "problem.bias", problem.bias},
      {"problem.bias_head_stride", problem.bias_head_stride, "problem.bias", problem.bias},
      {"problem.bias_row_stride", problem.bias_row_stride, "problem.bias", problem.bias},
      {"problem.sinks_dtype", problem.sinks_dtype, "problem.sinks", problem.sinks}};
  for (const auto& row : described)
    CUFLASH_TRY(refuse_stray(row.name, row.value, row.array_name, row.array));
  CUFLASH_TRY(check_array_dtype("problem.alibi_dtype", problem.alibi_dtype, Dtype::kF32,
                                &f.score.slopes.dtype));
  CUFLASH_TRY(
      check_array_dtype("problem.bias_dtype", problem.bias_dtype, p.dtype, &f.score.bias.dtype));
  CUFLASH_TRY(
      check_array_dtype("problem.sinks_dtype", problem.sinks_dtype, Dtype::kF32, &f.sinks.dtype));
  f.score.slopes.data = const_cast<void*>(problem.alibi_slopes);
  f.score.slopes_batch_stride = problem.alibi_batch_stride;
  f.score.bias.data = const_cast<void*>(problem.bias);
  f.score.bias.batch_stride = problem.bias_batch_stride;
  f.score.bias.head_stride = problem.bias_head_stride;
  f.score.bias.row_stride = problem.bias_row_stride;
  f.sinks.data = const_cast<void*>(problem.sinks);
  if (problem.alibi_slopes != nullptr) f.used |= kAlibi;
  if (problem.bias != nullptr) f.used |= kBias;
  if (problem.sinks != nullptr) f.used |= kSinks;

  CUFLASH_CHECK(problem.dropout_p >= 0 && problem.dropout_p <= 1, CUFLASH_ERROR_INVALID_VALUE,
                "problem.dropout_p: %g; 0 to 1", static_cast<double>(problem.dropout_p));
  CUFLASH_CHECK(problem.dropout_seed_ptr == nullptr || problem.dropout_seed == 0,
                CUFLASH_ERROR_INVALID_VALUE,
                "problem.dropout_seed: %llu beside dropout_seed_ptr; one of them",
                static_cast<unsigned long long>(problem.dropout_seed));
  CUFLASH_CHECK(problem.dropout_offset_ptr == nullptr || problem.dropout_offset == 0,
                CUFLASH_ERROR_INVALID_VALUE,
                "problem.dropout_offset: %llu beside dropout_offset_ptr; one of them",
                static_cast<unsigned long long>(problem.dropout_offset));
  if (problem.dropout_p == 0) return CUFLASH_SUCCESS;
  CUFLASH_CHECK(p.batch * p.heads_q <= (int64_t{1} << 32), CUFLASH_ERROR_INVALID_DIMENSION,
                "problem.batch * heads_q: %lld; at most 2^32 with dropout",
                static_cast<ll>(p.batch * p.heads_q));
  f.dropout = {problem.dropout_p, problem.dropout_seed, problem.dropout_offset,
               problem.dropout_seed_ptr, problem.dropout_offset_ptr};
  f.used |= kDropout;
  return CUFLASH_SUCCESS;
}

// Everything that the operations share but the tensors.
Status check_common(const cuflash_problem_t* source, Operation operation, Purpose purpose,
                    cuflash_problem_t* copy, CheckedProblem* checked) {
  CUFLASH_TRY(import_struct(source, "problem", copy));
  const cuflash_problem_t& problem = *copy;
  Problem& p = checked->problem;
  p.operation = operation;
  CUFLASH_TRY(check_flags("problem", problem.flags, kProblemFlags));
  CUFLASH_TRY(check_compute_dtype("problem.q", problem.q.dtype, &p.dtype));
  CUFLASH_TRY(check_extent("problem.batch", problem.batch));
  CUFLASH_TRY(check_extent("problem.heads_q", problem.heads_q));
  CUFLASH_TRY(check_extent("problem.heads_kv", problem.heads_kv));
  CUFLASH_TRY(check_extent("problem.len_q", problem.len_q));
  CUFLASH_TRY(check_extent("problem.len_k", problem.len_k));
  const int64_t most = operation == Operation::kBackward ? kMaxBackwardHeadDim : kMaxHeadDim;
  CUFLASH_TRY(check_head_dim("problem.head_dim", problem.head_dim, most));
  p.head_dim_v = problem.head_dim_v == 0 ? problem.head_dim : problem.head_dim_v;
  CUFLASH_TRY(check_head_dim("problem.head_dim_v", p.head_dim_v, most));
  if (p.head_dim_v != problem.head_dim) checked->features.used |= kOwnValueDim;
  p.batch = problem.batch, p.heads_q = problem.heads_q, p.len_q = problem.len_q;
  p.heads_kv = problem.heads_kv == 0 ? problem.heads_q : problem.heads_kv;
  p.len_k = problem.len_k, p.head_dim = problem.head_dim;
  CUFLASH_CHECK(p.heads_kv == 0 || p.heads_q % p.heads_kv == 0, CUFLASH_ERROR_DIMENSION_MISMATCH,
                "problem.heads_q: %lld is not a multiple of heads_kv, %lld",
                static_cast<ll>(p.heads_q), static_cast<ll>(p.heads_kv));
  CUFLASH_TRY(check_rows("problem.batch * heads_q * len_q", p.batch, p.heads_q, p.len_q));
  CUFLASH_TRY(check_rows("problem.batch * heads_kv * len_k", p.batch, p.heads_kv, p.len_k));
  CUFLASH_TRY(resolve_scale(problem, &p.scale));
  CUFLASH_TRY(refuse_problem_fields(problem));
  CUFLASH_TRY(check_ragged(problem, purpose, checked));
  CUFLASH_TRY(check_rows("problem.heads_q * total_q", 1, p.heads_q, problem.total_q));
  CUFLASH_TRY(check_rows("problem.heads_kv * total_k", 1, p.heads_kv, problem.total_k));
  CUFLASH_TRY(check_tree_mask(problem, checked));
  CUFLASH_TRY(check_modifiers(problem, checked));
  CUFLASH_TRY(check_mask(problem, purpose, &p.mask));
  CUFLASH_CHECK(
      problem.num_splits >= 0 && problem.num_splits <= (operation == Operation::kDecode ? 1024 : 1),
      CUFLASH_ERROR_INVALID_VALUE, "problem.num_splits: %d; %s", problem.num_splits,
      operation == Operation::kDecode ? "0 (choose) to 1024" : "0 or 1 outside decode");
  CUFLASH_CHECK(problem.sm_margin >= 0 && problem.sm_margin <= 1024, CUFLASH_ERROR_INVALID_VALUE,
                "problem.sm_margin: %d; 0 to 1024", problem.sm_margin);
  CUFLASH_CHECK(problem.target_arch == 0 || purpose == Purpose::kQuery, CUFLASH_ERROR_INVALID_VALUE,
                "problem.target_arch: %d; only queries answer for another GPU",
                problem.target_arch);
  p.num_splits = problem.num_splits;
  p.deterministic = (problem.flags & CUFLASH_PROBLEM_DETERMINISTIC) != 0;
  p.batch_invariant = (problem.flags & CUFLASH_PROBLEM_BATCH_INVARIANT) != 0;
  p.workspace_prepared =
      (problem.flags & CUFLASH_PROBLEM_WORKSPACE_PREPARED) != 0 && problem.workspace != nullptr;
  checked->options = {problem.workspace, problem.workspace_size, problem.kernel, problem.sm_margin,
                      problem.target_arch};
  if (purpose == Purpose::kQuery) return CUFLASH_SUCCESS;
  CUFLASH_CHECK(
      problem.workspace == nullptr || reinterpret_cast<uintptr_t>(problem.workspace) % 256 == 0,
      CUFLASH_ERROR_MISALIGNED, "problem.workspace: address %p; a multiple of 256",
      problem.workspace);
  CUFLASH_CHECK(problem.workspace != nullptr || problem.workspace_size == 0,
                CUFLASH_ERROR_NULL_POINTER,
                "problem.workspace: is NULL, but workspace_size is %llu",
                static_cast<unsigned long long>(problem.workspace_size));
  CUFLASH_CHECK(problem.workspace_size < (uint64_t{1} << 62), CUFLASH_ERROR_INVALID_VALUE,
                "problem.workspace_size: %llu; below 2^62",
                static_cast<unsigned long long>(problem.workspace_size));
  return CUFLASH_SUCCESS;
}

Extents query_rows(const CheckedProblem& checked, int64_t channels) {
  const RowExtents e = query_extents(checked.problem, checked.features.ragged);
  return {e.batch, e.heads, e.rows, channels};
}
Extents key_rows(const CheckedProblem& checked, int64_t channels) {
  const RowExtents e = key_extents(checked.problem, checked.features.ragged);
  return {e.batch, e.heads, e.rows, channels};
}

// What every operation reads and writes beside its tensors, and then that nothing overlaps.
Status check_rest(const cuflash_problem_t& problem, CheckedProblem* checked, Tensors* tensors) {
  const Problem& p = checked->problem;
  Features& f = checked->features;
  CUFLASH_TRY(tensors->add_array("problem.mask_offsets", p.mask.offsets, p.batch));
  CUFLASH_TRY(tensors->add_array("problem.cu_seqlens_q", problem.cu_seqlens_q, p.batch + 1));
  CUFLASH_TRY(tensors->add_array("problem.cu_seqlens_k", problem.cu_seqlens_k, p.batch + 1));
  CUFLASH_TRY(tensors->add_array("problem.seqused_q", problem.seqused_q, p.batch));
  CUFLASH_TRY(tensors->add_array("problem.seqused_k", problem.seqused_k, p.batch));
  CUFLASH_TRY(tensors->add_array("problem.leftpad_k", problem.leftpad_k, p.batch));
  if (f.score.slopes.data != nullptr) {
    TensorView slopes;
    slopes.batch_stride = f.score.slopes_batch_stride;
    CUFLASH_TRY(tensors->add_bias("problem.alibi_slopes", f.score.slopes.data,
                                  {p.batch, 1, 1, p.heads_q}, f.score.slopes.dtype, Role::kInput,
                                  &slopes));
  }
  if (f.score.bias.data != nullptr)
    CUFLASH_TRY(tensors->add_bias("problem.bias", f.score.bias.data,
                                  {p.batch, p.heads_q, p.len_q, p.len_k}, f.score.bias.dtype,
                                  Role::kInput, &f.score.bias));
  if (f.tree.words != nullptr) {
    TensorView words;
    words.batch_stride = f.tree.batch_stride;
    words.row_stride = f.tree.row_stride;
    CUFLASH_TRY(tensors->add_bias("problem.tree_mask", const_cast<uint32_t*>(f.tree.words),
                                  {p.batch, 1, p.len_q, ceil_div(f.tree.len, 32)}, Dtype::kF32,
                                  Role::kInput, &words));
  }
  CUFLASH_TRY(tensors->add_array("problem.sinks", f.sinks.data, p.heads_q,
                                 dtype_bytes(f.sinks.dtype), Role::kInput));
  CUFLASH_TRY(tensors->add_array("problem.dropout_seed_ptr", f.dropout.seed_pointer, 1));
  CUFLASH_TRY(tensors->add_array("problem.dropout_offset_ptr", f.dropout.offset_pointer, 1));
  CUFLASH_TRY(tensors->add_array("problem.workspace", static_cast<const char*>(problem.workspace),
                                 static_cast<int64_t>(problem.workspace_size), Role::kOutput));
  if (f.used != 0) checked->problem.features = &f;
  return tensors->check_overlaps();
}

// Whether O is folded into a running result.
Status check_accumulate(const cuflash_problem_t& problem, CheckedProblem* checked,
                        Purpose purpose) {
  if ((problem.flags & CUFLASH_PROBLEM_ACCUMULATE) == 0) return CUFLASH_SUCCESS;
  CUFLASH_CHECK(checked->problem.o.dtype == Dtype::kF32, CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                "problem.o.dtype: %d (%s); CUFLASH_F32 with CUFLASH_PROBLEM_ACCUMULATE",
                static_cast<int>(checked->problem.o.dtype),
                dtype_name(static_cast<int32_t>(checked->problem.o.dtype)));
  CUFLASH_CHECK(problem.lse != nullptr || purpose == Purpose::kQuery, CUFLASH_ERROR_NULL_POINTER,
                "problem.lse: is NULL with CUFLASH_PROBLEM_ACCUMULATE");
  checked->features.accumulate_o = true;
  checked->features.used |= kAccumulation;
  return CUFLASH_SUCCESS;
}

// K and V, or K whose first channels are V.
Status check_keys_and_values(const cuflash_problem_t& problem, const char* k_name,
                             const cuflash_tensor_t& k, const char* v_name,
                             const cuflash_tensor_t& v, Extents keys, CheckedProblem* checked,
                             Tensors* tensors) {
  Problem& p = checked->problem;
  CacheFormat& format = checked->features.format;
  p.k.dtype = p.v.dtype = p.dtype;
  CUFLASH_TRY(check_key_dtype(k_name, k.dtype, p, &format.k.dtype));
  CUFLASH_TRY(tensors->add_items(k_name, k, keys, stored_bits(format.k.dtype), Role::kInput, &p.k));
  if ((problem.flags & CUFLASH_PROBLEM_V_IS_K_PREFIX) == 0) {
    CUFLASH_TRY(check_key_dtype(v_name, v.dtype, p, &format.v.dtype));
    keys.channels = p.head_dim_v;
    return tensors->add_items(v_name, v, keys, stored_bits(format.v.dtype), Role::kInput, &p.v);
  }
  CUFLASH_CHECK(is_zero(v), CUFLASH_ERROR_INVALID_VALUE,
                "%s: must be all zero with CUFLASH_PROBLEM_V_IS_K_PREFIX", v_name);
  CUFLASH_CHECK(p.head_dim_v <= p.head_dim, CUFLASH_ERROR_DIMENSION_MISMATCH,
                "problem.head_dim_v: %lld; at most head_dim, %lld, with "
                "CUFLASH_PROBLEM_V_IS_K_PREFIX",
                static_cast<ll>(p.head_dim_v), static_cast<ll>(p.head_dim));
  p.v = p.k;
  format.v.dtype = format.k.dtype;
  return CUFLASH_SUCCESS;
}

// The scales and zero points of a cache whose tensors have been checked; `keys` are their extents. prefix: V is K's.
Status check_scales(const cuflash_kv_cache_t& cache, bool prefix, const Extents& keys,
                    CheckedProblem* checked, Tensors* tensors) {
  const Problem& p = checked->problem;
  CacheFormat& format = checked->features.format;
  const void* any = nullptr;
  for (const void* array : {cache.k_scale, cache.v_scale, cache.k_zero, cache.v_zero})
    if (array != nullptr) any = array;
  const struct {
    const char* name;
    int64_t value;
  } strides[] = {{"cache.scale_page_stride", cache.scale_page_stride},
                 {"cache.scale_head_stride", cache.scale_head_stride},
                 {"cache.scale_slot_stride", cache.scale_slot_stride}};
  for (const auto& stride : strides) {
    CUFLASH_TRY(refuse_stray(stride.name, stride.value, "scales and zero points", any));
    CUFLASH_CHECK(stride.value >= 0 && stride.value <= kMaxStride, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld; 0 to 2^48", stride.name, static_cast<ll>(stride.value));
  }
  CUFLASH_TRY(refuse_stray("cache.scale_group", cache.scale_group, "scales and zero points", any));
  CUFLASH_TRY(refuse_stray("cache.scale_dtype", cache.scale_dtype, "scales and zero points", any));
  CUFLASH_CHECK(cache.reserved == 0, CUFLASH_ERROR_UNSUPPORTED, "cache.reserved: must be zero");
  const int64_t group = cache.scale_group;
  CUFLASH_CHECK(group == 0 || group == 32 || group == 64 || group == 128,
                CUFLASH_ERROR_INVALID_VALUE,
                "cache.scale_group: %lld; 0 (all channels), 32, 64 or 128", static_cast<ll>(group));
  format.page_stride = cache.scale_page_stride;
  format.head_stride = cache.scale_head_stride;
  format.slot_stride = cache.scale_slot_stride;
  format.group = static_cast<int32_t>(group);

  Dtype dtype = Dtype::kF32;
  CUFLASH_TRY(check_array_dtype("cache.scale_dtype", cache.scale_dtype, Dtype::kF32, &dtype));
  const struct {
    const char* name;
    const void* data;
    int64_t dim;
    const CacheFormat::Side& side;
    bool zero, of_v;
    Elements* target;
  } arrays[] = {
      {"cache.k_scale", cache.k_scale, p.head_dim, format.k, false, false, &format.k.scale},
      {"cache.k_zero", cache.k_zero, p.head_dim, format.k, true, false, &format.k.zero},
      {"cache.v_scale", cache.v_scale, p.head_dim_v, format.v, false, true, &format.v.scale},
      {"cache.v_zero", cache.v_zero, p.head_dim_v, format.v, true, true, &format.v.zero}};
  for (const auto& array : arrays) {
    if (array.data == nullptr) continue;
    CUFLASH_CHECK(!prefix || !array.of_v, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: set with CUFLASH_PROBLEM_V_IS_K_PREFIX; that of k serves both", array.name);
    CUFLASH_CHECK(!array.zero || is_integer(array.side.dtype), CUFLASH_ERROR_INVALID_VALUE,
                  "%s: set, but the elements are %s; zero points are for int8 and int4", array.name,
                  dtype_name(static_cast<int32_t>(array.side.dtype)));
    *array.target = {const_cast<void*>(array.data), dtype};
    TensorView view;
    view.batch_stride = format.page_stride;
    view.head_stride = format.head_stride;
    view.row_stride = format.slot_stride;
    const int64_t groups = group == 0 ? 1 : ceil_div(array.dim, group);
    CUFLASH_TRY(tensors->add_bias(array.name, array.target->data,
                                  {keys.batch, keys.heads, keys.rows, groups}, dtype, Role::kInput,
                                  &view));
  }
  if (prefix) format.v = format.k;
  const auto same = static_cast<StoredDtype>(p.dtype);
  if (any != nullptr || format.k.dtype != same || format.v.dtype != same)
    checked->features.used |= kQuantisedCache;
  return CUFLASH_SUCCESS;
}

// How a cache is laid out, but not where its tables lie. any_entry: the call names entries itself.
Status check_cache_layout(const cuflash_kv_cache_t& cache, bool any_entry,
                          CheckedProblem* checked) {
  const Problem& p = checked->problem;
  Paging& paging = checked->features.paging;
  constexpr auto kValue = CUFLASH_ERROR_INVALID_VALUE;
  CUFLASH_CHECK(cache.layout >= CUFLASH_CACHE_CONTIGUOUS && cache.layout <= CUFLASH_CACHE_PAGED_CSR,
                kValue, "cache.layout: %d; 0 (contiguous), 1 or 2", cache.layout);
  CUFLASH_CHECK(cache.id_bits == 0 || cache.id_bits == 32 || cache.id_bits == 64, kValue,
                "cache.id_bits: %d; 0 or 32, or 64", cache.id_bits);
  const bool table = cache.layout == CUFLASH_CACHE_PAGED,
             csr = cache.layout == CUFLASH_CACHE_PAGED_CSR;
  const struct {
    const char* name;
    bool set, belongs;
  } fields[] = {
      {"cache.cache_batch_idx", cache.cache_batch_idx != nullptr, !table && !csr},
      {"cache.block_table", cache.block_table != nullptr, table},
      {"cache.block_table_stride", cache.block_table_stride != 0, table},
      {"cache.page_indptr", cache.page_indptr != nullptr, csr},
      {"cache.page_indices", cache.page_indices != nullptr, csr},
      {"cache.page_size", cache.page_size != 0, table || csr},
      {"cache.id_bits", cache.id_bits != 0, table || csr},
  };
  for (const auto& field : fields)
    CUFLASH_CHECK(!field.set || field.belongs, kValue, "%s: set, but cache.layout is %d",
                  field.name, cache.layout);
  paging.num_pages = cache.num_pages;
  if (table || csr) {
    CUFLASH_CHECK(cache.page_size >= 1 && cache.page_size <= kMaxExtent,
                  CUFLASH_ERROR_INVALID_DIMENSION, "cache.page_size: %lld; 1 to 2^31 - 1",
                  static_cast<ll>(cache.page_size));
    CUFLASH_CHECK(cache.block_table_stride >= 0 && cache.block_table_stride <= kMaxExtent, kValue,
                  "cache.block_table_stride: %lld; 0 to 2^31 - 1",
                  static_cast<ll>(cache.block_table_stride));
    CUFLASH_TRY(check_rows("cache.num_pages * heads_kv * page_size", cache.num_pages, p.heads_kv,
                           cache.page_size));
    paging.table = table ? cache.block_table : cache.page_indices;
    paging.indptr = cache.page_indptr;
    paging.table_stride = cache.block_table_stride;
    paging.page_size = cache.page_size;
    paging.wide_ids = cache.id_bits == 64;
    checked->features.used |= kPagedCache;
    return CUFLASH_SUCCESS;
  }
  if (cache.cache_batch_idx != nullptr) {
    paging.entries = cache.cache_batch_idx;
    if (paging.num_pages == 0) paging.num_pages = p.batch;
    checked->features.used |= kCacheEntries;
    return CUFLASH_SUCCESS;
  }
  CUFLASH_CHECK(any_entry || cache.num_pages == 0 || cache.num_pages >= p.batch,
                CUFLASH_ERROR_DIMENSION_MISMATCH,
                "cache.num_pages: %lld entries for a batch of %lld",
                static_cast<ll>(cache.num_pages), static_cast<ll>(p.batch));
  return CUFLASH_SUCCESS;
}

// K of the pages, or of the entries that the call may reach.
Extents cache_extents(const cuflash_kv_cache_t& cache, const Problem& p, bool any_entry) {
  if (cache.layout != CUFLASH_CACHE_CONTIGUOUS)
    return {cache.num_pages, p.heads_kv, cache.page_size, p.head_dim};
  const bool chosen = (any_entry || cache.cache_batch_idx != nullptr) && cache.num_pages > 0;
  return {chosen ? cache.num_pages : p.batch, p.heads_kv, p.len_k, p.head_dim};
}

// The tables that a cache's layout needs. How long page_indices is only the device knows.
Status add_page_tables(const cuflash_kv_cache_t& cache, const Problem& p, Purpose purpose,
                       Tensors* tensors) {
  CUFLASH_TRY(tensors->add_array("cache.cache_batch_idx", cache.cache_batch_idx, p.batch));
  if (cache.layout == CUFLASH_CACHE_CONTIGUOUS) return CUFLASH_SUCCESS;
  const int64_t id_bytes = cache.id_bits == 64 ? 8 : 4;
  const bool wanted = purpose == Purpose::kCall && p.batch > 0 && p.len_k > 0;
  if (cache.layout == CUFLASH_CACHE_PAGED) {
    CUFLASH_CHECK(!wanted || cache.block_table != nullptr, CUFLASH_ERROR_NULL_POINTER,
                  "cache.block_table: is NULL with CUFLASH_CACHE_PAGED");
    const int64_t columns = ceil_div(p.len_k, cache.page_size);
    const int64_t ids = max64(0, p.batch - 1) * cache.block_table_stride + columns;
    return tensors->add_array("cache.block_table", cache.block_table, ids, id_bytes, Role::kInput);
  }
  CUFLASH_CHECK(!wanted || cache.page_indptr != nullptr, CUFLASH_ERROR_NULL_POINTER,
                "cache.page_indptr: is NULL with CUFLASH_CACHE_PAGED_CSR");
  CUFLASH_CHECK(!wanted || cache.page_indices != nullptr, CUFLASH_ERROR_NULL_POINTER,
                "cache.page_indices: is NULL with CUFLASH_CACHE_PAGED_CSR");
  CUFLASH_TRY(tensors->add_array("cache.page_indptr", cache.page_indptr, p.batch + 1));
  return tensors->add_array("cache.page_indices", cache.page_indices, 1, id_bytes, Role::kInput);
}

// O and LSE of forward and decode, and what is left.
Status check_outputs(const cuflash_problem_t& problem, Purpose purpose, CheckedProblem* checked,
                     Tensors* tensors) {
  Problem& p = checked->problem;
  Dtype dtype_o = p.dtype;
  CUFLASH_TRY(check_output_dtype("problem.o", problem.o.dtype, p.dtype, &dtype_o));
  if (dtype_o != p.dtype) checked->features.used |= kWideOutputs;
  const Extents queries = query_rows(*checked, p.head_dim_v);
  CUFLASH_TRY(tensors->add("problem.o", problem.o, queries, dtype_o, Role::kOutput, &p.o));
  p.aligned16 = tensors->aligned16();
  CUFLASH_TRY(tensors->add_row_stats("problem.lse", problem.lse, problem.lse_batch_stride,
                                     problem.lse_head_stride, problem.lse_row_stride, queries, true,
                                     Role::kOutput, &p.lse));
  return check_accumulate(problem, checked, purpose);
}

// What backward takes and gives beside dQ, dK and dV. Their rows lie by the strides of the LSE, the bias and the sinks.
Status check_further_gradients(const cuflash_problem_t& problem,
                               const cuflash_gradients_t& gradients, Purpose purpose,
                               CheckedProblem* checked, Tensors* tensors) {
  const Problem& p = checked->problem;
  Features& f = checked->features;
  const Extents queries = query_rows(*checked, 1);
  const auto add_rows = [&](const char* name, float* data, Role role, RowStatsView* view) {
    return tensors->add_row_stats(name, data, problem.lse_batch_stride, problem.lse_head_stride,
                                  problem.lse_row_stride, queries, true, role, view);
  };
  CUFLASH_TRY(
      add_rows("gradients.dlse", const_cast<float*>(gradients.dlse), Role::kInput, &f.d_lse));
  f.delta_given = (gradients.flags & CUFLASH_GRADIENTS_DELTA_GIVEN) != 0;
  CUFLASH_CHECK(
      !f.delta_given || gradients.delta != nullptr || purpose == Purpose::kQuery || queries.empty(),
      CUFLASH_ERROR_NULL_POINTER, "gradients.delta: is NULL with CUFLASH_GRADIENTS_DELTA_GIVEN");
  CUFLASH_TRY(add_rows("gradients.delta", gradients.delta,
                       f.delta_given ? Role::kInput : Role::kOutput, &f.delta));
  f.accumulate_gradients = (gradients.flags & CUFLASH_GRADIENTS_ACCUMULATE) != 0;
  if (f.d_lse.data != nullptr) f.used |= kLseGradient;
  if (f.delta_given || f.delta.data != nullptr) f.used |= kDelta;
  if (f.accumulate_gradients) f.used |= kAccumulation;

  CUFLASH_CHECK(gradients.dbias == nullptr || problem.bias != nullptr, CUFLASH_ERROR_INVALID_VALUE,
                "gradients.dbias: set without problem.bias");
  CUFLASH_CHECK(gradients.dsinks == nullptr || problem.sinks != nullptr,
                CUFLASH_ERROR_INVALID_VALUE, "gradients.dsinks: set without problem.sinks");
  if (gradients.dbias != nullptr) {
    f.d_bias = f.score.bias;
    CUFLASH_TRY(tensors->add_bias("gradients.dbias", gradients.dbias,
                                  {p.batch, p.heads_q, p.len_q, p.len_k}, f.score.bias.dtype,
                                  Role::kOutput, &f.d_bias));
  }
  f.d_sinks = {gradients.dsinks, f.sinks.dtype};
  return tensors->add_array("gradients.dsinks", gradients.dsinks, p.heads_q,
                            dtype_bytes(f.sinks.dtype), Role::kOutput);
}

// ---- append -------------------------------------------------------------------------------------------

// Extents and dtype, as selection sees them too.
Status check_append_extents(const cuflash_kv_append_t& append, const cuflash_kv_cache_t& cache,
                            Purpose purpose, CheckedProblem* checked) {
  Problem& p = checked->problem;
  p.operation = Operation::kAppend;
  p.append = &checked->append;
  CUFLASH_TRY(check_flags("append", append.flags, CUFLASH_APPEND_INTERLEAVED));
  CUFLASH_TRY(check_flags("cache", cache.flags, 0));
  CUFLASH_TRY(check_compute_dtype("append.k", append.k.dtype, &p.dtype));
  CUFLASH_TRY(check_extent("append.batch", append.batch));
  CUFLASH_TRY(check_extent("append.heads_q", append.heads_q));
  CUFLASH_TRY(check_extent("append.heads_kv", append.heads_kv));
  CUFLASH_TRY(check_extent("append.len", append.len));
  CUFLASH_TRY(check_extent("cache.max_len", cache.max_len));
  CUFLASH_TRY(check_extent("cache.num_pages", cache.num_pages));
  CUFLASH_TRY(check_head_dim("append.head_dim", append.head_dim, kMaxHeadDim));
  p.head_dim_v = append.head_dim_v == 0 ? append.head_dim : append.head_dim_v;
  CUFLASH_TRY(check_head_dim("append.head_dim_v", p.head_dim_v, kMaxHeadDim));
  CUFLASH_CHECK(append.heads_kv == 0 || append.heads_q % append.heads_kv == 0,
                CUFLASH_ERROR_DIMENSION_MISMATCH,
                "append.heads_q: %lld is not a multiple of heads_kv, %lld",
                static_cast<ll>(append.heads_q), static_cast<ll>(append.heads_kv));
  p.batch = append.batch, p.heads_q = append.heads_q, p.heads_kv = append.heads_kv;
  p.len_q = append.len, p.len_k = cache.max_len, p.head_dim = append.head_dim;
  CUFLASH_TRY(check_rows("append.batch * heads_q * len", p.batch, p.heads_q, p.len_q));
  CUFLASH_TRY(check_rows("append.batch * heads_kv * len", p.batch, p.heads_kv, p.len_q));
  CUFLASH_TRY(check_rows("append.batch * heads_kv * cache.max_len", p.batch, p.heads_kv, p.len_k));
  CUFLASH_CHECK(append.target_arch == 0 || purpose == Purpose::kQuery, CUFLASH_ERROR_INVALID_VALUE,
                "append.target_arch: %d; only queries answer for another GPU", append.target_arch);
  checked->options.target_arch = append.target_arch;
  return CUFLASH_SUCCESS;
}

// Rotation and norms, but not where their arrays lie.
Status check_row_changes(const cuflash_kv_append_t& append, AppendProblem* a) {
  CUFLASH_CHECK((append.cos == nullptr) == (append.sin == nullptr), CUFLASH_ERROR_NULL_POINTER,
                "append.%s: is NULL, but the other of cos and sin is not",
                append.cos == nullptr ? "cos" : "sin");
  CUFLASH_TRY(refuse_stray("append.rotary_dim", append.rotary_dim, "append.cos", append.cos));
  CUFLASH_TRY(refuse_stray("append.max_position", append.max_position, "append.cos", append.cos));
  CUFLASH_TRY(refuse_stray("append.flags", append.flags, "append.cos", append.cos));
  if (append.cos != nullptr) {
    const int64_t dim = append.rotary_dim == 0 ? append.head_dim : append.rotary_dim;
    CUFLASH_CHECK(dim >= 2 && dim <= append.head_dim && dim % 2 == 0,
                  CUFLASH_ERROR_INVALID_DIMENSION,
                  "append.rotary_dim: %lld; even, 2 to head_dim, %lld", static_cast<ll>(dim),
                  static_cast<ll>(append.head_dim));
    CUFLASH_CHECK(append.max_position >= 1 && append.max_position <= kMaxExtent,
                  CUFLASH_ERROR_INVALID_DIMENSION,
                  "append.max_position: %lld; the rows of cos and sin, 1 to 2^31 - 1",
                  static_cast<ll>(append.max_position));
    a->rotary = {append.cos, append.sin, append.max_position, static_cast<int32_t>(dim),
                 (append.flags & CUFLASH_APPEND_INTERLEAVED) != 0};
  }
  CUFLASH_CHECK(std::isfinite(append.norm_epsilon) && append.norm_epsilon >= 0,
                CUFLASH_ERROR_INVALID_VALUE, "append.norm_epsilon: %g; finite and not negative",
                static_cast<double>(append.norm_epsilon));
  CUFLASH_CHECK(append.norm_epsilon == 0 || append.q_norm_weight != nullptr ||
                    append.k_norm_weight != nullptr,
                CUFLASH_ERROR_INVALID_VALUE,
                "append.norm_epsilon: %g without q_norm_weight and k_norm_weight",
                static_cast<double>(append.norm_epsilon));
  a->q_norm = append.q_norm_weight, a->k_norm = append.k_norm_weight;
  a->epsilon = append.norm_epsilon;
  return CUFLASH_SUCCESS;
}

Status check_dtype_of_k(const char* name, const cuflash_tensor_t& t, Dtype of_k) {
  CUFLASH_CHECK(
      t.dtype == CUFLASH_DTYPE_DEFAULT || t.dtype == static_cast<int32_t>(of_k),
      CUFLASH_ERROR_UNSUPPORTED_DTYPE, "%s.dtype: %d (%s); 0 or that of append.k, %d (%s)", name,
      t.dtype, dtype_name(t.dtype), static_cast<int>(of_k), dtype_name(static_cast<int32_t>(of_k)));
  return CUFLASH_SUCCESS;
}

// The new rows, and the queries' output.
Status check_new_rows(const cuflash_kv_append_t& append, CheckedProblem* checked,
                      Tensors* tensors) {
  const Problem& p = checked->problem;
  AppendProblem& a = checked->append;
  a.batch = p.batch, a.len = p.len_q, a.heads_kv = p.heads_kv, a.head_dim = p.head_dim;
  const Extents keys{p.batch, p.heads_kv, p.len_q, p.head_dim};
  CUFLASH_TRY(tensors->add("append.k", append.k, keys, p.dtype, Role::kInput, &a.k));
  CUFLASH_TRY(
      tensors->add_array("append.cos", a.rotary.cos, a.rotary.max_position * (a.rotary.dim / 2)));
  CUFLASH_TRY(
      tensors->add_array("append.sin", a.rotary.sin, a.rotary.max_position * (a.rotary.dim / 2)));
  CUFLASH_TRY(tensors->add_array("append.k_norm_weight", a.k_norm, p.head_dim, dtype_bytes(p.dtype),
                                 Role::kInput));
  if (!is_zero(append.v)) {
    a.head_dim_v = p.head_dim_v;
    CUFLASH_TRY(check_dtype_of_k("append.v", append.v, p.dtype));
    CUFLASH_TRY(tensors->add("append.v", append.v, {p.batch, p.heads_kv, p.len_q, p.head_dim_v},
                             p.dtype, Role::kInput, &a.v));
  }
  if (is_zero(append.q)) {
    CUFLASH_CHECK(is_zero(append.q_out), CUFLASH_ERROR_INVALID_VALUE,
                  "append.q_out: set without append.q");
    CUFLASH_CHECK(append.heads_q == 0 && append.q_norm_weight == nullptr,
                  CUFLASH_ERROR_INVALID_VALUE, "append.%s: set without append.q",
                  append.heads_q == 0 ? "q_norm_weight" : "heads_q");
    return CUFLASH_SUCCESS;
  }
  a.heads_q = p.heads_q;
  const Extents queries{p.batch, p.heads_q, p.len_q, p.head_dim};
  CUFLASH_TRY(check_dtype_of_k("append.q", append.q, p.dtype));
  CUFLASH_TRY(check_dtype_of_k("append.q_out", append.q_out, p.dtype));
  CUFLASH_TRY(tensors->add_array("append.q_norm_weight", a.q_norm, p.head_dim, dtype_bytes(p.dtype),
                                 Role::kInput));
  CUFLASH_TRY(
      tensors->add("append.q_out", append.q_out, queries, p.dtype, Role::kOutput, &a.q_out));
  // q may be q_out; looked at alone first, so that it is not found to overlap itself.
  MemoryUse unused;
  Tensors alone(Purpose::kQuery, &unused);
  CUFLASH_TRY(alone.add("append.q", append.q, queries, p.dtype, Role::kInput, &a.q));
  const bool in_place = a.q.data == a.q_out.data && a.q.batch_stride == a.q_out.batch_stride &&
                        a.q.head_stride == a.q_out.head_stride &&
                        a.q.row_stride == a.q_out.row_stride;
  if (in_place) return CUFLASH_SUCCESS;
  return tensors->add("append.q", append.q, queries, p.dtype, Role::kInput, &a.q);
}

// The cache, and what tells where in it the tokens go.
Status check_destination(const cuflash_kv_append_t& append, const cuflash_kv_cache_t& cache,
                         Purpose purpose, CheckedProblem* checked, Tensors* tensors) {
  const Problem& p = checked->problem;
  AppendProblem& a = checked->append;
  const bool mapped = append.slot_mapping != nullptr;
  CUFLASH_TRY(check_cache_layout(cache, mapped, checked));
  const Extents slots = cache_extents(cache, p, mapped);
  CacheFormat& format = checked->features.format;
  CUFLASH_TRY(check_key_dtype("cache.k", cache.k.dtype, p, &format.k.dtype));
  CUFLASH_TRY(check_key_dtype("cache.v", cache.v.dtype, p, &format.v.dtype));
  CUFLASH_TRY(tensors->add_items("cache.k", cache.k, slots, stored_bits(format.k.dtype),
                                 Role::kOutput, &a.cache_k));
  if (a.head_dim_v > 0) {
    Extents values = slots;
    values.channels = p.head_dim_v;
    CUFLASH_TRY(tensors->add_items("cache.v", cache.v, values, stored_bits(format.v.dtype),
                                   Role::kOutput, &a.cache_v));
  }
  CUFLASH_TRY(check_scales(cache, false, slots, checked, tensors));
  a.format = format;
  a.paging = checked->features.paging;
  a.max_len = p.len_k, a.entries = slots.batch, a.entry_slots = slots.rows;

  const int64_t tokens = p.batch * p.len_q;
  a.slot_mapping = append.slot_mapping;
  CUFLASH_TRY(tensors->add_array("append.slot_mapping", a.slot_mapping, tokens));
  a.positions = append.positions;
  CUFLASH_TRY(tensors->add_array("append.positions", a.positions, tokens));
  const bool after_lengths =
      append.positions == nullptr && (!mapped || a.rotary.dim > 0) && tokens > 0;
  if (after_lengths) {
    CUFLASH_CHECK(cache.lengths != nullptr || purpose == Purpose::kQuery,
                  CUFLASH_ERROR_NULL_POINTER,
                  "cache.lengths: is NULL, and append.positions too; one of them is needed%s",
                  mapped ? " for the angles" : "");
    a.lengths = cache.lengths;
    CUFLASH_TRY(tensors->add_array("cache.lengths", a.lengths, p.batch));
  }
  if (mapped || tokens == 0) return CUFLASH_SUCCESS;
  return add_page_tables(cache, p, purpose, tensors);
}

}  // namespace

Status check_any(const cuflash_problem_t* source, CheckedProblem* checked) {
  cuflash_problem_t problem;
  // As decode, which allows most: more than one part.
  return check_common(source, Operation::kDecode, Purpose::kQuery, &problem, checked);
}

Status check_forward(const cuflash_problem_t* source, Purpose purpose, CheckedProblem* checked) {
  cuflash_problem_t problem;
  CUFLASH_TRY(check_common(source, Operation::kForward, purpose, &problem, checked));
  Problem& p = checked->problem;
  Tensors tensors(purpose, &checked->memory);
  CUFLASH_TRY(tensors.add("problem.q", problem.q, query_rows(*checked, p.head_dim), p.dtype,
                          Role::kInput, &p.q));
  CUFLASH_TRY(check_keys_and_values(problem, "problem.k", problem.k, "problem.v", problem.v,
                                    key_rows(*checked, p.head_dim), checked, &tensors));
  CUFLASH_TRY(check_outputs(problem, purpose, checked, &tensors));
  return check_rest(problem, checked, &tensors);
}

Status check_backward(const cuflash_problem_t* source, const cuflash_gradients_t* source_gradients,
                      Purpose purpose, CheckedProblem* checked) {
  cuflash_problem_t problem;
  cuflash_gradients_t gradients;
  CUFLASH_TRY(check_common(source, Operation::kBackward, purpose, &problem, checked));
  CUFLASH_TRY(import_struct(source_gradients, "gradients", &gradients));
  CUFLASH_TRY(check_flags("gradients", gradients.flags,
                          CUFLASH_GRADIENTS_ACCUMULATE | CUFLASH_GRADIENTS_DELTA_GIVEN));
  for (const uint32_t flag : {CUFLASH_PROBLEM_ACCUMULATE, CUFLASH_PROBLEM_V_IS_K_PREFIX})
    CUFLASH_CHECK((problem.flags & flag) == 0, CUFLASH_ERROR_UNSUPPORTED,
                  "problem.flags: 0x%x is not for the backward pass", flag);
  Problem& p = checked->problem;
  Features& f = checked->features;
  const struct {
    const char* name;
    const cuflash_tensor_t& tensor;
    TensorView* view;
    Extents extents;
  } outputs[] = {{"gradients.dq", gradients.dq, &p.dq, query_rows(*checked, p.head_dim)},
                 {"gradients.dk", gradients.dk, &p.dk, key_rows(*checked, p.head_dim)},
                 {"gradients.dv", gradients.dv, &p.dv, key_rows(*checked, p.head_dim_v)}};
  const Extents rows_of_o = query_rows(*checked, p.head_dim_v);
  Tensors tensors(purpose, &checked->memory);
  CUFLASH_TRY(tensors.add("problem.q", problem.q, query_rows(*checked, p.head_dim), p.dtype,
                          Role::kInput, &p.q));
  CUFLASH_TRY(check_keys_and_values(problem, "problem.k", problem.k, "problem.v", problem.v,
                                    key_rows(*checked, p.head_dim), checked, &tensors));
  Dtype dtype_o = p.dtype;
  CUFLASH_TRY(check_output_dtype("problem.o", problem.o.dtype, p.dtype, &dtype_o));
  if (dtype_o != p.dtype) f.used |= kWideOutputs;
  if ((gradients.flags & CUFLASH_GRADIENTS_DELTA_GIVEN) == 0)
    CUFLASH_TRY(tensors.add("problem.o", problem.o, rows_of_o, dtype_o, Role::kInput, &p.o));
  CUFLASH_TRY(check_tensor_dtype("gradients.d_o", gradients.d_o.dtype, p.dtype));
  CUFLASH_TRY(
      tensors.add("gradients.d_o", gradients.d_o, rows_of_o, p.dtype, Role::kInput, &p.d_o));
  for (const auto& output : outputs) {
    Dtype dtype = p.dtype;
    CUFLASH_TRY(check_output_dtype(output.name, output.tensor.dtype, p.dtype, &dtype));
    if (dtype != p.dtype) f.used |= kWideOutputs;
    CUFLASH_CHECK((gradients.flags & CUFLASH_GRADIENTS_ACCUMULATE) == 0 || dtype == Dtype::kF32,
                  CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                  "%s.dtype: %d (%s); CUFLASH_F32 with CUFLASH_GRADIENTS_ACCUMULATE", output.name,
                  static_cast<int>(dtype), dtype_name(static_cast<int32_t>(dtype)));
    CUFLASH_TRY(
        tensors.add(output.name, output.tensor, output.extents, dtype, Role::kOutput, output.view));
  }
  p.aligned16 = tensors.aligned16();
  CUFLASH_TRY(tensors.add_row_stats("problem.lse", problem.lse, problem.lse_batch_stride,
                                    problem.lse_head_stride, problem.lse_row_stride, rows_of_o,
                                    false, Role::kInput, &p.lse));
  CUFLASH_TRY(check_further_gradients(problem, gradients, purpose, checked, &tensors));
  return check_rest(problem, checked, &tensors);
}

Status check_decode(const cuflash_problem_t* source, const cuflash_kv_cache_t* source_cache,
                    Purpose purpose, CheckedProblem* checked) {
  cuflash_problem_t problem;
  cuflash_kv_cache_t cache;
  CUFLASH_TRY(check_common(source, Operation::kDecode, purpose, &problem, checked));
  CUFLASH_TRY(import_struct(source_cache, "cache", &cache));
  CUFLASH_TRY(check_flags("cache", cache.flags, 0));
  CUFLASH_CHECK(is_zero(problem.k), CUFLASH_ERROR_INVALID_VALUE,
                "problem.k: must be all zero in decode; the cache holds the keys");
  CUFLASH_CHECK(is_zero(problem.v), CUFLASH_ERROR_INVALID_VALUE,
                "problem.v: must be all zero in decode; the cache holds the values");
  CUFLASH_CHECK(problem.len_k == 0, CUFLASH_ERROR_INVALID_VALUE,
                "problem.len_k: %lld; must be 0 in decode, cache.max_len tells",
                static_cast<ll>(problem.len_k));
  Problem& p = checked->problem;
  CUFLASH_TRY(check_extent("cache.max_len", cache.max_len));
  CUFLASH_TRY(check_extent("cache.num_pages", cache.num_pages));
  p.len_k = cache.max_len;
  CUFLASH_TRY(check_cache_layout(cache, false, checked));
  const Extents keys = cache_extents(cache, p, false);
  CUFLASH_TRY(check_rows("problem.batch * heads_kv * cache.max_len", p.batch, p.heads_kv, p.len_k));
  Tensors tensors(purpose, &checked->memory);
  CUFLASH_TRY(tensors.add("problem.q", problem.q, query_rows(*checked, p.head_dim), p.dtype,
                          Role::kInput, &p.q));
  CUFLASH_TRY(check_keys_and_values(problem, "cache.k", cache.k, "cache.v", cache.v, keys, checked,
                                    &tensors));
  CUFLASH_TRY(check_outputs(problem, purpose, checked, &tensors));
  const bool prefix = (problem.flags & CUFLASH_PROBLEM_V_IS_K_PREFIX) != 0;
  CUFLASH_TRY(check_scales(cache, prefix, keys, checked, &tensors));
  p.lengths_k = cache.lengths;
  CUFLASH_TRY(tensors.add_array("cache.lengths", cache.lengths, p.batch));
  CUFLASH_TRY(add_page_tables(cache, p, purpose, &tensors));
  return check_rest(problem, checked, &tensors);
}

Status check_merge(const cuflash_merge_t* source, CheckedMerge* checked) {
  cuflash_merge_t merge;
  CUFLASH_TRY(import_struct(source, "merge", &merge));
  CUFLASH_TRY(check_flags("merge", merge.flags, CUFLASH_MERGE_LSE_BASE2));
  MergeProblem& p = checked->problem;
  Dtype in = Dtype::kF32, out = Dtype::kF32;
  CUFLASH_TRY(check_compute_dtype("merge.parts", merge.parts.dtype, &in));
  out = in;
  if (merge.o.dtype != CUFLASH_DTYPE_DEFAULT)
    CUFLASH_TRY(check_compute_dtype("merge.o", merge.o.dtype, &out));
  CUFLASH_TRY(check_extent("merge.num_parts", merge.num_parts));
  CUFLASH_TRY(check_extent("merge.batch", merge.batch));
  CUFLASH_TRY(check_extent("merge.heads", merge.heads));
  CUFLASH_TRY(check_extent("merge.len", merge.len));
  CUFLASH_TRY(check_head_dim("merge.head_dim", merge.head_dim, kMaxHeadDim));
  CUFLASH_TRY(check_rows("merge.batch * heads * len", merge.batch, merge.heads, merge.len));
  p.num_parts = merge.num_parts, p.batch = merge.batch, p.heads = merge.heads;
  p.len = merge.len, p.head_dim = merge.head_dim;
  p.part_stride = merge.part_stride, p.lse_part_stride = merge.lse_part_stride;
  p.base2 = (merge.flags & CUFLASH_MERGE_LSE_BASE2) != 0;
  for (const auto& [name, stride] :
       {std::pair<const char*, int64_t>{"merge.part_stride", merge.part_stride},
        {"merge.lse_part_stride", merge.lse_part_stride}})
    CUFLASH_CHECK(stride >= 0 && stride <= kMaxStride, CUFLASH_ERROR_INVALID_VALUE,
                  "%s: %lld; 0 to 2^48", name, static_cast<ll>(stride));

  const Extents rows{merge.batch, merge.heads, merge.len, merge.head_dim};
  Tensors outputs(Purpose::kCall, &checked->memory);
  CUFLASH_TRY(outputs.add("merge.o", merge.o, rows, out, Role::kOutput, &p.o));
  CUFLASH_TRY(outputs.add_row_stats("merge.lse", merge.lse, merge.lse_batch_stride,
                                    merge.lse_head_stride, merge.lse_row_stride, rows, true,
                                    Role::kOutput, &p.lse));
  CUFLASH_TRY(outputs.check_overlaps());
  // Without parts their pointers are not read.
  MemoryUse part_memory;
  Tensors inputs(merge.num_parts == 0 ? Purpose::kQuery : Purpose::kCall, &part_memory);
  CUFLASH_TRY(inputs.add("merge.parts", merge.parts, rows, in, Role::kInput, &p.parts));
  CUFLASH_TRY(inputs.add_row_stats("merge.lse_parts", const_cast<float*>(merge.lse_parts),
                                   merge.lse_batch_stride, merge.lse_head_stride,
                                   merge.lse_row_stride, rows, false, Role::kInput, &p.lse_parts));
  if (merge.num_parts == 0) {
    p.parts = {nullptr, 0, 0, 0, in};  // no offset from what may be null
    p.lse_parts = {};
  }
  if (rows.empty() || merge.num_parts == 0) return CUFLASH_SUCCESS;
  CUFLASH_TRY(
      check_part_reach("merge.part_stride", merge.part_stride, merge.num_parts, dtype_bytes(in)));
  CUFLASH_TRY(check_part_reach("merge.lse_part_stride", merge.lse_part_stride, merge.num_parts, 4));

  const PartSeries parts("merge.parts", p.parts, rows, dtype_bytes(in), p.part_stride, p.num_parts);
  const PartSeries lse_parts("merge.lse_parts", p.lse_parts, rows, p.lse_part_stride, p.num_parts);
  const PartSeries o("merge.o", p.o, rows, dtype_bytes(out), 0, 1);
  const PartSeries lse("merge.lse", p.lse, rows, 0, 1);
  CUFLASH_TRY(check_merge_output(o, parts, in == out));
  CUFLASH_TRY(check_merge_output(o, lse_parts, false));
  if (merge.lse != nullptr) {
    CUFLASH_TRY(check_merge_output(lse, lse_parts, true));
    CUFLASH_TRY(check_merge_output(lse, parts, false));
  }
  for (const PartSeries& series : {parts, lse_parts})
    checked->memory.add(series.name, reinterpret_cast<const void*>(series.box.base),
                        series.bytes());
  return CUFLASH_SUCCESS;
}

Status check_append(const cuflash_kv_cache_t* source_cache, const cuflash_kv_append_t* source,
                    Purpose purpose, CheckedProblem* checked) {
  cuflash_kv_cache_t cache;
  cuflash_kv_append_t append;
  CUFLASH_TRY(import_struct(source_cache, "cache", &cache));
  CUFLASH_TRY(import_struct(source, "append", &append));
  CUFLASH_TRY(check_append_extents(append, cache, purpose, checked));
  CUFLASH_TRY(check_row_changes(append, &checked->append));
  Tensors tensors(purpose, &checked->memory);
  CUFLASH_TRY(check_new_rows(append, checked, &tensors));
  CUFLASH_TRY(check_destination(append, cache, purpose, checked, &tensors));
  return tensors.check_overlaps();
}

Status check_weights(const cuflash_problem_t* source, const cuflash_weights_t* source_weights,
                     CheckedWeights* result) {
  cuflash_problem_t problem;
  cuflash_weights_t weights;
  CheckedProblem& checked = result->checked;
  CUFLASH_TRY(check_common(source, Operation::kForward, Purpose::kCall, &problem, &checked));
  CUFLASH_TRY(import_struct(source_weights, "weights", &weights));
  CUFLASH_TRY(check_flags("weights", weights.flags, 0));
  CUFLASH_TRY(check_extent("weights.num_rows", weights.num_rows));
  Problem& p = checked.problem;
  WeightsOutput& out = result->out;
  out.num_rows = weights.num_rows == 0 ? p.len_q : weights.num_rows;
  out.chosen = weights.rows;
  const Extents queries = query_rows(checked, p.head_dim), keys = key_rows(checked, p.head_dim);
  CUFLASH_TRY(
      check_rows("problem.batch * heads_q * weights.num_rows", p.batch, p.heads_q, out.num_rows));
  CUFLASH_TRY(check_tensor_dtype("problem.k", problem.k.dtype, p.dtype));
  Tensors tensors(Purpose::kCall, &checked.memory);
  CUFLASH_TRY(tensors.add("problem.q", problem.q, queries, p.dtype, Role::kInput, &p.q));
  CUFLASH_TRY(tensors.add("problem.k", problem.k, keys, p.dtype, Role::kInput, &p.k));
  CUFLASH_TRY(tensors.add_row_stats("problem.lse", problem.lse, problem.lse_batch_stride,
                                    problem.lse_head_stride, problem.lse_row_stride, queries, false,
                                    Role::kInput, &p.lse));
  CUFLASH_TRY(tensors.add_array("weights.rows", weights.rows, out.num_rows));
  // As a tensor whose channels are the keys.
  cuflash_tensor_t output = {};
  output.data = weights.weights;
  output.batch_stride = weights.batch_stride;
  output.head_stride = weights.head_stride;
  output.row_stride = weights.row_stride;
  const bool dense =
      weights.batch_stride == 0 && weights.head_stride == 0 && weights.row_stride == 0;
  if (dense) output.flags = CUFLASH_TENSOR_DENSE;
  if (p.len_k == 0) out.num_rows = 0;
  TensorView view;
  CUFLASH_TRY(tensors.add("weights.weights", output, {p.batch, p.heads_q, out.num_rows, p.len_k},
                          Dtype::kF32, Role::kOutput, &view));
  out.rows = {weights.weights, view.batch_stride, view.head_stride, view.row_stride};
  return check_rest(problem, &checked, &tensors);
}

Status check_scale(const char* name, float scale) {
  constexpr float kGreatest = 0x1p127f;
  CUFLASH_CHECK(scale >= 0 && scale <= kGreatest, CUFLASH_ERROR_INVALID_DIMENSION,
                "%s: %g; 0 to 2^127", name, static_cast<double>(scale));
  return CUFLASH_SUCCESS;
}

Status init_struct(void* pointer, size_t size, const char* name) {
  CUFLASH_CHECK(pointer != nullptr, CUFLASH_ERROR_NULL_POINTER, "%s: is NULL", name);
  CUFLASH_CHECK(size >= 8 && size <= kMaxStructSize && size % 8 == 0, CUFLASH_ERROR_STRUCT_SIZE,
                "size: %zu for %s; 8 to %zu, a multiple of 8: sizeof the struct", size, name,
                kMaxStructSize);
  std::memset(pointer, 0, size);
  const auto struct_size = static_cast<uint32_t>(size);
  std::memcpy(pointer, &struct_size, sizeof struct_size);
  return CUFLASH_SUCCESS;
}

Status check_output_size(uint32_t struct_size, size_t minimum, const char* name) {
  CUFLASH_CHECK(struct_size >= minimum && struct_size <= kMaxStructSize && struct_size % 8 == 0,
                CUFLASH_ERROR_STRUCT_SIZE, "%s.struct_size: %u; %zu to %zu, a multiple of 8", name,
                struct_size, minimum, kMaxStructSize);
  return CUFLASH_SUCCESS;
}

}  // namespace cuflash
