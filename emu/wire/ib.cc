#include "emu/wire/ib.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "base/check.h"

namespace stagecoach::emu::wire {
namespace {

// Extended headers of an opcode, in the order in which they follow the BTH.
constexpr uint8_t kDeth = 1u << 0;
constexpr uint8_t kReth = 1u << 1;
constexpr uint8_t kAtomicEth = 1u << 2;
constexpr uint8_t kImmDt = 1u << 3;
constexpr uint8_t kIeth = 1u << 4;
constexpr uint8_t kAeth = 1u << 5;
constexpr uint8_t kAtomicAckEth = 1u << 6;
constexpr uint8_t kPayload = 1u << 7;

struct OpRow {
  const char* name = nullptr;  // null: no such opcode
  uint8_t parts = 0;
};

constexpr std::array<OpRow, 0x18> kOps = {{
    {"Send First", kPayload},
    {"Send Middle", kPayload},
    {"Send Last", kPayload},
    {"Send Last with Immediate", kImmDt | kPayload},
    {"Send Only", kPayload},
    {"Send Only with Immediate", kImmDt | kPayload},
    {"Write First", kReth | kPayload},
    {"Write Middle", kPayload},
    {"Write Last", kPayload},
    {"Write Last with Immediate", kImmDt | kPayload},
    {"Write Only", kReth | kPayload},
    {"Write Only with Immediate", kReth | kImmDt | kPayload},
    {"Read Request", kReth},
    {"Read Response First", kAeth | kPayload},
    {"Read Response Middle", kPayload},
    {"Read Response Last", kAeth | kPayload},
    {"Read Response Only", kAeth | kPayload},
    {"Acknowledge", kAeth},
    {"Atomic Acknowledge", kAeth | kAtomicAckEth},
    {"Compare and Swap", kAtomicEth},
    {"Fetch and Add", kAtomicEth},
    {},
    {"Send Last with Invalidate", kIeth | kPayload},
    {"Send Only with Invalidate", kIeth | kPayload},
}};

constexpr uint8_t kServiceMask = 0xe0;
constexpr uint8_t kOpMask = 0x1f;

// Offsets of fields in the BTH, for faults.
constexpr uint32_t kFlagsAt = 1;
// Of the DETH's reserved byte, behind BTH and Q_Key.
constexpr size_t kTrafficClassAt = kIbBthSize + 4;
// Of the word behind a datagram's headers.
constexpr int kHopLimitShift = 24;
constexpr uint32_t kFlowLabelMask = 0xfffff;

bool Exists(uint8_t opcode) {
  const uint8_t op = opcode & kOpMask;
  if (op >= kOps.size() || kOps[op].name == nullptr) return false;
  switch (static_cast<IbService>(opcode & kServiceMask)) {
    case IbService::kRc:
      return true;
    case IbService::kUc:
      return op <= static_cast<uint8_t>(IbOp::kWriteOnlyImm);
    case IbService::kUd:
      return op == static_cast<uint8_t>(IbOp::kSendOnly) || op == static_cast<uint8_t>(IbOp::kSendOnlyImm);
  }
  return false;
}

uint8_t PartsOf(IbService service, IbOp op) {
  const uint8_t parts = kOps[static_cast<uint8_t>(op)].parts;
  return service == IbService::kUd ? parts | kDeth : parts;
}

size_t SizeOf(uint8_t parts) {
  size_t size = kIbBthSize;
  if (parts & kDeth) size += 8;
  if (parts & kReth) size += 16;
  if (parts & kAtomicEth) size += 28;
  if (parts & kImmDt) size += 4;
  if (parts & kIeth) size += 4;
  if (parts & kAeth) size += 4;
  if (parts & kAtomicAckEth) size += 8;
  return size;
}

uint32_t Read24(ByteReader& in) {
  return in.U32() & 0xffffff;  // a reserved byte stands before each number of 24 bits
}

constexpr std::array<uint32_t, 256> MakeCrc32Table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    table[i] = crc;
  }
  return table;
}

