// RDMAP headers on top of DDP (RFC 5040 section 4): what a segment asks for.
//
// DecodeSegment() reads DDP and RDMAP headers together, in the order the layers would, and judges all that can be
// judged without a connection. MSN and offset sequences, STags and outstanding Reads are for the transport engine.
// Plain values and pure functions; any thread. The extensions of RFC 7306 are not part of this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "emu/wire/ddp.h"
#include "emu/wire/fault.h"

namespace stagecoach::emu::wire {

inline constexpr uint8_t kRdmapVersion = 1;

// RFC 5040 section 4.3.
enum class RdmapOpcode : uint8_t {
  kWrite = 0,
  kReadRequest = 1,
  kReadResponse = 2,
  kSend = 3,
  kSendInvalidate = 4,
  kSendSolicited = 5,
  kSendSolicitedInvalidate = 6,
  kTerminate = 7,
};
const char* ToString(RdmapOpcode opcode);

// Untagged queues (RFC 5040 section 4.2).
inline constexpr uint32_t kSendQueueNumber = 0;
inline constexpr uint32_t kReadRequestQueueNumber = 1;
inline constexpr uint32_t kTerminateQueueNumber = 2;

constexpr bool IsTagged(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kWrite || opcode == RdmapOpcode::kReadResponse;
}
// Any of the four Sends.
constexpr bool IsSend(RdmapOpcode opcode) {
  return opcode >= RdmapOpcode::kSend && opcode <= RdmapOpcode::kSendSolicitedInvalidate;
}
constexpr bool IsSolicited(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kSendSolicited || opcode == RdmapOpcode::kSendSolicitedInvalidate;
}
constexpr bool HasInvalidate(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kSendInvalidate || opcode == RdmapOpcode::kSendSolicitedInvalidate;
}
constexpr RdmapOpcode SendOpcodeOf(bool solicited, bool invalidate) {
  if (invalidate) return solicited ? RdmapOpcode::kSendSolicitedInvalidate : RdmapOpcode::kSendInvalidate;
  return solicited ? RdmapOpcode::kSendSolicited : RdmapOpcode::kSend;
}
constexpr uint32_t QueueNumberOf(RdmapOpcode opcode) {
  if (opcode == RdmapOpcode::kReadRequest) return kReadRequestQueueNumber;
  return opcode == RdmapOpcode::kTerminate ? kTerminateQueueNumber : kSendQueueNumber;
}

// The RDMAP control byte: RV, two reserved bits, opcode. DDP carries it as RsvdULP. Reserved bits are not judged, and
// are kept.
struct RdmapControl {
  RdmapOpcode opcode = RdmapOpcode::kSend;
  uint8_t reserved = 0;  // two bits

  uint8_t Encode() const;
  static Result<RdmapControl, WireFault> Decode(uint8_t byte);
  friend bool operator==(const RdmapControl&, const RdmapControl&) = default;
};

inline constexpr size_t kReadRequestSize = 28;

// RFC 5040 section 4.4. The sink is the requester's memory, the source the responder's.
struct ReadRequest {
  uint32_t sink_stag = 0;
  uint64_t sink_offset = 0;
  uint32_t length = 0;  // bytes
  uint32_t source_stag = 0;
  uint64_t source_offset = 0;

  static constexpr size_t EncodedSize() { return kReadRequestSize; }
  void Encode(ByteWriter& out) const;
  // Reads the first EncodedSize() bytes.
  static Result<ReadRequest, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const ReadRequest&, const ReadRequest&) = default;
};

// The largest DDP and RDMAP header together: a Read Request.
inline constexpr size_t kMaxSegmentHeaderSize = kDdpUntaggedHeaderSize + kReadRequestSize;

// One segment's headers. A Terminate's own header counts as payload here, because with what it quotes it is longer than
// any other header: place it in kMaxTerminateSize bytes and give those to DecodeTerminate().
struct SegmentHeader {
  RdmapControl control;
  bool last = true;
  uint8_t ddp_reserved = 0;  // four bits

  // Tagged: Write and Read Response.
  uint32_t stag = 0;
  uint64_t tagged_offset = 0;

  // Untagged: the others.
  uint32_t ulp_word = 0;  // the STag to invalidate, where the opcode has one; reserved otherwise (kept, not judged)
  uint32_t queue_number = 0;
  uint32_t sequence_number = 0;
  uint32_t message_offset = 0;
  ReadRequest read_request;  // kReadRequest alone

