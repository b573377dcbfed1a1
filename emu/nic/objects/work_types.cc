#include "emu/nic/objects/work_types.h"

namespace stagecoach::emu {

const char* ToString(CompletionStatus status) {
  switch (status) {
    case CompletionStatus::kSuccess:
      return "success";
    case CompletionStatus::kLocalLengthError:
      return "local length error";
    case CompletionStatus::kLocalQpOperationError:
      return "local QP operation error";
    case CompletionStatus::kLocalProtectionError:
      return "local protection error";
    case CompletionStatus::kFlushed:
      return "flushed";
    case CompletionStatus::kWindowBindError:
      return "memory management operation error";
    case CompletionStatus::kRemoteInvalidRequest:
      return "remote invalid request";
    case CompletionStatus::kRemoteAccessError:
      return "remote access error";
    case CompletionStatus::kRemoteOperationError:
      return "remote operation error";
    case CompletionStatus::kFatal:
      return "fatal error";
    case CompletionStatus::kBadResponse:
      return "bad response";
    case CompletionStatus::kLocalAccessError:
      return "local access error";
    case CompletionStatus::kRetryExceeded:
      return "retries exceeded";
    case CompletionStatus::kRnrRetryExceeded:
      return "RNR retries exceeded";
  }
  return "unknown completion status";
}

}  // namespace stagecoach::emu
