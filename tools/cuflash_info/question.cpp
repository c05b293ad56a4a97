#include "question.hpp"

#include <charconv>
#include <map>
#include <set>
#include <sstream>

namespace cuflash_info {
namespace {

constexpr char kWords[] =
    "forward, backward, decode; f32, f16, bf16; full, causal, window LEFT,RIGHT; bottom-right, "
    "top-left, offset N; B, H, Hkv, S, Sq, Sk, D with a number";

int64_t number(const std::string& text, const std::string& word) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end)
    throw UsageError("\"" + text + "\" of \"" + word + "\" is no 64-bit integer");
  return value;
}

template <size_t kCount>
const Named* find(const Named (&rows)[kCount], const std::string& name) {
  for (const Named& row : rows)
    if (name == row.name) return &row;
  return nullptr;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : words_(text) {}

  Question parse() {
    for (std::string word; words_ >> word;) take(word);
    if (q_.operation.name == nullptr)
      throw UsageError("the operation is missing: forward, backward or decode");
    if (q_.dtype.name == nullptr) throw UsageError("the dtype is missing: f32, f16 or bf16");
    set_sizes();
    return q_;
  }

 private:
  void take(const std::string& word) {
    if (const Named* operation = find(kOperations, word)) {
      once("the operation");
      q_.operation = *operation;
    } else if (const Named* dtype = find(kDtypes, word)) {
      once("the dtype");
      q_.dtype = *dtype;
    } else if (word == "full" || word == "causal") {
      once("the mask");
      q_.causal = word == "causal";
    } else if (word == "window") {
      once("the window");
      q_.window = true;
      const std::string sides = next(word);
      const size_t comma = sides.find(',');
      if (comma == std::string::npos) throw UsageError("window: \"" + sides + "\"; LEFT,RIGHT");
      q_.window_left = number(sides.substr(0, comma), word);
      q_.window_right = number(sides.substr(comma + 1), word);
    } else if (word == "bottom-right" || word == "top-left" || word == "offset") {
      once("the alignment");
      if (word == "top-left") q_.align = CUFLASH_ALIGN_TOP_LEFT;
      if (word == "offset") {
        q_.align = CUFLASH_ALIGN_OFFSET;
        q_.offset = number(next(word), word);
      }
    } else {
      take_size(word);
    }
  }

  void take_size(const std::string& word) {
    static const std::set<std::string> names = {"B", "H", "Hkv", "S", "Sq", "Sk", "D"};
    const size_t digits = word.find_first_of("-0123456789");
    const std::string name = word.substr(0, digits);
    if (digits == std::string::npos || names.count(name) == 0)
      throw UsageError("unknown word \"" + word + "\"; there are " + kWords);
    once(name);
    sizes_[name] = number(word.substr(digits), word);
  }

  void set_sizes() {
    const bool decode = q_.operation.value == CUFLASH_OPERATION_DECODE;
    if (decode) sizes_.emplace("Sq", 1);
    if (sizes_.count("S") > 0) {
      sizes_.emplace("Sq", sizes_["S"]);
      sizes_.emplace("Sk", sizes_["S"]);
    }
    sizes_.emplace("B", 1);
    sizes_.emplace("H", 1);
    sizes_.emplace("Hkv", sizes_["H"]);
    q_.batch = sizes_["B"];
    q_.heads_q = sizes_["H"];
    q_.heads_kv = sizes_["Hkv"];
    q_.len_q = required("Sq", "S or Sq and Sk");
    q_.len_k = required("Sk", decode ? "S or Sk" : "S or Sq and Sk");
    q_.head_dim = required("D", "D");
  }

  int64_t required(const char* name, const char* words) const {
    const auto found = sizes_.find(name);
    if (found == sizes_.end()) throw UsageError(std::string("a size is missing: ") + words);
    return found->second;
  }

  std::string next(const std::string& word) {
    std::string value;
    if (!(words_ >> value)) throw UsageError("nothing follows \"" + word + "\"");
    return value;
  }

  void once(const std::string& what) {
    if (!given_.insert(what).second) throw UsageError(what + " is given twice");
  }

  std::istringstream words_;
  Question q_;
  std::map<std::string, int64_t> sizes_;
  std::set<std::string> given_;
};

// Queries read no pointer.
cuflash_tensor_t tensor_of(const Question& question) {
  cuflash_tensor_t tensor = {};
  tensor.flags = CUFLASH_TENSOR_DENSE;
  tensor.dtype = question.dtype.value;
  return tensor;
}

cuflash_problem_t problem_of(const Target& target, const Question& question) {
  auto problem = cuflash::make<cuflash_problem_t>();
  problem.batch = question.batch;
  problem.heads_q = question.heads_q;
  problem.heads_kv = question.heads_kv;
  problem.len_q = question.len_q;
  problem.head_dim = question.head_dim;
  problem.q = problem.o = tensor_of(question);
  if (question.operation.value != CUFLASH_OPERATION_DECODE) {
    problem.len_k = question.len_k;
    problem.k = problem.v = problem.q;
  }
  problem.mask = question.causal ? CUFLASH_MASK_CAUSAL : CUFLASH_MASK_NONE;
  problem.mask_align = question.align;
  problem.mask_offset = question.offset;
  if (question.window) {
    problem.flags = CUFLASH_PROBLEM_WINDOW;
    problem.window_left = question.window_left;
    problem.window_right = question.window_right;
  }
  problem.target_arch = target.target_arch;
  return problem;
}

// Calls the query twice: for the length, and for the text.
template <class Query>
Json parsed(Query query) {
  size_t needed = 0;
  cuflash::check(query(nullptr, 0, &needed));
  std::string text(needed, '\0');
  cuflash::check(query(text.data(), text.size(), nullptr));
  text.pop_back();  // the NUL
  return Json::parse(text);
}

}  // namespace

Question parse_question(const std::string& text) { return Parser(text).parse(); }

std::string words_of(const Question& question) {
  std::ostringstream words;
  words << question.operation.name << ' ' << question.dtype.name << ' '
        << (question.causal ? "causal" : "full");
  if (question.window) words << " window " << question.window_left << ',' << question.window_right;
  if (question.align == CUFLASH_ALIGN_TOP_LEFT) words << " top-left";
  if (question.align == CUFLASH_ALIGN_OFFSET) words << " offset " << question.offset;
  words << " B" << question.batch << " H" << question.heads_q << " Hkv" << question.heads_kv
        << " Sq" << question.len_q << " Sk" << question.len_k << " D" << question.head_dim;
  return words.str();
}

Json ask(const Target& target, const Question& question) {
  const cuflash_problem_t problem = problem_of(target, question);
  if (question.operation.value == CUFLASH_OPERATION_DECODE) {
    auto cache = cuflash::make<cuflash_kv_cache_t>();
    cache.k = cache.v = tensor_of(question);
    cache.max_len = question.len_k;
    return parsed([&](char* text, size_t capacity, size_t* needed) {
      return cuflash_decode_explain(target.handle, &problem, &cache, text, capacity, needed);
    });
  }
  if (question.operation.value == CUFLASH_OPERATION_BACKWARD) {
    auto gradients = cuflash::make<cuflash_gradients_t>();
    gradients.d_o = gradients.dq = gradients.dk = gradients.dv = tensor_of(question);
    return parsed([&](char* text, size_t capacity, size_t* needed) {
      return cuflash_backward_explain(target.handle, &problem, &gradients, text, capacity, needed);
    });
  }
  return parsed([&](char* text, size_t capacity, size_t* needed) {
    return cuflash_forward_explain(target.handle, &problem, text, capacity, needed);
  });
}

}  // namespace cuflash_info
