// A MemoryPort for records whose payload is never named by key: it has none.
#pragma once

#include "emu/engine/memory_port.h"

namespace stagecoach::emu {

class NoMemory final : public MemoryPort {
 public:
  Result<MemoryPin, MemoryFault> Pin(uint32_t, uint64_t, uint64_t, MemoryAccess) override {
    return Err(MemoryFault::kUnknownStag);
  }
  Result<void, MemoryFault> InvalidateRemotely(uint32_t) override { return Err(MemoryFault::kUnknownStag); }
  Result<AtomicOutcome, MemoryFault> Atomic(uint32_t, uint64_t, AtomicOp, uint64_t, uint64_t) override {
    return Err(MemoryFault::kUnknownStag);
  }

 protected:
  void Unpin(uint32_t) override {}
};

}  // namespace stagecoach::emu
