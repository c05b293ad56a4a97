#include "survey.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "memory.hpp"

namespace cuflash_info {
namespace {

constexpr int64_t kHeadDims[] = {32, 64, 96, 128, 192, 256};

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

template <class Items>
std::string joined(const Items& items, const char* separator) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : separator) + std::string(item);
  return text;
}

// Its number, where this program does not know the operation.
Json operation_name(int32_t operation) {
  for (const Named& row : kOperations)
    if (row.value == operation) return row.name;
  if (operation == CUFLASH_OPERATION_APPEND) return "append";  // no question can be about it
  return operation;
}

// From "cuflash 0.7.0, CUDA 13.0 for 80-real,90a-real, compiler 12.2.0".
Json architectures_of(const std::string& build) {
  Json architectures = Json::array();
  const std::string before = " for ";
  const size_t found = build.find(before);
  if (found == build.npos) return architectures;  // a build for the CPU device alone
  const size_t begin = found + before.size();
  std::istringstream list(build.substr(begin, build.find(", ", begin) - begin));
  for (std::string item; std::getline(list, item, ',');) architectures.push_back(item);
  return architectures;
}

Json kernels_of_library() {
  Json kernels = Json::array();
  for (int32_t index = 0; index < cuflash_kernel_count(); ++index) {
    auto info = cuflash::make<cuflash_kernel_info_t>();
    cuflash::check(cuflash_kernel_info(index, &info));
    kernels.push_back({{"name", info.name},
                       {"family", info.family},
                       {"operation", operation_name(info.operation)},
                       {"device", info.on_cpu != 0 ? "cpu" : "cuda"},
                       {"built", info.built != 0},
                       {"rank", info.rank},
                       {"tile_m", info.tile_m},
                       {"tile_n", info.tile_n},
                       {"threads", info.threads},
                       {"shared_memory", info.shared_memory}});
  }
  return kernels;
}

std::set<std::string> names_of_kernels(const char* device) {
  std::set<std::string> names;
  for (const Json& kernel : kernels_of_library())
    if (kernel["device"] == device) names.insert(kernel["name"]);
  return names;
}

// The kernels of an answer that belong to its kind of device, highest rank first.
std::vector<Json> kernels_of(const Json& answer) {
  const auto names = names_of_kernels(answer["device"] == "cpu" ? "cpu" : "cuda");
  std::vector<Json> kernels;
  for (const Json& kernel : answer["kernels"])
    if (names.count(kernel["name"]) > 0) kernels.push_back(kernel);
  std::stable_sort(kernels.begin(), kernels.end(), [](const Json& a, const Json& b) {
    return a["rank"].get<int>() > b["rank"].get<int>();
  });
  return kernels;
}

// A plain problem of a usual size: what else refuses kernels, --explain tells.
Question usual_question(const Named& operation, const Named& dtype, int64_t head_dim) {
  Question question;
  question.operation = operation;
  question.dtype = dtype;
  question.causal = true;
  question.batch = 4;
  question.heads_q = question.heads_kv = 32;
  question.len_q = operation.value == CUFLASH_OPERATION_DECODE ? 1 : 4096;
  question.len_k = 4096;
  question.head_dim = head_dim;
  return question;
}

Json choice_of(const Target& target, const Named& operation, const Named& dtype, int64_t head_dim) {
  const Json answer = ask(target, usual_question(operation, dtype, head_dim));
  Json choice = {{"operation", operation.name}, {"dtype", dtype.name},
                 {"head_dim", head_dim},        {"kernel", answer["kernel"]},
                 {"family", answer["family"]},  {"refused", Json::array()}};
  for (const Json& kernel : kernels_of(answer)) {
    if (kernel["name"] == answer["kernel"]) break;
    if (kernel["accepted"] == true) continue;  // CUFLASH_KERNEL forced another
    choice["refused"].push_back({{"name", kernel["name"]},
                                 {"family", kernel["family"]},
                                 {"rank", kernel["rank"]},
                                 {"reason", kernel["reason"]}});
  }
  return choice;
}

