#include "rpcrdma/api/registered_memory.h"

#include <utility>

#include "rpcrdma/verbs/lasting_memory.h"

namespace stagecoach::rpcrdma {

RegisteredMemory::RegisteredMemory(MutableBytes bytes, std::shared_ptr<const void> owner)
    : memory_(std::make_shared<LastingMemory>(bytes, /*writable=*/true, std::move(owner))) {}

RegisteredMemory RegisteredMemory::ReadOnly(ConstBytes bytes, std::shared_ptr<const void> owner) {
  RegisteredMemory memory;
  memory.memory_ = std::make_shared<LastingMemory>(bytes, /*writable=*/false, std::move(owner));
  return memory;
}

ConstBytes RegisteredMemory::bytes() const {
  return memory_ != nullptr ? memory_->bytes() : ConstBytes();
}

bool RegisteredMemory::Contains(ConstBytes part) const {
  return part.empty() || (memory_ != nullptr && memory_->Contains(part));
}

}  // namespace stagecoach::rpcrdma
