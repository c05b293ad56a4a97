#include "flags.hpp"

#include <algorithm>
#include <cstdio>
#include <set>

#include <CLI/CLI.hpp>

#include "cuflash.hpp"

namespace cuflash_bench {
namespace {

constexpr char kAbout[] =
    "Times libcuflash on dense problems, whose results are checked before and after, and writes\n"
    "lines of JSON. Every combination of the lists is measured.";
constexpr char kExample[] =
    "Example: causal f16 attention with grouped heads, at two lengths, on the current GPU\n"
    "\n"
    "  cuflash-bench --dtype f16 --mask causal --heads 32 --heads-kv 8 --len 2048,8192 \\\n"
    "    --head-dim 128 --output results.jsonl\n"
    "\n"
    "cuflash-bench(1) has the keys of the lines.\n"
    "Exit status: 0; 1 a result was wrong or missing; 2 the command line cannot be answered.";

constexpr int64_t kLargest = 2147483647;  // of an extent, as in cuflash.h

// Whole numbers from 1; the help says no more than that.
CLI::Validator count_up_to(int64_t largest) {
  return CLI::Range(int64_t{1}, largest).description("");
}

CLI::Validator positive_seconds() {
  return {[](const std::string& text) {
            double seconds = 0;
            const bool good = CLI::detail::lexical_cast(text, seconds) && seconds > 0;
            return good ? std::string() : text + " is no positive number";
          },
          "", "positive"};
}

// A list with commas, which ends where the word ends.
template <class T>
CLI::Option* add_list(CLI::App* app, const char* name, std::vector<T>* list, const char* about) {
  return app->add_option(name, *list, about)->delimiter(',')->allow_extra_args(false);
}

CLI::Option* add_extents(CLI::App* app, const char* name, std::vector<int64_t>* list,
                         const char* about) {
  return add_list(app, name, list, about)->check(count_up_to(kLargest))->type_name("N,...");
}

CLI::Option* add_words(CLI::App* app, const char* name, std::vector<std::string>* list,
                       const std::vector<std::string>& allowed, const char* about) {
  return add_list(app, name, list, about)
      ->check(CLI::IsMember(allowed).description(""))
      ->type_name("WORD,...");
}

void add_axes(CLI::App* app, Axes* axes) {
  app->add_option_function<int64_t>(
         "--tokens", [axes](int64_t tokens) { axes->tokens = tokens; },
         "of all sequences, where --batch is not given (16384)")
      ->check(count_up_to(kLargest))
      ->type_name("N");
  app->add_option_function<int64_t>(
         "--hidden", [axes](int64_t hidden) { axes->hidden = hidden; },
         "channels of all query heads, where --heads is not given (2048)")
      ->check(count_up_to(kLargest))
      ->type_name("N");
  add_words(app, "--dtype", &axes->dtype, {"f32", "f16", "bf16"}, "f32, f16, bf16 (bf16)");
  add_words(app, "--mask", &axes->mask, {"full", "causal", "window"},
            "full, causal, window (full,causal)");
  add_extents(app, "--window", &axes->window,
              "with --mask window: keys that a row sees, itself the last");
  add_extents(app, "--len", &axes->len, "rows and keys of a sequence (512 to 16384)");
  add_extents(app, "--len-q", &axes->len_q, "rows, where there are not as many keys");
  add_extents(app, "--len-k", &axes->len_k, "keys (as --len-q)");
  add_extents(app, "--head-dim", &axes->head_dim, "channels of a head (64,128,256)");
  add_extents(app, "--batch", &axes->batch, "sequences (--tokens / length)");
  add_extents(app, "--heads", &axes->heads, "query heads (--hidden / head dim)");
  add_extents(app, "--heads-kv", &axes->heads_kv, "key/value heads (as --heads)");
  for (CLI::Option* option : app->get_options())
    if (option->get_name() != "--help" && option->get_name() != "--version")
      option->group("Axes; lists with commas");
}

std::vector<std::string> names_of_presets() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

const Preset& preset_named(const std::string& name) {
  return *std::find_if(presets().begin(), presets().end(),
                       [&](const Preset& preset) { return preset.name == name; });
}

void list_presets() {
  for (const Preset& preset : presets()) {
    const std::vector<Point> points = points_of(preset, {});
    std::printf("%-10s  %s\n%-10s  %zu points, from %s\n%-10s  to %s\n", preset.name, preset.about,
                "", points.size(), words_of(points.front()).c_str(), "",
                words_of(points.back()).c_str());
  }
}

// Kernels of forward and their families; those of other operations would be refused at every point.
void check_kernels(const std::vector<std::string>& kernels) {
  std::set<std::string> names, families;
  for (int32_t index = 0; index < cuflash_kernel_count(); ++index) {
    auto info = cuflash::make<cuflash_kernel_info_t>();
    cuflash::check(cuflash_kernel_info(index, &info));
    if (info.operation != CUFLASH_OPERATION_FORWARD) continue;
    names.insert(info.name);
    families.insert(info.family);
  }
  for (const std::string& kernel : kernels)
    if (kernel != "auto" && names.count(kernel) == 0 && families.count(kernel) == 0)
      throw UsageError("--kernel: no forward kernel or family \"" + kernel +
                       "\"; families: " + joined(families, ", "));
}

// The options that were given, as they were.
Json given_options(const CLI::App& app) {
  Json given = Json::object();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name().substr(2);
    if (option->count() > 0 && name != "output" && name != "commit")
      given[name] = joined(option->results(), ",");
  }
  return given;
}

}  // namespace

