// What stands behind a RegisteredMemory, for the rest of the library.
#pragma once

#include <memory>

#include "rpcrdma/api/registered_memory.h"
#include "rpcrdma/verbs/lasting_memory.h"

namespace stagecoach::rpcrdma::internal {

struct RegisteredMemoryAccess {
  // Null of none.
  static const std::shared_ptr<LastingMemory>& Of(const RegisteredMemory& memory) { return memory.memory_; }
};

}  // namespace stagecoach::rpcrdma::internal
