// The reference: one output row at a time, the same source for the CPU and for CUDA. It takes every
// feature and every dtype and has no aim but to be right and easy to check; the fast families are
// tested against the fp64 oracle of the tests, and so is this.
//
// A team (lanes.hpp) works on one row. All arithmetic is fp32; scores are in natural logarithm, computed by one
// function in forward and backward so that P is rebuilt from equal bits.
#pragma once

#include "attention/dropout.hpp"
#include "attention/key_range.hpp"
#include "attention/lanes.hpp"
#include "attention/online_softmax.hpp"
#include "attention/ragged.hpp"
#include "attention/score.hpp"
#include "attention/stored_row.hpp"
#include "attention/tree_mask.hpp"
#include "common/float16.hpp"

namespace cuflash {

// ---- rows of channels -----------------------------------------------------------------------------

template <class Team, class Row>
CUFLASH_HOST_DEVICE float dot(const Team& team, const float* x, const Row& y, int dim) {
  float sum = 0;
  team.for_channels(dim, [&](int slot, int channel) { sum += x[slot] * to_float(y[channel]); });
  return team.sum(sum);
}

template <class Team, class T>
CUFLASH_HOST_DEVICE void load_row(const Team& team, const T* row, int dim, float* x) {
  team.for_channels(dim, [&](int slot, int channel) { x[slot] = to_float(row[channel]); });
}

template <class Team, class T>
CUFLASH_HOST_DEVICE void store_row(const Team& team, const float* x, float factor, int dim,
                                   T* row) {
  team.for_channels(dim,
                    [&](int slot, int channel) { row[channel] = from_float<T>(x[slot] * factor); });
}

// Calls f with the row of an output or of O, which may be fp32 where the problem's own type T is not.
template <class T, class F>
CUFLASH_HOST_DEVICE void with_row(const TensorView& t, int64_t b, int64_t head, int64_t row, F f) {
  if (t.dtype == Dtype::kF32)
    f(t.row<float>(b, head, row));
  else
    f(t.row<T>(b, head, row));
}

// A row of dQ, dK or dV: written, or added to what is there.
template <class T, class Team>
CUFLASH_HOST_DEVICE void store_gradient(const Team& team, float* x, float factor, int dim,
                                        bool accumulate, const TensorView& t, int64_t b,
                                        int64_t head, int64_t row) {
  with_row<T>(t, b, head, row, [&](auto* out) {
    if (!accumulate) return store_row(team, x, factor, dim, out);
    team.for_channels(
        dim, [&](int slot, int channel) { x[slot] = x[slot] * factor + to_float(out[channel]); });
    store_row(team, x, 1.0f, dim, out);
  });
}

// Long sums run over blocks of this many terms with sums of their own: one long fp32 sum drifts. Over 131,072
// equal values it was wrong in the third digit.
constexpr int64_t kSumBlock = 128;

struct BlockedSum {
  float total = 0, block = 0;
  int64_t terms = 0;

