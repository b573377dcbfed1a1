// SimulatedWorld: several hosts in one process, on one thread, in virtual time; each with a fabric, a NIC and a
// connection manager.
//
// Programs under test call the stock API as ever. Whose call it is follows from the objects involved; where there are
// none yet (opening a device, creating an id or an event channel) it is the host whose program is running: one spawned
// there (SimWorld::Spawn), or a callback of its program_loop(). For the main context it is the host it says it acts as.
// An id follows the source address it is bound to.
//
// Single-threaded, like everything in a simulation.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "emu/sim/sim_world.h"
#include "emu/world/world.h"

namespace stagecoach::emu {

class SimulatedWorld final : public World {
 public:
  // A trace goes to `simulation.trace` and a capture to `options.capture`; the paths have no effect here.
  SimulatedWorld(const SimWorld::Options& simulation, WorldOptions options = {});
  ~SimulatedWorld() override;

  // The first host added is the one programs act as at first. Addresses as for SimWorld::AddHost. The NIC is called
  // NAME-rnic.
  Host& AddHost(const std::string& name, std::vector<IpEndpoint> addresses);
  // ... with a device of its own kind, which also says whether CRCs are asked for, and rules behind those of the
  // options.
  Host& AddHost(const std::string& name, std::vector<IpEndpoint> addresses, const DeviceProfile& profile,
                const std::vector<InjectionRule>& rules = {});
  // Whose calls those of the main context are. `name` must be a host.
  void ActAs(std::string_view name);
  // A new NIC and manager, with STags of their own, on the fabric and addresses of a host that was cut
  // (SimWorld::CutHost), which is up again. All objects of its programs have been destroyed and no program is blocked
  // on it.
  Host& Restart(std::string_view name);

  SimWorld& sim() { return sim_; }
  Host& host(std::string_view name);
  SimFabric& fabric(std::string_view name);

  Host& current_host() override;
  Host* FindHost(const IpEndpoint& address) override;

 private:
  struct Entry {
    std::string name;
    std::vector<IpEndpoint> addresses;
    WorldOptions options;
    SimFabric* fabric = nullptr;
    uint32_t incarnation = 1;
    std::unique_ptr<Host> host;
  };
  std::unique_ptr<Host> MakeHost(const Entry& entry);
  Entry& Find(std::string_view name);

  const WorldOptions options_;
  SimWorld sim_;
  std::vector<Entry> hosts_;
  size_t current_ = 0;
};

}  // namespace stagecoach::emu
