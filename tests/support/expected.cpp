#include "support/expected.hpp"

#include <cstring>
#include <list>

namespace cuflash_test {
namespace {

// 128 bits of everything that the oracle reads: two problems do not share them by chance.
class Key {
 public:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    a_ = (a_ ^ word) * 0x9e3779b97f4a7c15u;
    a_ ^= a_ >> 29;
    b_ = (b_ + word) * 0xc2b2ae3d27d4eb4fu;
    b_ ^= b_ >> 31;
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.size());
    for (const T& value : values) add(value);
  }
  void add(const Tensor& t) {
    for (const int64_t extent : {t.batch, t.heads, t.rows, t.dim}) add(extent);
    add(t.x);
  }
  bool operator==(const Key& other) const { return a_ == other.a_ && b_ == other.b_; }

 private:
  uint64_t a_ = 1, b_ = 2;
};

Key key_of(const Problem& p, const Inputs& inputs) {
  Key key;
  key.add(p.operation);
  key.add(p.dtype);
  const Shape& s = p.shape;
  for (const int64_t n : {s.batch, s.heads_q, s.heads_kv, s.len_q, s.len_k, s.head_dim, s.dim_v()})
    key.add(n);
  key.add(p.mask.causal);
  key.add(p.mask.align);
  key.add(p.mask.offset);
  key.add(p.mask.offsets);
  key.add(p.mask.window);
  key.add(p.mask.left);
  key.add(p.mask.right);
  key.add(p.scale_set);
  key.add(p.scale);
  key.add(p.lengths);
  key.add(p.left_pad);
  key.add(p.lengths_q);
  key.add(p.softcap);
  key.add(p.bias ? p.bias->dtype : Dtype{});
  key.add(p.slopes.has_value());
  key.add(p.sinks.value_or(Dtype{}));
  key.add(p.dropout.p);
  key.add(p.dropout.seed);
  key.add(p.dropout.offset);
  key.add(p.tree ? p.tree->bits : -1);
  if (p.tree) key.add(p.tree->shown);
  key.add(p.wide);
  key.add(p.d_lse);
  // Not o and lse: those are the kernel's own, and neither algorithm reads them.
  for (const Tensor* t : {&inputs.q, &inputs.k, &inputs.v, &inputs.d_o, &inputs.bias,
                          &inputs.slopes, &inputs.sinks, &inputs.d_lse})
    key.add(*t);
  return key;
}

size_t bytes_of(const Results& r) {
  return sizeof(double) * (r.o.x.size() + r.lse.x.size() + r.dq.x.size() + r.dk.x.size() +
                           r.dv.x.size() + r.d_bias.x.size() + r.d_sinks.x.size());
}

size_t bytes_of(const Expected& expected) {
  size_t bytes = bytes_of(expected.reference);
  for (const Results& sample : expected.plain) bytes += bytes_of(sample);
  return bytes;
}

struct Entry {
  Key key;
  Expected expected;
};
thread_local std::list<Entry> t_entries;  // the youngest first

void make_room() {
  size_t bytes = 0;
  for (auto entry = t_entries.begin(); entry != t_entries.end(); ++entry) {
    bytes += bytes_of(entry->expected);
    if (bytes <= kExpectedBytes) continue;
    t_entries.erase(entry, t_entries.end());
    return;
  }
}

}  // namespace

Expected& expected_of(const Problem& problem, const Inputs& inputs) {
  const Key key = key_of(problem, inputs);
  for (auto entry = t_entries.begin(); entry != t_entries.end(); ++entry)
    if (entry->key == key) {
      t_entries.splice(t_entries.begin(), t_entries, entry);
      return t_entries.front().expected;
    }
  make_room();
  t_entries.push_front({key, {oracle(problem, inputs), {}}});
  t_entries.front().expected.plain.push_back(plain(problem, inputs));
  return t_entries.front().expected;
}

}  // namespace cuflash_test
