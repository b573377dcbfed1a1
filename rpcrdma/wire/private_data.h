// CM private data of RPC-over-RDMA version 1 (draft-ietf-nfsv4-rpcrdma-cm-pvt-data-08, RFC 8797): eight bytes that the
// two ends exchange when a connection is made, with their inline thresholds and whether they support remote
// invalidation.
//
// Pure functions over values. The settings belong to one connection; the next one may bring others [pvtdata:4#1].
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kPrivateDataMagic = 0xf6ab0e18;
inline constexpr uint8_t kPrivateDataVersion = 1;
inline constexpr size_t kPrivateDataSize = 8;

// Inline thresholds, in bytes.
inline constexpr uint32_t kDefaultInlineThreshold = 1024;  // [5666bis:4.3.1#3]
inline constexpr uint32_t kMaxInlineThreshold = 256 * 1024;

struct PrivateData {
  // Every steering tag this end exposes on the connection may be invalidated by the peer's Send With Invalidate.
  bool remote_invalidation = false;
  // What this end can send in one RDMA Send, and receive in one Receive: multiples of 1024, 1024 to 262144.
  uint32_t send_size = kDefaultInlineThreshold;
  uint32_t receive_size = kDefaultInlineThreshold;

  friend bool operator==(const PrivateData&, const PrivateData&) = default;
};

// Sizes are rounded down to what the form can say and clamped to its range: a claim may be smaller than the truth,
// never larger.
std::array<std::byte, kPrivateDataSize> EncodePrivateData(const PrivateData& data);

// Searches `bytes` for the message; it may stand behind another layer's data, at any alignment [pvtdata:5.2#1]. nullopt
// when there is none of version 1: the caller then uses PrivateData{}, the defaults [pvtdata:5.1#1].
std::optional<PrivateData> FindPrivateData(ConstBytes bytes);

// What both ends' claims give for one connection, seen from this end. The two directions may differ [5666bis:4.3.1#1].
struct NegotiatedLimits {
  uint32_t send_inline = kDefaultInlineThreshold;     // largest message this end may send inline
  uint32_t receive_inline = kDefaultInlineThreshold;  // largest message the peer may send inline
  bool remote_invalidation = false;                   // [pvtdata:4.1#1] [pvtdata:4.1#3] both ends set the flag

  friend bool operator==(const NegotiatedLimits&, const NegotiatedLimits&) = default;
};
// `peer` is nullopt when the peer sent nothing usable.
NegotiatedLimits Negotiate(const PrivateData& own, const std::optional<PrivateData>& peer);

// "send 4096 receive 4096 remote invalidation"
std::string ToString(const PrivateData& data);

}  // namespace stagecoach::rpcrdma
