// Choosing a kernel, for GPUs that are not here: the library's tables under faked capabilities, and selection itself over
// tables made for the test.
#include "core/selection.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "api/handle.hpp"
#include "api/tables.hpp"
#include "core/features.hpp"
#include "core/split.hpp"

namespace cuflash {
namespace {

Capabilities gpu(int arch, int shared_memory) {
  Capabilities c;
  c.arch = arch;
  c.sm_count = 100;
  c.shared_memory_per_block = shared_memory;
  return c;
}

constexpr int k64KB = 64 << 10, k99KB = 99 << 10, k227KB = 227 << 10;

Capabilities cpu() {
  Capabilities c;
  c.is_cpu = true;
  return c;
}

Problem problem_of(Operation operation, Dtype dtype, int64_t head_dim) {
  Problem p;
  p.operation = operation;
  p.dtype = dtype;
  p.batch = 2;
  p.heads_q = p.heads_kv = 4;
  p.len_q = p.len_k = 100;
  p.head_dim = p.head_dim_v = head_dim;
  p.aligned16 = true;
  return p;
}

// As if every variant were built: selection without what this build left out.
class Tables {
 public:
  Tables() {
    const VariantTables all = all_variants();
    for (size_t i = 0; i < all.count; ++i) {
      tables_.emplace_back(all.spans[i].data, all.spans[i].data + all.spans[i].count);
      for (Variant& variant : tables_.back()) {
        if (variant.launch == nullptr)
          variant.launch = [](const Problem&, const Plan&, const LaunchContext&) -> Status {
            return CUFLASH_SUCCESS;
          };
        rows_.push_back(variant);
      }
      spans_.push_back(span_of(tables_.back().data(), tables_.back().size()));
    }
  }
  VariantTables get() const { return {spans_.data(), spans_.size()}; }
  std::string choice(const Problem& p, const Capabilities& c, const char* forced = nullptr) const {
    const Variant* chosen = nullptr;
    const Status status = select(get(), p, c, forced, "the test", &chosen);
    return status == CUFLASH_SUCCESS ? chosen->name : "status " + std::to_string(status);
  }
  const std::vector<Variant>& rows() const { return rows_; }

