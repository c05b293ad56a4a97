// Appending to a cache: where a new token goes, and what of it is written. One source for the CPU device and CUDA; an item
// of work is a row, that of one head of q, k or v of one token. All arithmetic is fp32, rounded once, when it is stored.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/lanes.hpp"
#include "attention/paging.hpp"
#include "attention/stored_row.hpp"
#include "core/append.hpp"

namespace cuflash {

// ---- where a token goes ---------------------------------------------------------------------------

struct Token {
  int64_t batch, index;  // of its sequence's new ones
};

// Where it stands in its sequence: the angle of its rotation, and its slot where no mapping names one. Negative: nowhere.
CUFLASH_HOST_DEVICE int64_t position_of(const AppendProblem& p, const Token& t) {
  if (p.positions != nullptr) return p.positions[t.batch * p.len + t.index];
  const int64_t length = p.lengths[t.batch];
  return length < 0 ? -1 : length + t.index;
}

// Its slot in the cache; not valid: it has none.
CUFLASH_HOST_DEVICE KeySlot slot_of(const AppendProblem& p, const Token& t, int64_t position) {
  constexpr KeySlot kNone = {0, 0, false};
  if (p.slot_mapping != nullptr) {
    const int64_t slot = p.slot_mapping[t.batch * p.len + t.index];
    if (slot < 0 || slot >= p.entries * p.entry_slots) return kNone;
    return {slot / p.entry_slots, slot % p.entry_slots, true};
  }
  const int64_t capacity = min64(p.max_len, cache_capacity(p.paging, p.max_len, t.batch));
  if (position < 0 || position >= capacity) return kNone;
  return key_slot(p.paging, t.batch, position);
}

// ---- the channels of a row ------------------------------------------------------------------------

// An RMS norm takes x to x * factor * inverse, times its weight.
struct RmsNorm {
  float factor = 1, inverse = 1;
};

// A row of zeros without an epsilon stays one.
template <class T, class Team>
CUFLASH_HOST_DEVICE RmsNorm rms_norm(const Team& team, const T* row, int dim, float epsilon) {
  const auto mean_of_squares = [&](float factor) {
    float sum = 0;
    for (int c = team.lane; c < dim; c += Team::kLanes) {
      const float x = to_float(row[c]) * factor;
      sum += x * x;
    }
    return team.sum(sum) / static_cast<float>(dim) + epsilon * factor * factor;
  };
  RmsNorm norm;
  float mean = mean_of_squares(norm.factor);
  // Squares leave the range of fp32 where x does not: then at another scale, and at a third where no x is a normal number
  // (epsilon is 0 there).
  if (!(mean >= 0x1p-60f && mean <= 0x1p120f)) {
    norm.factor = mean < 1 ? 0x1p80f : 0x1p-80f;
    mean = mean_of_squares(norm.factor);
    if (mean < 0x1p-90f) {
      norm.factor = 0x1p120f;
      mean = mean_of_squares(norm.factor);
    }
  }
  norm.inverse = mean == 0 ? 0.0f : 1.0f / sqrtf(mean);
  return norm;
}

// A new key or query, normed and rotated as it is read.
template <class T>
class NewRow {
 public:
  template <class Team>
  CUFLASH_HOST_DEVICE NewRow(const Team& team, const AppendProblem& p, const T* row,
                             const void* weights, int64_t position)
      : row_(row), weights_(static_cast<const T*>(weights)), rotary_(p.rotary) {
    if (weights != nullptr) norm_ = rms_norm(team, row, static_cast<int>(p.head_dim), p.epsilon);
    if (rotary_.dim > 0) first_angle_ = position * (rotary_.dim / 2);
  }

  // The channel that is rotated together with `channel`, of the first rotary.dim.
  CUFLASH_HOST_DEVICE int partner(int channel) const {
    const int half = rotary_.dim / 2;
    return rotary_.interleaved ? channel ^ 1 : channel < half ? channel + half : channel - half;
  }

  CUFLASH_HOST_DEVICE float operator[](int channel) const {
    if (channel >= rotary_.dim) return normed(channel);
    const int other = partner(channel);
    const int lower = channel < other ? channel : other;
    const int64_t angle = first_angle_ + (rotary_.interleaved ? lower / 2 : lower);
    const float along = normed(channel) * rotary_.cos[angle];
    const float across = normed(other) * rotary_.sin[angle];
    return channel == lower ? along - across : along + across;
  }

 private:
  CUFLASH_HOST_DEVICE float normed(int channel) const {
    const float x = to_float(row_[channel]);
    if (weights_ == nullptr) return x;
    return x * norm_.factor * norm_.inverse * to_float(weights_[channel]);
  }

