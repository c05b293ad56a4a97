#include "measuring.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace cuflash_bench {
namespace {

// A contestant, and its times where its result is right.
struct Entry {
  std::string kernel;
  std::unique_ptr<Contestant> contestant;
  Call call;
  std::optional<std::string> failed;  // why it has no time
  double error = 0, probe_ms = 0;
  std::optional<double> host_ms, host_us;
  int host_calls = 0;
  std::vector<double> ms, round_ms;
};

// As NumPy's: linear between the nearest two.
double percentile(std::vector<double> values, double percent) {
  std::sort(values.begin(), values.end());
  const double place = percent / 100 * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - std::floor(place)) * (values[above] - values[below]);
}

double median(const std::vector<double>& values) { return percentile(values, 50); }

// Runs a step of an entry unless one before it failed.
template <class Step>
void attempt(Entry* entry, Step step) {
  if (entry->failed) return;
  try {
    step();
  } catch (const std::exception& error) {
    entry->failed = error.what();
  }
}

void prepare(Problem* problem, Device* device, const Plan& plan, Entry* entry) {
  entry->contestant = problem->contestant(entry->kernel);
  Contestant* contestant = entry->contestant.get();
  entry->call = [contestant] { contestant->call(); };
  contestant->forget_result();
  entry->call();
  entry->error = contestant->check();
  entry->probe_ms = median(device->times(entry->call, 2, plan.cold).ms);
  if (plan.graph > 0) entry->call = device->graph(entry->call, plan.graph);
  // What is checked at the end, the timed calls have written.
  contestant->forget_result();
  device->synchronize();
}

// So many that all rounds of all contestants take about this time; at least one.
int calls_in_a_round(double seconds, double all_probes_ms, const Plan& plan) {
  const double one_each = all_probes_ms * std::max(plan.graph, 1) * 1e-3;
  const double calls = seconds / (plan.rounds * one_each);
  return static_cast<int>(std::min<double>(plan.max_calls, std::max(1.0, calls)));
}

void run_round(Device* device, const Plan& plan, int calls, Entry* entry) {
  const int per_call = std::max(plan.graph, 1);
  Times times = device->times(entry->call, calls, plan.cold);
  for (double& ms : times.ms) ms /= per_call;
  entry->ms.insert(entry->ms.end(), times.ms.begin(), times.ms.end());
  entry->round_ms.push_back(median(times.ms));
  if (times.host_ms) entry->host_ms = *times.host_ms / per_call;
}

// As many calls as fit a time, up to ten thousand, beside one kernel that does nothing.
void measure_host(Device* device, double seconds, Entry* entry) {
  constexpr int kFewest = 100, kMost = 10000;
  const double fit = seconds / (entry->probe_ms * 1e-3);
  entry->host_calls = static_cast<int>(std::clamp<double>(fit, kFewest, kMost));
  Contestant* contestant = entry->contestant.get();
  entry->host_us = device->host_us([contestant] { contestant->call(); }, entry->host_calls);
}

void check_again(Entry* entry) {
  try {
    entry->error = std::max(entry->error, entry->contestant->check());
  } catch (const std::exception& error) {
    throw std::runtime_error("after " + std::to_string(entry->ms.size()) +
                             " calls: " + error.what());
  }
}

Json line_of(const Point& point, const Problem& problem, const Plan& plan, const Entry& entry,
             double empty_launch_us) {
  const double ms = median(entry.ms);
  const double gb_s = problem.bytes() / ms * 1e-6, tflops = problem.flops() / ms * 1e-9;
  Json line = {{"point", json_of(point)},
               {"contestant", contestant_name(entry.kernel)},
               {"ms", rounded(ms)},
               {"p20_ms", rounded(percentile(entry.ms, 20))},
               {"p80_ms", rounded(percentile(entry.ms, 80))},
               {"tflops", rounded(tflops)}};
  if (const auto found = plan.matrix_speed.find(point.dtype); found != plan.matrix_speed.end())
    line["percent_of_matrix"] = rounded(100 * tflops / found->second.tflops);
  line["gb_s"] = rounded(gb_s);
  if (plan.copy_speed) line["percent_of_copy"] = rounded(100 * gb_s / *plan.copy_speed);
  line["round_ms"] = Json::array();
  for (const double round : entry.round_ms) line["round_ms"].push_back(rounded(round));
  line["calls"] = entry.ms.size() * static_cast<size_t>(std::max(plan.graph, 1));
  line["error"] = rounded(entry.error);
  if (entry.host_ms) line["host_ms"] = rounded(*entry.host_ms);
  if (entry.host_us) {
    line["host_us"] = rounded(*entry.host_us);
    line["empty_launch_us"] = rounded(empty_launch_us);
    line["host_calls"] = entry.host_calls;
  }
  line["kernel"] = entry.contestant->kernel();
  return line;
}

}  // namespace

std::string contestant_name(const std::string& kernel) {
  return kernel == "auto" ? "cuflash" : "cuflash:" + kernel;
}

Json failed_line(const Point& point, const std::string& kernel, const std::string& reason) {
  return {{"point", json_of(point)}, {"contestant", contestant_name(kernel)}, {"failed", reason}};
}

std::vector<Json> measure(const Point& point, const std::vector<std::string>& kernels,
                          Device* device, const Plan& plan,
                          const std::function<double()>& seconds_left) {
  const std::unique_ptr<Problem> problem = forward_problem(point, device);
  std::vector<Entry> entries;
  for (const std::string& kernel : kernels) {
    entries.emplace_back();
    entries.back().kernel = kernel;
  }
  double probes_ms = 0;
  for (Entry& entry : entries) {
    attempt(&entry, [&] { prepare(problem.get(), device, plan, &entry); });
    probes_ms += entry.probe_ms;
  }
  // Each round another contestant first, so that none always follows the same one.
  const double seconds = seconds_left() * (plan.host ? 0.5 : 1);
  const int calls = calls_in_a_round(seconds, probes_ms, plan);
  for (int round = 0; round < plan.rounds; ++round) {
    for (size_t i = 0; i < entries.size(); ++i) {
      Entry& entry = entries[(static_cast<size_t>(round) + i) % entries.size()];
      attempt(&entry, [&] { run_round(device, plan, calls, &entry); });
    }
  }
  double empty_launch_us = 0;
  if (plan.host) {
    empty_launch_us = device->host_us([device] { device->empty_launch(); }, 10000);
    const double each = seconds / static_cast<double>(entries.size());
    for (Entry& entry : entries) attempt(&entry, [&] { measure_host(device, each, &entry); });
  }
  std::vector<Json> lines;
  for (Entry& entry : entries) {
    attempt(&entry, [&] { check_again(&entry); });
    lines.push_back(entry.failed ? failed_line(point, entry.kernel, *entry.failed)
                                 : line_of(point, *problem, plan, entry, empty_launch_us));
  }
  return lines;
}

}  // namespace cuflash_bench
