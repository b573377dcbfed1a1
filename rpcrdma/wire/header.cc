#include "rpcrdma/wire/header.h"

#include <array>
#include <cstdio>

namespace stagecoach::rpcrdma {
namespace {

std::string Hex(uint32_t value) {
  std::array<char, 9> text;
  std::snprintf(text.data(), text.size(), "%08x", value);
  return text.data();
}

}  // namespace

MessageType Header::type() const {
  static constexpr std::array kTypes = {MessageType::kMsg,  MessageType::kNomsg, MessageType::kMsgp,
                                        MessageType::kDone, MessageType::kError, MessageType::kError};
  static_assert(kTypes.size() == std::variant_size_v<Body>);
  return kTypes[body.index()];
}

const ChunkLists* Header::chunks() const {
  if (const auto* msg = std::get_if<RdmaMsg>(&body)) return &msg->chunks;
  if (const auto* nomsg = std::get_if<RdmaNomsg>(&body)) return &nomsg->chunks;
  if (const auto* msgp = std::get_if<RdmaMsgp>(&body)) return &msgp->chunks;
  return nullptr;
}

bool Header::has_inline_message() const {
  return std::holds_alternative<RdmaMsg>(body) || std::holds_alternative<RdmaMsgp>(body);
}

const char* ToString(MessageType type) {
  switch (type) {
    case MessageType::kMsg:
      return "RDMA_MSG";
    case MessageType::kNomsg:
      return "RDMA_NOMSG";
    case MessageType::kMsgp:
      return "RDMA_MSGP";
    case MessageType::kDone:
      return "RDMA_DONE";
    case MessageType::kError:
      return "RDMA_ERROR";
  }
  return "unknown message type";
}

std::string ToString(const Header& header) {
  std::string text = std::string(ToString(header.type())) + " xid " + Hex(header.xid);
  if (header.version != kRpcRdmaVersion1) text += " version " + std::to_string(header.version);
  text += " credits " + std::to_string(header.credits);
  if (const auto* versions = std::get_if<ErrVers>(&header.body)) {
    return text + " ERR_VERS (" + std::to_string(versions->low) + " to " + std::to_string(versions->high) +
           " supported)";
  }
  if (std::holds_alternative<ErrChunk>(header.body)) return text + " ERR_CHUNK";
  if (const auto* msgp = std::get_if<RdmaMsgp>(&header.body)) {
    text += " align " + std::to_string(msgp->align) + " thresh " + std::to_string(msgp->thresh);
  }
  if (const ChunkLists* lists = header.chunks()) text += " " + ToString(*lists);
  return text;
}

std::string ToString(const HeaderFault& fault) {
  const std::string where =
      (fault.xid.has_value() ? " xid " + Hex(*fault.xid) : "") + " at byte " + std::to_string(fault.offset);
  switch (fault.kind) {
    case HeaderFault::Kind::kTooShort:
      return "message of " + std::to_string(fault.offset) + " bytes is too short for a transport header";
    case HeaderFault::Kind::kVersion:
      return "RPC-over-RDMA version " + std::to_string(fault.version) + " instead of 1" + where;
    case HeaderFault::Kind::kUnknownType:
      return "unknown message type" + where;
    case HeaderFault::Kind::kChunkList:
      return std::string(ToString(fault.chunk_list)) + where;
    case HeaderFault::Kind::kUnknownError:
      return "RDMA_ERROR with an unknown error code" + where;
    case HeaderFault::Kind::kTruncatedError:
      return "RDMA_ERROR without its error information" + where;
  }
  return "unknown fault" + where;
}

}  // namespace stagecoach::rpcrdma
