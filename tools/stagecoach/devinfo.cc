// stagecoach devinfo [PROFILE]: what the emulated device is: identity, limits, habits.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "emu/nic/device_profile.h"
#include "emu/world/world.h"
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {
namespace {

int DevInfo(const std::string& name) {
  emu::DeviceProfile profile = emu::OptionsFromEnvironment().profile;
  if (!name.empty()) {
    const auto found = emu::ProfileByName(name);
    if (!found) {
      Complain("devinfo", fmt::format("'{}': no such profile; there are iwarp, roce, minimal, hostile", name));
      return kExitUsage;
    }
    profile = *found;
    emu::TakePortsFromEnvironment(&profile);
  }
  fmt::print("{}", emu::DescribeProfile(profile));
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
