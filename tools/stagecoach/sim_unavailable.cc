// stagecoach sim, in builds over rdma-core: there is no simulating the system's device.
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {

void AddSim(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("sim", "Run worlds in virtual time (not in this build)");
  command->allow_extras();
  command->callback([&exit_code] {
    Complain("sim",
             "this build uses the system's RDMA device; the default build, without --config=rdma_core, has worlds");
    exit_code = kExitUsage;
  });
}

}  // namespace stagecoach::cli
