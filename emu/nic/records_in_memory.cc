#include "emu/llp/memory/memory_fabric.h"
#include "emu/nic/test_records.h"

namespace stagecoach::emu {

std::unique_ptr<Fabric> WithTestRecords(Fabric& beneath) {
  return std::make_unique<MemoryFabric>(beneath);
}

void ResetTestRecords() {
  MemoryFabric::ResetAll();
}

}  // namespace stagecoach::emu
