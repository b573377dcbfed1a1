// Replay: one end of a recorded connection played by our engines, against the recorded bytes of the other end.
//
// The stack is the one of a connection (MpaInitiator or MpaResponder, then RdmapStream over MpaLlp), on a Stream in
// memory. What the recording says of this end is what its program does: regions have the STags and tagged offsets that
// either end names, Receives are posted in number and size as the peer's Sends need them, memory that the peer Reads
// holds what this end answered, and each message this end sent is submitted when its first byte was sent. Read
// Responses, the ready-to-receive message and Terminates are the engine's own.
//
// The order of things is the recorded one: before a packet of this end everything has arrived that it acknowledges, and
// as many bytes leave as have left by then. How bytes are cut into reads and writes is the caller's choice, and changes
// nothing. There is no time in it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "emu/engine/mpa_handshake.h"
#include "emu/engine/rdmap_stream.h"
#include "emu/fabric/stream.h"
#include "emu/llp/mpa/mpa_llp.h"
#include "tests/golden/recorded_memory.h"
#include "tests/golden/recording.h"

namespace stagecoach::testing {

// How the streams are cut.
enum class Cut : uint8_t {
  kWhole,   // as much as there is
  kByByte,  // one byte to a read, and to a write
  kRandom,
};

struct ReplayOptions {
  Cut cut = Cut::kWhole;
  uint64_t seed = 0;  // of kRandom
  // Reads outstanding that a responder's device holds and starts at most.
  uint16_t depth = 128;
  // The bit with this number of the peer's stream is another one.
  std::optional<uint64_t> flipped_bit;
  // The peer's stream ends behind so many bytes: with an end of file, or with a reset.
  std::optional<size_t> ends_at;
  bool reset = false;
};

enum class Ending : uint8_t {
  kOpen,              // the recording ends, the connection does not
  kNotConnected,      // the handshake ended without a connection
  kPeerClosed,        // end of file between FPDUs
  kStreamFailed,      // a reset, or an end of file within an FPDU
  kClosedHere,        // by this end's program
  kTerminatedHere,    // our Terminate has left
  kTerminatedByPeer,  // its Terminate has come
};
const char* ToString(Ending ending);

struct ReplayCounts {
  uint64_t records = 0;  // FPDUs received, and in place
  uint64_t writes = 0;   // messages placed whole
  uint64_t read_responses = 0;
  uint64_t placed_bytes = 0;  // of both
  uint64_t receives = 0;      // completed with success
  uint64_t sends = 0;         // likewise
  uint64_t write_works = 0;
  uint64_t reads = 0;

  void Add(const ReplayCounts& other);
};

struct ReplayResult {
  // Placements and completions in words, in order: what, where, how long, and the CRC32c of the bytes that are there.
  std::vector<std::string> log;
  // Differences from what was recorded, in words. Empty: everything is where it should be, and nothing else has
  // changed.
  std::vector<std::string> wrong;
  std::vector<std::byte> sent;  // all that this end wrote
  Ending ending = Ending::kOpen;
  std::optional<emu::TransportFault> fault;
  std::optional<emu::MpaFault> handshake_fault;
  std::optional<emu::MpaOutcome> handshake;
  bool could_ask = true;                     // false: ours does not ask for what this initiator asked for
  std::vector<emu::WorkStatus> failed_work;  // statuses other than success, in order
  size_t unused_receives = 0;
  uint32_t memory = 0;  // checksum of all regions at the end
  ReplayCounts counts;
};

ReplayResult ReplayRecording(const Recording& recording, End end, const ReplayOptions& options);

}  // namespace stagecoach::testing
