#include "rpcrdma/core/connection_terms.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/wire/common_prefix.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/probe_answer.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

PropertySet SetOf(const TransportProperties& own, const PropertySet& more) {
  PropertySet set = MakePropertySet(own);
  set.insert(set.end(), more.begin(), more.end());
  return set;
}

}  // namespace

std::string ToString(const OwnPropertiesFault& fault) {
  switch (fault.kind) {
    case OwnPropertiesFault::Kind::kUnknown:
      return "property " + std::to_string(fault.id) + " is none of an extension's";
    case OwnPropertiesFault::Kind::kMalformed:
      return ToString(fault.property);
    case OwnPropertiesFault::Kind::kTooLong:
      return "RDMA2_CONNPROP would take " + std::to_string(fault.size) + " bytes of " +
             std::to_string(kConnPropSizeMax);
  }
  return "unknown fault";
}

std::optional<OwnPropertiesFault> CheckOwnProperties(const TransportProperties& own, const PropertySet& more,
                                                     const Extensions& extensions) {
  using Kind = OwnPropertiesFault::Kind;
  for (const Property& property : more) {
    if (extensions.FindProperty(property.id) == nullptr) {
      return OwnPropertiesFault{.kind = Kind::kUnknown, .id = property.id};
    }
  }
  const PropertySet set = SetOf(own, more);
  const auto values = ReadProperties(set, extensions);
  if (!values) return OwnPropertiesFault{.kind = Kind::kMalformed, .id = values.error().id, .property = values.error()};
  // [v2:5.3.4+6]
  const size_t size = EncodedSizeV2(Header{.version = kRpcRdmaVersion2, .body = ConnProp{set}});
  if (set.size() > kPropertiesMax || size > kConnPropSizeMax) {
    return OwnPropertiesFault{.kind = Kind::kTooLong, .size = size};
  }
  return std::nullopt;
}

ConnectionTerms::ConnectionTerms(Config config)
    : config_(std::move(config)),
      version_(config_.end == End::kClient ? config_.versions.high : config_.versions.low),
      settled_(version_ == kRpcRdmaVersion1 && config_.versions.high == kRpcRdmaVersion1),
      flags_taken_(FlagsTaken({}, extensions())) {
  STAGECOACH_CHECK(kRpcRdmaVersion1 <= config_.versions.low && config_.versions.low <= config_.versions.high &&
                   config_.versions.high <= kRpcRdmaVersion2);
  STAGECOACH_CHECK(config_.versions.high < kRpcRdmaVersion2 ||
                   (config_.send_max >= kDefaultReceiveBufferSize &&
                    config_.own.receive_buffer_size >= kDefaultReceiveBufferSize &&
                    !CheckOwnProperties(config_.own, config_.more, extensions())));
}

void ConnectionTerms::SetVersion(uint32_t version) {
  STAGECOACH_CHECK(!settled_ && config_.versions.contains(version));
  version_ = version;
  settled_ = true;
}

const HeaderLayout& ConnectionTerms::layout() const {
  return is_v2() ? kHeaderLayoutV2 : kHeaderLayoutV1;
}

const Extensions& ConnectionTerms::extensions() const {
  static const Extensions none;
  return config_.extensions != nullptr ? *config_.extensions : none;
}

// [v2:5.3.3+1] An error, or what claims to answer something, says nothing of what its sender speaks to us.
bool ConnectionTerms::Settles(const Header& header) const {
  return header.type() != MessageType::kError && !header.is_response();
}

// [v2:5.3.3+1] Whether what was refused for its version is marked as an answer, which is not answered. It can be told
// of a version that this end speaks.
bool ConnectionTerms::IsResponseOfVersion2(ConstBytes message, const HeaderFault& fault) const {
  if (fault.kind != HeaderFault::Kind::kVersion || fault.version != kRpcRdmaVersion2) return false;
  ByteReader in(message);
  in.Skip(kCommonPrefixSize);
  return config_.versions.contains(kRpcRdmaVersion2) && (in.U32() & kFlagResponse) != 0;
}

// Properties that cannot be read are an error to their sender [v2:4.1#1] [v2:4.1#2], and a requester sends no errors
// [v2:5.3.3#1]. A client is the requester of its connection, whatever the properties are marked as: it sends none, and
// as it does not know what the server takes it ends the connection. So does a server that is told them as an answer,
// which nobody answers.
HeaderFault ConnectionTerms::Judged(HeaderFault fault) const {
  const bool of_properties =
      fault.version == kRpcRdmaVersion2 && fault.flags.has_value() && fault.type == kRdma2ConnProp;
  if (!of_properties) return fault;
  const bool is_response = (*fault.flags & kFlagResponse) != 0;
  if (config_.end == End::kClient || is_response) fault.action = FaultAction::kDisconnect;
  return fault;
}

