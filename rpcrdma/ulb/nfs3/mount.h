// MOUNT version 3 (RFC 1813 appendix I), as far as it takes to get the file handle of an exported directory: the XDR of
// MNT. RFC 8267 gives MOUNT no Upper-Layer Binding; servers offer it on TCP, and transports are not this file's matter.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "base/small_vector.h"
#include "rpcrdma/ulb/nfs3/types.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma::nfs3 {

inline constexpr uint32_t kMountProgram = 100005;
inline constexpr uint32_t kMountVersion = 3;
inline constexpr uint32_t kMountMnt = 1;
// MNTPATHLEN.
inline constexpr uint32_t kMountPathMax = 1024;
inline constexpr uint32_t kMountFlavorsMax = 64;

struct Mounted {
  FileHandle root;
  SmallVector<uint32_t, 8> flavors;  // of credentials that the server accepts
};

void EncodeMountArgs(XdrWriter& out, std::string_view path);
// mountstat3, whose numbers are those of nfsstat3 where the names are, or what is mounted.
Result<Mounted, Status> DecodeMountResult(XdrReader& in);

}  // namespace stagecoach::rpcrdma::nfs3
