// Files in the making, and whose they are (docs/decisions/0060-parts-have-owners.md).
//
// A part lies under a hidden name (names.h) in the directory that its file will be in. The process that writes it holds
// its lock (flock(2)), which ends with the process, however that ends: a part that can be locked was abandoned. Who
// looks for abandoned ones locks a part before it removes it, and who makes one locks it before it writes, so a new
// part is never taken for an old one.
//
// Blocking system calls. FileStore makes parts and sweeps; who has a sweep of one (FileStore::SweepAbandoned) drives
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <dirent.h>

#include "base/result.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {

// A hidden name that nobody has chosen yet.
std::string RandomPartName();

// Takes the lock of a part that was just made. False: somebody took it for abandoned, and removes it; another one has
// to be made. On a file system without locks nobody can tell, and nothing is ever removed. kBusy: it has locks, and
// none can be had now.
Result<bool, Status> ClaimPart(int part);

// Removes the file of this hidden name, if its process is gone. Whether it was removed.
bool RemoveIfAbandoned(int directory, const char* name);

// Looks through a tree for abandoned parts, a step at a time, and removes them. Follows no link and crosses no mount
// point; what cannot be opened is passed over. Holds a descriptor for each level it is in.
class PartSweep {
 public:
  // Of the directory `root`, a descriptor that the sweep duplicates; `depth_max` levels below it.
  PartSweep(int root, size_t depth_max);
  PartSweep(PartSweep&&) = default;

  // Looks at `entries` more. False when all have been looked at.
  bool Step(size_t entries);
  uint64_t removed() const { return removed_; }

 private:
  struct Closer {
    void operator()(DIR* directory) const { ::closedir(directory); }
  };
  void Enter(int directory);

  const size_t depth_max_;
  std::vector<std::unique_ptr<DIR, Closer>> levels_;
  uint64_t removed_ = 0;
};

}  // namespace stagecoach::rpcrdma::file
