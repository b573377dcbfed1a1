#include "emu/tap/pcapng_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <system_error>
#include <vector>

#include "base/cursor.h"
#include "base/fork/fork.h"
#include "base/prng.h"
#include "emu/engine/mpa_framing.h"
#include "emu/wire/ib.h"
#include "emu/wire/mpa.h"

namespace stagecoach::emu {
namespace {

// pcapng block types and option codes (draft-ietf-opsawg-pcapng sections 4 and 3.5). Fields are in the machine's byte
// order, which the byte-order magic tells.
constexpr uint32_t kSectionHeaderBlock = 0x0a0d0d0a;
constexpr uint32_t kInterfaceBlock = 1;
constexpr uint32_t kEnhancedPacketBlock = 6;
constexpr uint32_t kByteOrderMagic = 0x1a2b3c4d;
constexpr uint16_t kLinkTypeRaw = 101;  // IPv4 or IPv6, told apart by the version field
constexpr uint16_t kOptionEnd = 0;
constexpr uint16_t kSectionUserApplication = 4;
constexpr uint16_t kInterfaceName = 2;
constexpr uint16_t kInterfaceTimeResolution = 9;
constexpr uint16_t kPacketFlags = 2;
constexpr uint32_t kFlagInbound = 1;
constexpr uint32_t kFlagOutbound = 2;
// Block type, length, interface, time (2), captured and original length.
constexpr size_t kPacketBlockHead = 28;
// Flags option, end of options, trailing length.
constexpr size_t kPacketBlockTail = 8 + 4 + 4;

constexpr size_t kIpv4Header = 20;
constexpr size_t kIpv6Header = 40;
constexpr size_t kTcpHeader = 20;
constexpr size_t kTcpSynOptions = 8;
constexpr size_t kUdpHeader = 8;
constexpr uint8_t kProtocolTcp = 6;
constexpr uint8_t kProtocolUdp = 17;
constexpr uint8_t kFin = 0x01;
constexpr uint8_t kSyn = 0x02;
constexpr uint8_t kRst = 0x04;
constexpr uint8_t kPsh = 0x08;
constexpr uint8_t kAck = 0x10;
// The most an IPv4 packet carries behind its headers: RFC 791 counts the headers in 16 bits. IPv6 would take 20 more.
constexpr size_t kMaxSegment = 65535 - kIpv4Header - kTcpHeader;
// The most of a RoCE packet, a multiple of four: no bytes are padded then.
constexpr size_t kMaxRocePacket = (65535 - kIpv4Header - kUdpHeader - wire::kIbIcrcSize) / 4 * 4;
constexpr uint16_t kRocePort = 4791;
// Annex A17 of the InfiniBand specification: a dynamic port, the same one for all packets of a flow, so that the
// routers of a network can spread flows without reordering them.
constexpr uint16_t kFirstSourcePort = 0xc000;
constexpr int kSourcePortBits = 14;

PcapNgWriter::Error CannotBeMade(const std::string& path, int error) {
  return {error, "capture file " + path + ": " + std::generic_category().message(error)};
}

// A block under construction, in the machine's byte order.
class BlockBuilder {
 public:
  void U16(uint16_t value) { Raw(&value, sizeof value); }
  void U32(uint32_t value) { Raw(&value, sizeof value); }
  void U64(uint64_t value) { Raw(&value, sizeof value); }
  void Option(uint16_t code, std::string_view value) {
    U16(code);
    U16(static_cast<uint16_t>(value.size()));
    Raw(value.data(), value.size());
    while (bytes_.size() % 4 != 0) bytes_.push_back(std::byte{0});
  }
  // Completes the block that began with (type, length placeholder).
  void Finish() {
    const auto length = static_cast<uint32_t>(bytes_.size() + 4);
    U32(length);
    std::memcpy(bytes_.data() + 4, &length, sizeof length);
  }
  ConstBytes bytes() const { return bytes_; }

