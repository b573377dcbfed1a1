// The private data with which a Server rejects a connection, so that its client can say why.
//
// No document has such a message: twelve bytes of this project's own (docs/decisions/0057), in network byte order.
//
//   0  identifier, kRefusalMagic      4  version, 1      5  reason      6  zero (2)      8  limit
//
// Clients that do not know it take no notice, and neither does ours of what it cannot read: a rejection without a
// reason is one, too. Devices may put zeros behind it (InfiniBand's rejections always have 148 bytes).
//
// Pure functions over values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRefusalMagic = 0x53435246;
inline constexpr uint8_t kRefusalVersion = 1;
inline constexpr size_t kRefusalSize = 12;

struct Refusal {
  enum class Reason : uint8_t {
    kStopping = 1,            // the server takes no more clients
    kClients = 2,             // as many as there may be; `limit` says how many
    kAddressConnections = 3,  // the same from the client's address, or its /64 network of IPv6
    kReceives = 4,            // none of those that clients share could be promised
    kDevice = 5,              // the server's device has not what a connection needs
  };

  Reason reason = Reason::kStopping;  // on decoding a number of any value
  uint32_t limit = 0;                 // 0 where the reason has none

  friend bool operator==(const Refusal&, const Refusal&) = default;
};

std::array<std::byte, kRefusalSize> EncodeRefusal(const Refusal& refusal);

// nullopt: `bytes` do not begin with a refusal of version 1.
std::optional<Refusal> DecodeRefusal(ConstBytes bytes);

// A clause: "the server takes at most 128 clients at a time".
std::string ToString(const Refusal& refusal);

}  // namespace stagecoach::rpcrdma