std::string version() {
  int32_t major = 0, minor = 0, patch = 0;
  cuflash_version(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::optional<Flags> parse_flags(int argc, char** argv) {
  Flags flags;
  bool list = false;
  std::string l2 = "warm";
  CLI::App app(kAbout, "cuflash-bench");
  app.footer(kExample);
  app.set_help_flag("--help", "this text");
  app.set_version_flag("--version", "cuflash-bench " + version(), "of the library");
  add_axes(&app, &flags.axes);
  app.add_option("--preset", flags.preset,
                 "axes by name, on top of which come the others (tokens16k)")
      ->check(CLI::IsMember(names_of_presets()).description(""))
      ->type_name("NAME");
  app.add_flag("--list-presets", list, "what they are");
  app.add_option("--device", flags.device, "cuda, the current one, or cpu (cuda)")
      ->check(CLI::IsMember({"cuda", "cpu"}).description(""))
      ->type_name("NAME");
  add_list(&app, "--kernel", &flags.kernels,
           "auto, what the library chooses, or kernels or families to force (auto)")
      ->type_name("NAME,...");
  app.add_option("--l2", l2, "warm or cold: what of the cache a call finds (warm)")
      ->check(CLI::IsMember({"warm", "cold"}).description(""))
      ->type_name("WORD");
  app.add_flag("--host", flags.plan.host,
               "what a call costs the host, too, beside an empty launch");
  app.add_option("--graph", flags.plan.graph,
                 "replay CUDA graphs of N calls, for calls shorter than their launch")
      ->check(count_up_to(10000))
      ->type_name("N");
  app.add_option("--seconds", flags.seconds, "for everything, from the start (120)")
      ->check(positive_seconds())
      ->type_name("T");
  app.add_option("--rounds", flags.plan.rounds, "in which the kernels take turns (5)")
      ->check(count_up_to(10000))
      ->type_name("N");
  app.add_option("--calls", flags.plan.max_calls, "most of a kernel in a round (100)")
      ->check(count_up_to(10000))
      ->type_name("N");
  app.add_option("--output", flags.output, "for the lines of JSON (standard output)")
      ->type_name("FILE");
  app.add_option("--commit", flags.commit, "of the library, to be written down")->type_name("ID");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help, --version
    app.exit(wanted);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(std::string(error.what()) + "; --help lists the options");
  }
  if (list) {
    list_presets();
    return std::nullopt;
  }
  flags.plan.cold = l2 == "cold";
  if (flags.device == "cpu" && (flags.plan.cold || flags.plan.graph > 0 || flags.plan.host))
    throw UsageError("--graph, --host and --l2 cold: on CUDA devices only");
  // In a graph each call but the first would find what the one before it left in the cache.
  if (flags.plan.cold && flags.plan.graph > 0)
    throw UsageError("--graph and --l2 cold exclude each other");
  check_kernels(flags.kernels);
  flags.given = given_options(app);
  flags.points = points_of(preset_named(flags.preset), flags.axes);
  return flags;
}

}  // namespace cuflash_bench
