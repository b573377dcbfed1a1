// AbstractNames: names that processes of one host (one network namespace) have for themselves, as Linux's abstract Unix
// sockets.
//
// A bound socket is the name: nobody else can bind it, everybody can see that it is there, and it goes with its last
// descriptor; forked children have none (base/fork). The kernel tells who connects which process listens
// (SO_PEERCRED), whether that runs or is stopped. So the sockets listen, and that is all: who has connected has been
// answered, and is sent away. Threading: any thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "emu/backend/tcp/tcp_stream.h"
#include "emu/fabric/port_space.h"

namespace stagecoach::emu {

class AbstractNames final : public PortSpace::System {
 public:
  // `readiness` outlives this and all names. Null: nobody is sent away, so that a name can be asked about some thousand
  // times (net.core.somaxconn) before the kernel does not say any more who has it.
  explicit AbstractNames(ReadinessSet* readiness = nullptr) : readiness_(readiness) {}
  Result<std::unique_ptr<PortSpace::Name>, int> Take(const std::string& name) override;
  std::optional<Owner> OwnerOf(const std::string& name) const override;

 private:
  ReadinessSet* const readiness_;
};

}  // namespace stagecoach::emu
