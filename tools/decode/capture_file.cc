#include "tools/decode/capture_file.h"

#include <algorithm>
#include <cstring>

#include "base/cursor.h"

namespace stagecoach::decode {
namespace {

constexpr uint32_t kMagicMicroseconds = 0xa1b2c3d4;
constexpr uint32_t kMagicNanoseconds = 0xa1b23c4d;
constexpr uint32_t kSectionHeader = 0x0a0d0d0a;  // the same in both byte orders
constexpr uint32_t kByteOrderMagic = 0x1a2b3c4d;
constexpr uint32_t kInterfaceDescription = 1;
constexpr uint32_t kSimplePacket = 3;
constexpr uint32_t kEnhancedPacket = 6;
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

CaptureFile::CaptureFile(ConstBytes beginning, std::istream* in)
    : in_(*in), beginning_(beginning.begin(), beginning.end()) {}

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

void CaptureFile::ReadInterface(size_t size) {
  if (size < 8 || interfaces_.size() == kInterfacesMax) return;
  Interface interface { .link_type = U16(0) };
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
  interfaces_.push_back(interface);
}

// nullopt: not a packet that can be made sense of.
std::optional<Packet> CaptureFile::ReadEnhancedPacket(size_t size) {
  constexpr size_t kHead = 20;
  if (size < kHead) return std::nullopt;
  const uint32_t interface = U32(0);
  const uint64_t ticks = uint64_t{U32(4)} << 32 | U32(8);
  const uint32_t captured = U32(12);
  if (interface >= interfaces_.size() || captured > size - kHead) return std::nullopt;
  return Packet{.number = packets_,
                .time = ToNanoseconds(ticks, interfaces_[interface].ticks_per_second),
                .link_type = interfaces_[interface].link_type,
                .original_size = U32(16),
                .bytes = ConstBytes(buffer_).subspan(kHead, captured)};
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
    const bool packet_block = type == kEnhancedPacket || type == kSimplePacket;
    if (packet_block) ++packets_;
    if ((!packet_block && type != kInterfaceDescription) || size > kBlockMax) {
      if (!Skip(size - kBlockHead)) return Err(Cut());
      // An interface that is left out must be there all the same, for those behind it to have their numbers.
      if (type == kInterfaceDescription && interfaces_.size() < kInterfacesMax) interfaces_.push_back({});
      continue;
    }
    if (!Read(size - kBlockHead)) return Err(Cut());
    const size_t body = size - kBlockOverhead;
    if (type == kInterfaceDescription) {
      ReadInterface(body);
    } else if (type == kEnhancedPacket) {
      if (auto packet = ReadEnhancedPacket(body)) return packet;
    } else if (body >= 4 && !interfaces_.empty()) {
      const uint32_t original = U32(0);
      return Packet{.number = packets_,
                    .link_type = interfaces_[0].link_type,
                    .original_size = original,
                    .bytes = ConstBytes(buffer_).subspan(4, std::min<size_t>(original, body - 4))};
    }
  }
}

}  // namespace stagecoach::decode