  CUFLASH_HOST_DEVICE void add(float x) {
    block += x;
    if (++terms % kSumBlock != 0) return;
    total += block;
    block = 0;
  }
  CUFLASH_HOST_DEVICE float get() const { return total + block; }
};

// total += block, and the block starts again from 0.
template <class Team>
CUFLASH_HOST_DEVICE void flush_block(const Team& team, int dim, float* block, float* total) {
  team.for_channels(dim, [&](int slot, int) {
    total[slot] += block[slot];
    block[slot] = 0;
  });
}

// ---- one query row --------------------------------------------------------------------------------

// A query row of one head: which keys it sees, and what their scores depend on.
struct QueryRow {
  Sequence sequence;
  int64_t head, head_kv, row;
  int64_t token;  // the row in its tensors
  Range keys;
  ScoreRow score;
  DropoutRow dropout;
};

CUFLASH_HOST_DEVICE QueryRow query_row(const FullProblem& p, const Sequence& s, int64_t head,
                                       int64_t row) {
  const int64_t shift = centre_shift(p.mask, s.batch, s.len_q, s.len_k);
  return {s,
          head,
          p.head_kv(head),
          row,
          s.first_q + row,
          visible_keys(p.mask, shift, row, s.len_k),
          {s.batch, head, row, row + shift},
          dropout_row(p.f.dropout, s.batch * p.heads_q + head, row)};
}

// Of a key in the row's range. One that is not seen is not read: it may hold NaN.
CUFLASH_HOST_DEVICE bool sees_in_tree(const FullProblem& p, const QueryRow& r, int64_t key) {
  return tree_shows(p.f.tree, r.sequence.batch, r.row, r.sequence.len_k, key);
}

// Of backward, whose keys are no cache's.
template <class T>
CUFLASH_HOST_DEVICE const T* key_of(const FullProblem& p, const QueryRow& r, int64_t key) {
  return p.k.row<T>(r.sequence.batch, r.head_kv, r.sequence.first_k + key);
}
template <class T>
CUFLASH_HOST_DEVICE const T* value_of(const FullProblem& p, const QueryRow& r, int64_t key) {
  return p.v.row<T>(r.sequence.batch, r.head_kv, r.sequence.first_k + key);
}

// What dS = P (dP - delta) needs of one pair of a row and a key.
struct Pair {
  float p;           // before dropout
  float kept;        // the factor of dropout
  float derivative;  // of the score by the scaled product
};

CUFLASH_HOST_DEVICE Pair pair_of(const FullProblem& p, const QueryRow& r, int64_t key,
                                 float product, float lse) {
  const Score score = score_of(p.f.score, p.scale, product, r.score, key);
  // A bias of -inf masks, also where it leaves the row without a key (lse = -inf).
  const float weight = score.value == negative_infinity() ? 0.0f : expf(score.value - lse);
  return {weight, r.dropout.factor(key), score.derivative};
}

// ---- forward --------------------------------------------------------------------------------------

// O, not yet divided by the sum, and the softmax state of a query row over part `split` of the keys that it sees. The
// sink belongs to the first part, whether that has keys or not.
template <class T, class Team>
CUFLASH_HOST_DEVICE OnlineSoftmax reference_forward_row(const Team& team, const FullProblem& p,
                                                        const QueryRow& r, int64_t split,
                                                        int64_t num_splits, float* acc) {
  const int dim = static_cast<int>(p.head_dim), dim_v = static_cast<int>(p.head_dim_v);
  const Range keys = split_range(r.keys, split, num_splits, p.least_part());
  float q[Team::kSlots], block_acc[Team::kSlots];
  load_row(team, p.q.row<T>(r.sequence.batch, r.head, r.token), dim, q);
  team.for_channels(dim_v, [&](int slot, int) { acc[slot] = 0; });

  OnlineSoftmax softmax;
  for (int64_t first = keys.begin; first < keys.end; first += kSumBlock) {
    OnlineSoftmax block;
    team.for_channels(dim_v, [&](int slot, int) { block_acc[slot] = 0; });
    const int64_t end = min64(first + kSumBlock, keys.end);
    for (int64_t key = first; key < end; ++key) {
      if (!sees_in_tree(p, r, key)) continue;
      const KeySlot at = key_slot(p.f.paging, r.sequence.batch, r.sequence.first_k + key);
      if (!at.valid) continue;
      const float product = with_stored_row<T>(p, p.k, p.f.format.k, at, r.head_kv,
                                               [&](const auto& k) { return dot(team, q, k, dim); });
      const Score score = score_of(p.f.score, p.scale, product, r.score, key);
      float weight;
      const float rescale = block.update(score.value, &weight);
      weight *= r.dropout.factor(key);  // of O alone: the sum is that before dropout
      with_stored_row<T>(p, p.v, p.f.format.v, at, r.head_kv, [&](const auto& v) {
        team.for_channels(dim_v, [&](int slot, int channel) {
          block_acc[slot] = block_acc[slot] * rescale + weight * to_float(v[channel]);
        });
      });
    }
    float weight;
    const float rescale = softmax.merge(block, &weight);
    team.for_channels(
        dim_v, [&](int slot, int) { acc[slot] = acc[slot] * rescale + weight * block_acc[slot]; });
  }
  if (p.f.sinks.data != nullptr && split == 0) {
    float weight;
    const float rescale = softmax.update(p.f.sinks.load(r.head), &weight);
    team.for_channels(dim_v, [&](int slot, int) { acc[slot] *= rescale; });
  }
  return softmax;
}

// Writes a query row's O and LSE, folded into what is there in a problem that accumulates.
template <class T, class Team>
CUFLASH_HOST_DEVICE void store_output(const Team& team, const FullProblem& p, const QueryRow& r,
                                      OnlineSoftmax softmax, float* acc) {
  const int dim_v = static_cast<int>(p.head_dim_v);
  float* lse = p.lse.data == nullptr ? nullptr : p.lse.at(r.sequence.batch, r.head, r.token);
  if (p.f.accumulate_o) {
    // A row divided by its sum before it is folded, as a single part of it would be: parts without keys change no bit.
    const float inverse = softmax.inverse_sum();
    team.for_channels(dim_v, [&](int slot, int) { acc[slot] *= inverse; });
    softmax = {softmax.lse(), softmax.empty() ? 0.0f : 1.0f};
    const float* o = p.o.row<float>(r.sequence.batch, r.head, r.token);
    const bool empty = *lse == negative_infinity();  // then O may hold anything
    float weight;
    const float rescale = softmax.merge({*lse, empty ? 0.0f : 1.0f}, &weight);
    team.for_channels(dim_v, [&](int slot, int channel) {
      acc[slot] = acc[slot] * rescale + (empty ? 0.0f : weight * o[channel]);
    });
    team.sync();  // SAFETY: every lane has read the LSE before the first writes it.
  }
  with_row<T>(p.o, r.sequence.batch, r.head, r.token,
              [&](auto* o) { store_row(team, acc, softmax.inverse_sum(), dim_v, o); });
  if (lse != nullptr && team.is_first()) *lse = softmax.lse();
}

// ---- backward -------------------------------------------------------------------------------------

// delta - dLSE of one query row, where delta = rowsum(O * dO): what each dP of the row is reduced by.
template <class T, class Team>
CUFLASH_HOST_DEVICE float reference_delta_row(const Team& team, const FullProblem& p,
                                              const QueryRow& r) {
  const int64_t b = r.sequence.batch;
  float delta = 0;
  if (p.f.delta_given) {
    delta = *p.f.delta.at(b, r.head, r.token);
  } else {
    const int dim_v = static_cast<int>(p.head_dim_v);
    float o[Team::kSlots];
    with_row<T>(p.o, b, r.head, r.token, [&](const auto* row) { load_row(team, row, dim_v, o); });
    delta = dot(team, o, p.d_o.row<T>(b, r.head, r.token), dim_v);
    if (p.f.delta.data != nullptr && team.is_first()) *p.f.delta.at(b, r.head, r.token) = delta;
  }
  return p.f.d_lse.data == nullptr ? delta : delta - *p.f.d_lse.at(b, r.head, r.token);
}

// dQ of one query row: sum over its keys of scale * dS * K.
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_dq_row(const Team& team, const FullProblem& p, const QueryRow& r,
                                          float delta) {
  const int dim = static_cast<int>(p.head_dim), dim_v = static_cast<int>(p.head_dim_v);
  const int64_t b = r.sequence.batch;
  float q[Team::kSlots], d_o[Team::kSlots], dq[Team::kSlots], block_dq[Team::kSlots];
  load_row(team, p.q.row<T>(b, r.head, r.token), dim, q);
  load_row(team, p.d_o.row<T>(b, r.head, r.token), dim_v, d_o);
  team.for_channels(dim, [&](int slot, int) { dq[slot] = block_dq[slot] = 0; });

  const float lse = r.keys.empty() ? 0.0f : *p.lse.at(b, r.head, r.token);
  for (int64_t key = r.keys.begin; key < r.keys.end; ++key) {
    const T* k = key_of<T>(p, r, key);
    const Pair pair = pair_of(p, r, key, dot(team, q, k, dim), lse);
    const float d_p = pair.kept * dot(team, d_o, value_of<T>(p, r, key), dim_v);
    const float d_s = pair.p * (d_p - delta) * pair.derivative;
    team.for_channels(dim,
                      [&](int slot, int channel) { block_dq[slot] += d_s * to_float(k[channel]); });
    if ((key - r.keys.begin) % kSumBlock == kSumBlock - 1) flush_block(team, dim, block_dq, dq);
  }
  flush_block(team, dim, block_dq, dq);
  store_gradient<T>(team, dq, p.scale, dim, p.f.accumulate_gradients, p.dq, b, r.head, r.token);
}

// dK and dV of one key: sums over the rows that see it, in all query heads of its group. `delta` is that of
// reference_delta_row, by rows of the queries' tensors.
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_dkv_row(const Team& team, const FullProblem& p,
                                           const Sequence& s, int64_t head_kv, int64_t key,
                                           const RowStatsView& delta) {
  const int dim = static_cast<int>(p.head_dim), dim_v = static_cast<int>(p.head_dim_v);
  const int64_t b = s.batch, token_k = s.first_k + key, group = p.heads_q / p.heads_kv;
  const int64_t shift = centre_shift(p.mask, b, s.len_q, s.len_k);
  const Range rows = visible_rows(p.mask, shift, key, s.len_q);

  float k[Team::kSlots], v[Team::kSlots], dk[Team::kSlots], dv[Team::kSlots];
  float block_dk[Team::kSlots], block_dv[Team::kSlots];
  load_row(team, p.k.row<T>(b, head_kv, token_k), dim, k);
  load_row(team, p.v.row<T>(b, head_kv, token_k), dim_v, v);
  team.for_channels(dim, [&](int slot, int) { dk[slot] = block_dk[slot] = 0; });
  team.for_channels(dim_v, [&](int slot, int) { dv[slot] = block_dv[slot] = 0; });
  int64_t terms = 0;

  for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const QueryRow r = query_row(p, s, head, row);
      const T* q = p.q.row<T>(b, head, r.token);
      const T* d_o = p.d_o.row<T>(b, head, r.token);
      const Pair pair = pair_of(p, r, key, dot(team, k, q, dim), *p.lse.at(b, head, r.token));
      const float d_p = pair.kept * dot(team, v, d_o, dim_v);
      const float d_s = pair.p * (d_p - *delta.at(b, head, r.token)) * pair.derivative;
      team.for_channels(
          dim, [&](int slot, int channel) { block_dk[slot] += d_s * to_float(q[channel]); });
      const float weight = pair.p * pair.kept;
      team.for_channels(
          dim_v, [&](int slot, int channel) { block_dv[slot] += weight * to_float(d_o[channel]); });
      if (++terms % kSumBlock != 0) continue;
      flush_block(team, dim, block_dk, dk);
      flush_block(team, dim_v, block_dv, dv);
    }
  }
  flush_block(team, dim, block_dk, dk);
  flush_block(team, dim_v, block_dv, dv);
  const bool accumulate = p.f.accumulate_gradients;
  store_gradient<T>(team, dk, p.scale, dim, accumulate, p.dk, b, head_kv, token_k);
  store_gradient<T>(team, dv, 1.0f, dim_v, accumulate, p.dv, b, head_kv, token_k);
}

