#include "emu/world/simulated_world.h"
#include "tests/e2e/setting.h"

namespace stagecoach::e2e {
namespace {

using emu::IpEndpoint;
using emu::SimulatedWorld;

class SimulatedSetting final : public Setting {
 public:
  SimulatedSetting(uint64_t seed, TraceSink* trace) {
    emu::SimWorld::Options options;
    options.seed = seed;
    options.trace = trace;
    options.link.chop = true;
    options.link.jitter = 3us;
    auto world = std::make_unique<SimulatedWorld>(options, emu::OptionsFromEnvironment());
    world->AddHost("server", {*IpEndpoint::Parse("10.0.0.1", 0)});
    world->AddHost("client", {*IpEndpoint::Parse("10.0.0.2", 0)});
    world_ = world.get();
    emu::World::Install(std::move(world));
  }
  ~SimulatedSetting() override { emu::World::Install(nullptr); }

  EventLoop& loop() override { return world_->sim().loop(); }
  void ActAsServer() override { world_->ActAs("server"); }
  void ActAsClient() override { world_->ActAs("client"); }
  std::string server_host() const override { return "10.0.0.1"; }
  bool Until(const std::function<bool()>& done) override {
    bool late = false;
    const auto limit = loop().At(loop().Now() + 100s, [&late] { late = true; });
    const bool ended = world_->sim().RunUntil([&] { return late || done(); });
    loop().Cancel(limit);
    return ended && !late;
  }

 private:
  SimulatedWorld* world_ = nullptr;
};

}  // namespace

std::unique_ptr<Setting> MakeSetting(uint64_t seed, TraceSink* trace) {
  return std::make_unique<SimulatedSetting>(seed, trace);
}

}  // namespace stagecoach::e2e
