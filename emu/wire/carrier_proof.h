// What the two ends of a carrier prove to each other: that they are the two QPs which know each other.
//
// A format of this project (carrier_hello.h). Two QPs that were connected know what nobody else was told: the packet
// numbers that both start with and, where a connection manager has connected them, a secret of 128 bits. A proof is a
// keyed hash (SipHash-2-4) of what was said on the stream, both ends' nonces among it, and of the packet numbers, under
// the secret. So no proof can be said again on another stream, none can be sent back to who has said it, and none tells
// the numbers but to who tries them all. The initiator proves first; the listener only to who has.
//
// A QP that does not send yet has no packet number of its own. It proves, and has proven, the peer's alone.
//
// A QP may be connected anew, alone, at the packet numbers that its peer has reached meanwhile. So an initiator says
// two proofs: of the numbers that it began with, and of those that it had reached when its last carrier ended. Programs
// whose QPs send in one direction may have told each other wrong numbers for the other. So an initiator whose two
// proofs were refused, and none before, proves each number by itself.
//
// Plain values and pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "base/siphash.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu::wire {

// All zeros: the two have none.
using CarrierSecret = SipKey;

// Packet numbers of the two ends, 24 bits each; nullopt: not to be proven.
struct CarrierNumbers {
  std::optional<uint32_t> initiator;
  std::optional<uint32_t> listener;
  friend bool operator==(const CarrierNumbers&, const CarrierNumbers&) = default;
};

// What anybody might know: no secret, and numbers that programs take who do not care.
bool IsGuessable(const CarrierSecret& secret, const CarrierNumbers& numbers);

enum class CarrierRole : uint8_t { kInitiator = 1, kListener = 2 };

SipTag ProveCarrier(CarrierRole role, const CarrierSecret& secret, const CarrierHello& hello,
                    const CarrierNonce& challenge, const CarrierNumbers& numbers);

// What the initiator says when it is asked to prove itself.
struct CarrierProof {
  SipTag first{};   // of the numbers begun with; or of the initiator's alone
  SipTag second{};  // of the numbers reached; or of the listener's alone

  std::array<std::byte, kCarrierProofSize> Encoded() const;
  // `bytes` are kCarrierProofSize: there is nothing to find wrong with them.
  static CarrierProof Decode(ConstBytes bytes);
  friend bool operator==(const CarrierProof&, const CarrierProof&) = default;
};

// The secret of a connection, from what its two ends drew for it and told nobody else: `key` and `drawn`, in an order
// that they agree on.
CarrierSecret DeriveCarrierSecret(const SipKey& key, ConstBytes drawn);

}  // namespace stagecoach::emu::wire
