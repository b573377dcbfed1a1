#include "rpcrdma/wire/header.h"

#include <array>
#include <bit>
#include <cstdio>
#include <string_view>

#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

std::string Hex(uint32_t value) {
  std::array<char, 9> text;
  std::snprintf(text.data(), text.size(), "%08x", value);
  return text.data();
}

std::string Number(uint64_t value) {
  return std::to_string(value);
}

// For std::visit: one function for each alternative, or for all that convert.
template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

std::string Fields(const Extension& extension, const Extensions& extensions) {
  const HeaderTypeRow* row = extensions.FindHeaderType(extension.type);
  const std::string name = row != nullptr ? row->name : "header type " + Number(extension.type);
  if (row != nullptr && row->text != nullptr) return name + " " + row->text(extension.body);
  return name + " [" + ToHex(extension.body) + "]";
}

std::string VersionFaultText(const HeaderFault& fault) {
  return "RPC-over-RDMA version " + Number(fault.version) + " instead of " + Number(fault.expected);
}

}  // namespace

MessageType Header::type() const {
  return std::visit(Overloaded{
                        [](const RdmaMsg&) { return MessageType::kMsg; },
                        [](const RdmaNomsg&) { return MessageType::kNomsg; },
                        [](const RdmaMsgp&) { return MessageType::kMsgp; },
                        [](const RdmaDone&) { return MessageType::kDone; },
                        [](const ConnProp&) { return MessageType::kConnProp; },
                        [](const Extension&) { return MessageType::kExtension; },
                        [](const auto&) { return MessageType::kError; },
                    },
                    body);
}

const ChunkLists* Header::chunks() const {
  if (const auto* msg = std::get_if<RdmaMsg>(&body)) return &msg->chunks;
  if (const auto* nomsg = std::get_if<RdmaNomsg>(&body)) return &nomsg->chunks;
  if (const auto* msgp = std::get_if<RdmaMsgp>(&body)) return &msgp->chunks;
  return nullptr;
}

uint32_t Header::inv_handle() const {
  if (const auto* msg = std::get_if<RdmaMsg>(&body)) return msg->inv_handle;
  if (const auto* nomsg = std::get_if<RdmaNomsg>(&body)) return nomsg->inv_handle;
  return 0;
}

bool Header::has_inline_message() const {
  if (const auto* extension = std::get_if<Extension>(&body)) return extension->has_message;
  return std::holds_alternative<RdmaMsg>(body) || std::holds_alternative<RdmaMsgp>(body);
}

bool Header::is_response() const {
  return (flags.value_or(0) & kFlagResponse) != 0;
}

const char* ToString(MessageType type, uint32_t version) {
  const bool second = version == kRpcRdmaVersion2;
  switch (type) {
    case MessageType::kMsg:
      return second ? "RDMA2_MSG" : "RDMA_MSG";
    case MessageType::kNomsg:
      return second ? "RDMA2_NOMSG" : "RDMA_NOMSG";
    case MessageType::kMsgp:
      return "RDMA_MSGP";
    case MessageType::kDone:
      return "RDMA_DONE";
    case MessageType::kError:
      return second ? "RDMA2_ERROR" : "RDMA_ERROR";
    case MessageType::kConnProp:
      return "RDMA2_CONNPROP";
    case MessageType::kExtension:
      return "extension";
  }
  return "unknown message type";
}

