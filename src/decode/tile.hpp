// How the tiled decode kernels cut a problem: one block for each sequence, KV head, tile of query rows and part of
// the keys.
//
// The rows of all query heads that share a KV head are packed, the heads innermost: row r of the pack is query
// r / group of the group's head r % group. A tile of them reads each key once, and lies at few positions, so that a
// causal mask leaves it little to skip.
#pragma once

#include "attention/key_range.hpp"
#include "attention/paging.hpp"
#include "attention/tile_rows.hpp"
#include "core/features.hpp"
#include "core/split.hpp"
#include "core/variant.hpp"

namespace cuflash::decode {

// What the tiled decode kernels take beside Problem.
constexpr uint32_t kTakenFeatures =
    kSoftcap | kAlibi | kBias | kSinks | kOwnValueDim | kPagedCache | kCacheEntries | kTreeMask;

// ---- host side ------------------------------------------------------------------------------------

// The blocks of a problem that has rows, in tiles of tile_rows.
inline int64_t blocks_of(const Problem& p, int tile_rows, int64_t num_splits) {
  return p.batch * p.heads_kv * ceil_div(p.heads_q / p.heads_kv * p.len_q, tile_rows) * num_splits;
}

// Numbers of rows and blocks are 32 bit in the kernels.
inline Refusal accept_tiles(const Problem& p, const Capabilities& capabilities,
                            const SplitShape& shape) {
  constexpr int64_t kMax = 0x7fffffff;
  if (p.batch * p.heads_q == 0 || p.len_q == 0) return {};
  if (p.heads_q / p.heads_kv > kMax / p.len_q)
    return {"more than 2^31 - 1 query rows of a KV head"};
  const int64_t row_blocks = blocks_of(p, shape.tile_rows, 1);
  // Splits that the library chooses for few blocks do not make many of them.
  const bool chosen = p.num_splits == 0 && !p.batch_invariant;
  const int64_t splits = chosen ? 1 : choose_splits(p, capabilities, shape);
  if (row_blocks > kMax / splits)
    return {"more than 2^31 - 1 tiles of query rows and parts of keys"};
  return {};
}

// ---- device side ----------------------------------------------------------------------------------

struct Tile {
  int64_t b, head_kv, split;
  unsigned first_row;  // in the pack
  int rows;            // at least 1
  int64_t len_k, shift;
  Range keys;    // of the part: those that some row sees
  Range common;  // of the part: those that every row sees
};

// Block `index` of the grid; neighbours share their keys. Reads device memory.
template <int kRows, class Call>
CUFLASH_HOST_DEVICE Tile tile_of(const Call& p, int64_t num_splits, unsigned index) {
  const auto group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  const unsigned pack = group * static_cast<unsigned>(p.len_q);
  const unsigned row_tiles = (pack + kRows - 1) / kRows;
  const auto splits = static_cast<unsigned>(num_splits);
  const auto heads_kv = static_cast<unsigned>(p.heads_kv);
  Tile t;
  t.first_row = index % row_tiles * kRows;
  t.rows = static_cast<int>(pack - t.first_row < kRows ? pack - t.first_row : kRows);
  t.split = index / row_tiles % splits;
  t.head_kv = index / row_tiles / splits % heads_kv;
  t.b = index / row_tiles / splits / heads_kv;
  t.len_k = sequence_of(p, t.b).len_k;
  t.shift = centre_shift(p.mask, t.b, p.len_q, t.len_k);
  const TileRange seen = tile_keys(p.mask, t.shift, t.first_row / group,
                                   (t.first_row + t.rows - 1) / group + 1, t.len_k);
  t.keys = split_range(seen.any, t.split, num_splits, p.least_part());
  t.common.begin = clamp64(seen.all.begin, t.keys.begin, t.keys.end);
  t.common.end = clamp64(seen.all.end, t.common.begin, t.keys.end);
  return t;
}

// Where row `row` of a tile comes from and goes to.
struct Row {
  int64_t head, query;
};
CUFLASH_HOST_DEVICE Row row_of(const Problem& p, const Tile& t, int row) {
  const auto group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  const unsigned r = t.first_row + static_cast<unsigned>(row);
  return {t.head_kv * group + r % group, r / group};
}

// The keys of the tile that a row of it sees, counted from the part's first.
struct KeyInterval {
  unsigned begin, end;

