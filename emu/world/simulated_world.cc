#include "emu/world/simulated_world.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace stagecoach::emu {

SimulatedWorld::SimulatedWorld(const SimWorld::Options& simulation, WorldOptions options)
    : options_(std::move(options)), sim_(simulation) {}

SimulatedWorld::~SimulatedWorld() {
  sim_.EndPrograms();
  // NICs and managers end their streams while all hosts still have their place in the world.
  for (Entry& entry : hosts_) entry.host.reset();
}

Host& SimulatedWorld::AddHost(const std::string& name, std::vector<IpEndpoint> addresses) {
  DeviceProfile profile = options_.profile;
  profile.want_crc = options_.crc;
  return AddHost(name, std::move(addresses), profile);
}

Host& SimulatedWorld::AddHost(const std::string& name, std::vector<IpEndpoint> addresses, const DeviceProfile& profile,
                              const std::vector<InjectionRule>& rules) {
  Entry entry;
  entry.name = name;
  entry.options = options_;
  entry.options.profile = profile;
  entry.options.crc = profile.want_crc;
  entry.options.rules.insert(entry.options.rules.end(), rules.begin(), rules.end());
  entry.addresses = addresses;
  entry.fabric = &sim_.AddHost(name, std::move(addresses));
  entry.host = MakeHost(entry);
  hosts_.push_back(std::move(entry));
  return *hosts_.back().host;
}

std::unique_ptr<Host> SimulatedWorld::MakeHost(const Entry& entry) {
  HostParts parts;
  parts.name = entry.name + "-rnic";
  parts.fabric = entry.fabric;
  std::string generator = "stags/" + entry.name;
  if (entry.incarnation > 1) generator += "/" + std::to_string(entry.incarnation);
  parts.stags = SeededStagSource(sim_.prng().Fork(generator));
  parts.trace = sim_.trace();
  parts.capture = options_.capture;
  if (!entry.options.rules.empty()) parts.injections = InjectionPlan::Make(entry.options.rules);
  return std::make_unique<Host>(std::move(parts), entry.options);
}

Host& SimulatedWorld::Restart(std::string_view name) {
  Entry& entry = Find(name);
  STAGECOACH_CHECK(!entry.fabric->IsUp() && !sim_.HasBlocked(*entry.fabric));
  sim_.loop().BuryDropped();
  entry.host.reset();
  sim_.Restore(*entry.fabric);
  ++entry.incarnation;
  entry.host = MakeHost(entry);
  return *entry.host;
}

SimulatedWorld::Entry& SimulatedWorld::Find(std::string_view name) {
  const auto found = std::find_if(hosts_.begin(), hosts_.end(), [&](const Entry& entry) { return entry.name == name; });
  STAGECOACH_CHECK(found != hosts_.end());
  return *found;
}

void SimulatedWorld::ActAs(std::string_view name) {
  current_ = static_cast<size_t>(&Find(name) - hosts_.data());
}

Host& SimulatedWorld::host(std::string_view name) {
  return *Find(name).host;
}

SimFabric& SimulatedWorld::fabric(std::string_view name) {
  return *Find(name).fabric;
}

Host& SimulatedWorld::current_host() {
  STAGECOACH_CHECK(!hosts_.empty());
  if (const SimFabric* const running = sim_.current_host(); running != nullptr) {
    const auto entry =
        std::find_if(hosts_.begin(), hosts_.end(), [&](const Entry& each) { return each.fabric == running; });
    STAGECOACH_CHECK(entry != hosts_.end());
    return *entry->host;
  }
  return *hosts_[current_].host;
}

Host* SimulatedWorld::FindHost(const IpEndpoint& address) {
  if (address.IsUnspecified()) return &current_host();
  for (Entry& entry : hosts_) {
    for (const IpEndpoint& own : entry.addresses) {
      if (own.WithPort(0) == address.WithPort(0)) return entry.host.get();
    }
  }
  return nullptr;
}

}  // namespace stagecoach::emu