 private:
  void Raw(const void* data, size_t size) {
    const ConstBytes raw = AsBytes(data, size);
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  std::vector<std::byte> bytes_;
};

// The Internet checksum (RFC 1071), over parts that each begin at an even offset of the whole.
class InternetChecksum {
 public:
  void Add(ConstBytes bytes) {
    size_t i = 0;
    for (; i + 1 < bytes.size(); i += 2) {
      sum_ += (std::to_integer<uint32_t>(bytes[i]) << 8) | std::to_integer<uint32_t>(bytes[i + 1]);
    }
    if (i < bytes.size()) sum_ += std::to_integer<uint32_t>(bytes[i]) << 8;
  }
  uint16_t Value() const {
    uint64_t sum = sum_;
    while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
    return static_cast<uint16_t>(~sum);
  }

 private:
  uint64_t sum_ = 0;
};

struct TcpFields {
  uint32_t sequence = 0;
  uint32_t acknowledgement = 0;
  uint8_t flags = 0;
};

// IP and TCP or UDP headers of one packet. Room for IPv6 and the options of a SYN.
struct Headers {
  std::array<std::byte, kIpv6Header + kTcpHeader + kTcpSynOptions> bytes{};
  size_t size = 0;
  ConstBytes view() const { return ConstBytes(bytes).first(size); }
};

void PutU16(MutableBytes at, size_t offset, uint16_t value) {
  ByteWriter(at.subspan(offset, 2)).U16(value);
}

ConstBytes AddressOf(const IpEndpoint& end) {
  return AsBytes(end.address.data(), end.family == IpEndpoint::Family::kIpv6 ? 16 : 4);
}

size_t IpHeaderSize(const IpEndpoint& end) {
  return end.family == IpEndpoint::Family::kIpv6 ? kIpv6Header : kIpv4Header;
}

// Into `header`, which is as large as it gets. `size`: of what follows it.
void PutIpHeader(MutableBytes header, const IpEndpoint& source, const IpEndpoint& destination, uint8_t protocol,
                 size_t size, const wire::IbIpFields& fields = {}) {
  ByteWriter out(header);
  const bool v6 = header.size() == kIpv6Header;
  if (v6) {
    out.U32(0x60000000 | uint32_t{fields.traffic_class} << 20 | fields.flow_label);
    out.U16(static_cast<uint16_t>(size));
    out.U8(protocol);
    out.U8(fields.hop_limit);
  } else {
    out.U8(0x45);
    out.U8(fields.traffic_class);
    out.U16(static_cast<uint16_t>(header.size() + size));
    out.U16(0);
    out.U16(0x4000);           // don't fragment
    out.U8(fields.hop_limit);  // time to live
    out.U8(protocol);
    out.U16(0);  // checksum
  }
  out.Bytes(AddressOf(source));
  out.Bytes(AddressOf(destination));
  if (v6) return;
  InternetChecksum sum;
  sum.Add(header);
  PutU16(header, 10, sum.Value());
}

// What TCP and UDP add up besides their own bytes, `size` of them.
InternetChecksum PseudoHeader(const IpEndpoint& source, const IpEndpoint& destination, uint8_t protocol, size_t size) {
  std::array<std::byte, 8> rest{};
  ByteWriter out(rest);
  out.U32(static_cast<uint32_t>(size));
  out.U32(protocol);
  InternetChecksum sum;
  sum.Add(AddressOf(source));
  sum.Add(AddressOf(destination));
  sum.Add(rest);
  return sum;
}

Headers TcpHeaders(const IpEndpoint& source, const IpEndpoint& destination, const TcpFields& tcp, ConstBytes payload) {
  const size_t ip_size = IpHeaderSize(source);
  const bool syn = (tcp.flags & kSyn) != 0;
  const size_t tcp_size = kTcpHeader + (syn ? kTcpSynOptions : 0);

  Headers headers;
  headers.size = ip_size + tcp_size;
  const MutableBytes all = MutableBytes(headers.bytes).first(headers.size);
  PutIpHeader(all.first(ip_size), source, destination, kProtocolTcp, tcp_size + payload.size());
  ByteWriter out(all.subspan(ip_size));
  out.U16(source.port);
  out.U16(destination.port);
  out.U32(tcp.sequence);
  out.U32(tcp.acknowledgement);
  out.U8(static_cast<uint8_t>(tcp_size / 4 << 4));
  out.U8(tcp.flags);
  out.U16(65535);  // window
  out.U32(0);      // checksum, urgent pointer
  if (syn) {
    // Maximum segment size; window scale, so large that no sender seems to overrun its peer.
    out.U16(0x0204);
    out.U16(static_cast<uint16_t>(kMaxSegment));
    out.U32(0x0103030e);
  }

  InternetChecksum sum = PseudoHeader(source, destination, kProtocolTcp, tcp_size + payload.size());
  sum.Add(all.subspan(ip_size));
  sum.Add(payload);
  PutU16(all, ip_size + 16, sum.Value());
  return headers;
}

// Of a RoCE packet. `packet` is complete but for its last four bytes, the ICRC, which this puts there.
Headers RoceHeaders(const IpEndpoint& source, const IpEndpoint& destination, uint16_t source_port,
                    const wire::IbIpFields& fields, MutableBytes packet) {
  const size_t ip_size = IpHeaderSize(source);
  const size_t udp_size = kUdpHeader + packet.size();

  Headers headers;
  headers.size = ip_size + kUdpHeader;
  const MutableBytes all = MutableBytes(headers.bytes).first(headers.size);
  PutIpHeader(all.first(ip_size), source, destination, kProtocolUdp, udp_size, fields);
  ByteWriter out(all.subspan(ip_size));
  out.U16(source_port);
  out.U16(kRocePort);
  out.U16(static_cast<uint16_t>(udp_size));
  out.U16(0);  // checksum

  const MutableBytes icrc = packet.last(wire::kIbIcrcSize);
  const uint32_t value =
      wire::IcrcOf(all.first(ip_size), all.subspan(ip_size), packet.first(packet.size() - icrc.size()));
  for (size_t i = 0; i < icrc.size(); ++i) icrc[i] = static_cast<std::byte>(value >> (8 * i));

  // The ICRC does what a checksum would, and IPv4 allows to do without. IPv6 does not (RFC 8200 section 8.1).
  if (source.family != IpEndpoint::Family::kIpv6) return headers;
  InternetChecksum sum = PseudoHeader(source, destination, kProtocolUdp, udp_size);
  sum.Add(all.subspan(ip_size));
  sum.Add(packet);
  const uint16_t checksum = sum.Value();
  PutU16(all, ip_size + 6, checksum != 0 ? checksum : 0xffff);  // 0 would say that there is none
  return headers;
}

}  // namespace

// One connection. Its state is guarded by the writer's mutex, which also keeps its packets in order.
class PcapNgWriter::Flow : public CaptureFlow {
 public:
  Flow(std::shared_ptr<PcapNgWriter> writer, const IpEndpoint& local, const IpEndpoint& remote, bool silent)
      : writer_(std::move(writer)), key_(local, remote), silent_(silent) {}
  ~Flow() override {
    std::lock_guard<std::mutex> lock(writer_->mutex_);
    if (!silent_) writer_->open_flows_.erase(key_);
  }

