#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

std::string_view Describe(Status status) {
  switch (status) {
    case Status::kOk:
      return "success";
    case Status::kNoEntry:
      return "no such file or directory";
    case Status::kPermission:
      return "permission denied";
    case Status::kExists:
      return "name is taken";
    case Status::kNotDirectory:
      return "not a directory";
    case Status::kIsDirectory:
      return "is a directory";
    case Status::kNotRegular:
      return "not a regular file";
    case Status::kBadName:
      return "name or path not allowed";
    case Status::kOutside:
      return "leads outside the served directory";
    case Status::kLink:
      return "symbolic link that is not followed";
    case Status::kReadOnly:
      return "read-only";
    case Status::kNoSpace:
      return "no space left on device";
    case Status::kTooBig:
      return "file too large";
    case Status::kIo:
      return "input/output error";
    case Status::kInvalid:
      return "invalid arguments";
    case Status::kStale:
      return "stale file handle";
    case Status::kLimit:
      return "client limit reached";
    case Status::kBadChecksum:
      return "checksum mismatch";
    case Status::kIncomplete:
      return "parts of the file are missing";
    case Status::kBusy:
      return "out of resources, try again";
  }
  return "unknown status";
}

}  // namespace stagecoach::rpcrdma::file
