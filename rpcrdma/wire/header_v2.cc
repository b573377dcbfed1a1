#include "rpcrdma/wire/header_v2.h"

#include <bit>
#include <utility>

#include "base/check.h"
#include "rpcrdma/wire/common_prefix.h"

namespace stagecoach::rpcrdma {
namespace {

using Kind = HeaderFault::Kind;

class Decoder {
 public:
  Decoder(ByteReader& in, const ChunkListLimits& limits, const Extensions& extensions, const CommonPrefix& prefix)
      : in_(in), limits_(limits), extensions_(extensions), prefix_(prefix) {}

  Result<Header, HeaderFault> Decode() {
    // [v2:10.1#1] What follows is laid out as that version says. An error of another version is not answered.
    if (prefix_.version != kRpcRdmaVersion2) return Err(Fault(Kind::kVersion, FaultAction::kAnswerErrVers));
    flags_ = in_.U32();
    if (!in_.ok()) {
      HeaderFault fault = Fault(Kind::kTooShort, FaultAction::kDrop);
      fault.offset += in_.remaining();
      return Err(fault);
    }
    have_flags_ = true;
    auto body = DecodeBody();
    if (!body) return Err(body.error());
    if (auto fault = CheckExtensionFlags()) return Err(*fault);
    return Header{.xid = prefix_.xid,
                  .version = prefix_.version,
                  .credits = prefix_.credits,
                  .flags = flags_,
                  .body = std::move(*body)};
  }

 private:
  // [v2:5.3.3#1] [v2:5.3.3+1] Errors come from responders alone, so one that we made of a response would be a
  // requester's; and an error is never answered with one.
  HeaderFault Fault(Kind kind, FaultAction action) const {
    const bool response = have_flags_ && (flags_ & kFlagResponse) != 0;
    if (response || prefix_.type == kRdma2Error) action = FaultAction::kDrop;
    HeaderFault fault = prefix_.Fault(kind, action, in_);
    fault.expected = kRpcRdmaVersion2;
    if (have_flags_) fault.flags = flags_;
    return fault;
  }

  // [v2:5.1+1] [v2:5.2#1] [v2:5.2+5] [v2:6.5+2] What follows the prefix, by the number of the type: any number
  // [v2:3.1+3] [v2:10.1+4].
  Result<Header::Body, HeaderFault> DecodeBody() {
    switch (prefix_.type) {
      case kRdma2Msg:
        return DecodeLists<RdmaMsg>();
      case kRdma2Nomsg:
        return DecodeLists<RdmaNomsg>();
      case kRdma2Error:
        return DecodeError();
      case kRdma2ConnProp:
        return DecodeConnProp();
    }
    if (const HeaderTypeRow* row = extensions_.FindHeaderType(prefix_.type)) return DecodeExtension(*row);
    // [v2:5.2#3] [v2:5.3.3#3] [v2:5.3+1] Version 1's RDMA_MSGP and RDMA_DONE among them: table 2 does not have them.
    return Err(Fault(Kind::kUnknownType, FaultAction::kAnswerInvalHtype));
  }

  // [v2:3.3+1] [v2:5.3.1+3] A handle, then version 1's lists; what follows them is the RPC message [v2:6.5+3].
  template <typename Message>
  Result<Header::Body, HeaderFault> DecodeLists() {
    Message message;
    message.inv_handle = in_.U32();
    // If that is cut off, so are the lists, and DecodeChunkLists says it.
    if (const auto error = DecodeChunkLists(in_, limits_, &message.chunks)) {
      HeaderFault fault = Fault(Kind::kChunkList, FaultAction::kAnswerBadXdr);
      fault.chunk_list = *error;
      return Err(fault);
    }
    return Header::Body(std::move(message));
  }

  // [v2:6.4+3] A code, and what belongs to it [v2:6.4+4] [v2:6.4+5] [v2:6.4+6] [v2:6.4+7].
  Result<Header::Body, HeaderFault> DecodeError() {
    const uint32_t code = in_.U32();
    Header::Body error = ErrOther{code};  // [v2:6.4+8] the void arm
    switch (code) {
      case kRdma2ErrVers: {
        const uint32_t low = in_.U32();
        error = ErrVers{low, in_.U32()};
        break;
      }
      case kRdma2ErrBadXdr:
        error = ErrBadXdr{};
        break;
      case kRdma2ErrInvalHtype:
        error = ErrInvalHtype{};
        break;
      case kRdma2ErrReadChunks:
        error = ErrReadChunks{in_.U32()};
        break;
      case kRdma2ErrWriteChunks:
        error = ErrWriteChunks{in_.U32()};
        break;
      case kRdma2ErrSegments:
        error = ErrSegments{in_.U32()};
        break;
      case kRdma2ErrWriteResource: {
        const uint32_t index = in_.U32();
        error = ErrWriteResource{index, in_.U32()};
        break;
      }
      case kRdma2ErrReplyResource:
        error = ErrReplyResource{in_.U32()};
        break;
      case kRdma2ErrSystem:
        error = ErrSystem{};
        break;
    }
    if (!in_.ok()) return Err(Fault(Kind::kTruncatedError, FaultAction::kDrop));
    // Bytes behind it are left alone: whoever waits for the error is better off with it.
    return error;
  }

