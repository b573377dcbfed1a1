// stagecoach devinfo, in builds over rdma-core: the system's own tools describe its devices.
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {

void AddDevInfo(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("devinfo", "Show what the emulated RDMA device is (not in this build)");
  command->allow_extras();
  command->callback([&exit_code] {
    Complain("devinfo", "this build uses the system's RDMA device, which ibv_devinfo describes");
    exit_code = kExitUsage;
  });
}

}  // namespace stagecoach::cli