 private:
  std::deque<std::vector<Variant>> tables_;
  std::vector<VariantSpan> spans_;
  std::vector<Variant> rows_;
};

TEST(Tables, NamesAreUniqueAndFollowTheScheme) {
  std::set<std::string> names;
  for_each_variant(all_variants(), [&](const Variant& v) {
    EXPECT_TRUE(names.insert(v.name).second) << v.name;
    const std::string prefix = v.operation == Operation::kForward    ? "fwd_"
                               : v.operation == Operation::kBackward ? "bwd_"
                               : v.operation == Operation::kDecode   ? "dec_"
                                                                     : "append_";
    const std::string name = v.name, start = prefix + v.family;
    EXPECT_EQ(name.compare(0, start.size(), start), 0) << name;
    EXPECT_NE(v.accepts, nullptr);
    EXPECT_NE(v.plan, nullptr);
  });
}

// Selection passes over rows and whole tables by what it knows of them.
TEST(Tables, AreOfOneDeviceAndNoRowIsPreferredMoreThanItsRank) {
  const VariantTables all = all_variants();
  for (size_t i = 0; i < all.count; ++i)
    for (size_t j = 0; j < all.spans[i].count; ++j) {
      const Variant& v = all.spans[i].data[j];
      EXPECT_EQ(v.on_cpu, all.spans[i].on_cpu) << v.name;
      for (const int64_t len : {0, 1, 64, 65, 4096}) {
        Problem p = problem_of(v.operation, Dtype::kF16, 64);
        p.len_q = p.len_k = len;
        EXPECT_LE(rank_of(v, p), v.rank) << v.name;
      }
    }
}

TEST(Tables, AreThoseOfTheBuild) {
  std::set<std::string> built, tables;
  std::stringstream list(CUFLASH_TEST_VARIANT_NAMES);
  for (std::string name; std::getline(list, name, ',');) built.insert(name);
  for_each_variant(all_variants(), [&](const Variant& v) { tables.insert(v.name); });
  EXPECT_EQ(tables, built);
}

// On the CPU both families have every feature.
TEST(Tables, FeaturesOnTheCpu) {
  const Tables tables;
  const std::pair<Operation, const char*> kernels[] = {{Operation::kForward, "fwd_cpu"},
                                                       {Operation::kBackward, "bwd_cpu"},
                                                       {Operation::kDecode, "dec_cpu"}};
  for (const auto& [operation, kernel] : kernels)
    for (uint32_t feature = kRaggedBatches; feature <= kTreeMask; feature <<= 1) {
      Features features;
      features.used = feature;
      Problem p = problem_of(operation, Dtype::kF16, 64);
      p.features = &features;
      EXPECT_EQ(tables.choice(p, cpu()), kernel) << feature;
    }
}

// A feature that only the reference has is refused by the others by name, and the reference is chosen.
// Which features the CUDA families take.
uint32_t features_of(const std::string& family, Operation operation) {
  constexpr uint32_t kScores = kSoftcap | kAlibi | kBias | kSinks;
  constexpr uint32_t kRows = kRaggedBatches | kScores | kDropout | kOwnValueDim;
  if (family == "reference") return ~uint32_t{0};
  if (family == "wgmma")
    return kRaggedBatches | kSoftcap | kAlibi | kSinks | kOwnValueDim | kWideOutputs;
  switch (operation) {
    case Operation::kForward:
      return kRows;
    case Operation::kBackward:
      return kRows | kDelta | kLseGradient |
             (family == "scalar" ? kWideOutputs | kAccumulation : 0);
    case Operation::kDecode:
      return kScores | kOwnValueDim | kPagedCache | kCacheEntries | kTreeMask;
    default:
      return 0;
  }
}

TEST(Tables, FeaturesOfEachFamily) {
  const Tables tables;
  for (const Operation operation : {Operation::kForward, Operation::kBackward, Operation::kDecode})
    for (const Capabilities& c : {gpu(80, k99KB), gpu(90, k227KB)})
      for (uint32_t feature = kRaggedBatches; feature <= kTreeMask; feature <<= 1) {
        Features features;
        features.used = feature;
        Problem p = problem_of(operation, Dtype::kF16, 64);
        p.features = &features;
        std::set<std::string> of_the_feature, of_other_things;
        bool any_takes = false;
        for (const Variant& v : tables.rows()) {
          if (v.operation != operation || v.on_cpu != c.is_cpu) continue;
          const Refusal refusal = refusal_of(v, p, c);
          const bool takes = (features_of(v.family, operation) & feature) != 0;
          if (!takes) {
            ASSERT_TRUE(refusal) << v.name << " " << feature;
            of_the_feature.insert(refusal.reason);
          } else if (refusal) {
            of_other_things.insert(refusal.reason);
          } else if (std::string(v.family) != "reference") {
            any_takes = true;
          }
        }
        // One reason, with the feature's name, and only of those that lack it.
        EXPECT_LE(of_the_feature.size(), 1u) << *of_the_feature.begin();
        for (const std::string& reason : of_the_feature)
          EXPECT_EQ(of_other_things.count(reason), 0u) << reason;
        EXPECT_NE(tables.choice(p, c).find("_reference") != std::string::npos, any_takes)
            << feature;
      }
}

TEST(Tables, WmmaBackwardRefusesFactorsOfDropoutThatF16DoesNotHold) {
  const Tables tables;
  Features features;
  features.used = kDropout;
  const auto choice = [&](Dtype dtype, float dropout) {
    features.dropout.p = dropout;
    Problem p = problem_of(Operation::kBackward, dtype, 64);
    p.features = &features;
    return tables.choice(p, gpu(90, k227KB));
  };
  EXPECT_EQ(choice(Dtype::kF16, 0.9999f), "bwd_wmma_f16_d64");
  EXPECT_EQ(choice(Dtype::kF16, 1 - 0x1p-17f), "bwd_scalar_f16_d64");
  EXPECT_EQ(choice(Dtype::kF16, 1), "bwd_wmma_f16_d64");  // all are dropped
  EXPECT_EQ(choice(Dtype::kBf16, 1 - 0x1p-17f), "bwd_wmma_bf16_d64");
}

TEST(Tables, TheReferenceTakesEverythingEverywhere) {
  const Tables tables;
  for (const Operation operation :
       {Operation::kForward, Operation::kBackward, Operation::kDecode, Operation::kAppend})
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
      for (int64_t head_dim = 1; head_dim <= 256; ++head_dim)
        for (const Capabilities& c : {cpu(), gpu(70, 96 << 10), gpu(75, k64KB), gpu(80, k99KB),
                                      gpu(86, k99KB), gpu(90, k227KB), gpu(120, k99KB)}) {
          Problem p = problem_of(operation, dtype, head_dim);
          p.aligned16 = head_dim % 2 == 0;
          const std::string name = tables.choice(p, c, "reference");
          ASSERT_NE(name.find("_reference"), std::string::npos) << name;
          ASSERT_EQ(name.find("_cpu") != std::string::npos, c.is_cpu);
          ASSERT_EQ(tables.choice(p, c).find("status"), std::string::npos);
        }
}

TEST(Tables, MmaTakesTheSmallestBucketThatFits) {
  const Tables tables;
  const auto choice = [&](Dtype dtype, int64_t head_dim, const Capabilities& c) {
    Problem p = problem_of(Operation::kForward, dtype, head_dim);
    p.batch = 100;  // a block for each SM
    return tables.choice(p, c);
  };
  const Capabilities a100 = gpu(80, 166912);
  EXPECT_EQ(choice(Dtype::kF16, 32, a100), "fwd_mma_f16_d32");
  EXPECT_EQ(choice(Dtype::kF16, 33, a100), "fwd_mma_f16_d64");
  EXPECT_EQ(choice(Dtype::kBf16, 64, a100), "fwd_mma_bf16_d64");
  EXPECT_EQ(choice(Dtype::kBf16, 72, a100), "fwd_mma_bf16_d96");
  EXPECT_EQ(choice(Dtype::kF16, 128, a100), "fwd_mma_f16_d128");
  EXPECT_EQ(choice(Dtype::kF16, 256, a100), "fwd_mma_f16_d256");
  // All buckets fit GPUs with little shared memory, and before sm_80 there is wmma.
  for (int64_t head_dim = 1; head_dim <= 256; ++head_dim)
    for (const int arch : {86, 89, 120})
      EXPECT_EQ(choice(Dtype::kBf16, head_dim, gpu(arch, k99KB)).find("fwd_mma_bf16_d"), 0u)
          << head_dim;
  EXPECT_EQ(choice(Dtype::kF16, 33, gpu(75, k64KB)), "fwd_wmma_f16_d64");
}

TEST(Tables, MmaTakesTheSizeOfTilesThatSuits) {
  const Tables tables;
  const auto choice = [&](int64_t head_dim, int64_t batch, int64_t len, bool invariant = false) {
    Problem p = problem_of(Operation::kForward, Dtype::kBf16, head_dim);
    p.batch = batch, p.len_q = p.len_k = len;
    p.batch_invariant = invariant;
    return tables.choice(p, gpu(100, k227KB));
  };
  // 4 heads: up to 128 blocks of 128 rows.
  EXPECT_EQ(choice(64, 8, 512), "fwd_mma_few_bf16_d64");
  EXPECT_EQ(choice(64, 9, 512), "fwd_mma_bf16_d64");
  EXPECT_EQ(choice(128, 2, 2048), "fwd_mma_few_bf16_d128");
  EXPECT_EQ(choice(128, 2, 2049), "fwd_mma_bf16_d128");
  EXPECT_EQ(choice(96, 1, 1), "fwd_mma_bf16_d96");
  // Many keys.
  EXPECT_EQ(choice(64, 9, 2047), "fwd_mma_bf16_d64");
  EXPECT_EQ(choice(64, 9, 2048), "fwd_mma_long_bf16_d64");
  EXPECT_EQ(choice(192, 9, 2048), "fwd_mma_bf16_d192");
  // Pairs of warps are for as many rows.
  EXPECT_EQ(choice(256, 8, 512), "fwd_mma_bf16_d256");
  EXPECT_EQ(choice(256, 9, 1024), "fwd_mma_pairs_bf16_d256");
  EXPECT_EQ(choice(256, 9, 1023), "fwd_mma_bf16_d256");
  EXPECT_EQ(choice(193, 9, 2048), "fwd_mma_pairs_bf16_d256");
  EXPECT_EQ(choice(256, 1, 1, true), "fwd_mma_pairs_bf16_d256");
  // A longer neighbour must change nothing.
  EXPECT_EQ(choice(64, 1, 1, true), "fwd_mma_bf16_d64");
  EXPECT_EQ(choice(64, 9, 2048, true), "fwd_mma_bf16_d64");
}

TEST(Tables, WgmmaTakesWhatTmaCanLoadOnHopperAlone) {
  const Tables tables;
  const auto choice = [&](const Problem& p, int arch) {
    return tables.choice(p, gpu(arch, k227KB));
  };
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 64);
  p.aligned16 = true;
  EXPECT_EQ(choice(p, 90), "fwd_wgmma_small_bf16_d64");
  EXPECT_EQ(choice(p, 80), "fwd_mma_few_bf16_d64");
  EXPECT_EQ(choice(p, 100), "fwd_mma_few_bf16_d64");
  Problem other = p;
  other.head_dim = other.head_dim_v = 72;
  EXPECT_EQ(choice(other, 90), "fwd_wgmma_bf16_d96");
  other.head_dim = other.head_dim_v = 104;
  EXPECT_EQ(choice(other, 90), "fwd_wgmma_bf16_d128");
  other.head_dim = other.head_dim_v = 136;
  EXPECT_EQ(choice(other, 90), "fwd_wgmma_bf16_d192");
  other.head_dim = other.head_dim_v = 68;  // rows of 136 bytes
  EXPECT_EQ(choice(other, 90), "fwd_mma_bf16_d96");
  other.head_dim = other.head_dim_v = 256;
  EXPECT_EQ(choice(other, 90), "fwd_wgmma_bf16_d256");
  other = p;
  other.aligned16 = false;
  EXPECT_EQ(choice(other, 90), "fwd_mma_few_bf16_d64");
  other = p;
  other.k.head_stride = int64_t{1} << 39;
  EXPECT_EQ(choice(other, 90), "fwd_mma_few_bf16_d64");
  other = p;
  other.len_k = (int64_t{1} << 31) - 8;
  EXPECT_EQ(choice(other, 90), "fwd_mma_few_bf16_d64");
  other = p;
  other.len_k = 0;
  EXPECT_EQ(choice(other, 90), "fwd_mma_few_bf16_d64");

