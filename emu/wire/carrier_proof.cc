#include "emu/wire/carrier_proof.h"

#include "base/check.h"
#include "base/cursor.h"

namespace stagecoach::emu::wire {
namespace {

constexpr size_t kNumbersSize = 10;

}  // namespace

bool IsGuessable(const CarrierSecret& secret, const CarrierNumbers& numbers) {
  return secret == CarrierSecret{} && numbers.initiator == 0 && numbers.listener.value_or(0) == 0;
}

SipTag ProveCarrier(CarrierRole role, const CarrierSecret& secret, const CarrierHello& hello,
                    const CarrierNonce& challenge, const CarrierNumbers& numbers) {
  std::array<std::byte, kCarrierHelloSize + sizeof(CarrierNonce) + kNumbersSize> said;
  ByteWriter out(said);
  out.U8(static_cast<uint8_t>(role));
  hello.Encode(out);
  out.Bytes(challenge);
  out.U32(numbers.initiator);
  out.U8(numbers.listener ? 1 : 0);
  out.U32(numbers.listener.value_or(0));
  STAGECOACH_CHECK(out.ok() && out.remaining() == 0);
  return SipHash128(secret, said);
}

std::array<std::byte, kCarrierProofSize> CarrierProof::Encoded() const {
  std::array<std::byte, kCarrierProofSize> bytes;
  ByteWriter out(bytes);
  out.Bytes(begun);
  out.Bytes(reached);
  return bytes;
}

CarrierProof CarrierProof::Decode(ConstBytes bytes) {
  STAGECOACH_CHECK(bytes.size() == kCarrierProofSize);
  CarrierProof proof;
  CopyBytes(proof.begun, bytes.first(sizeof(SipTag)));
  CopyBytes(proof.reached, bytes.subspan(sizeof(SipTag)));
  return proof;
}

CarrierSecret DeriveCarrierSecret(const SipKey& key, ConstBytes drawn) {
  return SipHash128(key, drawn);
}

}  // namespace stagecoach::emu::wire