  CUFLASH_HOST_DEVICE bool contains(unsigned key) const { return key - begin < end - begin; }
};
CUFLASH_HOST_DEVICE KeyInterval keys_of_row(const Problem& p, const Tile& t, int row) {
  if (row >= t.rows) return {0, 0};
  const Range seen = visible_keys(p.mask, t.shift, row_of(p, t, row).query, t.len_k);
  const int64_t begin = clamp64(seen.begin, t.keys.begin, t.keys.end);
  const int64_t end = clamp64(seen.end, begin, t.keys.end);
  return {static_cast<unsigned>(begin - t.keys.begin), static_cast<unsigned>(end - t.keys.begin)};
}

// head_dim_v, which without features is head_dim: a number less to keep.
CUFLASH_HOST_DEVICE int value_dim(const Problem& p) { return static_cast<int>(p.head_dim); }
CUFLASH_HOST_DEVICE int value_dim(const FullProblem& p) { return static_cast<int>(p.head_dim_v); }

// The score of row `row` for a key that it sees, counted from the part's first.
CUFLASH_HOST_DEVICE ModifiedRow modified_row(const FullProblem& p, const Tile& t, int row) {
  const Row r = row_of(p, t, row);
  return {p, {t.b, 0, p.len_q, 0, t.len_k}, t.shift, r.head, r.query, t.keys.begin};
}

// Whether any row of the tile sees a key of the part. It need not: the tree may hide it from all.
CUFLASH_HOST_DEVICE bool is_seen(const FullProblem& p, const Tile& t, int64_t key) {
  const TreeMask& tree = p.f.tree;
  if (tree.words == nullptr || key < t.len_k - tree.len) return true;
  const int64_t last = row_of(p, t, t.rows - 1).query;
  for (int64_t query = row_of(p, t, 0).query; query <= last; ++query)
    if (visible_keys(p.mask, t.shift, query, t.len_k).contains(key) &&
        tree_shows(tree, t.b, query, t.len_k, key))
      return true;
  return false;
}

// Where key `key` of the part lies. Not valid past the last, where its page is not in the pool, and where no row sees it:
// it may hold NaN then, which a weight of 0 does not take away.
CUFLASH_HOST_DEVICE KeySlot slot_of_key(const FullProblem& p, const Tile& t, unsigned key) {
  const int64_t of_sequence = t.keys.begin + key;
  if (of_sequence >= t.keys.end || !is_seen(p, t, of_sequence)) return {0, 0, false};
  return key_slot(p.f.paging, t.b, of_sequence);
}

// A row of K or V, which is `tensor`, in elements from its first of the same head; negative where the slot is not valid.
CUFLASH_HOST_DEVICE int64_t row_offset(const TensorView& tensor, const KeySlot& at) {
  return at.valid ? at.entry * tensor.batch_stride + at.slot * tensor.row_stride : -1;
}

// A row's result: the problem's own o and lse, or, of one of several parts, fp32 in the workspace.
template <class Element>
struct RowTarget {
  Element* o;      // null: there are several parts
  float* partial;  // null: there is one
  float* lse;      // may be null
};
template <class Element>
CUFLASH_HOST_DEVICE RowTarget<Element> target_of(const Problem& p, const MergeProblem& parts,
                                                 const Tile& t, int row) {
  const Row r = row_of(p, t, row);
  if (parts.num_parts > 1)
    return {nullptr, parts.parts.row<float>(t.b, r.head, r.query) + t.split * parts.part_stride,
            parts.lse_parts.at(t.b, r.head, r.query) + t.split * parts.lse_part_stride};
  return {p.o.row<Element>(t.b, r.head, r.query), nullptr,
          p.lse.data == nullptr ? nullptr : p.lse.at(t.b, r.head, r.query)};
}

}  // namespace cuflash::decode
