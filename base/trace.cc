#include "base/trace.h"

#include <algorithm>
#include <cstdio>
#include <new>

#include "base/mark.h"

namespace stagecoach {
namespace {

// The trace hash folds the pieces of an event without making text of them, and is the same on every machine. A
// multiplication spreads each word over the higher bits, the shift brings those back to the lower.
uint64_t Fold(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 32);
}

uint64_t Fold(uint64_t hash, std::string_view text) {
  // With its length, so that moving a boundary between texts makes a difference.
  hash = Fold(hash, uint64_t{text.size()});
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), sizeof(uint64_t)))) {
    uint64_t word = 0;
    const size_t size = std::min(text.size(), sizeof(word));
    for (size_t i = 0; i < size; ++i) word |= uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
    hash = Fold(hash, word);
  }
  return hash;
}

}  // namespace

void TellOf(TraceSink& sink, Instant now, std::string_view component, std::string_view event,
            std::initializer_list<TraceFact> facts) {
  try {
    sink.OnEvent(now, component, event, facts);
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("trace.event_lost_for_want_of_memory");
  }
}

std::string FormatSeconds(Instant instant) {
  const auto ns = static_cast<long long>(instant.time_since_epoch().count());
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%09lld", ns / 1'000'000'000, ns % 1'000'000'000);
  return text;
}

std::string FormatTraceEvent(Instant now, std::string_view component, std::string_view event,
                             std::initializer_list<TraceFact> facts) {
  std::string line = FormatSeconds(now);
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
  uint64_t hash = Fold(hash_, static_cast<uint64_t>(now.time_since_epoch().count()));
  hash = Fold(Fold(hash, component), event);
  hash = Fold(hash, uint64_t{facts.size()});
  for (const TraceFact& fact : facts) {
    hash = Fold(hash, fact.key);
    if (const auto* number = std::get_if<uint64_t>(&fact.value)) {
      hash = Fold(hash, *number);
    } else {
      hash = Fold(hash, std::get<std::string_view>(fact.value));
    }
  }
  hash_ = hash;
  ++events_;
}

}  // namespace stagecoach
