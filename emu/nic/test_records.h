// For tests: what carries the records of TestHost's connections. Chosen at link time, by the target that a test depends
// on: the fabric's own choice (records_by_fabric), or lists in memory (records_in_memory), so that nothing in a NIC can
// come to depend on the one that is there.
#pragma once

#include <memory>

#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

// A fabric that does as `beneath` does but for records; null: use that one itself.
std::unique_ptr<Fabric> WithTestRecords(Fabric& beneath);

}  // namespace stagecoach::emu
