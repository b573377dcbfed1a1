// ChildProcess: work in a forked process of its own, so that a crash or an endless loop costs that process alone.
//
// The child has the memory of its parent as it was, and tells it messages, one at a time. Its standard error is
// collected. Its temporary files go into a directory that is removed when it has ended, however it ended. It dumps no
// core, leaves SIGINT, SIGTERM and SIGHUP to its parent, and dies with it.
//
// fork() copies one thread only: for processes of one thread. Not thread-safe. Linux.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace stagecoach::scenario {

class ChildProcess {
 public:
  // A longer message is a bug of the child's, and what a child that has gone mad says is not believed.
  static constexpr size_t kMessageMax = 4 << 20;
  // So much of its standard error is kept: of more, the beginning and the end.
  static constexpr size_t kErrorsMax = 16 << 10;

  // Returns when the parent awaits what is next: until then the child does nothing, so that what it wrote to standard
  // error and the time it took belong to one message.
  using Tell = std::function<void(std::string_view message)>;
  // Runs in the child, which ends when it returns: with exit status 0, without destroying static objects.
  using Work = std::function<void(const Tell& tell)>;

  // Fails when the system has no process, pipe or directory for us; says which.
  static Result<std::unique_ptr<ChildProcess>, std::string> Start(const Work& work);
  // Kills what still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  struct Event {
    enum class Kind {
      kMessage,
      kEnded,        // it has ended; every message has been delivered before
      kLate,         // nothing until the deadline
      kInterrupted,  // a signal came in, whose handler has run
    };
    Kind kind;
    std::string message;  // kMessage
    int status = 0;       // kEnded: as of waitpid()
  };
  Event Await(std::chrono::steady_clock::time_point deadline);

  // What it wrote to standard error before the latest event and since this was asked the last time.
  std::string TakeErrors();

 private:
  ChildProcess(pid_t pid, int channel, int errors, std::string directory);
  [[noreturn]] static void Be(const Work& work, int channel, int errors, const std::string& directory, pid_t parent);

  std::optional<std::string> TakeMessage();
  // False at the end.
  bool ReadMessages();
  void ReadErrors();
  // Reaps it, killing what still runs. The status of waitpid().
  int End();

  pid_t pid_;
  const int channel_;
  const int errors_;
  const std::string directory_;
  bool told_ = false;  // and waits
  std::string received_;
  std::string error_text_;
  bool error_text_cut_ = false;
  bool errors_ended_ = false;
};

}  // namespace stagecoach::scenario
