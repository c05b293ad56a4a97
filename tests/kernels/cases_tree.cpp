// Masks by bits, as token trees have them, over the last keys of each sequence.
#include <cmath>
#include <limits>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class CasesOfTrees : public FullFamilyTest {
 protected:
  Case make(Operation operation, const Shape& shape, const MaskSpec& mask = {}) const {
    return make_case(GetParam(), operation, shape, mask);
  }

  // f(sequence, row, bit)
  template <class F>
  static TreeSpec tree_of(const Shape& s, int64_t bits, F f) {
    TreeSpec tree{bits, true, {}};
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t row = 0; row < s.len_q; ++row)
        for (int64_t bit = 0; bit < bits; ++bit) tree.shown.push_back(f(b, row, bit));
    return tree;
  }
};
CUFLASH_FOR_FULL_FAMILIES(CasesOfTrees);

// Tokens of which each has the one before as its parent: a causal mask.
TEST_P(CasesOfTrees, ChainIsCausal) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const int64_t rows : {1, 2, 5, 31, 32, 33, 63, 64, 65, 70})
      for (const Dtype dtype : kAllDtypes) {
        Case causal = make(operation, {2, 4, 2, rows, 150, 32}, causal_mask());
        causal.dtype = dtype;
        causal.lengths = {150, 90};
        causal.kernel = GetParam().family;
        causal.num_splits = 1;
        Case chain = causal;
        chain.mask = {};
        chain.tree_spare = rows % 3;
        chain.tree =
            tree_of(chain.shape, rows, [](auto, int64_t row, int64_t bit) { return bit <= row; });
        const Inputs inputs = make_inputs(causal, DataKind::kNormal);
        expect_same_bits(run_ok(chain, inputs), run_ok(causal, inputs));
      }
}

// Each token sees itself and its ancestors in a random tree, and all of the cache before them.
TEST_P(CasesOfTrees, TreesOfTokens) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const int64_t rows : {7, 31, 32, 33, 64, 65}) {
      Case base = make(operation, {2, 6, 2, rows, 200, 40});
      base.lengths = {200, 130};
      base.tree = tree_of(base.shape, rows, [](auto...) { return 0; });
      Random random(static_cast<uint64_t>(rows));
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t row = 0; row < rows; ++row) {
          uint8_t* own = &base.tree->shown[static_cast<size_t>((b * rows + row) * rows)];
          if (row > 0) {
            const int64_t parent = random.below(row);
            std::copy_n(own - (row - parent) * rows, rows, own);
          }
          own[row] = 1;
        }
      on_every_kernel(base, kEveryDtype,
                      [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kNormal)); });
    }
}

// A row whose keys are all hidden; one that sees only keys without bits; more bits than keys.
TEST_P(CasesOfTrees, HiddenRows) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const bool sinks : {false, true}) {
      Case base = make(operation, {2, 2, 1, 3, 40, 16});
      base.lengths = {40, 20};
      if (sinks) base.sinks = Dtype::kF32;
      base.tree = tree_of(base.shape, 33, [](auto, int64_t row, auto) { return row == 1; });
      on_every_kernel(base, kEveryDtype, [&](const Case& c) {
        const Inputs inputs = make_inputs(c, DataKind::kNormal);
        const Results results = run_ok(c, inputs);
        EXPECT_TRUE(judge(c, inputs, results).ok);
        for (int64_t head = 0; head < 2; ++head)
          for (const int64_t row : {0, 2}) {  // of the second sequence, whose keys all have bits
            EXPECT_EQ(results.o.at(1, head, row, 3), 0);
            EXPECT_EQ(results.lse.at(1, head, row),
                      sinks ? inputs.sinks.at(0, head, 0) : -kInfinity);
          }
      });
    }
}

// Keys that no row sees hold NaN, and so do their values.
TEST_P(CasesOfTrees, HiddenKeysMayHoldNan) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode}) {
    Case base = make(operation, {1, 2, 2, 4, 100, 24});
    base.tree = tree_of(base.shape, 64, [](auto, auto, int64_t bit) { return bit % 3 != 1; });
    on_every_kernel(base, kEveryDtype, [](const Case& c) {
      Inputs inputs = make_inputs(c, DataKind::kNormal);
      const Results results = run_ok(c, inputs);
      for (Tensor* t : {&inputs.k, &inputs.v})
        t->for_each([](auto, auto, int64_t key, auto, double& value) {
          if (key >= 36 && (key - 36) % 3 == 1) value = std::nan("");
        });
      expect_same_bits(run_ok(c, inputs), results);
    });
  }
}

// Parts of which every key is hidden, at the beginning, in the middle and at the end.
TEST_P(CasesOfTrees, HiddenPartsOfADecode) {
  for (const int64_t first : {0, 40, 80})
    for (const int32_t splits : {1, 3, 5, 7, 60}) {
      Case base = make(Operation::kDecode, {2, 4, 1, 2, 120, 64});
      base.num_splits = splits;
      base.sinks = Dtype::kF32;
      base.tree = tree_of(base.shape, 120, [&](auto, auto, int64_t bit) {
        return bit < first || bit >= first + 40;
      });
      on_every_kernel(base, kEveryDtype,
                      [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kNormal)); });
    }
}

// A window and a causal mask hold beside the bits, which count from the end of each sequence.
TEST_P(CasesOfTrees, WithMasksAndRaggedSequences) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const MaskSpec& mask :
         {causal_mask(), window_mask(9, 2), causal_mask(CUFLASH_ALIGN_TOP_LEFT)})
      for (const int64_t bits : {5, 32, 47, 200}) {
        Case base = make(operation, {3, 4, 2, 9, 90, 20}, mask);
        base.lengths = {90, 0, 33};
        base.lengths_q = {4, 9, 9};
        base.left_pad = {3, 0, 1};
        base.packing_q = {true, 1, 2};
        if (operation == Operation::kForward) base.packing_k = {true, 1, 2};
        base.softcap = 4;
        base.slopes = SlopesSpec{};
        base.bias = BiasSpec{};
        base.tree = random_tree(base.shape, bits, bits != 47, static_cast<uint64_t>(bits));
        base.tree_spare = 2;
        on_every_kernel(base, kEveryDtype, [](const Case& c) {
          expect_accurate(c, make_inputs(c, DataKind::kNormal));
        });
      }
}

// Row strides of 0 give all rows the same bits.
TEST_P(CasesOfTrees, RepeatedRows) {
  Case c = make(Operation::kForward, {2, 2, 1, 6, 50, 16});
  c.kernel = GetParam().family;
  c.tree = tree_of(c.shape, 40, [](int64_t b, auto, int64_t bit) { return (bit + b) % 2; });
  const Inputs inputs = make_inputs(c, DataKind::kNormal);
  Call call(c, inputs);
  call.problem().tree_mask_row_stride = 0;
  const cuflash_status_t status = call.launch();
  synchronize(c.device);
  expect_same_bits(call.collect(status).results, run_ok(c, inputs));
}

}  // namespace
}  // namespace cuflash_test
