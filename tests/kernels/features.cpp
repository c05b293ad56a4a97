// What kernels beyond the plain problem must hold: cases of the list and properties of ragged batches, score modifiers,
// sinks, dropout, own value dims, fp32 outputs and accumulation, on every kernel that takes them. Random products of
// these features are among the draws of grid.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Lengths of sequences of queries and of keys, packed.
Case packed(Device device, Operation operation, const Shape& shape,
            const std::vector<int32_t>& lengths_q, const std::vector<int32_t>& lengths_k,
            const MaskSpec& mask = {}) {
  Case c = make_case(device, operation, shape, mask);
  c.shape.batch = static_cast<int64_t>(lengths_q.size());
  c.shape.len_q = *std::max_element(lengths_q.begin(), lengths_q.end());
  c.shape.len_k = *std::max_element(lengths_k.begin(), lengths_k.end());
  c.lengths_q = lengths_q;
  c.lengths = lengths_k;
  c.packing_q.packed = c.packing_k.packed = true;
  return c;
}

void judge_on_every_kernel(const Case& base, const std::vector<Dtype>& dtypes) {
  on_every_kernel(base, dtypes,
                  [](const Case& c) { expect_accurate(c, make_inputs(c, DataKind::kNormal)); });
}

// ---- few rows of many keys -----------------------------------------------------------------------

class CasesOfFewRows : public DeviceTest {};
CUFLASH_FOR_DEVICES(CasesOfFewRows);

// Kernels may cut the keys into parts, some of which a row does not see.
TEST_P(CasesOfFewRows, OfManyKeys) {
  const int64_t keys = GetParam() == Device::kCpu ? 700 : 5000;
  MaskSpec early = causal_mask(CUFLASH_ALIGN_OFFSET);
  early.offset = 300;
  for (const MaskSpec& mask :
       {MaskSpec{}, causal_mask(), window_mask(keys / 2, 0), window_mask(0, keys / 2), early})
    for (const int64_t dim : {64, 128})
      for (const bool wide : {false, true}) {
        Case c = make_case(GetParam(), Operation::kForward, {2, 4, 2, 70, keys, dim}, mask);
        c.wide = wide;
        judge_on_every_kernel(c, {Dtype::kBf16});
      }
}

TEST_P(CasesOfFewRows, WithModifiedScores) {
  const int64_t keys = GetParam() == Device::kCpu ? 700 : 5000;
  for (const bool sinks : {false, true}) {
    Case c = make_case(GetParam(), Operation::kForward, {1, 4, 2, 70, keys, 64}, causal_mask());
    c.softcap = 20;
    c.slopes = {true, Dtype::kF32};
    if (sinks) c.sinks = Dtype::kF32;
    judge_on_every_kernel(c, {Dtype::kF16});
  }
}

// ---- ragged batches -----------------------------------------------------------------------------

class CasesOfRaggedBatches : public DeviceTest {
 protected:
  Case forward(const Shape& shape, const std::vector<int32_t>& q, const std::vector<int32_t>& k,
               const MaskSpec& mask = {}) const {
    return packed(GetParam(), Operation::kForward, shape, q, k, mask);
  }
  Case backward(const Shape& shape, const std::vector<int32_t>& q, const std::vector<int32_t>& k,
                const MaskSpec& mask = {}) const {
    return packed(GetParam(), Operation::kBackward, shape, q, k, mask);
  }
};
CUFLASH_FOR_DEVICES(CasesOfRaggedBatches);

TEST_P(CasesOfRaggedBatches, B11_SequencesWithoutKeys) {
  for (const int64_t dim : {128, 256}) {
    const Case base =
        forward({1, 1, 1, 1, 1, dim}, {128, 128, 1, 64, 257, 0}, {0, 128, 0, 0, 257, 0});
    on_every_kernel(base, [](const Case& c) {
      const Inputs inputs = make_inputs(c, DataKind::kHash);
      const Results results = run_ok(c, inputs);
      EXPECT_TRUE(judge(c, inputs, results).ok);
      for (const int64_t b : {0, 2, 3})
        for (int64_t row = 0; row < c.rows_of(b); ++row) {
          EXPECT_EQ(results.lse.at(b, 0, row), -kInfinity);
          EXPECT_EQ(results.o.at(b, 0, row, 0), 0);
        }
    });
  }
}

TEST_P(CasesOfRaggedBatches, B70_ManySequencesOfOneToken) {
  const std::vector<int32_t> ones(65536, 1);
  const Case base = backward({1, 1, 1, 1, 1, 8}, ones, ones);
  on_every_kernel(base, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    fill(inputs.q, DataKind::kHash, 1, 1, -1, c.dtype);
    fill(inputs.k, DataKind::kHash, 2, 1, -1, c.dtype);
    set(inputs.d_o, [](auto...) { return 1; });
    add_forward_results(c, inputs);
    const Results results = run_ok(c, inputs);
    const auto zero = [](auto...) { return 0; };
    expect_values("dq", results.dq, zero, c.dtype);
    expect_values("dk", results.dk, zero, c.dtype);
    expect_values(
        "dv", results.dv, [](auto...) { return 1; }, c.dtype);
  });
}

TEST_P(CasesOfRaggedBatches, B87_ManyShortSequences) {
  std::vector<int32_t> lengths(300);
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = static_cast<int32_t>(1 + n * 7 % 3);
  for (const int64_t dim : {32, 64})
    judge_on_every_kernel(backward({1, 2, 2, 1, 1, dim}, lengths, lengths), kEveryDtype);
}

