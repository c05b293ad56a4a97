// The ways to run a test: each device, each of its kernels, each element type.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "support/runner.hpp"

namespace cuflash_test {

// Base of tests that run once a device; skipped where the device is not there.
class DeviceTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(GetParam()); }
};

#define CUFLASH_FOR_DEVICES(suite)                                                \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::Values(Device::kCpu, Device::kCuda), \
                           [](const auto& test) { return name_of(test.param); })

// Runs `body(case)` on every kernel that takes the case. At least one must.
template <class F>
void on_every_kernel(const Case& base, F body) {
  const std::vector<std::string> kernels = accepting_kernels(base);
  EXPECT_FALSE(kernels.empty()) << "no kernel takes " << describe(base);
  for (const std::string& kernel : kernels) {
    Case c = base;
    c.kernel = kernel;
    SCOPED_TRACE(describe(c));
    body(c);
  }
}

// The same for each of the element types.
template <class F>
void on_every_kernel(Case base, const std::vector<Dtype>& dtypes, F body) {
  for (const Dtype dtype : dtypes) {
    base.dtype = dtype;
    on_every_kernel(base, body);
  }
}

// Tests of what only some families take run once for each of those.
struct FullFamily {
  Device device;
  const char* family;
  const char* name;

  operator Device() const { return device; }
};
inline void PrintTo(const FullFamily& family, std::ostream* out) { *out << family.name; }
class FullFamilyTest : public testing::TestWithParam<FullFamily> {
 protected:
  void SetUp() override { CUFLASH_REQUIRE_DEVICE(GetParam().device); }
};

#define CUFLASH_FOR_FULL_FAMILIES(suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(, suite,                                                         \
                           testing::Values(FullFamily{Device::kCpu, "reference", "cpu"},    \
                                           FullFamily{Device::kCuda, "reference", "cuda"},  \
                                           FullFamily{Device::kCpu, "cpu", "cpu_blocked"}), \
                           [](const auto& test) { return std::string(test.param.name); })

// "wmma" of "fwd_wmma_f16_d64"
inline std::string family_of(const std::string& kernel) {
  const size_t begin = kernel.find('_') + 1;
  return kernel.substr(begin, kernel.find('_', begin) - begin);
}

inline bool takes_every_feature(const std::string& kernel) {
  return family_of(kernel) == "reference" || family_of(kernel) == "cpu";
}

// Of the operation's kernels on a device, in the order of the table.
inline std::vector<std::string> families_of(Operation operation, Device device) {
  std::vector<std::string> families;
  for (const std::string& kernel : kernels_of(operation, device))
    if (const std::string family = family_of(kernel);
        std::find(families.begin(), families.end(), family) == families.end())
      families.push_back(family);
  return families;
}

// As on_every_kernel, with one kernel of each family that takes the case, the one the library would choose of them: for
// sizes that on all kernels would take minutes. The others of a family are the same source with other tiles. Families are
// asked and not their kernels, as each question makes all tensors of the case.
template <class F>
void on_every_family(Case base, const std::vector<Dtype>& dtypes, F body) {
  for (const Dtype dtype : dtypes) {
    base.dtype = dtype;
    int taken = 0;
    for (const std::string& family : families_of(base.operation, base.device)) {
      if (!accepts(base, family)) continue;
      ++taken;
      Case c = base;
      c.kernel = family;
      SCOPED_TRACE(describe(c));
      body(c);
    }
    EXPECT_GT(taken, 0) << "no kernel takes " << describe(base);
  }
}

// A number from the environment.
inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

inline const std::vector<Dtype> kEveryDtype = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};
inline const std::vector<Dtype> kEveryHalf = {Dtype::kF16, Dtype::kBf16};

inline Case make_case(Device device, Operation operation, const Shape& shape,
                      const MaskSpec& mask = {}) {
  Case c;
  c.device = device;
  c.operation = operation;
  c.shape = shape;
  c.mask = mask;
  return c;
}

// Bits of which about half hide a key.
inline TreeSpec random_tree(const Shape& s, int64_t bits, bool per_batch, uint64_t seed) {
  TreeSpec tree{bits, per_batch, {}};
  Random random(seed);
  tree.shown.resize(static_cast<size_t>((per_batch ? s.batch : 1) * s.len_q * bits));
  for (uint8_t& shown : tree.shown) shown = random.below(2) != 0;
  return tree;
}

template <class F>
void set(Tensor& tensor, F f) {
  tensor = Tensor::from(tensor.batch, tensor.heads, tensor.rows, tensor.dim, f);
}

// |value - want| <= absolute + ulps of the dtype at `want`; infinities match exactly.
inline bool is_near(double value, double want, Dtype dtype, double ulps, double absolute) {
  return value == want ||
         (std::isfinite(want) && std::abs(value - want) <= absolute + ulps * ulp(dtype, want));
}

// To 1e-5 relative (1e-5 absolute below 1).
inline bool is_near_lse(double value, double want) {
  return is_near(value, want, Dtype::kF32, 0, 1e-5 * std::max(1.0, std::abs(want)));
}

// Each element is_near() expected(b, h, row, channel). The first difference is reported.
template <class F>
void expect_values(const char* name, const Tensor& got, F expected, Dtype dtype, double ulps = 1,
                   double absolute = 0) {
  EXPECT_FALSE(got.x.empty()) << name << " is missing";
  bool reported = false;
  Tensor copy = got;
  copy.for_each([&](int64_t b, int64_t h, int64_t r, int64_t c, double& value) {
    const double want = expected(b, h, r, c);
    if (is_near(value, want, dtype, ulps, absolute) || reported) return;
    reported = true;
    ADD_FAILURE() << name << "[b" << b << " h" << h << " row " << r << " channel " << c << "] is "
                  << value << ", not " << want;
  });
}

// Of the mean of a few whole numbers. Decode may merge parts by their LSEs in fp32, whose rounding moves a weight by
// an ulp or two.
inline double ulps_of_means(const Case& c) {
  return c.operation == Operation::kDecode && c.dtype == Dtype::kF32 ? 4 : 2;
}

template <class F>
void expect_lse(const Results& results, F expected) {
  bool reported = false;
  Tensor lse = results.lse;
  EXPECT_FALSE(lse.x.empty()) << "lse is missing";
  lse.for_each([&](int64_t b, int64_t h, int64_t r, int64_t, double& value) {
    const double want = expected(b, h, r);
    if (is_near_lse(value, want) || reported) return;
    reported = true;
    ADD_FAILURE() << "lse[b" << b << " h" << h << " row " << r << "] is " << value << ", not "
                  << want;
  });
}

inline void expect_same_bits(const Results& a, const Results& b) {
  EXPECT_EQ(a.o.x, b.o.x);
  EXPECT_EQ(a.lse.x, b.lse.x);
  EXPECT_EQ(a.dq.x, b.dq.x);
  EXPECT_EQ(a.dk.x, b.dk.x);
  EXPECT_EQ(a.dv.x, b.dv.x);
  EXPECT_EQ(a.d_bias.x, b.d_bias.x);
  EXPECT_EQ(a.d_sinks.x, b.d_sinks.x);
}

}  // namespace cuflash_test
