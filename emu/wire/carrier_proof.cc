#include "emu/wire/carrier_proof.h"

#include "base/check.h"
#include "base/cursor.h"

namespace stagecoach::emu::wire {
namespace {

constexpr size_t kNumbersSize = 11;

}  // namespace

bool IsGuessable(const CarrierSecret& secret, const CarrierNumbers& numbers) {
  return secret == CarrierSecret{} && numbers.initiator.value_or(0) == 0 && numbers.listener.value_or(0) == 0;
}

SipTag ProveCarrier(CarrierRole role, const CarrierSecret& secret, const CarrierHello& hello,
                    const CarrierNonce& challenge, const CarrierNumbers& numbers) {
  std::array<std::byte, kCarrierHelloSize + sizeof(CarrierNonce) + kNumbersSize> said;
  ByteWriter out(said);
  out.U8(static_cast<uint8_t>(role));
  hello.Encode(out);
  out.Bytes(challenge);
  for (const std::optional<uint32_t>& number : {numbers.initiator, numbers.listener}) {
    out.U8(number ? 1 : 0);
    out.U32(number.value_or(0));
  }
  STAGECOACH_CHECK(out.ok() && out.remaining() == 0);
  return SipHash128(secret, said);
}

std::array<std::byte, kCarrierProofSize> CarrierProof::Encoded() const {
  std::array<std::byte, kCarrierProofSize> bytes;
  ByteWriter out(bytes);
  out.Bytes(first);
  out.Bytes(second);
  return bytes;
}

CarrierProof CarrierProof::Decode(ConstBytes bytes) {
  STAGECOACH_CHECK(bytes.size() == kCarrierProofSize);
  CarrierProof proof;
  CopyBytes(proof.first, bytes.first(sizeof(SipTag)));
  CopyBytes(proof.second, bytes.subspan(sizeof(SipTag)));
  return proof;
}

CarrierSecret DeriveCarrierSecret(const SipKey& key, ConstBytes drawn) {
  return SipHash128(key, drawn);
}

}  // namespace stagecoach::emu::wire
