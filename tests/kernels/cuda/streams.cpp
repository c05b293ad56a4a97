// Streams and graphs: a call is work on its stream and nothing else, and can be captured and replayed with new data on
// the device.
#include <cuda_runtime_api.h>

#include <thread>

#include "kernels/cuda/graph.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/targets.hpp"
#include "support/append.hpp"

namespace cuflash_test {
namespace {

constexpr auto kForward = Operation::kForward;
constexpr auto kBackward = Operation::kBackward;
constexpr auto kDecode = Operation::kDecode;
constexpr Operation kOperations[] = {kForward, kBackward, kDecode};

class Streams_cuda : public testing::Test {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(Device::kCuda); }
  static Case small(Operation operation) {
    Case c = make_case(Device::kCuda, operation, {2, 4, 2, 33, 130, 64}, causal_mask());
    c.dtype = Dtype::kF16;
    if (operation == kDecode) {
      c.num_splits = 3;
      c.lengths = {130, 77};
    }
    return c;
  }
};

// The inputs arrive on the stream while a kernel in front keeps it busy: right only if the call waits its turn, and
// asynchronous only if it returns before.
TEST_F(Streams_cuda, CallsWaitTheirTurnAndReturnAtOnce) {
  for (const Operation operation : kOperations)
    on_every_kernel(small(operation), [](const Case& c) {
      const Inputs in = make_inputs(c, DataKind::kNormal);
      const Results expected = run_ok(c, in);
      Inputs zero_q = in;
      for (double& q : zero_q.q.x) q = 0;
      Call late(c, zero_q), source(c, in);
      ASSERT_EQ(late.launch(), CUFLASH_SUCCESS);  // loads the kernels
      CUDA_OK(cudaDeviceSynchronize());
      late.poison_outputs();
      CUDA_OK(cudaDeviceSynchronize());
      const Stream stream;
      CUDA_OK(spin(50, stream));
      CUDA_OK(cudaMemcpyAsync(late.tensor(kQ).data(), source.tensor(kQ).data(), in.q.x.size() * 2,
                              cudaMemcpyDeviceToDevice, stream));
      ASSERT_EQ(late.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error();
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << "the call waited";
      CUDA_OK(cudaStreamSynchronize(stream));
      Results got;
      if (c.operation == kBackward) {
        got.dq = late.tensor(kDq).read();
        got.dk = late.tensor(kDk).read();
        got.dv = late.tensor(kDv).read();
      } else {
        got.o = late.tensor(kO).read();
        got.lse = late.tensor(kLse).read();
      }
      expect_same_bits(got, expected);
    });
}

TEST_F(Streams_cuda, P36_CaptureAndReplay) {
  for (const Operation operation : kOperations)
    for (const bool pool : {false, true})
      on_every_kernel(small(operation), [&](const Case& c) {
        const Inputs in = make_inputs(c, DataKind::kNormal);
        const Results expected = run_ok(c, in);
        Call call(c, in);
        if (pool) call.use_pool();
        const Stream stream;
        const Graph graph(stream, [&] {
          EXPECT_EQ(call.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error();
        });
        for (int replay = 0; replay < 3; ++replay) {
          call.poison_outputs();
          CUDA_OK(cudaDeviceSynchronize());
          graph.launch(stream);
          const Outcome outcome = call.collect(CUFLASH_SUCCESS);
          EXPECT_EQ(outcome.damage, "");
          expect_same_bits(outcome.results, expected);
        }
      });
}

TEST_F(Streams_cuda, P36_AppendsReplayWithOtherLengths) {
  AppendCase c;
  c.device = Device::kCuda;
  c.dtype = Dtype::kBf16;
  c.batch = 2, c.heads_q = 4, c.heads_kv = 2, c.len = 3, c.dim = c.dim_v = 64;
  c.max_len = 40, c.page_size = 16;
  c.rotary_dim = 64, c.max_position = 64;
  c.lengths = {0, 7};
  AppendCall call(c);
  const Stream stream;
  const Graph graph(
      stream, [&] { EXPECT_EQ(call.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error(); });
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{0, 7}, {37, 38}, {15, -1}, {1000, 40}, {30, 0}}) {
    call.set_lengths(lengths);
    call.reset();
    CUDA_OK(cudaDeviceSynchronize());
    graph.launch(stream);
    call.expect_right();
  }
}

TEST_F(Streams_cuda, B120_ReplayWithOtherLengths) {
  for (const int splits : {0, 1, 8}) {
    Case c = make_case(Device::kCuda, kDecode, {2, 4, 2, 1, 8192, 64}, causal_mask());
    c.dtype = Dtype::kBf16;
    c.num_splits = splits;
    c.lengths = {64, 64};
    on_every_kernel(c, [](const Case& base) {
      const Inputs in = make_inputs(base, DataKind::kHash);
      Call call(base, in);
      const Stream stream;
      const Graph graph(
          stream, [&] { EXPECT_EQ(call.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error(); });
      for (const std::vector<int32_t>& lengths :
           {std::vector<int32_t>{1, 63}, {64, 65}, {0, 4096}, {8192, 5}, {9000, -3}}) {
        call.set_lengths(lengths);
        call.poison_outputs();
        CUDA_OK(cudaDeviceSynchronize());
        graph.launch(stream);
        Case eager = base;
        eager.lengths = lengths;
        expect_same_bits(call.collect(CUFLASH_SUCCESS).results, run_ok(eager, in));
      }
    });
  }
}

TEST_F(Streams_cuda, ReplayWithOtherMaskOffsets) {
  Case c = make_case(Device::kCuda, kForward, {2, 2, 2, 70, 90, 64},
                     causal_mask(CUFLASH_ALIGN_DEVICE_OFFSETS));
  c.mask.offsets = {0, 0};
  on_every_kernel(c, kEveryHalf, [](const Case& base) {
    const Inputs in = make_inputs(base, DataKind::kNormal);
    Call call(base, in);
    const Stream stream;
    const Graph graph(
        stream, [&] { EXPECT_EQ(call.launch(stream), CUFLASH_SUCCESS) << cuflash_last_error(); });
    for (const std::vector<int32_t>& offsets :
         {std::vector<int32_t>{20, -80}, {-1, 1000}, {2147483647, -2147483647}}) {
      call.set_mask_offsets(offsets);
      call.poison_outputs();
      CUDA_OK(cudaDeviceSynchronize());
      graph.launch(stream);
      Case eager = base;
      eager.mask.offsets = offsets;
      expect_same_bits(call.collect(CUFLASH_SUCCESS).results, run_ok(eager, in));
    }
  });
}

TEST_F(Streams_cuda, B122_TwoStreamsOfEqualShapes) {
  for (const Operation operation : kOperations)
    for (const bool pool : {false, true})
      on_every_kernel(small(operation), [&](const Case& c) {
        const Inputs in[] = {make_inputs(c, DataKind::kNormal, 1),
                             make_inputs(c, DataKind::kNormal, 2)};
        const Results expected[] = {run_ok(c, in[0]), run_ok(c, in[1])};
        Call first(c, in[0]), second(c, in[1]);
        Call* const calls[] = {&first, &second};
        const Stream streams[2];
        for (int s = 0; s < 2; ++s) {
          if (pool) calls[s]->use_pool();
          calls[s]->poison_outputs();
        }
        CUDA_OK(cudaDeviceSynchronize());
        for (int round = 0; round < 100; ++round)
          for (int s = 0; s < 2; ++s) ASSERT_EQ(calls[s]->launch(streams[s]), CUFLASH_SUCCESS);
        CUDA_OK(cudaDeviceSynchronize());
        for (int s = 0; s < 2; ++s) {
          const Outcome outcome = calls[s]->collect(CUFLASH_SUCCESS);
          EXPECT_EQ(outcome.damage, "");
          expect_same_bits(outcome.results, expected[s]);
        }
      });
}

// Each thread has a call in flight on each stream; those on one stream follow each other, the others run as they like. Half
// of the calls take their workspace from the pool.
TEST_F(Streams_cuda, EightThreadsOnEightStreams) {
  constexpr size_t kThreads = 8, kStreams = 8;
  for (const Operation operation : kOperations)
    on_every_kernel(small(operation), [&](const Case& c) {
      const Stream streams[kStreams];
      std::vector<Inputs> inputs;
      std::vector<Results> expected;
      for (size_t t = 0; t < kThreads; ++t) {
        inputs.push_back(make_inputs(c, DataKind::kNormal, t + 1));
        expected.push_back(run_ok(c, inputs.back()));
      }
      std::vector<std::thread> threads;
      for (size_t t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
          std::vector<std::unique_ptr<Call>> calls;
          for (size_t s = 0; s < kStreams; ++s) {
            calls.push_back(std::make_unique<Call>(c, inputs[t]));
            if (s % 2) calls.back()->use_pool();
            calls.back()->poison_outputs();
          }
          CUDA_OK(cudaDeviceSynchronize());
          for (int round = 0; round < 10; ++round)
            for (size_t s = 0; s < kStreams; ++s)
              ASSERT_EQ(calls[(s + t) % kStreams]->launch(streams[(s + t) % kStreams]),
                        CUFLASH_SUCCESS)
                  << cuflash_last_error();
          for (size_t s = 0; s < kStreams; ++s) CUDA_OK(cudaStreamSynchronize(streams[s]));
          for (const std::unique_ptr<Call>& call : calls) {
            const Outcome outcome = call->collect(CUFLASH_SUCCESS);
            EXPECT_EQ(outcome.damage, "");
            expect_same_bits(outcome.results, expected[t]);
          }
        });
      for (std::thread& thread : threads) thread.join();
    });
}

TEST_F(Streams_cuda, TrimAfterWork) {
  Case c = small(kBackward);
  Call call(c, make_inputs(c, DataKind::kNormal));
  call.use_pool();
  for (int n = 0; n < 3; ++n) {
    ASSERT_EQ(call.launch(), CUFLASH_SUCCESS) << cuflash_last_error();
    synchronize(Device::kCuda);
    EXPECT_EQ(cuflash_trim(handle_of(Device::kCuda)), CUFLASH_SUCCESS) << cuflash_last_error();
  }
}

}  // namespace
}  // namespace cuflash_test
