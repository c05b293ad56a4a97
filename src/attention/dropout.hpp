// Which probabilities dropout keeps: a function of (seed, offset, batch, head, row, key) alone, so that forward and
// backward agree and no tile size shows. The one home of that rule.
//
// The generator is Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011). Its key is the
// seed; its counter is, from the lowest word, (offset + key / 4) in 64 bits, the row, and batch * heads + head. Word
// key % 4 of the result, as a fraction of 2^32, is below p where the probability is dropped.
#pragma once

#include "core/features.hpp"

namespace cuflash {

struct PhiloxBlock {
  uint32_t word[4];
};

CUFLASH_HOST_DEVICE PhiloxBlock philox4x32_10(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The dropout of one query row of one head.
struct DropoutRow {
  bool active;
  float kept;          // the factor of what is kept, 1 / (1 - p)
  uint64_t threshold;  // words below it are dropped
  uint64_t seed, offset;
  uint32_t row, head;  // head of all heads of the batch

  // 0 where the probability of this key is dropped.
  CUFLASH_HOST_DEVICE float factor(int64_t key) const {
    if (!active) return 1.0f;
    const uint64_t block = offset + static_cast<uint64_t>(key) / 4;
    const PhiloxBlock random = philox4x32_10(
        {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), row, head}},
        static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return random.word[key % 4] < threshold ? 0.0f : kept;
  }
};

// The factor of what is kept; 1 without dropout.
CUFLASH_HOST_DEVICE float kept_factor(const Dropout& d) {
  return d.p < 1 ? 1.0f / (1.0f - d.p) : 0.0f;
}

// Reads device memory where the seed or the offset lies there.
CUFLASH_HOST_DEVICE DropoutRow dropout_row(const Dropout& d, int64_t head_of_batch, int64_t row) {
  if (d.p == 0) return {};
  return {true,
          kept_factor(d),
          static_cast<uint64_t>(static_cast<double>(d.p) * 4294967296.0),
          d.seed_pointer != nullptr ? *d.seed_pointer : d.seed,
          d.offset_pointer != nullptr ? *d.offset_pointer : d.offset,
          static_cast<uint32_t>(row),
          static_cast<uint32_t>(head_of_batch)};
}

}  // namespace cuflash