  // Few queries and keys are faster elsewhere; who asks for wgmma gets it.
  Problem few = problem_of(Operation::kForward, Dtype::kBf16, 64);
  few.len_q = few.len_k = 64;
  EXPECT_EQ(choice(few, 90), "fwd_mma_few_bf16_d64");
  EXPECT_EQ(tables.choice(few, gpu(90, k227KB), "wgmma"), "fwd_wgmma_bf16_d64");
  few.len_k = 65;
  EXPECT_EQ(choice(few, 90), "fwd_wgmma_small_bf16_d64");
}

TEST(Tables, WgmmaTakesSmallTilesForFewRowsAndShortMaskedSequences) {
  const Tables tables;
  Problem p = problem_of(Operation::kForward, Dtype::kF16, 64);
  p.aligned16 = true;
  const auto choice = [&](int64_t len) {
    p.len_q = p.len_k = len;
    return tables.choice(p, gpu(90, k227KB));
  };
  p.heads_q = p.heads_kv = 4, p.batch = 2;  // of 64 rows each 2 tiles for every SM
  EXPECT_EQ(choice(2112), "fwd_wgmma_small_f16_d64");
  EXPECT_EQ(choice(2113), "fwd_wgmma_f16_d64");
  p.batch = 20;
  EXPECT_EQ(choice(1024), "fwd_wgmma_f16_d64");
  p.mask.right = 0;
  EXPECT_EQ(choice(1024), "fwd_wgmma_small_f16_d64");
  EXPECT_EQ(choice(1025), "fwd_wgmma_f16_d64");
  p.batch_invariant = true;  // a longer neighbour must change nothing
  EXPECT_EQ(choice(512), "fwd_wgmma_f16_d64");
}

TEST(Tables, WgmmaTakesTheSmallestBucketOfBothHeadDims) {
  const Tables tables;
  Features features;
  features.used = kOwnValueDim;
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 192);
  p.aligned16 = true;
  p.features = &features;
  const auto choice = [&](int64_t head_dim, int64_t head_dim_v) {
    p.head_dim = head_dim, p.head_dim_v = head_dim_v;
    return tables.choice(p, gpu(90, k227KB));
  };
  EXPECT_EQ(choice(192, 128), "fwd_wgmma_bf16_d192_v128");
  EXPECT_EQ(choice(136, 8), "fwd_wgmma_bf16_d192_v128");
  EXPECT_EQ(choice(192, 136), "fwd_wgmma_bf16_d192");
  EXPECT_EQ(choice(64, 128), "fwd_wgmma_bf16_d128");
  EXPECT_EQ(choice(128, 64), "fwd_wgmma_bf16_d128");
  EXPECT_EQ(choice(128, 192), "fwd_wgmma_bf16_d192");
  EXPECT_EQ(choice(128, 68), "fwd_mma_few_bf16_d128");  // rows of 136 bytes
}

