// MemoryFabric: a fabric whose records go by MemoryLlp, whatever carried the handshake.
//
// Hosts of one process find each other by streams of the fabric beneath. When both have agreed, no byte that is on the
// stream means anything any more; that it ends tells the end that was there first that no second one will come.
#pragma once

#include <memory>

#include "emu/fabric/fabric_over.h"

namespace stagecoach::emu {

class MemoryFabric final : public FabricOver {
 public:
  // `beneath` outlives this fabric and what it handed out. Its streams lead to hosts with fabrics of this kind.
  explicit MemoryFabric(Fabric& beneath) : FabricOver(beneath) {}

  // A stream that leads to its own end carries its records itself.
  std::unique_ptr<Llp> RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) override;

  // All that fabrics of this kind have made in this process are reset at both ends, as by a middlebox on a network.
  static void ResetAll();
};

}  // namespace stagecoach::emu
