// For tests: what carries the records of connections. Chosen at link time, by the target that a test depends
// on: the fabric's own choice (records_by_fabric), or lists in memory (records_in_memory), so that nothing in a NIC can
// come to depend on the one that is there.
#pragma once

#include <memory>
#include <utility>

#include "emu/fabric/fabric.h"

namespace stagecoach::emu {

// A fabric that does as `beneath` does but for records; null: use that one itself.
std::unique_ptr<Fabric> WithTestRecords(Fabric& beneath);

// All record layers that such fabrics have made are reset at both ends; none where the fabric beneath makes them.
void ResetTestRecords();

// The fabric of a test's device.
class TestRecords {
 public:
  TestRecords(Fabric& beneath)  // NOLINT: a device of a test may be made of any fabric
      : own_(WithTestRecords(beneath)), fabric_(own_ != nullptr ? *own_ : beneath) {}
  // A fabric that stands on one of these, and makes its record layers of those.
  static TestRecords Above(Fabric& fabric) { return {nullptr, fabric}; }

  Fabric& fabric() const { return fabric_; }

 private:
  TestRecords(std::unique_ptr<Fabric> own, Fabric& fabric) : own_(std::move(own)), fabric_(fabric) {}

  std::unique_ptr<Fabric> own_;
  Fabric& fabric_;
};

}  // namespace stagecoach::emu
