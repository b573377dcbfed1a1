#include "emu/nic/test_records.h"

namespace stagecoach::emu {

std::unique_ptr<Fabric> WithTestRecords(Fabric&) {
  return nullptr;
}

void ResetTestRecords() {}

}  // namespace stagecoach::emu