Json description(const Target& target) {
  const Json answer = ask(target, usual_question(kOperations[0], kDtypes[0], kHeadDims[0]));
  const std::string kind = answer["device"];  // "cpu" or "sm_90"
  Json described = {{"name", target.name}, {"model", nullptr}, {"arch", nullptr}};
  if (kind != "cpu") described["arch"] = std::stoi(kind.substr(kind.find('_') + 1));
  if (target.target_arch == 0 && kind != "cpu") described["model"] = model_of(target.device);
  return described;
}

// ---- text -----------------------------------------------------------------------------------------------

std::string heading(const Json& device) {
  std::string text = device["name"];
  if (device["model"].is_string())
    text += format(", %s, sm_%d", device["model"].get<std::string>().c_str(),
                   device["arch"].get<int>());
  return text;
}

// Names of kernels end in their dtype and their bucket of head dims: "fwd_wmma_f16_d64".
bool is_for_another_dtype(const std::string& kernel, const std::string& dtype) {
  return std::any_of(std::begin(kDtypes), std::end(kDtypes), [&](const Named& other) {
    return dtype != other.name && kernel.find(std::string("_") + other.name + "_") != kernel.npos;
  });
}

// Of a family that ranks above the choice, the reasons of the kernels that come nearest: those for the dtype, if it has
// any, and among them those of the lowest rank, which take the most.
std::string nearest_reason(const Json& choice, const std::string& family) {
  std::vector<Json> kernels, fitting;
  for (const Json& kernel : choice["refused"])
    if (kernel["family"] == family) kernels.push_back(kernel);
  for (const Json& kernel : kernels)
    if (!is_for_another_dtype(kernel["name"], choice["dtype"])) fitting.push_back(kernel);
  if (fitting.empty()) fitting = kernels;
  std::set<std::string> reasons;
  for (const Json& kernel : fitting)
    if (kernel["rank"] == fitting.back()["rank"]) reasons.insert(kernel["reason"]);
  return joined(reasons, "; ");
}

std::string text_of_reasons(const Json& choices) {
  using Place = std::pair<std::string, std::string>;  // operation, and dtype or head dims
  // family -> reason -> operation and dtype -> head dims
  std::map<std::string, std::map<std::string, std::map<Place, std::string>>> families;
  for (const Json& choice : choices) {
    std::set<std::string> names;
    for (const Json& kernel : choice["refused"]) names.insert(kernel["family"]);
    if (choice["family"].is_string()) names.erase(choice["family"]);
    for (const std::string& name : names)
      families[name][nearest_reason(choice, name)][Place(choice["operation"], choice["dtype"])] +=
          format(" %d", choice["head_dim"].get<int>());
  }
  if (families.empty()) return "  no family of a higher rank refuses\n";
  std::string every;
  for (const int64_t head_dim : kHeadDims) every += format(" %d", static_cast<int>(head_dim));
  std::string text = "  why not a family of a higher rank:\n";
  for (const auto& [family, reasons] : families) {
    for (const auto& [reason, places] : reasons) {
      text += format("    %-9s  %s\n", family.c_str(), reason.c_str());
      std::map<Place, std::string> dtypes;  // of an operation and head dims
      for (const auto& [place, head_dims] : places)
        dtypes[Place(place.first, head_dims)] += " " + place.second;
      for (const auto& [place, list] : dtypes)
        text += format("    %-9s    %s%s%s\n", "", place.first.c_str(), list.c_str(),
                       place.second == every ? "" : (", head dim" + place.second).c_str());
    }
  }
  return text;
}

std::string line(std::string text) {
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

std::string text_of_choices(const Json& choices) {
  std::string row = format("  %-14s", "head dim");
  for (const int64_t head_dim : kHeadDims) row += format("  %-9d", static_cast<int>(head_dim));
  std::string text = line(row);
  for (size_t i = 0; i < choices.size(); ++i) {
    const Json& choice = choices[i];
    if (i % std::size(kHeadDims) == 0)
      row = format("  %-8s  %-4s", choice["operation"].get<std::string>().c_str(),
                   choice["dtype"].get<std::string>().c_str());
    const Json& family = choice["family"];
    row += format("  %-9s", family.is_string() ? family.get<std::string>().c_str() : "none");
    if ((i + 1) % std::size(kHeadDims) == 0) text += line(row);
  }
  return text;
}

std::string text_of_unusable(const Json& document) {
  std::string text;
  for (const Json& device : document["unusable"])
    text += device["name"].get<std::string>() +
            ": unusable: " + device["reason"].get<std::string>() + "\n";
  return text;
}

std::string text_of_library(const Json& document) {
  const Json& kernels = document["kernels"];
  const auto built = std::count_if(kernels.begin(), kernels.end(),
                                   [](const Json& k) { return k["built"] == true; });
  const Json& architectures = document["architectures"];
  return format(
      "%s\n  ABI            %d\n  architectures  %s\n  kernels        %d, %d in this build\n",
      document["build"].get<std::string>().c_str(), document["abi"].get<int>(),
      architectures.empty() ? "none" : joined(architectures, " ").c_str(),
      static_cast<int>(kernels.size()), static_cast<int>(built));
}

}  // namespace

