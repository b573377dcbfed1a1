#include "tests/support/pcap_reader.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>

#include "base/cursor.h"

namespace stagecoach::testing {

namespace {

constexpr uint32_t kMagicMicroseconds = 0xa1b2c3d4;
constexpr uint32_t kMagicNanoseconds = 0xa1b23c4d;
constexpr size_t kFileHeaderSize = 24;
constexpr size_t kPacketHeaderSize = 16;
constexpr uint32_t kLinkEthernet = 1;

uint32_t Swap(uint32_t v) {
  return v >> 24 | (v >> 8 & 0xff00) | (v << 8 & 0xff0000) | v << 24;
}

// A number of a pcap header, in the byte order of the machine that wrote the file.
uint32_t FileU32(ConstBytes file, size_t at, bool swapped) {
  const uint32_t big_endian = ByteReader(file.subspan(at, 4)).U32();
  return swapped ? Swap(big_endian) : big_endian;
}

struct Segment {
  uint32_t source_address = 0, destination_address = 0;
  uint16_t source_port = 0, destination_port = 0;
  uint32_t sequence = 0, acknowledgement = 0;
  bool syn = false, ack = false, fin = false, reset = false;
  ConstBytes payload;
};

std::optional<Segment> ParseTcp(ConstBytes packet, Segment segment) {
  ByteReader in(packet);
  segment.source_port = in.U16();
  segment.destination_port = in.U16();
  segment.sequence = in.U32();
  segment.acknowledgement = in.U32();
  const size_t header_size = static_cast<size_t>(in.U8() >> 4) * 4;
  const uint8_t flags = in.U8();
  if (!in.ok() || header_size < 20 || header_size > packet.size()) return std::nullopt;
  segment.fin = (flags & 0x01) != 0;
  segment.syn = (flags & 0x02) != 0;
  segment.reset = (flags & 0x04) != 0;
  segment.ack = (flags & 0x10) != 0;
  segment.payload = packet.subspan(header_size);
  return segment;
}

std::optional<Segment> ParseEthernet(ConstBytes frame) {
  ByteReader in(frame);
  in.Skip(12);
  if (in.U16() != 0x0800 || !in.ok()) return std::nullopt;
  const ConstBytes ip = in.Rest();
  const uint8_t version_and_size = in.U8();
  in.Skip(1);
  const size_t total = in.U16();
  in.Skip(2);
  const uint16_t fragment = in.U16();
  in.Skip(1);
  const uint8_t protocol = in.U8();
  in.Skip(2);
  Segment segment;
  segment.source_address = in.U32();
  segment.destination_address = in.U32();
  const size_t header_size = static_cast<size_t>(version_and_size & 0x0f) * 4;
  const bool is_fragment = (fragment & 0x3fff) != 0;
  if (!in.ok() || version_and_size >> 4 != 4 || protocol != 6 || is_fragment || header_size < 20 ||
      total < header_size || total > ip.size()) {
    return std::nullopt;
  }
  // The total length counts; short frames are padded by Ethernet.
  return ParseTcp(ip.first(total).subspan(header_size), segment);
}

// Puts the segments of one direction in order: what came early waits, what came twice is dropped.
class Assembler {
 public:
  void OnSyn(uint32_t sequence) {
    if (!next_.has_value()) next_ = sequence + 1;
  }
  void OnSegment(const Segment& segment, TcpDirection& out) {
    out.reset |= segment.reset;
    if (!next_.has_value()) return;
    const uint32_t start = segment.sequence + (segment.syn ? 1 : 0);
    if (!segment.payload.empty()) waiting_.emplace(Distance(start), segment.payload);
    if (segment.fin) fin_at_ = Distance(start) + static_cast<int64_t>(segment.payload.size());
    for (auto it = waiting_.begin(); it != waiting_.end() && it->first <= Position(out);) {
      const int64_t seen = Position(out) - it->first;
      if (seen < static_cast<int64_t>(it->second.size())) {
        const ConstBytes fresh = it->second.subspan(static_cast<size_t>(seen));
        out.bytes.insert(out.bytes.end(), fresh.begin(), fresh.end());
      }
      it = waiting_.erase(it);
    }
    out.gap = !waiting_.empty();
    out.fin = fin_at_.has_value() && *fin_at_ == Position(out);
  }
  // What the other end says it has of this direction.
  void OnAcknowledgement(uint32_t number, const TcpDirection& out, TcpPacket& packet) const {
    if (!next_.has_value()) return;
    const int64_t has = Distance(number);
    packet.acknowledged = static_cast<uint64_t>(std::clamp<int64_t>(has, 0, Position(out)));
    packet.fin_acknowledged = fin_at_.has_value() && has > *fin_at_;
  }

 private:
  static int64_t Position(const TcpDirection& out) { return static_cast<int64_t>(out.bytes.size()); }
  // Of a sequence number from the first byte of the stream; right for streams below 2 GiB.
  int64_t Distance(uint32_t sequence) const { return static_cast<int32_t>(sequence - *next_); }

