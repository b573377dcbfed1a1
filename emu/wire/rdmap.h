// RDMAP headers on top of DDP (RFC 5040 section 4, RFC 7306): what a segment asks for.
//
// DecodeSegment() reads DDP and RDMAP headers together, in the order the layers would, and judges all that can be
// judged without a connection. MSN and offset sequences, STags and outstanding Reads are for the transport engine.
// Plain values and pure functions; any thread.
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

// Whether a peer speaks RFC 7306 (Immediate Data and Atomic Operations), which has to be agreed upon: without it their
// opcodes are unexpected, and their queue does not exist.
enum class RdmapExtensions : uint8_t { kNone, kRfc7306 };

// RFC 5040 section 4.3; the last four are RFC 7306's.
enum class RdmapOpcode : uint8_t {
  kWrite = 0,
  kReadRequest = 1,
  kReadResponse = 2,
  kSend = 3,
  kSendInvalidate = 4,
  kSendSolicited = 5,
  kSendSolicitedInvalidate = 6,
  kTerminate = 7,
  kImmediate = 8,
  kImmediateSolicited = 9,
  kAtomicRequest = 10,
  kAtomicResponse = 11,
};
const char* ToString(RdmapOpcode opcode);

// Untagged queues (RFC 5040 section 4.2, RFC 7306). Immediate Data shares the queue of Sends, and its numbers; Atomic
// Requests that of Read Requests.
inline constexpr uint32_t kSendQueueNumber = 0;
inline constexpr uint32_t kReadRequestQueueNumber = 1;
inline constexpr uint32_t kTerminateQueueNumber = 2;
inline constexpr uint32_t kAtomicResponseQueueNumber = 3;

constexpr bool IsTagged(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kWrite || opcode == RdmapOpcode::kReadResponse;
}
// Any of the four Sends.
constexpr bool IsSend(RdmapOpcode opcode) {
  return opcode >= RdmapOpcode::kSend && opcode <= RdmapOpcode::kSendSolicitedInvalidate;
}
constexpr bool IsImmediate(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kImmediate || opcode == RdmapOpcode::kImmediateSolicited;
}
constexpr bool IsSolicited(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kSendSolicited || opcode == RdmapOpcode::kSendSolicitedInvalidate ||
         opcode == RdmapOpcode::kImmediateSolicited;
}
constexpr bool HasInvalidate(RdmapOpcode opcode) {
  return opcode == RdmapOpcode::kSendInvalidate || opcode == RdmapOpcode::kSendSolicitedInvalidate;
}
constexpr RdmapOpcode SendOpcodeOf(bool solicited, bool invalidate) {
  if (invalidate) return solicited ? RdmapOpcode::kSendSolicitedInvalidate : RdmapOpcode::kSendInvalidate;
  return solicited ? RdmapOpcode::kSendSolicited : RdmapOpcode::kSend;
}
constexpr uint32_t QueueNumberOf(RdmapOpcode opcode) {
  if (opcode == RdmapOpcode::kReadRequest || opcode == RdmapOpcode::kAtomicRequest) return kReadRequestQueueNumber;
  if (opcode == RdmapOpcode::kAtomicResponse) return kAtomicResponseQueueNumber;
  return opcode == RdmapOpcode::kTerminate ? kTerminateQueueNumber : kSendQueueNumber;
}

// The RDMAP control byte: RV, two reserved bits, opcode. DDP carries it as RsvdULP. Reserved bits are not judged, and
// are kept.
struct RdmapControl {
  RdmapOpcode opcode = RdmapOpcode::kSend;
  uint8_t reserved = 0;  // two bits