  // [v2:5.2+4] [v2:5.3.4+2] A set of properties and nothing else.
  Result<Header::Body, HeaderFault> DecodeConnProp() {
    ConnProp connprop;
    auto fault = DecodePropertySet(in_, &connprop.properties);
    if (!fault) {
      // [v2:4.1#2] [v2:5.3.3+7] A value that its type cannot hold is a header that cannot be parsed.
      const auto values = ReadProperties(connprop.properties, extensions_);
      if (!values) fault = values.error();
    }
    if (fault) return Err(PropertiesFault(Kind::kProperties, *fault));
    if (in_.remaining() > 0) return Err(PropertiesFault(Kind::kTrailingBytes, {}));
    return Header::Body(std::move(connprop));
  }

  HeaderFault PropertiesFault(Kind kind, const PropertyFault& property) const {
    HeaderFault fault = Fault(kind, FaultAction::kAnswerBadXdr);
    fault.property = property;
    return fault;
  }

  // [v2:5.1+2] [v2:9#4] As its row says.
  Result<Header::Body, HeaderFault> DecodeExtension(const HeaderTypeRow& row) {
    const std::optional<size_t> size = row.size(in_.Rest());
    if (!size || *size > in_.remaining()) return Err(Fault(Kind::kExtension, FaultAction::kAnswerBadXdr));
    const ConstBytes body = in_.Bytes(*size);
    if (!row.has_message && in_.remaining() > 0) return Err(Fault(Kind::kTrailingBytes, FaultAction::kAnswerBadXdr));
    return Header::Body(Extension{
        .type = row.type, .body = std::vector<std::byte>(body.begin(), body.end()), .has_message = row.has_message});
  }

  // [v2:9+4] Flags that an extension has defined: each where it may stand, and where it has to. Those of nobody are no
  // fault: a sender would have asked first whether we know them [v2:9.4+3].
  std::optional<HeaderFault> CheckExtensionFlags() const {
    for (uint32_t left = extensions_.flags(); left != 0; left &= left - 1) {
      const uint32_t flag = uint32_t{1} << std::countr_zero(left);
      const FlagUse use = extensions_.FindFlag(flag)->use(prefix_.type);
      const bool is_set = (flags_ & flag) != 0;
      if (use == (is_set ? FlagUse::kMustNot : FlagUse::kMust)) return Fault(Kind::kFlag, FaultAction::kAnswerBadXdr);
    }
    return std::nullopt;
  }