Json about_library() {
  int32_t major = 0, minor = 0, patch = 0;
  cuflash_version(&major, &minor, &patch);
  const std::string build = cuflash_build_info();
  return {{"format", 1},
          {"version", format("%d.%d.%d", major, minor, patch)},
          {"abi", cuflash_abi_version()},
          {"build", build},
          {"architectures", architectures_of(build)}};
}

Json survey(const std::vector<Target>& targets) {
  Json document = about_library();
  document["kernels"] = kernels_of_library();
  document["devices"] = Json::array();
  for (const Target& target : targets) {
    Json device = description(target);
    device["choices"] = Json::array();
    for (const Named& operation : kOperations)
      for (const Named& dtype : kDtypes)
        for (const int64_t head_dim : kHeadDims)
          device["choices"].push_back(choice_of(target, operation, dtype, head_dim));
    document["devices"].push_back(std::move(device));
  }
  return document;
}

std::string text_of_survey(const Json& document) {
  std::string text = text_of_library(document) + text_of_unusable(document);
  for (const Json& device : document["devices"])
    text += "\n" + heading(device) + "\n" + text_of_choices(device["choices"]) +
            text_of_reasons(device["choices"]);
  return text;
}

Json explanation(const Target& target, const Question& question) {
  Json document = about_library();
  document["device"] = description(target);
  document["question"] = words_of(question);
  document["answer"] = ask(target, question);
  return document;
}

std::string text_of_explanation(const Json& document) {
  const Json& answer = document["answer"];
  const bool taken = answer["kernel"].is_string();
  std::string text = format(
      "%s\n  on %s\n\n  kernel     %s\n  launches   %lld\n  workspace  %lld bytes\n  splits     "
      "%lld\n\n  rank  %-24s  %s\n",
      document["question"].get<std::string>().c_str(), heading(document["device"]).c_str(),
      taken ? answer["kernel"].get<std::string>().c_str() : "none",
      answer["launches"].get<long long>(), answer["workspace_bytes"].get<long long>(),
      answer["num_splits"].get<long long>(), "kernel", "taken, or why not");
  for (const Json& kernel : kernels_of(answer)) {
    std::string verdict = "would take it too";
    if (kernel["reason"].is_string()) verdict = kernel["reason"];
    if (kernel["name"] == answer["kernel"]) verdict = "taken";
    text += format("  %4d  %-24s  %s\n", kernel["rank"].get<int>(),
                   kernel["name"].get<std::string>().c_str(), verdict.c_str());
  }
  return text;
}

std::string text_of_self_test(const Json& document) {
  std::string text = text_of_unusable(document);
  for (const Json& result : document["results"]) {
    const Json& kernel = result["kernel"];
    text += format(
        "%-7s  %-8s  %-8s  %-4s  D%-3d  %-24s  ", result["result"].get<std::string>().c_str(),
        result["device"].get<std::string>().c_str(), result["operation"].get<std::string>().c_str(),
        result["dtype"].get<std::string>().c_str(), result["head_dim"].get<int>(),
        kernel.is_string() ? kernel.get<std::string>().c_str() : "");
    if (result.contains("message"))
      text += result["message"].get<std::string>() + "\n";
    else
      text += format("error %.1e, allowed %.1e\n", result["error"].get<double>(),
                     result["allowed"].get<double>());
  }
  return text + format("%d passed, %d failed, %d skipped\n", document["passed"].get<int>(),
                       document["failed"].get<int>(), document["skipped"].get<int>());
}

}  // namespace cuflash_info