 protected:
  const std::shared_ptr<PcapNgWriter> writer_;
  const FlowKey key_;
  const bool silent_;
};

class PcapNgWriter::IwarpFlow final : public Flow {
 public:
  IwarpFlow(std::shared_ptr<PcapNgWriter> writer, const IpEndpoint& local, const IpEndpoint& remote, bool initiator,
            bool silent)
      : Flow(std::move(writer), local, remote, silent), initiator_(initiator) {
    ends_[0].address = local;
    ends_[1].address = remote;
    // Any number will do, but the same one each time: captures of one simulation are to be equal.
    for (End& end : ends_) end.next = static_cast<uint32_t>(StableHash(end.address.ToString()));
  }

  // With the writer's mutex held.
  void Open() {
    if (silent_) return;
    const CaptureDirection there = initiator_ ? CaptureDirection::kSent : CaptureDirection::kReceived;
    const CaptureDirection back = initiator_ ? CaptureDirection::kReceived : CaptureDirection::kSent;
    Segment(there, kSyn, {});
    Segment(back, kSyn | kAck, {});
    Segment(there, kAck, {});
  }

  void Handshake(CaptureDirection direction, ConstBytes bytes) override {
    std::lock_guard<std::mutex> lock(writer_->mutex_);
    if (silent_) return;
    const bool is_request = (direction == CaptureDirection::kSent) == initiator_;
    const auto kind = is_request ? wire::MpaFrameKind::kRequest : wire::MpaFrameKind::kReply;
    if (const auto frame = wire::MpaFrame::Decode(kind, bytes)) {
      if (!is_request) crc_ = frame->crc();
      // M says what the sender of the frame wants to receive.
      End& other = ends_[direction == CaptureDirection::kSent ? 1 : 0];
      other.markers = frame->markers();
    }
    Stream(direction, bytes);
  }

