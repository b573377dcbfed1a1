#include "emu/wire/carrier_hello.h"

#include <algorithm>
#include <string_view>

namespace stagecoach::emu::wire {
namespace {

constexpr std::string_view kHelloKey("Stagecoach IB \0\3", kCarrierKeySize);
constexpr std::string_view kAnswerKey("Stagecoach ib \0\3", kCarrierKeySize);
constexpr uint8_t kFlagCrc = 1;
constexpr uint8_t kFlagDatagrams = 2;
constexpr uint8_t kFlagSends = 2;  // of an answer
constexpr uint8_t kFlagLoses = 4;
constexpr uint32_t kQpMax = 0xffffff;
// Of a QP's number, what is not its process's.
constexpr uint32_t kIndexMask = 0xffff;

void PutZeros(ByteWriter& out, size_t count) {
  for (size_t i = 0; i < count; ++i) out.U8(0);
}

bool AreZeros(ConstBytes bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte value) { return value == std::byte{0}; });
}

std::optional<CarrierFault> JudgeKey(ConstBytes bytes, std::string_view key) {
  const std::string_view text = AsText(bytes);
  if (text == key) return std::nullopt;
  const size_t fixed = key.size() - 1;
  return text.substr(0, fixed) == key.substr(0, fixed) ? CarrierFault::kBadVersion : CarrierFault::kBadKey;
}

bool HasToken(CarrierStatus status) {
  return status == CarrierStatus::kProve || status == CarrierStatus::kAccepted;
}

}  // namespace

const char* ToString(CarrierStatus status) {
  switch (status) {
    case CarrierStatus::kAccepted:
      return "accepted";
    case CarrierStatus::kNoQp:
      return "no such QP";
    case CarrierStatus::kNotReady:
      return "QP not ready";
    case CarrierStatus::kMismatch:
      return "QP has another peer";
    case CarrierStatus::kBusy:
      return "busy";
    case CarrierStatus::kProve:
      return "to be proven";
    case CarrierStatus::kNotProven:
      return "not proven to be the peer: packet numbers or secrets of the two QPs differ";
    case CarrierStatus::kTooOften:
      return "refused too often";
    case CarrierStatus::kOtherVersion:
      return "another version of the carrier's hello";
    case CarrierStatus::kWait:
      return "to wait for the QP";
  }
  return "unknown";
}

const char* ToString(CarrierFault fault) {
  switch (fault) {
    case CarrierFault::kTruncated:
      return "truncated";
    case CarrierFault::kBadKey:
      return "not a carrier's hello";
    case CarrierFault::kBadVersion:
      return "another version of the carrier's hello";
    case CarrierFault::kBadFlags:
      return "unknown flags";
    case CarrierFault::kNotZero:
      return "reserved bytes not zero";
    case CarrierFault::kBadQpNumber:
      return "bad QP number";
    case CarrierFault::kBadStatus:
      return "unknown status";
  }
  return "unknown";
}

void CarrierHello::Encode(ByteWriter& out) const {
  out.Bytes(AsBytes(kHelloKey));
  out.U8(static_cast<uint8_t>((crc ? kFlagCrc : 0) | (datagrams ? kFlagDatagrams : 0) | (loses ? kFlagLoses : 0)));
  PutZeros(out, 3);
  out.U32(source_qp & kQpMax);
  out.U32(destination_qp & kQpMax);
  PutZeros(out, 4);
  for (const uint8_t byte : source) out.U8(byte);
  for (const uint8_t byte : destination) out.U8(byte);
  out.Bytes(nonce);
}

void CarrierAnswer::Encode(ByteWriter& out) const {
  out.Bytes(AsBytes(kAnswerKey));
  out.U8(static_cast<uint8_t>(status));
  out.U8(static_cast<uint8_t>((crc ? kFlagCrc : 0) | (sends ? kFlagSends : 0) | (loses ? kFlagLoses : 0)));
  PutZeros(out, 6);
  out.Bytes(HasToken(status) ? token : SipTag{});
}

std::optional<CarrierFault> JudgeCarrierKey(ConstBytes key) {
  return JudgeKey(key, kHelloKey);
}

Result<CarrierHello, CarrierFault> DecodeCarrierHello(ConstBytes bytes) {
  if (bytes.size() != kCarrierHelloSize) return Err(CarrierFault::kTruncated);
  ByteReader in(bytes);
  if (const auto fault = JudgeKey(in.Bytes(kHelloKey.size()), kHelloKey)) return Err(CarrierFault{*fault});
  CarrierHello hello;
  const uint8_t flags = in.U8();
  if ((flags & ~(kFlagCrc | kFlagDatagrams | kFlagLoses)) != 0) return Err(CarrierFault::kBadFlags);
  hello.crc = (flags & kFlagCrc) != 0;
  hello.datagrams = (flags & kFlagDatagrams) != 0;
  hello.loses = (flags & kFlagLoses) != 0;
  if (!AreZeros(in.Bytes(3))) return Err(CarrierFault::kNotZero);
  hello.source_qp = in.U32();
  hello.destination_qp = in.U32();
  if (hello.source_qp > kQpMax || hello.destination_qp > kQpMax) return Err(CarrierFault::kBadQpNumber);
  if (hello.datagrams && ((hello.source_qp | hello.destination_qp) & kIndexMask) != 0) {
    return Err(CarrierFault::kBadQpNumber);
  }
  if (!AreZeros(in.Bytes(4))) return Err(CarrierFault::kNotZero);
  for (uint8_t& byte : hello.source) byte = in.U8();
  for (uint8_t& byte : hello.destination) byte = in.U8();
  CopyBytes(hello.nonce, in.Bytes(hello.nonce.size()));
  return hello;
}

Result<CarrierAnswer, CarrierFault> DecodeCarrierAnswer(ConstBytes bytes) {
  if (bytes.size() != kCarrierAnswerSize) return Err(CarrierFault::kTruncated);
  ByteReader in(bytes);
  if (const auto fault = JudgeKey(in.Bytes(kAnswerKey.size()), kAnswerKey)) return Err(CarrierFault{*fault});
  CarrierAnswer answer;
  const uint8_t status = in.U8();
  if (status > static_cast<uint8_t>(CarrierStatus::kWait)) return Err(CarrierFault::kBadStatus);
  answer.status = static_cast<CarrierStatus>(status);
  const uint8_t flags = in.U8();
  if ((flags & ~(kFlagCrc | kFlagSends | kFlagLoses)) != 0) return Err(CarrierFault::kBadFlags);
  answer.crc = (flags & kFlagCrc) != 0;
  answer.sends = (flags & kFlagSends) != 0;
  answer.loses = (flags & kFlagLoses) != 0;
  if (!AreZeros(in.Bytes(6))) return Err(CarrierFault::kNotZero);
  const ConstBytes token = in.Bytes(answer.token.size());
  if (!HasToken(answer.status) && !AreZeros(token)) return Err(CarrierFault::kNotZero);
  CopyBytes(answer.token, token);
  return answer;
}

}  // namespace stagecoach::emu::wire