TEST(Tables, WgmmaTakesLongTilesForManyKeys) {
  const Tables tables;
  Features features;
  features.used = kRaggedBatches;
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 128);
  p.aligned16 = true;
  const auto choice = [&](int64_t len) {
    p.len_k = len;
    return tables.choice(p, gpu(90, k227KB));
  };
  EXPECT_EQ(choice(4095), "fwd_wgmma_bf16_d128");
  EXPECT_EQ(choice(4096), "fwd_wgmma_long_bf16_d128");
  p.mask.right = 0;
  EXPECT_EQ(choice(4096), "fwd_wgmma_long_bf16_d128");
  p.mask.left = 1023;  // what a row sees is what counts
  EXPECT_EQ(choice(1 << 20), "fwd_wgmma_bf16_d128");
  p.mask = {};
  p.batch_invariant = true;
  EXPECT_EQ(choice(1 << 20), "fwd_wgmma_bf16_d128");
  p.batch_invariant = false;
  p.features = &features;
  EXPECT_EQ(choice(1 << 20), "fwd_wgmma_bf16_d128");
  p.features = nullptr;
  p.head_dim = p.head_dim_v = 96;
  EXPECT_EQ(choice(1 << 20), "fwd_wgmma_bf16_d96");
}

TEST(Tables, WgmmaCutsTheKeysOfFewTiles) {
  const Tables tables;
  Features features;
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 128);
  p.aligned16 = true;
  p.heads_q = p.heads_kv = 8, p.len_q = 128, p.len_k = 16384;
  const auto parts = [&] {
    const Variant* row = nullptr;
    for (const Variant& v : tables.rows())
      if (std::strcmp(v.name, "fwd_wgmma_bf16_d128") == 0) row = &v;
    const Plan plan = row->plan(p, gpu(90, k227KB));
    EXPECT_EQ(plan.workspace_bytes > 0, plan.num_splits > 1);
    EXPECT_EQ(plan.launches, plan.num_splits > 1 ? 2 : 1);
    return plan.num_splits;
  };
  p.batch = 1;
  EXPECT_EQ(parts(), 12);  // 8 tiles for 100 SMs
  p.len_k = 2047;
  EXPECT_EQ(parts(), 1);
  p.len_k = 1 << 20;
  EXPECT_EQ(parts(), 12);
  p.batch = 4;
  EXPECT_EQ(parts(), 3);
  p.batch = 9;
  EXPECT_EQ(parts(), 1);
  p.batch = 1;
  p.mask.left = 3000, p.mask.right = 0;
  EXPECT_EQ(parts(), 3);
  p.mask.left = 100;
  EXPECT_EQ(parts(), 1);
  p.mask = {};
  p.batch_invariant = true;
  EXPECT_EQ(parts(), 1);
  p.batch_invariant = false;
  p.features = &features;
  features.used = kAlibi;
  EXPECT_EQ(parts(), 12);
  for (const uint32_t feature : {kSinks, kRaggedBatches}) {
    features.used = feature;
    EXPECT_EQ(parts(), 1);
  }
}

