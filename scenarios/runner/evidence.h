// Evidence: what the trace says of the ends that connections met, for those who judge whether an end may be excused.
//
// Made of events alone, and not of what the product says of itself in errors and counters.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/trace.h"

namespace stagecoach::scenario {

class Evidence final : public TraceSink {
 public:
  // Of one end of a connection.
  struct End {
    // One NIC or the other found that a rule was broken. iWARP: a Terminate was raised or received on its queue pair,
    // or what it was to send could not be read. InfiniBand: its queue pair refused what the peer asked for or
    // sent.
    bool terminated = false;
    // Work of its queue pair failed, other than by being flushed, or, on InfiniBand, for want of an answer: that is how
    // a network's faults look there.
    bool work_failed = false;
    // The peer has invalidated a window of it.
    bool window_invalidated = false;
    // A call that was sent on it timed out, which closes it.
    bool call_timed_out = false;
    // Replies to cancelled calls that came after all.
    uint64_t cancelled_replies = 0;

    // What no network does to a connection.
    bool IsFault() const { return terminated || work_failed; }
  };

  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;

  // The end on `host` of the connection that has this name in the trace. Names are used once.
  End Of(const std::string& host, std::string_view connection) const;
  // When a server's duplicate request cache, of this name in the trace, last gave up a record with this XID for want of
  // room; nullopt: never.
  std::optional<Instant> LastEvicted(std::string_view cache, uint64_t xid) const;
  // When a service on the host last had waited long enough for a client to read a reply; nullopt: never.
  std::optional<Instant> LastUnreadReply(const std::string& host) const;
  // When a listener on the host last turned a client away for want of room in its backlog; nullopt: never.
  std::optional<Instant> LastTurnedAway(const std::string& host) const;
  // When the host's device last failed a registration; nullopt: never.
  std::optional<Instant> LastFailedRegistration(const std::string& host) const;
  // When a rule of the host's device, counted from 1, last fired; nullopt: never.
  std::optional<Instant> LastFired(const std::string& host, uint64_t rule) const;
  // How often it has, on all devices that the host has had.
  uint64_t TimesFired(const std::string& host, uint64_t rule) const;

 private:
  struct QueuePair {
    bool terminated = false;
    bool work_failed = false;
    bool window_invalidated = false;
    bool infiniband = false;
  };
  struct Connection {
    uint64_t queue_pair = 0;  // number; 0: not established
    bool call_timed_out = false;
    uint64_t cancelled_replies = 0;
  };

  struct Fired {
    uint64_t times = 0;
    Instant last{};
  };
  // Null: it has not.
  const Fired* FiredBy(const std::string& host, uint64_t rule) const;

  std::map<std::string, QueuePair, std::less<>> queue_pairs_;                // by component, with something to tell
  std::map<std::string, Connection, std::less<>> connections_;               // by component
  std::map<std::string, Instant, std::less<>> registrations_;                // last failed, by NIC
  std::map<std::string, std::map<uint64_t, Instant>, std::less<>> evicted_;  // last, by cache and XID
  std::map<std::string, Instant, std::less<>> unread_replies_;               // last, by host
  std::map<std::string, Instant, std::less<>> turned_away_;                  // last, by connection manager
  std::map<std::string, std::map<uint64_t, Fired>, std::less<>> fired_;      // by NIC and rule
};

}  // namespace stagecoach::scenario
