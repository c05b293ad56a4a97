// Attention in a sliding window from C++11, checked against a loop.
//
//     c++ forward.cpp $(pkg-config --cflags --libs cuflash) -o forward && ./forward
//
// It runs on the CPU device. On a GPU the calls are the same: Handle(0), device pointers, a stream.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cuflash.hpp>
#include <exception>
#include <random>
#include <vector>

namespace {

// Six query heads read two key/value heads; a row sees itself and the 15 keys before it.
constexpr int kBatch = 2, kHeads = 6, kHeadsKv = 2, kLength = 100, kHeadDim = 64, kWindow = 16;

using Floats = std::vector<float>;

// [attention]
void windowed_attention(const cuflash::Handle& handle, const Floats& q, const Floats& k,
                        const Floats& v, Floats& o) {
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
  problem.flags = CUFLASH_PROBLEM_WINDOW;
  problem.window_left = kWindow - 1;
  problem.window_right = 0;
  cuflash::check(cuflash_attention_forward(handle, &problem, nullptr));
}
// [attention]

// The vector of head h, row i in a dense [batch, heads, length, head_dim] tensor.
const float* row(const Floats& tensor, int heads, int b, int h, int i) {
  return tensor.data() + ((std::size_t(b) * heads + h) * kLength + i) * kHeadDim;
}

double largest_error(const Floats& q, const Floats& k, const Floats& v, const Floats& o) {
  double worst = 0;
  for (int b = 0; b < kBatch; ++b)
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kLength; ++i) {
        const int h_kv = h / (kHeads / kHeadsKv);
        double sum = 0;
        std::vector<double> expected(kHeadDim, 0.0);
        for (int j = i < kWindow ? 0 : i - kWindow + 1; j <= i; ++j) {
          double score = 0;
          for (int d = 0; d < kHeadDim; ++d)
            score += double(row(q, kHeads, b, h, i)[d]) * row(k, kHeadsKv, b, h_kv, j)[d];
          const double weight = std::exp(score / std::sqrt(double(kHeadDim)));
          sum += weight;
          for (int d = 0; d < kHeadDim; ++d)
            expected[d] += weight * row(v, kHeadsKv, b, h_kv, j)[d];
        }
        for (int d = 0; d < kHeadDim; ++d) {
          const double error = std::abs(expected[d] / sum - row(o, kHeads, b, h, i)[d]);
          if (!(error <= worst)) worst = error;  // true for NaN too
        }
      }
  return worst;
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
  windowed_attention(cpu, q, k, v, o);
  const double error = largest_error(q, k, v, o);
  std::printf("%s\nlargest error %.1e\n", cuflash_build_info(), error);
  return error < 1e-5 ? 0 : 1;
} catch (const std::exception& error) {  // a cuflash::Error names the argument at fault
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