// Its blocks take tile after tile: no more of them than SMs that the call may use.
TEST(Tables, WgmmaLeavesSms) {
  const Tables tables;
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 64);
  p.batch = 8, p.heads_q = p.heads_kv = 16, p.len_q = p.len_k = 1000;
  int64_t planned = 0;
  for (const Variant& v : tables.rows()) {
    if (std::strcmp(v.family, "wgmma") != 0) continue;
    for (const int sms : {132, 100, 1}) {
      Capabilities c = gpu(90, k227KB);
      c.sm_count = sms;
      const int blocks = std::strstr(v.name, "small") != nullptr ? 3 * sms : sms;
      EXPECT_EQ(v.plan(p, c).blocks, blocks) << v.name;
      Problem small = p;
      small.batch = small.heads_q = small.heads_kv = 1, small.len_q = v.tile_m + 1;
      EXPECT_EQ(v.plan(small, c).blocks, std::min(blocks, 2)) << v.name;
      ++planned;
    }
  }
  EXPECT_GT(planned, 0);
}

// Lengths, which may be those of a neighbour, and the batch do not count.
TEST(Tables, BatchInvariantChoices) {
  const Tables tables;
  Problem p = problem_of(Operation::kForward, Dtype::kBf16, 64);
  p.batch_invariant = true;
  for (const int64_t len : {1, 64, 65, 4096})
    for (const int64_t batch : {0, 1, 64}) {
      p.batch = batch, p.len_q = p.len_k = len;
      EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "fwd_wgmma_bf16_d64");
    }
  // A batch that is too large for the kernel of its sequences is refused, not given to another one.
  p = problem_of(Operation::kDecode, Dtype::kF16, 64);
  p.batch_invariant = true;
  p.heads_q = p.heads_kv = 4, p.len_q = 1, p.len_k = 512 << 10;
  p.batch = 1 << 20;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_wmma_f16_d64");
  p.batch = 1 << 21;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)),
            "status " + std::to_string(CUFLASH_ERROR_UNSUPPORTED));
  EXPECT_NE(std::strstr(last_error(), "batch invariance"), nullptr) << last_error();
  p.batch_invariant = false, p.num_splits = 256;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_reference");
}

// f32, and what has no tensor cores.
TEST(Tables, ScalarTakesTheRest) {
  const Tables tables;
  for (const auto& [operation, prefix] :
       {std::pair{Operation::kForward, std::string("fwd_")}, {Operation::kBackward, "bwd_"}}) {
    const auto choice = [&, operation = operation](Dtype dtype, int64_t head_dim,
                                                   const Capabilities& c) {
      return tables.choice(problem_of(operation, dtype, head_dim), c);
    };
    for (const Capabilities& c : {gpu(75, k64KB), gpu(90, k227KB)}) {
      EXPECT_EQ(choice(Dtype::kF32, 1, c), prefix + "scalar_f32_d32");
      EXPECT_EQ(choice(Dtype::kF32, 64, c), prefix + "scalar_f32_d64");
      EXPECT_EQ(choice(Dtype::kF32, 65, c), prefix + "scalar_f32_d128");
      EXPECT_EQ(choice(Dtype::kF32, 256, c), prefix + "scalar_f32_d256");
    }
    EXPECT_EQ(choice(Dtype::kF32, 64, gpu(75, 32 << 10)), prefix + "reference");
    EXPECT_EQ(choice(Dtype::kBf16, 32, gpu(75, k64KB)), prefix + "scalar_bf16_d64");
    EXPECT_EQ(choice(Dtype::kBf16, 200, gpu(75, k64KB)), prefix + "scalar_bf16_d256");
    EXPECT_EQ(tables.choice(problem_of(operation, Dtype::kF16, 100), gpu(90, k227KB), "scalar"),
              prefix + "scalar_f16_d128");
  }
}