// More tiles than blocks: a kernel may count who took which in the workspace. What is there at first is no matter, but for one
// that is said to be prepared; and that stays so, whatever else used it in between.
TEST_P(CasesOfRaggedBatches, WorkspaceWithGarbageAndPreparedOnce) {
  const int64_t heads = GetParam() == Device::kCpu ? 4 : 64;
  const Case base =
      forward({1, heads, 2, 1, 1, 64}, {70, 3, 0, 130, 33}, {70, 90, 5, 130, 33}, causal_mask());
  Case between = make_case(GetParam(), Operation::kDecode, {2, 4, 2, 1, 300, 64});
  between.num_splits = 3;
  const bool decodes = !kernels_of(Operation::kDecode, GetParam()).empty();
  for (const int64_t dim : {64, 128, 256}) {
    Case sized = base;
    sized.shape.head_dim = dim;
    on_every_kernel(sized, {Dtype::kBf16}, [&](const Case& c) {
      const Inputs inputs = make_inputs(c, DataKind::kHash);
      const Results want = run_ok(c, inputs);
      EXPECT_TRUE(judge(c, inputs, want).ok);
      Call ragged(c, inputs), decode(between, make_inputs(between, DataKind::kHash));
      const size_t words = std::max(ragged.workspace_bytes(), decode.workspace_bytes()) / 4;
      if (ragged.workspace_bytes() == 0) return;
      const Buffer workspace(c.device, 4 * words);
      const auto give = [&](Call& call) {
        call.problem().workspace = workspace.data();
        call.problem().workspace_size = 4 * words;
      };
      const auto check = [&] {
        ragged.poison_outputs();
        const cuflash_status_t status = ragged.launch();
        synchronize(c.device);
        const Outcome outcome = ragged.collect(status);
        EXPECT_EQ(outcome.damage, "");
        expect_same_bits(outcome.results, want);
      };
      give(ragged);
      give(decode);
      for (const uint32_t garbage : {7u, 300u, 0xffffffffu}) {
        DeviceArray<uint32_t> source(c.device, std::vector<uint32_t>(words, garbage));
        ragged.problem().workspace = source.data();
        check();
      }
      give(ragged);
      ASSERT_EQ(
          cuflash_workspace_prepare(handle_of(c.device), workspace.data(), 4 * words, nullptr),
          CUFLASH_SUCCESS)
          << cuflash_last_error();
      for (Call* call : {&ragged, &decode})
        call->problem().flags |= CUFLASH_PROBLEM_WORKSPACE_PREPARED;
      for (int turn = 0; turn < 3; ++turn) {
        check();
        if (decodes) EXPECT_EQ(decode.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
      }
      synchronize(c.device);
      EXPECT_TRUE(workspace.guards_intact());
    });
  }
}

// More keys than L2 holds of all heads: a kernel may take the heads of a sequence in sections, the last of which is smaller.
TEST_P(CasesOfRaggedBatches, SectionsOfHeads) {
  const int32_t keys = GetParam() == Device::kCpu ? 200 : 4096;
  const Case base = forward({1, 9, 9, 1, 1, 256}, {150, 3}, {keys, 100});
  on_every_kernel(base, {Dtype::kBf16}, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.v, [](auto, int64_t head, auto, auto) { return head + 1; });
    const Results results = run_ok(c, inputs);
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t head = 0; head < 9; ++head)
        for (int64_t row = 0; row < c.rows_of(b); ++row) {
          EXPECT_EQ(results.o.at(b, head, row, 200), head + 1);
          EXPECT_NEAR(results.lse.at(b, head, row), std::log(c.keys_of(b)), 1e-5);
        }
  });
}

TEST_P(CasesOfRaggedBatches, B88_LongAndShortSequences) {
  judge_on_every_kernel(backward({1, 2, 2, 1, 1, 64}, {1000, 1, 517}, {1000, 1, 517}),
                        {Dtype::kBf16});
}

TEST_P(CasesOfRaggedBatches, B91_SequencesWithoutQueries) {
  // The report's lengths divided by 16.
  const Case base = backward({1, 4, 1, 1, 1, 256}, {0, 75, 52, 0}, {159, 109, 52, 192});
  on_every_kernel(base, {Dtype::kBf16}, [](const Case& c) {
    const Inputs inputs = make_inputs(c, DataKind::kNormal);
    const Results results = run_ok(c, inputs);
    EXPECT_TRUE(judge(c, inputs, results).ok);
    for (const int64_t b : {0, 3})
      for (int64_t key = 0; key < c.keys_of(b); ++key)
        for (const Tensor* gradient : {&results.dk, &results.dv})
          EXPECT_EQ(gradient->at(b, 0, key, 5), 0);
  });
}

TEST_P(CasesOfRaggedBatches, B92_AtMostOneQuery) {
  const Case base = forward({1, 9, 3, 1, 1, 64}, {0, 1, 0, 1}, {0, 3, 0, 5}, causal_mask());
  on_every_kernel(base, {Dtype::kBf16}, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    const std::vector<int32_t> offsets = c.offsets(false);
    set(inputs.v,
        [&](int64_t b, auto, int64_t key, auto) { return offsets[static_cast<size_t>(b)] + key; });
    const Results results = run_ok(c, inputs);
    EXPECT_EQ(results.o.at(1, 4, 0, 7), 1);
    EXPECT_EQ(results.o.at(3, 8, 0, 7), 5);
    EXPECT_NEAR(results.lse.at(1, 4, 0), std::log(3.0), 1e-6);
    EXPECT_NEAR(results.lse.at(3, 8, 0), std::log(5.0), 1e-6);
  });
}

TEST_P(CasesOfRaggedBatches, B93_FewerTokensThanSequences) {
  const Case base = forward({1, 21, 7, 1, 1, 120}, {0, 0, 0, 1}, {0, 0, 0, 1});
  on_every_kernel(base, {Dtype::kBf16}, [](const Case& c) {
    const Inputs inputs = make_inputs(c, DataKind::kHash);
    const Results results = run_ok(c, inputs);
    for (int64_t head = 0; head < 21; ++head)
      EXPECT_EQ(results.o.at(3, head, 0, 11), inputs.v.at(3, head / 3, 0, 11));
    EXPECT_TRUE(judge(c, inputs, results).ok);
  });
}

// What lies past the last offset, between sequences and before them is NaN and stays as it is: every call is
// checked for that (support/runner.hpp).
TEST_P(CasesOfRaggedBatches, B95_RowsOfNoSequence) {
  for (const Operation operation : {Operation::kForward, Operation::kBackward}) {
    Case base = packed(GetParam(), operation, {1, 1, 1, 1, 1, 32}, {14, 28, 51}, {14, 28, 51});
    base.packing_q = {true, 0, 2};
    base.packing_k = {true, 3, 2};
    judge_on_every_kernel(base, kEveryDtype);
  }
}

