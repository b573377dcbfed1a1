#include "rpcrdma/ulb/nfs3/types.h"

namespace stagecoach::rpcrdma::nfs3 {

std::string ToString(Status status) {
  switch (status) {
    case Status::kOk:
      return "NFS3_OK";
    case Status::kNotOwner:
      return "NFS3ERR_PERM";
    case Status::kNoEntry:
      return "NFS3ERR_NOENT";
    case Status::kIo:
      return "NFS3ERR_IO";
    case Status::kNoDevice:
      return "NFS3ERR_NXIO";
    case Status::kAccess:
      return "NFS3ERR_ACCES";
    case Status::kExists:
      return "NFS3ERR_EXIST";
    case Status::kOtherFileSystem:
      return "NFS3ERR_XDEV";
    case Status::kNoSuchDevice:
      return "NFS3ERR_NODEV";
    case Status::kNotDirectory:
      return "NFS3ERR_NOTDIR";
    case Status::kIsDirectory:
      return "NFS3ERR_ISDIR";
    case Status::kInvalid:
      return "NFS3ERR_INVAL";
    case Status::kTooBig:
      return "NFS3ERR_FBIG";
    case Status::kNoSpace:
      return "NFS3ERR_NOSPC";
    case Status::kReadOnly:
      return "NFS3ERR_ROFS";
    case Status::kTooManyLinks:
      return "NFS3ERR_MLINK";
    case Status::kNameTooLong:
      return "NFS3ERR_NAMETOOLONG";
    case Status::kNotEmpty:
      return "NFS3ERR_NOTEMPTY";
    case Status::kQuota:
      return "NFS3ERR_DQUOT";
    case Status::kStale:
      return "NFS3ERR_STALE";
    case Status::kRemote:
      return "NFS3ERR_REMOTE";
    case Status::kBadHandle:
      return "NFS3ERR_BADHANDLE";
    case Status::kNotSynchronized:
      return "NFS3ERR_NOT_SYNC";
    case Status::kBadCookie:
      return "NFS3ERR_BAD_COOKIE";
    case Status::kNotSupported:
      return "NFS3ERR_NOTSUPP";
    case Status::kTooSmall:
      return "NFS3ERR_TOOSMALL";
    case Status::kServerFault:
      return "NFS3ERR_SERVERFAULT";
    case Status::kBadType:
      return "NFS3ERR_BADTYPE";
    case Status::kTryLater:
      return "NFS3ERR_JUKEBOX";
  }
  return "nfsstat3 " + std::to_string(static_cast<uint32_t>(status));
}

}  // namespace stagecoach::rpcrdma::nfs3
