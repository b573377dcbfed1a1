// ReplayCache: the duplicate request cache of a server. A call that comes again, from a client that lost its connection
// before it saw the reply, is answered and not executed a second time.
//
// A record begins when a call is handed to its service and has two ages. While the call is in progress it remembers
// where the answer is to go: to the newest of the calls that are the same (Joined). Once answered it keeps the body of
// the reply, an RPC message and its eligible items, and never framing: the next one brings chunks of its own and its
// reply is planned anew.
//
// Which calls are the same: XID, program, version, procedure, the client's identity, and a digest of credential and
// arguments (DigestCall). The port a client connects from is no part of it.
//
// Bounds. Records of answered calls count against their client and against all, in records and in bytes; what is too
// much goes by least recent use. Over a client's bound its own records go; over the whole's those of the client that
// holds most of what there is too much of. So no client loses records to others while it holds less than the largest
// does, and those who fill the cache push out their own. A record unused for `age_max` goes when the cache is next
// used: time alone frees nothing, and the bounds hold all the same. Records of calls in progress are bounded by whoever
// executes them, and are never removed: a call is not executed twice because the cache is full.
//
// A reply longer than `reply_bytes_max` is not kept, its record is: the call is not executed again, and the second one
// is told that the reply is gone (Unanswerable). Services declare what may be executed twice, READ for example, and the
// cache never hears of that.
//
// Sans-IO. Not thread-safe.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/bytes.h"
#include "base/time.h"
#include "base/trace.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

struct ReplayLimits {
  // Records of answered calls, of all clients; 0 switches the cache off.
  size_t entries_max = 8192;
  size_t client_entries_max = 1024;
  // Bytes of memory, kept replies and what a record costs beside them.
  uint64_t bytes_max = 32u << 20;
  uint64_t client_bytes_max = 4u << 20;
  // Bytes of the largest reply that is kept, eligible items included.
  uint64_t reply_bytes_max = 64u << 10;
  // Since a record was last of use.
  Duration age_max = 120s;
};

struct ReplayStats {
  uint64_t recorded = 0;      // calls that were executed under a record
  uint64_t joined = 0;        // that came again while they were in progress
  uint64_t replayed = 0;      // answered from a record
  uint64_t unanswerable = 0;  // that came again after a reply too long to keep
  uint64_t not_kept = 0;      // replies too long to keep
  uint64_t evicted = 0;       // records that went for room
  uint64_t expired = 0;       // and for age
  // Now.
  uint64_t in_progress = 0;
  uint64_t entries = 0;  // of answered calls
  uint64_t bytes = 0;
};

// What tells a call from another one with its XID.
struct CallDigest {
  uint64_t length = 0;    // of the arguments, data that came by chunk and all round-up included
  uint32_t checksum = 0;  // CRC32c of the credential and the first bytes of the arguments

  friend auto operator<=>(const CallDigest&, const CallDigest&) = default;
};
// Bytes of arguments that DigestCall reads.
inline constexpr size_t kDigestBytes = 1024;
// `arguments_at` is where the call header ends. Which items travelled by chunk makes no difference: it may change with
// the connection. The credential of RPCSEC_GSS is left out, as its sequence number changes (RFC 2203 section 5.3.3.1).
CallDigest DigestCall(const CallHeader& header, const ReducedStream& stream, size_t arguments_at);

// The body of a reply. `items` are views of `data`.
struct ReplyBody {
  ReplyBody(ConstBytes message_bytes, const EligibleItems& eligible);
  ReplyBody(const ReplyBody&) = delete;
  ReplyBody& operator=(const ReplyBody&) = delete;

  std::vector<std::byte> message;  // without its eligible items
  std::vector<std::byte> data;
  EligibleItems items;
};

class ReplayCache {
 public:
  // Where a reply can go; the cache only compares it.
  struct Place {
    uint64_t connection = 0;
    uint64_t request = 0;
    friend bool operator==(const Place&, const Place&) = default;
  };
  struct Key {
    std::string client;
    uint32_t xid = 0;
    uint32_t program = 0;
    uint32_t version = 0;
    uint32_t procedure = 0;
    CallDigest digest;
  };
  class Record;

  // Execute it and end the record with OnReply.
  struct Fresh {
    Record* record = nullptr;  // valid until OnReply
  };
  // It is being executed; the reply will go to this call. `dropped` is another one that came after the first: it will
  // not be answered.
  struct Joined {
    std::optional<Place> dropped;
  };
  struct Replay {
    std::shared_ptr<const ReplyBody> reply;
  };
  struct Unanswerable {};
  using Verdict = std::variant<Fresh, Joined, Replay, Unanswerable>;

  ReplayCache(const ReplayLimits& limits, TraceSink* trace, std::string name);
  ~ReplayCache();
  ReplayCache(const ReplayCache&) = delete;
  ReplayCache& operator=(const ReplayCache&) = delete;

  bool enabled() const { return limits_.entries_max > 0; }
  Verdict OnCall(const Key& key, Place place, Instant now);

  // Where the reply of a call in progress is to go.
  Place place(const Record* record) const;
  // Whether a reply of so many bytes, items included, is kept.
  bool Keeps(uint64_t bytes) const { return bytes <= limits_.reply_bytes_max; }
  // The call was answered; null for a reply that is not kept. Ends the life of `record` as a handle.
  void OnReply(Record* record, std::shared_ptr<const ReplyBody> reply, Instant now);

  ReplayStats stats() const;

 private:
  struct Client;
  struct CallKey {
    uint32_t xid, program, version, procedure;
    CallDigest digest;
    friend auto operator<=>(const CallKey&, const CallKey&) = default;
  };
  using Amounts = std::set<std::pair<uint64_t, uint64_t>>;  // what a client holds, and its number

  void Use(Record* record, Instant now);
  void Remove(Record* record);
  void Evict(Record* record, Instant now, const char* why);
  void MakeRoom(Client* client, Instant now);
  void Expire(Instant now);
  void Count(Client* client, bool add);
  Client* Largest(const Amounts& amounts);

  const ReplayLimits limits_;
  TraceSink* const trace_;
  const std::string name_;
  std::map<std::string, std::unique_ptr<Client>, std::less<>> clients_;  // those with records
  std::map<uint64_t, Client*> clients_by_number_;
  uint64_t next_client_ = 1;
  std::list<Record*> by_use_;  // of answered calls, the least recently used first
  Amounts by_entries_;
  Amounts by_bytes_;
  uint64_t bytes_ = 0;
  uint64_t in_progress_ = 0;
  ReplayStats stats_;
};

}  // namespace stagecoach::rpcrdma