// CRC-32 of IEEE 802.3, reflected.
class Crc32 {
 public:
  void Update(uint8_t byte) { state_ = (state_ >> 8) ^ kTable[(state_ ^ byte) & 0xff]; }
  void Update(ConstBytes bytes) {
    for (std::byte byte : bytes) Update(std::to_integer<uint8_t>(byte));
  }
  uint32_t Value() const { return ~state_; }

 private:
  static constexpr std::array<uint32_t, 256> kTable = MakeCrc32Table();
  uint32_t state_ = 0xffffffffu;
};

std::string Hex(uint64_t value) {
  std::array<char, 19> text;
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace

const char* ToString(IbService service) {
  switch (service) {
    case IbService::kRc:
      return "RC";
    case IbService::kUc:
      return "UC";
    case IbService::kUd:
      return "UD";
  }
  return "?";
}

const char* ToString(IbOp op) {
  const auto index = static_cast<size_t>(op);
  return index < kOps.size() && kOps[index].name != nullptr ? kOps[index].name : "?";
}

std::string SyndromeToString(uint8_t syndrome) {
  switch (KindOfSyndrome(syndrome)) {
    case IbSyndromeKind::kAck:
      return "ACK";
    case IbSyndromeKind::kRnrNak:
      return "RNR NAK (timer " + std::to_string(syndrome & 0x1f) + ")";
    case IbSyndromeKind::kNak:
      switch (syndrome) {
        case kIbNakSequence:
          return "NAK PSN sequence error";
        case kIbNakInvalidRequest:
          return "NAK invalid request";
        case kIbNakRemoteAccess:
          return "NAK remote access error";
        case kIbNakRemoteOperation:
          return "NAK remote operational error";
        default:
          return "NAK of unknown code " + Hex(syndrome & 0x1f);
      }
    case IbSyndromeKind::kReserved:
      break;
  }
  return "reserved syndrome " + Hex(syndrome);
}

const char* ToString(IbFaultKind kind) {
  switch (kind) {
    case IbFaultKind::kTruncated:
      return "too few bytes for the headers";
    case IbFaultKind::kBadOpcode:
      return "unknown opcode";
    case IbFaultKind::kBadVersion:
      return "bad transport header version";
    case IbFaultKind::kPayload:
      return "payload where none belongs";
    case IbFaultKind::kBadPad:
      return "pad count does not fit the payload";
  }
  return "?";
}

std::string ToString(const IbFault& fault) {
  return std::string(ToString(fault.kind)) + " (" + std::to_string(fault.value) + ") at byte " +
         std::to_string(fault.offset);
}

size_t IbHeader::EncodedSize() const {
  return SizeOf(PartsOf(service, op));
}

void IbHeader::Encode(ByteWriter& out) const {
  const uint8_t parts = PartsOf(service, op);
  out.U8(static_cast<uint8_t>(service) | static_cast<uint8_t>(op));
  out.U8(static_cast<uint8_t>((solicited ? 0x80 : 0) | (migrated ? 0x40 : 0) | (pad & 3) << 4));
  out.U16(pkey);
  out.U32(destination_qp & kIbQpMask);
  out.U32((ack_request ? 0x80000000u : 0) | (psn & kPsnMask));
  if (parts & kDeth) {
    out.U32(qkey);
    out.U32(uint32_t{traffic_class} << 24 | (source_qp & kIbQpMask));
  }
  if (parts & (kReth | kAtomicEth)) {
    out.U64(address);
    out.U32(rkey);
  }
  if (parts & kReth) out.U32(dma_length);
  if (parts & kAtomicEth) {
    out.U64(swap_or_add);
    out.U64(compare);
  }
  if (parts & kImmDt) out.Bytes(AsBytes(&immediate, sizeof(immediate)));
  if (parts & kIeth) out.U32(invalidate_rkey);
  if (parts & kAeth) out.U32(uint32_t{syndrome} << 24 | (msn & 0xffffff));
  if (parts & kAtomicAckEth) out.U64(original);
}

Result<IbHeader, IbFault> DecodeIb(ConstBytes head, size_t record_length) {
  const auto truncated = [&] {
    return Err(IbFault{IbFaultKind::kTruncated, static_cast<uint32_t>(record_length), record_length});
  };
  if (record_length < kIbBthSize || head.size() < kIbBthSize) return truncated();
  ByteReader in(head);
  const uint8_t opcode = in.U8();
  if (!Exists(opcode)) return Err(IbFault{IbFaultKind::kBadOpcode, 0, opcode});
  IbHeader header{.service = static_cast<IbService>(opcode & kServiceMask), .op = static_cast<IbOp>(opcode & kOpMask)};
  const uint8_t flags = in.U8();
  if ((flags & 0x0f) != 0) return Err(IbFault{IbFaultKind::kBadVersion, kFlagsAt, uint64_t{flags} & 0x0f});
  header.solicited = (flags & 0x80) != 0;
  header.migrated = (flags & 0x40) != 0;
  header.pad = (flags >> 4) & 3;
  header.pkey = in.U16();
  header.destination_qp = Read24(in);
  const uint32_t last = in.U32();
  header.ack_request = (last & 0x80000000u) != 0;
  header.psn = last & kPsnMask;

  const uint8_t parts = PartsOf(header.service, header.op);
  const size_t size = SizeOf(parts);
  if (record_length < size || head.size() < size) return truncated();
  if (parts & kDeth) {
    header.qkey = in.U32();
    const uint32_t source = in.U32();
    header.traffic_class = static_cast<uint8_t>(source >> 24);
    header.source_qp = source & kIbQpMask;
  }
  if (parts & (kReth | kAtomicEth)) {
    header.address = in.U64();
    header.rkey = in.U32();
  }
  if (parts & kReth) header.dma_length = in.U32();
  if (parts & kAtomicEth) {
    header.swap_or_add = in.U64();
    header.compare = in.U64();
  }
  if (parts & kImmDt) CopyBytes(AsMutableBytes(&header.immediate, sizeof(header.immediate)), in.Bytes(4));
  if (parts & kIeth) header.invalidate_rkey = in.U32();
  if (parts & kAeth) {
    const uint32_t aeth = in.U32();
    header.syndrome = static_cast<uint8_t>(aeth >> 24);
    header.msn = aeth & 0xffffff;
  }
  if (parts & kAtomicAckEth) header.original = in.U64();
  STAGECOACH_CHECK(in.ok() && in.position() == size);

  const size_t payload = record_length - size;
  if ((parts & kPayload) == 0 && payload > 0) {
    return Err(IbFault{IbFaultKind::kPayload, static_cast<uint32_t>(size), payload});
  }
  if (header.pad != IbPad(payload)) return Err(IbFault{IbFaultKind::kBadPad, kFlagsAt, header.pad});
  return header;
}

void EncodeDatagramIp(const IbHeader& header, ByteWriter& out) {
  out.U32(uint32_t{header.hop_limit} << kHopLimitShift | (header.flow_label & kFlowLabelMask));
}

bool DecodeDatagramIp(ConstBytes behind, IbHeader* header) {
  if (behind.size() < kDatagramIpSize) return false;
  ByteReader in(behind);
  const uint32_t word = in.U32();
  if ((word & ~(uint32_t{0xff} << kHopLimitShift | kFlowLabelMask)) != 0) return false;
  header->hop_limit = static_cast<uint8_t>(word >> kHopLimitShift);
  header->flow_label = word & kFlowLabelMask;
  return true;
}

IbIpFields TakeIpFields(std::vector<std::byte>* record) {
  if (record->empty()) return {};
  const auto opcode = std::to_integer<uint8_t>(record->front());
  if (!Exists(opcode) || static_cast<IbService>(opcode & kServiceMask) != IbService::kUd) return {};
  const size_t size = SizeOf(PartsOf(IbService::kUd, static_cast<IbOp>(opcode & kOpMask)));
  IbHeader header;
  if (record->size() < size || !DecodeDatagramIp(ConstBytes(*record).subspan(size), &header)) return {};
  const auto word = record->begin() + static_cast<ptrdiff_t>(size);
  record->erase(word, word + kDatagramIpSize);
  const std::byte traffic_class = std::exchange((*record)[kTrafficClassAt], std::byte{0});
  return {std::to_integer<uint8_t>(traffic_class), header.hop_limit, header.flow_label};
}

std::array<std::byte, kIbBthSize> EncodeIbUnreachable(uint32_t destination_qp, uint32_t psn) {
  std::array<std::byte, kIbBthSize> bth;
  ByteWriter out(bth);
  out.U8(kIbUnreachableOpcode);
  out.U8(0x40);  // MigReq, as in every other packet; TVer 0
  out.U16(kIbDefaultPkey);
  out.U32(destination_qp & kIbQpMask);
  out.U32(psn & kPsnMask);
  return bth;
}

bool IsIbUnreachable(ConstBytes head, size_t record_length, uint32_t destination_qp, uint32_t psn) {
  if (record_length != kIbBthSize || head.size() < kIbBthSize) return false;
  const auto bth = EncodeIbUnreachable(destination_qp, psn);
  return std::equal(bth.begin(), bth.end(), head.begin());
}

std::string Describe(const IbHeader& header) {
  const uint8_t parts = PartsOf(header.service, header.op);
  std::string text = std::string(ToString(header.service)) + " " + ToString(header.op) + " QP " +
                     Hex(header.destination_qp & kIbQpMask) + " PSN " + std::to_string(header.psn & kPsnMask);
  if (header.ack_request) text += " A";
  if (header.solicited) text += " SE";
  if (parts & kDeth) text += " from QP " + Hex(header.source_qp) + " QKey " + Hex(header.qkey);
  if (parts & (kReth | kAtomicEth)) text += " RKey " + Hex(header.rkey) + " VA " + Hex(header.address);
  if (parts & kReth) text += " length " + std::to_string(header.dma_length);
  if (parts & kAtomicEth) text += " swap/add " + Hex(header.swap_or_add) + " compare " + Hex(header.compare);
  if (parts & kImmDt) text += " immediate " + ToHex(AsBytes(&header.immediate, sizeof(header.immediate)));
  if (parts & kIeth) text += " invalidating " + Hex(header.invalidate_rkey);
  if (parts & kAeth) text += " " + SyndromeToString(header.syndrome) + " MSN " + std::to_string(header.msn);
  if (parts & kAtomicAckEth) text += " original " + Hex(header.original);
  return text;
}

Duration RnrTimer(uint8_t code) {
  // In units of 10 us. Code 0 is the longest.
  constexpr std::array<uint32_t, 32> kTens = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                              48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                              2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return std::chrono::microseconds(10) * kTens[code & 0x1f];
}

Duration AckTimeout(uint8_t code) {
  code &= 0x1f;
  return code == 0 ? Duration::zero() : Duration(int64_t{4096} << code);
}

uint32_t IcrcOf(ConstBytes ip, ConstBytes udp, ConstBytes bth_to_pad) {
  // Eight bytes of ones stand for the local route header of the packet's InfiniBand form.
  Crc32 crc;
  for (int i = 0; i < 8; ++i) crc.Update(0xff);
  const bool v6 = !ip.empty() && (std::to_integer<uint8_t>(ip[0]) >> 4) == 6;
  for (size_t i = 0; i < ip.size(); ++i) {
    auto byte = std::to_integer<uint8_t>(ip[i]);
    if (v6) {
      // Traffic class, flow label, hop limit.
      if (i == 0) byte |= 0x0f;
      if ((i >= 1 && i <= 3) || i == 7) byte = 0xff;
    } else if (i == 1 || i == 8 || i == 10 || i == 11) {
      byte = 0xff;  // type of service, time to live, checksum
    }
    crc.Update(byte);
  }
  for (size_t i = 0; i < udp.size(); ++i) crc.Update(i == 6 || i == 7 ? 0xff : std::to_integer<uint8_t>(udp[i]));
  for (size_t i = 0; i < bth_to_pad.size(); ++i) {
    // FECN, BECN and the reserved bits beside them.
    crc.Update(i == 4 ? 0xff : std::to_integer<uint8_t>(bth_to_pad[i]));
  }
  return crc.Value();
}

}  // namespace stagecoach::emu::wire
