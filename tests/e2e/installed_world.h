// A simulated world of some hosts, as the world of the process: for tests that act on its hosts and links themselves,
// which a Setting does not let them.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>

#include "base/event_loop.h"
#include "emu/world/simulated_world.h"

namespace stagecoach::e2e {

class InstalledWorld {
 public:
  // Names and addresses.
  using Hosts = std::initializer_list<std::pair<const char*, const char*>>;
  InstalledWorld(const emu::SimWorld::Options& options, Hosts hosts) {
    auto world = std::make_unique<emu::SimulatedWorld>(options, emu::OptionsFromEnvironment());
    for (const auto& [name, address] : hosts) world->AddHost(name, {*emu::IpEndpoint::Parse(address, 0)});
    world_ = world.get();
    emu::World::Install(std::move(world));
  }

  EventLoop& loop() { return world_->sim().loop(); }
  Instant Now() { return loop().Now(); }
  void For(Duration time) { world_->sim().RunFor(time); }
  // Within as much virtual time as anything in a test may take.
  bool Until(const std::function<bool()>& done) {
    bool late = false;
    const auto limit = loop().At(Now() + 3600s, [&late] { late = true; });
    const bool ended = world_->sim().RunUntil([&] { return late || done(); });
    loop().Cancel(limit);
    return ended && !late;
  }

 protected:
  ~InstalledWorld() = default;
  // The last that a test does: what has ended in the world is let go of, and then the world is.
  void Uninstall() {
    For(1ms);
    emu::World::Install(nullptr);
  }

  emu::SimulatedWorld* world_ = nullptr;
};

}  // namespace stagecoach::e2e