// The offsets end where a guard of negative numbers begins.
TEST_P(CasesOfRaggedBatches, B96_NothingIsReadPastTheOffsets) {
  judge_on_every_kernel(forward({1, 2, 2, 1, 1, 64}, {1, 129, 0, 127, 130}, {1, 129, 0, 127, 130}),
                        {Dtype::kF16});
}

TEST_P(CasesOfRaggedBatches, B97_KeysHaveOffsetsOfTheirOwn) {
  on_every_kernel(forward({1, 1, 1, 1, 1, 32}, {2, 3}, {7, 3}), [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.v, [](int64_t b, auto, int64_t key, auto) { return 7 * b + key; });
    const Results results = run_ok(c, inputs);
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_NEAR(results.o.at(0, 0, row, 3), 3, 1e-6);
      EXPECT_NEAR(results.lse.at(0, 0, row), std::log(7.0), 1e-6);
    }
    for (int64_t row = 0; row < 3; ++row) {
      EXPECT_NEAR(results.o.at(1, 0, row, 3), 8, 1e-6);
      EXPECT_NEAR(results.lse.at(1, 0, row), std::log(3.0), 1e-6);
    }
  });
}

// A larger maximum changes nothing; a smaller one cuts the sequence, as the header says.
TEST_P(CasesOfRaggedBatches, B98_LargestLength) {
  on_every_kernel(forward({1, 1, 1, 1, 1, 16}, {5, 200}, {5, 200}), [](const Case& c) {
    const Inputs inputs = make_inputs(c, DataKind::kHash);
    const Results results = run_ok(c, inputs);
    for (const int64_t longest : {256, 4096}) {
      Call call(c, inputs);
      call.problem().len_q = call.problem().len_k = longest;
      call.use_pool();
      const cuflash_status_t status = call.launch();
      synchronize(c.device);
      expect_same_bits(call.collect(status).results, results);
    }
    Case shorter = c;
    shorter.lengths_q = shorter.lengths = {5, 64};
    Inputs cut = inputs;
    Call call(c, inputs);
    call.problem().len_q = call.problem().len_k = 64;
    call.use_pool();
    const cuflash_status_t status = call.launch();
    synchronize(c.device);
    const Results got = call.collect(status).results;
    const Results expected = oracle(shorter, inputs);
    EXPECT_NEAR(got.o.at(1, 0, 63, 7), expected.o.at(1, 0, 63, 7), 1e-5);
    EXPECT_TRUE(std::isnan(got.o.at(1, 0, 64, 7)));  // untouched
  });
}

class RaggedProperty : public DeviceTest {};
CUFLASH_FOR_DEVICES(RaggedProperty);

// Each sequence as a dense call of its own; offsets, gaps, padding and an empty sequence between change no bit.
TEST_P(RaggedProperty, P29_P30_SequencesAsCallsOfTheirOwn) {
  const std::vector<std::vector<int32_t>> lists[] = {
      {{0, 5, 17, 0}, {3, 9, 40, 0}}, {{1, 1, 1}, {1, 1, 1}}, {{33, 2}, {0, 70}}, {{0, 0}, {0, 0}}};
  for (const Operation operation : {Operation::kForward, Operation::kBackward})
    for (const auto& lengths : lists)
      for (const MaskSpec& mask : {MaskSpec(), causal_mask(), window_mask(3, 2)}) {
        Case base =
            packed(GetParam(), operation, {1, 4, 2, 1, 1, 24}, lengths[0], lengths[1], mask);
        on_every_kernel(base, {Dtype::kBf16}, [&](const Case& c) {
          const Inputs inputs = make_inputs(c, DataKind::kNormal);
          const Results all = run_ok(c, inputs);
          Case gaps = c;
          gaps.packing_q = {true, 2, 1};
          gaps.packing_k = {true, 1, 3};
          expect_same_bits(run_ok(gaps, inputs), all);
          Case padded = c;
          padded.packing_q = padded.packing_k = {};
          expect_same_bits(run_ok(padded, inputs), all);
          for (int64_t b = 0; b < c.shape.batch; ++b) {
            Case one = c;
            one.shape.batch = 1;
            one.shape.len_q = c.rows_of(b);
            one.shape.len_k = c.keys_of(b);
            one.lengths = one.lengths_q = {};
            one.packing_q = one.packing_k = {};
            const auto part = [&](const Tensor& t, int64_t rows) {
              return Tensor::from(1, t.heads, rows, t.dim,
                                  [&](auto, auto h, auto r, auto ch) { return t.at(b, h, r, ch); });
            };
            const int64_t sq = one.shape.len_q, sk = one.shape.len_k;
            if (sq == 0 || sk == 0) one.kernel.clear();  // some kernels leave nothing to others
            Inputs own;
            own.q = part(inputs.q, sq), own.k = part(inputs.k, sk), own.v = part(inputs.v, sk);
            const bool backward = operation == Operation::kBackward;
            if (backward)
              own.d_o = part(inputs.d_o, sq), own.o = part(inputs.o, sq),
              own.lse = part(inputs.lse, sq);
            const Results results = run_ok(one, own);
            if (backward) {
              EXPECT_EQ(results.dq.x, part(all.dq, sq).x);
              EXPECT_EQ(results.dk.x, part(all.dk, sk).x);
              EXPECT_EQ(results.dv.x, part(all.dv, sk).x);
            } else {
              EXPECT_EQ(results.o.x, part(all.o, sq).x);
              EXPECT_EQ(results.lse.x, part(all.lse, sq).x);
            }
          }
        });
      }
}

