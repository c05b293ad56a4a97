// The positional functions: the older symbols' check order and meaning, and that all of them are the struct calls.
#include <limits>

#include "api/problem.hpp"
#include "support/runner.hpp"

namespace cuflash_test {
namespace {

// Positional functions use the default device.
class Positional : public testing::Test {
 protected:
  void SetUp() override { cuflash_set_default_device(CUFLASH_DEVICE_CPU); }
  void TearDown() override { cuflash_set_default_device(CUFLASH_DEVICE_CURRENT); }
};

struct Older {
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8, 0.5f), o = q, lse = q;
  const float *pq = q.data(), *pk = q.data(), *pv = q.data();
  float *po = o.data(), *pl = lse.data();
  int32_t batch = 2, heads = 3, len = 4, dim = 8, causal = 0;
  float scale = 1;
  cuflash_status_t forward() const {
    return cuflash_attention_forward_f32(pq, pk, pv, po, pl, batch, heads, len, dim, scale, causal,
                                         nullptr);
  }
  cuflash_status_t backward() const {
    std::vector<float> dq(q.size()), dk(q.size()), dv(q.size());
    return cuflash_attention_backward_f32(pq, pk, pv, po, pl, q.data(), dq.data(), dk.data(),
                                          dv.data(), batch, heads, len, dim, scale, causal,
                                          nullptr);
  }
  cuflash_status_t decode() const {
    return cuflash_attention_decode_f32(pq, pk, pv, po, pl, batch, heads, len, dim, scale, 0,
                                        nullptr);
  }
  void expect(cuflash_status_t status) const {
    EXPECT_EQ(forward(), status) << cuflash_last_error();
    EXPECT_EQ(backward(), status) << cuflash_last_error();
    EXPECT_EQ(decode(), status) << cuflash_last_error();
  }
};

TEST_F(Positional, ChecksInTheOlderOrder) {
  Older().expect(CUFLASH_SUCCESS);
  // Each line spoils one thing more than the next: the first check that fails decides.
  Older all;
  all.pk = nullptr;
  all.heads = 0;
  all.dim = 300;
  all.scale = -1;
  all.expect(CUFLASH_ERROR_NULL_POINTER);
  all.pk = all.pq;
  all.expect(CUFLASH_ERROR_INVALID_DIMENSION);
  all.heads = 3;
  all.expect(CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
  all.dim = 8;
  all.expect(CUFLASH_ERROR_INVALID_DIMENSION);
  all.scale = 1;
  all.expect(CUFLASH_SUCCESS);
}

TEST_F(Positional, OlderSymbolsRefuseEmptyExtents) {
  for (int32_t Older::*extent : {&Older::batch, &Older::heads, &Older::len, &Older::dim})
    for (const int32_t bad : {0, -1}) {
      Older older;
      older.*extent = bad;
      older.expect(CUFLASH_ERROR_INVALID_DIMENSION);
    }
  for (float* Older::*pointer : {&Older::po, &Older::pl}) {
    Older older;
    older.*pointer = nullptr;
    older.expect(CUFLASH_ERROR_NULL_POINTER);
  }
  for (const float bad :
       {-0.5f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Older older;
    older.scale = bad;
    older.expect(CUFLASH_ERROR_INVALID_DIMENSION);
  }
  Older zero;
  zero.scale = 0;
  zero.expect(CUFLASH_SUCCESS);
}

TEST_F(Positional, CausalIsALowByte) {
  const auto run = [](int32_t causal) {
    Older older;
    for (size_t n = 0; n < older.q.size(); ++n) older.q[n] = static_cast<float>(n % 11);
    older.causal = causal;
    EXPECT_EQ(older.forward(), CUFLASH_SUCCESS);
    return older.o;
  };
  EXPECT_NE(run(0), run(1));
  EXPECT_EQ(run(1), run(2));
  EXPECT_EQ(run(1), run(0xff));
  EXPECT_EQ(run(0), run(0x7fffff00));
  EXPECT_EQ(run(1), run(static_cast<int32_t>(0xabcdef01)));
}

TEST_F(Positional, GqaFormsTakeEmptyExtentsAndThreeMasks) {
  std::vector<float> x(2 * 4 * 5 * 8, 0.5f), o(x.size(), -77), lse(40, -77);
  const auto forward = [&](int32_t len_q, int32_t len_k, int32_t causal, int32_t heads_kv = 2) {
    return cuflash_attention_forward_gqa_f32(x.data(), x.data(), x.data(), o.data(), lse.data(), 2,
                                             4, heads_kv, len_q, len_k, 8, 1, causal, nullptr);
  };
  for (const int32_t causal : {0, 1, 2}) EXPECT_EQ(forward(3, 5, causal), CUFLASH_SUCCESS);
  for (const int32_t causal : {-1, 3, 257})
    EXPECT_EQ(forward(3, 5, causal), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(forward(0, 5, 0), CUFLASH_SUCCESS);
  EXPECT_EQ(forward(3, 0, 0), CUFLASH_SUCCESS);
  EXPECT_EQ(forward(3, 5, 0, 3), CUFLASH_ERROR_DIMENSION_MISMATCH);
  EXPECT_EQ(forward(-1, 5, 0), CUFLASH_ERROR_INVALID_DIMENSION);
  EXPECT_EQ(cuflash_attention_forward_gqa_f32(x.data(), x.data(), x.data(), o.data(), nullptr, 2, 4,
                                              2, 3, 5, 8, 1, 0, nullptr),
            CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_attention_decode_gqa_f32(x.data(), x.data(), x.data(), o.data(), nullptr,
                                             nullptr, 2, 4, 2, 3, 5, 8, 1, 0, 2000, nullptr),
            CUFLASH_ERROR_INVALID_VALUE);
}

// Every positional function against the struct call with the same numbers.
class PositionalDtype : public Positional, public testing::WithParamInterface<Dtype> {};

TEST_P(PositionalDtype, IsTheStructCall) {
  const Dtype dtype = GetParam();
  for (const int32_t causal : {0, 1, 2})
    for (const Operation operation :
         {Operation::kForward, Operation::kBackward, Operation::kDecode})
      for (const bool grouped : {false, true}) {
        if (!grouped && causal == 2) continue;  // the older causal is a truth value
        Case c;
        c.operation = operation;
        c.dtype = dtype;
        c.shape = {2, 4, grouped ? 2 : 4, grouped ? 3 : 7, 7, 16};
        if (operation == Operation::kDecode && !grouped) c.shape.len_q = 1;
        if (causal && !(operation == Operation::kDecode && !grouped))
          c.mask = causal_mask(causal == 2 ? CUFLASH_ALIGN_TOP_LEFT : CUFLASH_ALIGN_BOTTOM_RIGHT);
        c.scale_set = true;
        c.scale = 0.25f;
        if (operation == Operation::kDecode && grouped) c.lengths = {7, 3};
        if (operation == Operation::kDecode) c.num_splits = 2;
        const Inputs in = make_inputs(c, DataKind::kNormal);
        const Results expected = run_ok(c, in);
        Call call(c, in);
        const auto data = [&](Role role) { return call.tensor(role).data(); };
        float* const lse = static_cast<float*>(data(kLse));
        const int32_t b = 2, hq = 4, hkv = grouped ? 2 : 4, d = 16;
        const int32_t sq = static_cast<int32_t>(c.shape.len_q), sk = 7;
        const int32_t* lengths = call.cache().lengths;
#define CUFLASH_CALL(suffix, T)                                                                    \
  (operation == Operation::kForward                                                                \
       ? (grouped ? cuflash_attention_forward_gqa_##suffix(                                        \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse, b, hq, hkv, sq, \
                        sk, d, 0.25f, causal, nullptr)                                             \
                  : cuflash_attention_forward_##suffix(                                            \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse, b, hq, sk, d,   \
                        0.25f, causal, nullptr))                                                   \
   : operation == Operation::kBackward                                                             \
       ? (grouped ? cuflash_attention_backward_gqa_##suffix(                                       \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse,                 \
                        static_cast<T*>(data(kDo)), static_cast<T*>(data(kDq)),                    \
                        static_cast<T*>(data(kDk)), static_cast<T*>(data(kDv)), b, hq, hkv, sq,    \
                        sk, d, 0.25f, causal, nullptr)                                             \
                  : cuflash_attention_backward_##suffix(                                           \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse,                 \
                        static_cast<T*>(data(kDo)), static_cast<T*>(data(kDq)),                    \
                        static_cast<T*>(data(kDk)), static_cast<T*>(data(kDv)), b, hq, sk, d,      \
                        0.25f, causal, nullptr))                                                   \
       : (grouped ? cuflash_attention_decode_gqa_##suffix(                                         \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse, lengths, b, hq, \
                        hkv, sq, sk, d, 0.25f, causal, 2, nullptr)                                 \
                  : cuflash_attention_decode_##suffix(                                             \
                        static_cast<T*>(data(kQ)), static_cast<T*>(data(kK)),                      \
                        static_cast<T*>(data(kV)), static_cast<T*>(data(kO)), lse, b, hq, sk, d,   \
                        0.25f, 2, nullptr)))
        const cuflash_status_t status = dtype == Dtype::kF32   ? CUFLASH_CALL(f32, float)
                                        : dtype == Dtype::kF16 ? CUFLASH_CALL(f16, void)
                                                               : CUFLASH_CALL(bf16, void);
#undef CUFLASH_CALL
        const Outcome outcome = call.collect(status);
        ASSERT_EQ(outcome.status, CUFLASH_SUCCESS) << outcome.message;
        EXPECT_EQ(outcome.damage, "");
        for (const auto member :
             {&Results::o, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
          EXPECT_EQ((outcome.results.*member).x, (expected.*member).x) << describe(c);
      }
}
INSTANTIATE_TEST_SUITE_P(, PositionalDtype, testing::ValuesIn(kAllDtypes),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace cuflash_test
