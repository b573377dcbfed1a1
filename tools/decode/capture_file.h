// Reads capture files packet by packet: pcap (microseconds and nanoseconds) and pcapng (draft-ietf-opsawg-pcapng) with
// its Enhanced and Simple Packet Blocks and the Packet Blocks of older tools, of either byte order.
//
// Why not libpcap: docs/decisions/0053. Memory is bounded by kPacketMax, whatever the file says. What follows a block
// that is cut, as of a capture that was interrupted, is lost; what came before it is not.
//
// Single-threaded.
#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "tools/decode/not_understood.h"

namespace stagecoach::decode {

// Link types, by their numbers in these files.
inline constexpr uint32_t kLinkNull = 0;
inline constexpr uint32_t kLinkEthernet = 1;
inline constexpr uint32_t kLinkRaw = 101;   // IPv4 or IPv6
inline constexpr uint32_t kLinkLoop = 108;  // as kLinkNull, for what is read here
inline constexpr uint32_t kLinkLinuxSll = 113;
inline constexpr uint32_t kLinkIpv4 = 228;
inline constexpr uint32_t kLinkIpv6 = 229;
inline constexpr uint32_t kLinkLinuxSll2 = 276;

struct Packet {
  uint64_t number = 0;           // in the file, from 1
  std::optional<uint64_t> time;  // nanoseconds since 1970
  uint32_t link_type = kLinkEthernet;
  uint32_t original_size = 0;  // on the wire; `bytes` may have less of it
  ConstBytes bytes;            // valid until the next call
};

class CaptureFile {
 public:
  // Larger than any packet of the link types above.
  static constexpr size_t kPacketMax = 256 * 1024;
  static constexpr size_t kInterfacesMax = 4096;

  // Whether a file with this beginning is a capture. Four bytes are enough.
  static bool Begins(ConstBytes bytes);

  // `in` stands behind `beginning`, the bytes that were read already. What is left out is added to `skipped`. Both
  // outlive this.
  CaptureFile(ConstBytes beginning, std::istream* in, NotUnderstoodCounts* skipped);

  // The next packet that can be read; nullopt at the end of the file. An error ends the file.
  Result<std::optional<Packet>, std::string> Next();
  // So far, with those that were left out.
  uint64_t packets() const { return packets_; }

 private:
  using Error = std::string;
  struct Interface {
    bool described = false;  // or left out
    uint32_t link_type = 0;
    uint32_t snap_length = 0;  // 0: no limit
    uint64_t ticks_per_second = 1'000'000;
  };

  // False: the file ends before that.
  bool Read(size_t size);
  bool Skip(uint64_t size);
  uint16_t U16(size_t at) const;
  uint32_t U32(size_t at) const;
  Result<void, Error> ReadFileHeader();
  Result<std::optional<Packet>, Error> NextOfPcap();
  Result<std::optional<Packet>, Error> NextOfPcapNg();
  Result<void, Error> ReadSectionHeader();
  Interface ReadInterface(size_t size) const;
  const Interface* Find(uint32_t interface) const;
  std::optional<Packet> ReadPacket(uint32_t type, size_t size);
  std::optional<Packet> ReadSimplePacket(size_t size);
  Error Cut() const;

  std::istream& in_;
  NotUnderstoodCounts& skipped_;
  std::vector<std::byte> beginning_;  // of what has not been read yet
  std::vector<std::byte> buffer_;     // what Read() read
  uint64_t position_ = 0;             // in the file
  uint64_t packets_ = 0;
  bool started_ = false;
  bool ng_ = false;
  bool big_endian_ = false;
  bool nanoseconds_ = false;  // pcap
  uint32_t link_type_ = 0;    // pcap
  std::vector<Interface> interfaces_;
};

}  // namespace stagecoach::decode
