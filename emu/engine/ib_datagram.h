// Datagrams of InfiniBand (UD) as pure judgements: what of a record is a datagram, whether a QP may have it, and the 40
// bytes of route that its Receive begins with.
//
// There is no engine: nothing of a datagram outlives it. Sources: InfiniBand specification volume 1, sections 9.6
// (header checks), 9.8.3 (unreliable datagrams) and 10.2.5 (Q_Keys); annex A17.4.5 for the route header, which with
// RoCEv2 is the packet's IP header. Not here: multicast, partitions other than the default one, congestion
// notification. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/result.h"
#include "emu/engine/record.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

// No datagram is longer than the largest MTU.
inline constexpr size_t kMaxDatagram = 4096;

enum class DatagramFault : uint8_t {
  kMalformed,    // its headers cannot be read
  kNotDatagram,  // a packet of another service
  kPartition,    // a P_Key that is not ours
  kTooLong,      // for the MTU
};
const char* ToString(DatagramFault fault);

struct DatagramHead {
  wire::IbHeader header;
  size_t head_size = 0;  // where the payload begins
  size_t payload = 0;    // its length
};

// What can be said before the QP is known. Nothing answers what is refused.
Result<DatagramHead, DatagramFault> JudgeDatagram(const RecordHead& record, size_t mtu);

// The Q_Key that a send carries: a request whose key has the topmost bit means that of its QP (section 10.2.5), so that
// programs cannot choose privileged keys.
constexpr uint32_t QkeyToSend(uint32_t requested, uint32_t own) {
  return (requested & 0x80000000u) != 0 ? own : requested;
}

// --- The route header ---

inline constexpr size_t kGrhSize = 40;

struct Route {
  wire::Gid source{};
  wire::Gid destination{};
  uint8_t traffic_class = 0;
  uint8_t hop_limit = 0;
  uint32_t flow_label = 0;  // IPv6 alone
  friend bool operator==(const Route&, const Route&) = default;
};

// Which of the two headers a route is shown by. The numbers are those that completions of mlx5 have for it.
enum class RouteHeader : uint8_t { kIpv6 = 1, kIpv4 = 2 };
RouteHeader HeaderOf(const Route& route);

// As RoCEv2 hands it to the receiver of a packet whose BTH to pad bytes and CRC take `packet` bytes: an IPv6 header; or
// 20 zeros and an IPv4 header, where the GIDs are IPv4 addresses.
void WriteGrh(const Route& route, size_t packet, std::span<std::byte, kGrhSize> out);
// What a receiver makes of it, wherever it comes from. Nothing if it is neither.
std::optional<Route> ReadGrh(ConstBytes grh);

}  // namespace stagecoach::emu
