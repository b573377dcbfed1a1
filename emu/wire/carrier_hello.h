// The hello of a stream that carries InfiniBand packets, between two QPs or as a link for datagrams, and its answer.
//
// A format of this project: RoCEv2 has no streams. The initiator says which QP it comes from and which one it wants.
// The listener refuses, or says that the QP is not ready, or asks for a proof that the initiator is the peer; then it
// says yes, with a proof of its own, or why not; records follow (emu/llp/mpa/mpa_llp.h). What the proofs are says
// carrier_proof.h. A link is for all datagrams from one process to another: there the numbers of QPs are those of the
// processes, with nothing in their lower 16 bits, and the listener says yes or no at once. Neither begins like an MPA
// frame, so that each side finds out at once when it talks to the other kind of listener.
//
//   hello     16 key | 1 flags (1: CRC, 2: link for datagrams, 4: loses) | 3 zero | 4 source QP | 4 destination QP |
//             4 zero | 16 source GID | 16 destination GID | 16 nonce
//   answer    16 key | 1 status | 1 flags (1: CRC, 2: the listener knows the packet number that it starts with,
//             4: loses) | 6 zero | 16 of kProve: the listener's nonce; of kAccepted: the listener's proof; else zero
//   proof     16 | 16 (carrier_proof.h); the answer to kProve
//
// The last byte of a key is the version. A nonce is drawn anew for each stream; of a link it names the process that
// opens it, and stays the same as long as that lives.
//
// Big-endian. Plain values and pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "base/siphash.h"

namespace stagecoach::emu::wire {

inline constexpr size_t kCarrierHelloSize = 80;
inline constexpr size_t kCarrierAnswerSize = 40;
inline constexpr size_t kCarrierProofSize = 32;
inline constexpr size_t kCarrierKeySize = 16;

// An IPv6 address, or an IPv4 one as ::ffff:a.b.c.d (annex A17.5 of the InfiniBand specification).
using Gid = std::array<uint8_t, 16>;

// What nobody can have said before.
using CarrierNonce = std::array<std::byte, 16>;

struct CarrierHello {
  bool crc = false;        // records with CRC32c are asked for
  bool datagrams = false;  // a link; records go from the initiator to the listener alone
  bool loses = false;      // the initiator's device loses packets by itself, as it was told to
  uint32_t source_qp = 0;
  uint32_t destination_qp = 0;
  Gid source{};
  Gid destination{};
  CarrierNonce nonce{};

  void Encode(ByteWriter& out) const;
  friend bool operator==(const CarrierHello&, const CarrierHello&) = default;
};

enum class CarrierStatus : uint8_t {
  kAccepted = 0,
  kNoQp = 1,      // there is none of this number
  kNotReady = 2,  // it is in error, or was not brought to RTR in time
  kMismatch = 3,  // it has another peer
  kBusy = 4,      // this end is about to come to the initiator itself; of a link: there are too many
  kProve = 5,     // not the last answer: a proof is to follow
  kNotProven = 6,
  kTooOften = 7,  // so many proofs of that address were wrong that none is looked at for a while
  kOtherVersion = 8,
  kWait = 9,  // not the last answer: the QP has not been brought to RTR yet
};
const char* ToString(CarrierStatus status);

struct CarrierAnswer {
  CarrierStatus status = CarrierStatus::kAccepted;
  bool crc = false;    // of the records that follow; yes when either end asks
  bool sends = false;  // of kProve: the listener has a packet number of its own, which is to be proven, too
  bool loses = false;  // of kAccepted: the listener's device loses packets by itself, as it was told to
  SipTag token{};      // of kProve: a nonce; of kAccepted: the listener's proof

  void Encode(ByteWriter& out) const;
  friend bool operator==(const CarrierAnswer&, const CarrierAnswer&) = default;
};

enum class CarrierFault : uint8_t {
  kTruncated,
  kBadKey,       // not of this protocol
  kBadVersion,   // of another version
  kBadFlags,     // a flag nobody knows
  kNotZero,      // something where zeros belong
  kBadQpNumber,  // more than 24 bits; of a link: the number of a QP and not of a process
  kBadStatus,
};
const char* ToString(CarrierFault fault);

// What is wrong with the beginning of a hello: kBadKey or kBadVersion. `key` are its first kCarrierKeySize bytes. For
// who waits for the rest, which has another length in another version.
std::optional<CarrierFault> JudgeCarrierKey(ConstBytes key);

// `bytes` are kCarrierHelloSize, or kCarrierAnswerSize.
Result<CarrierHello, CarrierFault> DecodeCarrierHello(ConstBytes bytes);
Result<CarrierAnswer, CarrierFault> DecodeCarrierAnswer(ConstBytes bytes);

}  // namespace stagecoach::emu::wire
