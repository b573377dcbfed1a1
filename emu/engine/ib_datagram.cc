#include "emu/engine/ib_datagram.h"

#include <algorithm>
#include <array>

#include "base/cursor.h"

namespace stagecoach::emu {
namespace {

constexpr size_t kIpv4At = 20;  // in a GRH
constexpr size_t kIpv4Size = 20;
constexpr size_t kIpv4ChecksumAt = 10;
constexpr size_t kIpv6Size = 40;
constexpr size_t kUdpSize = 8;
constexpr uint8_t kUdp = 17;
constexpr uint16_t kDoNotFragment = 0x4000;
constexpr std::array<uint8_t, 12> kMappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kMappedAt = kMappedPrefix.size();

// A P_Key without the bit that tells full members from limited ones.
constexpr uint16_t kPartitionMask = 0x7fff;

bool IsMapped(const wire::Gid& gid) {
  return std::equal(kMappedPrefix.begin(), kMappedPrefix.end(), gid.begin());
}

// Of RFC 1071; 0 over a header that has its checksum.
uint16_t Checksum(ConstBytes header) {
  ByteReader in(header);
  uint32_t sum = 0;
  while (in.remaining() >= 2) sum += in.U16();
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}

template <typename Iterator>
void PutAddress(ByteWriter& out, Iterator begin, Iterator end) {
  for (Iterator byte = begin; byte != end; ++byte) out.U8(*byte);
}

void WriteIpv4(const Route& route, size_t packet, MutableBytes out) {
  ByteWriter header(out);
  header.U8(0x45);
  header.U8(route.traffic_class);
  header.U16(static_cast<uint16_t>(kIpv4Size + kUdpSize + packet));
  header.U16(0);
  header.U16(kDoNotFragment);
  header.U8(route.hop_limit);
  header.U8(kUdp);
  header.U16(0);
  PutAddress(header, route.source.begin() + kMappedAt, route.source.end());
  PutAddress(header, route.destination.begin() + kMappedAt, route.destination.end());
  ByteWriter checksum(out.subspan(kIpv4ChecksumAt, 2));
  checksum.U16(Checksum(out));
}

void WriteIpv6(const Route& route, size_t packet, MutableBytes out) {
  ByteWriter header(out);
  header.U32(uint32_t{6} << 28 | uint32_t{route.traffic_class} << 20 | (route.flow_label & 0xfffff));
  header.U16(static_cast<uint16_t>(kUdpSize + packet));
  header.U8(kUdp);
  header.U8(route.hop_limit);
  PutAddress(header, route.source.begin(), route.source.end());
  PutAddress(header, route.destination.begin(), route.destination.end());
}

wire::Gid ReadMapped(ByteReader& in) {
  wire::Gid gid{};
  std::copy(kMappedPrefix.begin(), kMappedPrefix.end(), gid.begin());
  for (size_t i = kMappedAt; i < gid.size(); ++i) gid[i] = in.U8();
  return gid;
}

wire::Gid ReadGid(ByteReader& in) {
  wire::Gid gid{};
  for (uint8_t& byte : gid) byte = in.U8();
  return gid;
}

}  // namespace

const char* ToString(DatagramFault fault) {
  switch (fault) {
    case DatagramFault::kMalformed:
      return "malformed";
    case DatagramFault::kNotDatagram:
      return "no datagram";
    case DatagramFault::kPartition:
      return "foreign partition";
    case DatagramFault::kTooLong:
      return "longer than the MTU";
  }
  return "unknown";
}

Result<DatagramHead, DatagramFault> JudgeDatagram(const RecordHead& record, size_t mtu) {
  auto header = wire::DecodeIb(record.head, record.length);
  if (!header) return Err(DatagramFault::kMalformed);
  if (header->service != wire::IbService::kUd) return Err(DatagramFault::kNotDatagram);
  // Of two limited members neither hears the other; we are full members.
  if ((header->pkey & kPartitionMask) != (wire::kIbDefaultPkey & kPartitionMask)) {
    return Err(DatagramFault::kPartition);
  }
  const size_t packet_head = header->EncodedSize();
  if (!wire::DecodeDatagramIp(record.head.subspan(packet_head), &*header)) return Err(DatagramFault::kMalformed);
  const size_t head_size = packet_head + wire::kDatagramIpSize;
  // The head may be longer than the record.
  if (record.length < head_size) return Err(DatagramFault::kMalformed);
  const size_t payload = record.length - head_size;
  if (payload > mtu) return Err(DatagramFault::kTooLong);
  return DatagramHead{*header, head_size, payload};
}

RouteHeader HeaderOf(const Route& route) {
  return IsMapped(route.source) && IsMapped(route.destination) ? RouteHeader::kIpv4 : RouteHeader::kIpv6;
}

void WriteGrh(const Route& route, size_t packet, std::span<std::byte, kGrhSize> out) {
  std::fill(out.begin(), out.end(), std::byte{0});
  if (HeaderOf(route) == RouteHeader::kIpv4) {
    WriteIpv4(route, packet, out.subspan(kIpv4At, kIpv4Size));
  } else {
    WriteIpv6(route, packet, out);
  }
}

std::optional<Route> ReadGrh(ConstBytes grh) {
  if (grh.size() < kGrhSize) return std::nullopt;
  // What stands in front of an IPv4 header may be anything, so that is looked for first; its checksum tells.
  const ConstBytes ipv4 = grh.subspan(kIpv4At, kIpv4Size);
  Route route;
  if (std::to_integer<uint8_t>(ipv4[0]) == 0x45 && Checksum(ipv4) == 0) {
    ByteReader in(ipv4);
    in.Skip(1);
    route.traffic_class = in.U8();
    in.Skip(6);
    route.hop_limit = in.U8();
    in.Skip(3);
    route.source = ReadMapped(in);
    route.destination = ReadMapped(in);
    return route;
  }
  ByteReader in(grh.first(kIpv6Size));
  const uint32_t first = in.U32();
  if (first >> 28 != 6) return std::nullopt;
  route.traffic_class = static_cast<uint8_t>(first >> 20);
  route.flow_label = first & 0xfffff;
  in.Skip(3);
  route.hop_limit = in.U8();
  route.source = ReadGid(in);
  route.destination = ReadGid(in);
  return route;
}

}  // namespace stagecoach::emu
