// Transport packets of InfiniBand (RC, UC, UD), as RoCEv2 carries them: base and extended transport headers, packet
// sequence numbers, timers, invariant CRC.
//
// Source: InfiniBand Architecture Specification, volume 1, release 1.5, chapter 9, and annex A17 (RoCEv2). A record is
// a packet without its pad bytes and its ICRC: whoever carries records keeps their length and their integrity. PadCnt
// is set, and judged, all the same.
//
// DecodeIb() judges what can be judged without a connection; sequences, keys and lengths of messages are for the
// transport engine. Not here: Reliable Datagram, XRC, congestion notification. Plain values and pure functions; any
// thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "base/time.h"

namespace stagecoach::emu::wire {

// The upper three bits of the opcode.
enum class IbService : uint8_t { kRc = 0x00, kUc = 0x20, kUd = 0x60 };
const char* ToString(IbService service);

// The lower five bits (section 9.2.1). UC has those up to kWriteOnlyImm; UD has kSendOnly and kSendOnlyImm.
enum class IbOp : uint8_t {
  kSendFirst = 0x00,
  kSendMiddle = 0x01,
  kSendLast = 0x02,
  kSendLastImm = 0x03,
  kSendOnly = 0x04,
  kSendOnlyImm = 0x05,
  kWriteFirst = 0x06,
  kWriteMiddle = 0x07,
  kWriteLast = 0x08,
  kWriteLastImm = 0x09,
  kWriteOnly = 0x0a,
  kWriteOnlyImm = 0x0b,
  kReadRequest = 0x0c,
  kReadFirst = 0x0d,  // the four packets of a Read response
  kReadMiddle = 0x0e,
  kReadLast = 0x0f,
  kReadOnly = 0x10,
  kAck = 0x11,
  kAtomicAck = 0x12,
  kCompareSwap = 0x13,
  kFetchAdd = 0x14,
  kSendLastInv = 0x16,
  kSendOnlyInv = 0x17,
};
const char* ToString(IbOp op);

constexpr bool IsSend(IbOp op) {
  return op <= IbOp::kSendOnlyImm || op == IbOp::kSendLastInv || op == IbOp::kSendOnlyInv;
}
constexpr bool IsWrite(IbOp op) {
  return op >= IbOp::kWriteFirst && op <= IbOp::kWriteOnlyImm;
}
constexpr bool IsReadResponse(IbOp op) {
  return op >= IbOp::kReadFirst && op <= IbOp::kReadOnly;
}
constexpr bool IsAtomic(IbOp op) {
  return op == IbOp::kCompareSwap || op == IbOp::kFetchAdd;
}
// Travels from the responder to the requester.
constexpr bool IsResponse(IbOp op) {
  return op >= IbOp::kReadFirst && op <= IbOp::kAtomicAck;
}
// The first packet of a message, or of a Read response.
constexpr bool BeginsMessage(IbOp op) {
  switch (op) {
    case IbOp::kSendMiddle:
    case IbOp::kSendLast:
    case IbOp::kSendLastImm:
    case IbOp::kSendLastInv:
    case IbOp::kWriteMiddle:
    case IbOp::kWriteLast:
    case IbOp::kWriteLastImm:
    case IbOp::kReadMiddle:
    case IbOp::kReadLast:
      return false;
    default:
      return true;
  }
}
// The last one.
constexpr bool EndsMessage(IbOp op) {
  switch (op) {
    case IbOp::kSendFirst:
    case IbOp::kSendMiddle:
    case IbOp::kWriteFirst:
    case IbOp::kWriteMiddle:
    case IbOp::kReadFirst:
    case IbOp::kReadMiddle:
      return false;
    default:
      return true;
  }
}
constexpr bool HasImmediate(IbOp op) {
  return op == IbOp::kSendLastImm || op == IbOp::kSendOnlyImm || op == IbOp::kWriteLastImm || op == IbOp::kWriteOnlyImm;
}
constexpr bool HasInvalidate(IbOp op) {
  return op == IbOp::kSendLastInv || op == IbOp::kSendOnlyInv;
}

// --- AETH syndromes (section 9.7.5.1.3) ---

// An acknowledgement without credits (section 9.7.7.2: end-to-end flow control is not used).
inline constexpr uint8_t kIbAck = 0x1f;
// With the RNR timer's code in the lower five bits.
inline constexpr uint8_t kIbRnrNak = 0x20;
inline constexpr uint8_t kIbNakSequence = 0x60;
inline constexpr uint8_t kIbNakInvalidRequest = 0x61;
inline constexpr uint8_t kIbNakRemoteAccess = 0x62;
inline constexpr uint8_t kIbNakRemoteOperation = 0x63;

enum class IbSyndromeKind : uint8_t { kAck, kRnrNak, kNak, kReserved };
constexpr IbSyndromeKind KindOfSyndrome(uint8_t syndrome) {
  switch (syndrome >> 5) {
    case 0:
      return IbSyndromeKind::kAck;
    case 1:
      return IbSyndromeKind::kRnrNak;
    case 3:
      return IbSyndromeKind::kNak;
    default:
      return IbSyndromeKind::kReserved;
  }
}
// "NAK remote access error", "RNR NAK (timer 12)", "reserved syndrome 0x45".
std::string SyndromeToString(uint8_t syndrome);

// --- Headers ---

inline constexpr size_t kIbBthSize = 12;
// BTH and AtomicETH: no packet of the three services has a longer header.
inline constexpr size_t kMaxIbHeaderSize = 40;
// Of the word that datagrams have behind their headers between us.
inline constexpr size_t kDatagramIpSize = 4;
// The hop limit of packets whose sender wishes no other.
inline constexpr uint8_t kUsualHopLimit = 64;
inline constexpr size_t kIbIcrcSize = 4;
inline constexpr uint16_t kIbDefaultPkey = 0xffff;
inline constexpr uint32_t kIbQpMask = 0xffffff;

enum class IbFaultKind : uint8_t {
  kTruncated,   // fewer bytes than the headers need
  kBadOpcode,   // none of the service's, or of a service that is not spoken here
  kBadVersion,  // TVer is not 0
  kPayload,     // bytes behind headers that carry none
  kBadPad,      // PadCnt does not fit the payload
};
const char* ToString(IbFaultKind kind);

// Where and why decoding stopped. Nothing answers such a packet: it is dropped (section 9.6).
struct IbFault {
  IbFaultKind kind = IbFaultKind::kTruncated;
  uint32_t offset = 0;  // of the offending field, in bytes from the start of the record
  uint64_t value = 0;   // what stood there; for lengths, the length found
  friend bool operator==(const IbFault&, const IbFault&) = default;
};
std::string ToString(const IbFault& fault);

// Everything before the payload. Only the fields the opcode has are encoded; the others stay as they are by default
// when decoded.
struct IbHeader {
  // BTH.
  IbService service = IbService::kRc;
  IbOp op = IbOp::kSendOnly;
  bool solicited = false;
  bool migrated = true;  // MigReq; nothing here migrates, so the path is always "migrated"
  uint8_t pad = 0;       // bytes that bring the payload to a multiple of four
  uint16_t pkey = kIbDefaultPkey;
  uint32_t destination_qp = 0;  // 24 bits
  bool ack_request = false;
  uint32_t psn = 0;  // 24 bits
  // DETH (UD).
  uint32_t qkey = 0;
  // The reserved byte. A record has no IP header, whose traffic class stands here on its way between us; on a wire the
  // byte is 0.
  uint8_t traffic_class = 0;
  uint32_t source_qp = 0;  // 24 bits
  // What else of the IP header a datagram's sender has a say in. Encode() leaves both out: EncodeDatagramIp().
  uint8_t hop_limit = kUsualHopLimit;
  uint32_t flow_label = 0;  // 20 bits
  // RETH (first packet of a Write, Read Request); AtomicETH has the first two as well.
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t dma_length = 0;
  // AtomicETH.
  uint64_t swap_or_add = 0;
  uint64_t compare = 0;
  // ImmDt: four bytes that nobody looks into, as they stand in memory and on the wire (ibv_wc's imm_data).
  uint32_t immediate = 0;
  // IETH.
  uint32_t invalidate_rkey = 0;
  // AETH.
  uint8_t syndrome = 0;
  uint32_t msn = 0;  // 24 bits
  // AtomicAckETH: what stood at the target.
  uint64_t original = 0;

