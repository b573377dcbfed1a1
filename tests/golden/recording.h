// One recorded iWARP connection as what its ends meant: messages instead of FPDUs, and for each end the order in which
// it received and sent. What a replay plays, and what it is compared with.
//
// Cut by iwarp_streams.h and read with the codecs of emu/wire, which iwarp_golden_test.cc holds to Wireshark's reading;
// nothing of the engines under test is in here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"
#include "tests/golden/iwarp_streams.h"
#include "tests/support/pcap_reader.h"

namespace stagecoach::testing {

enum class End : uint8_t { kClient, kServer };

constexpr End Other(End end) {
  return end == End::kClient ? End::kServer : End::kClient;
}

// One FPDU that makes sense where it stands.
struct RecordedSegment {
  size_t begin = 0;  // of the FPDU, in its sender's TCP stream, handshake included
  size_t end = 0;
  emu::wire::SegmentHeader header;
  ConstBytes payload;
  size_t message = 0;  // which of RecordedStream::messages it is part of
};

struct RecordedMessage {
  emu::wire::SegmentHeader first;  // of its first segment
  std::vector<std::byte> payload;  // with zeros for what the recording lacks
  size_t begin = 0;                // in its sender's TCP stream
  size_t segment = 0;              // its first one
  size_t segments = 0;
  bool whole = true;  // false: the connection ended in the midst of it
  // One segment size explains how it was cut: all segments but the last have it, and the last is no larger.
  bool regular = true;

  emu::wire::RdmapOpcode opcode() const { return first.opcode(); }
};

// What one end sent behind its handshake.
struct RecordedStream {
  std::vector<RecordedSegment> segments;
  std::vector<RecordedMessage> messages;
  // Where the first FPDU begins that no conforming end sends there; what follows is in neither list.
  std::optional<size_t> odd_at;
  // Of the last message, if that is one.
  std::optional<emu::wire::TerminateReading> terminate;

  size_t Count(emu::wire::RdmapOpcode opcode) const;
  // Whether the connection ended in the midst of a message.
  bool Partial() const { return !messages.empty() && !messages.back().whole; }
};

// Reads the FPDUs that `fpdus` cut from `stream`; `rest` is what is left of it.
RecordedStream ReadMessages(ConstBytes stream, const std::vector<RecordedFpdu>& fpdus, ConstBytes rest, bool crc);

// How far an end had come when it sent a packet: first it received, then it sent.
struct RecordedStep {
  size_t received = 0;  // bytes of the other end's stream
  bool end_received = false;
  size_t sent = 0;  // bytes of its own
  bool closed = false;
};

class Recording {
 public:
  // nullopt when the client did not send an MPA Request. `with_crc` makes of a connection without CRC the one it would
  // have been with it: both handshake frames say so and each FPDU has its CRC. Positions stay the same.
  static std::optional<Recording> Of(const TcpConnection& connection, bool with_crc = false);

  Recording(Recording&&) = default;
  Recording(const Recording&) = delete;

  const IwarpConnection& iwarp() const { return iwarp_; }
  ConstBytes bytes(End end) const { return Direction(end).bytes; }
  // The handshake frame alone; empty when there was none.
  ConstBytes frame(End end) const { return end == End::kClient ? iwarp_.request : iwarp_.reply; }
  const RecordedStream& stream(End end) const { return end == End::kClient ? client_ : server_; }
  std::vector<RecordedStep> Steps(End end) const;

 private:
  Recording() = default;
  const TcpDirection& Direction(End end) const {
    return end == End::kClient ? connection_.from_client : connection_.from_server;
  }

  TcpConnection connection_;
  IwarpConnection iwarp_;
  RecordedStream client_;
  RecordedStream server_;
};

}  // namespace stagecoach::testing