// Left padding moves the keys in memory and changes no bit.
TEST_P(RaggedProperty, LeftPaddingMovesTheKeys) {
  for (const Operation operation :
       {Operation::kForward, Operation::kBackward, Operation::kDecode}) {
    Case base = make_case(GetParam(), operation, {3, 2, 1, 4, 30, 16}, causal_mask());
    base.lengths = {30, 12, 0};
    base.left_pad = {7, 12, 3};
    Case plain_case = base;
    plain_case.lengths = {23, 0, 0};
    plain_case.left_pad = {};
    on_every_kernel(base, [&](const Case& c) {
      const Inputs inputs = make_inputs(c, DataKind::kNormal);
      Case unpadded = plain_case;
      unpadded.kernel = c.kernel;
      expect_same_bits(run_ok(c, inputs), run_ok(unpadded, inputs));
      EXPECT_TRUE(judge(c, inputs, run_ok(c, inputs)).ok);
    });
  }
}

// Whatever the offsets and lengths are, nothing outside the tensors is touched.
TEST_P(RaggedProperty, GarbageOffsetsStayInside) {
  const std::vector<std::vector<int32_t>> garbage = {
      {5, 3, 9, 2}, {-7, 4, 0x7fffffff, 3}, {8, 8, 8, 8}, {0x7fffffff, 0, 0, 0}, {0, 3, -1, 12}};
  for (const Operation operation : {Operation::kForward, Operation::kBackward}) {
    Case base = packed(GetParam(), operation, {1, 2, 1, 1, 1, 8}, {4, 4, 4}, {4, 4, 4});
    on_every_kernel(base, [&](const Case& c) {
      const Inputs inputs = make_inputs(c, DataKind::kNormal);
      for (const auto& offsets : garbage) {
        const DeviceArray<int32_t> array(c.device, offsets);
        Call call(c, inputs);
        cuflash_problem_t& p = call.problem();
        p.cu_seqlens_q = p.cu_seqlens_k = array.data();
        const cuflash_status_t first = call.launch();
        EXPECT_EQ(first, CUFLASH_SUCCESS) << cuflash_last_error();
        p.flags |= CUFLASH_PROBLEM_LEFT_PADDED;
        p.seqused_q = p.seqused_k = p.leftpad_k = array.data();
        const cuflash_status_t status = call.launch();
        synchronize(c.device);
        EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
        EXPECT_EQ(call.collect(status).damage, "");
      }
    });
  }
}

// ---- score modifiers ----------------------------------------------------------------------------

class CasesOfModifiers : public DeviceTest {};
CUFLASH_FOR_DEVICES(CasesOfModifiers);

TEST_P(CasesOfModifiers, B10_BiasThatMasksARow) {
  for (const Operation operation : {Operation::kForward, Operation::kBackward}) {
    Case base = make_case(GetParam(), operation, {1, 1, 1, 4, 4, 32});
    base.bias = BiasSpec{};
    on_every_kernel(base, [&](const Case& c) {
      Inputs inputs = zero_inputs(c);
      set(inputs.v, [](auto, auto, int64_t key, auto) { return key; });
      set(inputs.bias, [](auto, auto, int64_t row, auto) {
        return row == 1 ? -kInfinity : row == 2 ? -3.4028e38f : 0.0;
      });
      if (operation == Operation::kBackward) {
        set(inputs.d_o, [](auto...) { return 1; });
        add_forward_results(c, inputs);
        const Results results = run_ok(c, inputs);
        for (const Tensor* t : {&results.dq, &results.dk, &results.dv, &results.d_bias})
          for (const double x : t->x) EXPECT_TRUE(std::isfinite(x));
        for (int64_t key = 0; key < 4; ++key) EXPECT_EQ(results.d_bias.at(0, 0, 1, key), 0);
        return;
      }
      const Results results = run_ok(c, inputs);
      EXPECT_EQ(results.o.at(0, 0, 1, 9), 0);
      EXPECT_EQ(results.lse.at(0, 0, 1), -kInfinity);
      EXPECT_EQ(results.o.at(0, 0, 2, 9), 1.5);
      EXPECT_EQ(results.o.at(0, 0, 3, 9), 1.5);
    });
  }
}

TEST_P(CasesOfModifiers, B132_SoftcapComesBeforeTheMask) {
  Case base = make_case(GetParam(), Operation::kForward, {1, 1, 1, 2, 2, 16}, causal_mask());
  base.softcap = 1;
  on_every_kernel(base, kEveryDtype, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.v, [](auto, auto, int64_t key, auto) { return key; });
    const Results results = run_ok(c, inputs);
    EXPECT_EQ(results.o.at(0, 0, 0, 0), 0);
    EXPECT_EQ(results.lse.at(0, 0, 0), 0);
    EXPECT_EQ(results.o.at(0, 0, 1, 0), 0.5);
  });
}

TEST_P(CasesOfModifiers, B133_SoftcapOfHugeScores) {
  for (const Operation operation : {Operation::kForward, Operation::kBackward}) {
    Case base = make_case(GetParam(), operation, {1, 1, 1, 1, 3, 64});
    base.softcap = 50;
    base.scale_set = true;
    base.scale = 1;
    on_every_kernel(base, [&](const Case& c) {
      Inputs inputs = zero_inputs(c);
      constexpr double kScores[] = {5000, 10000, -10000}, kValues[] = {1, 3, 100};
      inputs.q.at(0, 0, 0, 0) = 1;
      for (int64_t key = 0; key < 3; ++key) {
        inputs.k.at(0, 0, key, 0) = kScores[key];
        for (int64_t ch = 0; ch < 64; ++ch) inputs.v.at(0, 0, key, ch) = kValues[key];
      }
      if (operation == Operation::kBackward) {
        set(inputs.d_o, [](auto...) { return 1; });
        add_forward_results(c, inputs);
        const Results results = run_ok(c, inputs);
        for (const Tensor* t : {&results.dq, &results.dk})
          for (const double x : t->x) EXPECT_EQ(x, 0);
        return;
      }
      const Results results = run_ok(c, inputs);
      EXPECT_NEAR(results.o.at(0, 0, 0, 5), 2, 1e-6);
      EXPECT_NEAR(results.lse.at(0, 0, 0), 50.693147, 1e-5);
    });
  }
}

