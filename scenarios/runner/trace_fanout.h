// TraceFanout: one trace, many listeners.
#pragma once

#include <initializer_list>
#include <string_view>
#include <vector>

#include "base/trace.h"

namespace stagecoach::scenario {

class TraceFanout final : public TraceSink {
 public:
  // `sink` outlives this object; null is ignored.
  void Add(TraceSink* sink) {
    if (sink != nullptr) sinks_.push_back(sink);
  }
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    for (TraceSink* sink : sinks_) sink->OnEvent(now, component, event, facts);
  }

 private:
  std::vector<TraceSink*> sinks_;
};

}  // namespace stagecoach::scenario
