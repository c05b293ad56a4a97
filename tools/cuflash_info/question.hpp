// A question in words, "forward bf16 causal B4 H32 S4096 D128", and the library's answer to it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "cuflash.hpp"

namespace cuflash_info {

using Json = nlohmann::ordered_json;

// A command line that cannot be answered; the text says why.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Named {
  const char* name;
  int32_t value;
};
constexpr Named kOperations[] = {{"forward", CUFLASH_OPERATION_FORWARD},
                                 {"backward", CUFLASH_OPERATION_BACKWARD},
                                 {"decode", CUFLASH_OPERATION_DECODE}};
constexpr Named kDtypes[] = {{"f32", CUFLASH_F32}, {"f16", CUFLASH_F16}, {"bf16", CUFLASH_BF16}};

// A device of this machine, or a GPU that need not be here.
struct Target {
  std::string name;         // "cpu", "cuda:0", "sm_90"
  int32_t device = 0;       // as cuflash_create() takes it
  int32_t target_arch = 0;  // as the problem's; 0: the handle's device
  cuflash::Handle handle;   // empty with a target_arch
};

struct Question {
  Named operation = {nullptr, 0};
  Named dtype = {nullptr, 0};
  bool causal = false;
  bool window = false;
  int64_t window_left = -1, window_right = -1;
  int32_t align = CUFLASH_ALIGN_BOTTOM_RIGHT;
  int64_t offset = 0;
  int64_t batch = 1, heads_q = 1, heads_kv = 1, len_q = 0, len_k = 0, head_dim = 0;
};

// Throws UsageError where a word is unknown, missing or given twice.
Question parse_question(const std::string& text);

// The question with nothing left to defaults, in the words that parse_question() takes.
std::string words_of(const Question& question);

// What cuflash_..._explain() says; throws cuflash::Error where it refuses.
Json ask(const Target& target, const Question& question);

}  // namespace cuflash_info
