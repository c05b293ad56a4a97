// The command line.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "measuring.hpp"
#include "points.hpp"

namespace cuflash_bench {

struct Flags {
  Axes axes;
  std::string preset = "tokens16k";
  std::string device = "cuda";
  std::vector<std::string> kernels = {"auto"};
  double seconds = 120;
  Plan plan;
  std::string output, commit;
  Json given = Json::object();  // what the command line says, for the record

  std::vector<Point> points;
};

// Nothing where --help, --version or --list-presets was all that was wanted. Throws UsageError.
std::optional<Flags> parse_flags(int argc, char** argv);

std::string version();

}  // namespace cuflash_bench
