#include "api/known_blocks.hpp"

#include <gtest/gtest.h>

namespace cuflash {
namespace {

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(KnownBlocks, KnowNothingAtFirst) {
  const KnownBlocks blocks = {};
  for (const uintptr_t address : {uintptr_t{0}, uintptr_t{16}, uintptr_t{0x7f0000000000}})
    for (const int device : {0, 1, 63})
      EXPECT_FALSE(blocks.contains(at(address), device)) << address << ' ' << device;
}

TEST(KnownBlocks, KnowABlockOfOneDevice) {
  KnownBlocks blocks = {};
  blocks.add(at(0x7f0000010100), 0);
  EXPECT_TRUE(blocks.contains(at(0x7f0000010100), 0));
  EXPECT_TRUE(blocks.contains(at(0x7f000001ffff), 0));
  EXPECT_FALSE(blocks.contains(at(0x7f0000010100), 1));
  EXPECT_FALSE(blocks.contains(at(0x7f000000ffff), 0));
  EXPECT_FALSE(blocks.contains(at(0x7f0000020000), 0));
}

TEST(KnownBlocks, ForgetButNeverConfuse) {
  KnownBlocks blocks = {};
  for (uintptr_t block = 0; block < 1000; ++block) blocks.add(at(block << 16), 2);
  for (uintptr_t block = 1000; block < 100000; ++block)
    ASSERT_FALSE(blocks.contains(at(block << 16), 2)) << block;
}

}  // namespace
}  // namespace cuflash