  const T* row_;
  const T* weights_;
  const Rotary& rotary_;
  RmsNorm norm_;
  int64_t first_angle_ = 0;
};

// A new value.
template <class T>
struct PlainRow {
  const T* row;
  CUFLASH_HOST_DEVICE float operator[](int channel) const { return to_float(row[channel]); }
};

// ---- storing --------------------------------------------------------------------------------------

// Two codes of `Code` at once, where their place is aligned to both.
template <class Both, class Code>
CUFLASH_HOST_DEVICE void store_two(Code* place, uint32_t first, uint32_t second) {
  constexpr int kBits = 8 * sizeof(Code);
  if (reinterpret_cast<uintptr_t>(place) % sizeof(Both) == 0) {
    *reinterpret_cast<Both*>(place) = static_cast<Both>(first | static_cast<Both>(second) << kBits);
    return;
  }
  place[0] = static_cast<Code>(first);
  place[1] = static_cast<Code>(second);
}

// Codes of the channels `channel` and, if it is there, `channel` + 1 of a row; `channel` is even. Rows of int4 begin with
// a byte, so that no two threads share one.
CUFLASH_HOST_DEVICE void store_codes(StoredDtype dtype, void* data, int64_t index, bool two,
                                     uint32_t first, uint32_t second) {
  const auto store_as = [&](auto* codes, auto both) {
    using Both = decltype(both);
    codes += index;
    if (two) return store_two<Both>(codes, first, second);
    *codes = static_cast<std::remove_pointer_t<decltype(codes)>>(first);
  };
  switch (stored_bits(dtype)) {
    case 32:
      return store_as(static_cast<uint32_t*>(data), uint64_t{});
    case 16:
      return store_as(static_cast<uint16_t*>(data), uint32_t{});
    case 8:
      return store_as(static_cast<uint8_t*>(data), uint16_t{});
    default:
      break;
  }
  // The unused half of the last byte of an odd row stays as it is.
  uint8_t& byte = static_cast<uint8_t*>(data)[index / 2];
  byte = static_cast<uint8_t>(first | (two ? second << 4 : byte & 0xf0u));
}

// Writes a row of K or V, two neighbouring channels at a time.
template <class Team, class Row>
CUFLASH_HOST_DEVICE void store_in_cache(const Team& team, const Row& row, int dim,
                                        const QuantisedRow& out) {
  const auto code_of = [&](int channel) {
    return quantise(out.side.dtype, row[channel], quantisation_of(out.side, out.scale_of(channel)));
  };
  for (int c = 2 * team.lane; c < dim; c += 2 * Team::kLanes) {
    const bool two = c + 1 < dim;
    store_codes(out.side.dtype, out.data, out.first + c, two, code_of(c), two ? code_of(c + 1) : 0);
  }
}

// Writes a row of q_out.
// SAFETY: it may be the row of q. What the norm reads, all lanes have read before its sum is known; from then on a channel
// is read only by the lane that writes it, and before it does.
template <class T, class Team>
CUFLASH_HOST_DEVICE void store_query(const Team& team, const NewRow<T>& row, const AppendProblem& p,
                                     T* out) {
  for (int c = team.lane; c < p.head_dim; c += Team::kLanes) {
    if (c >= p.rotary.dim) {
      out[c] = from_float<T>(row[c]);
      continue;
    }
    const int other = row.partner(c);
    if (other < c) continue;
    const float lower = row[c], upper = row[other];
    out[c] = from_float<T>(lower);
    out[other] = from_float<T>(upper);
  }
}

// ---- one row --------------------------------------------------------------------------------------

// Index: a row, tokens outermost, of each the heads of q, of k and of v.
template <class T, class Team>
CUFLASH_HOST_DEVICE void append_index(const Team& team, const AppendProblem& p, int64_t index) {
  const int64_t token = index / p.heads();
  int64_t head = index % p.heads();
  const Token t = {token / p.len, token % p.len};
  const bool by_position = p.slot_mapping == nullptr || p.rotary.dim > 0;
  const int64_t position = by_position ? position_of(p, t) : 0;
  const bool rotates = p.rotary.reaches(position);
  if (head < p.heads_q) {
    T* const out = p.q_out.row<T>(t.batch, head, t.index);
    if (rotates)
      return store_query(
          team, NewRow<T>(team, p, p.q.row<T>(t.batch, head, t.index), p.q_norm, position), p, out);
    for (int c = team.lane; c < p.head_dim; c += Team::kLanes) out[c] = from_float<T>(0.0f);
    return;
  }
  if (!rotates) return;
  const KeySlot at = slot_of(p, t, position);
  if (!at.valid) return;
  head -= p.heads_q;
  if (head < p.heads_kv) {
    const NewRow<T> row(team, p, p.k.row<T>(t.batch, head, t.index), p.k_norm, position);
    return store_in_cache(team, row, static_cast<int>(p.head_dim),
                          quantised_row(p.format, p.format.k, p.cache_k, at, head));
  }
  head -= p.heads_kv;
  const PlainRow<T> row{p.v.row<T>(t.batch, head, t.index)};
  store_in_cache(team, row, static_cast<int>(p.head_dim_v),
                 quantised_row(p.format, p.format.v, p.cache_v, at, head));
}

}  // namespace cuflash
