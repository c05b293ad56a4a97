// What the tables of the tiled families share: rows made from a kernel's name, and why a kernel for one dtype and one
// bucket of head dims refuses.
#pragma once

#include "common/integer.hpp"
#include "core/features.hpp"
#include "core/variant.hpp"

namespace cuflash {

// `name` as in cmake/variants.cmake, where the unit that defines these functions comes from.
#define CUFLASH_DECLARE_KERNEL(name)                                       \
  Status launch_##name(const Problem&, const Plan&, const LaunchContext&); \
  Status preload_##name(int device)
#define CUFLASH_KERNEL_ROW(name, family, operation, tile_m, tile_n, threads, shared_bytes, rank, \
                           accepts, plan)                                                        \
  {                                                                                              \
#name, family, operation, false, tile_m, tile_n, threads, shared_bytes, rank, accepts, plan, \
        CUFLASH_ENTRY_##name(launch_##name), CUFLASH_ENTRY_##name(preload_##name)                \
  }

// Texts with a number in them, made by the compiler: refusals are pointers to constants.
struct ConstantText {
  char data[64] = {};
};

constexpr ConstantText constant_text(const char* before, int number, const char* after) {
  ConstantText result;
  int length = 0;
  while (*before != '\0') result.data[length++] = *before++;
  int unit = 1;
  while (number / unit >= 10) unit *= 10;
  for (; unit > 0; unit /= 10) result.data[length++] = static_cast<char>('0' + number / unit % 10);
  while (*after != '\0') result.data[length++] = *after++;
  return result;
}

template <int kHeadDim>
constexpr ConstantText kAboveBucket = constant_text("head_dim is above ", kHeadDim, "");
template <int kHeadDim>
constexpr ConstantText kValuesAboveBucket = constant_text("head_dim_v is above ", kHeadDim, "");
template <int kSharedBytes>
constexpr ConstantText kNeedsSharedBytes = constant_text("needs ", kSharedBytes,
                                                         " bytes of shared memory per block");

// What a family lacks: `taken` has the bits of Feature that it has.
inline Refusal refuse_features(const Problem& problem, uint32_t taken = 0) {
  if (problem.features == nullptr) return {};
  constexpr struct {
    Feature feature;
    const char* reason;
  } kReasons[] = {
      {kRaggedBatches, "takes no ragged batches"},
      {kSoftcap, "takes no softcap"},
      {kAlibi, "takes no ALiBi slopes"},
      {kBias, "takes no bias"},
      {kSinks, "takes no sinks"},
      {kDropout, "takes no dropout"},
      {kOwnValueDim, "takes no head_dim_v other than head_dim"},
      {kWideOutputs, "takes no fp32 outputs of 16-bit inputs"},
      {kAccumulation, "does not accumulate into its outputs"},
      {kDelta, "neither takes nor returns delta"},
      {kLseGradient, "takes no gradient of the LSE"},
      {kPagedCache, "takes no paged caches"},
      {kCacheEntries, "takes no cache_batch_idx"},
      {kQuantisedCache, "takes no quantised caches"},
      {kTreeMask, "takes no tree masks"},
  };
  for (const auto& row : kReasons)
    if ((problem.features->used & ~taken & row.feature) != 0) return {row.reason};
  return {};
}

// kTaken: the bits of Feature that the family has.
template <Dtype kDtype, int kHeadDim, uint32_t kTaken = 0>
Refusal refuse_other_problems(const Problem& problem) {
  if (const Refusal refusal = refuse_features(problem, kTaken)) return refusal;
  if (problem.dtype != kDtype)
    return {kDtype == Dtype::kF32   ? "takes f32 only"
            : kDtype == Dtype::kF16 ? "takes f16 only"
                                    : "takes bf16 only"};
  if (problem.head_dim > kHeadDim) return {kAboveBucket<kHeadDim>.data};
  if (problem.head_dim_v > kHeadDim) return {kValuesAboveBucket<kHeadDim>.data};
  return {};
}

// Of backward: sums over scores that no tile has all of.
inline Refusal refuse_modifier_gradients(const Problem& problem) {
  if (problem.features == nullptr) return {};
  if (problem.features->d_bias.data != nullptr) return {"makes no gradient of the bias"};
  if (problem.features->d_sinks.data != nullptr) return {"makes no gradient of the sinks"};
  return {};
}

template <int kSharedBytes>
Refusal refuse_less_shared_memory(const Capabilities& capabilities) {
  if (capabilities.shared_memory_per_block < kSharedBytes)
    return {kNeedsSharedBytes<kSharedBytes>.data};
  return {};
}

// nvcuda::wmma has f16 from sm_70 and bf16 from sm_80.
template <Dtype kDtype>
Refusal refuse_without_wmma(const Capabilities& capabilities) {
  constexpr bool kIsF16 = kDtype == Dtype::kF16;
  if (capabilities.arch < (kIsF16 ? 70 : 80))
    return {kIsF16 ? "needs sm_70 or newer" : "needs sm_80 or newer"};
  return {};
}

// A block for each tile of `tile` rows of each head: more than grid.x holds?
inline Refusal refuse_more_tiles(int64_t heads, int64_t rows, int tile) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  const int64_t tiles = ceil_div(rows, tile);
  if (tiles > 0 && heads > kMaxBlocks / tiles) return {"more than 2^31 - 1 tiles of rows"};
  return {};
}

// Returns the refusal that the expression gives, if it gives one.
#define CUFLASH_REFUSE(expression) \
  if (const Refusal refusal = expression) return refusal

}  // namespace cuflash
