// One captured decode, replayed with whatever lengths and page tables lie on the device: each time the bits of an eager call.
#include "kernels/caches.hpp"
#include "kernels/cuda/graph.hpp"
#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

constexpr auto kDecode = Operation::kDecode;

class Graphs_cuda : public testing::Test {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(Device::kCuda); }

  static std::vector<int32_t> random_lengths(Random& random, const Case& c) {
    std::vector<int32_t> lengths;
    for (int64_t b = 0; b < c.shape.batch; ++b)
      lengths.push_back(static_cast<int32_t>(random.below(c.shape.len_k + 1)));
    return lengths;
  }

  // Captures the call, then compares `replays` launches of the graph with eager ones; change(random) puts new data on the
  // device before each.
  template <class F>
  static void replay(Call& call, int replays, F change) {
    const Stream stream;
    const Graph graph(
        stream, [&] { EXPECT_EQ(call.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error(); });
    Random random(1);
    for (int n = 0; n < replays && !HasFailure(); ++n) {
      SCOPED_TRACE(n);
      change(random);
      call.poison_outputs();
      CUDA_OK(cudaDeviceSynchronize());
      const cuflash_status_t status = call.launch(stream);
      CUDA_OK(cudaStreamSynchronize(stream));
      const Outcome eager = call.collect(status);
      EXPECT_EQ(eager.status, CUFLASH_SUCCESS) << eager.message;
      call.poison_outputs();
      CUDA_OK(cudaDeviceSynchronize());
      graph.launch(stream);
      const Outcome replayed = call.collect(CUFLASH_SUCCESS);
      EXPECT_EQ(replayed.damage, "");
      expect_same_bits(replayed.results, eager.results);
    }
  }
};

TEST_F(Graphs_cuda, P36_ReplaysOfAPagedDecode) {
  int ran = 0;
  for (const int32_t splits : {0, 5})
    for (const std::string& kernel : kernels_of(kDecode, Device::kCuda)) {
      Case c = make_case(Device::kCuda, kDecode, {4, 8, 2, 2, 300, 64}, causal_mask());
      c.dtype = Dtype::kBf16;
      c.kernel = kernel;
      c.num_splits = splits;
      c.lengths = {300, 300, 300, 300};
      const Inputs in = make_inputs(c, DataKind::kNormal);
      PoolSpec spec;
      spec.page_size = 7;
      Pool pool(c, in, spec);
      Call call(c, in);
      pool.install(call);
      size_t bytes = 0;
      const cuflash_status_t asked = cuflash_decode_workspace_size(
          handle_of(c.device), &call.problem(), &call.cache(), &bytes);
      if (asked == CUFLASH_ERROR_UNSUPPORTED) continue;
      SCOPED_TRACE(describe(c));
      ++ran;
      const std::vector<int32_t> ids = pool.pages().ids();
      const int64_t columns = call.cache().block_table_stride;
      replay(call, 1000, [&](Random& random) {
        const std::vector<int32_t> lengths = random_lengths(random, c);
        std::vector<int32_t> table = ids;
        for (int64_t b = 0; b < c.shape.batch; ++b)
          for (int64_t n = 0; n < columns; ++n)
            if (n * spec.page_size >= lengths[static_cast<size_t>(b)])
              table[static_cast<size_t>(b * columns + n)] = static_cast<int32_t>(random.bits());
        call.set_lengths(lengths);
        pool.pages().set_ids(table);
      });
      EXPECT_TRUE(pool.unchanged());
    }
  EXPECT_GE(ran, 2);
}

TEST_F(Graphs_cuda, P36_ReplaysOfAContiguousDecode) {
  for (const int32_t splits : {0, 5})
    for (const uint32_t flags : {uint32_t{0}, uint32_t{CUFLASH_PROBLEM_BATCH_INVARIANT}}) {
      Case base = make_case(Device::kCuda, kDecode, {4, 8, 2, 2, 2500, 64}, causal_mask());
      base.num_splits = splits;
      base.flags = flags;
      base.lengths = {2500, 2500, 2500, 2500};
      on_every_family(base, kEveryDtype, [](const Case& c) {
        Call call(c, make_inputs(c, DataKind::kNormal));
        replay(call, 100, [&](Random& random) { call.set_lengths(random_lengths(random, c)); });
      });
    }
}

}  // namespace
}  // namespace cuflash_test
