#include "emu/wire/cm_mad.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "base/cursor.h"

namespace stagecoach::emu::wire {
namespace {

constexpr uint8_t kBaseVersion = 1;
constexpr uint8_t kClass = 0x07;
constexpr uint8_t kClassVersion = 2;
constexpr uint8_t kMethodSend = 0x03;
constexpr uint32_t kTwentyFourBits = 0xffffff;
constexpr uint8_t kIpHeaderVersion = 0;
constexpr size_t kAlternatePathSize = 44;

// What follows fills a word that begins with 24 bits of something.
uint32_t Word(uint32_t upper, uint8_t lower) {
  return (upper << 8) | lower;
}

void PutGid(ByteWriter& out, const Gid& gid) {
  out.Bytes(AsBytes(gid.data(), gid.size()));
}
void GetGid(ByteReader& in, Gid* gid) {
  for (uint8_t& byte : *gid) byte = in.U8();
}
template <size_t Size>
void GetBytes(ByteReader& in, std::array<std::byte, Size>* to) {
  CopyBytes(*to, in.Bytes(Size));
}

// --- One pair of functions for each message, in the order of its fields ---

void Put(ByteWriter& out, const CmReq& req) {
  out.U32(req.local_id);
  out.Zeros(4);
  out.U64(req.service_id);
  out.U64(req.ca_guid);
  out.Zeros(4);
  out.U32(req.qkey);
  out.U32(Word(req.qp_number, req.responder_resources));
  out.U32(Word(0, req.initiator_depth));
  out.U32(Word(0, static_cast<uint8_t>((req.remote_response_timeout & 0x1f) << 3 | (req.transport & 3) << 1 |
                                       (req.flow_control ? 1 : 0))));
  out.U32(
      Word(req.starting_psn, static_cast<uint8_t>((req.local_response_timeout & 0x1f) << 3 | (req.retry_count & 7))));
  out.U16(req.pkey);
  out.U8(static_cast<uint8_t>((req.path_mtu & 0xf) << 4 | (req.rnr_retry_count & 7)));
  out.U8(static_cast<uint8_t>((req.max_cm_retries & 0xf) << 4 | (req.srq ? 8 : 0)));
  out.U16(req.local_lid);
  out.U16(req.remote_lid);
  PutGid(out, req.local_gid);
  PutGid(out, req.remote_gid);
  out.U32((req.flow_label & 0xfffff) << 12 | (req.packet_rate & 0x3fu));
  out.U8(req.traffic_class);
  out.U8(req.hop_limit);
  out.U8(static_cast<uint8_t>((req.service_level & 0xf) << 4 | (req.subnet_local ? 8 : 0)));
  out.U8(static_cast<uint8_t>((req.ack_timeout & 0x1f) << 3));
  out.Zeros(kAlternatePathSize);
  out.Bytes(req.private_data);
}

bool Get(ByteReader& in, CmReq* req) {
  req->local_id = in.U32();
  in.Skip(4);
  req->service_id = in.U64();
  req->ca_guid = in.U64();
  in.Skip(4);
  req->qkey = in.U32();
  uint32_t word = in.U32();
  req->qp_number = word >> 8;
  req->responder_resources = static_cast<uint8_t>(word);
  req->initiator_depth = static_cast<uint8_t>(in.U32());
  word = in.U32();
  req->remote_response_timeout = (word >> 3) & 0x1f;
  req->transport = (word >> 1) & 3;
  req->flow_control = (word & 1) != 0;
  word = in.U32();
  req->starting_psn = word >> 8;
  req->local_response_timeout = (word >> 3) & 0x1f;
  req->retry_count = word & 7;
  req->pkey = in.U16();
  uint8_t byte = in.U8();
  req->path_mtu = byte >> 4;
  req->rnr_retry_count = byte & 7;
  byte = in.U8();
  req->max_cm_retries = byte >> 4;
  req->srq = (byte & 8) != 0;
  req->local_lid = in.U16();
  req->remote_lid = in.U16();
  GetGid(in, &req->local_gid);
  GetGid(in, &req->remote_gid);
  word = in.U32();
  req->flow_label = word >> 12;
  req->packet_rate = word & 0x3f;
  req->traffic_class = in.U8();
  req->hop_limit = in.U8();
  byte = in.U8();
  req->service_level = byte >> 4;
  req->subnet_local = (byte & 8) != 0;
  req->ack_timeout = in.U8() >> 3;
  in.Skip(kAlternatePathSize);
  GetBytes(in, &req->private_data);
  return true;
}

void Put(ByteWriter& out, const CmMra& mra) {
  out.U32(mra.local_id);
  out.U32(mra.remote_id);
  out.U8(static_cast<uint8_t>(static_cast<uint8_t>(mra.about) << 6));
  out.U8(static_cast<uint8_t>((mra.service_timeout & 0x1f) << 3));
  out.Bytes(mra.private_data);
}

bool Get(ByteReader& in, CmMra* mra) {
  mra->local_id = in.U32();
  mra->remote_id = in.U32();
  mra->about = static_cast<CmAbout>(in.U8() >> 6);
  mra->service_timeout = in.U8() >> 3;
  GetBytes(in, &mra->private_data);
  return true;
}

void Put(ByteWriter& out, const CmRej& rej) {
  out.U32(rej.local_id);
  out.U32(rej.remote_id);
  out.U8(static_cast<uint8_t>(static_cast<uint8_t>(rej.about) << 6));
  out.U8(static_cast<uint8_t>(rej.information_length << 1));
  out.U16(static_cast<uint16_t>(rej.reason));
  out.Bytes(rej.information);
  out.Bytes(rej.private_data);
}

bool Get(ByteReader& in, CmRej* rej) {
  rej->local_id = in.U32();
  rej->remote_id = in.U32();
  rej->about = static_cast<CmAbout>(in.U8() >> 6);
  rej->information_length = in.U8() >> 1;
  rej->reason = static_cast<CmReason>(in.U16());
  GetBytes(in, &rej->information);
  GetBytes(in, &rej->private_data);
  return rej->information_length <= CmRej::kInformationSize;
}

void Put(ByteWriter& out, const CmRep& rep) {
  out.U32(rep.local_id);
  out.U32(rep.remote_id);
  out.U32(rep.qkey);
  out.U32(Word(rep.qp_number, 0));
  out.Zeros(4);
  out.U32(Word(rep.starting_psn, 0));
  out.U8(rep.responder_resources);
  out.U8(rep.initiator_depth);
  out.U8(static_cast<uint8_t>((rep.target_ack_delay & 0x1f) << 3 | (rep.failover_accepted & 3) << 1 |
                              (rep.flow_control ? 1 : 0)));
  out.U8(static_cast<uint8_t>((rep.rnr_retry_count & 7) << 5 | (rep.srq ? 0x10 : 0)));
  out.U64(rep.ca_guid);
  out.Bytes(rep.private_data);
}

bool Get(ByteReader& in, CmRep* rep) {
  rep->local_id = in.U32();
  rep->remote_id = in.U32();
  rep->qkey = in.U32();
  rep->qp_number = in.U32() >> 8;
  in.Skip(4);
  rep->starting_psn = in.U32() >> 8;
  rep->responder_resources = in.U8();
  rep->initiator_depth = in.U8();
  uint8_t byte = in.U8();
  rep->target_ack_delay = byte >> 3;
  rep->failover_accepted = (byte >> 1) & 3;
  rep->flow_control = (byte & 1) != 0;
  byte = in.U8();
  rep->rnr_retry_count = byte >> 5;
  rep->srq = (byte & 0x10) != 0;
  rep->ca_guid = in.U64();
  GetBytes(in, &rep->private_data);
  return true;
}

// RTU and DREP.
template <typename Message>
void PutIds(ByteWriter& out, const Message& message) {
  out.U32(message.local_id);
  out.U32(message.remote_id);
  out.Bytes(message.private_data);
}
template <typename Message>
bool GetIds(ByteReader& in, Message* message) {
  message->local_id = in.U32();
  message->remote_id = in.U32();
  GetBytes(in, &message->private_data);
  return true;
}

void Put(ByteWriter& out, const CmRtu& rtu) {
  PutIds(out, rtu);
}
bool Get(ByteReader& in, CmRtu* rtu) {
  return GetIds(in, rtu);
}
void Put(ByteWriter& out, const CmDrep& drep) {
  PutIds(out, drep);
}
bool Get(ByteReader& in, CmDrep* drep) {
  return GetIds(in, drep);
}

void Put(ByteWriter& out, const CmDreq& dreq) {
  out.U32(dreq.local_id);
  out.U32(dreq.remote_id);
  out.U32(Word(dreq.remote_qp_number, 0));
  out.Bytes(dreq.private_data);
}

bool Get(ByteReader& in, CmDreq* dreq) {
  dreq->local_id = in.U32();
  dreq->remote_id = in.U32();
  dreq->remote_qp_number = in.U32() >> 8;
  GetBytes(in, &dreq->private_data);
  return true;
}

void Put(ByteWriter& out, const CmSidrReq& req) {
  out.U32(req.request_id);
  out.U16(req.pkey);
  out.Zeros(2);
  out.U64(req.service_id);
  out.Bytes(req.private_data);
}

bool Get(ByteReader& in, CmSidrReq* req) {
  req->request_id = in.U32();
  req->pkey = in.U16();
  in.Skip(2);
  req->service_id = in.U64();
  GetBytes(in, &req->private_data);
  return true;
}

void Put(ByteWriter& out, const CmSidrRep& rep) {
  out.U32(rep.request_id);
  out.U8(static_cast<uint8_t>(rep.status));
  out.U8(rep.information_length);
  out.Zeros(2);
  out.U32(Word(rep.qp_number, 0));
  out.U64(rep.service_id);
  out.U32(rep.qkey);
  out.Bytes(rep.information);
  out.Bytes(rep.private_data);
}

bool Get(ByteReader& in, CmSidrRep* rep) {
  rep->request_id = in.U32();
  rep->status = static_cast<CmSidrStatus>(in.U8());
  rep->information_length = in.U8();
  in.Skip(2);
  rep->qp_number = in.U32() >> 8;
  rep->service_id = in.U64();
  rep->qkey = in.U32();
  GetBytes(in, &rep->information);
  GetBytes(in, &rep->private_data);
  return rep->information_length <= CmSidrRep::kInformationSize;
}

template <typename Message>
Result<CmMad, CmMadFault> DecodeAs(ByteReader& in, uint64_t transaction_id) {
  Message message;
  if (!Get(in, &message)) return Err(CmMadFault::kBadLength);
  return CmMad{transaction_id, message};
}

}  // namespace

const char* ToString(CmAttribute attribute) {
  switch (attribute) {
    case CmAttribute::kReq:
      return "REQ";
    case CmAttribute::kMra:
      return "MRA";
    case CmAttribute::kRej:
      return "REJ";
    case CmAttribute::kRep:
      return "REP";
    case CmAttribute::kRtu:
      return "RTU";
    case CmAttribute::kDreq:
      return "DREQ";
    case CmAttribute::kDrep:
      return "DREP";
    case CmAttribute::kSidrReq:
      return "SIDR_REQ";
    case CmAttribute::kSidrRep:
      return "SIDR_REP";
  }
  return "?";
}

const char* ToString(CmMadFault fault) {
  switch (fault) {
    case CmMadFault::kBadSize:
      return "not 256 bytes";
    case CmMadFault::kBadVersion:
      return "unknown version";
    case CmMadFault::kBadClass:
      return "another management class";
    case CmMadFault::kBadMethod:
      return "unknown method";
    case CmMadFault::kBadAttribute:
      return "unknown message";
    case CmMadFault::kBadLength:
      return "more additional information than there is room for";
  }
  return "?";
}

CmAttribute AttributeOf(const CmMessage& message) {
  return std::visit([](const auto& each) { return each.kAttribute; }, message);
}

CmMadBytes EncodeCmMad(const CmMad& mad) {
  CmMadBytes bytes;
  ByteWriter out(bytes);
  out.U8(kBaseVersion);
  out.U8(kClass);
  out.U8(kClassVersion);
  out.U8(kMethodSend);
  out.Zeros(4);  // status, and what depends on the class
  out.U64(mad.transaction_id);
  out.U16(static_cast<uint16_t>(AttributeOf(mad.message)));
  out.Zeros(6);  // reserved, and the attribute's modifier
  std::visit([&out](const auto& message) { Put(out, message); }, mad.message);
  STAGECOACH_CHECK(out.ok() && out.remaining() == 0);
  return bytes;
}

Result<CmMad, CmMadFault> DecodeCmMad(ConstBytes bytes) {
  if (bytes.size() != kCmMadSize) return Err(CmMadFault::kBadSize);
  ByteReader in(bytes);
  const uint8_t base_version = in.U8();
  const uint8_t management_class = in.U8();
  const uint8_t class_version = in.U8();
  const uint8_t method = in.U8();
  if (base_version != kBaseVersion) return Err(CmMadFault::kBadVersion);
  if (management_class != kClass) return Err(CmMadFault::kBadClass);
  if (class_version != kClassVersion) return Err(CmMadFault::kBadVersion);
  if (method != kMethodSend) return Err(CmMadFault::kBadMethod);
  in.Skip(4);
  const uint64_t transaction = in.U64();
  const auto attribute = static_cast<CmAttribute>(in.U16());
  in.Skip(6);
  switch (attribute) {
    case CmAttribute::kReq:
      return DecodeAs<CmReq>(in, transaction);
    case CmAttribute::kMra:
      return DecodeAs<CmMra>(in, transaction);
    case CmAttribute::kRej:
      return DecodeAs<CmRej>(in, transaction);
    case CmAttribute::kRep:
      return DecodeAs<CmRep>(in, transaction);
    case CmAttribute::kRtu:
      return DecodeAs<CmRtu>(in, transaction);
    case CmAttribute::kDreq:
      return DecodeAs<CmDreq>(in, transaction);
    case CmAttribute::kDrep:
      return DecodeAs<CmDrep>(in, transaction);
    case CmAttribute::kSidrReq:
      return DecodeAs<CmSidrReq>(in, transaction);
    case CmAttribute::kSidrRep:
      return DecodeAs<CmSidrRep>(in, transaction);
  }
  return Err(CmMadFault::kBadAttribute);
}

Result<CmServicePort, CmServiceFault> ServicePortOf(uint64_t service_id) {
  const uint64_t space = service_id >> 16;
  if (space != static_cast<uint64_t>(CmPortSpace::kTcp) && space != static_cast<uint64_t>(CmPortSpace::kUdp))
    return Err(CmServiceFault::kOtherService);
  return CmServicePort{static_cast<CmPortSpace>(space), static_cast<uint16_t>(service_id)};
}

namespace {

constexpr size_t kIpv4Size = 4;
constexpr size_t kAddressSize = 16;

// IPv4 addresses stand at the end of their field.
void PutAddress(ByteWriter& out, const std::array<uint8_t, kAddressSize>& address, bool ipv6) {
  if (!ipv6) out.Zeros(kAddressSize - kIpv4Size);
  out.Bytes(AsBytes(address.data(), ipv6 ? kAddressSize : kIpv4Size));
}

std::array<uint8_t, kAddressSize> GetAddress(ByteReader& in, bool ipv6) {
  std::array<uint8_t, kAddressSize> address{};
  if (!ipv6) in.Skip(kAddressSize - kIpv4Size);
  for (size_t i = 0; i < (ipv6 ? kAddressSize : kIpv4Size); ++i) address[i] = in.U8();
  return address;
}

}  // namespace

void CmIpHeader::Encode(std::span<std::byte, kCmIpHeaderSize> bytes) const {
  ByteWriter out(bytes);
  out.U8(kIpHeaderVersion);
  out.U8(ipv6 ? 0x60 : 0x40);
  out.U16(source_port);
  PutAddress(out, source, ipv6);
  PutAddress(out, destination, ipv6);
}

Result<CmIpHeader, CmIpFault> DecodeCmIpHeader(std::span<const std::byte, kCmIpHeaderSize> bytes) {
  ByteReader in(bytes);
  if (in.U8() != kIpHeaderVersion) return Err(CmIpFault::kBadVersion);
  const uint8_t ip_version = in.U8() >> 4;
  if (ip_version != 4 && ip_version != 6) return Err(CmIpFault::kBadIpVersion);
  CmIpHeader header;
  header.ipv6 = ip_version == 6;
  header.source_port = in.U16();
  header.source = GetAddress(in, header.ipv6);
  header.destination = GetAddress(in, header.ipv6);
  return header;
}

namespace {

// ClassPortInfo (section 13.4.8.1) up to where it is redirected to.
constexpr size_t kBeforeRedirectGid = 8;
constexpr uint32_t kRedirectQkey = 0x80010000;  // QP 1's (section 16.1)
constexpr size_t kBetweenGidAndQp = 8;          // traffic class, service level, flow label; LID; partition

}  // namespace

void CmRedirect::Encode(std::span<std::byte, CmRej::kInformationSize> bytes) const {
  ByteWriter out(bytes);
  out.U8(kBaseVersion);
  out.U8(kClassVersion);
  out.Zeros(kBeforeRedirectGid - 2);
  PutGid(out, gid);
  out.Zeros(kBetweenGidAndQp - 2);
  out.U16(0xffff);
  out.U32(qp_number & kTwentyFourBits);
  out.U32(kRedirectQkey);
  out.Zeros(out.remaining());
}

CmRedirect CmRedirect::Decode(std::span<const std::byte, CmRej::kInformationSize> bytes) {
  ByteReader in(bytes);
  in.Skip(kBeforeRedirectGid);
  CmRedirect redirect;
  GetGid(in, &redirect.gid);
  in.Skip(kBetweenGidAndQp);
  redirect.qp_number = in.U32() & kTwentyFourBits;
  return redirect;
}

Duration CmTime(uint8_t code) {
  return std::chrono::nanoseconds(int64_t{4096} << std::min<uint8_t>(code, 31));
}

}  // namespace stagecoach::emu::wire