std::string ErrorText(const Header::Body& body, const Extensions& extensions) {
  return std::visit(
      Overloaded{
          [](const ErrVers& e) { return "ERR_VERS (" + Number(e.low) + " to " + Number(e.high) + " supported)"; },
          [](const ErrChunk&) { return std::string("ERR_CHUNK"); },
          [](const ErrBadXdr&) { return std::string("ERR_BAD_XDR"); },
          [](const ErrInvalHtype&) { return std::string("ERR_INVAL_HTYPE"); },
          [](const ErrReadChunks& e) { return "ERR_READ_CHUNKS (at most " + Number(e.max_chunks) + ")"; },
          [](const ErrWriteChunks& e) { return "ERR_WRITE_CHUNKS (at most " + Number(e.max_chunks) + ")"; },
          [](const ErrSegments& e) { return "ERR_SEGMENTS (at most " + Number(e.max_segments) + " in a chunk)"; },
          [](const ErrWriteResource& e) {
            const std::string chunk = e.chunk_index == 0 ? "a chunk" : "chunk " + Number(e.chunk_index);
            return "ERR_WRITE_RESOURCE (" + chunk + " needs " + Number(e.length_needed) + " bytes)";
          },
          [](const ErrReplyResource& e) { return "ERR_REPLY_RESOURCE (" + Number(e.length_needed) + " bytes needed)"; },
          [](const ErrSystem&) { return std::string("ERR_SYSTEM"); },
          [&](const ErrOther& e) {
            const ErrorRow* row = extensions.FindError(e.code);
            return row != nullptr ? row->name : "error code " + Number(e.code);
          },
          [](const auto&) { return std::string(); },
      },
      body);
}

std::string FlagsText(uint32_t flags, const Extensions& extensions) {
  if (flags == 0) return "0";
  std::string text;
  for (uint32_t left = flags; left != 0;) {
    const uint32_t flag = uint32_t{1} << std::countr_zero(left);
    left &= ~flag;
    if (!text.empty()) text += ' ';
    const FlagRow* row = extensions.FindFlag(flag);
    if (flag == kFlagResponse) {
      text += "RESPONSE";
    } else {
      text += row != nullptr ? row->name : "0x" + Hex(flag);
    }
  }
  return text;
}

std::string ToString(const Header& header, const Extensions& extensions) {
  const uint32_t layout = header.flags.has_value() ? kRpcRdmaVersion2 : kRpcRdmaVersion1;
  const auto* extension = std::get_if<Extension>(&header.body);
  std::string text = extension != nullptr ? "RDMA2" : ToString(header.type(), layout);
  text += " xid " + Hex(header.xid);
  if (header.version != layout) text += " version " + Number(header.version);
  text += " credits " + Number(header.credits);
  if (header.flags.has_value()) text += " flags " + FlagsText(*header.flags, extensions);
  if (header.inv_handle() != 0) text += " inv_handle 0x" + Hex(header.inv_handle());
  if (const auto* msgp = std::get_if<RdmaMsgp>(&header.body)) {
    text += " align " + Number(msgp->align) + " thresh " + Number(msgp->thresh);
  }
  if (const ChunkLists* lists = header.chunks()) text += " " + ToString(*lists);
  if (const std::string error = ErrorText(header.body, extensions); !error.empty()) text += " " + error;
  if (const auto* connprop = std::get_if<ConnProp>(&header.body)) {
    text += " " + ToString(connprop->properties, extensions);
  }
  if (extension != nullptr) text += " " + Fields(*extension, extensions);
  return text;
}

std::string ToString(const HeaderFault& fault) {
  const std::string where =
      (fault.xid.has_value() ? " xid " + Hex(*fault.xid) : "") + " at byte " + std::to_string(fault.offset);
  const std::string error = fault.flags.has_value() ? "RDMA2_ERROR" : "RDMA_ERROR";
  switch (fault.kind) {
    case HeaderFault::Kind::kTooShort:
      return "message of " + Number(fault.offset) + " bytes is too short for a transport header";
    case HeaderFault::Kind::kVersion:
      return VersionFaultText(fault) + where;
    case HeaderFault::Kind::kUnknownType:
      return "unknown message type" + where;
    case HeaderFault::Kind::kChunkList:
      return std::string(ToString(fault.chunk_list)) + where;
    case HeaderFault::Kind::kUnknownError:
      return error + " with an unknown error code" + where;
    case HeaderFault::Kind::kTruncatedError:
      return error + " without its error information" + where;
    case HeaderFault::Kind::kProperties:
      return ToString(fault.property) + where;
    case HeaderFault::Kind::kFlag:
      return "flags " + FlagsText(fault.flags.value_or(0)) + " do not belong to this type of header" + where;
    case HeaderFault::Kind::kExtension:
      return "header of an extension cannot be parsed" + where;
    case HeaderFault::Kind::kTrailingBytes:
      return "bytes behind a header that is a whole message" + where;
  }
  return "unknown fault" + where;
}

}  // namespace stagecoach::rpcrdma
