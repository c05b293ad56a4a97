// Every kernel over a grid of problems, judged by the accuracy rule: fixed corners, and seeded random draws.
//
//   CUFLASH_TEST_DRAWS   random problems of each kernel (400 on the CPU, 100 on CUDA)
//   CUFLASH_TEST_CORNERS runs every so many-th corner (1): under a sanitizer of the host all take long
//   CUFLASH_TEST_SEED    another sequence of problems (1)
//   CUFLASH_TEST_DRAW    runs only this draw of each shard, as a failure's message says
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "kernels/draws.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr int64_t kHeadDims[] = {1, 8, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256};

// Every feature that a case describes.
void add_every_feature(Case& c) {
  c.shape.head_dim_v = 48;
  c.lengths_q = {c.shape.len_q == 1 ? 1 : static_cast<int32_t>(c.shape.len_q) - 1, 2};
  c.lengths = {static_cast<int32_t>(c.shape.len_k), 40};
  c.left_pad = {2, 0};
  c.packing_q = {true, 1, 2};
  if (c.operation != Operation::kDecode) c.packing_k = {true, 1, 2};
  c.softcap = 5;
  c.bias = {true, false, true, c.dtype};
  c.slopes = {true, Dtype::kF32};
  c.sinks = Dtype::kF32;
  c.dropout = {0.25f, 1, 2};
  if (c.operation != Operation::kBackward) c.tree = random_tree(c.shape, 40, true, 1);
  c.wide = true;
  c.d_lse = c.operation == Operation::kBackward;
}

std::vector<Case> corner_cases(Device device, Operation operation, Dtype dtype) {
  std::vector<Case> cases;
  const auto add = [&](const Shape& shape, const MaskSpec& mask) {
    cases.push_back(make_case(device, operation, shape, mask));
    cases.back().dtype = dtype;
  };
  size_t turn = 0;
  const auto next_dim = [&] { return kHeadDims[turn++ % 12]; };
  for (const int64_t n : kLengths) {
    add({1, 2, 1, n, n, next_dim()}, {});
    add({2, 1, 1, n, n, next_dim()}, causal_mask());
    add({1, 2, 2, 1, n, next_dim()}, causal_mask());
    add({1, 1, 1, n, 1, next_dim()}, {});
    add({1, 2, 1, 65, n, next_dim()}, causal_mask());
    add({1, 1, 1, n, 65, next_dim()}, window_mask(16, 7));
  }
  for (const int64_t d : kHeadDims) {
    add({1, 2, 1, 65, 129, d}, {});
    add({1, 1, 1, 129, 65, d}, causal_mask());
  }
  for (const Heads& heads : kHeads) {
    add({2, heads.q, heads.kv, 17, 33, 64}, causal_mask());
    add({1, heads.q, heads.kv, 1, 65, 32}, {});
  }
  for (int32_t align = 0; align < 4; ++align)
    for (const int64_t len_q : {40, 129}) {
      MaskSpec mask = causal_mask(align);
      mask.offset = align == CUFLASH_ALIGN_OFFSET ? 5 : 0;
      if (align == CUFLASH_ALIGN_DEVICE_OFFSETS) mask.offsets = {-3, 70};
      add({2, 2, 2, len_q, 100, 40}, mask);
      mask.window = true;
      mask.left = 20;
      mask.right = 3;
      add({2, 2, 2, len_q, 100, 64}, mask);
      mask.causal = false;
      add({2, 2, 1, len_q, 100, 128}, mask);
    }
  return cases;
}

struct Target {
  std::string kernel;
  Device device;
  Operation operation;
  int64_t shard;
};

void PrintTo(const Target& target, std::ostream* out) { *out << target.kernel; }

std::vector<Target> targets(int64_t shards) {
  std::vector<Target> list;
  for (const Device device : {Device::kCpu, Device::kCuda})
    for (const Operation operation :
         {Operation::kForward, Operation::kBackward, Operation::kDecode})
      for (const std::string& kernel : kernels_of(operation, device))
        for (int64_t shard = 0; shard < shards; ++shard)
          list.push_back({kernel, device, operation, shard});
  return list;
}

std::string target_name(const testing::TestParamInfo<Target>& test) {
  return std::string(name_of(test.param.device)) + "_" + test.param.kernel + "_shard" +
         std::to_string(test.param.shard);
}

