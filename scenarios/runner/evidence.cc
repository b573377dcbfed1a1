#include "scenarios/runner/evidence.h"

namespace stagecoach::scenario {
namespace {

template <typename Map>
auto& At(Map& map, std::string_view key) {
  const auto found = map.find(key);
  return found != map.end() ? found->second : map[std::string(key)];
}

std::string NicOf(const std::string& host) {
  return host + "-rnic";
}

// A NAK that is more than a wish to have packets again, or later (IBTA volume 1, section 9.7.5.1; emu/wire/ib.h). 0:
// the peer is told nothing.
bool IsFatalNak(uint64_t syndrome) {
  constexpr uint64_t kKind = 0x60;
  constexpr uint64_t kRnrNak = 0x20;
  constexpr uint64_t kSequenceNak = 0x60;
  return (syndrome & kKind) != kRnrNak && syndrome != kSequenceNak;
}

}  // namespace

void Evidence::OnEvent(Instant now, std::string_view component, std::string_view event,
                       std::initializer_list<TraceFact> facts) {
  const auto is = [&](std::string_view key, std::string_view value) {
    const auto* const word = FindFact<std::string_view>(facts, key);
    return word != nullptr && *word == value;
  };
  if (event == "send.completed" || event == "receive.completed") {
    if (!is("status", "success") && !is("status", "flushed") && !is("status", "retries exceeded")) {
      QueuePair& queue_pair = At(queue_pairs_, component);
      queue_pair.work_failed = true;
      // A Receive fails for what the peer has sent.
      if (event == "receive.completed" && queue_pair.infiniband) queue_pair.terminated = true;
    }
  } else if (event == "terminate.raised" || event == "terminate.received") {
    At(queue_pairs_, component).terminated = true;
  } else if (event == "tx.memory_fault") {
    // On InfiniBand what is sent once more than needed may have gone meanwhile; if it was needed, work fails or a NAK
    // says so.
    QueuePair& queue_pair = At(queue_pairs_, component);
    queue_pair.terminated = queue_pair.terminated || !queue_pair.infiniband;
  } else if (event == "nak.raised") {
    if (const auto* syndrome = FindFact<uint64_t>(facts, "syndrome"); syndrome != nullptr && IsFatalNak(*syndrome)) {
      At(queue_pairs_, component).terminated = true;
    }
  } else if (event == "carrier.up") {
    At(queue_pairs_, component).infiniband = true;
  } else if (event == "window.invalidated") {
    if (is("by", "peer")) At(queue_pairs_, component).window_invalidated = true;
  } else if (event == "connection.attached") {
    // A host that starts again has a NIC that counts from the beginning.
    if (const auto found = queue_pairs_.find(component); found != queue_pairs_.end()) queue_pairs_.erase(found);
  } else if (event == "established") {
    if (const auto* number = FindFact<uint64_t>(facts, "qp")) At(connections_, component).queue_pair = *number;
  } else if (event == "call.timed_out") {
    At(connections_, component).call_timed_out = true;
  } else if (event == "reply.ignored") {
    if (is("why", "cancelled")) ++At(connections_, component).cancelled_replies;
  } else if (event == "registration.failed") {
    At(registrations_, component) = now;
  } else if (event == "request.refused") {
    if (is("why", "the backlog is full")) At(turned_away_, component) = now;
  } else if (event == "replay.evicted") {
    if (const auto* xid = FindFact<uint64_t>(facts, "xid")) At(evicted_, component)[*xid] = now;
  } else if (event == "injection.fired") {
    if (const auto* rule = FindFact<uint64_t>(facts, "rule")) {
      Fired& fired = At(fired_, component.substr(0, component.find('/')))[*rule];
      ++fired.times;
      fired.last = now;
    }
  } else if (event == "exposure.expired") {
    At(unread_replies_, component.substr(0, component.find('/'))) = now;
  }
}

Evidence::End Evidence::Of(const std::string& host, std::string_view connection) const {
  End end;
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return end;
  end.call_timed_out = found->second.call_timed_out;
  end.cancelled_replies = found->second.cancelled_replies;
  const auto queue_pair = queue_pairs_.find(NicOf(host) + "/qp-" + std::to_string(found->second.queue_pair));
  if (queue_pair == queue_pairs_.end()) return end;
  end.terminated = queue_pair->second.terminated;
  end.work_failed = queue_pair->second.work_failed;
  end.window_invalidated = queue_pair->second.window_invalidated;
  return end;
}

std::optional<Instant> Evidence::LastEvicted(std::string_view cache, uint64_t xid) const {
  const auto found = evicted_.find(cache);
  if (found == evicted_.end()) return std::nullopt;
  const auto record = found->second.find(xid);
  return record != found->second.end() ? std::optional(record->second) : std::nullopt;
}

std::optional<Instant> Evidence::LastUnreadReply(const std::string& host) const {
  const auto found = unread_replies_.find(host);
  return found != unread_replies_.end() ? std::optional(found->second) : std::nullopt;
}

std::optional<Instant> Evidence::LastTurnedAway(const std::string& host) const {
  const auto found = turned_away_.find(NicOf(host) + "/cm");
  return found != turned_away_.end() ? std::optional(found->second) : std::nullopt;
}

const Evidence::Fired* Evidence::FiredBy(const std::string& host, uint64_t rule) const {
  const auto nic = fired_.find(NicOf(host));
  if (nic == fired_.end()) return nullptr;
  const auto found = nic->second.find(rule);
  return found != nic->second.end() ? &found->second : nullptr;
}

std::optional<Instant> Evidence::LastFired(const std::string& host, uint64_t rule) const {
  const Fired* const fired = FiredBy(host, rule);
  return fired != nullptr ? std::optional(fired->last) : std::nullopt;
}

uint64_t Evidence::TimesFired(const std::string& host, uint64_t rule) const {
  const Fired* const fired = FiredBy(host, rule);
  return fired != nullptr ? fired->times : 0;
}

std::optional<Instant> Evidence::LastFailedRegistration(const std::string& host) const {
  const auto found = registrations_.find(NicOf(host));
  return found != registrations_.end() ? std::optional(found->second) : std::nullopt;
}

}  // namespace stagecoach::scenario