TEST_P(CasesOfModifiers, B135_SoftcapOfRaggedSequences) {
  Case base =
      packed(GetParam(), Operation::kBackward, {1, 1, 1, 1, 1, 128}, {128}, {217}, causal_mask());
  base.softcap = 15;
  judge_on_every_kernel(base, {Dtype::kBf16});
}

// The last row of a prefill is the decode of its token.
TEST_P(CasesOfModifiers, B136_SlopesOfPrefillAndDecode) {
  for (const int64_t heads_kv : {8, 2}) {
    Case prefill =
        make_case(GetParam(), Operation::kForward, {1, 8, heads_kv, 33, 33, 32}, causal_mask());
    prefill.slopes = SlopesSpec{};
    Case decode = prefill;
    decode.operation = Operation::kDecode;
    decode.shape.len_q = 1;
    on_every_kernel(prefill, [&](const Case& c) {
      Inputs inputs = make_inputs(c, DataKind::kNormal);
      set(inputs.slopes,
          [](auto, int64_t head, auto...) { return std::ldexp(1.0, static_cast<int>(-head - 1)); });
      const Results whole = run_ok(c, inputs);
      Inputs last = inputs;
      last.q = Tensor::from(1, 8, 1, 32,
                            [&](auto, auto h, auto, auto ch) { return inputs.q.at(0, h, 32, ch); });
      on_every_kernel(decode, [&](const Case& d) {
        const Results one = run_ok(d, last);
        for (int64_t head = 0; head < 8; ++head) {
          EXPECT_NEAR(one.lse.at(0, head, 0), whole.lse.at(0, head, 32), 1e-5);
          EXPECT_NEAR(one.o.at(0, head, 0, 3), whole.o.at(0, head, 32, 3), 1e-5);
        }
      });
    });
  }
}

TEST_P(CasesOfModifiers, B137_TheLastKeyIsAtDistance0) {
  Case base = make_case(GetParam(), Operation::kForward, {1, 1, 1, 1, 4, 8});
  base.slopes = SlopesSpec{};
  on_every_kernel(base, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.slopes, [](auto...) { return 1; });
    set(inputs.v, [](auto, auto, int64_t key, auto) { return key; });
    const Results results = run_ok(c, inputs);
    EXPECT_NEAR(results.lse.at(0, 0, 0), 0.4401897, 1e-6);
    EXPECT_NEAR(results.o.at(0, 0, 0, 0), 2.4926527, 1e-6);
  });
}

TEST_P(CasesOfModifiers, B138_SlopesOfQueryHeadsAndBatches) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const bool per_batch : {false, true}) {
      Case base = make_case(GetParam(), operation, {2, 8, 2, 1, 5, 8});
      base.slopes = SlopesSpec{per_batch, Dtype::kF32};
      on_every_kernel(base, [&](const Case& c) {
        Inputs inputs = zero_inputs(c);
        set(inputs.slopes,
            [](int64_t b, int64_t head, auto...) { return head + 0.5 * static_cast<double>(b); });
        expect_lse(run_ok(c, inputs), [&](int64_t b, int64_t head, auto) {
          const double slope =
              static_cast<double>(head) + (per_batch ? 0.5 * static_cast<double>(b) : 0);
          double sum = 0;
          for (int d = 0; d < 5; ++d) sum += std::exp(-slope * d);
          return std::log(sum);
        });
      });
    }
}

TEST_P(CasesOfModifiers, B140_SinksOfEmptyRowsAndLargeSinks) {
  Case empty = make_case(GetParam(), Operation::kDecode, {1, 1, 1, 1, 8, 16});
  empty.sinks = Dtype::kF32;
  empty.lengths = {0};
  on_every_kernel(empty, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    inputs.sinks.at(0, 0, 0) = 0.5;
    const Results results = run_ok(c, inputs);
    EXPECT_EQ(results.o.at(0, 0, 0, 3), 0);
    EXPECT_EQ(results.lse.at(0, 0, 0), 0.5);
  });
  Case large = make_case(GetParam(), Operation::kForward, {1, 1, 1, 1, 128, 16});
  large.sinks = Dtype::kF32;
  on_every_kernel(large, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    inputs.sinks.at(0, 0, 0) = 100;
    set(inputs.v, [](auto...) { return 1; });
    const Results results = run_ok(c, inputs);
    EXPECT_EQ(results.lse.at(0, 0, 0), 100);
    EXPECT_NEAR(results.o.at(0, 0, 0, 3), 128 * std::exp(-100), 1e-43);
  });
}

TEST_P(CasesOfModifiers, B141_B142_TheSinkCountsOnce) {
  for (const int32_t splits : {1, 3, 5}) {
    Case base = make_case(GetParam(), Operation::kDecode, {1, 1, 1, 1, 30, 64}, window_mask(11, 0));
    base.sinks = Dtype::kF32;
    base.num_splits = splits;
    on_every_kernel(base, [](const Case& c) {
      Inputs inputs = zero_inputs(c);
      inputs.sinks.at(0, 0, 0) = std::log(4.0f);
      set(inputs.v, [](auto...) { return 1; });
      const Results results = run_ok(c, inputs);
      EXPECT_NEAR(results.o.at(0, 0, 0, 3), 0.75, 1e-6);
      EXPECT_NEAR(results.lse.at(0, 0, 0), 2.772589, 1e-6);
    });
  }
  Case base = make_case(GetParam(), Operation::kBackward, {2, 2, 1, 3, 12, 64});
  base.sinks = Dtype::kF32;
  on_every_kernel(base, [](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.sinks, [](auto...) { return std::log(4.0f); });
    set(inputs.v, [](auto...) { return 1; });
    set(inputs.d_o, [](auto...) { return 1; });
    add_forward_results(c, inputs);
    const Results results = run_ok(c, inputs);
    for (int64_t head = 0; head < 2; ++head)
      EXPECT_NEAR(results.d_sinks.at(0, head, 0), -12.0 * 6, 1e-4);
    EXPECT_NEAR(results.dv.at(1, 0, 7, 9), 6 / 16.0, 1e-6);  // three rows of two heads
  });
}

