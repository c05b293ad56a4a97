// The calls of table.tsv in C++, on the CPU device: what cuflash.hpp throws.
#include <gtest/gtest.h>

#include <cmath>
#include <cuflash.hpp>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Strings = std::vector<std::string>;
using cuflash::check;

constexpr float kUntouched = -77;

Strings split(const std::string& text, char separator) {
  Strings parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct Row {
  std::string id, operation, status, words;
};

// The rows that can be written in C++; those that cannot are counted.
std::vector<Row> rows_of_table(int* impossible) {
  std::ifstream file(CUFLASH_BAD_INPUT);
  std::vector<Row> rows;
  for (std::string line; std::getline(file, line);) {
    if (line[0] == '#') continue;
    const Strings columns = split(line, '\t');
    if (columns.at(5).find("cpp: ") != std::string::npos)
      ++*impossible;
    else
      rows.push_back({columns[0], columns[1], columns[3], columns[4]});
  }
  return rows;
}

// A small legal call of each operation, to be spoilt in one thing.
struct Call {
  static constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kLenQ = 5, kLenK = 7, kDim = 8;
  static constexpr size_t kQueries = kBatch * kHeadsQ * kLenQ, kKeys = kBatch * kHeadsKv * kLenK;

  std::vector<float> q = values(kQueries * kDim), k = values(kKeys * kDim),
                     v = values(kKeys * kDim), d_o = values(kQueries * kDim);
  std::vector<float> o = untouched(kQueries * kDim), lse = untouched(kQueries),
                     dq = untouched(kQueries * kDim), dk = untouched(kKeys * kDim),
                     dv = untouched(kKeys * kDim);
  uint32_t words = ~0u;
  std::vector<unsigned char> workspace;
  cuflash::Handle handle{CUFLASH_DEVICE_CPU};
  cuflash_problem_t problem = cuflash::make<cuflash_problem_t>();
  cuflash_gradients_t gradients = cuflash::make<cuflash_gradients_t>();
  cuflash_kv_cache_t cache = cuflash::make<cuflash_kv_cache_t>();
  cuflash_kv_append_t append = cuflash::make<cuflash_kv_append_t>();
  cuflash_stream_t stream = nullptr;
  int32_t device = CUFLASH_DEVICE_CPU;
  int32_t option = CUFLASH_OPTION_CPU_THREADS;
  int64_t value = 0;

  Call() {
    problem.batch = kBatch;
    problem.heads_q = kHeadsQ;
    problem.heads_kv = kHeadsKv;
    problem.len_q = kLenQ;
    problem.len_k = kLenK;
    problem.head_dim = kDim;
    problem.q = cuflash::dense(q.data());
    problem.k = cache.k = cuflash::dense(k.data());
    problem.v = cache.v = cuflash::dense(v.data());
    problem.o = cuflash::dense(o.data());
    problem.lse = lse.data();
    gradients.d_o = cuflash::dense(d_o.data());
    gradients.dq = cuflash::dense(dq.data());
    gradients.dk = cuflash::dense(dk.data());
    gradients.dv = cuflash::dense(dv.data());
    cache.max_len = kLenK;
    append.batch = kBatch;
    append.heads_kv = kHeadsKv;
    append.len = 1;
    append.head_dim = kDim;
    append.k = append.v = problem.q;
  }

  // Throws cuflash::Error.
  void make(const std::string& operation) {
    if (operation == "forward") {
      check(cuflash_attention_forward(handle, &problem, stream));
    } else if (operation == "backward") {
      check(cuflash_attention_backward(handle, &problem, &gradients, stream));
    } else if (operation == "decode") {
      problem.k = problem.v = {};
      problem.len_k = 0;
      check(cuflash_attention_decode(handle, &problem, &cache, stream));
    } else if (operation == "append") {
      cache.k = gradients.dk;
      cache.v = gradients.dv;
      check(cuflash_kv_cache_append(handle, &cache, &append, stream));
    } else if (operation == "create") {
      const cuflash::Handle created(device);
    } else if (operation == "option") {
      check(cuflash_set_option(handle, option, value));
    } else if (operation == "explain") {
      check(cuflash_forward_explain(handle, &problem, nullptr, 0, nullptr));
    } else {
      FAIL() << "an operation without code: " << operation;
    }
  }

  bool nothing_written() const {
    for (const std::vector<float>* output : {&o, &lse, &dq, &dk, &dv})
      for (const float x : *output)
        if (x != kUntouched) return false;
    return true;
  }

  void give_workspace_one_byte_short() {
    size_t bytes = 0;
    check(cuflash_forward_workspace_size(handle, &problem, &bytes));
    ASSERT_GT(bytes, 0u);
    workspace.resize(bytes + 256);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    problem.workspace = workspace.data() + (256 - address % 256) % 256;
    problem.workspace_size = bytes - 1;
  }

 private:
  static std::vector<float> values(size_t count) {
    std::vector<float> list(count);
    for (size_t i = 0; i < count; ++i) list[i] = static_cast<float>(i * 37 % 17) / 16;
    return list;
  }
  static std::vector<float> untouched(size_t count) {
    return std::vector<float>(count, kUntouched);
  }
};

// A struct of a newer header: the problem, and a field that is unknown here.
struct NewerProblem {
  cuflash_problem_t problem;
  int64_t unknown;
};

using Spoil = std::function<void(Call&)>;

const std::map<std::string, Spoil>& spoilers() {
  static const std::map<std::string, Spoil> table = {
      {"dtype", [](Call& c) { c.problem.q.dtype = 99; }},
      {"dtype-of-k", [](Call& c) { c.problem.k.dtype = CUFLASH_F16; }},
      {"dtype-of-o", [](Call& c) { c.problem.o.dtype = CUFLASH_F16; }},
      {"device-unknown", [](Call& c) { c.device = 999; }},
      {"device-negative", [](Call& c) { c.device = -99; }},
      {"stream-on-cpu", [](Call& c) { c.stream = reinterpret_cast<cuflash_stream_t>(&c); }},
      {"stride-negative",
       [](Call& c) {
         c.problem.k =
             cuflash::strided(c.k.data(), c.kHeadsKv * c.kLenK * c.kDim, c.kLenK * c.kDim, -c.kDim);
       }},
      {"heads", [](Call& c) { c.problem.heads_q = 3; }},
      {"head-dim", [](Call& c) { c.problem.head_dim = 577; }},
      {"extent-negative", [](Call& c) { c.problem.batch = -1; }},
      {"null", [](Call& c) { c.problem.q.data = nullptr; }},
      {"misaligned",
       [](Call& c) { c.problem.q.data = reinterpret_cast<unsigned char*>(c.q.data()) + 1; }},
      {"struct-size", [](Call& c) { c.problem.struct_size = 8; }},
      {"struct-newer",
       [](Call& c) {
         NewerProblem newer = {c.problem, 1};
         newer.problem.struct_size = sizeof newer;
         check(cuflash_attention_forward(c.handle, &newer.problem, nullptr));
       }},
      {"flag-unknown", [](Call& c) { c.problem.flags = 0x80000000u; }},
      {"scale-negative",
       [](Call& c) { c.problem.flags = CUFLASH_PROBLEM_SCALE_SET, c.problem.scale = -1; }},
      {"scale-nan",
       [](Call& c) { c.problem.flags = CUFLASH_PROBLEM_SCALE_SET, c.problem.scale = NAN; }},
      {"window",
       [](Call& c) { c.problem.flags = CUFLASH_PROBLEM_WINDOW, c.problem.window_left = -5; }},
      {"splits", [](Call& c) { c.problem.num_splits = 2000; }},
      {"tree-mask", [](Call& c) { c.problem.tree_mask = &c.words; }},
      {"zero-of-floats", [](Call& c) { c.cache.k_zero = c.d_o.data(); }},
      {"append-nowhere", [](Call&) {}},  // the cache has no lengths
      {"rotary-dim",
       [](Call& c) {
         c.append.cos = c.append.sin = c.d_o.data();
         c.append.max_position = 1;
         c.append.rotary_dim = c.kDim + 2;
       }},
      {"kernel-unknown", [](Call& c) { c.problem.kernel = "nonsense"; }},
      {"kernel-refuses", [](Call& c) { c.problem.kernel = "fwd_reference"; }},
      {"option", [](Call& c) { c.value = -1; }},
      {"option-unknown", [](Call& c) { c.option = 99; }},
      {"arch-unknown", [](Call& c) { c.problem.target_arch = 12; }},
      {"arch-of-a-call", [](Call& c) { c.problem.target_arch = 90; }},
      {"o-is-q", [](Call& c) { c.problem.o = c.problem.q; }},
      {"dk-is-dv", [](Call& c) { c.gradients.dk = c.gradients.dv; }},
      {"o-repeats",
       [](Call& c) {
         c.problem.o =
             cuflash::strided(c.o.data(), c.kHeadsQ * c.kLenQ * c.kDim, c.kLenQ * c.kDim, 0);
       }},
      {"workspace-too-small", [](Call& c) { c.give_workspace_one_byte_short(); }},
  };
  return table;
}

TEST(BadInput, EveryCallOfTheTable) {
  Call first;
  first.make("forward");
  int impossible = 0;
  const std::vector<Row> rows = rows_of_table(&impossible);
  for (const Row& row : rows) {
    SCOPED_TRACE(row.id);
    ASSERT_EQ(spoilers().count(row.id), 1u) << "a call of the table without code";
    Call bad;
    try {
      spoilers().at(row.id)(bad);
      bad.make(row.operation);
      ADD_FAILURE() << "was not refused";
    } catch (const cuflash::Error& error) {
      const std::string message = error.what();
      bool expected = false;
      for (const std::string& status : split(row.status, '|'))
        expected = expected || "CUFLASH_ERROR_" + status == cuflash_status_name(error.status());
      EXPECT_TRUE(expected) << message;
      for (const std::string& word : split(row.words, ',')) {
        bool found = word == "-";
        for (const std::string& either : split(word, '|'))
          found = found || message.find(either) != std::string::npos;
        EXPECT_TRUE(found) << "no " << word << " in: " << message;
      }
    }
    EXPECT_TRUE(bad.nothing_written());
    Call good;
    good.make("forward");
    EXPECT_EQ(good.o, first.o);
  }
  EXPECT_EQ(rows.size(), spoilers().size()) << "code for a call that is not in the table";
  std::printf("%zu calls refused, %d cannot be written in C++\n", rows.size(), impossible);
}

}  // namespace
