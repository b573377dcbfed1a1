// What a contract test needs of the world it runs in, and may not ask the verbs API for: whose turn it is, and how time
// passes.
//
// Two implementations, one per test binary: loopback TCP (or the system's device), and a simulated world of two hosts.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <optional>
#include <string>

#include "base/time.h"

namespace stagecoach::verbs {

class Surroundings {
 public:
  virtual ~Surroundings() = default;

  // Called around each test.
  virtual void Begin() = 0;
  virtual void End() = 0;

  // Whose verbs calls follow. Without meaning when both ends are the same host.
  virtual void ActAsServer() = 0;
  virtual void ActAsClient() = 0;
  // Where a server may listen; the port is 0.
  virtual sockaddr_storage ServerAddress() const = 0;
  // The same host's IPv6 address, if it has one.
  virtual std::optional<sockaddr_storage> ServerAddress6() const = 0;
  // A port of that address where nobody listens.
  virtual sockaddr_storage RefusingAddress() const = 0;

  // Lets the world go on until `done`, or for ten seconds of its time; true if done.
  virtual bool Until(const std::function<bool()>& done) = 0;

  // Lets that much time go by and says true, where time is virtual. Elsewhere it returns false at once: no test waits
  // for a clock.
  virtual bool Elapse(Duration time) = 0;

  // Runs a program on each end, side by side, until both have returned: either may block until the other acts.
  virtual void SideBySide(std::function<void()> server, std::function<void()> client) = 0;

  // True when blocking calls may be answered by another thread of the test (not in a simulation, which has one).
  virtual bool HasThreads() const = 0;
};

// The one of this binary.
Surroundings& TheSurroundings();

}  // namespace stagecoach::verbs
