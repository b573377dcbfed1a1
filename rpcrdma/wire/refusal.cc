#include "rpcrdma/wire/refusal.h"

#include "base/cursor.h"

namespace stagecoach::rpcrdma {

std::array<std::byte, kRefusalSize> EncodeRefusal(const Refusal& refusal) {
  std::array<std::byte, kRefusalSize> bytes;
  ByteWriter out(bytes);
  out.U32(kRefusalMagic);
  out.U8(kRefusalVersion);
  out.U8(static_cast<uint8_t>(refusal.reason));
  out.U16(0);
  out.U32(refusal.limit);
  return bytes;
}

std::optional<Refusal> DecodeRefusal(ConstBytes bytes) {
  ByteReader in(bytes);
  if (in.U32() != kRefusalMagic || in.U8() != kRefusalVersion) return std::nullopt;
  Refusal refusal;
  refusal.reason = static_cast<Refusal::Reason>(in.U8());
  in.U16();
  refusal.limit = in.U32();
  if (!in.ok()) return std::nullopt;
  return refusal;
}

std::string ToString(const Refusal& refusal) {
  const std::string limit = std::to_string(refusal.limit);
  switch (refusal.reason) {
    case Refusal::Reason::kStopping:
      return "the server is about to stop";
    case Refusal::Reason::kClients:
      return "the server takes at most " + limit + " clients at a time";
    case Refusal::Reason::kAddressConnections:
      return "the server takes at most " + limit + " connections from one address, or one /64 network of IPv6";
    case Refusal::Reason::kReceives:
      return "all Receives that the server's clients share are promised to other clients";
    case Refusal::Reason::kDevice:
      return "the server's device lacks what another connection needs";
  }
  return "the server refused the connection for reason " + std::to_string(static_cast<unsigned>(refusal.reason)) +
         ", which is not known here";
}

}  // namespace stagecoach::rpcrdma
