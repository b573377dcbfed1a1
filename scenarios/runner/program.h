// Program: something that runs on a host of a scenario: a service, a client, a file copy, a ping-pong, a
// peer that says nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/time.h"

namespace stagecoach::scenario {

// Constants every program shares.
inline constexpr uint16_t kServicePort = 20049;  // RFC 5667, and what Linux uses

// What all programs of a run did, summed.
struct Tally {
  uint64_t calls = 0;
  uint64_t answered = 0;
  uint64_t refused = 0;    // failed for a reason of their own: limits, timeouts, cancelled
  uint64_t disturbed = 0;  // failed because of an injection
  uint64_t connections = 0;
  uint64_t files_copied = 0;
  uint64_t pings = 0;
  uint64_t silent_streams = 0;
  uint64_t shut_out = 0;  // of them
};

class Program {
 public:
  virtual ~Program() = default;

  virtual const std::string& host() const = 0;
  // Runs at the start of the scenario, and again when its host has been started again.
  virtual void Start() = 0;
  // Its host is gone: gives up everything at once.
  virtual void Kill() = 0;
  // Its work is done, or can never be.
  virtual bool Idle() const = 0;
  // All injections are over and all work is done: shows that it works, ending Idle() until it has shown it.
  // `warm`: it does more at a time than it will later, so that tables and pools are as large as they will be.
  virtual void Probe(bool /*warm*/) {}
  // Ends in an orderly way; Idle() when that is done.
  virtual void Stop() = 0;
  // Calls begun and not over, of a program that makes calls.
  virtual std::optional<size_t> calls_open() const { return std::nullopt; }
  // Entries of its connection's tables, free ones included.
  virtual size_t records() const { return 0; }
  // What it is doing, for the report of a run that hangs. Lines.
  virtual std::string Describe() const = 0;

  const Tally& tally() const { return tally_; }

 protected:
  Tally tally_;
};

}  // namespace stagecoach::scenario
