// What the benchmark programs share: pinning, a clock, and result rows.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace stagecoach::perf {

// Binds the process to one processor, so that the two ends of a ping-pong never share one by accident. On a machine
// with a single processor both ends do share it; the ratios still compare like with like.
inline void PinTo(int which) {
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<int>(which % processors), &set);
  sched_setaffinity(0, sizeof(set), &set);
}

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One measurement: "name value unit", the form tests/perf/run reads.
inline void Row(const char* name, double value, const char* unit) {
  std::printf("%s %.6g %s\n", name, value, unit);
  std::fflush(stdout);
}

}  // namespace stagecoach::perf