  void Record(CaptureDirection direction, std::span<const ConstBytes> ulpdu) override {
    std::lock_guard<std::mutex> lock(writer_->mutex_);
    if (silent_) return;
    End& end = Sender(direction);
    if (end.closed) return;
    if (!end.framer) end.framer.emplace(crc_, end.markers);
    size_t left = std::min(TotalSize(ulpdu), wire::kMpaUlpduMax);
    std::vector<std::byte>& fpdu = writer_->packet_;
    fpdu.resize(std::max(fpdu.size(), end.framer->MaxFramedSize(left)));
    end.framer->Begin(fpdu, left);
    for (ConstBytes part : ulpdu) {
      part = part.first(std::min(part.size(), left));
      left -= part.size();
      end.framer->Append(part);
    }
    const size_t size = end.framer->Finish();
    Stream(direction, ConstBytes(fpdu).first(size));
  }

  void Close(CaptureDirection direction, CaptureEnd how) override {
    std::lock_guard<std::mutex> lock(writer_->mutex_);
    if (silent_) return;
    End& end = Sender(direction);
    End& other = ends_[direction == CaptureDirection::kSent ? 1 : 0];
    if (end.closed && (how == CaptureEnd::kFin || other.closed)) return;
    if (how == CaptureEnd::kReset) {
      Segment(direction, kRst | kAck, {});
      end.closed = other.closed = true;
      return;
    }
    Segment(direction, kFin | kAck, {});
    end.closed = true;
    const bool last = other.closed;
    if (!last) return;
    // The acknowledgement of the second FIN.
    Segment(direction == CaptureDirection::kSent ? CaptureDirection::kReceived : CaptureDirection::kSent, kAck, {});
  }

 private:
  struct End {
    IpEndpoint address;
    uint32_t next = 0;     // sequence number of the next byte this end sends
    bool markers = false;  // towards the other end
    bool closed = false;
    std::optional<MpaFramer> framer;
  };

  End& Sender(CaptureDirection direction) { return ends_[direction == CaptureDirection::kSent ? 0 : 1]; }

  void Stream(CaptureDirection direction, ConstBytes bytes) {
    if (Sender(direction).closed) return;
    while (!bytes.empty()) {
      const ConstBytes part = bytes.first(std::min(bytes.size(), kMaxSegment));
      Segment(direction, kPsh | kAck, part);
      bytes = bytes.subspan(part.size());
    }
  }

  void Segment(CaptureDirection direction, uint8_t flags, ConstBytes payload) {
    End& from = Sender(direction);
    const End& to = ends_[direction == CaptureDirection::kSent ? 1 : 0];
    TcpFields tcp{from.next, (flags & kAck) != 0 ? to.next : 0, flags};
    const Headers headers = TcpHeaders(from.address, to.address, tcp, payload);
    writer_->WritePacket(direction, headers.view(), payload);
    from.next += static_cast<uint32_t>(payload.size());
    if ((flags & (kSyn | kFin)) != 0) ++from.next;
  }

  const bool initiator_;
  bool crc_ = false;
  End ends_[2];  // local, remote
};

// The two halves of a flow are flows of their own to a network: packets of one direction to one QP.
class PcapNgWriter::RoceFlow final : public Flow {
 public:
  RoceFlow(std::shared_ptr<PcapNgWriter> writer, const IpEndpoint& local, const IpEndpoint& remote, bool silent)
      : Flow(std::move(writer), local, remote, silent) {
    // The ports are the stream's, which changes in a QP's life. Packets of one sender to one QP have one port.
    const std::string here = local.AddressString();
    const std::string there = remote.AddressString();
    sent_hash_ = StableHash(here + " " + there);
    received_hash_ = StableHash(there + " " + here);
  }

  void Handshake(CaptureDirection, ConstBytes) override {}
  void Close(CaptureDirection, CaptureEnd) override {}

