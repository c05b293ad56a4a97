// Streams and graphs that end with the test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace cuflash_test {

#define CUDA_OK(expression) \
  ASSERT_EQ(expression, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured graph, ready to be launched.
class Graph {
 public:
  template <class F>
  Graph(cudaStream_t stream, F enqueue) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    enqueue();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const {
    EXPECT_EQ(cudaGraphLaunch(executable_, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace cuflash_test
