#include "rpcrdma/wire/private_data.h"

#include <algorithm>

#include "base/cursor.h"

namespace stagecoach::rpcrdma {
namespace {

// [pvtdata:4+8]
constexpr uint8_t kFlagRemoteInvalidation = 0x01;
constexpr uint32_t kSizeUnit = 1024;

// [pvtdata:4.2+1] [pvtdata:4.2+2] Kibibytes beyond the first, rounded down.
uint8_t EncodeSize(uint32_t bytes) {
  return static_cast<uint8_t>(std::clamp(bytes, kDefaultInlineThreshold, kMaxInlineThreshold) / kSizeUnit - 1);
}

// [pvtdata:4.2+3]
uint32_t DecodeSize(uint8_t coded) {
  return (uint32_t{coded} + 1) * kSizeUnit;
}

}  // namespace

// [pvtdata:4+3] [pvtdata:4+5] [pvtdata:4+6] [pvtdata:4+7] [pvtdata:4+9] [pvtdata:4+10] [pvtdata:8+1] Eight bytes, of
// clients and servers alike.
std::array<std::byte, kPrivateDataSize> EncodePrivateData(const PrivateData& data) {
  std::array<std::byte, kPrivateDataSize> bytes;
  ByteWriter out(bytes);
  out.U32(kPrivateDataMagic);
  out.U8(kPrivateDataVersion);
  // [pvtdata:4#2] The seven reserved bits are zero.
  out.U8(data.remote_invalidation ? kFlagRemoteInvalidation : 0);
  out.U8(EncodeSize(data.send_size));
  out.U8(EncodeSize(data.receive_size));
  return bytes;
}

std::optional<PrivateData> FindPrivateData(ConstBytes bytes) {
  // [pvtdata:5+1] [pvtdata:5.2+1] [pvtdata:5.2+2] [pvtdata:5.2+3] [pvtdata:6+1] [pvtdata:6+2] [pvtdata:7+2]
  // [pvtdata:5.2#1] The identifier may stand anywhere. A match that is not followed by a whole message of a version we
  // know is some other layer's data, and the search goes on behind it.
  for (size_t at = 0; at + kPrivateDataSize <= bytes.size(); ++at) {
    ByteReader in(bytes.subspan(at, kPrivateDataSize));
    if (in.U32() != kPrivateDataMagic || in.U8() != kPrivateDataVersion) continue;
    PrivateData data;
    // [pvtdata:4#2] The seven reserved bits are ignored.
    data.remote_invalidation = (in.U8() & kFlagRemoteInvalidation) != 0;
    data.send_size = DecodeSize(in.U8());
    data.receive_size = DecodeSize(in.U8());
    return data;
  }
  return std::nullopt;
}

// [pvtdata:3.1+1] [pvtdata:4.2+4] [pvtdata:4.2+5] For each direction the smaller of what one end sends and the other
// receives.
NegotiatedLimits Negotiate(const PrivateData& own, const std::optional<PrivateData>& peer) {
  // [pvtdata:5.1#1] [pvtdata:5.1+1] [pvtdata:3.1+3] [5666bis:4.3.1#4] A silent peer is one that claims the defaults.
  const PrivateData other = peer.value_or(PrivateData{});
  return {
      .send_inline = std::min(own.send_size, other.receive_size),
      .receive_inline = std::min(own.receive_size, other.send_size),
      .remote_invalidation = own.remote_invalidation && other.remote_invalidation,
  };
}

std::string ToString(const PrivateData& data) {
  return "send " + std::to_string(data.send_size) + " receive " + std::to_string(data.receive_size) +
         (data.remote_invalidation ? " remote invalidation" : " no remote invalidation");
}

}  // namespace stagecoach::rpcrdma