class Grid : public testing::TestWithParam<Target> {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(GetParam().device); }

  // Runs the draw where the kernel takes it; whether it does.
  bool try_draw(Draw draw, const std::string& how_to_repeat) {
    draw.c.kernel = GetParam().kernel;
    if (!accepts(draw)) {
      ++refused_;
      return false;
    }
    ++ran_;
    worst_.fold(check_draw(draw));
    if (HasFailure()) ADD_FAILURE() << describe(draw) << "\n  " << how_to_repeat;
    return true;
  }

  void report(const char* what) {
    std::printf(
        "[   grid   ] %s %s: %lld run, %lld refused, worst error %.3f of the allowed (%s)\n",
        GetParam().kernel.c_str(), what, static_cast<long long>(ran_),
        static_cast<long long>(refused_), worst_.worst, worst_.where.c_str());
    RecordProperty("ran", static_cast<int>(ran_));
    RecordProperty("refused", static_cast<int>(refused_));
    RecordProperty("worst_ratio", std::to_string(worst_.worst));
  }

  int64_t ran_ = 0, refused_ = 0;
  Accuracy worst_;
};

class Corners : public Grid {};

TEST_P(Corners, Accurate) {
  const auto step = static_cast<uint64_t>(setting("CUFLASH_TEST_CORNERS", 1));
  uint64_t seed = 0;
  for (const Dtype dtype : kAllDtypes)
    for (const Case& c : corner_cases(GetParam().device, GetParam().operation, dtype)) {
      if (++seed % step != 0) continue;
      Draw draw;
      draw.c = c;
      draw.kind = kAllDataKinds[seed % 3];
      draw.seed = seed;
      try_draw(draw, "a corner case");
      if (HasFailure()) return report("corners");
    }
  report("corners");
  EXPECT_GE(ran_, 20 / static_cast<int64_t>(step));
}
INSTANTIATE_TEST_SUITE_P(, Corners, testing::ValuesIn(targets(1)), target_name);

// What the sanitizers run of each kernel (tools/gpu_check): every feature with code of its own, in few small problems.
class Features : public Grid {
 protected:
  // Uneven tails, causal, grouped heads, in decode split; whole tiles without any of them; and, where the kernel has
  // them, all features at once, over each kind of cache.
  std::vector<Draw> draws(Dtype dtype, int64_t head_dim) const {
    Draw first, second;
    Case &ragged = first.c, &whole = second.c;
    ragged = make_case(GetParam().device, GetParam().operation, {2, 4, 2, 37, 83, head_dim},
                       causal_mask());
    whole = make_case(GetParam().device, GetParam().operation, {1, 2, 2, 128, 128, head_dim});
    if (GetParam().operation == Operation::kDecode) {
      ragged.shape.len_q = 3;
      ragged.lengths = {83, 50};
      ragged.num_splits = 3;
      whole.shape.len_q = 1;
    }
    ragged.dtype = whole.dtype = dtype;
    std::vector<Draw> list = {first, second};
    if (!takes_every_feature(GetParam().kernel)) return list;
    add_every_feature(ragged);
    first.accumulates = true;
    list.push_back(first);
    if (GetParam().operation != Operation::kDecode) return list;
    first.chosen_entries = true;
    list.push_back(first);
    first.chosen_entries = false;
    for (const bool csr : {false, true}) {
      first.pool = PoolSpec{7, csr, csr};
      list.push_back(first);
    }
    first.stored = CacheSpec{};
    first.stored->k = CUFLASH_INT4, first.stored->v = CUFLASH_FP8_E5M2;
    first.stored->zeros = first.stored->per_slot = true;
    first.stored->group = 32;
    list.push_back(first);
    first.pool.reset();
    first.stored->k = CUFLASH_FP8_E4M3, first.stored->v = CUFLASH_INT8;
    list.push_back(first);
    return list;
  }
};

TEST_P(Features, Accurate) {
  constexpr int64_t kOdd[] = {255, 191, 127, 95, 63, 31}, kEven[] = {256, 192, 128, 96, 64, 32};
  int64_t ran_odd = 0, ran_even = 0;
  for (const Dtype dtype : kAllDtypes)
    for (const bool odd : {true, false})
      for (const int64_t head_dim : odd ? kOdd : kEven) {
        const int64_t before = ran_;
        for (const Draw& draw : draws(dtype, head_dim)) try_draw(draw, "a feature");
        if (HasFailure()) return report("features");
        (odd ? ran_odd : ran_even) += ran_ - before;
        if (ran_ > before) break;  // the largest that it takes
      }
  report("features");
  EXPECT_GE(ran_even, 2);
  // Loads by hardware in units of 16 bytes cannot take them.
  if (ran_odd == 0)
    std::printf("[   grid   ] %s refuses odd head dims\n", GetParam().kernel.c_str());
}
INSTANTIATE_TEST_SUITE_P(, Features, testing::ValuesIn(targets(1)), target_name);

constexpr int64_t kShards = 4;