  std::optional<uint32_t> next_;
  std::optional<int64_t> fin_at_;
  std::multimap<int64_t, ConstBytes> waiting_;
};

using Key = std::tuple<uint32_t, uint16_t, uint32_t, uint16_t>;  // client, then server

class Reassembly {
 public:
  // True when the segment belongs to a connection whose beginning was seen.
  bool OnSegment(const Segment& s) {
    const Key forward{s.source_address, s.source_port, s.destination_address, s.destination_port};
    const Key backward{s.destination_address, s.destination_port, s.source_address, s.source_port};
    if (s.syn && !s.ack) Open(forward, s);
    if (const auto it = live_.find(forward); it != live_.end()) {
      State& state = states_[it->second];
      TcpConnection& connection = capture.connections[it->second];
      state.client.OnSegment(s, connection.from_client);
      Note(s, true, connection, connection.from_client, state.server, connection.from_server);
      return true;
    }
    if (const auto it = live_.find(backward); it != live_.end()) {
      State& state = states_[it->second];
      TcpConnection& connection = capture.connections[it->second];
      if (s.syn) state.server.OnSyn(s.sequence);
      state.server.OnSegment(s, connection.from_server);
      Note(s, false, connection, connection.from_server, state.client, connection.from_client);
      return true;
    }
    return false;
  }

  TcpCapture capture;

 private:
  struct State {
    uint32_t first_sequence;
    Assembler client, server;
  };

  static void Note(const Segment& s, bool from_client, TcpConnection& connection, const TcpDirection& own,
                   const Assembler& other_assembler, const TcpDirection& other) {
    TcpPacket packet{.from_client = from_client, .sent = own.bytes.size(), .fin = own.fin, .reset = s.reset};
    if (s.ack) other_assembler.OnAcknowledgement(s.acknowledgement, other, packet);
    connection.packets.push_back(packet);
  }

  // A repeated SYN is the same connection; another sequence number on the same ports is the next one.
  void Open(const Key& key, const Segment& s) {
    const auto it = live_.find(key);
    if (it != live_.end() && states_[it->second].first_sequence == s.sequence) return;
    live_[key] = states_.size();
    states_.push_back({s.sequence, {}, {}});
    states_.back().client.OnSyn(s.sequence);
    capture.connections.push_back({.client_address = s.source_address,
                                   .client_port = s.source_port,
                                   .server_address = s.destination_address,
                                   .server_port = s.destination_port,
                                   .from_client = {},
                                   .from_server = {},
                                   .packets = {}});
  }

  std::map<Key, size_t> live_;
  std::vector<State> states_;
};

std::string Address(uint32_t a) {
  return std::to_string(a >> 24) + "." + std::to_string(a >> 16 & 255) + "." + std::to_string(a >> 8 & 255) + "." +
         std::to_string(a & 255);
}

}  // namespace

std::string TcpConnection::Name() const {
  return Address(client_address) + ":" + std::to_string(client_port) + " -> " + Address(server_address) + ":" +
         std::to_string(server_port);
}

Result<TcpCapture, std::string> ReadTcpCapture(ConstBytes pcap) {
  if (pcap.size() < kFileHeaderSize) return Err(std::string("shorter than a pcap file header"));
  const uint32_t magic = FileU32(pcap, 0, false);
  const bool swapped = Swap(magic) == kMagicMicroseconds || Swap(magic) == kMagicNanoseconds;
  if (!swapped && magic != kMagicMicroseconds && magic != kMagicNanoseconds) return Err(std::string("not a pcap file"));
  if (const uint32_t link = FileU32(pcap, 20, swapped); link != kLinkEthernet) {
    return Err("link type " + std::to_string(link) + " is not Ethernet");
  }

  Reassembly reassembly;
  TcpCapture& capture = reassembly.capture;
  for (size_t at = kFileHeaderSize; at < pcap.size();) {
    if (pcap.size() - at < kPacketHeaderSize) return Err("cut packet header at byte " + std::to_string(at));
    const size_t captured = FileU32(pcap, at + 8, swapped);
    const size_t original = FileU32(pcap, at + 12, swapped);
    at += kPacketHeaderSize;
    if (captured > pcap.size() - at) return Err("cut packet at byte " + std::to_string(at));
    ++capture.packets;
    const auto segment = ParseEthernet(pcap.subspan(at, captured));
    at += captured;
    if (captured < original || !segment.has_value() || !reassembly.OnSegment(*segment)) ++capture.skipped_packets;
  }
  return std::move(capture);
}

Result<TcpCapture, std::string> ReadTcpCaptureFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) return Err("cannot open " + path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto capture = ReadTcpCapture(AsBytes(text));
  if (!capture.has_value()) return Err(path + ": " + capture.error());
  return capture;
}

}  // namespace stagecoach::testing
