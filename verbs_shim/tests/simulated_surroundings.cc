// Virtual time: two hosts, a fresh world for each test, and a seed that is the test's own name.

#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "base/prng.h"
#include "emu/world/simulated_world.h"
#include "verbs_shim/tests/simulated_surroundings.h"
#include "verbs_shim/tests/surroundings.h"

namespace stagecoach::verbs {
namespace {

using emu::IpEndpoint;
using emu::SimulatedWorld;

IpEndpoint Address(const char* text, uint16_t port = 0) {
  return *IpEndpoint::Parse(text, port);
}

sockaddr_storage ToStorage(const IpEndpoint& endpoint) {
  sockaddr_storage storage{};
  endpoint.ToSockaddr(&storage);
  return storage;
}

class SimulatedSurroundings final : public Surroundings {
 public:
  void Begin() override {
    trace_ = TraceHash();
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    emu::SimWorld::Options options;
    options.seed = StableHash(std::string(info->test_suite_name()) + "." + info->name());
    options.trace = &trace_;
    options.link.chop = true;
    options.link.jitter = 3us;
    auto world = std::make_unique<SimulatedWorld>(options, emu::OptionsFromEnvironment());
    world->AddHost("server", {Address("10.0.0.1"), Address("fd00::1")});
    world->AddHost("client", {Address("10.0.0.2"), Address("fd00::2")});
    world_ = world.get();
    emu::World::Install(std::move(world));
  }
  void End() override {
    world_ = nullptr;
    emu::World::Install(nullptr);
  }

  void ActAsServer() override { world_->ActAs("server"); }
  void ActAsClient() override { world_->ActAs("client"); }
  sockaddr_storage ServerAddress() const override { return ToStorage(Address("10.0.0.1")); }
  std::optional<sockaddr_storage> ServerAddress6() const override { return ToStorage(Address("fd00::1")); }
  sockaddr_storage RefusingAddress() const override { return ToStorage(Address("10.0.0.1", 9)); }

  bool Until(const std::function<bool()>& done) override {
    bool late = false;
    const auto deadline = world_->sim().loop().At(world_->sim().Now() + 10s, [&late] { late = true; });
    const bool satisfied = world_->sim().RunUntil([&] { return late || done(); });
    world_->sim().loop().Cancel(deadline);
    return satisfied && !late;
  }

  bool Elapse(Duration time) override {
    world_->sim().RunFor(time);
    return true;
  }

  void SideBySide(std::function<void()> server, std::function<void()> client) override {
    const auto first = world_->sim().Spawn(world_->fabric("server"), "server", std::move(server));
    const auto second = world_->sim().Spawn(world_->fabric("client"), "client", std::move(client));
    EXPECT_TRUE(world_->sim().RunUntil([&] { return first->IsFinished() && second->IsFinished(); }))
        << world_->sim().Describe();
  }

  bool HasThreads() const override { return false; }

  const TraceHash& trace() const { return trace_; }

 private:
  TraceHash trace_;
  SimulatedWorld* world_ = nullptr;
};

SimulatedSurroundings& TheOne() {
  static SimulatedSurroundings surroundings;
  return surroundings;
}

}  // namespace

Surroundings& TheSurroundings() {
  return TheOne();
}

const TraceHash& SimulatedTrace() {
  return TheOne().trace();
}

}  // namespace stagecoach::verbs