// The entries of the bias that an entry of its gradient stands for: one, or all of a dimension along which it repeats.
struct Repeats {
  int64_t begin, end;
};
CUFLASH_HOST_DEVICE Repeats repeats(int64_t stride, int64_t index, int64_t extent) {
  return stride == 0 ? Repeats{0, extent} : Repeats{index, index + 1};
}

// One entry of the bias's gradient: the sum of dS over the scores that the entry was added to.
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_d_bias(const Team& team, const FullProblem& p, int64_t batch,
                                          int64_t head, int64_t row, int64_t key,
                                          const RowStatsView& delta) {
  const int dim = static_cast<int>(p.head_dim), dim_v = static_cast<int>(p.head_dim_v);
  const TensorView& bias = p.f.d_bias;
  const Repeats batches = repeats(bias.batch_stride, batch, p.batch);
  const Repeats heads = repeats(bias.head_stride, head, p.heads_q);
  const Repeats rows = repeats(bias.row_stride, row, p.len_q);
  BlockedSum sum;
  for (int64_t b = batches.begin; b < batches.end; ++b) {
    const Sequence s = sequence_of(p, b);
    const int64_t last = min64(rows.end, s.len_q);
    for (int64_t h = heads.begin; h < heads.end; ++h)
      for (int64_t i = rows.begin; i < last; ++i) {
        const QueryRow r = query_row(p, s, h, i);
        if (!r.keys.contains(key)) continue;
        float x[Team::kSlots];
        load_row(team, p.q.row<T>(b, h, r.token), dim, x);
        const float product = dot(team, x, key_of<T>(p, r, key), dim);
        const Pair pair = pair_of(p, r, key, product, *p.lse.at(b, h, r.token));
        load_row(team, p.d_o.row<T>(b, h, r.token), dim_v, x);
        const float d_p = pair.kept * dot(team, x, value_of<T>(p, r, key), dim_v);
        sum.add(pair.p * (d_p - *delta.at(b, h, r.token)));
      }
  }
  const int64_t at =
      batch * bias.batch_stride + head * bias.head_stride + row * bias.row_stride + key;
  if (team.is_first()) Elements{bias.data, bias.dtype}.store(at, sum.get());
}

