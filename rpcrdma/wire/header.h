// The transport header as a value: what precedes every RPC message on an RPC-over-RDMA connection, of either version.
//
// Whoever works with headers (the validation of chunk lists, the planner, the engines) works with this type; the codecs
// beside it (header_v1.h and header_v2.h) say how it stands on the wire.
//
// Values; thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rpcrdma/wire/chunk_list.h"
#include "rpcrdma/wire/extensions.h"
#include "rpcrdma/wire/properties.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRpcRdmaVersion1 = 1;
inline constexpr uint32_t kRpcRdmaVersion2 = 2;

// The versions that an end speaks: from the lowest to the highest of them, 1 and 2 at most.
struct TransportVersions {
  uint32_t low = kRpcRdmaVersion1;
  uint32_t high = kRpcRdmaVersion1;

  bool contains(uint32_t version) const { return low <= version && version <= high; }
  friend bool operator==(const TransportVersions&, const TransportVersions&) = default;
};
inline constexpr TransportVersions kVersion1Alone{};
inline constexpr TransportVersions kVersion2Alone{kRpcRdmaVersion2, kRpcRdmaVersion2};
inline constexpr TransportVersions kVersions1And2{kRpcRdmaVersion1, kRpcRdmaVersion2};

// What a header is. The codecs know the numbers of a version.
enum class MessageType : uint8_t {
  kMsg,
  kNomsg,
  kMsgp,  // version 1
  kDone,  // version 1
  kError,
  kConnProp,  // version 2
  kExtension  // version 2
};

// RDMA_MSG, RDMA2_MSG: the RPC message follows the header.
struct RdmaMsg {
  ChunkLists chunks;
  // rdma_inv_handle of version 2, in a call: the steering tag, one of those in `chunks`, that the responder may
  // invalidate with its reply; 0: none [v2:3.3+4]. Of no meaning in a reply.
  uint32_t inv_handle = 0;
  friend bool operator==(const RdmaMsg&, const RdmaMsg&) = default;
};
// RDMA_NOMSG, RDMA2_NOMSG: the RPC message travels in the Position-Zero Read chunk or the Reply chunk.
struct RdmaNomsg {
  ChunkLists chunks;
  uint32_t inv_handle = 0;  // as above
  friend bool operator==(const RdmaNomsg&, const RdmaNomsg&) = default;
};
// RDMA_MSGP of version 1, deprecated. By the older documents the message is padded (ProtocolProfile::padding).
struct RdmaMsgp {
  uint32_t align = 0;
  uint32_t thresh = 0;
  ChunkLists chunks;
  friend bool operator==(const RdmaMsgp&, const RdmaMsgp&) = default;
};
// RDMA_DONE of version 1, deprecated. By the older documents: the requester has read what the reply of this XID exposed
// (ProtocolProfile::replies_by_read_chunk).
struct RdmaDone {
  friend bool operator==(const RdmaDone&, const RdmaDone&) = default;
};

// RDMA_ERROR, RDMA2_ERROR: one type for each code.

// The versions the sender supports.
struct ErrVers {
  uint32_t low = kRpcRdmaVersion1;
  uint32_t high = kRpcRdmaVersion1;
  friend bool operator==(const ErrVers&, const ErrVers&) = default;
};
// ERR_CHUNK of version 1.
struct ErrChunk {
  friend bool operator==(const ErrChunk&, const ErrChunk&) = default;
};
// Of version 2, from here on. The header cannot be parsed.
struct ErrBadXdr {
  friend bool operator==(const ErrBadXdr&, const ErrBadXdr&) = default;
};
// Not a header type that the sender knows.
struct ErrInvalHtype {
  friend bool operator==(const ErrInvalHtype&, const ErrInvalHtype&) = default;
};
// More Read chunks than the sender takes; 0: it takes none.
struct ErrReadChunks {
  uint32_t max_chunks = 0;
  friend bool operator==(const ErrReadChunks&, const ErrReadChunks&) = default;
};
// More Write chunks than the sender takes.
struct ErrWriteChunks {
  uint32_t max_chunks = 0;
  friend bool operator==(const ErrWriteChunks&, const ErrWriteChunks&) = default;
};
// A chunk of more segments than the sender takes.
struct ErrSegments {
  uint32_t max_segments = 0;
  friend bool operator==(const ErrSegments&, const ErrSegments&) = default;
};
// A result does not fit its Write chunk.
struct ErrWriteResource {
  uint32_t chunk_index = 0;    // from 1: the first chunk that is too short; 0: not known
  uint32_t length_needed = 0;  // bytes
  friend bool operator==(const ErrWriteResource&, const ErrWriteResource&) = default;
};
// The reply fits neither inline nor the Reply chunk, if there is one.
struct ErrReplyResource {
  uint32_t length_needed = 0;  // bytes
  friend bool operator==(const ErrReplyResource&, const ErrReplyResource&) = default;
};
// Anything else; permanent.
struct ErrSystem {
  friend bool operator==(const ErrSystem&, const ErrSystem&) = default;
};
// A code of no name in the base protocol: an extension's, or nobody's. It says no more than its number [v2:6.4+8]
// [v2:9.3+2].
struct ErrOther {
  uint32_t code = 0;
  friend bool operator==(const ErrOther&, const ErrOther&) = default;
};

