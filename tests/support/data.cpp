#include "support/data.hpp"

#include <cmath>

namespace cuflash_test {

uint64_t Random::bits() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

int64_t Random::below(int64_t n) {
  return static_cast<int64_t>(uniform() * static_cast<double>(n));
}

double hash_value(uint64_t n, uint32_t t, double a) {
  uint32_t h = static_cast<uint32_t>(n) * 2654435761u + t * 2246822519u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  return a * ((h >> 8) * 0x1p-24 - 0.5);
}

void round_values(Tensor& tensor, Dtype dtype) {
  for (double& value : tensor.x) value = round_to(dtype, value);
}

void fill_hash(Tensor& tensor, uint32_t t, double a, Dtype dtype) {
  for (size_t n = 0; n < tensor.x.size(); ++n) tensor.x[n] = round_to(dtype, hash_value(n, t, a));
}

void fill(Tensor& tensor, DataKind kind, uint32_t t, uint64_t seed, int64_t large_channel,
          Dtype dtype) {
  if (kind == DataKind::kHash) return fill_hash(tensor, t, 4, dtype);
  Random random(seed * 16 + t);
  for (double& value : tensor.x) value = random.normal();
  if (kind == DataKind::kStructured)
    tensor.for_each([&](int64_t, int64_t, int64_t, int64_t c, double& value) {
      if (c == large_channel) value *= 30;
    });
  round_values(tensor, dtype);
}

}  // namespace cuflash_test
