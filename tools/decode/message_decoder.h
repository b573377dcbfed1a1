// Messages of one RPC-over-RDMA connection, in the order in which they were sent: each is decoded by itself, and judged
// beside those before it.
//
// Judged across messages: the lists of a reply beside those of its call; credits beside what is in progress; the
// version of a connection; the inline thresholds of CM private data and of properties. Of chunks it says what the
// engines say (rpcrdma/wire/validate.h), but for their limits on bytes. Not judged: what would take the contents of
// chunks, upper-layer bindings, and the number of messages beside the number of credits.
//
// Bounded: remembered are the last kCallsMax calls of each direction that have no reply yet, and of each what it
// offers, up to kOfferedMax segments. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/properties.h"
#include "tools/decode/field.h"
#include "tools/decode/header_walk.h"
#include "tools/decode/rpc_walk.h"
#include "tools/decode/terms.h"

namespace stagecoach::decode {

// Which end of a connection: the one that asked for it is the client.
enum class End : uint8_t { kClient, kServer, kUnknown };

struct DecodedMessage {
  std::string summary;  // "RDMA_MSG, version 1: call 0xc92e9866, NFS 3 NULL"
  std::vector<Field> fields;
  // Of a transport header: the codecs would take it. Of private data: it is there.
  bool well_formed = false;
  size_t header_size = 0;
  // Of a transport header: what it says, and by which version it is laid out (an ERR_VERS may name another).
  uint32_t version = 0;
  uint32_t layout = 0;
  std::optional<bool> reply;  // whether it is a reply; empty: neither that nor a call, or not known

  bool illegal() const { return HasIllegal(fields); }
};

class MessageDecoder {
 public:
  static constexpr size_t kCallsMax = 256;
  static constexpr size_t kOfferedMax = 64;

  // `profile`, one of rpcrdma::AllProfiles(), judges version 1.
  explicit MessageDecoder(const rpcrdma::ProtocolProfile& profile) : version1_(TermsOf(profile)) {}

  // The connection is seen from its beginning. Without this nothing is judged by what was not seen.
  void OnBeginning() { from_beginning_ = true; }

  // Something that an end sent may have been missed.
  void OnGap() { from_beginning_ = false; }

  // A whole message, sent by `sender`.
  DecodedMessage OnMessage(End sender, ConstBytes message);

  // What `sender` gave its connection manager for the other end; nullopt when there is no private data of RPC-over-RDMA
  // in it.
  std::optional<DecodedMessage> OnPrivateData(End sender, ConstBytes bytes);

 private:
  struct Call {
    uint64_t number = 0;                         // in the order of arrival; a XID may be used again
    std::optional<rpcrdma::ChunkLists> offered;  // empty: too much to be remembered
    std::optional<Procedure> procedure;
  };
  struct Calls {
    std::unordered_map<uint32_t, Call> by_xid;
    std::deque<std::pair<uint32_t, uint64_t>> order;
    uint64_t next = 0;
  };
  enum class Role : uint8_t { kUnknown, kCall, kReply };

  const Call* FindCall(End replier, uint32_t xid) const;
  void Remember(End sender, uint32_t xid, Call call);
  void Forget(End replier, uint32_t xid);
  Role RoleOfNomsg(End sender, const SeenHeader& header) const;
  void JudgeFlags(Walker& walker, const SeenHeader& header, const SeenRpc& rpc) const;
  void JudgeCredits(Walker& walker, End sender, const SeenHeader& header, Role role) const;
  void JudgeVersion(Walker& walker, End sender, const SeenHeader& header, Role role);
  void JudgeSize(Walker& walker, End sender, const SeenHeader& header, size_t size) const;
  void JudgeReads(Walker& walker, const SeenHeader& header, Role role, size_t inline_size) const;
  void TakeProperties(End sender, const SeenHeader& header);
  void JudgeLong(Walker& walker, const SeenHeader& header, Role role) const;
  void JudgeCall(Walker& walker, End sender, const SeenHeader& header) const;
  void JudgeReply(Walker& walker, End sender, const SeenHeader& header, const Call* call) const;

  const Terms& version1_;
  bool from_beginning_ = false;
  std::array<Calls, 3> calls_;  // by who sent them
  // By End: what each said when the connection was made; inner nullopt: nothing of RPC-over-RDMA.
  std::array<std::optional<std::optional<rpcrdma::PrivateData>>, 2> private_data_;
  std::array<std::optional<uint32_t>, 2> receive_buffer_size_;  // version 2
  std::optional<uint32_t> version_;                             // that a server has answered in, but for errors
};

}  // namespace stagecoach::decode