  ByteReader& in_;
  const ChunkListLimits& limits_;
  const Extensions& extensions_;
  const CommonPrefix prefix_;
  bool have_flags_ = false;
  uint32_t flags_ = 0;
};

// The words of an error behind its code.
struct ErrorWords {
  uint32_t code = 0;
  uint32_t count = 0;
  uint32_t words[2] = {};
};

struct ErrorWordsOf {
  ErrorWords operator()(const ErrVers& e) const { return {kRdma2ErrVers, 2, {e.low, e.high}}; }
  ErrorWords operator()(const ErrBadXdr&) const { return {kRdma2ErrBadXdr}; }
  ErrorWords operator()(const ErrInvalHtype&) const { return {kRdma2ErrInvalHtype}; }
  ErrorWords operator()(const ErrReadChunks& e) const { return {kRdma2ErrReadChunks, 1, {e.max_chunks}}; }
  ErrorWords operator()(const ErrWriteChunks& e) const { return {kRdma2ErrWriteChunks, 1, {e.max_chunks}}; }
  ErrorWords operator()(const ErrSegments& e) const { return {kRdma2ErrSegments, 1, {e.max_segments}}; }
  ErrorWords operator()(const ErrWriteResource& e) const {
    return {kRdma2ErrWriteResource, 2, {e.chunk_index, e.length_needed}};
  }
  ErrorWords operator()(const ErrReplyResource& e) const { return {kRdma2ErrReplyResource, 1, {e.length_needed}}; }
  ErrorWords operator()(const ErrSystem&) const { return {kRdma2ErrSystem}; }
  ErrorWords operator()(const ErrOther& e) const { return {e.code}; }
  template <typename Other>
  ErrorWords operator()(const Other&) const {
    STAGECOACH_CHECK(!"no error of version 2");
    return {};
  }
};

uint32_t TypeOf(const Header& header) {
  switch (header.type()) {
    case MessageType::kMsg:
      return kRdma2Msg;
    case MessageType::kNomsg:
      return kRdma2Nomsg;
    case MessageType::kError:
      return kRdma2Error;
    case MessageType::kConnProp:
      return kRdma2ConnProp;
    case MessageType::kExtension:
      return std::get<Extension>(header.body).type;
    case MessageType::kMsgp:
    case MessageType::kDone:
      break;
  }
  STAGECOACH_CHECK(!"a header of version 1");
  return 0;
}

}  // namespace

const char* ToString(DirectionFault fault) {
  switch (fault) {
    case DirectionFault::kReplyNotMarked:
      return "a reply without RPCRDMA2_F_RESPONSE";
    case DirectionFault::kCallMarkedResponse:
      return "a call with RPCRDMA2_F_RESPONSE";
    case DirectionFault::kNoDirection:
      return "neither a call nor a reply";
    case DirectionFault::kErrorNotMarked:
      return "RDMA2_ERROR without RPCRDMA2_F_RESPONSE";
  }
  return "unknown direction fault";
}

Result<Header, HeaderFault> DecodeHeaderV2(ByteReader& in, const ChunkListLimits& limits,
                                           const Extensions& extensions) {
  // [v2:3.1+2] [v2:10.1+1] The words that all versions share.
  const Result<CommonPrefix, HeaderFault> prefix = DecodeCommonPrefix(in);
  if (prefix) return Decoder(in, limits, extensions, *prefix).Decode();
  HeaderFault fault = prefix.error();
  fault.expected = kRpcRdmaVersion2;
  return Err(fault);
}

void EncodeHeaderV2(const Header& header, ByteWriter& out, const Extensions& extensions) {
  EncodeCommonPrefix({.xid = header.xid, .version = header.version, .credits = header.credits, .type = TypeOf(header)},
                     out);
  // [v2:3.2+1] [v2:3.2#1] Reserved flags are sent as zero, whoever has set them.
  out.U32(header.flags.value_or(0) & (kFlagResponse | extensions.flags()));
  if (const ChunkLists* lists = header.chunks()) {
    out.U32(header.inv_handle());
    EncodeChunkLists(*lists, out);
  } else if (const auto* connprop = std::get_if<ConnProp>(&header.body)) {
    EncodePropertySet(connprop->properties, out);
  } else if (const auto* extension = std::get_if<Extension>(&header.body)) {
    out.Bytes(extension->body);
  } else {
    const ErrorWords error = std::visit(ErrorWordsOf{}, header.body);
    out.U32(error.code);
    for (uint32_t i = 0; i < error.count; ++i) out.U32(error.words[i]);
  }
}

size_t EncodedSizeV2(const Header& header) {
  if (const ChunkLists* lists = header.chunks()) return kHeaderLayoutV2.SizeWith(EncodedSize(*lists));
  size_t size = kHeaderLayoutV2.prefix_size;
  if (const auto* connprop = std::get_if<ConnProp>(&header.body)) return size + EncodedSize(connprop->properties);
  if (const auto* extension = std::get_if<Extension>(&header.body)) return size + extension->body.size();
  return size + 4 * (1 + size_t{std::visit(ErrorWordsOf{}, header.body).count});
}

uint32_t UnknownFlags(const Header& header, const Extensions& extensions) {
  return header.flags.value_or(0) & ~(kFlagResponse | extensions.flags());
}

std::optional<DirectionFault> CheckDirection(const Header& header, ConstBytes message) {
  if (!header.flags.has_value()) return std::nullopt;
  if (header.type() == MessageType::kError) {
    if (header.is_response()) return std::nullopt;
    return DirectionFault::kErrorNotMarked;
  }
  // The XID, then msg_type (RFC 5531 section 9).
  ByteReader in(message);
  in.Skip(4);
  const uint32_t msg_type = in.U32();
  if (!in.ok()) return std::nullopt;
  if (msg_type > 1) return DirectionFault::kNoDirection;
  if ((msg_type == 1) == header.is_response()) return std::nullopt;
  return msg_type == 1 ? DirectionFault::kReplyNotMarked : DirectionFault::kCallMarkedResponse;
}

}  // namespace stagecoach::rpcrdma
