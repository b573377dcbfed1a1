// What comes out of captured packets: decoded messages, and what is wrong with the packets.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/cursor.h"
#include "rpcrdma/wire/private_data.h"
#include "tools/decode/datagram.h"
#include "tools/decode/message_decoder.h"

namespace stagecoach::decode {

// The packet that a message ends in.
struct Origin {
  uint64_t packet = 0;           // in the file, from 1
  std::optional<uint64_t> time;  // nanoseconds since 1970
};

struct Event {
  Origin origin;
  // Of the packet; of bytes that came as a hex dump there are none.
  std::optional<Address> source;
  std::optional<Address> destination;
  std::string carrier;  // "iWARP Send", "MPA Request", "CM ConnectRequest"
  ConstBytes bytes;     // the message; valid during the call
  DecodedMessage decoded;
};

struct Sinks {
  std::function<void(const Event&)> message;
  // In words: what of the capture could not be used.
  std::function<void(const Origin&, const std::string&)> trouble;
};

// No message is longer, or it is left out: the most that CM private data can announce.
inline constexpr size_t kMessageMax = rpcrdma::kMaxInlineThreshold;

// Whether a message that nothing else speaks for is one of RPC-over-RDMA: the fixed fields have values that exist.
inline bool LooksLikeRpcRdma(ConstBytes message) {
  ByteReader in(message);
  in.Skip(4);
  const uint32_t version = in.U32();
  in.Skip(4);
  const uint32_t type = in.U32();
  return in.ok() && ((version == 1 && type <= 4) || (version == 2 && (type <= 1 || type == 4 || type == 5)));
}

// The port of NFS over RDMA (RFC 8267 section 6).
inline constexpr uint16_t kNfsRdmaPort = 20049;

}  // namespace stagecoach::decode