TEST(Tables, OldAndSmallGpus) {
  const Tables tables;
  const Problem f16 = problem_of(Operation::kForward, Dtype::kF16, 64);
  const Problem bf16 = problem_of(Operation::kForward, Dtype::kBf16, 64);
  EXPECT_EQ(tables.choice(f16, gpu(70, 96 << 10)), "fwd_wmma_f16_d64");
  EXPECT_EQ(tables.choice(f16, gpu(75, k64KB)), "fwd_wmma_f16_d64");
  EXPECT_EQ(tables.choice(bf16, gpu(75, k64KB)), "fwd_scalar_bf16_d64");  // no wmma before sm_80
  EXPECT_EQ(tables.choice(bf16, gpu(80, 163 << 10)), "fwd_mma_few_bf16_d64");
  EXPECT_EQ(tables.choice(bf16, gpu(120, k99KB)), "fwd_mma_few_bf16_d64");
}

// No variant is chosen on a GPU whose shared memory it does not fit.
TEST(Tables, ChosenKernelsFitTheSharedMemory) {
  const Tables tables;
  for (const int bytes : {48 << 10, k64KB, k99KB, k227KB})
    for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16})
      for (int64_t head_dim = 1; head_dim <= 256; ++head_dim) {
        const Problem p = problem_of(Operation::kForward, dtype, head_dim);
        const Capabilities c = gpu(86, bytes);
        for (const Variant& v : tables.rows())
          if (!refusal_of(v, p, c)) ASSERT_LE(v.shared_memory, bytes) << v.name;
        ASSERT_EQ(tables.choice(p, c).find("status"), std::string::npos);
      }
}

TEST(Tables, EveryRefusalHasAReason) {
  for_each_variant(all_variants(), [](const Variant& v) {
    for (const Operation operation :
         {Operation::kForward, Operation::kBackward, Operation::kDecode, Operation::kAppend})
      for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16})
        for (const Capabilities& c : {cpu(), gpu(75, k64KB), gpu(90, k227KB)})
          if (const Refusal r = refusal_of(v, problem_of(operation, dtype, 200), c))
            EXPECT_STRNE(r.reason, "") << v.name;
  });
}

TEST(Tables, PlansOfSplitsDependOnTheShapeOnly) {
  Problem p = problem_of(Operation::kDecode, Dtype::kF16, 128);
  p.len_q = 1;
  const Capabilities c = gpu(90, k227KB);
  p.batch = p.heads_q = p.heads_kv = 1;
  p.len_k = 65536;
  EXPECT_GT(choose_splits(p, c), 1);
  EXPECT_EQ(choose_splits(p, cpu()), 1);
  p.batch = 256, p.heads_q = p.heads_kv = 32, p.len_k = 512;
  EXPECT_EQ(choose_splits(p, c), 1);
  p.num_splits = 7;
  EXPECT_EQ(choose_splits(p, c), 7);
  EXPECT_EQ(choose_splits(p, cpu()), 7);
}

// Rows of a packed tensor that no sequence has make no tiles to cut.
TEST(Splits, OfNoSequences) {
  Features features;
  const int32_t offsets[] = {0};
  features.ragged.offsets_q = offsets;
  features.ragged.total_q = 3;
  Problem p = problem_of(Operation::kDecode, Dtype::kF16, 128);
  p.features = &features;
  p.heads_q = 4, p.heads_kv = 2, p.len_q = 2, p.len_k = 4096;
  const auto splits = [&] { return choose_splits(p, gpu(90, k227KB)); };
  p.batch = 1;
  EXPECT_GT(splits(), 1);
  p.batch = 0;
  EXPECT_EQ(splits(), 1);
  p.batch = 1, p.len_q = 0;
  EXPECT_EQ(splits(), 1);
  p.len_q = 2, p.heads_q = p.heads_kv = 0;
  EXPECT_EQ(splits(), 1);
}

// As many as cover the capacity in parts of a fixed length, on any device, whatever else there is.
TEST(Splits, BatchInvariantPartsHaveAFixedLength) {
  Problem p = problem_of(Operation::kDecode, Dtype::kF16, 128);
  p.batch_invariant = true;
  EXPECT_EQ(p.least_part(), Problem::kInvariantPart);
  for (const int64_t batch : {1, 300})
    for (const int64_t heads : {1, 32})
      for (const int sms : {1, 20, 132}) {
        p.batch = batch, p.heads_q = p.heads_kv = heads;
        Capabilities c = gpu(90, k227KB);
        c.sm_count = sms;
        p.len_k = 0;
        EXPECT_EQ(choose_splits(p, c), 1);
        p.len_k = 1024;
        EXPECT_EQ(choose_splits(p, c), 1);
        p.len_k = 1025;
        EXPECT_EQ(choose_splits(p, c), 2);
        p.len_k = 65536;
        EXPECT_EQ(choose_splits(p, c), 64);
        p.len_k = 1 << 20;
        EXPECT_EQ(choose_splits(p, c), 256);
      }
  p.num_splits = 7;
  EXPECT_EQ(choose_splits(p, gpu(90, k227KB)), 7);
  EXPECT_EQ(p.least_part(), 1);
}

