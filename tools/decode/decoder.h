// The whole of `stagecoach decode` but its command line: a file's packets or bytes in, messages out.
//
// Bounded by the limits of its parts (capture_file.h, iwarp.h, roce.h, hex_dump.h), whatever the input.
// Single-threaded.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "base/result.h"
#include "tools/decode/capture_file.h"
#include "tools/decode/event.h"
#include "tools/decode/iwarp.h"
#include "tools/decode/roce.h"

namespace stagecoach::decode {

struct Totals {
  bool capture = false;   // or a hex dump
  uint64_t packets = 0;   // of a capture; blocks of a hex dump
  uint64_t messages = 0;  // that were decoded, private data among them
  uint64_t illegal = 0;   // of these
  uint64_t others = 0;    // Sends of connections that nothing says are of RPC-over-RDMA
  uint64_t troubles = 0;
  uint64_t not_understood = 0;         // packets
  std::vector<std::string> sentences;  // why not, and what else was left out: "5 packets were cut by the snap length"
};

// Reads `in` to its end: a capture, or a hex dump. The error says why it is neither. `profile`, one of
// rpcrdma::AllProfiles(), judges version 1.
Result<Totals, std::string> DecodeInput(std::istream& in, const rpcrdma::ProtocolProfile& profile, const Sinks& sinks);

}  // namespace stagecoach::decode
