// Runs the stagecoach binary as a process of its own, for tests: standard output and error go to files that can be
// looked at while it runs, and every wait is on a condition and has a bound.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace stagecoach::tests {

class Process {
 public:
  // `arguments[0]` is the program. Output goes to files below `directory`.
  Process(const std::string& directory, const std::vector<std::string>& arguments);
  // Kills and reaps what still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // How it ended: the exit code, or minus the signal. nullopt when it still runs at the end of the bound.
  std::optional<int> Wait(std::chrono::milliseconds bound = std::chrono::seconds(60));
  bool Running();
  void Signal(int signal);
  pid_t pid() const { return pid_; }
  // Becomes readable when the process has ended.
  int pidfd() const { return pidfd_; }

  std::string Out() const;
  std::string Err() const;

 private:
  std::string out_;
  std::string err_;
  pid_t pid_ = -1;
  int pidfd_ = -1;
  std::optional<int> status_;
};

// Polls `condition` until it holds or the bound is over; returns whether it holds.
bool WaitUntil(const std::function<bool()>& condition, std::chrono::milliseconds bound = std::chrono::seconds(30));

// The binary under test.
std::string StagecoachBinary();

}  // namespace stagecoach::tests