// With v = I the output is the mask, and with dO = I so is dV, transposed.
TEST_P(CasesOfModifiers, B143_DropoutOfForwardAndBackward) {
  constexpr int64_t kLength = 48;
  const Shape shape{2, 2, 2, kLength, kLength, kLength};
  Case forward = make_case(GetParam(), Operation::kForward, shape);
  forward.dropout = {0.5f, 0x123456789abcdefu, 77};
  Case backward = forward;
  backward.operation = Operation::kBackward;
  const auto identity = [](auto, auto, int64_t row, int64_t ch) { return row == ch; };
  on_every_kernel(forward, kEveryDtype, [&](const Case& c) {
    Inputs inputs = zero_inputs(c);
    set(inputs.v, identity);
    const Results results = run_ok(c, inputs);
    int64_t kept = 0;
    Tensor o = results.o;
    o.for_each([&](int64_t b, int64_t h, int64_t row, int64_t key, double& value) {
      EXPECT_EQ(value == 0, c.dropout.drops(b * 2 + h, row, key));
      kept += value != 0;
    });
    const double all = 4.0 * kLength * kLength;
    EXPECT_NEAR(static_cast<double>(kept) / all, 0.5, 4 * 0.5 / std::sqrt(all));
    backward.dtype = c.dtype;
    on_every_kernel(backward, [&](const Case& d) {
      Inputs in = zero_inputs(d);
      set(in.d_o, identity);
      add_forward_results(d, in);
      Tensor dv = run_ok(d, in).dv;
      dv.for_each([&](int64_t b, int64_t h, int64_t key, int64_t row, double& value) {
        EXPECT_EQ(value == 0, o.at(b, h, row, key) == 0);
      });
    });
  });
}

// The seed and the offset may lie on the device.
TEST_P(CasesOfModifiers, B143_DropoutSeedOnTheDevice) {
  Case base = make_case(GetParam(), Operation::kForward, {1, 2, 1, 9, 33, 16});
  base.dropout = {0.3f, 11, 12};
  on_every_kernel(base, [](const Case& c) {
    const Inputs inputs = make_inputs(c, DataKind::kNormal);
    const Results by_value = run_ok(c, inputs);
    const DeviceArray<uint64_t> numbers(c.device, {11, 12});
    Call call(c, inputs);
    call.problem().dropout_seed = call.problem().dropout_offset = 0;
    call.problem().dropout_seed_ptr = numbers.data();
    call.problem().dropout_offset_ptr = numbers.data() + 1;
    const cuflash_status_t status = call.launch();
    synchronize(c.device);
    expect_same_bits(call.collect(status).results, by_value);
  });
}

class ModifierProperty : public DeviceTest {};
CUFLASH_FOR_DEVICES(ModifierProperty);

TEST_P(ModifierProperty, P42_HugeSoftcapIsNone) {
  Case base = make_case(GetParam(), Operation::kForward, {1, 2, 1, 20, 50, 32}, causal_mask());
  on_every_kernel(base, [](const Case& c) {
    const Inputs inputs = make_inputs(c, DataKind::kNormal);
    Case capped = c;
    capped.softcap = 1e6f;
    if (!accepts(capped, capped.kernel)) return;
    const Results a = run_ok(c, inputs), b = run_ok(capped, inputs);
    for (size_t n = 0; n < a.o.x.size(); ++n) EXPECT_NEAR(a.o.x[n], b.o.x[n], 1e-5);
    Case low = c;
    low.softcap = 0.25f;
    for (const double lse : run_ok(low, inputs).lse.x) EXPECT_LE(lse, 0.25 + std::log(50.0) + 1e-6);
  });
}

// A sink of -infinity is none; any other is a further key of that score whose value is 0.
TEST_P(ModifierProperty, P44_SinksAreKeysWithoutValues) {
  Case base = make_case(GetParam(), Operation::kForward, {1, 2, 2, 5, 20, 8});
  base.sinks = Dtype::kF32;
  base.bias = BiasSpec{};
  on_every_kernel(base, [](const Case& c) {
    Inputs inputs = make_inputs(c, DataKind::kNormal);
    set(inputs.bias, [](auto, auto, auto, int64_t key) { return key == 19 ? -kInfinity : 0.0; });
    const Results with_sink = run_ok(c, inputs);
    Case without = c;
    without.sinks.reset();
    Inputs further = inputs;
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t ch = 0; ch < 8; ++ch)
        further.k.at(0, head, 19, ch) = further.v.at(0, head, 19, ch) = 0;
      for (int64_t row = 0; row < 5; ++row)
        further.bias.at(0, head, row, 19) = inputs.sinks.at(0, head, 0);
    }
    const Results with_key = run_ok(without, further);
    for (size_t n = 0; n < with_key.o.x.size(); ++n)
      EXPECT_NEAR(with_sink.o.x[n], with_key.o.x[n], 1e-6);
    for (size_t n = 0; n < with_key.lse.x.size(); ++n)
      EXPECT_NEAR(with_sink.lse.x[n], with_key.lse.x[n], 1e-6);
    set(inputs.sinks, [](auto...) { return -kInfinity; });
    expect_same_bits(run_ok(c, inputs), run_ok(without, inputs));
  });
}

// The gradient of a repeated bias is the sum of those of its copies.
TEST_P(ModifierProperty, GradientsOfRepeatedBiases) {
  Case base = make_case(GetParam(), Operation::kBackward, {2, 4, 2, 6, 10, 8}, causal_mask());
  base.bias = BiasSpec{};
  on_every_kernel(base, [](const Case& c) {
    for (int repeated = 1; repeated < 8; ++repeated) {
      Case one = c;
      one.bias =
          BiasSpec{(repeated & 1) == 0, (repeated & 2) == 0, (repeated & 4) == 0, Dtype::kF32};
      const Inputs inputs = make_inputs(one, DataKind::kNormal);
      const Tensor sums = run_ok(one, inputs).d_bias;
      const auto at = [&](const Tensor& t, int64_t b, int64_t h, int64_t r, int64_t key) {
        return t.index(t.batch == 1 ? 0 : b, t.heads == 1 ? 0 : h, t.rows == 1 ? 0 : r, key);
      };
      Inputs copies = inputs;
      copies.bias = Tensor::from(2, 4, 6, 10, [&](auto b, auto h, auto r, auto key) {
        return inputs.bias.x[at(inputs.bias, b, h, r, key)];
      });
      Tensor added(sums.batch, sums.heads, sums.rows, sums.dim);
      Tensor single = run_ok(c, copies).d_bias;
      single.for_each([&](auto b, auto h, auto r, auto key, double& x) {
        added.x[at(added, b, h, r, key)] += x;
      });
      for (size_t n = 0; n < added.x.size(); ++n) EXPECT_NEAR(sums.x[n], added.x[n], 1e-5);
    }
  });
}

