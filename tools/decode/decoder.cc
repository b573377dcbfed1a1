#include "tools/decode/decoder.h"

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "emu/wire/mpa.h"
#include "rpcrdma/wire/private_data.h"
#include "tools/decode/hex_dump.h"

namespace stagecoach::decode {
namespace {

// Takes the packets of one input apart.
class Packets {
 public:
  Packets(const rpcrdma::ProtocolProfile& profile, const Sinks& sinks)
      : iwarp_(profile, &sinks), roce_(profile, &sinks) {}

  void On(uint32_t link_type, ConstBytes bytes, size_t original_size, const Origin& origin) {
    auto datagram = ParsePacket(link_type, bytes);
    // What lies beyond the end of the packet was never there to be captured.
    if (!datagram || (datagram->missing > 0 && original_size <= bytes.size())) return;
    if (datagram->tcp) {
      iwarp_.OnSegment(*datagram, origin);
    } else if (datagram->destination.port == kRocePort) {
      roce_.OnPacket(*datagram, origin);
    }
  }
  uint64_t Finish() {
    iwarp_.Finish();
    return iwarp_.others() + roce_.others();
  }

 private:
  Iwarp iwarp_;
  Roce roce_;
};

bool IsPrivateData(ConstBytes bytes) {
  return bytes.size() >= 4 && ByteReader(bytes).U32() == rpcrdma::kPrivateDataMagic;
}

// A packet with its headers, as tshark -x shows it: with or without Ethernet's. Its lengths say so, which those of a
// message would do by chance alone.
std::optional<uint32_t> LinkTypeOf(ConstBytes bytes) {
  for (const uint32_t link_type : {kLinkEthernet, kLinkRaw}) {
    const auto datagram = ParsePacket(link_type, bytes);
    if (datagram && datagram->missing == 0 && (datagram->tcp || datagram->destination.port == kRocePort)) {
      return link_type;
    }
  }
  return std::nullopt;
}

class Decoder {
 public:
  Decoder(const rpcrdma::ProtocolProfile& profile, const Sinks& sinks)
      : sinks_{.message =
                   [this, &sinks](const Event& event) {
                     ++totals_.messages;
                     if (event.decoded.illegal()) ++totals_.illegal;
                     sinks.message(event);
                   },
               .trouble =
                   [this, &sinks](const Origin& origin, const std::string& text) {
                     ++totals_.troubles;
                     sinks.trouble(origin, text);
                   }},
        packets_(profile, sinks_),
        messages_(profile) {}
  Decoder(const Decoder&) = delete;

  Result<Totals, std::string> ReadCapture(ConstBytes beginning, std::istream& in) {
    CaptureFile file(beginning, &in);
    for (;;) {
      auto packet = file.Next();
      if (!packet && totals_.packets == 0) return Err(packet.error());
      if (!packet) {
        sinks_.trouble({.packet = totals_.packets}, packet.error());
        break;
      }
      if (!packet->has_value()) break;
      totals_.packets = (*packet)->number;
      packets_.On((*packet)->link_type, (*packet)->bytes, (*packet)->original_size,
                  {.packet = (*packet)->number, .time = (*packet)->time});
    }
    totals_.others = packets_.Finish();
    return totals_;
  }

  Result<Totals, std::string> ReadHex(const std::string& text) {
    auto blocks = ParseHexDump(text);
    if (!blocks) return Err(blocks.error());
    for (const Block& block : *blocks) OnBlock(block);
    totals_.others = packets_.Finish();
    return totals_;
  }

 private:
  void OnBlock(const Block& block) {
    const Origin origin{.packet = ++totals_.packets};
    if (const auto link_type = LinkTypeOf(block)) {
      packets_.On(*link_type, block, block.size(), origin);
      return;
    }
    if (block.size() > kMessageMax) return sinks_.trouble(origin, "too long for a message");
    ConstBytes bytes = block;
    const char* carrier = "";
    for (const auto kind : {emu::wire::MpaFrameKind::kRequest, emu::wire::MpaFrameKind::kReply}) {
      if (const auto frame = emu::wire::MpaFrame::Decode(kind, bytes)) {
        carrier = kind == emu::wire::MpaFrameKind::kRequest ? "MPA Request" : "MPA Reply";
        bytes = frame->private_data;
        break;
      }
    }
    Event event{.origin = origin, .carrier = carrier, .bytes = bytes};
    if (*carrier != '\0' || IsPrivateData(bytes)) {
      auto decoded = messages_.OnPrivateData(End::kUnknown, bytes);
      if (!decoded) return sinks_.trouble(origin, "no private data of RPC-over-RDMA in this frame");
      event.decoded = std::move(*decoded);
    } else {
      event.decoded = messages_.OnMessage(End::kUnknown, bytes);
    }
    sinks_.message(event);
  }

  Totals totals_;
  const Sinks sinks_;
  Packets packets_;
  MessageDecoder messages_;
};

}  // namespace

Result<Totals, std::string> DecodeInput(std::istream& in, const rpcrdma::ProtocolProfile& profile, const Sinks& sinks) {
  std::array<std::byte, 4> beginning{};
  in.read(reinterpret_cast<char*>(beginning.data()), beginning.size());
  const auto got = static_cast<size_t>(in.gcount());
  const ConstBytes begun = ConstBytes(beginning).first(got);
  Decoder decoder(profile, sinks);
  if (CaptureFile::Begins(begun)) return decoder.ReadCapture(begun, in);

  std::string text(AsText(begun));
  std::array<char, 64 * 1024> part;
  while (in && text.size() <= kHexTextMax) {
    in.read(part.data(), part.size());
    text.append(part.data(), static_cast<size_t>(in.gcount()));
  }
  // Of a file with other bytes than those of text it would be of no use to name a line.
  if (text.find('\0') != std::string::npos) return Err(std::string("neither a pcap or pcapng file nor a hex dump"));
  return decoder.ReadHex(text);
}

}  // namespace stagecoach::decode
