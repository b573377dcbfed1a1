// Trace events: one per decision, printed in a canonical text form, and folded into the trace hash.
//
// An event names what happened and its facts as key=value pairs. Facts are values that do not depend on addresses:
// memory is named as (region, offset). A sink may be null: Trace(nullptr, ...) costs one branch.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/time.h"

namespace stagecoach {

struct TraceFact {
  std::string_view key;
  std::variant<uint64_t, std::string_view> value;
};

// The fact of that name and type; null when there is none.
template <typename T>
const T* FindFact(std::initializer_list<TraceFact> facts, std::string_view key) {
  for (const TraceFact& fact : facts) {
    if (fact.key != key) continue;
    if (const T* value = std::get_if<T>(&fact.value)) return value;
  }
  return nullptr;
}

class TraceSink {
 public:
  virtual ~TraceSink() = default;
  // `component` names the emitter ("host-a/qp-17"); `event` the decision ("record.placed"). Views are valid for the
  // call.
  virtual void OnEvent(Instant now, std::string_view component, std::string_view event,
                       std::initializer_list<TraceFact> facts) = 0;
};

// Where there is no memory to tell of it the event is lost, and nothing else: what it is about goes on as if there were
// no sink.
void TellOf(TraceSink& sink, Instant now, std::string_view component, std::string_view event,
            std::initializer_list<TraceFact> facts);

inline void Trace(TraceSink* sink, Instant now, std::string_view component, std::string_view event,
                  std::initializer_list<TraceFact> facts = {}) {
  if (sink != nullptr) TellOf(*sink, now, component, event, facts);
}

// "1.000002000": seconds and nanoseconds since the loop's epoch.
std::string FormatSeconds(Instant instant);

// "1.000002000 host-a/qp-17 record.placed length=64".
std::string FormatTraceEvent(Instant now, std::string_view component, std::string_view event,
                             std::initializer_list<TraceFact> facts);

// Keeps every line; for tests and `--trace`.
class TraceLog final : public TraceSink {
 public:
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

// Folds every event into one number, in constant memory; two runs of one seed must agree.
class TraceHash final : public TraceSink {
 public:
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override;
  uint64_t value() const { return hash_; }
  uint64_t events() const { return events_; }

 private:
  uint64_t hash_ = 0;
  uint64_t events_ = 0;
};

}  // namespace stagecoach
