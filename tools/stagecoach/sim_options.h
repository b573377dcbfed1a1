// What `stagecoach sim` was asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stagecoach::cli {

struct SimOptions {
  std::string file;
  uint64_t seed = 1;
  std::string profile;             // of the devices that the seed draws; empty: drawn, too
  std::vector<std::string> rules;  // "RULE" or "HOST: RULE", on top of the scenario's
  bool many = false;               // `count` was given
  uint64_t count = 1;
  bool twice = false;
  bool keep_going = false;
  uint64_t hang_after_seconds = 60;
  bool trace = false;
  std::string pcap;
  std::string until;
  bool step = false;
  bool print = false;
  bool shrink = false;
  std::string out;
  bool marks = false;
  std::string mutant;
  bool list_mutants = false;
  // Not an option: what this program was built from.
  std::string commit = "unknown";

  // Somebody looks on, with a debugger perhaps: the run stays in this process.
  bool Watched() const { return trace || step || !until.empty() || !pcap.empty(); }
};

}  // namespace stagecoach::cli
