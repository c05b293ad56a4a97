// A program for releases up to 0.6: their include path, names, argument order, default stream and
// error type. It must compile, link and run with nothing changed.
#include "cuflash/flash_attention.h"

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <iostream>
#include <random>
#include <vector>

namespace {

using cuflash::FlashAttentionError;

constexpr int kBatch = 2, kHeads = 3, kLength = 200, kDim = 64, kChunks = 4;
constexpr std::size_t kElements = std::size_t(kBatch) * kHeads * kLength * kDim;

template <class T>
T* on_device(const std::vector<float>& values) {
  std::vector<T> converted;
  for (const float x : values) converted.push_back(T(x));
  T* device = nullptr;
  cudaMalloc(&device, values.size() * sizeof(T));
  cudaMemcpy(device, converted.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return device;
}

std::vector<float> random_values(unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
  std::vector<float> values(kElements);
  for (float& x : values) x = distribution(generator);
  return values;
}

bool failed(const char* what, FlashAttentionError error) {
  if (error == FlashAttentionError::SUCCESS) return false;
  std::cerr << "error: " << what << ": " << cuflash::get_error_string(error) << std::endl;
  return true;
}

// Forward, backward and decode; true if all went well.
template <class T>
bool run() {
  const float scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  const std::vector<float> zeros(kElements, 0.0f), v_values = random_values(3);
  T* const d_Q = on_device<T>(random_values(1));
  T* const d_K = on_device<T>(random_values(2));
  T* const d_V = on_device<T>(v_values);
  T* const d_dO = on_device<T>(random_values(4));
  T* const d_O = on_device<T>(zeros);
  T* const d_dQ = on_device<T>(zeros);
  T* const d_dK = on_device<T>(zeros);
  T* const d_dV = on_device<T>(zeros);
  float* const d_L = on_device<float>(zeros);

  auto err = cuflash::flash_attention_forward(d_Q, d_K, d_V, d_O, d_L, kBatch, kHeads, kLength,
                                              kDim, scale, true);
  if (failed("forward", err)) return false;
  err = cuflash::flash_attention_backward(d_Q, d_K, d_V, d_O, d_L, d_dO, d_dQ, d_dK, d_dV, kBatch,
                                          kHeads, kLength, kDim, scale, true);
  if (failed("backward", err)) return false;

  // The first row sees its own key alone: its output is its value.
  std::vector<T> o(kDim);
  cudaMemcpy(o.data(), d_O, kDim * sizeof(T), cudaMemcpyDeviceToHost);
  for (int d = 0; d < kDim; ++d)
    if (static_cast<float>(o[d]) != static_cast<float>(T(v_values[d]))) {
      std::cerr << "wrong: channel " << d << " of the first row" << std::endl;
      return false;
    }

  err = cuflash::flash_attention_decode(d_Q, d_K, d_V, d_O, d_L, kBatch, kHeads, kLength, kDim,
                                        scale, kChunks);
  if (failed("decode", err)) return false;
  if (cudaDeviceSynchronize() != cudaSuccess) return false;
  for (T* memory : {d_Q, d_K, d_V, d_dO, d_O, d_dQ, d_dK, d_dV}) cudaFree(memory);
  cudaFree(d_L);
  return true;
}

}  // namespace

int main() {
  if (!run<float>() || !run<half>() || !run<__nv_bfloat16>()) return 1;
  std::cout << "forward, backward and decode in three dtypes: done" << std::endl;
  return 0;
}