  // Where the payload begins, in bytes from the start of the record.
  size_t EncodedSize() const;
  // Fields of 24 bits are cut to them.
  void Encode(ByteWriter& out) const;
  friend bool operator==(const IbHeader&, const IbHeader&) = default;
};

// Reads the headers of a record of `record_length` bytes from its head: min(record_length, kMaxIbHeaderSize) bytes or
// more. On success the payload is the rest of the record: record_length - EncodedSize().
Result<IbHeader, IbFault> DecodeIb(ConstBytes head, size_t record_length);

// Between us a word stands behind the headers of each datagram (UD): hop limit (8 bits) | 4 zero | flow label (20
// bits). Big-endian. Writes it.
void EncodeDatagramIp(const IbHeader& header, ByteWriter& out);
// Reads it from where DecodeIb() found that the headers end. False: it is not whole, or has other bits.
bool DecodeDatagramIp(ConstBytes behind, IbHeader* header);

// What an IP header in front of a packet says by its sender's wish.
struct IbIpFields {
  uint8_t traffic_class = 0;
  uint8_t hop_limit = kUsualHopLimit;
  uint32_t flow_label = 0;
  friend bool operator==(const IbIpFields&, const IbIpFields&) = default;
};
// Takes them out of a record, in front of which an IP header is put: what is left of it is a packet as it stands on a
// wire. What is no datagram, or none of ours, stays as it is, and has the usual ones.
IbIpFields TakeIpFields(std::vector<std::byte>* record);

// --- A packet of our own ---

// Tells an RC or UC QP that its peer cannot be reached any more and cannot reach it: what retries would find out, at
// once. A BTH alone, whose opcode is one of those that the specification leaves to manufacturers (table 38 of section
// 9.2.1: the upper two bits set), so that DecodeIb, as every other implementation, has no such packet. Its PSN is one
// of the two with which the QPs have begun to send, so that it is no easier to forge than any other packet of theirs.
// Sent where an injection rule cuts a connection (emu/tap/injection_tap.h).
inline constexpr uint8_t kIbUnreachableOpcode = 0xc0;
std::array<std::byte, kIbBthSize> EncodeIbUnreachable(uint32_t destination_qp, uint32_t psn);
bool IsIbUnreachable(ConstBytes head, size_t record_length, uint32_t destination_qp, uint32_t psn);

// "RC Write First QP 0x12 PSN 5 A RKey 0x1200 VA 0x1000 length 4096". One line, deterministic.
std::string Describe(const IbHeader& header);

// PadCnt for a payload of this many bytes.
constexpr uint8_t IbPad(size_t payload) {
  return static_cast<uint8_t>((4 - (payload & 3)) & 3);
}

// --- Packet sequence numbers: 24 bits, modulo 2^24 (section 9.7.1) ---

inline constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint32_t PsnAdd(uint32_t psn, uint32_t count) {
  return (psn + count) & kPsnMask;
}
// How far `psn` is ahead of `origin`, 0 to 2^24-1.
constexpr uint32_t PsnOffset(uint32_t psn, uint32_t origin) {
  return (psn - origin) & kPsnMask;
}
// The same, taking the upper half of the circle for "behind": -2^23 to 2^23-1.
constexpr int32_t PsnCompare(uint32_t a, uint32_t b) {
  const uint32_t offset = PsnOffset(a, b);
  return offset < (1u << 23) ? static_cast<int32_t>(offset) : static_cast<int32_t>(offset) - (1 << 24);
}

// --- Timers ---

// How long a requester waits after an RNR NAK with this timer code (table 45 of section 9.7.5.2.8): 10 us to 655.36 ms.
// Five bits count.
Duration RnrTimer(uint8_t code);
// How long it waits for an answer (section 9.9.2.1.2): 4.096 us times 2^code; zero, which is never, for code 0. Five
// bits count.
Duration AckTimeout(uint8_t code);

// --- Invariant CRC of RoCEv2 (annex A17.3.3) ---

// Over the IP header (20 or 40 bytes), the UDP header and the packet from BTH to its pad bytes, fields that change on
// the way taken as ones. The four bytes stand least significant first behind the packet.
uint32_t IcrcOf(ConstBytes ip, ConstBytes udp, ConstBytes bth_to_pad);

}  // namespace stagecoach::emu::wire