// ---- shapes and outputs -------------------------------------------------------------------------

class FurtherOutputs : public DeviceTest {};
CUFLASH_FOR_DEVICES(FurtherOutputs);

TEST_P(FurtherOutputs, HeadDimsOfTheValues) {
  struct Dims {
    int64_t qk, v;
  };
  for (const Operation operation : {Operation::kForward, Operation::kBackward, Operation::kDecode})
    for (const Dims& dims :
         {Dims{192, 128}, {128, 64}, {64, 256}, {1, 200}, {576, 512}, {512, 512}}) {
      if (operation == Operation::kBackward && std::max(dims.qk, dims.v) > 256) continue;
      Case base =
          make_case(GetParam(), operation, {1, 4, 2, 9, 70, dims.qk, dims.v}, causal_mask());
      if (operation == Operation::kDecode) base.num_splits = 3;
      judge_on_every_kernel(base, kEveryDtype);
    }
}

// V is the first channels of K: the same bits as with a copy.
TEST_P(FurtherOutputs, ValuesThatAreAPrefixOfTheKeys) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode}) {
    const Case base = make_case(GetParam(), operation, {2, 4, 1, 3, 40, 576, 512}, causal_mask());
    on_every_kernel(base, {Dtype::kBf16}, [](const Case& c) {
      Inputs inputs = make_inputs(c, DataKind::kNormal);
      inputs.v = Tensor::from(
          2, 1, 40, 512, [&](auto b, auto h, auto r, auto ch) { return inputs.k.at(b, h, r, ch); });
      const Results copied = run_ok(c, inputs);
      Call call(c, inputs);
      call.problem().flags |= CUFLASH_PROBLEM_V_IS_K_PREFIX;
      call.problem().v = call.cache().v = {};
      const cuflash_status_t status = call.launch();
      synchronize(c.device);
      EXPECT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
      expect_same_bits(call.collect(status).results, copied);
    });
  }
}

// Two halves of the keys, the second folded into the first, give what all keys give.
TEST_P(FurtherOutputs, AccumulatedResults) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode})
    for (const int32_t splits : {1, 3}) {
      if (operation == Operation::kForward && splits > 1) continue;
      Case base = make_case(GetParam(), operation, {2, 2, 1, 7, 20, 24});
      base.wide = true;
      base.flags = CUFLASH_PROBLEM_ACCUMULATE;
      base.num_splits = splits;
      on_every_kernel(base, kEveryDtype, [](const Case& c) {
        Case whole = c;
        whole.flags = 0;
        whole.shape.len_k = 40;
        const Inputs all = make_inputs(whole, DataKind::kNormal);
        const auto half = [&](const Tensor& t, int64_t first) {
          return Tensor::from(2, 1, 20, 24, [&](auto b, auto h, auto r, auto ch) {
            return t.at(b, h, first + r, ch);
          });
        };
        Inputs inputs = all;
        // At first there is nothing: an LSE of -infinity, and O may be anything.
        set(inputs.o = Tensor(2, 2, 7, 24), [](auto...) { return std::nan(""); });
        set(inputs.lse = Tensor(2, 2, 7, 1), [](auto...) { return -kInfinity; });
        for (const int64_t first : {0, 20}) {
          inputs.k = half(all.k, first);
          inputs.v = half(all.v, first);
          const Results results = run_ok(c, inputs);
          inputs.o = results.o;
          inputs.lse = results.lse;
        }
        const Results expected = oracle(whole, all);
        for (size_t n = 0; n < expected.o.x.size(); ++n)
          EXPECT_NEAR(inputs.o.x[n], expected.o.x[n], 1e-5);
        for (size_t n = 0; n < expected.lse.x.size(); ++n)
          EXPECT_NEAR(inputs.lse.x[n], expected.lse.x[n], 1e-5);
      });
    }
}

// What a cache has room for decides how many parts there are, but not what is folded into the running result.
TEST_P(FurtherOutputs, AccumulatedResultsOfAnyCapacity) {
  Case tight = make_case(GetParam(), Operation::kDecode, {1, 2, 1, 3, 900, 24}, causal_mask());
  tight.wide = true;
  tight.flags = CUFLASH_PROBLEM_ACCUMULATE | CUFLASH_PROBLEM_BATCH_INVARIANT;
  tight.lengths = {900};
  on_every_kernel(tight, kEveryDtype, [](const Case& c) {
    Inputs inputs = make_inputs(c, DataKind::kNormal);
    inputs.o = Tensor::from(1, 2, 3, 24, [](auto, auto h, auto r, auto ch) {
      return static_cast<double>(h + 2 * r - ch) / 8;
    });
    inputs.lse = Tensor::from(
        1, 2, 3, 1, [](auto, auto h, auto r, auto) { return static_cast<double>(h + r) + 6.5; });
    const Results expected = run_ok(c, inputs);
    Case roomy = c;
    roomy.shape.len_k = 3000;
    Inputs more = make_inputs(roomy, DataKind::kNormal, 2);
    more.q = inputs.q, more.o = inputs.o, more.lse = inputs.lse;
    for (const auto member : {&Inputs::k, &Inputs::v})
      (inputs.*member).for_each([&](auto b, auto h, auto r, auto ch, const double& x) {
        (more.*member).at(b, h, r, ch) = x;
      });
    const Results results = run_ok(roomy, more);
    EXPECT_EQ(results.o.x, expected.o.x);
    EXPECT_EQ(results.lse.x, expected.lse.x);
  });
}

