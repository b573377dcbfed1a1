// Names of the engines' enumerations, as they stand in traces and messages.
#include "emu/engine/memory_port.h"
#include "emu/engine/work.h"

namespace stagecoach::emu {

const char* ToString(MemoryFault fault) {
  switch (fault) {
    case MemoryFault::kUnknownStag:
      return "unknown STag";
    case MemoryFault::kStaleStag:
      return "stale STag";
    case MemoryFault::kForeignStag:
      return "STag of another protection domain or QP";
    case MemoryFault::kOutOfRange:
      return "out of the region's range";
    case MemoryFault::kNoPermission:
      return "access not granted by the region";
    case MemoryFault::kUnmapped:
      return "memory that is not mapped any more";
    case MemoryFault::kMisaligned:
      return "not aligned to eight bytes";
  }
  return "unknown memory fault";
}

const char* ToString(SendOpcode opcode) {
  switch (opcode) {
    case SendOpcode::kSend:
      return "Send";
    case SendOpcode::kSendInvalidate:
      return "Send with Invalidate";
    case SendOpcode::kWrite:
      return "Write";
    case SendOpcode::kRead:
      return "Read";
    case SendOpcode::kSendImmediate:
      return "Send with Immediate";
    case SendOpcode::kWriteImmediate:
      return "Write with Immediate";
    case SendOpcode::kCompareSwap:
      return "Compare and Swap";
    case SendOpcode::kFetchAdd:
      return "Fetch and Add";
  }
  return "work request";
}

const char* ToString(WorkStatus status) {
  switch (status) {
    case WorkStatus::kSuccess:
      return "success";
    case WorkStatus::kLocalLengthError:
      return "local length error";
    case WorkStatus::kLocalProtectionError:
      return "local protection error";
    case WorkStatus::kLocalOperationError:
      return "local operation error";
    case WorkStatus::kFlushed:
      return "flushed";
    case WorkStatus::kRemoteInvalidRequest:
      return "remote invalid request";
    case WorkStatus::kRemoteAccessError:
      return "remote access error";
    case WorkStatus::kRemoteOperationError:
      return "remote operation error";
    case WorkStatus::kFatal:
      return "fatal error";
    case WorkStatus::kBadResponse:
      return "bad response";
    case WorkStatus::kLocalAccessError:
      return "local access error";
    case WorkStatus::kRetryExceeded:
      return "transport retries exceeded";
    case WorkStatus::kRnrRetryExceeded:
      return "RNR retries exceeded";
  }
  return "unknown work status";
}

}  // namespace stagecoach::emu
