// NicChecker: judges the queue pairs of every NIC of a run by what they trace of each completion.
//
//   completion.order   work completes in the order it was posted, and nothing completes twice
//   stag.quarantine    a freed STag index is not used again before 65,536 others have been freed
//   placement.order    Writes that are placed late are in place before a record that is no Write takes effect, and
//   before
//                      memory of the NIC is deregistered
//   completion.lost    each Receive posted completes, or is counted as outstanding when the queue pair goes
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
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

 private:
  struct QueuePair {
    uint64_t kept = 0;          // Writes not placed yet
    uint64_t next_send = 0;     // the smallest number that may complete next
    uint64_t next_receive = 0;  // the number that must
  };

  // Of one NIC.
  struct Stags {
    uint64_t freed = 0;                     // so many were
    std::map<uint64_t, uint64_t> freed_as;  // index to its number among them
  };
  void JudgePlacement(Instant now, std::string_view component, std::string_view event,
                      std::initializer_list<TraceFact> facts);
  void JudgeStag(Instant now, std::string_view component, bool allocated, uint64_t index);

  Violations* const violations_;
  std::map<std::string, Stags, std::less<>> stags_;            // by component
  std::map<std::string, QueuePair, std::less<>> queue_pairs_;  // by component
};

}  // namespace stagecoach::scenario
