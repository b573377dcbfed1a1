// What the records of a connection are, on either transport: one table that rules are judged by.
//
// Pure data; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace stagecoach::emu {

// What can be done depends on the transport.
enum class InjectionTransport : uint8_t { kIwarp, kInfiniband };
// "iWARP", "InfiniBand".
const char* ToString(InjectionTransport transport);

// What a message is, on either transport. An acknowledgement or a Terminate is the protocol's own, and a datagram is on
// no connection: a rule is about such when it names them, and otherwise not.
enum class MessageKind : uint8_t {
  kSend,  // with whatever it carries besides: invalidation, immediate data
  kWrite,
  kRead,  // the request
  kReadResponse,
  kAtomic,  // the request
  kAtomicResponse,
  kImmediate,  // iWARP: RFC 7306; on InfiniBand it is part of a Write
  kTerminate,  // iWARP
  kAck,        // InfiniBand: ACK, NAK and RNR NAK
  kDatagram,   // InfiniBand: a packet of a UD QP
};
inline constexpr size_t kMessageKinds = 10;
const char* ToString(MessageKind kind);

// Some of them.
using KindSet = uint16_t;
constexpr KindSet KindBit(MessageKind kind) {
  return static_cast<KindSet>(1u << static_cast<uint8_t>(kind));
}
inline constexpr KindSet kAllKinds = (1u << kMessageKinds) - 1;
inline constexpr KindSet kKindsOfConnections = static_cast<KindSet>(kAllKinds & ~KindBit(MessageKind::kDatagram));
// What a rule that names no kind is about.
inline constexpr KindSet kProgramsMessages =
    static_cast<KindSet>(kKindsOfConnections & ~(KindBit(MessageKind::kTerminate) | KindBit(MessageKind::kAck)));
// "any": every record, also those that are no message, such as Writes of no bytes.
inline constexpr KindSet kEveryRecord = 0xffff;

struct KindRow {
  std::string_view name;
  // Why a transport has none; empty: it has.
  std::string_view why_not_on_iwarp;
  std::string_view why_not_on_infiniband;
  bool has_segments = false;  // it may have several
  bool is_repeated = true;    // InfiniBand: it is sent again when it is missed
  // InfiniBand: the Receive that it takes, if any, is taken by its last segment, and not by its first.
  bool receives_last = false;
};
std::span<const KindRow, kMessageKinds> AllKinds();
const KindRow& RowOf(MessageKind kind);
// Those that there are on a transport.
KindSet KindsOn(InjectionTransport transport);

}  // namespace stagecoach::emu