// [v2:7.3#1] [v2:10.1#1] By the version word, which stands at the same place in all.
Result<Header, HeaderFault> ConnectionTerms::Decode(ByteReader& in) {
  if (probing()) {
    Result<ProbeAnswer, HeaderFault> answer = DecodeProbeAnswer(in.Rest(), config_.list_limits, extensions());
    if (!answer) return Err(Judged(answer.error()));
    in.Skip(answer->header_size);
    return std::move(answer->header);
  }
  const ConstBytes message = in.Rest();
  uint32_t version = version_;
  if (!settled_) {
    ByteReader ahead = in;
    const Result<CommonPrefix, HeaderFault> prefix = DecodeCommonPrefix(ahead);
    if (prefix && config_.versions.contains(prefix->version)) version = prefix->version;
  }
  Result<Header, HeaderFault> header = version == kRpcRdmaVersion2
                                           ? DecodeHeaderV2(in, config_.list_limits, extensions())
                                           : DecodeHeaderV1(in, config_.list_limits, config_.profile);
  if (header && !settled_ && Settles(*header)) SetVersion(version);
  if (header) return header;
  if (IsResponseOfVersion2(message, header.error())) header.error().action = FaultAction::kDrop;
  return Err(Judged(header.error()));
}

void ConnectionTerms::Encode(const Header& header, ByteWriter& out) const {
  if (header.flags.has_value()) {
    EncodeHeaderV2(header, out, extensions());
  } else {
    EncodeHeaderV1(header, out);
  }
}

size_t ConnectionTerms::EncodedSize(const Header& header) const {
  return header.flags.has_value() ? EncodedSizeV2(header) : EncodedSizeV1(header);
}

Header ConnectionTerms::MakeHeader(uint32_t xid, uint32_t credits, uint32_t flags, Header::Body body) const {
  Header header{.xid = xid, .version = version_, .credits = credits, .body = std::move(body)};
  if (is_v2()) header.flags = flags;
  return header;
}

Header ConnectionTerms::MakeRefusal(const HeaderFault& fault) const {
  STAGECOACH_CHECK(fault.xid.has_value());
  Header header{.xid = *fault.xid, .version = version_};
  switch (fault.action) {
    case FaultAction::kAnswerErrVers: {
      // [v2:7.2#1] [v2:7.2+1] From the lowest to the highest.
      const TransportVersions now = settled_ ? TransportVersions{version_, version_} : config_.versions;
      header.body = ErrVers{now.low, now.high};
      if (config_.versions.high < kRpcRdmaVersion2) break;
      // [v2:5.3.3+3] [v2:5.3.3+6] The word of the message that is refused, and its layout.
      header.version = fault.version;
      if (fault.version == kRpcRdmaVersion2) header.flags = kFlagResponse;
      break;
    }
    case FaultAction::kAnswerErrChunk:
      header.body = ErrChunk{};
      break;
    case FaultAction::kAnswerBadXdr:
      header.body = ErrBadXdr{};
      break;
    case FaultAction::kAnswerInvalHtype:
      header.body = ErrInvalHtype{};
      break;
    case FaultAction::kDrop:
    case FaultAction::kDisconnect:
      STAGECOACH_CHECK(!"a fault that nobody answers");
  }
  if (fault.action == FaultAction::kAnswerBadXdr || fault.action == FaultAction::kAnswerInvalHtype) {
    header.version = kRpcRdmaVersion2;
    header.flags = kFlagResponse;
  }
  return header;
}

// [v2:5.3.4+3]
PropertySet ConnectionTerms::own_set() const {
  return SetOf(config_.own, config_.more);
}

// [v2:5.3.4+7] [v2:5.3.4+8] [v2:4.2+3] Those of the first; defaults before it, and for what it does not name.
bool ConnectionTerms::OnPeerProperties(const PropertySet& set) {
  if (peer_set_) {
    STAGECOACH_MARK("terms.properties_said_again");
    return false;
  }
  const auto values = ReadProperties(set, extensions());
  STAGECOACH_CHECK(values.has_value());
  peer_ = *values;
  peer_set_ = set;
  flags_taken_ = FlagsTaken(set, extensions());
  return true;
}

// [v2:4.2.1+2] [v2:4.2.1+3] [v2:7.1+2] No more than this end can send, whatever has become of the peer's number on its
// way [v2:11.1+2].
uint32_t ConnectionTerms::send_inline() const {
  if (probing()) return kProbeSizeMax;
  if (STAGECOACH_MUTANT("v2-peer-size-ignored", "an end sends as much as it can, whatever its peer takes")) {
    return config_.send_max;
  }
  return std::min(config_.send_max, peer_.receive_buffer_size);
}

// [v2:5.3.4+4]
uint32_t ConnectionTerms::receive_inline() const {
  const uint32_t own = config_.own.receive_buffer_size;
  const bool follows = peer_set_ && FindProperty(*peer_set_, kRdma2PropidRbsiz) != nullptr;
  return std::min(own,
                  follows ? std::max(kDefaultReceiveBufferSize, peer_.receive_buffer_size) : kDefaultReceiveBufferSize);
}

}  // namespace stagecoach::rpcrdma