class Draws : public Grid {
 protected:
  void count(const Draw& draw) {
    const std::vector<bool> has = features_of(draw);
    pairs_.resize(has.size() * has.size());
    for (size_t a = 0; a < has.size(); ++a)
      for (size_t b = 0; b <= a; ++b) pairs_[a * has.size() + b] += has[a] && has[b];
  }

  // How often each feature and each pair of features was drawn, for tools/fuzz.py: "a b count" by index in the names.
  void report_pairs() {
    const std::vector<std::string>& names = drawn_feature_names();
    std::string list, counts;
    for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
    pairs_.resize(names.size() * names.size());
    for (size_t a = 0; a < names.size(); ++a)
      for (size_t b = 0; b <= a; ++b)
        if (a == b || can_be_drawn_together(a, b))
          counts += std::to_string(a) + ' ' + std::to_string(b) + ' ' +
                    std::to_string(pairs_[a * names.size() + b]) + ',';
    RecordProperty("features", list);
    RecordProperty("pairs", counts);
  }

 private:
  std::vector<int64_t> pairs_;
};

TEST_P(Draws, Accurate) {
  const Target& target = GetParam();
  const int64_t draws =
      setting("CUFLASH_TEST_DRAWS", target.device == Device::kCpu ? 400 : 100) / kShards;
  const int64_t first_seed = setting("CUFLASH_TEST_SEED", 1),
                only = setting("CUFLASH_TEST_DRAW", -1);
  const bool takes_everything = takes_every_feature(target.kernel);
  // A kernel for one dtype and a few head dims refuses most problems: what counts is what it ran. The number of
  // tries is bounded so that a kernel that refuses everything fails.
  const int64_t tries = draws * 100;
  for (int64_t n = 0; n < tries && ran_ < draws; ++n) {
    const uint64_t seed =
        static_cast<uint64_t>((first_seed * kShards + target.shard) * 1'000'000 + n);
    Random random(seed);
    const bool every_feature = random.below(8) < (takes_everything ? 7 : 3);
    const Draw draw = random_draw(random, target.device, target.operation, every_feature);
    if (only >= 0 && n != only) continue;
    const std::string repeat = "CUFLASH_TEST_SEED=" + std::to_string(first_seed) +
                               " CUFLASH_TEST_DRAW=" + std::to_string(n) +
                               " test_kernels --gtest_filter='Draws.Accurate/" +
                               name_of(target.device) + "_" + target.kernel + "_shard" +
                               std::to_string(target.shard) + "'";
    if (try_draw(draw, repeat))
      count(draw);
    else if (takes_everything)
      ADD_FAILURE() << "refused: " << describe(draw) << "\n  " << repeat;
    if (HasFailure()) break;
  }
  report("draws");
  report_pairs();
  if (only < 0) {
    EXPECT_GE(ran_, draws);
  }
}
INSTANTIATE_TEST_SUITE_P(, Draws, testing::ValuesIn(targets(kShards)), target_name);

// Choosing and planning CUDA kernels is host arithmetic, which any problem must come through where no GPU is, too.
class PlannedDraws : public testing::TestWithParam<Operation> {};

TEST_P(PlannedDraws, ForGpusThatAreNotHere) {
  if (kernels_of(GetParam(), Device::kCuda).empty()) GTEST_SKIP() << "built without CUDA";
  const int64_t draws = setting("CUFLASH_TEST_PLANNED_DRAWS", 1000);
  const auto seed = static_cast<uint64_t>(setting("CUFLASH_TEST_SEED", 1)) * 1'000'000;
  for (int64_t n = 0; n < draws; ++n) {
    Random random(seed + static_cast<uint64_t>(n));
    const Draw draw = random_draw(random, Device::kCpu, GetParam(), n % 8 != 0);
    DrawnCall drawn(draw, zero_inputs(draw.c));
    Call& call = drawn.call();
    for (const int32_t arch : {75, 80, 90}) {
      call.problem().target_arch = arch;
      size_t bytes = 0;
      const cuflash_status_t status =
          GetParam() == Operation::kForward
              ? cuflash_forward_workspace_size(nullptr, &call.problem(), &bytes)
          : GetParam() == Operation::kBackward
              ? cuflash_backward_workspace_size(nullptr, &call.problem(), &call.gradients(), &bytes)
              : cuflash_decode_workspace_size(nullptr, &call.problem(), &call.cache(), &bytes);
      // The reference takes whatever is valid.
      ASSERT_EQ(status, CUFLASH_SUCCESS)
          << cuflash_last_error() << "\n  sm_" << arch << ' ' << describe(draw);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(, PlannedDraws,
                         testing::Values(Operation::kForward, Operation::kBackward,
                                         Operation::kDecode),
                         [](const auto& test) { return std::string(name_of(test.param)); });

}  // namespace
}  // namespace cuflash_test
