// stagecoach run, in builds over rdma-core: programs have the system's device without it.
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {

int TakeProgram(const CLI::App&, int argc, char** argv, std::vector<std::string>*) {
  return argc > 2 && std::string_view(argv[1]) == "run" ? 2 : argc;
}

void AddRun(CLI::App& app, const std::vector<std::string>&, int& exit_code) {
  auto* command =
      app.add_subcommand("run", "Run an unmodified RDMA program on the emulated device (not in this build)");
  command->callback([&exit_code] {
    Complain("run", "this build uses the system's RDMA device, which programs find by themselves");
    exit_code = kExitRunFailed;
  });
}

}  // namespace stagecoach::cli
