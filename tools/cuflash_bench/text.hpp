// Numbers as text and as JSON.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include <nlohmann/json.hpp>

namespace cuflash_bench {

using Json = nlohmann::ordered_json;

inline std::string significant(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

// Five digits, which is more than a measurement holds.
inline double rounded(double value) { return std::strtod(significant(value, 5).c_str(), nullptr); }

// The items with a separator between them.
template <class Items>
std::string joined(const Items& items, const std::string& separator) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : separator) + item;
  return text;
}

}  // namespace cuflash_bench
