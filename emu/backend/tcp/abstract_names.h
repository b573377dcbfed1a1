// AbstractNames: names that processes of one host (one network namespace) have for themselves, as Linux's abstract Unix
// sockets.
//
// A bound socket is the name: nobody else can bind it, everybody can see that it is there, and it goes with its last
// descriptor; forked children have none (base/fork). Nothing is ever sent or read: they are datagram sockets that are
// connected to no further than to see whether they exist. Threading: any thread.
#pragma once

#include <memory>
#include <string>

#include "emu/fabric/port_space.h"

namespace stagecoach::emu {

class AbstractNames final : public PortSpace::System {
 public:
  Result<std::unique_ptr<PortSpace::Name>, int> Take(const std::string& name) override;
  bool IsTaken(const std::string& name) const override;
};

}  // namespace stagecoach::emu
