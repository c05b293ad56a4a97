// The reference: one output row at a time, the same source for the CPU and for CUDA. It takes every
// feature and every dtype and has no aim but to be right and easy to check; the fast families are
// tested against the fp64 oracle of the tests, and so is this.
//
// A team (lanes.hpp) works on one row. All arithmetic is fp32; scores are the scaled products, in natural
// logarithm, computed by one function in forward and backward so that P is rebuilt from equal bits.
#pragma once

#include "attention/key_range.hpp"
#include "attention/lanes.hpp"
#include "attention/online_softmax.hpp"
#include "common/float16.hpp"

namespace cuflash {

template <class Team, class T>
CUFLASH_HOST_DEVICE float dot(const Team& team, const float* x, const T* y, int head_dim) {
  float sum = 0;
  team.for_channels(head_dim,
                    [&](int slot, int channel) { sum += x[slot] * to_float(y[channel]); });
  return team.sum(sum);
}

template <class Team, class T>
CUFLASH_HOST_DEVICE void load_row(const Team& team, const T* row, int head_dim, float* x) {
  team.for_channels(head_dim, [&](int slot, int channel) { x[slot] = to_float(row[channel]); });
}

template <class Team, class T>
CUFLASH_HOST_DEVICE void store_row(const Team& team, const float* x, float factor, int head_dim,
                                   T* row) {
  team.for_channels(head_dim,
                    [&](int slot, int channel) { row[channel] = from_float<T>(x[slot] * factor); });
}

// Long sums run over blocks of this many terms with sums of their own: one long fp32 sum drifts. Over 131,072
// equal values it was wrong in the third digit.
constexpr int64_t kSumBlock = 128;

// total += block, and the block starts again from 0.
template <class Team>
CUFLASH_HOST_DEVICE void flush_block(const Team& team, int head_dim, float* block, float* total) {
  team.for_channels(head_dim, [&](int slot, int) {
    total[slot] += block[slot];
    block[slot] = 0;
  });
}

// A score: the product rounded, then scaled and rounded again. Contracted into the subtraction that follows, as
// nvcc would, forward and backward would see different scores, and P = exp(s - lse) would miss 1 where
// a row sees a single key.
CUFLASH_HOST_DEVICE float scaled_score(float scale, float product) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(scale, product);
#else
  return scale * product;
#endif
}

// O and LSE of query row `row`, over part `split` of the keys that it sees. `o` is where the row goes, T or
// fp32 (partial results); `lse` may be null.
template <class T, class Team, class Out>
CUFLASH_HOST_DEVICE void reference_forward_row(const Team& team, const Problem& p, int64_t b,
                                               int64_t head, int64_t row, int64_t split,
                                               int64_t num_splits, Out* o, float* lse) {
  const int head_dim = static_cast<int>(p.head_dim);
  const int64_t head_kv = p.head_kv(head);
  const int64_t len_k = p.keys_of(b);
  const int64_t shift = centre_shift(p.mask, b, p.len_q, len_k);
  const Range keys = split_range(visible_keys(p.mask, shift, row, len_k), split, num_splits);

  float q[Team::kSlots], acc[Team::kSlots], block_acc[Team::kSlots];
  load_row(team, p.q.row<T>(b, head, row), head_dim, q);
  team.for_channels(head_dim, [&](int slot, int) { acc[slot] = 0; });

  OnlineSoftmax softmax;
  for (int64_t first = keys.begin; first < keys.end; first += kSumBlock) {
    OnlineSoftmax block;
    team.for_channels(head_dim, [&](int slot, int) { block_acc[slot] = 0; });
    const int64_t end = min64(first + kSumBlock, keys.end);
    for (int64_t key = first; key < end; ++key) {
      const float score =
          scaled_score(p.scale, dot(team, q, p.k.row<T>(b, head_kv, key), head_dim));
      float weight;
      const float rescale = block.update(score, &weight);
      const T* v = p.v.row<T>(b, head_kv, key);
      team.for_channels(head_dim, [&](int slot, int channel) {
        block_acc[slot] = block_acc[slot] * rescale + weight * to_float(v[channel]);
      });
    }
    float weight;
    const float rescale = softmax.merge(block, &weight);
    team.for_channels(head_dim, [&](int slot, int) {
      acc[slot] = acc[slot] * rescale + weight * block_acc[slot];
    });
  }
  store_row(team, acc, softmax.inverse_sum(), head_dim, o);
  if (lse != nullptr && team.is_first()) *lse = softmax.lse();
}

// delta = rowsum(O * dO) of one query row.
template <class T, class Team>
CUFLASH_HOST_DEVICE float reference_delta_row(const Team& team, const Problem& p, int64_t b,
                                              int64_t head, int64_t row) {
  const int head_dim = static_cast<int>(p.head_dim);
  float o[Team::kSlots];
  load_row(team, p.o.row<T>(b, head, row), head_dim, o);
  return dot(team, o, p.d_o.row<T>(b, head, row), head_dim);
}