// RDMA2_CONNPROP
struct ConnProp {
  PropertySet properties;
  friend bool operator==(const ConnProp&, const ConnProp&) = default;
};

// A header type of an extension (extensions.h).
struct Extension {
  uint32_t type = 0;            // rdma_htype
  std::vector<std::byte> body;  // what the header has behind the prefix
  bool has_message = false;     // whether a whole or partial RPC message follows it
  friend bool operator==(const Extension&, const Extension&) = default;
};

struct Header {
  using Body = std::variant<RdmaMsg, RdmaNomsg, RdmaMsgp, RdmaDone, ErrVers, ErrChunk, ErrBadXdr, ErrInvalHtype,
                            ErrReadChunks, ErrWriteChunks, ErrSegments, ErrWriteResource, ErrReplyResource, ErrSystem,
                            ErrOther, ConnProp, Extension>;

  uint32_t xid = 0;
  // As it stands on the wire. That of an ERR_VERS may be another than that of the layout it came in.
  uint32_t version = kRpcRdmaVersion1;
  uint32_t credits = 0;  // requested in a call, granted in a reply
  // rdma_flags (v2_numbers.h) as it stands on the wire: version 2's layout. nullopt: version 1's layout, which has
  // none.
  std::optional<uint32_t> flags;
  Body body;

  MessageType type() const;
  // The lists, or null for what has none.
  const ChunkLists* chunks() const;
  ChunkLists* mutable_chunks() { return const_cast<ChunkLists*>(std::as_const(*this).chunks()); }
  // rdma_inv_handle; 0 for what has none.
  uint32_t inv_handle() const;
  // Whether an RPC message, or a part of one, follows the header.
  bool has_inline_message() const;
  // Version 2: whether RPCRDMA2_F_RESPONSE is set.
  bool is_response() const;

  friend bool operator==(const Header&, const Header&) = default;
};

// What a header without body takes, for those who plan. Bytes.
struct HeaderLayout {
  uint32_t version = kRpcRdmaVersion1;
  uint32_t prefix_size = 0;        // the fields that all headers have
  uint32_t lists_prefix_size = 0;  // what stands before the chunk lists of RDMA_MSG and RDMA_NOMSG
  bool has_flags = false;

  // Of RDMA_MSG and RDMA_NOMSG with chunk lists of `lists_size` bytes.
  constexpr size_t SizeWith(size_t lists_size) const { return prefix_size + lists_prefix_size + lists_size; }
  // Without chunks.
  constexpr size_t min_size() const { return SizeWith(kEmptyChunkListsSize); }

  friend bool operator==(const HeaderLayout&, const HeaderLayout&) = default;
};

// What the document has a receiver do about a header it cannot use. The answers are a responder's: a requester never
// answers a malformed reply, and where the header says that it is one (version 2's RPCRDMA2_F_RESPONSE), the action is
// none of them.
enum class FaultAction : uint8_t {
  kDrop,              // not even the fixed fields are there, or answering would answer an error with an error
  kAnswerErrVers,     // another version
  kAnswerErrChunk,    // version 1
  kAnswerBadXdr,      // version 2
  kAnswerInvalHtype,  // version 2
  kDisconnect  // version 2: malformed properties that this end may not answer. No codec says it: ConnectionTerms does
};

struct HeaderFault {
  enum class Kind : uint8_t {
    kTooShort,        // fewer than the fixed fields; `xid` may still be known, and must not be used in an answer
    kVersion,         // not the version of the codec
    kUnknownType,     // no header type of this version
    kChunkList,       // `chunk_list` says how
    kUnknownError,    // version 1: RDMA_ERROR with an error code that is neither ERR_VERS nor ERR_CHUNK
    kTruncatedError,  // an error without its error information
    kProperties,      // `property` says how
    kFlag,            // a flag of an extension that must not be, or must be, in this type of header
    kExtension,       // the header of an extension that it cannot parse
    kTrailingBytes    // bytes behind a header that is a whole message
  };
  Kind kind = Kind::kTooShort;
  FaultAction action = FaultAction::kDrop;
  std::optional<uint32_t> xid;
  uint32_t version = 0;                  // as received, when at least eight bytes were there
  uint32_t expected = kRpcRdmaVersion1;  // the version of the codec
  std::optional<uint32_t> type;          // as received
  std::optional<uint32_t> flags;         // as received; version 2
  ChunkListError chunk_list = ChunkListError::kTruncated;
  PropertyFault property;
  size_t offset = 0;  // bytes from the start of the header, where decoding stopped
};
std::string ToString(const HeaderFault& fault);

// As the document of `version` writes it: "RDMA_MSG", "RDMA2_MSG".
const char* ToString(MessageType type, uint32_t version = kRpcRdmaVersion1);
// "RDMA_MSG xid 876de715 credits 128 no chunks", "RDMA2_CONNPROP xid 00000000 credits 32 flags RESPONSE receive buffer
// size 4096, reverse requests inline": one line.
std::string ToString(const Header& header, const Extensions& extensions = {});
// "ERR_VERS (1 to 2 supported)", "ERR_WRITE_RESOURCE (chunk 2 needs 4096 bytes)"; empty for what is no error.
std::string ErrorText(const Header::Body& body, const Extensions& extensions = {});
// "RESPONSE", "0", "RESPONSE 0x80000000".
std::string FlagsText(uint32_t flags, const Extensions& extensions = {});

}  // namespace stagecoach::rpcrdma