  void Record(CaptureDirection direction, std::span<const ConstBytes> record) override {
    std::lock_guard<std::mutex> lock(writer_->mutex_);
    if (silent_) return;
    size_t left = std::min(TotalSize(record), kMaxRocePacket);
    std::vector<std::byte>& packet = writer_->packet_;
    packet.clear();
    for (const ConstBytes part : record) {
      const ConstBytes taken = part.first(std::min(part.size(), left));
      packet.insert(packet.end(), taken.begin(), taken.end());
      left -= taken.size();
    }
    // What a peer sent may be no packet at all.
    constexpr size_t kQpOffset = 5;
    uint32_t destination_qp = 0;
    for (size_t i = kQpOffset; i < kQpOffset + 3 && i < packet.size(); ++i) {
      destination_qp = destination_qp << 8 | std::to_integer<uint32_t>(packet[i]);
    }
    const wire::IbIpFields fields = wire::TakeIpFields(&packet);
    packet.resize(packet.size() + wire::IbPad(packet.size()) + wire::kIbIcrcSize);

    const bool sent = direction == CaptureDirection::kSent;
    const uint64_t mixed = ((sent ? sent_hash_ : received_hash_) ^ destination_qp) * 0x9e3779b97f4a7c15;
    const auto port = static_cast<uint16_t>(kFirstSourcePort | mixed >> (64 - kSourcePortBits));
    const auto& [local, remote] = key_;
    const Headers headers =
        sent ? RoceHeaders(local, remote, port, fields, packet) : RoceHeaders(remote, local, port, fields, packet);
    writer_->WritePacket(direction, headers.view(), packet);
  }

 private:
  uint64_t sent_hash_ = 0;
  uint64_t received_hash_ = 0;
};

Result<std::shared_ptr<PcapNgWriter>, PcapNgWriter::Error> PcapNgWriter::Create(const std::string& path, Clock clock,
                                                                                ErrorCallback on_error) {
  // Non-blocking, so that opening a pipe nobody reads fails instead of waiting. It means nothing to files.
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
  if (fd < 0) return Err(CannotBeMade(path, errno));
  return Take(KeepFromChildren(fd), path, "stagecoach", std::move(clock), std::move(on_error));
}

Result<std::shared_ptr<PcapNgWriter>, PcapNgWriter::Error> PcapNgWriter::Take(int fd, const std::string& path,
                                                                              const std::string& interface, Clock clock,
                                                                              ErrorCallback on_error) {
  std::shared_ptr<PcapNgWriter> writer(new PcapNgWriter(path, fd, std::move(clock), std::move(on_error)));
  struct stat status {};
  if (fstat(fd, &status) != 0 || S_ISFIFO(status.st_mode) || S_ISSOCK(status.st_mode)) {
    return Err(Error{EINVAL, "capture file " + path + ": not a file (a pipe could hold up the NIC)"});
  }
  std::lock_guard<std::mutex> lock(writer->mutex_);
  if (!writer->WriteHeader(interface)) return Err(CannotBeMade(path, errno));
  return writer;
}

bool PcapNgWriter::HasNoPackets(int fd) {
  // Type and length of the section's header, then of the interface's.
  std::array<uint32_t, 2> section{};
  std::array<uint32_t, 2> interface {};
  struct stat status {};
  return fstat(fd, &status) == 0 && pread(fd, section.data(), sizeof section, 0) == ssize_t{sizeof section} &&
         section[0] == kSectionHeaderBlock &&
         pread(fd, interface.data(), sizeof interface, off_t{section[1]}) == ssize_t{sizeof interface} &&
         interface[0] == kInterfaceBlock && status.st_size == off_t{section[1]} + off_t{interface[1]};
}

PcapNgWriter::PcapNgWriter(std::string path, int fd, Clock clock, ErrorCallback on_error)
    : path_(std::move(path)), fd_(fd), clock_(std::move(clock)), on_error_(std::move(on_error)) {}

PcapNgWriter::~PcapNgWriter() {
  CloseDescriptor(fd_);
}

std::chrono::nanoseconds PcapNgWriter::WallClock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch());
}

std::shared_ptr<CaptureFlow> PcapNgWriter::OpenFlow(CaptureStyle style, const IpEndpoint& local,
                                                    const IpEndpoint& remote, bool initiator) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool silent = open_flows_.count({remote, local}) > 0 || !open_flows_.insert({local, remote}).second;
  if (style == CaptureStyle::kRoce) return std::make_shared<RoceFlow>(shared_from_this(), local, remote, silent);
  auto flow = std::make_shared<IwarpFlow>(shared_from_this(), local, remote, initiator, silent);
  flow->Open();
  return flow;
}

