#include "base/trace.h"

#include <cstdio>

#include "base/prng.h"

namespace stagecoach {

std::string FormatTraceEvent(Instant now, std::string_view component, std::string_view event,
                             std::initializer_list<TraceFact> facts) {
  const int64_t ns = now.time_since_epoch().count();
  char stamp[40];
  std::snprintf(stamp, sizeof(stamp), "%lld.%09lld", static_cast<long long>(ns / 1'000'000'000),
                static_cast<long long>(ns % 1'000'000'000));
  std::string line(stamp);
  line.append(" ").append(component).append(" ").append(event);
  for (const TraceFact& fact : facts) {
    line.append(" ").append(fact.key).append("=");
    if (const auto* number = std::get_if<uint64_t>(&fact.value)) {
      line.append(std::to_string(*number));
    } else {
      line.append(std::get<std::string_view>(fact.value));
    }
  }
  return line;
}

void TraceLog::OnEvent(Instant now, std::string_view component, std::string_view event,
                       std::initializer_list<TraceFact> facts) {
  lines_.push_back(FormatTraceEvent(now, component, event, facts));
}

void TraceHash::OnEvent(Instant now, std::string_view component, std::string_view event,
                        std::initializer_list<TraceFact> facts) {
  hash_ = StableHash(FormatTraceEvent(now, component, event, facts), hash_);
  ++events_;
}

}  // namespace stagecoach
