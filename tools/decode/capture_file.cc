#include "tools/decode/capture_file.h"

#include <algorithm>
#include <iterator>

#include "base/cursor.h"

namespace stagecoach::decode {
namespace {

constexpr uint32_t kMagicMicroseconds = 0xa1b2c3d4;
constexpr uint32_t kMagicNanoseconds = 0xa1b23c4d;
constexpr uint32_t kSectionHeader = 0x0a0d0d0a;  // the same in both byte orders
constexpr uint32_t kByteOrderMagic = 0x1a2b3c4d;
constexpr uint32_t kInterfaceDescription = 1;
constexpr uint32_t kPacket = 2;  // what older tools write
constexpr uint32_t kSimplePacket = 3;
constexpr uint32_t kEnhancedPacket = 6;
// Names, statistics, events of systemd, secrets of TLS, and custom blocks, which may be copied or not: no packets.
constexpr uint32_t kOtherBlocks[] = {4, 5, 9, 10, 0xbad, 0x40000bad};
constexpr uint16_t kOptionEnd = 0;
constexpr uint16_t kOptionTimeResolution = 9;
constexpr size_t kBlockHead = 8;       // type and length
constexpr size_t kBlockOverhead = 12;  // and the length again
constexpr uint64_t kNanosecondsPerSecond = 1'000'000'000;
// Options of a packet and comments may be long; more than this is skipped unread.
constexpr size_t kBlockMax = CaptureFile::kPacketMax + 64 * 1024;

constexpr uint32_t Swap(uint32_t v) {
  return v >> 24 | (v >> 8 & 0xff00) | (v << 8 & 0xff0000) | v << 24;
}

// Ticks of a clock to nanoseconds, as far as 64 bits can say it.
uint64_t ToNanoseconds(uint64_t ticks, uint64_t per_second) {
  const auto wide = static_cast<unsigned __int128>(ticks) * kNanosecondsPerSecond / per_second;
  return static_cast<uint64_t>(std::min<unsigned __int128>(wide, UINT64_MAX));
}

}  // namespace

bool CaptureFile::Begins(ConstBytes bytes) {
  if (bytes.size() < 4) return false;
  const uint32_t magic = ByteReader(bytes).U32();
  return magic == kSectionHeader || magic == kMagicMicroseconds || magic == kMagicNanoseconds ||
         magic == Swap(kMagicMicroseconds) || magic == Swap(kMagicNanoseconds);
}

CaptureFile::CaptureFile(ConstBytes beginning, std::istream* in, NotUnderstoodCounts* skipped)
    : in_(*in), skipped_(*skipped), beginning_(beginning.begin(), beginning.end()) {}

bool CaptureFile::Read(size_t size) {
  buffer_.resize(size);
  const size_t ready = CopyBytes(buffer_, beginning_);
  beginning_.erase(beginning_.begin(), beginning_.begin() + static_cast<ptrdiff_t>(ready));
  in_.read(reinterpret_cast<char*>(buffer_.data() + ready), static_cast<std::streamsize>(size - ready));
  const size_t got = ready + static_cast<size_t>(in_.gcount());
  position_ += got;
  buffer_.resize(got);
  return got == size;
}

bool CaptureFile::Skip(uint64_t size) {
  while (size > 0) {
    const size_t part = std::min<uint64_t>(size, 64 * 1024);
    if (!Read(part)) return false;
    size -= part;
  }
  return true;
}

uint16_t CaptureFile::U16(size_t at) const {
  const uint16_t value = ByteReader(ConstBytes(buffer_).subspan(at, 2)).U16();
  return big_endian_ ? value : static_cast<uint16_t>(value << 8 | value >> 8);
}

uint32_t CaptureFile::U32(size_t at) const {
  const uint32_t value = ByteReader(ConstBytes(buffer_).subspan(at, 4)).U32();
  return big_endian_ ? value : Swap(value);
}

CaptureFile::Error CaptureFile::Cut() const {
  return "the file is cut at byte " + std::to_string(position_);
}

Result<void, CaptureFile::Error> CaptureFile::ReadFileHeader() {
  if (!Read(4)) return Err(Cut());
  const uint32_t magic = ByteReader(buffer_).U32();
  if (magic == kSectionHeader) {
    ng_ = true;
    return ReadSectionHeader();
  }
  big_endian_ = magic == kMagicMicroseconds || magic == kMagicNanoseconds;
  nanoseconds_ = magic == kMagicNanoseconds || magic == Swap(kMagicNanoseconds);
  // Version, time zone, accuracy, snapshot length, link type.
  if (!Read(20)) return Err(Cut());
  link_type_ = U32(16) & 0xffff;  // above it stands how frames are checked
  return {};
}

Result<std::optional<Packet>, CaptureFile::Error> CaptureFile::Next() {
  if (!started_) {
    started_ = true;
    if (auto header = ReadFileHeader(); !header) return Err(header.error());
  }
  return ng_ ? NextOfPcapNg() : NextOfPcap();
}

Result<std::optional<Packet>, CaptureFile::Error> CaptureFile::NextOfPcap() {
  const uint64_t start = position_;
  if (!Read(16)) {
    if (buffer_.empty()) return std::nullopt;
    return Err(Cut());
  }
  Packet packet{.number = ++packets_, .link_type = link_type_, .original_size = U32(12)};
  const uint64_t fraction = U32(4);
  packet.time = U32(0) * kNanosecondsPerSecond + fraction * (nanoseconds_ ? 1 : 1000);
  const uint32_t size = U32(8);
  if (size > kPacketMax) {
    return Err("a packet of " + std::to_string(size) + " bytes at byte " + std::to_string(start));
  }
  if (!Read(size)) return Err(Cut());
  packet.bytes = buffer_;
  return packet;
}

// Behind the block's type.
Result<void, CaptureFile::Error> CaptureFile::ReadSectionHeader() {
  if (!Read(8)) return Err(Cut());
  const uint32_t magic = ByteReader(ConstBytes(buffer_).subspan(4)).U32();
  if (magic != kByteOrderMagic && Swap(magic) != kByteOrderMagic) {
    return Err("not a section of pcapng at byte " + std::to_string(position_ - 4));
  }
  big_endian_ = magic == kByteOrderMagic;
  const uint32_t size = U32(0);
  if (size < kBlockOverhead + 16 || size % 4 != 0) {
    return Err("a block of " + std::to_string(size) + " bytes at byte " + std::to_string(position_ - 12));
  }
  interfaces_.clear();
  if (!Skip(size - kBlockOverhead)) return Err(Cut());
  return {};
}

CaptureFile::Interface CaptureFile::ReadInterface(size_t size) const {
  if (size < 8) return {};
  Interface interface { .described = true, .link_type = U16(0), .snap_length = U32(4) };
  for (size_t at = 8; at + 4 <= size;) {
    const uint16_t code = U16(at);
    const size_t length = U16(at + 2);
    at += 4;
    if (code == kOptionEnd || length > size - at) break;
    if (code == kOptionTimeResolution && length == 1) {
      const auto resolution = std::to_integer<uint8_t>(buffer_[at]);
      const unsigned exponent = resolution & 0x7f;
      uint64_t ticks = 1;
      // What 64 bits cannot say is not a clock that anybody has.
      if ((resolution & 0x80) != 0) {
        ticks = exponent < 64 ? uint64_t{1} << exponent : 0;
      } else {
        for (unsigned i = 0; i < exponent && ticks != 0; ++i) ticks = i < 19 ? ticks * 10 : 0;
      }
      if (ticks != 0) interface.ticks_per_second = ticks;
    }
    at += length + XdrPad(length);
  }
  return interface;
}

const CaptureFile::Interface* CaptureFile::Find(uint32_t interface) const {
  return interface < interfaces_.size() && interfaces_[interface].described ? &interfaces_[interface] : nullptr;
}

// Of an Enhanced Packet Block or a Packet Block, which differ in their first word. nullopt: not a packet that can be
// made sense of.
std::optional<Packet> CaptureFile::ReadPacket(uint32_t type, size_t size) {
  constexpr size_t kHead = 20;
  if (size < kHead || U32(12) > size - kHead) {
    skipped_.Add({NotUnderstood::Reason::kBlockLength});
    return std::nullopt;
  }
  const Interface* interface = Find(type == kPacket ? U16(0) : U32(0));
  if (interface == nullptr) {
    skipped_.Add({NotUnderstood::Reason::kNoInterface});
    return std::nullopt;
  }
  const uint64_t ticks = uint64_t{U32(4)} << 32 | U32(8);
  return Packet{.number = packets_,
                .time = ToNanoseconds(ticks, interface->ticks_per_second),
                .link_type = interface->link_type,
                .original_size = U32(16),
                .bytes = ConstBytes(buffer_).subspan(kHead, U32(12))};
}

// It does not say how much of the packet was captured: all that the interface captures of one.
std::optional<Packet> CaptureFile::ReadSimplePacket(size_t size) {
  if (size < 4) {
    skipped_.Add({NotUnderstood::Reason::kBlockLength});
    return std::nullopt;
  }
  const Interface* interface = Find(0);
  if (interface == nullptr) {
    skipped_.Add({NotUnderstood::Reason::kNoInterface});
    return std::nullopt;
  }
  const uint32_t original = U32(0);
  size_t captured = std::min<size_t>(original, size - 4);
  if (interface->snap_length != 0) captured = std::min<size_t>(captured, interface->snap_length);
  return Packet{.number = packets_,
                .link_type = interface->link_type,
                .original_size = original,
                .bytes = ConstBytes(buffer_).subspan(4, captured)};
}

Result<std::optional<Packet>, CaptureFile::Error> CaptureFile::NextOfPcapNg() {
  for (;;) {
    const uint64_t start = position_;
    if (!Read(4)) {
      if (buffer_.empty()) return std::nullopt;
      return Err(Cut());
    }
    const uint32_t type = U32(0);
    if (type == kSectionHeader) {
      if (auto header = ReadSectionHeader(); !header) return Err(header.error());
      continue;
    }
    if (!Read(4)) return Err(Cut());
    const uint32_t size = U32(0);
    if (size < kBlockOverhead || size % 4 != 0) {
      return Err("a block of " + std::to_string(size) + " bytes at byte " + std::to_string(start));
    }
    const bool packet_block = type == kEnhancedPacket || type == kPacket || type == kSimplePacket;
    const bool interface_block = type == kInterfaceDescription;
    if (packet_block) ++packets_;
    if ((!packet_block && !interface_block) || size > kBlockMax) {
      if (!Skip(size - kBlockHead)) return Err(Cut());
      // An interface that is left out must be there all the same, for those behind it to have their numbers.
      if (interface_block && interfaces_.size() < kInterfacesMax) interfaces_.push_back({});
      if (packet_block) skipped_.Add({NotUnderstood::Reason::kBlockTooLong});
      if (!packet_block && !interface_block && std::ranges::find(kOtherBlocks, type) == std::end(kOtherBlocks)) {
        skipped_.Add({NotUnderstood::Reason::kBlockType, type});
      }
      continue;
    }
    if (!Read(size - kBlockHead)) return Err(Cut());
    const size_t body = size - kBlockOverhead;
    if (interface_block) {
      if (interfaces_.size() < kInterfacesMax) interfaces_.push_back(ReadInterface(body));
    } else if (auto packet = type == kSimplePacket ? ReadSimplePacket(body) : ReadPacket(type, body)) {
      return packet;
    }
  }
}

}  // namespace stagecoach::decode
