// Which tile of rows of which head a block takes. Heads go in groups whose keys and values stay in the L2 cache
// together while all blocks of the group read them: with every head at once, short sequences are read from memory again for
// each tile of rows. Host arithmetic, tested there.
#pragma once

#include <cstdint>

#include "attention/ragged.hpp"
#include "common/integer.hpp"
#include "core/problem.hpp"

namespace cuflash::forward_mma {

// Quotients of numbers below 2^31 by one divisor from 1 to 2^31, by a product: to a block, which divides four times before it
// loads anything, a division is some 25 instructions.
struct Divisor {
  uint32_t divisor = 1, factor = 1, shift = 0;

  Divisor() = default;
  constexpr explicit Divisor(uint32_t d) : divisor(d), factor(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  CUFLASH_HOST_DEVICE uint32_t quotient(uint32_t x) const {
    return (static_cast<uint32_t>((uint64_t{x} * factor) >> 32) + x) >> shift;
  }
};

struct BlockPlace {
  uint32_t m_tile, batch, head, head_kv;
};

struct BlockOrder {
  uint32_t m_tiles = 0;
  uint32_t last_group = 0;
  Divisor group_blocks, group_heads, last_group_heads, heads_q, heads_of_kv;

  // `heads` of all sequences together. At least one of each, and fewer than 2^31 blocks.
  BlockOrder(const Problem& p, int64_t tiles, int64_t heads_together)
      : m_tiles(static_cast<uint32_t>(tiles)),
        heads_q(static_cast<uint32_t>(p.heads_q)),
        heads_of_kv(static_cast<uint32_t>(p.heads_q / p.heads_kv)) {
    const int64_t heads = p.batch * p.heads_q;
    // As many groups as that takes, of nearly equal size.
    const int64_t in_group = ceil_div(heads, ceil_div(heads, clamp64(heads_together, 1, heads)));
    const int64_t groups = ceil_div(heads, in_group);
    last_group = static_cast<uint32_t>(groups - 1);
    group_blocks = Divisor(static_cast<uint32_t>(in_group * tiles));
    group_heads = Divisor(static_cast<uint32_t>(in_group));
    last_group_heads = Divisor(static_cast<uint32_t>(heads - in_group * (groups - 1)));
  }

  // Within a group late rows come first: under a causal mask they see the most keys, and the short blocks fill the end.
  CUFLASH_HOST_DEVICE BlockPlace place(uint32_t block) const {
    const uint32_t group = group_blocks.quotient(block);
    const uint32_t in_group = block - group * group_blocks.divisor;
    const Divisor& heads_here = group == last_group ? last_group_heads : group_heads;
    const uint32_t turn = heads_here.quotient(in_group);
    const uint32_t head_of_all = group * group_heads.divisor + in_group - turn * heads_here.divisor;
    const uint32_t batch = heads_q.quotient(head_of_all);
    const uint32_t head = head_of_all - batch * heads_q.divisor;
    return {m_tiles - 1 - turn, batch, head, heads_of_kv.quotient(head)};
  }
};

// How many heads a group has. Blocks of one length need no order among them; under a mask a group has to be large, so that its
// short blocks fill the gaps that its long ones leave; a ragged batch is one group, since its sequences too differ. Long
// heads go all together: one reads its own keys and values often enough that groups gain nothing, and groups of one or two cost
// 3 to 6 % (head_dim 256, 8192 and 16,384 keys, full).
inline int64_t heads_together(const Problem& p) {
  // Of keys and values: H100, H200, A100 have 40 to 60 MB of L2 in two parts.
  constexpr int64_t kBytes = 16 << 20, kLongHead = 8 << 20;
  const int64_t heads = p.batch * p.heads_q;
  if (p.features != nullptr && (p.features->used & kRaggedBatches) != 0) return heads;
  const int64_t bytes_of_head =
      2 * p.len_k * (p.head_dim + p.head_dim_v) / (p.heads_q / p.heads_kv);
  if (bytes_of_head >= kLongHead) return heads;
  return (p.mask.is_full() ? 1 : 2) * kBytes / max64(bytes_of_head, 1);
}

}  // namespace cuflash::forward_mma