// The gradient of one head's sink: -P_sink delta, summed over the head's rows.
template <class Team>
CUFLASH_HOST_DEVICE void reference_d_sink(const Team& team, const FullProblem& p, int64_t head,
                                          const RowStatsView& delta) {
  const float sink = p.f.sinks.load(head);
  BlockedSum sum;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    for (int64_t row = team.lane; row < s.len_q; row += Team::kLanes) {
      const float lse = *p.lse.at(b, head, s.first_q + row);
      if (sink == negative_infinity()) continue;
      sum.add(-expf(sink - lse) * *delta.at(b, head, s.first_q + row));
    }
  }
  const float total = team.sum(sum.get());
  if (team.is_first()) p.f.d_sinks.store(head, total);
}

// ---- weights --------------------------------------------------------------------------------------

// P of one query row, before dropout; keys that the row does not see get 0.
template <class T, class Team>
CUFLASH_HOST_DEVICE void reference_weights_row(const Team& team, const FullProblem& p,
                                               const QueryRow& r, float* weights) {
  const int dim = static_cast<int>(p.head_dim);
  float q[Team::kSlots];
  load_row(team, p.q.row<T>(r.sequence.batch, r.head, r.token), dim, q);
  const float lse = r.keys.empty() ? 0.0f : *p.lse.at(r.sequence.batch, r.head, r.token);
  for (int64_t key = 0; key < p.len_k; ++key) {
    float weight = 0;
    if (r.keys.contains(key) && sees_in_tree(p, r, key))
      weight = pair_of(p, r, key, dot(team, q, key_of<T>(p, r, key), dim), lse).p;
    if (team.is_first()) weights[key] = weight;
  }
}