// dQ of one query row: sum over its keys of scale * dS * K, dS = P * (dO.V - delta).
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_dq_row(const Team& team, const Problem& p, int64_t b,
                                          int64_t head, int64_t row, float delta) {
  const int head_dim = static_cast<int>(p.head_dim);
  const int64_t head_kv = p.head_kv(head);
  const int64_t shift = centre_shift(p.mask, b, p.len_q, p.len_k);
  const Range keys = visible_keys(p.mask, shift, row, p.len_k);

  float q[Team::kSlots], d_o[Team::kSlots], dq[Team::kSlots], block_dq[Team::kSlots];
  load_row(team, p.q.row<T>(b, head, row), head_dim, q);
  load_row(team, p.d_o.row<T>(b, head, row), head_dim, d_o);
  team.for_channels(head_dim, [&](int slot, int) { dq[slot] = block_dq[slot] = 0; });

  const float lse = keys.empty() ? 0.0f : *p.lse.at(b, head, row);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const T* k = p.k.row<T>(b, head_kv, key);
    const float weight = expf(scaled_score(p.scale, dot(team, q, k, head_dim)) - lse);
    const float d_p = dot(team, d_o, p.v.row<T>(b, head_kv, key), head_dim);
    const float d_s = weight * (d_p - delta);
    team.for_channels(head_dim,
                      [&](int slot, int channel) { block_dq[slot] += d_s * to_float(k[channel]); });
    if ((key - keys.begin) % kSumBlock == kSumBlock - 1) flush_block(team, head_dim, block_dq, dq);
  }
  flush_block(team, head_dim, block_dq, dq);
  store_row(team, dq, p.scale, head_dim, p.dq.row<T>(b, head, row));
}

// dK and dV of one key: sums over the rows that see it, in all query heads of its group.
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_dkv_row(const Team& team, const Problem& p, int64_t b,
                                           int64_t head_kv, int64_t key, const float* delta) {
  const int head_dim = static_cast<int>(p.head_dim);
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t shift = centre_shift(p.mask, b, p.len_q, p.len_k);
  const Range rows = visible_rows(p.mask, shift, key, p.len_q);

  float k[Team::kSlots], v[Team::kSlots], dk[Team::kSlots], dv[Team::kSlots];
  float block_dk[Team::kSlots], block_dv[Team::kSlots];
  load_row(team, p.k.row<T>(b, head_kv, key), head_dim, k);
  load_row(team, p.v.row<T>(b, head_kv, key), head_dim, v);
  team.for_channels(
      head_dim, [&](int slot, int) { dk[slot] = dv[slot] = block_dk[slot] = block_dv[slot] = 0; });
  int64_t terms = 0;

  for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    const float* head_delta = delta + (b * p.heads_q + head) * p.len_q;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const T* q = p.q.row<T>(b, head, row);
      const T* d_o = p.d_o.row<T>(b, head, row);
      const float score = scaled_score(p.scale, dot(team, k, q, head_dim));
      const float weight = expf(score - *p.lse.at(b, head, row));
      const float d_s = weight * (dot(team, v, d_o, head_dim) - head_delta[row]);
      team.for_channels(head_dim, [&](int slot, int channel) {
        block_dk[slot] += d_s * to_float(q[channel]);
        block_dv[slot] += weight * to_float(d_o[channel]);
      });
      if (++terms % kSumBlock != 0) continue;
      flush_block(team, head_dim, block_dk, dk);
      flush_block(team, head_dim, block_dv, dv);
    }
  }
  flush_block(team, head_dim, block_dk, dk);
  flush_block(team, head_dim, block_dv, dv);
  store_row(team, dk, p.scale, head_dim, p.dk.row<T>(b, head_kv, key));
  store_row(team, dv, 1.0f, head_dim, p.dv.row<T>(b, head_kv, key));
}

// One row of the merge of partial results. Logarithms are natural or, with p.base2, of base 2. A part with
// LSE = -inf adds nothing, whatever its O holds.
template <class In, class Out, class Team>
CUFLASH_HOST_DEVICE void merge_row(const Team& team, const MergeProblem& p, int64_t b, int64_t head,
                                   int64_t row) {
  const int head_dim = static_cast<int>(p.head_dim);
  const float to_natural = p.base2 ? 0.69314718055994531f : 1.0f;
  const float* lse_part = p.lse_parts.at(b, head, row);
  OnlineSoftmax softmax;
  float acc[Team::kSlots], block_acc[Team::kSlots];
  team.for_channels(head_dim, [&](int slot, int) { acc[slot] = 0; });
  for (int64_t first = 0; first < p.num_parts; first += kSumBlock) {
    OnlineSoftmax block;
    team.for_channels(head_dim, [&](int slot, int) { block_acc[slot] = 0; });
    for (int64_t part = first; part < min64(first + kSumBlock, p.num_parts); ++part) {
      const float lse = lse_part[part * p.lse_part_stride] * to_natural;
      if (lse == negative_infinity()) continue;
      float weight;
      const float rescale = block.update(lse, &weight);
      const In* o = p.parts.row<In>(b, head, row) + part * p.part_stride;
      team.for_channels(head_dim, [&](int slot, int channel) {
        block_acc[slot] = block_acc[slot] * rescale + weight * to_float(o[channel]);
      });
    }
    float weight;
    const float rescale = softmax.merge(block, &weight);
    team.for_channels(head_dim, [&](int slot, int) {
      acc[slot] = acc[slot] * rescale + weight * block_acc[slot];
    });
  }
  team.sync();  // SAFETY: o and lse may be a part; every lane has read its parts before any writes.
  store_row(team, acc, softmax.inverse_sum(), head_dim, p.o.row<Out>(b, head, row));
  if (p.lse.data != nullptr && team.is_first())
    *p.lse.at(b, head, row) = p.base2 ? softmax.lse() / to_natural : softmax.lse();
}

// The index of a [batch, head, row] triple and back.
struct RowIndex {
  int64_t batch, head, row;
};
CUFLASH_HOST_DEVICE RowIndex row_index(int64_t i, int64_t heads, int64_t rows) {
  return {i / rows / heads, i / rows % heads, i % rows};
}

}  // namespace cuflash
