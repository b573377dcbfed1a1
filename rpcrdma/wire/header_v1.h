// The version 1 transport header: what precedes every RPC message on an RPC-over-RDMA connection.
//
// draft-ietf-nfsv4-rfc5666bis-01 (RFC 8166) sections 5.1 to 5.7; XDR in 5.6. All five message types, the two deprecated
// ones included: they are decoded so that a receiver can treat them as told, and encoded for tests and tools.
//
// The codec is strict about structure and bounded; it never fails on values that are merely unwise. Whether chunk lists
// make sense for a call or a reply is judged by wire/validate.h over the decoded value.
//
// Pure functions over values; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/chunk_list.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRpcRdmaVersion1 = 1;

// rpcrdma1_proc
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
// RDMA_MSGP, deprecated: receivers treat it as RDMA_MSG [5666bis:5.7.1#2]; we never send it [5666bis:5.7.1#1].
struct RdmaMsgp {
  uint32_t align = 0;
  uint32_t thresh = 0;
  ChunkLists chunks;
  friend bool operator==(const RdmaMsgp&, const RdmaMsgp&) = default;
};
// RDMA_DONE, deprecated: receivers drop it [5666bis:5.7.2#1].
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

struct HeaderV1 {
  using Body = std::variant<RdmaMsg, RdmaNomsg, RdmaMsgp, RdmaDone, ErrVers, ErrChunk>;

  uint32_t xid = 0;
  // 1, but for a received ERR_VERS: Linux echoes the version it refuses, and what an error says about versions must
  // stay readable to all versions [5666bis:9.1#1] [5666:4.1#6] [2004:4.1#4].
  uint32_t version = kRpcRdmaVersion1;
  uint32_t credits = 0;  // requested in a call, granted in a reply
  Body body;

  MessageType type() const;
  // The lists, or null for RDMA_DONE and RDMA_ERROR.
  const ChunkLists* chunks() const;
  // Whether an RPC message follows the header (RDMA_MSG and RDMA_MSGP).
  bool has_inline_message() const;

  friend bool operator==(const HeaderV1&, const HeaderV1&) = default;
};

// What a responder does about a header it cannot use. A requester never answers a malformed reply.
enum class FaultAction : uint8_t {
  kDrop,           // not even the fixed fields are there, or answering would answer an error with an error
  kAnswerErrVers,  // [5666bis:5.5#2] another version
  kAnswerErrChunk  // [5666bis:5.5#4]
};

struct HeaderFault {
  enum class Kind : uint8_t {
    kTooShort,       // fewer than the four fixed fields; `xid` may still be known, and must not be used in an answer
    kVersion,        // not version 1
    kUnknownType,    // not one of the five message types
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

// Size in bytes of a header without chunks: RDMA_MSG and RDMA_NOMSG.
inline constexpr size_t kFixedFieldsSize = 16;
inline constexpr size_t kMinHeaderSize = kFixedFieldsSize + kEmptyChunkListsSize;

// Decodes a header; `in` then stands at the RPC message, if one follows.
Result<HeaderV1, HeaderFault> DecodeHeaderV1(ByteReader& in, const ChunkListLimits& limits = {});

// `out` fails when it is too small for EncodedSize().
void EncodeHeaderV1(const HeaderV1& header, ByteWriter& out);
size_t EncodedSize(const HeaderV1& header);

const char* ToString(MessageType type);
// "RDMA_MSG xid 876de715 credits 128 no chunks", one line.
std::string ToString(const HeaderV1& header);

}  // namespace stagecoach::rpcrdma