  uint8_t Encode() const;
  static Result<RdmapControl, WireFault> Decode(uint8_t byte, RdmapExtensions extensions = RdmapExtensions::kNone);
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

// The largest DDP and RDMAP header together: a Read Request. What follows the untagged header of an Atomic Request is
// longer, and counts as payload.
inline constexpr size_t kMaxSegmentHeaderSize = kDdpUntaggedHeaderSize + kReadRequestSize;

// One segment's headers. A Terminate's own header counts as payload here, because with what it quotes it is longer than
// any other header: place it in kMaxTerminateSize bytes and give those to DecodeTerminate(). The same holds for the
// messages of RFC 7306: place them, whose sizes DecodeSegment() has judged, and read them with AtomicRequest,
// AtomicResponse and ImmediateData.
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
  // Of RFC 7306, the untagged header alone.
  static SegmentHeader Immediate(bool solicited, uint32_t msn);
  static SegmentHeader AtomicRequest(uint32_t msn);
  static SegmentHeader AtomicResponse(uint32_t msn);
};

// Reads the headers of a record of `record_length` bytes from its head: min(record_length, kMaxSegmentHeaderSize) bytes
// or more. On success the payload is the rest of the record: record_length - EncodedSize(). Faults come in the order in
// which the layers look: DDP's before RDMAP's, and those of the control bytes before a short header's.
Result<SegmentHeader, WireFault> DecodeSegment(ConstBytes head, size_t record_length,
                                               RdmapExtensions extensions = RdmapExtensions::kNone);

// --- Immediate Data and Atomic Operations (RFC 7306) ---

inline constexpr size_t kImmediateDataSize = 8;
inline constexpr size_t kAtomicRequestSize = 52;
inline constexpr size_t kAtomicResponseSize = 12;

// A message of its own, which consumes a Receive and puts nothing into it; behind an RDMA Write it makes what other
// transports call Write with Immediate. Of its eight bytes verbs know the first four, as they stand in memory; the
// others are zero.
struct ImmediateData {
  std::array<std::byte, kImmediateDataSize> bytes{};

  static ImmediateData Of(uint32_t as_in_memory);
  uint32_t AsInMemory() const;

  static constexpr size_t EncodedSize() { return kImmediateDataSize; }
  void Encode(ByteWriter& out) const;
  static Result<ImmediateData, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const ImmediateData&, const ImmediateData&) = default;
};

// RFC 7306's AOpCodes, registered as "RDMAP Message Atomic Operation Subcodes".
enum class AtomicOpcode : uint8_t { kFetchAdd = 0, kCompareSwap = 2 };

// On eight bytes at a multiple of eight. Whether the code is one of AtomicOpcode is for the engine to say.
struct AtomicRequest {
  uint32_t reserved = 0;    // 28 bits; kept, not judged
  uint8_t operation = 0;    // four bits: AtomicOpcode
  uint32_t identifier = 0;  // comes back with the response
  uint32_t stag = 0;        // the responder's memory
  uint64_t tagged_offset = 0;
  uint64_t add_or_swap = 0;
  uint64_t add_or_swap_mask = 0;
  uint64_t compare = 0;
  uint64_t compare_mask = 0;

  // Add of 64 bits without inner boundaries, or compare and swap of all 64: what verbs can ask for.
  bool IsPlain() const;
  static AtomicRequest FetchAdd(uint32_t identifier, uint32_t stag, uint64_t tagged_offset, uint64_t add);
  static AtomicRequest CompareSwap(uint32_t identifier, uint32_t stag, uint64_t tagged_offset, uint64_t compare,
                                   uint64_t swap);

  static constexpr size_t EncodedSize() { return kAtomicRequestSize; }
  void Encode(ByteWriter& out) const;
  // Reads the first EncodedSize() bytes.
  static Result<AtomicRequest, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const AtomicRequest&, const AtomicRequest&) = default;
};

struct AtomicResponse {
  uint32_t identifier = 0;  // the request's
  uint64_t original = 0;    // what stood there

  static constexpr size_t EncodedSize() { return kAtomicResponseSize; }
  void Encode(ByteWriter& out) const;
  static Result<AtomicResponse, WireFault> Decode(ConstBytes bytes);
  friend bool operator==(const AtomicResponse&, const AtomicResponse&) = default;
};

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
