// The hello of a stream that carries InfiniBand packets, between two QPs or as a link for datagrams, and its answer.
//
// A format of this project: RoCEv2 has no streams. The initiator says which QP it comes from and which one it wants;
// the listener says yes, or why not; records follow (emu/llp/mpa_llp.h). A link is for all datagrams from one process
// to another: there the numbers of QPs are those of the processes, with nothing in their lower 16 bits. Neither begins
// like an MPA frame, so that each side finds out at once when it talks to the other kind of listener.
//
//   hello     16 key | 1 flags (1: CRC, 2: link for datagrams) | 3 zero | 4 source QP | 4 destination QP | 4 zero |
//             16 source GID | 16 destination GID
//   answer    16 key | 1 status | 1 flags (1: CRC) | 6 zero
//
// Big-endian. Plain values and pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"

namespace stagecoach::emu::wire {

inline constexpr size_t kCarrierHelloSize = 64;
inline constexpr size_t kCarrierAnswerSize = 24;

// An IPv6 address, or an IPv4 one as ::ffff:a.b.c.d (annex A17.5 of the InfiniBand specification).
using Gid = std::array<uint8_t, 16>;

struct CarrierHello {
  bool crc = false;        // records with CRC32c are asked for
  bool datagrams = false;  // a link; records go from the initiator to the listener alone
  uint32_t source_qp = 0;
  uint32_t destination_qp = 0;
  Gid source{};
  Gid destination{};

  void Encode(ByteWriter& out) const;
  friend bool operator==(const CarrierHello&, const CarrierHello&) = default;
};

enum class CarrierStatus : uint8_t {
  kAccepted = 0,
  kNoQp = 1,      // there is none of this number
  kNotReady = 2,  // it is in error, or was not brought to RTR in time
  kMismatch = 3,  // it has another peer
  kBusy = 4,      // this end is about to come to the initiator itself; of a link: there are too many
};
const char* ToString(CarrierStatus status);

struct CarrierAnswer {
  CarrierStatus status = CarrierStatus::kAccepted;
  bool crc = false;  // of the records that follow; yes when either end asks

  void Encode(ByteWriter& out) const;
  friend bool operator==(const CarrierAnswer&, const CarrierAnswer&) = default;
};

enum class CarrierFault : uint8_t {
  kTruncated,
  kBadKey,       // not of this protocol, or of another version
  kBadFlags,     // a flag nobody knows
  kNotZero,      // something where zeros belong
  kBadQpNumber,  // more than 24 bits; of a link: the number of a QP and not of a process
  kBadStatus,
};
const char* ToString(CarrierFault fault);

// `bytes` are kCarrierHelloSize, or kCarrierAnswerSize.
Result<CarrierHello, CarrierFault> DecodeCarrierHello(ConstBytes bytes);
Result<CarrierAnswer, CarrierFault> DecodeCarrierAnswer(ConstBytes bytes);

}  // namespace stagecoach::emu::wire