uint64_t PcapNgWriter::packets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return packets_;
}

std::string PcapNgWriter::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

bool PcapNgWriter::WriteHeader(const std::string& name) {
  BlockBuilder section;
  section.U32(kSectionHeaderBlock);
  section.U32(0);
  section.U32(kByteOrderMagic);
  section.U16(1);  // version 1.0
  section.U16(0);
  section.U64(~uint64_t{0});  // length of the section: unknown
  section.Option(kSectionUserApplication, "Stagecoach");
  section.Option(kOptionEnd, {});
  section.Finish();
  BlockBuilder interface;
  interface.U32(kInterfaceBlock);
  interface.U32(0);
  interface.U16(kLinkTypeRaw);
  interface.U16(0);
  interface.U32(0);  // no limit on packet lengths
  interface.Option(kInterfaceName, name);
  interface.Option(kInterfaceTimeResolution, std::string_view("\x09", 1));  // 10^-9 s
  interface.Option(kOptionEnd, {});
  interface.Finish();
  const ConstBytes parts[] = {section.bytes(), interface.bytes()};
  return WriteAll(parts);
}

void PcapNgWriter::WritePacket(CaptureDirection direction, ConstBytes headers, ConstBytes payload) {
  if (!error_.empty()) return;
  const auto size = static_cast<uint32_t>(headers.size() + payload.size());
  const uint32_t pad = XdrPad(size);
  const auto block_size = static_cast<uint32_t>(kPacketBlockHead + size + pad + kPacketBlockTail);
  // A clock that is set back must not make a conversation run backwards.
  last_time_ = std::max(last_time_, static_cast<uint64_t>(std::max<int64_t>(clock_().count(), 0)));
  const std::array<uint32_t, kPacketBlockHead / 4> head = {kEnhancedPacketBlock,
                                                           block_size,
                                                           0,
                                                           static_cast<uint32_t>(last_time_ >> 32),
                                                           static_cast<uint32_t>(last_time_),
                                                           size,
                                                           size};
  struct {
    uint32_t pad = 0;
    uint16_t flags_code = kPacketFlags;
    uint16_t flags_size = 4;
    uint32_t flags = 0;
    uint32_t end = kOptionEnd;
    uint32_t block_size = 0;
  } tail;
  static_assert(sizeof tail == 4 + kPacketBlockTail);
  tail.flags = direction == CaptureDirection::kSent ? kFlagOutbound : kFlagInbound;
  tail.block_size = block_size;
  const ConstBytes parts[] = {AsBytes(head.data(), sizeof head), headers, payload,
                              AsBytes(&tail, sizeof tail).subspan(4 - pad)};
  if (WriteAll(parts)) ++packets_;
}

bool PcapNgWriter::WriteAll(std::span<const ConstBytes> parts) {
  std::array<iovec, 4> vectors;
  size_t count = 0;
  for (const ConstBytes part : parts) vectors[count++] = {const_cast<std::byte*>(part.data()), part.size()};
  size_t left = TotalSize(parts);
  const size_t whole = left;
  iovec* next = vectors.data();
  while (left > 0) {
    const ssize_t n = writev(fd_, next, static_cast<int>(count));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      Fail(n < 0 ? errno : ENOSPC);
      return false;
    }
    left -= static_cast<size_t>(n);
    // Steps over what was taken.
    auto taken = static_cast<size_t>(n);
    while (count > 0 && taken >= next->iov_len) {
      taken -= next->iov_len;
      ++next;
      --count;
    }
    if (count == 0) break;
    next->iov_base = static_cast<std::byte*>(next->iov_base) + taken;
    next->iov_len -= taken;
  }
  good_size_ += whole;
  return true;
}

void PcapNgWriter::Fail(int error) {
  // So that readers find whole packets only. Devices cannot be cut, and need not.
  if (ftruncate(fd_, static_cast<off_t>(good_size_)) != 0) errno = error;
  error_ = "capture file " + path_ + ": " + std::generic_category().message(error) + "; the capture ends after " +
           std::to_string(packets_) + " packets";
  if (good_size_ > 0 && on_error_) on_error_(error_);  // else Create tells its caller
  errno = error;
}

}  // namespace stagecoach::emu
