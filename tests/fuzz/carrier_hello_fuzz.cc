// What stands at the beginning of a stream that wants to be a carrier of InfiniBand packets, and its answer.
// Input: a hello, or an answer, by its length; anything longer: a hello, an answer and a proof, of what a listener
// knows that the input does not.
#include <array>
#include <string_view>

#include "base/cursor.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using namespace emu::wire;

void CheckHello(ConstBytes input) {
  const auto hello = DecodeCarrierHello(input);
  const bool has_key = input.size() >= kCarrierKeySize && !JudgeCarrierKey(input.first(kCarrierKeySize));
  if (!hello.has_value()) {
    FUZZ_PROPERTY(std::string_view(ToString(hello.error())) != "unknown");
    return;
  }
  FUZZ_PROPERTY(has_key);
  std::array<std::byte, kCarrierHelloSize> again;
  ByteWriter out(again);
  hello->Encode(out);
  FUZZ_PROPERTY(out.ok() && AsText(again) == AsText(input));
}

void CheckAnswer(ConstBytes input) {
  const auto answer = DecodeCarrierAnswer(input);
  if (!answer.has_value()) return;
  FUZZ_PROPERTY(std::string_view(ToString(answer->status)) != "unknown");
  std::array<std::byte, kCarrierAnswerSize> again;
  ByteWriter out(again);
  answer->Encode(out);
  FUZZ_PROPERTY(out.ok() && AsText(again) == AsText(input));
}

// No input is the proof of what it does not know.
void CheckProof(const CarrierHello& hello, ConstBytes challenge, ConstBytes said) {
  CarrierSecret secret{};
  secret[0] = std::byte{0x5e};
  CarrierNonce nonce;
  CopyBytes(nonce, challenge);
  const CarrierProof proof = CarrierProof::Decode(said);
  const SipTag expected = ProveCarrier(CarrierRole::kInitiator, secret, hello, nonce, {0x123456, 0x654321});
  FUZZ_PROPERTY(!EqualInConstantTime(proof.first, expected) && !EqualInConstantTime(proof.second, expected));
  FUZZ_PROPERTY(AsText(proof.Encoded()) == AsText(said));
}

void Run(ConstBytes input) {
  CheckHello(input);
  CheckAnswer(input);
  if (input.size() < kCarrierHelloSize) return;
  CheckHello(input.first(kCarrierHelloSize));
  const ConstBytes rest = input.subspan(kCarrierHelloSize);
  if (rest.size() < sizeof(CarrierNonce) + kCarrierProofSize) return;
  const auto hello = DecodeCarrierHello(input.first(kCarrierHelloSize));
  if (!hello.has_value()) return;
  CheckProof(*hello, rest.first(sizeof(CarrierNonce)), rest.subspan(sizeof(CarrierNonce), kCarrierProofSize));
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(stagecoach::AsBytes(data, size));
  return 0;
}
