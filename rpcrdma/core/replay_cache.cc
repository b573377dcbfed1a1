#include "rpcrdma/core/replay_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/mark.h"
#include "base/mutant.h"

namespace stagecoach::rpcrdma {
namespace {

// What a record takes beside its reply: nodes of the containers it stands in, and the allocations of a reply.
constexpr uint64_t kRecordBytes = 512;

void AppendWord(Crc32c* checksum, uint32_t value) {
  const std::byte bytes[4] = {static_cast<std::byte>(value >> 24), static_cast<std::byte>(value >> 16),
                              static_cast<std::byte>(value >> 8), static_cast<std::byte>(value)};
  checksum->Update(bytes);
}

}  // namespace

CallDigest DigestCall(const CallHeader& header, const ReducedStream& stream, size_t arguments_at) {
  static constexpr std::byte kZeros[4] = {};
  CallDigest digest;
  Crc32c checksum;
  AppendWord(&checksum, header.cred.flavor);
  if (header.cred.flavor != static_cast<uint32_t>(AuthFlavor::kRpcsecGss)) checksum.Update(header.cred.body);

  size_t left = kDigestBytes;
  const auto add = [&](ConstBytes bytes) {
    const size_t part = std::min(left, bytes.size());
    checksum.Update(bytes.first(part));
    left -= part;
    digest.length += bytes.size();
  };
  ConstBytes rest = stream.base.subspan(std::min(arguments_at, stream.base.size()));
  uint64_t position = arguments_at;
  for (const ChunkData& chunk : stream.chunks) {
    // Chunks stand in the order of their positions, behind the header.
    const uint64_t gap = chunk.position - std::min(position, chunk.position);
    const ConstBytes before = rest.first(static_cast<size_t>(std::min<uint64_t>(gap, rest.size())));
    rest = rest.subspan(before.size());
    add(before);
    add(chunk.data);
    add(ConstBytes(kZeros).first(XdrPad(chunk.data.size())));
    position += before.size() + chunk.data.size() + XdrPad(chunk.data.size());
  }
  add(rest);
  digest.checksum = checksum.Value();
  return digest;
}

ReplyBody::ReplyBody(ConstBytes message_bytes, const EligibleItems& eligible)
    : message(message_bytes.begin(), message_bytes.end()), items(eligible) {
  size_t total = 0;
  for (const EligibleItem& item : items) total += item.data.size();
  data.resize(total);
  size_t at = 0;
  for (EligibleItem& item : items) {
    const MutableBytes place = MutableBytes(data).subspan(at, item.data.size());
    at += CopyBytes(place, item.data);
    item.data = place;
  }
}

class ReplayCache::Record {
 public:
  Client* client = nullptr;
  std::map<CallKey, Record>::iterator self;
  bool in_progress = true;
  Place original;
  Place newest;
  std::shared_ptr<const ReplyBody> reply;
  uint64_t bytes = 0;
  Instant used{};
  std::list<Record*>::iterator in_client;
  std::list<Record*>::iterator in_all;
};

struct ReplayCache::Client {
  uint64_t number = 0;
  std::map<std::string, std::unique_ptr<Client>, std::less<>>::iterator self;
  std::map<CallKey, Record> records;
  std::list<Record*> by_use;
  uint64_t bytes = 0;
};

ReplayCache::ReplayCache(const ReplayLimits& limits, TraceSink* trace, std::string name)
    : limits_(limits), trace_(trace), name_(std::move(name)) {}
ReplayCache::~ReplayCache() = default;

ReplayCache::Verdict ReplayCache::OnCall(const Key& key, Place place, Instant now) {
  STAGECOACH_CHECK(enabled());
  Expire(now);
  auto found = clients_.find(key.client);
  if (found == clients_.end()) {
    found = clients_.emplace(key.client, std::make_unique<Client>()).first;
    Client* const made = found->second.get();
    made->number = next_client_++;
    made->self = found;
    clients_by_number_.emplace(made->number, made);
  }
  Client* const client = found->second.get();
  const bool blind = STAGECOACH_MUTANT("replay-ignores-arguments", "calls of one XID are the same, whatever they ask");
  const auto [at, fresh] = client->records.try_emplace(
      {key.xid, key.program, key.version, key.procedure, blind ? CallDigest() : key.digest});
  Record* const record = &at->second;
  if (!fresh && !record->in_progress && record->original.connection != place.connection &&
      STAGECOACH_MUTANT("replay-forgets-connection", "a call that comes again on another connection is not known")) {
    Remove(record);
    return OnCall(key, place, now);
  }
  if (fresh) {
    record->client = client;
    record->self = at;
    record->original = record->newest = place;
    ++in_progress_;
    ++stats_.recorded;
    Trace(trace_, now, name_, "replay.recorded", {{"xid", uint64_t{key.xid}}, {"connection", place.connection}});
    return Fresh{record};
  }
  if (record->in_progress) {
    STAGECOACH_MARK("replay.joined");
    ++stats_.joined;
    Trace(trace_, now, name_, "replay.joined",
          {{"xid", uint64_t{key.xid}}, {"connection", place.connection}, {"instead_of", record->newest.connection}});
    Joined joined;
    // The first is its executor's, who ends it.
    if (record->newest != record->original) {
      STAGECOACH_MARK("replay.joined_again");
      joined.dropped = record->newest;
    }
    record->newest = place;
    return joined;
  }
  Use(record, now);
  if (record->reply == nullptr) {
    STAGECOACH_MARK("replay.unanswerable");
    ++stats_.unanswerable;
    Trace(trace_, now, name_, "replay.unanswerable", {{"xid", uint64_t{key.xid}}, {"connection", place.connection}});
    return Unanswerable{};
  }
  STAGECOACH_MARK("replay.answered_from_record");
  ++stats_.replayed;
  Trace(trace_, now, name_, "replay.answered", {{"xid", uint64_t{key.xid}}, {"connection", place.connection}});
  return Replay{record->reply};
}

ReplayCache::Place ReplayCache::place(const Record* record) const {
  STAGECOACH_CHECK(record->in_progress);
  return record->newest;
}

void ReplayCache::OnReply(Record* record, std::shared_ptr<const ReplyBody> reply, Instant now) {
  STAGECOACH_CHECK(record->in_progress && in_progress_ > 0);
  record->in_progress = false;
  --in_progress_;
  Client* const client = record->client;
  if (reply == nullptr) {
    ++stats_.not_kept;
    Trace(trace_, now, name_, "replay.not_kept", {{"xid", uint64_t{record->self->first.xid}}});
  }
  record->reply = std::move(reply);
  record->bytes = kRecordBytes + client->self->first.size();
  if (record->reply != nullptr) record->bytes += record->reply->message.size() + record->reply->data.size();
  record->used = now;
  Count(client, false);
  record->in_client = client->by_use.insert(client->by_use.end(), record);
  record->in_all = by_use_.insert(by_use_.end(), record);
  client->bytes += record->bytes;
  bytes_ += record->bytes;
  Count(client, true);
  Expire(now);
  MakeRoom(client, now);
}

void ReplayCache::Use(Record* record, Instant now) {
  record->used = now;
  Client* const client = record->client;
  client->by_use.splice(client->by_use.end(), client->by_use, record->in_client);
  by_use_.splice(by_use_.end(), by_use_, record->in_all);
}

// Enters what a client holds into the orders by amount, or takes it out before it changes.
void ReplayCache::Count(Client* client, bool add) {
  if (client->by_use.empty()) return;
  const std::pair<uint64_t, uint64_t> entries(client->by_use.size(), client->number);
  const std::pair<uint64_t, uint64_t> bytes(client->bytes, client->number);
  if (add) {
    by_entries_.insert(entries);
    by_bytes_.insert(bytes);
  } else {
    by_entries_.erase(entries);
    by_bytes_.erase(bytes);
  }
}

ReplayCache::Client* ReplayCache::Largest(const Amounts& amounts) {
  STAGECOACH_CHECK(!amounts.empty());
  return clients_by_number_.at(std::prev(amounts.end())->second);
}

void ReplayCache::Remove(Record* record) {
  Client* const client = record->client;
  Count(client, false);
  client->by_use.erase(record->in_client);
  by_use_.erase(record->in_all);
  client->bytes -= record->bytes;
  bytes_ -= record->bytes;
  Count(client, true);
  client->records.erase(record->self);
  if (!client->records.empty()) return;
  clients_by_number_.erase(client->number);
  clients_.erase(client->self);
}

void ReplayCache::Evict(Record* record, Instant now, const char* why) {
  ++stats_.evicted;
  Trace(trace_, now, name_, "replay.evicted", {{"xid", uint64_t{record->self->first.xid}}, {"why", why}});
  Remove(record);
}

// The record of the call just answered may be the one to go: it is the most recent of its client's.
void ReplayCache::MakeRoom(Client* client, Instant now) {
  const uint64_t number = client->number;
  const auto own = [&] {
    const auto found = clients_by_number_.find(number);
    return found != clients_by_number_.end() && !found->second->by_use.empty() ? found->second : nullptr;
  };
  for (Client* each = own(); each != nullptr; each = own()) {
    if (each->by_use.size() <= limits_.client_entries_max && each->bytes <= limits_.client_bytes_max) break;
    STAGECOACH_MARK("replay.evicted_for_the_clients_share");
    Evict(each->by_use.front(), now, "the client's share");
  }
  while (by_use_.size() > limits_.entries_max) {
    STAGECOACH_MARK("replay.evicted_for_all_records");
    Evict(Largest(by_entries_)->by_use.front(), now, "all records");
  }
  while (bytes_ > limits_.bytes_max) {
    STAGECOACH_MARK("replay.evicted_for_all_bytes");
    Evict(Largest(by_bytes_)->by_use.front(), now, "all bytes");
  }
}

void ReplayCache::Expire(Instant now) {
  while (!by_use_.empty() && now - by_use_.front()->used >= limits_.age_max) {
    STAGECOACH_MARK("replay.expired");
    ++stats_.expired;
    Trace(trace_, now, name_, "replay.expired", {{"xid", uint64_t{by_use_.front()->self->first.xid}}});
    Remove(by_use_.front());
  }
}

ReplayStats ReplayCache::stats() const {
  ReplayStats stats = stats_;
  stats.in_progress = in_progress_;
  stats.entries = by_use_.size();
  stats.bytes = bytes_;
  return stats;
}

}  // namespace stagecoach::rpcrdma
