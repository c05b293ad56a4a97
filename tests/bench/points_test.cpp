// Points of cuflash-bench: what they count, and how axes make them.
#include <gtest/gtest.h>

#include "points.hpp"

namespace cuflash_bench {
namespace {

const Preset& preset(const std::string& name) {
  for (const Preset& each : presets())
    if (name == each.name) return each;
  throw UsageError(name);
}

Point only_point(const Axes& given) {
  const std::vector<Point> points = points_of(preset("tokens16k"), given);
  EXPECT_EQ(points.size(), 1U);
  return points.at(0);
}

Axes axes_of(const std::string& mask, int64_t len_q, int64_t len_k, int64_t window = 0) {
  Axes axes;
  axes.mask = {mask};
  if (window > 0) axes.window = {window};
  axes.len_q = {len_q};
  axes.len_k = {len_k};
  axes.head_dim = {64};
  axes.batch = {2};
  axes.heads = {4};
  axes.heads_kv = {1};
  return axes;
}

TEST(Points, CountPairs) {
  EXPECT_EQ(only_point(axes_of("full", 6, 10)).pairs(), 60);
  EXPECT_EQ(only_point(axes_of("causal", 6, 6)).pairs(), 18);     // half of the square
  EXPECT_EQ(only_point(axes_of("causal", 2, 10)).pairs(), 18);    // 9 + 10 - 2 halves
  EXPECT_EQ(only_point(axes_of("causal", 10, 2)).pairs(), 2);     // 8 rows see nothing
  EXPECT_EQ(only_point(axes_of("window", 6, 6, 6)).pairs(), 21);  // none by half
  EXPECT_EQ(only_point(axes_of("window", 6, 6, 2)).pairs(), 11);  // 1 + 5 * 2
  EXPECT_EQ(only_point(axes_of("window", 3, 6, 2)).pairs(), 6);
}

TEST(Points, CountFlopsAndBytes) {
  const Point point = only_point(axes_of("full", 6, 10));
  EXPECT_EQ(point.forward_flops(), 4.0 * 2 * 4 * 6 * 10 * 64);
  EXPECT_EQ(point.forward_bytes(), (2 * 2 * 4 * 6 + 2 * 2 * 10) * 64 * 2 + 2 * 4 * 6 * 4);
}

TEST(Points, SayWhatTheyAre) {
  const Point point = only_point(axes_of("window", 6, 10, 3));
  EXPECT_EQ(words_of(point), "bf16 window 2,0 B2 H4 Hkv1 Sq6 Sk10 D64");
  EXPECT_EQ(json_of(point).dump(),
            "{\"dtype\":\"bf16\",\"mask\":\"window 2,0\",\"batch\":2,\"heads\":4,\"heads_kv\":1,"
            "\"length\":6,\"head_dim\":64,\"length_k\":10}");
  EXPECT_FALSE(json_of(only_point(axes_of("full", 6, 6))).contains("length_k"));
}

TEST(Points, OfPresets) {
  EXPECT_EQ(points_of(preset("tokens16k"), {}).size(), 36U);
  EXPECT_EQ(points_of(preset("few-blocks"), {}).size(), 18U);
  EXPECT_EQ(points_of(preset("tiny"), {}).size(), 4U);
  for (const Point& point : points_of(preset("tokens16k"), {})) {
    EXPECT_EQ(point.batch * point.len_q, 16384);
    EXPECT_EQ(point.heads * point.head_dim, 2048);
  }
  for (const Point& point : points_of(preset("window"), {}))
    EXPECT_EQ(point.window * 16, point.len_q);
}

TEST(Points, FlagsComeOnTopOfAPreset) {
  Axes given;
  given.mask = {"causal"};
  EXPECT_EQ(points_of(preset("window"), given).at(0).mask, "causal");
  given = {};
  given.len_q = {1};
  given.len_k = {100, 200};
  const std::vector<Point> points = points_of(preset("tiny"), given);
  ASSERT_EQ(points.size(), 4U);
  EXPECT_EQ(words_of(points[3]), "f32 causal B2 H4 Hkv2 Sq1 Sk200 D32");
}

TEST(Points, AxesThatDoNotFit) {
  Axes given = axes_of("full", 5, 5);
  given.len = {5};
  EXPECT_THROW(points_of(preset("tiny"), given), UsageError);
  given = axes_of("full", 5, 5);
  given.heads_kv = {3};
  EXPECT_THROW(points_of(preset("tiny"), given), UsageError);
  given = axes_of("window", 5, 5);
  EXPECT_THROW(points_of(preset("tiny"), given), UsageError);
  given = axes_of("full", 5, 5, 3);
  EXPECT_THROW(points_of(preset("tiny"), given), UsageError);
  given = {};
  given.tokens = 100;
  EXPECT_THROW(points_of(preset("tokens16k"), given), UsageError);
}

}  // namespace
}  // namespace cuflash_bench
