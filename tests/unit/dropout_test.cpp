// Philox4x32-10 against its published vectors, and the rule of dropout against the one of the tests.
#include "attention/dropout.hpp"

#include <gtest/gtest.h>

#include "support/oracle.hpp"

namespace cuflash {
namespace {

TEST(Dropout, PhiloxKnownAnswers) {
  const struct {
    PhiloxBlock counter;
    uint32_t key[2];
    PhiloxBlock expected;
  } rows[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& row : rows) {
    const PhiloxBlock got = philox4x32_10(row.counter, row.key[0], row.key[1]);
    for (int n = 0; n < 4; ++n) EXPECT_EQ(got.word[n], row.expected.word[n]) << n;
  }
}

TEST(Dropout, TheRuleOfTheOracle) {
  const uint64_t numbers[] = {0, 1, 0xffffffff, 0x123456789abcdef0, ~uint64_t{0}};
  for (const uint64_t seed : numbers)
    for (const uint64_t offset : numbers)
      for (const float p : {0.0f, 0.1f, 0.5f, 0.999f, 1.0f}) {
        const cuflash_test::DropoutSpec spec{p, seed, offset};
        const Dropout dropout{p, seed, offset, nullptr, nullptr};
        for (const int64_t head : {int64_t{0}, int64_t{7}, (int64_t{1} << 32) - 1})
          for (const int64_t row : {int64_t{0}, int64_t{0x7fffffff}}) {
            const DropoutRow d = dropout_row(dropout, head, row);
            for (const int64_t key : {0, 1, 2, 3, 4, 5, 6, 7, 0x7ffffffe})
              EXPECT_EQ(d.factor(key), spec.drops(head, row, key) ? 0 : p == 0 ? 1 : 1 / (1 - p));
          }
      }
}

TEST(Dropout, ExtremeProbabilities) {
  const DropoutRow all = dropout_row({1, 5, 6, nullptr, nullptr}, 0, 0);
  const DropoutRow none = dropout_row({0, 5, 6, nullptr, nullptr}, 0, 0);
  for (int64_t key = 0; key < 1000; ++key) {
    EXPECT_EQ(all.factor(key), 0);
    EXPECT_EQ(none.factor(key), 1);
  }
}

}  // namespace
}  // namespace cuflash
