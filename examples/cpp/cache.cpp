// Tokens into a cache in pages of int8, one after the other, each attending to those before it; from C++11, checked
// against attention over all of them without a cache.
//
//     c++ cache.cpp $(pkg-config --cflags --libs cuflash) -o cache && ./cache
//
// It runs on the CPU device. On a GPU the calls are the same: Handle(0), device pointers, a stream.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuflash.hpp>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2, kLength = 40, kHeadDim = 64;
constexpr int kPageSize = 16, kColumns = (kLength + kPageSize - 1) / kPageSize,
              kPages = kBatch * kColumns;

using Floats = std::vector<float>;

// Memory of a cache.
struct Pages {
  std::vector<int8_t> k = std::vector<int8_t>(kPages * kHeadsKv * kPageSize * kHeadDim);
  std::vector<int8_t> v = k;
  std::vector<int32_t> block_table = {4, 0, 3, 1, 5, 2};  // [kBatch, kColumns]
  std::vector<int32_t> lengths = std::vector<int32_t>(kBatch);
  float scale = 1 / 127.0f;  // of all elements
};

// [cache]
cuflash_kv_cache_t cache_in(Pages& pages) {
  auto cache = cuflash::make<cuflash_kv_cache_t>();
  cache.k = cuflash::dense(pages.k.data());  // [page, head, slot, channel]
  cache.v = cuflash::dense(pages.v.data());
  cache.num_pages = kPages;
  cache.page_size = kPageSize;
  cache.max_len = kLength;
  cache.lengths = pages.lengths.data();
  cache.k_scale = cache.v_scale = &pages.scale;
  cuflash::set_block_table(cache, pages.block_table.data(), kColumns);
  return cache;
}

// A token of each sequence: k and v [kBatch, kHeadsKv, 1, kHeadDim], q and o [kBatch, kHeads, 1, kHeadDim].
void next_token(const cuflash::Handle& handle, Pages& pages, const float* q, const float* k,
                const float* v, float* o) {
  const cuflash_kv_cache_t cache = cache_in(pages);
  auto append = cuflash::make<cuflash_kv_append_t>();
  append.batch = kBatch;
  append.heads_kv = kHeadsKv;
  append.len = 1;
  append.head_dim = kHeadDim;
  append.k = cuflash::dense(k);
  append.v = cuflash::dense(v);
  cuflash::check(cuflash_kv_cache_append(handle, &cache, &append, nullptr));
  for (int32_t& length : pages.lengths) ++length;  // which the call leaves as they are

  auto problem = cuflash::make<cuflash_problem_t>();
  problem.batch = kBatch;
  problem.heads_q = kHeads;
  problem.heads_kv = kHeadsKv;
  problem.len_q = 1;
  problem.head_dim = kHeadDim;
  problem.q = cuflash::dense(q);
  problem.o = cuflash::dense(o);
  cuflash::check(cuflash_attention_decode(handle, &problem, &cache, nullptr));
}
// [cache]

// Token i of a dense [batch, heads, length, head_dim] tensor, as [batch, heads, 1, head_dim].
Floats token(const Floats& tensor, int heads, int i) {
  Floats result;
  for (int row = 0; row < kBatch * heads; ++row) {
    const auto first = tensor.begin() + (std::ptrdiff_t(row) * kLength + i) * kHeadDim;
    result.insert(result.end(), first, first + kHeadDim);
  }
  return result;
}

}  // namespace

int main() try {
  std::mt19937 generator(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Floats q(std::size_t(kBatch) * kHeads * kLength * kHeadDim), o(q.size());
  Floats k(std::size_t(kBatch) * kHeadsKv * kLength * kHeadDim), v(k.size());
  for (Floats* tensor : {&q, &k, &v})
    for (float& x : *tensor) x = uniform(generator);

  const cuflash::Handle cpu(CUFLASH_DEVICE_CPU);
  auto problem = cuflash::make<cuflash_problem_t>();
  problem.batch = kBatch;
  problem.heads_q = kHeads;
  problem.heads_kv = kHeadsKv;
  problem.len_q = problem.len_k = kLength;
  problem.head_dim = kHeadDim;
  problem.q = cuflash::dense(q.data());
  problem.k = cuflash::dense(k.data());
  problem.v = cuflash::dense(v.data());
  problem.o = cuflash::dense(o.data());
  problem.mask = CUFLASH_MASK_CAUSAL;
  cuflash::check(cuflash_attention_forward(cpu, &problem, nullptr));

  Pages pages;
  double worst = 0;
  for (int i = 0; i < kLength; ++i) {
    Floats of_token(std::size_t(kBatch) * kHeads * kHeadDim);
    next_token(cpu, pages, token(q, kHeads, i).data(), token(k, kHeadsKv, i).data(),
               token(v, kHeadsKv, i).data(), of_token.data());
    const Floats wanted = token(o, kHeads, i);
    for (std::size_t n = 0; n < wanted.size(); ++n) {
      const double error = std::abs(double(of_token[n]) - wanted[n]);
      if (!(error <= worst)) worst = error;  // true for NaN too
    }
  }
  std::printf("%s\nlargest error of int8 %.1e\n", cuflash_build_info(), worst);
  return worst < 0.01 ? 0 : 1;
} catch (const std::exception& error) {  // a cuflash::Error names the argument at fault
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
