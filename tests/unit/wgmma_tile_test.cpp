#include "device/wgmma_tile.hpp"

#include <gtest/gtest.h>

#include <set>

namespace cuflash::device {
namespace {

TEST(WgmmaTile, SwizzlePermutesTheChunksOfEachRow) {
  for (uint32_t row = 0; row < 16; ++row) {
    std::set<uint32_t> chunks;
    for (uint32_t chunk = 0; chunk < 8; ++chunk) {
      const uint32_t address = 0x400 + row * kPanelRowBytes + chunk * 16;
      const uint32_t there = swizzle_128(address);
      EXPECT_EQ(there / kPanelRowBytes, address / kPanelRowBytes);
      EXPECT_EQ(swizzle_128(there), address);
      chunks.insert(there % kPanelRowBytes / 16);
    }
    EXPECT_EQ(chunks.size(), 8u);
  }
}

// What wgmma reads at a time: the same chunk of eight rows that follow one another.
TEST(WgmmaTile, EightRowsOfOneChunkLieInDifferentBanks) {
  for (uint32_t first = 0; first < 8; ++first)
    for (uint32_t chunk = 0; chunk < 8; ++chunk) {
      std::set<uint32_t> banks;
      for (uint32_t row = first; row < first + 8; ++row)
        banks.insert(swizzle_128(row * kPanelRowBytes + chunk * 16) % 128 / 16);
      EXPECT_EQ(banks.size(), 8u);
    }
}

// The fields as the PTX ISA lists them: address 0-13, leading 16-29, stride 32-45, swizzle 62-63, in 16 bytes.
TEST(WgmmaTile, Descriptors) {
  const auto field = [](uint64_t descriptor, int first, int last) {
    return descriptor >> first & ((uint64_t{1} << (last - first + 1)) - 1);
  };
  for (const uint32_t address : {0x400u, 0x8400u, 0x38080u}) {
    const uint64_t k_major = k_major_descriptor(address);
    EXPECT_EQ(field(k_major, 0, 13) * 16, address);
    EXPECT_EQ(field(k_major, 32, 45) * 16, 1024u);  // eight rows of a panel
    EXPECT_EQ(field(k_major, 62, 63), 1u);          // 128 bytes
    EXPECT_EQ(field(k_major, 49, 51), 0u);
    const uint64_t mn_major = mn_major_descriptor(address, 176);
    EXPECT_EQ(field(mn_major, 0, 13) * 16, address);
    EXPECT_EQ(field(mn_major, 16, 29) * 16, 176u * kPanelRowBytes);
    EXPECT_EQ(field(mn_major, 32, 45) * 16, 1024u);
    EXPECT_EQ(field(mn_major, 62, 63), 1u);
    EXPECT_EQ(advance(k_major, 8), k_major_descriptor(address + 128));
    EXPECT_EQ(advance(mn_major, 128), mn_major_descriptor(address + 2048, 176));
  }
}

}  // namespace
}  // namespace cuflash::device
