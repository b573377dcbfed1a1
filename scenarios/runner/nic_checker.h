// NicChecker: judges the NICs of a run by what they trace of work, completions and steering tags.
//
//   completion.order   work completes in the order it was posted, and nothing completes twice
//   completion.lost    each Receive posted completes, or is counted as outstanding when the queue pair goes; so does
//                      each send work request that asked for a completion, and after the first that failed every one,
//                      since the rest of the queue is flushed
//   stag.quarantine    a freed STag index is not used again before 65,536 others have been freed
//   placement.order    Writes that are placed late are in place before a record that is no Write takes effect, before
//                      memory of the NIC is deregistered or a window of the queue pair is invalidated, and before the
//                      queue pair is destroyed
//   placement.stag     what a record places, and what a Read is answered from, is memory that this queue pair may use
//                      so at that moment: its STag allocated and not freed, with this key and of the queue pair's PD;
//                      of a window, bound by this queue pair and not invalidated since, to a region that is still
//                      there; with the access right it takes; and from its first byte to its last within the memory
//                      that the STag names. Each byte of a record is placed somewhere, and none that it does not have
//   window.bound       a window is bound to a region of its PD that is valid at that moment, allows it and the rights
//                      asked for, and lies within it
//   trace.facts        events tell what these rules ask for
//
// placement.stag and window.bound keep a register of their own, made of nothing but events, so that they do not depend
// on the tables of the NIC they judge. Records are named as iWARP or InfiniBand names them (wire::ToString of either).
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/trace.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

class NicChecker final : public TraceSink {
 public:
  // `violations` outlives the checker.
  explicit NicChecker(Violations* violations) : violations_(violations) {}

  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;
  // Every queue pair has been destroyed.
  void Finish(Instant now);

  // How many placements were looked up, for tests that want to know that they were.
  uint64_t placements_judged() const { return placements_judged_; }

 private:
  struct QueuePair {
    uint64_t kept = 0;             // Writes not placed yet
    uint64_t next_send = 0;        // the smallest number that may complete next
    uint64_t next_receive = 0;     // the number that must
    uint64_t sends_posted = 0;     // seen being posted
    std::deque<uint64_t> awaited;  // of these, the numbers that asked for a completion and have none yet
    bool failed = false;           // a send has: all that follow are flushed, and say so
    // Known since it was connected; the second one is that of its Receives, which may be of an SRQ.
    std::optional<uint64_t> pd;
    std::optional<uint64_t> receive_pd;
    // What the last record takes of memory: this right, in that PD.
    uint64_t right = 0;
    std::optional<uint64_t> domain;
    uint64_t unplaced = 0;  // bytes of the last record that are to be told of by "part.placed"
  };

  // What an STag index names.
  struct Stag {
    bool valid = false;
    bool window = false;
    uint64_t key = 0;
    uint64_t bytes = 0;
    uint64_t pd = 0;
    uint64_t access = 0;          // ibv_access_flags
    uint64_t region = 0;          // a bound window's: the STag of what it was bound to
    std::string queue_pair;       // a bound window's
    bool any_queue_pair = false;  // one of type 1: any of its PD may use it
  };
  struct Nic {
    // The region or window that this STag names now; null if there is none.
    const Stag* Find(uint64_t stag) const;

    std::map<uint64_t, Stag> stags;         // by index
    uint64_t freed = 0;                     // so many were
    std::map<uint64_t, uint64_t> freed_as;  // index to its number among them
  };
  // The event being judged.
  struct Event {
    Instant now;
    std::string_view component;
    std::string_view name;
    std::initializer_list<TraceFact> facts;
    Violations* violations;

    // A rule that asks for a fact that is not there cannot judge: that is a violation of its own.
    uint64_t Number(std::string_view key) const { return Fact<uint64_t>(key); }
    std::string_view Word(std::string_view key) const { return Fact<std::string_view>(key); }
    template <typename T>
    T Fact(std::string_view key) const;
  };

  void Object(const Event& event, std::string_view rule, std::string_view what);
  QueuePair& QueuePairOf(std::string_view component);
  Nic& NicOf(std::string_view component);
  void JudgeSend(const Event& event, QueuePair& qp);
  void JudgeDestroyed(const Event& event, const QueuePair& qp);
  // Everything kept is to be in place before what `event` tells of.
  void JudgeOrder(const Event& event, const QueuePair& qp);
  void JudgePlaced(const Event& event, QueuePair& qp);
  void JudgeAllocated(const Event& event);
  void JudgeFreed(const Event& event);
  void JudgeWindow(const Event& event);
  void JudgeBinding(const Event& event, const Stag& window);
  void JudgeRecord(const Event& event, QueuePair& qp);
  // The last record has had all its parts.
  void JudgeLeftOver(const Event& event, const QueuePair& qp);
  void JudgePart(const Event& event, QueuePair& qp);
  // Uses `length` bytes of the memory of PD `domain` that the event names, as `right` (of ibv_access_flags) allows.
  void JudgeUse(const Event& event, uint64_t length, uint64_t right, std::optional<uint64_t> domain);

  Violations* const violations_;
  uint64_t placements_judged_ = 0;
  std::map<std::string, Nic, std::less<>> nics_;               // by component
  std::map<std::string, QueuePair, std::less<>> queue_pairs_;  // by component, which begins with the NIC's
};

}  // namespace stagecoach::scenario
