// The transport header as a value: what precedes every RPC message on an RPC-over-RDMA connection.
//
// Whoever works with headers (the validation of chunk lists, the planner, the engines) works with this type; the codecs
// beside it (header_v1.h) say how it stands on the wire.
//
// Values; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "rpcrdma/wire/chunk_list.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRpcRdmaVersion1 = 1;

enum class MessageType : uint32_t { kMsg = 0, kNomsg = 1, kMsgp = 2, kDone = 3, kError = 4 };

// RDMA_MSG: the RPC message follows the header.
struct RdmaMsg {
  ChunkLists chunks;
  friend bool operator==(const RdmaMsg&, const RdmaMsg&) = default;
};
// RDMA_NOMSG: the RPC message travels in the Position-Zero Read chunk or the Reply chunk.
struct RdmaNomsg {
  ChunkLists chunks;
  friend bool operator==(const RdmaNomsg&, const RdmaNomsg&) = default;
};
// RDMA_MSGP, deprecated.
struct RdmaMsgp {
  uint32_t align = 0;
  uint32_t thresh = 0;
  ChunkLists chunks;
  friend bool operator==(const RdmaMsgp&, const RdmaMsgp&) = default;
};
// RDMA_DONE, deprecated.
struct RdmaDone {
  friend bool operator==(const RdmaDone&, const RdmaDone&) = default;
};
// RDMA_ERROR / ERR_VERS with the versions the sender supports.
struct ErrVers {
  uint32_t low = kRpcRdmaVersion1;
  uint32_t high = kRpcRdmaVersion1;
  friend bool operator==(const ErrVers&, const ErrVers&) = default;
};
// RDMA_ERROR / ERR_CHUNK.
struct ErrChunk {
  friend bool operator==(const ErrChunk&, const ErrChunk&) = default;
};

struct Header {
  using Body = std::variant<RdmaMsg, RdmaNomsg, RdmaMsgp, RdmaDone, ErrVers, ErrChunk>;

  uint32_t xid = 0;
  uint32_t version = kRpcRdmaVersion1;  // as it stands on the wire
  uint32_t credits = 0;                 // requested in a call, granted in a reply
  Body body;

  MessageType type() const;
  // The lists, or null for RDMA_DONE and RDMA_ERROR.
  const ChunkLists* chunks() const;
  // Whether an RPC message follows the header (RDMA_MSG and RDMA_MSGP).
  bool has_inline_message() const;

  friend bool operator==(const Header&, const Header&) = default;
};

// What a responder does about a header it cannot use. A requester never answers a malformed reply.
enum class FaultAction : uint8_t {
  kDrop,           // not even the fixed fields are there, or answering would answer an error with an error
  kAnswerErrVers,  // another version
  kAnswerErrChunk
};

struct HeaderFault {
  enum class Kind : uint8_t {
    kTooShort,       // fewer than the fixed fields; `xid` may still be known, and must not be used in an answer
    kVersion,        // not the version of the codec
    kUnknownType,    // no message type of this version
    kChunkList,      // `chunk_list` says how
    kUnknownError,   // RDMA_ERROR with an error code that is neither ERR_VERS nor ERR_CHUNK
    kTruncatedError  // RDMA_ERROR without its error information
  };
  Kind kind = Kind::kTooShort;
  FaultAction action = FaultAction::kDrop;
  std::optional<uint32_t> xid;
  uint32_t version = 0;  // as received, when at least eight bytes were there
  ChunkListError chunk_list = ChunkListError::kTruncated;
  size_t offset = 0;  // bytes from the start of the header, where decoding stopped
};
std::string ToString(const HeaderFault& fault);

const char* ToString(MessageType type);
// "RDMA_MSG xid 876de715 credits 128 no chunks", one line.
std::string ToString(const Header& header);

}  // namespace stagecoach::rpcrdma