TEST_P(FurtherOutputs, AccumulatedGradients) {
  Case base = make_case(GetParam(), Operation::kBackward, {2, 4, 2, 9, 13, 16}, causal_mask());
  base.wide = true;
  base.gradient_flags = CUFLASH_GRADIENTS_ACCUMULATE;
  on_every_kernel(base, kEveryDtype, [](const Case& added) {
    Case c = added;
    c.gradient_flags = 0;
    Inputs inputs = make_inputs(c, DataKind::kNormal);
    const Results written = run_ok(c, inputs);
    inputs.dq = written.dq;
    inputs.dk = written.dk;
    inputs.dv = written.dv;
    const Results twice = run_ok(added, inputs);
    for (Tensor Results::*member : {&Results::dq, &Results::dk, &Results::dv})
      for (size_t n = 0; n < (twice.*member).x.size(); ++n)
        EXPECT_EQ((twice.*member).x[n], 2 * (written.*member).x[n]);
  });
}

// delta comes back as rowsum(O * dO), and given back again it leads to the same bits without O.
TEST_P(FurtherOutputs, DeltaOutAndIn) {
  Case base = packed(GetParam(), Operation::kBackward, {1, 4, 2, 1, 1, 16}, {9, 0, 4}, {9, 3, 30});
  base.d_lse = true;
  on_every_kernel(base, kEveryDtype, [](const Case& c) {
    Inputs inputs = make_inputs(c, DataKind::kNormal);
    const Results without = run_ok(c, inputs);
    EXPECT_TRUE(judge(c, inputs, without).ok);
    Case wanted = c;
    wanted.delta = Delta::kWanted;
    Results results = run_ok(wanted, inputs);
    expect_same_bits(results, without);
    results.delta.for_each([&](auto b, auto h, auto r, auto, double& delta) {
      double sum = 0;
      for (int64_t ch = 0; ch < 16; ++ch)
        sum += inputs.o.at(b, h, r, ch) * inputs.d_o.at(b, h, r, ch);
      EXPECT_NEAR(delta, r < c.rows_of(b) ? sum : 0, 1e-5);
    });
    Case given = c;
    given.delta = Delta::kGiven;
    inputs.delta = results.delta;
    expect_same_bits(run_ok(given, inputs), without);
  });
}

// ---- weights ------------------------------------------------------------------------------------

class Weights : public DeviceTest {
 protected:
  // The probabilities of all rows, or of the `chosen`.
  static Tensor run(const Case& c, const Inputs& inputs, const Tensor& lse,
                    const std::vector<int32_t>& chosen) {
    Case stored = c;  // q, k and the LSE where they are inputs of a backward pass
    stored.operation = Operation::kBackward;
    Inputs in = inputs;
    in.d_o = Tensor(c.shape.batch, c.shape.heads_q, c.shape.len_q, c.shape.dim_v());
    in.o = in.d_o;
    in.lse = lse;
    Call call(stored, in);
    const int64_t rows = chosen.empty() ? c.shape.len_q : static_cast<int64_t>(chosen.size());
    const Extents extents{c.shape.batch, c.shape.heads_q, rows, c.shape.len_k};
    StridedTensor out(c.device, Dtype::kF32, extents, dense_layout(extents));
    const DeviceArray<int32_t> list(c.device, chosen);
    cuflash_weights_t weights;
    cuflash_weights_init(&weights, sizeof weights);
    weights.weights = static_cast<float*>(out.data());
    weights.rows = list.data();
    weights.num_rows = static_cast<int64_t>(chosen.size());
    EXPECT_EQ(cuflash_attention_weights(handle_of(c.device), &call.problem(), &weights, nullptr),
              CUFLASH_SUCCESS)
        << cuflash_last_error();
    synchronize(c.device);
    EXPECT_TRUE(out.surroundings_intact());
    return out.read();
  }
};
CUFLASH_FOR_DEVICES(Weights);

// P V is O, and each row that sees a key sums to 1 (less what the sink takes).
TEST_P(Weights, TimesTheValuesAreTheOutput) {
  for (const bool ragged : {false, true})
    for (const Dtype dtype : kAllDtypes) {
      Case c = make_case(GetParam(), Operation::kForward, {3, 4, 2, 9, 20, 16}, causal_mask());
      if (dtype != Dtype::kBf16) c.tree = random_tree(c.shape, 11, ragged, 1);
      c.dtype = dtype;
      c.wide = true;
      c.kernel = "reference";
      c.softcap = 3;
      c.slopes = SlopesSpec{};
      c.bias = BiasSpec{};
      c.sinks = Dtype::kF32;
      if (ragged) {
        c.lengths_q = {9, 0, 4};
        c.lengths = {20, 5, 2};
        c.packing_q = {true, 1, 2};
        c.packing_k.packed = true;
      }
      const Inputs inputs = make_inputs(c, DataKind::kNormal);
      Results results = run_ok(c, inputs);
      const std::vector<int32_t> chosen = {3, 0, 8, -1, 100, 3};
      const Tensor all = run(c, inputs, results.lse, {}),
                   some = run(c, inputs, results.lse, chosen);
      results.o.for_each([&](auto b, auto h, auto r, auto ch, double& o) {
        double sum = 0;
        for (int64_t key = 0; key < c.keys_of(b); ++key)
          sum += all.at(b, h, r, key) * inputs.v.at(b, h / 2, key, ch);
        EXPECT_NEAR(sum, o, 1e-5);
      });
      for (int64_t b = 0; b < 3; ++b)
        for (int64_t h = 0; h < 4; ++h)
          for (size_t n = 0; n < chosen.size(); ++n)
            for (int64_t key = 0; key < 20; ++key) {
              const int64_t row = chosen[n];
              const bool exists = row >= 0 && row < c.rows_of(b);
              EXPECT_EQ(some.at(b, h, static_cast<int64_t>(n), key),
                        exists ? all.at(b, h, row, key) : 0);
            }
    }
}

}  // namespace
}  // namespace cuflash_test
