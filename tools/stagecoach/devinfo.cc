// stagecoach devinfo [PROFILE]: what the emulated device is: identity, limits, habits, and whether it
// can share memory with its neighbours.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "emu/nic/device_profile.h"
#include "emu/world/world.h"
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {
namespace {

// What may go through it, as far as it is for this process to say.
std::string SharedMemory(const emu::WorldOptions& options) {
  if (options.backend == emu::BackendChoice::kTcp) {
    return fmt::format("no: {}", emu::ToString(emu::ShmObstacle::kTcpWanted));
  }
  if (const auto obstacle = emu::WhyNotShm()) return fmt::format("no: {}", emu::ToString(*obstacle));
  return fmt::format("yes, with processes of this {}; large payload {}",
                     options.shm_users == emu::ShmUsers::kSame ? "user" : "host",
                     options.shm_payload == emu::ShmPayload::kRead ? "may be read where it lies" : "is copied");
}

int DevInfo(const std::string& name) {
  const emu::WorldOptions options = emu::OptionsFromEnvironment();
  emu::DeviceProfile profile = options.profile;
  if (!name.empty()) {
    const auto found = emu::ProfileByName(name);
    if (!found) {
      Complain("devinfo", fmt::format("'{}': no such profile; there are iwarp, roce, minimal, hostile", name));
      return kExitUsage;
    }
    profile = *found;
    emu::TakePortsFromEnvironment(&profile);
  }
  fmt::print("{}backend: {}\nshared_memory: {}\n", emu::DescribeProfile(profile), emu::ToString(options.backend),
             SharedMemory(options));
  return kExitOk;
}

}  // namespace

void AddDevInfo(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("devinfo", "Show what the emulated RDMA device is");
  const auto profile = std::make_shared<std::string>();
  command->add_option("PROFILE", *profile, "Of this one; else of what STAGECOACH_PROFILE names, or iwarp");
  command->callback([profile, &exit_code] { exit_code = DevInfo(*profile); });
}

}  // namespace stagecoach::cli
