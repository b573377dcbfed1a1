// MemoryTrail: the memory that the payload of a record goes to, in words that a trace may use: the STag, and the offset
// from the first byte that it names. Never an address.
//
// Filled in where memory is pinned and read when the record counts as placed, since the pins are gone by then. Keeps
// nothing, and costs a branch, when nobody traces. At most as long as a scatter list. Not thread-safe.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/time.h"
#include "base/trace.h"
#include "emu/engine/memory_port.h"

namespace stagecoach::emu {

// Bytes of one region or window. An STag of 0 names no memory.
struct MemoryPlace {
  uint32_t stag = 0;
  uint64_t offset = 0;  // from the first byte that the STag names
  uint64_t length = 0;
};

class MemoryTrail {
 public:
  explicit MemoryTrail(bool traced) : traced_(traced) {}

  void Clear() { places_.clear(); }
  void Add(uint32_t stag, const MemoryPin& pin) {
    if (traced_) places_.push_back({stag, pin.offset(), pin.bytes().size()});
  }

  // Where the payload begins. No memory, when it has no bytes or they go to the engine itself (Terminate).
  MemoryPlace first() const { return places_.empty() ? MemoryPlace() : places_.front(); }

  // Where the rest of it went: one event for each further part of a scatter list, behind that of the record.
  void TraceRest(TraceSink* sink, Instant now, std::string_view component) const {
    for (size_t i = 1; i < places_.size(); ++i) {
      const MemoryPlace& place = places_[i];
      Trace(sink, now, component, "part.placed",
            {{"length", place.length}, {"stag", uint64_t{place.stag}}, {"offset", place.offset}});
    }
  }

 private:
  const bool traced_;
  std::vector<MemoryPlace> places_;
};

}  // namespace stagecoach::emu
