// Directory trees, remote and local.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/stagecoach/session.h"
#include "tools/stagecoach/transfer.h"

namespace stagecoach::cli {

// How many entries one command takes from a server, in all directories together. A server that lists without end, in
// one directory or in ever new ones, would otherwise have our memory, our disk or our time.
class EntryBudget {
 public:
  static constexpr uint64_t kDefault = 1'000'000;

  explicit EntryBudget(uint64_t max = kDefault) : max_(max) {}
  // False when so many are not left.
  bool Take(uint64_t entries) {
    if (entries > max_ - taken_) return false;
    taken_ += entries;
    return true;
  }
  uint64_t max() const { return max_; }

 private:
  uint64_t max_;
  uint64_t taken_ = 0;
};

// Fits an inline reply with the threshold we ask for; a server with a smaller one uses a Reply chunk.
inline constexpr uint32_t kPageBytes = 3072;

// All entries of a remote directory, sorted by name, which `budget` pays for; a fatal error when it cannot. Whatever
// the server says is checked: a name that is none and a name given twice are errors. They are asked for in pages of
// `page_bytes` at most, encoded; the server may give less.
Result<std::vector<rpcrdma::file::Entry>, Error> ListDirectory(Session& session, const rpcrdma::file::Path& path,
                                                               EntryBudget& budget, uint32_t page_bytes = kPageBytes);

struct TreeResult {
  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t failures = 0;  // files, directories and entries that could not be copied; each has been reported
};
// Reports one failure and lets the copying go on.
using Report = std::function<void(const std::string& subject, const std::string& text)>;

// What of a remote tree is taken.
struct TreeOptions {
  EntryBudget budget;
  bool raw_names = false;  // also names with control characters; otherwise they count as failures
};

// Makes the contents of a remote directory the contents of the local directory `to`, which is created if missing.
// Nothing is written outside it: links in it are not followed. Removes the unfinished files that killed processes have
// left in each directory. A fatal error ends it.
Result<TreeResult, Error> DownloadTree(Session& session, const rpcrdma::file::Path& from, const std::string& to,
                                       const TreeOptions& tree, const TransferOptions& options, const Report& report);

// Makes the contents of the local directory `from` the contents of a remote one, which is created if missing. Links to
// regular files are copied as the files; links to directories, and what is neither file nor directory, count as
// failures.
Result<TreeResult, Error> UploadTree(Session& session, const std::string& from, const rpcrdma::file::Path& to,
                                     const TransferOptions& options, const Report& report);

}  // namespace stagecoach::cli
