#include "rpcrdma/wire/header_v1.h"

#include <utility>

#include "base/check.h"
#include "rpcrdma/wire/common_prefix.h"

namespace stagecoach::rpcrdma {
namespace {

// rpcrdma1_proc [5666bis:5.6+9] [5666:4.3+6] [2004:4.2+6]
constexpr uint32_t kMsgProc = 0;
constexpr uint32_t kNomsgProc = 1;
constexpr uint32_t kMsgpProc = 2;
constexpr uint32_t kDoneProc = 3;
constexpr uint32_t kErrorProc = 4;

// rpcrdma1_errcode [5666bis:5.6+7] [5666:4.3+9] [2004:4.2+9]
constexpr uint32_t kErrVersCode = 1;
constexpr uint32_t kErrChunkCode = 2;
// rdma_extra of the older documents, in words.
constexpr int kErrorExtraWords = 8;

// [5666bis:5.1.4+8] [5666:4.1+9] [2004:4.1+11] [5666bis:5.6+8] [5666:4.3+10] [2004:4.2+10]
// RDMA_ERROR. Errors are never answered: two ends that misunderstand each other would go on for ever.
Result<Header::Body, HeaderFault> DecodeError(ByteReader& in, const CommonPrefix& fixed,
                                              const ProtocolProfile& profile) {
  const uint32_t code = in.U32();
  if (in.ok() && code == kErrChunkCode) return ErrChunk{};
  if (in.ok() && code == kErrVersCode) {
    ErrVers versions;
    versions.low = in.U32();
    versions.high = in.U32();
    if (in.ok()) return versions;
  }
  // [5666:4.3+11] [2004:4.2+11] Of no meaning.
  if (profile.unknown_errors_have_words) {
    for (int i = 0; i < kErrorExtraWords; ++i) in.U32();
  }
  const auto kind = in.ok() ? HeaderFault::Kind::kUnknownError : HeaderFault::Kind::kTruncatedError;
  return Err(fixed.Fault(kind, FaultAction::kDrop, in));
}

Result<ChunkLists, HeaderFault> DecodeLists(ByteReader& in, const ChunkListLimits& limits, const CommonPrefix& fixed) {
  ChunkLists lists;
  if (const auto error = DecodeChunkLists(in, limits, &lists)) {
    HeaderFault fault = fixed.Fault(HeaderFault::Kind::kChunkList, FaultAction::kAnswerErrChunk, in);
    fault.chunk_list = *error;
    return Err(fault);
  }
  return lists;
}

// [5666bis:5.1.4+1] [5666bis:5.1.4+2] [5666bis:5.1.4+3] [5666bis:5.1.4+4] [2004:3.8+8] [5666bis:5.1.4+5]
// [5666:3.9+2] [5666:4.1#1] [5666:4.1+8] [2004:3.5+2] [2004:4.1#1] [2004:4.1+9] [5666bis:5.6+10] [5666:4.1+6]
// [5666:4.3+5] [2004:4.1+7] [2004:4.2+5] What follows, by the number of the type.
Result<Header::Body, HeaderFault> DecodeBody(ByteReader& in, const ChunkListLimits& limits, const CommonPrefix& fixed,
                                             const ProtocolProfile& profile) {
  switch (fixed.type) {
    case kMsgProc:
      return DecodeLists(in, limits, fixed).map([](ChunkLists lists) {
        return Header::Body(RdmaMsg{std::move(lists)});
      });
    case kNomsgProc:
      return DecodeLists(in, limits, fixed).map([](ChunkLists lists) {
        return Header::Body(RdmaNomsg{std::move(lists)});
      });
    case kMsgpProc: {
      const uint32_t align = in.U32();
      const uint32_t thresh = in.U32();
      // [5666bis:5.7.1+1] Decoded, and made use of by those who look for padding.
      // If these two are cut off, so are the lists, and DecodeLists says it.
      return DecodeLists(in, limits, fixed).map([&](ChunkLists lists) {
        return Header::Body(RdmaMsgp{align, thresh, std::move(lists)});
      });
    }
    case kDoneProc:
      return RdmaDone{};
    case kErrorProc:
      return DecodeError(in, fixed, profile);
  }
  // [5666bis:5.5#4] A decoding error of the header like any other.
  return Err(fixed.Fault(HeaderFault::Kind::kUnknownType, FaultAction::kAnswerErrChunk, in));
}

uint32_t ProcOf(const Header& header) {
  switch (header.type()) {
    case MessageType::kMsg:
      return kMsgProc;
    case MessageType::kNomsg:
      return kNomsgProc;
    case MessageType::kMsgp:
      return kMsgpProc;
    case MessageType::kDone:
      return kDoneProc;
    case MessageType::kError:
      return kErrorProc;
    case MessageType::kConnProp:
    case MessageType::kExtension:
      break;
  }
  STAGECOACH_CHECK(!"a header of version 2");
  return 0;
}

}  // namespace

Result<Header, HeaderFault> DecodeHeaderV1(ByteReader& in, const ChunkListLimits& limits,
                                           const ProtocolProfile& profile) {
  // [5666bis:5.1+1] [5666:4+1] [5666:4.1+1] [2004:4+1] [2004:4.1+1] [5666bis:5.1.1+1] [5666:4.1+2] [2004:4.1+2]
  // [5666bis:5.6+11] [5666:4.3+4] [2004:4.2+4] XID, version, credits, type. [5666bis:5.1#1] Four fixed fields.
  // [5666bis:8.3.3#1] [5666bis:8.3.3#2] Of a message too short to have them nothing is used; it is dropped. The XID is
  // reported all the same, for whoever logs it.
  const Result<CommonPrefix, HeaderFault> prefix = DecodeCommonPrefix(in);
  if (!prefix) return Err(prefix.error());
  const CommonPrefix& fixed = *prefix;
  const bool is_error = fixed.type == kErrorProc;
  if (fixed.version != kRpcRdmaVersion1 && !is_error) {
    // [5666bis:5.1.2#1] [5666:4.1+3] [2004:4.1+4] [5666bis:5.5#2] What follows is laid out as that version says; only
    // the fixed fields are common.
    return Err(fixed.Fault(HeaderFault::Kind::kVersion, FaultAction::kAnswerErrVers, in));
  }
  auto body = DecodeBody(in, limits, fixed, profile);
  if (!body) return Err(body.error());
  if (fixed.version != kRpcRdmaVersion1 && !std::holds_alternative<ErrVers>(*body)) {
    return Err(fixed.Fault(HeaderFault::Kind::kVersion, FaultAction::kDrop, in));
  }
  return Header{.xid = fixed.xid, .version = fixed.version, .credits = fixed.credits, .body = std::move(*body)};
}

void EncodeHeaderV1(const Header& header, ByteWriter& out) {
  // [5666bis:3.1.3+1] [5666:2+3] [2004:2+2] [pvtdata:1+3] The document calls XDR little-endian: by RFC 4506, and at
  // every peer, it is not. [5666bis:5#1] XDR throughout: every field a big-endian multiple of four bytes.
  EncodeCommonPrefix({.xid = header.xid, .version = header.version, .credits = header.credits, .type = ProcOf(header)},
                     out);
  if (const auto* msgp = std::get_if<RdmaMsgp>(&header.body)) {
    out.U32(msgp->align);
    out.U32(msgp->thresh);
  }
  if (const ChunkLists* lists = header.chunks()) {
    EncodeChunkLists(*lists, out);
  } else if (const auto* versions = std::get_if<ErrVers>(&header.body)) {
    out.U32(kErrVersCode);
    out.U32(versions->low);
    out.U32(versions->high);
  } else if (header.type() == MessageType::kError) {
    STAGECOACH_CHECK(std::holds_alternative<ErrChunk>(header.body));
    out.U32(kErrChunkCode);
  }
}

size_t EncodedSizeV1(const Header& header) {
  size_t size = kFixedFieldsSize;
  if (std::holds_alternative<RdmaMsgp>(header.body)) size += kPaddingFieldsSize;
  if (std::holds_alternative<ErrVers>(header.body)) size += 12;
  if (std::holds_alternative<ErrChunk>(header.body)) size += 4;
  if (const ChunkLists* lists = header.chunks()) size += EncodedSize(*lists);
  return size;
}

}  // namespace stagecoach::rpcrdma
