#include "tools/decode/agreement.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/probe_answer.h"
#include "rpcrdma/wire/validate.h"
#include "tools/decode/message_decoder.h"

namespace stagecoach::decode::testing {
namespace {

using namespace rpcrdma;

constexpr uint32_t kMany = std::numeric_limits<uint32_t>::max();
constexpr ChunkListLimits kNoLimits = {kMany, kMany, kMany, kMany};
constexpr ChunkDataLimits kNoDataLimits = {std::numeric_limits<uint64_t>::max(), std::numeric_limits<uint64_t>::max()};

struct Codec {
  Result<Header, HeaderFault> header;
  size_t size = 0;
  ConstBytes rest;
};

Codec Decode(const ProtocolProfile& profile, uint32_t layout, ConstBytes message) {
  ByteReader in(message);
  auto header = layout == kRpcRdmaVersion2 ? DecodeHeaderV2(in, kNoLimits) : DecodeHeaderV1(in, kNoLimits, profile);
  return {std::move(header), in.position(), in.Rest()};
}

bool IsMarked(const Field& field) {
  return std::ranges::any_of(field.remarks, [](const Remark& each) { return each.verdict == Verdict::kIllegal; });
}

// Whether something is marked that those who judge chunk lists look at: the header, and the message's XID.
bool IsMarkedForLists(const DecodedMessage& decoded) {
  return std::ranges::any_of(decoded.fields, [&](const Field& field) {
    const std::string_view name = field.name;
    return IsMarked(field) && name != "rdma_credit" && name != "rdma_flags" && field.offset <= decoded.header_size;
  });
}

// As an end has it before it judges the lists.
std::vector<std::byte> InlineMessage(const ProtocolProfile& profile, const Header& header, ConstBytes rest) {
  std::vector<std::byte> message(rest.begin(), rest.end());
  if (profile.header_xid_prevails && message.size() >= 4) ByteWriter(message).U32(header.xid);
  return message;
}

std::optional<ChunkFault> FaultOfCall(const ProtocolProfile& profile, const Codec& codec) {
  const auto judged =
      ValidateCall(*codec.header, InlineMessage(profile, *codec.header, codec.rest), kNoDataLimits, profile);
  return judged ? std::nullopt : std::optional(judged.error());
}

std::optional<ChunkFault> FaultOfReply(const ProtocolProfile& profile, const Codec& codec, const ChunkLists& offered) {
  Header header = *codec.header;
  if (profile.written_lengths_count_round_up) CutRoundUp(&header.mutable_chunks()->writes, offered.writes);
  const auto judged =
      ValidateReply(header, InlineMessage(profile, header, codec.rest), offered, profile, kNoDataLimits);
  return judged ? std::nullopt : std::optional(judged.error());
}

// The lists of a call that an end would take; null when it is none, or has more than is remembered of it.
const ChunkLists* OfferOf(const ProtocolProfile& profile, const DecodedMessage& call, const Codec& codec) {
  if (!codec.header || call.reply != false || codec.header->chunks() == nullptr) return nullptr;
  if (FaultOfCall(profile, codec)) return nullptr;
  const ChunkLists& lists = *codec.header->chunks();
  const size_t segments =
      lists.writes.size() + lists.writes.segments().size() + (lists.reply.has_value() ? lists.reply->size() : 0);
  return segments <= MessageDecoder::kOfferedMax ? &lists : nullptr;
}

// Of a header that the codec takes, with chunk lists.
std::string DisagreementOnLists(const ProtocolProfile& profile, const DecodedMessage& call, const Codec& call_codec,
                                const DecodedMessage& decoded, const Codec& codec) {
  std::optional<ChunkFault> fault;
  if (decoded.reply == false) {
    fault = FaultOfCall(profile, codec);
  } else if (decoded.reply == true) {
    const ChunkLists* offered = OfferOf(profile, call, call_codec);
    if (offered == nullptr || call_codec.header->xid != codec.header->xid) return {};
    fault = FaultOfReply(profile, codec, *offered);
  } else if (codec.header->has_inline_message()) {
    return {};  // it is known to be neither, or cut
  } else if (!FaultOfCall(profile, codec)) {
    return "a call that is called neither a call nor a reply";
  }
  if (fault && !decoded.illegal()) return std::string("not marked: ") + rpcrdma::ToString(*fault);
  if (decoded.reply && !fault && IsMarkedForLists(decoded)) return "marked, and an end takes it";
  return {};
}

}  // namespace

std::string Disagreement(const ProtocolProfile& profile, ConstBytes call, ConstBytes message) {
  MessageDecoder decoder(profile);
  DecodedMessage called;
  if (!call.empty()) called = decoder.OnMessage(End::kUnknown, call);
  const DecodedMessage decoded = decoder.OnMessage(End::kUnknown, message);
  const Codec codec = Decode(profile, decoded.layout, message);
  const Codec call_codec = Decode(profile, called.layout, call);

  if (decoded.version == kRpcRdmaVersion2 && decoded.layout == kRpcRdmaVersion1) {
    const auto answer = DecodeProbeAnswer(message);
    if (!answer || answer->header.flags.has_value()) return "not the layout of version 1";
  }
  if (!codec.header) {
    const HeaderFault& fault = codec.header.error();
    const bool legal = fault.kind == HeaderFault::Kind::kUnknownError && profile.unknown_errors_have_words &&
                       fault.version == kRpcRdmaVersion1;
    const bool limit =
        fault.kind == HeaderFault::Kind::kProperties && fault.property.kind == PropertyFault::Kind::kTooMany;
    if (limit || decoded.well_formed == legal) {
      return legal || limit || decoded.illegal() ? "" : "not marked: " + rpcrdma::ToString(fault);
    }
    return (legal ? "called malformed: " : "called well-formed: ") + rpcrdma::ToString(fault);
  }
  if (!decoded.well_formed) return "called malformed, and the codec takes it";
  if (decoded.header_size != codec.size) {
    return "a header of " + std::to_string(decoded.header_size) + " bytes, which has " + std::to_string(codec.size);
  }
  if (CheckDirection(*codec.header, codec.rest) && !decoded.illegal()) return "not marked: the wrong direction";
  if (codec.header->chunks() == nullptr) return {};
  // In version 2 lists are what they are in the newest document of version 1.
  const ProtocolProfile& by = decoded.layout == kRpcRdmaVersion2 ? kRfc5666bis : profile;
  return DisagreementOnLists(by, called, call_codec, decoded, codec);
}

}  // namespace stagecoach::decode::testing