// Blocks of 16 rows, two of which keep an SM busy.
int32_t splits_of(int64_t batch, int64_t heads_kv, int64_t len_k) {
  Problem p = problem_of(Operation::kDecode, Dtype::kBf16, 128);
  p.batch = batch;
  p.heads_kv = heads_kv;
  p.heads_q = 4 * heads_kv;
  p.len_q = 1;
  p.len_k = len_k;
  Capabilities h200 = gpu(90, k227KB);
  h200.sm_count = 132;
  return choose_splits(p, h200, {16, 2});
}

TEST(Splits, FillTheDevice) {
  EXPECT_EQ(splits_of(8, 8, 8192), 4);   // 256 blocks on 132 SMs: 97 % of two rounds
  EXPECT_EQ(splits_of(64, 8, 2048), 1);  // 512 blocks are 97 % of four rounds without a merge
  EXPECT_EQ(splits_of(1, 8, 65536), 33);
  EXPECT_EQ(splits_of(1, 1, 1 << 20), 256);  // no more than this
  EXPECT_EQ(splits_of(1024, 8, 8192), 1);
}

TEST(Splits, PartsHaveAtLeast64Keys) {
  EXPECT_EQ(splits_of(1, 1, 0), 1);
  EXPECT_EQ(splits_of(1, 1, 127), 1);
  for (int64_t len_k = 1; len_k < 1 << 16; len_k += 1 + len_k / 7) {
    const int32_t splits = splits_of(1, 8, len_k);
    ASSERT_GE(splits, 1);
    if (splits > 1) ASSERT_GE(len_k / splits, 64) << len_k;
  }
}

TEST(Splits, AWindowCutsTheKeys) {
  Problem p = problem_of(Operation::kDecode, Dtype::kBf16, 128);
  p.batch = p.heads_q = p.heads_kv = p.len_q = 1;
  p.len_k = 1 << 20;
  p.mask.left = 100;
  p.mask.right = 0;
  EXPECT_EQ(choose_splits(p, gpu(90, k227KB)), 1);
  p.batch_invariant = true;
  EXPECT_EQ(choose_splits(p, gpu(90, k227KB)), 1);
}

TEST(Tables, DecodeOnTensorCoresOrNot) {
  const Tables tables;
  const auto choice = [&](Dtype dtype, int64_t head_dim, const Capabilities& c) {
    return tables.choice(problem_of(Operation::kDecode, dtype, head_dim), c);
  };
  const Capabilities h100 = gpu(90, k227KB);
  EXPECT_EQ(choice(Dtype::kF16, 64, h100), "dec_wmma_f16_d64");
  EXPECT_EQ(choice(Dtype::kBf16, 65, h100), "dec_wmma_bf16_d128");
  EXPECT_EQ(choice(Dtype::kF16, 256, gpu(75, k64KB)), "dec_wmma_f16_d256");
  EXPECT_EQ(choice(Dtype::kF16, 256, gpu(75, 48 << 10)), "dec_scalar_f16_d256");
  EXPECT_EQ(choice(Dtype::kBf16, 128, gpu(75, k64KB)), "dec_scalar_bf16_d128");
  EXPECT_EQ(choice(Dtype::kF32, 1, h100), "dec_scalar_f32_d64");
  EXPECT_EQ(choice(Dtype::kF32, 129, h100), "dec_scalar_f32_d256");
}

// Numbers of blocks are 32 bit.
TEST(Tables, TiledDecodeRefusesGridsThatAreTooLarge) {
  const Tables tables;
  Problem p = problem_of(Operation::kDecode, Dtype::kF16, 64);
  p.batch = 1 << 20, p.heads_q = p.heads_kv = 4, p.len_q = 1, p.num_splits = 511;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_wmma_f16_d64");
  p.num_splits = 512;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_reference");
  p.num_splits = 0, p.batch_invariant = true, p.len_k = 512 << 10;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_wmma_f16_d64");
  p.len_q = 3 << 29;
  EXPECT_EQ(tables.choice(p, gpu(90, k227KB)), "dec_reference");
}

