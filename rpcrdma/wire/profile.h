// Which document of RPC-over-RDMA version 1 an end follows, as data.
//
// Three documents describe version 1: the draft of 2004, RFC 5666, and the draft that became RFC 8166. Their headers
// have the same version number and the same types, and nothing on the wire says which of them an end was written from.
// So each end is told. What the documents disagree in is a field here and a row of its values for each document; code
// asks the field, and nobody asks for the document.
//
// docs/profiles.md has the rows as a table, and what comes of it when the two ends differ.
//
// Values; thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace stagecoach::rpcrdma {

// Where the position that the padding of RDMA_MSGP is reckoned from begins: the documents say "the current XDR stream
// position" and no more.
enum class PaddingBase : uint8_t {
  kSend,     // with the transport header: what is padded is aligned in the receive buffer, which padding is for
  kMessage,  // with the RPC message
};

struct ProtocolProfile {
  std::string_view name;  // a literal
  // A responder returns what neither fits inline nor any chunk that it was offered as Read chunks of its own memory;
  // the requester reads it, and says by RDMA_DONE that the memory may go ("Read-Read": [2004:3.6#1], [5666:3.5#1]).
  // Without it replies have no Read list, such a reply is ERR_CHUNK [5666bis:5.5#6], and RDMA_DONE is dropped
  // [5666bis:5.7.2#1].
  bool replies_by_read_chunk = false;
  // A Reply chunk is for replies too long to go inline [5666:5.2#1] [5666:5.2+3] [2004:5.2+4]. Otherwise it is used
  // whenever it was offered [5666bis:4.6.3#4].
  bool reply_chunk_when_needed = false;
  // The lengths of a returned Write chunk count round-up, which is not written (RFC 5666 section 3.7).
  bool written_lengths_count_round_up = false;
  // An entry of a Read list that begins where the data before it ends belongs to the same chunk: data may be cut
  // without repeating its position, and round-up may be an entry of its own [5666:3.7#2] [5666:3.7+3] [2004:3.4+9].
  // Otherwise it is a chunk, which stands at a multiple of four [5666bis:4.4.4.1#4].
  bool read_entries_join = false;
  // Round-up of data that went by Read chunk may have stayed in the message [5666:3.7+6].
  bool round_up_may_stay = false;
  // Any item may have come by Read chunk, whatever a Binding says, and a chunk may hold several items [5666:3.4#1]
  // [2004:3.4+5].
  bool any_item_by_chunk = false;
  // A grant may be zero while calls of the requester are in progress [2004:3.3#3] [5666:3.3#2]. Otherwise it never is
  // [5666bis:4.3#2].
  bool zero_grants = false;
  // The XID of the transport header prevails over that of the message [2004:4.1+3]. Otherwise they must agree
  // [5666:4.1#8] [5666bis:5.1.1#1].
  bool header_xid_prevails = false;
  // RDMA_ERROR with a code that the document does not know has eight words that say no more.
  bool unknown_errors_have_words = false;
  // The padding of RDMA_MSGP is skipped [5666:3.9#1]. Otherwise it is taken as RDMA_MSG [5666bis:5.7.1#2].
  bool padding = false;
  // Items as long as the threshold are padded, which one sentence says; by another, only longer ones are.
  bool padding_at_threshold = true;
  PaddingBase padding_base = PaddingBase::kSend;
  // Connections are made with private data (RFC 8797): inline thresholds, and remote invalidation. Otherwise nothing is
  // said and nothing is looked for: what holds is what holds with a peer that says nothing.
  bool private_data = false;
  // Servers may call their clients on the same connection (5666bis section 8).
  bool reverse_direction = false;

  friend bool operator==(const ProtocolProfile&, const ProtocolProfile&) = default;
};

// draft-ietf-nfsv4-rpcrdma-00.
inline constexpr ProtocolProfile kDraft2004 = {
    .name = "draft-2004",
    .replies_by_read_chunk = true,
    .reply_chunk_when_needed = true,
    .read_entries_join = true,
    .round_up_may_stay = true,
    .any_item_by_chunk = true,
    .zero_grants = true,
    .header_xid_prevails = true,
    .unknown_errors_have_words = true,
    .padding = true,
};

// RFC 5666.
inline constexpr ProtocolProfile kRfc5666 = {
    .name = "rfc5666",
    .replies_by_read_chunk = true,
    .reply_chunk_when_needed = true,
    .written_lengths_count_round_up = true,
    .read_entries_join = true,
    .round_up_may_stay = true,
    .any_item_by_chunk = true,
    .zero_grants = true,
    .unknown_errors_have_words = true,
    .padding = true,
};

// draft-ietf-nfsv4-rfc5666bis-01, RFC 8166 and RFC 8167: what ends follow that are told nothing else.
inline constexpr ProtocolProfile kRfc5666bis = {
    .name = "rfc5666bis",
    .private_data = true,
    .reverse_direction = true,
};

// In the order of their publication.
std::span<const ProtocolProfile> AllProfiles();
// Null when there is none of that name.
const ProtocolProfile* FindProfile(std::string_view name);

}  // namespace stagecoach::rpcrdma