  RdmapOpcode opcode() const { return control.opcode; }
  bool tagged() const { return IsTagged(control.opcode); }
  // The STag a Send with Invalidate names.
  uint32_t invalidate_stag() const { return ulp_word; }

  // Where the payload begins, in bytes from the start of the record.
  size_t EncodedSize() const;
  void Encode(ByteWriter& out) const;
  friend bool operator==(const SegmentHeader&, const SegmentHeader&) = default;

  static SegmentHeader Write(uint32_t stag, uint64_t tagged_offset, bool last);
  static SegmentHeader ReadResponse(uint32_t sink_stag, uint64_t tagged_offset, bool last);
  // `opcode` is one of the four Sends; `invalidate_stag` is ignored by those without Invalidate.
  static SegmentHeader Send(RdmapOpcode opcode, uint32_t invalidate_stag, uint32_t msn, uint32_t message_offset,
                            bool last);
  static SegmentHeader Read(uint32_t msn, const ReadRequest& request);
  // Always the first and only message of its queue.
  static SegmentHeader Terminate();
};

// Reads the headers of a record of `record_length` bytes from its head: min(record_length, kMaxSegmentHeaderSize) bytes
// or more. On success the payload is the rest of the record: record_length - EncodedSize(). Faults come in the order in
// which the layers look: DDP's before RDMAP's, and those of the control bytes before a short header's.
Result<SegmentHeader, WireFault> DecodeSegment(ConstBytes head, size_t record_length);

// --- Terminate (RFC 5040 section 4.8) ---

inline constexpr size_t kTerminateControlSize = 4;
// Control, segment length, the quoted DDP header and the quoted Read Request.
inline constexpr size_t kMaxTerminateSize = kTerminateControlSize + 2 + kDdpUntaggedHeaderSize + kReadRequestSize;

struct TerminateHeader {
  TerminateCode code;
  bool segment_length_valid = false;  // M
  bool has_ddp_header = false;        // D
  bool has_rdmap_header = false;      // R
  uint16_t reserved = 0;              // 13 bits

  // What follows the control word, as it stood there. The quotation explains an error to people, so a short or odd one
  // does not spoil the code: the accessors below return nothing then.
  std::array<std::byte, kMaxTerminateSize - kTerminateControlSize> rest{};
  uint8_t rest_size = 0;

  // Bytes of the segment at fault. siw counts payload alone there.
  std::optional<uint16_t> SegmentLength() const;
  // The DDP header at fault, 14 or 18 bytes by its T flag.
  ConstBytes DdpHeader() const;
  // The Read Request at fault.
  std::optional<ReadRequest> QuotedReadRequest() const;

  size_t EncodedSize() const { return kTerminateControlSize + rest_size; }
  // In the bit order of RFC 5040.
  void Encode(ByteWriter& out) const;
  // In the bit order of Linux siw; to show that a decoded frame of siw is understood to the last bit.
  void EncodeAsSiw(ByteWriter& out) const;
  friend bool operator==(const TerminateHeader&, const TerminateHeader&) = default;

  // For the segment at fault: its length and its header bytes (`head` as DecodeSegment got it). Quotes the DDP header
  // when there is a whole one, and the Read Request when `head` is of one. Without a segment: the code alone.
  static TerminateHeader For(TerminateCode code, ConstBytes head = {}, size_t segment_length = 0);
};

// Linux siw declares the control word as C bit-fields of a little-endian word, so that on x86 layer and error type
// change places within byte 0 and M, D, R are the low bits of byte 2 instead of the high ones.
enum class TerminateBitOrder : uint8_t {
  kRfc,        // as RFC 5040 draws it (or both orders say the same)
  kSiw,        // siw's order: the quirk
  kAmbiguous,  // both readings are legal; `header` is the RFC's
};
const char* ToString(TerminateBitOrder order);

struct TerminateReading {
  TerminateBitOrder order = TerminateBitOrder::kRfc;
  TerminateHeader header;
  // Set when ambiguous: what it means if siw sent it.
  std::optional<TerminateHeader> as_siw;
};

// `payload` is what follows the untagged header. The flags tell the orders apart when one is set; otherwise it is known
// which triples exist at all (20 06 is the one that matters and stays ambiguous).
Result<TerminateReading, WireFault> DecodeTerminate(ConstBytes payload);

}  // namespace stagecoach::emu::wire