// ---- merge ----------------------------------------------------------------------------------------

// Partial results of one row merged: O, not yet divided by the sum, and the softmax state. Logarithms are natural or,
// with p.base2, of base 2. A part with LSE = -inf adds nothing, whatever its O holds.
constexpr float kNaturalPerBinary = 0.69314718055994531f;

template <class In, class Team>
CUFLASH_HOST_DEVICE OnlineSoftmax merge_parts(const Team& team, const MergeProblem& p, int64_t b,
                                              int64_t head, int64_t row, float* acc) {
  const int dim = static_cast<int>(p.head_dim);
  const float to_natural = p.base2 ? kNaturalPerBinary : 1.0f;
  const float* lse_part = p.lse_parts.at(b, head, row);
  OnlineSoftmax softmax;
  float block_acc[Team::kSlots];
  team.for_channels(dim, [&](int slot, int) { acc[slot] = 0; });
  for (int64_t first = 0; first < p.num_parts; first += kSumBlock) {
    OnlineSoftmax block;
    team.for_channels(dim, [&](int slot, int) { block_acc[slot] = 0; });
    for (int64_t part = first; part < min64(first + kSumBlock, p.num_parts); ++part) {
      const float lse = lse_part[part * p.lse_part_stride] * to_natural;
      if (lse == negative_infinity()) continue;
      float weight;
      const float rescale = block.update(lse, &weight);
      const In* o = p.parts.row<In>(b, head, row) + part * p.part_stride;
      team.for_channels(dim, [&](int slot, int channel) {
        block_acc[slot] = block_acc[slot] * rescale + weight * to_float(o[channel]);
      });
    }
    float weight;
    const float rescale = softmax.merge(block, &weight);
    team.for_channels(
        dim, [&](int slot, int) { acc[slot] = acc[slot] * rescale + weight * block_acc[slot]; });
  }
  return softmax;
}

template <class In, class Out, class Team>
CUFLASH_HOST_DEVICE void merge_row(const Team& team, const MergeProblem& p, int64_t b, int64_t head,
                                   int64_t row) {
  float acc[Team::kSlots];
  const OnlineSoftmax softmax = merge_parts<In>(team, p, b, head, row, acc);
  team.sync();  // SAFETY: o and lse may be a part; every lane has read its parts before any writes.
  store_row(team, acc, softmax.inverse_sum(), static_cast<int>(p.head_dim),
            p.o.row<Out>(b, head, row));
  if (p.lse.data != nullptr && team.is_first())
    *p.lse.at(b, head, row) = p.base2 ? softmax.lse() / kNaturalPerBinary : softmax.lse();
}

}  // namespace cuflash
