// cuflash-info: what the library holds, which kernel a call takes and why, and whether it computes right here.
#include <getopt.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>

#include "selftest.hpp"
#include "survey.hpp"

namespace cuflash_info {
namespace {

constexpr int kWrongResult = 1;
constexpr int kBadCommandLine = 2;

constexpr char kHelp[] =
    "usage: cuflash-info [OPTION ...]\n"
    "\n"
    "Shows what libcuflash holds, the devices, and which kernels they take and why.\n"
    "\n"
    "  --explain QUESTION  one call: \"forward bf16 causal B4 H32 S4096 D128\"\n"
    "  --selftest          compute small problems and compare with double precision\n"
    "  --device N          only this device: a CUDA ordinal, or cpu\n"
    "  --arch N            for a GPU that need not be here: 90 for sm_90\n"
    "  --json              one JSON document instead of text\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0; 1 a self-test failed; 2 the command line cannot be answered.\n"
    "cuflash-info(1) has the words of a question and the keys of the JSON.\n";

struct Options {
  bool json = false, self_test = false;
  std::optional<std::string> question;
  std::optional<int32_t> device, arch;
};

int32_t number(const char* option, const char* text) {
  int32_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < 0)
    throw UsageError(std::string(option) + ": \"" + text + "\" is no number");
  return value;
}

// Nothing where --help or --version was all that was wanted.
std::optional<Options> parse_options(int argc, char** argv) {
  enum Key : int { kJson = 1, kSelfTest, kExplain, kArch, kDevice, kHelpKey, kVersion };
  const option long_options[] = {
      {"json", no_argument, nullptr, kJson},
      {"selftest", no_argument, nullptr, kSelfTest},
      {"explain", required_argument, nullptr, kExplain},
      {"arch", required_argument, nullptr, kArch},
      {"device", required_argument, nullptr, kDevice},
      {"help", no_argument, nullptr, kHelpKey},
      {"version", no_argument, nullptr, kVersion},
      {},
  };
  Options options;
  for (int key; (key = getopt_long(argc, argv, "", long_options, nullptr)) != -1;) {
    switch (key) {
      case kJson:
        options.json = true;
        break;
      case kSelfTest:
        options.self_test = true;
        break;
      case kExplain:
        options.question = optarg;
        break;
      case kArch:
        options.arch = number("--arch", optarg);
        break;
      case kDevice:
        options.device =
            std::strcmp(optarg, "cpu") == 0 ? CUFLASH_DEVICE_CPU : number("--device", optarg);
        break;
      case kHelpKey:
        std::fputs(kHelp, stdout);
        return std::nullopt;
      case kVersion:
        std::puts(("cuflash-info " + about_library()["version"].get<std::string>()).c_str());
        return std::nullopt;
      default:  // getopt_long has said what is wrong
        throw UsageError("--help lists the options");
    }
  }
  if (optind < argc) throw UsageError(std::string("unknown argument \"") + argv[optind] + "\"");
  if (options.arch && options.device) throw UsageError("--arch and --device exclude each other");
  if (options.self_test && (options.arch || options.question))
    throw UsageError("--selftest computes: it goes neither with --arch nor with --explain");
  return options;
}

Target device_target(int32_t device) {
  Target target;
  target.name = device == CUFLASH_DEVICE_CPU ? "cpu" : "cuda:" + std::to_string(device);
  target.device = device;
  return target;
}

// All devices of the machine, CUDA's first. *unusable gets those that the library cannot answer for, and why there is
// none of CUDA's.
std::vector<Target> all_devices(Json* unusable) {
  std::vector<Target> targets;
  const auto add_unusable = [&](const std::string& name, const cuflash::Error& error) {
    unusable->push_back({{"name", name}, {"reason", error.what()}});
  };
  for (int32_t ordinal = 0;; ++ordinal) {
    Target target = device_target(ordinal);
    if (const cuflash_status_t status = target.handle.create(ordinal)) {
      if (ordinal == 0) add_unusable("cuda", cuflash::Error(status));
      break;
    }
    try {
      ask(target, parse_question("forward f32 S1 D1"));
      targets.push_back(std::move(target));
    } catch (const cuflash::Error& error) {
      add_unusable(target.name, error);
    }
  }
  targets.push_back(device_target(CUFLASH_DEVICE_CPU));
  cuflash::check(targets.back().handle.create(CUFLASH_DEVICE_CPU));
  return targets;
}

std::vector<Target> find_targets(const Options& options, Json* unusable) {
  std::vector<Target> targets;
  if (options.arch) {
    Target target;
    target.name = "sm_" + std::to_string(*options.arch);
    target.target_arch = *options.arch;
    targets.push_back(std::move(target));
  } else if (options.device) {
    targets.push_back(device_target(*options.device));
    cuflash::check(targets.back().handle.create(*options.device));
  } else {
    targets = all_devices(unusable);
  }
  return targets;
}

Json run_self_test(const std::vector<Target>& targets) {
  Json document = about_library();
  document["results"] = Json::array();
  for (const char* outcome : {"passed", "failed", "skipped"}) document[outcome] = 0;
  for (const Target& target : targets) {
    for (Json& result : self_test(target)) {
      Json& count = document[result["result"].get<std::string>()];
      count = count.get<int>() + 1;
      document["results"].push_back(std::move(result));
    }
  }
  return document;
}

int run(const Options& options) {
  Json unusable = Json::array();
  const std::vector<Target> targets = find_targets(options, &unusable);
  Json document;
  std::string (*text)(const Json&) = nullptr;
  int status = 0;
  if (options.self_test) {
    document = run_self_test(targets);
    text = text_of_self_test;
    // Where everything was skipped nothing was shown.
    if (document["failed"] != 0 || document["passed"] == 0) status = kWrongResult;
  } else if (options.question) {
    document = explanation(targets.front(), parse_question(*options.question));
    text = text_of_explanation;
  } else {
    document = survey(targets);
    text = text_of_survey;
  }
  document["unusable"] = std::move(unusable);
  std::fputs((options.json ? document.dump(2) + "\n" : text(document)).c_str(), stdout);
  return status;
}

}  // namespace
}  // namespace cuflash_info

int main(int argc, char** argv) {
  try {
    const auto options = cuflash_info::parse_options(argc, argv);
    return options ? cuflash_info::run(*options) : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuflash-info: %s\n", error.what());
    return cuflash_info::kBadCommandLine;
  }
}
