// Offsets beyond 2^31 and 2^32 elements in tensors that are as large: public bug reports (see cases.md). Strides as
// large: far_strides.cpp.
#include <cuda_runtime_api.h>

#include <cmath>
#include <vector>

#include "kernels/targets.hpp"

namespace cuflash_test {
namespace {

// Device memory without guards, gigabytes of it; null where there is not so much.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();
    }
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  void fill(int byte) const { EXPECT_EQ(cudaMemset(data_, byte, bytes_), cudaSuccess); }
  char* at(size_t byte) const { return static_cast<char*>(data_) + byte; }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

template <class T>
std::vector<T> download(const void* source, size_t count) {
  std::vector<T> values(count);
  EXPECT_EQ(cudaMemcpy(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

cuflash_tensor_t dense(const Memory& memory, int32_t dtype) {
  cuflash_tensor_t t = {};
  t.data = memory.data();
  t.flags = CUFLASH_TENSOR_DENSE;
  t.dtype = dtype;
  return t;
}

class BigMemory_cuda : public testing::Test {
 protected:
  void SetUp() override {
    CUFLASH_REQUIRE_DEVICE(Device::kCuda);
    size_t free_bytes = 0, total = 0;
    cudaMemGetInfo(&free_bytes, &total);
    if (free_bytes < (size_t{80} << 30)) GTEST_SKIP() << "needs 80 GB of free device memory";
    handle_ = handle_of(Device::kCuda);
  }
  cuflash_handle_t handle_ = nullptr;
};

constexpr uint16_t kPattern = 0x3f3f;  // all bytes equal, so that cudaMemset writes it
constexpr double kValue = 0.74609375;  // that pattern as bf16

TEST_F(BigMemory_cuda, B60_GradientsPast2To31Elements) {
  constexpr int64_t kBatch = 16385, kHeads = 16, kRows = 128, kKeys = 16, kDim = 64;
  constexpr size_t kQueryBytes = kBatch * kHeads * kRows * kDim * 2;
  constexpr size_t kKeyBytes = kBatch * kHeads * kKeys * kDim * 2;
  const Memory q(kQueryBytes), o(kQueryBytes), d_o(kQueryBytes), dq(kQueryBytes), k(kKeyBytes),
      v(kKeyBytes), dk(kKeyBytes), dv(kKeyBytes), lse(kBatch * kHeads * kRows * 4);
  for (const Memory* memory : {&q, &o, &d_o, &dq, &k, &v, &dk, &dv, &lse})
    ASSERT_NE(memory->data(), nullptr);
  for (const Memory* memory : {&q, &k}) memory->fill(0);
  for (const Memory* memory : {&v, &d_o}) memory->fill(0x3f);
  for (const Memory* memory : {&o, &dq, &dk, &dv, &lse}) memory->fill(0xff);
  cuflash_problem_t problem;
  cuflash_gradients_t gradients;
  cuflash_problem_init(&problem, sizeof problem);
  cuflash_gradients_init(&gradients, sizeof gradients);
  problem.batch = kBatch;
  problem.heads_q = kHeads;
  problem.len_q = kRows;
  problem.len_k = kKeys;
  problem.head_dim = kDim;
  problem.q = dense(q, CUFLASH_BF16);
  problem.k = dense(k, CUFLASH_BF16);
  problem.v = dense(v, CUFLASH_BF16);
  problem.o = dense(o, CUFLASH_BF16);
  problem.lse = static_cast<float*>(lse.data());
  gradients.d_o = dense(d_o, CUFLASH_BF16);
  gradients.dq = dense(dq, CUFLASH_BF16);
  gradients.dk = dense(dk, CUFLASH_BF16);
  gradients.dv = dense(dv, CUFLASH_BF16);
  ASSERT_EQ(cuflash_attention_forward(handle_, &problem, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  ASSERT_EQ(cuflash_attention_backward(handle_, &problem, &gradients, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  constexpr size_t kLastQuery = kQueryBytes - kHeads * kRows * kDim * 2;
  constexpr size_t kLastKey = kKeyBytes - kHeads * kKeys * kDim * 2;
  for (const uint16_t bits : download<uint16_t>(o.at(kLastQuery), kHeads * kRows * kDim))
    ASSERT_EQ(bits, kPattern);
  for (const uint16_t bits : download<uint16_t>(dq.at(kLastQuery), kHeads * kRows * kDim))
    ASSERT_EQ(load(Dtype::kBf16, &bits), 0);
  for (const uint16_t bits : download<uint16_t>(dv.at(kLastKey), kHeads * kKeys * kDim))
    ASSERT_NEAR(load(Dtype::kBf16, &bits), kValue * kRows / kKeys, 0.05);
}

TEST_F(BigMemory_cuda, B65_LongKeysOfTheNinthBatchEntry) {
  constexpr int64_t kBatch = 9, kHeads = 12, kRows = 4, kKeys = 350000, kDim = 64;
  constexpr size_t kEntryElements = kHeads * kKeys * kDim;
  constexpr size_t kQueryElements = kHeads * kRows * kDim;
  const Memory k(kBatch * kEntryElements * 2), v(kBatch * kEntryElements * 2),
      q(kBatch * kQueryElements * 2), o(kBatch * kQueryElements * 2);
  for (const Memory* memory : {&k, &v, &q, &o}) ASSERT_NE(memory->data(), nullptr);
  // One entry of numbers that repeat with a period that is no power of two, copied to all.
  constexpr size_t kPeriod = 1000003;
  const auto fill_entries = [&](const Memory& memory, size_t elements, uint32_t t) {
    std::vector<uint16_t> period(kPeriod), entry(elements);
    for (size_t n = 0; n < kPeriod; ++n)
      store(Dtype::kBf16, round_to(Dtype::kBf16, hash_value(n, t, 2)), &period[n]);
    for (size_t n = 0; n < elements; ++n) entry[n] = period[n % kPeriod];
    for (int64_t b = 0; b < kBatch; ++b)
      ASSERT_EQ(cudaMemcpy(memory.at(static_cast<size_t>(b) * elements * 2), entry.data(),
                           elements * 2, cudaMemcpyHostToDevice),
                cudaSuccess);
  };
  fill_entries(q, kQueryElements, 1);
  fill_entries(k, kEntryElements, 2);
  fill_entries(v, kEntryElements, 3);
  for (const bool decode : {false, true}) {
    o.fill(0xff);
    cuflash_problem_t problem;
    cuflash_kv_cache_t cache;
    cuflash_problem_init(&problem, sizeof problem);
    cuflash_kv_cache_init(&cache, sizeof cache);
    problem.batch = kBatch;
    problem.heads_q = kHeads;
    problem.len_q = kRows;
    problem.head_dim = kDim;
    problem.q = dense(q, CUFLASH_BF16);
    problem.o = dense(o, CUFLASH_BF16);
    cuflash_status_t status;
    if (decode) {
      cache.k = dense(k, CUFLASH_BF16);
      cache.v = dense(v, CUFLASH_BF16);
      cache.max_len = kKeys;
      status = cuflash_attention_decode(handle_, &problem, &cache, nullptr);
    } else {
      problem.len_k = kKeys;
      problem.k = dense(k, CUFLASH_BF16);
      problem.v = dense(v, CUFLASH_BF16);
      status = cuflash_attention_forward(handle_, &problem, nullptr);
    }
    ASSERT_EQ(status, CUFLASH_SUCCESS) << cuflash_last_error();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto first = download<uint16_t>(o.at(0), kQueryElements);
    for (const uint16_t& bits : first) ASSERT_TRUE(std::isfinite(load(Dtype::kBf16, &bits)));
    for (size_t b = 1; b < kBatch; ++b)
      ASSERT_EQ(download<uint16_t>(o.at(b * kQueryElements * 2), kQueryElements), first) << b;
  }
}

TEST_F(BigMemory_cuda, B71_CausalOver65553Tokens) {
  constexpr int64_t kHeads = 16, kLength = 65553, kDim = 64;
  constexpr size_t kElements = kHeads * kLength * kDim;
  const Memory q(kElements * 2), k(kElements * 2), v(kElements * 2), o(kElements * 2),
      lse(kHeads * kLength * 4);
  for (const Memory* memory : {&q, &k, &v, &o, &lse}) ASSERT_NE(memory->data(), nullptr);
  q.fill(0);
  k.fill(0);
  o.fill(0xff);
  lse.fill(0xff);
  std::vector<uint16_t> values(kElements);
  for (size_t n = 0; n < kElements; ++n)
    values[n] = n / kDim % kLength % 2 ? 0x3f80 : 0;  // 1 in odd rows
  ASSERT_EQ(cudaMemcpy(v.data(), values.data(), kElements * 2, cudaMemcpyHostToDevice),
            cudaSuccess);
  cuflash_problem_t problem;
  cuflash_problem_init(&problem, sizeof problem);
  problem.batch = 1;
  problem.heads_q = kHeads;
  problem.len_q = problem.len_k = kLength;
  problem.head_dim = kDim;
  problem.mask = CUFLASH_MASK_CAUSAL;
  problem.q = dense(q, CUFLASH_BF16);
  problem.k = dense(k, CUFLASH_BF16);
  problem.v = dense(v, CUFLASH_BF16);
  problem.o = dense(o, CUFLASH_BF16);
  problem.lse = static_cast<float*>(lse.data());
  ASSERT_EQ(cuflash_attention_forward(handle_, &problem, nullptr), CUFLASH_SUCCESS)
      << cuflash_last_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto outputs = download<uint16_t>(o.data(), kElements);
  const auto sums = download<float>(lse.data(), kHeads * kLength);
  for (size_t row = 0; row < kHeads * kLength; ++row) {
    const double i = static_cast<double>(row % kLength), odd = std::floor((i + 1) / 2);
    ASSERT_NEAR(sums[row], std::log(i + 1), 2e-4) << row;
    ASSERT_NEAR(load(Dtype::kBf16, &outputs[row * kDim + row % kDim]), odd / (i + 1), 0.004) << row;
  }
}

}  // namespace
}  // namespace cuflash_test