// The margin of the call and that of the handle add up; one SM is left.
TEST(Margins, LeaveSmsToOthers) {
  cuflash_handle_t handle = nullptr;
  ASSERT_EQ(cuflash_create(&handle, CUFLASH_DEVICE_CPU), CUFLASH_SUCCESS);
  ASSERT_EQ(cuflash_set_option(handle, CUFLASH_OPTION_SM_MARGIN, 12), CUFLASH_SUCCESS);
  const auto sms = [&](cuflash_handle_t used, int32_t margin) {
    Session session;
    EXPECT_EQ(session.open_faked(used, 90, margin), CUFLASH_SUCCESS);
    return session.capabilities.sm_count;
  };
  const int all = sms(nullptr, 0);
  EXPECT_EQ(sms(nullptr, 20), all - 20);
  EXPECT_EQ(sms(handle, 0), all - 12);
  EXPECT_EQ(sms(handle, 20), all - 32);
  EXPECT_EQ(sms(handle, 1024), 1);
  cuflash_destroy(handle);
}

// ---- selection over tables of the test's own ----------------------------------------------------------

Refusal take(const Variant&, const Problem&, const Capabilities&) { return {}; }
Refusal refuse(const Variant&, const Problem&, const Capabilities&) { return {"out of taste"}; }
Plan plan(const Problem&, const Capabilities&) { return {}; }
Status launch(const Problem&, const Plan&, const LaunchContext&) { return CUFLASH_SUCCESS; }

Variant row(const char* name, const char* family, int rank,
            decltype(Variant::accepts) accepts = take) {
  return {name,   family, Operation::kForward, false, 1, 1, 32, 0, rank, accepts, plan,
          launch, nullptr};
}

Status choose(const std::vector<Variant>& rows, const char* forced, const Variant** chosen) {
  const VariantSpan span = span_of(rows.data(), rows.size());
  return select({&span, 1}, problem_of(Operation::kForward, Dtype::kF16, 64), gpu(90, k227KB),
                forced, "the test", chosen);
}

TEST(Selection, HighestRankThenFirst) {
  const Variant* chosen = nullptr;
  const std::vector<Variant> rows = {row("a", "x", 1), row("b", "y", 5), row("c", "y", 5),
                                     row("d", "z", 9, refuse)};
  ASSERT_EQ(choose(rows, nullptr, &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "b");
  ASSERT_EQ(choose(rows, "", &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "b");
  ASSERT_EQ(choose(rows, "c", &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "c");
  ASSERT_EQ(choose(rows, "x", &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "a");
}

TEST(Selection, ForcedRefusalsAreNotReplaced) {
  const Variant* chosen = nullptr;
  const std::vector<Variant> rows = {row("a", "x", 1), row("d", "z", 9, refuse)};
  EXPECT_EQ(choose(rows, "d", &chosen), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_EQ(chosen, nullptr);
  EXPECT_NE(std::strstr(last_error(), "out of taste"), nullptr) << last_error();
  EXPECT_NE(std::strstr(last_error(), "\"d\""), nullptr) << last_error();
  EXPECT_EQ(choose(rows, "nobody", &chosen), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_NE(std::strstr(last_error(), "nobody"), nullptr) << last_error();
  for (const char* name : {"a", "d", "x", "z"})
    EXPECT_NE(std::strstr(last_error(), name), nullptr) << last_error();
}

TEST(Selection, NotBuiltIsSaid) {
  const Variant* chosen = nullptr;
  std::vector<Variant> rows = {row("a", "x", 1), row("b", "y", 5)};
  rows[1].launch = nullptr;
  ASSERT_EQ(choose(rows, nullptr, &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "a");
  EXPECT_EQ(choose(rows, "b", &chosen), CUFLASH_ERROR_NOT_BUILT);
  // A variant that would refuse anyway says that, built or not.
  rows[1].accepts = refuse;
  EXPECT_EQ(choose(rows, "b", &chosen), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_NE(std::strstr(last_error(), "out of taste"), nullptr) << last_error();
}

TEST(Selection, NobodyTakesIt) {
  const Variant* chosen = nullptr;
  EXPECT_EQ(choose({row("a", "x", 1, refuse)}, nullptr, &chosen), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_NE(std::strstr(last_error(), "out of taste"), nullptr) << last_error();
  EXPECT_EQ(choose({}, nullptr, &chosen), CUFLASH_ERROR_UNSUPPORTED);
}

TEST(Selection, OtherOperationsAndDevices) {
  const Variant* chosen = nullptr;
  std::vector<Variant> rows = {row("a", "x", 1), row("b", "y", 5), row("c", "y", 7)};
  rows[1].operation = Operation::kBackward;
  rows[2].on_cpu = true;
  ASSERT_EQ(choose(rows, nullptr, &chosen), CUFLASH_SUCCESS);
  EXPECT_STREQ(chosen->name, "a");
  EXPECT_EQ(choose(rows, "b", &chosen), CUFLASH_ERROR_UNSUPPORTED);
  EXPECT_EQ(choose(rows, "c", &chosen), CUFLASH_ERROR_UNSUPPORTED);
}

}  // namespace
}  // namespace cuflash
