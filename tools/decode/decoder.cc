#include "tools/decode/decoder.h"

#include <array>
#include <optional>
#include <string_view>
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
    const auto datagram = ParsePacket(link_type, bytes, original_size);
    if (!datagram) return not_understood_.Add(datagram.error());
    if (!datagram->tcp && datagram->destination.port != kRocePort) return;
    if (datagram->missing > 0) {
      // What lies beyond the end of the packet was never there to be captured.
      const bool cut = original_size > bytes.size();
      not_understood_.Add({cut ? NotUnderstood::Reason::kCut : NotUnderstood::Reason::kContradiction});
      if (!cut) return;
    }
    if (datagram->tcp) {
      iwarp_.OnSegment(*datagram, origin);
    } else {
      roce_.OnPacket(*datagram, origin);
    }
  }
  void Finish(Totals* totals) {
    iwarp_.Finish();
    totals->others = iwarp_.others() + roce_.others();
    totals->not_understood = not_understood_.packets();
    totals->sentences = not_understood_.Sentences();
  }
  NotUnderstoodCounts& not_understood() { return not_understood_; }

 private:
  NotUnderstoodCounts not_understood_;
  Iwarp iwarp_;
  Roce roce_;
};

bool IsPrivateData(ConstBytes bytes) {
  return bytes.size() >= 4 && ByteReader(bytes).U32() == rpcrdma::kPrivateDataMagic;
}

// A packet with its headers, as tshark -x and tcpdump -x show it: with or without those of its link. Its lengths say
// so, which those of a message would do by chance alone.
std::optional<uint32_t> LinkTypeOf(ConstBytes bytes) {
  for (const uint32_t link_type : {kLinkEthernet, kLinkRaw, kLinkLinuxSll, kLinkLinuxSll2}) {
    const auto datagram = ParsePacket(link_type, bytes, bytes.size());
    if (datagram && datagram->missing == 0 && (datagram->tcp || datagram->destination.port == kRocePort)) {
      return link_type;
    }
  }
  return std::nullopt;
}

bool HasIpVersion(ConstBytes bytes) {
  const int version = bytes.empty() ? 0 : std::to_integer<int>(bytes[0]) >> 4;
  return version == 4 || version == 6;
}

// Files that people have captures in, and that are not read as they are.
struct OtherFormat {
  std::string_view beginning;
  const char* what;
};
constexpr OtherFormat kOtherFormats[] = {
    {"\x1f\x8b", "compressed by gzip: gunzip it first"},
    {"\x28\xb5\x2f\xfd", "compressed by zstd: unzstd it first"},
    {"\xfd\x37\x7a\x58", "compressed by xz: unxz it first"},
    {"\x04\x22\x4d\x18", "compressed by lz4: unlz4 it first"},
    {"BZh", "compressed by bzip2: bunzip2 it first"},
    {"snoo", "a capture of snoop, which is not read: editcap -F pcapng turns it into one that is"},
    {"\xa1\xb2\xcd\x34",
     "a capture of a modified pcap, which is not read: editcap -F pcapng turns it into one that is"},
    {"\x34\xcd\xb2\xa1",
     "a capture of a modified pcap, which is not read: editcap -F pcapng turns it into one that is"},
};

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
    CaptureFile file(beginning, &in, &packets_.not_understood());
    totals_.capture = true;
    for (;;) {
      auto packet = file.Next();
      if (packet) totals_.packets = file.packets();
      if (!packet && totals_.packets == 0) return Err(packet.error());
      if (!packet) {
        sinks_.trouble({.packet = totals_.packets}, packet.error());
        break;
      }
      if (!packet->has_value()) break;
      packets_.On((*packet)->link_type, (*packet)->bytes, (*packet)->original_size,
                  {.packet = (*packet)->number, .time = (*packet)->time});
    }
    packets_.Finish(&totals_);
    return totals_;
  }

  Result<Totals, std::string> ReadHex(const std::string& text) {
    auto dump = ParseHexDump(text);
    if (!dump) return Err(dump.error());
    for (const Block& block : dump->blocks) OnBlock(block, dump->packets);
    packets_.Finish(&totals_);
    return totals_;
  }

 private:
  void OnBlock(const Block& block, bool is_packet) {
    const Origin origin{.packet = ++totals_.packets};
    auto link_type = LinkTypeOf(block);
    if (!link_type && is_packet) link_type = HasIpVersion(block) ? kLinkRaw : kLinkEthernet;
    if (link_type) return packets_.On(*link_type, block, block.size(), origin);
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
  for (const OtherFormat& each : kOtherFormats) {
    if (AsText(begun).starts_with(each.beginning)) return Err(std::string(each.what));
  }

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
