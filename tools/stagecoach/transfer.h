// Moving one file: several READs or WRITEs in flight, each of a chunk, into and out of local files.
//
// Local disk calls run between network events on the one thread; a chunk bounds how long each may take.
#pragma once

#include <cstdint>
#include <string>

#include "rpcrdma/ulb/file/file_store.h"
#include "tools/stagecoach/session.h"

namespace stagecoach::cli {

struct TransferOptions {
  uint32_t chunk = 1 << 20;  // bytes in one READ or WRITE, before the server's own limit
  uint32_t depth = 8;        // of them in flight
  bool quiet = false;        // no progress
};

// Asks the server for its limits and lowers `options` to them.
Result<rpcrdma::file::Limits, Error> FitToServer(Session& session, TransferOptions& options);

// Copies the remote file `from` to `to` below `store`: checked, with mode and time, under its name only when whole.
// `shown` is how messages and progress call the local file. Returns the size.
Result<uint64_t, Error> Download(Session& session, const rpcrdma::file::Path& from,
                                 const rpcrdma::file::FileStore& store, const rpcrdma::file::Path& to,
                                 const std::string& shown, const TransferOptions& options);

// Copies the local file `from` to the remote path `to`. Returns the size.
Result<uint64_t, Error> Upload(Session& session, const std::string& from, const rpcrdma::file::Path& to,
                               const TransferOptions& options);

}  // namespace stagecoach::cli
