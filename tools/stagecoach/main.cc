// stagecoach: files over RPC-over-RDMA, with or without the hardware.
//
// Exit codes: 0 success, 1 failure, 2 wrong usage; of `run` see there.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {
namespace {

// Wrong usage, in the form of all other complaints.
int UsageError(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const std::vector<std::string> extra = app.remaining(/*recurse=*/true);
  std::string text = rpcrdma::file::Printable(error.what());
  if (!extra.empty()) {
    // Better than what CLI11 misses, which may be there misspelt.
    const std::string argument = rpcrdma::file::Printable(extra.front());
    if (argument.starts_with('-')) {
      text = fmt::format("'{}': no such option", argument);
    } else if (!chosen.empty()) {
      text = fmt::format("'{}': one argument too many", argument);
    } else {
      std::vector<std::string> names;
      for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
      text = fmt::format("'{}': no such command; there are {}", argument, fmt::join(names, ", "));
    }
  }
  const std::string command = chosen.empty() ? std::string() : chosen.front()->get_name();
  fmt::print(stderr, "stagecoach: {}{}{}\nstagecoach {}{}--help says more.\n", command, command.empty() ? "" : ": ",
             text, command, command.empty() ? "" : " ");
  return command == "run" ? kExitRunFailed : kExitUsage;
}

int Main(int argc, char** argv) {
  // A file over the size limit is an error of the write, not the end of the process. A program that takes the process's
  // place would inherit this.
  if (argc < 2 || std::string_view(argv[1]) != "run") std::signal(SIGXFSZ, SIG_IGN);

  CLI::App app("Files over RPC-over-RDMA, with or without the hardware.\n", "stagecoach");
  app.set_version_flag("--version", fmt::format("stagecoach {} ({})", kReleaseVersion, ProviderName()));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);

  int exit_code = kExitOk;
  AddServe(app, exit_code);
  AddLs(app, exit_code);
  AddGet(app, exit_code);
  AddPut(app, exit_code);
  AddPing(app, exit_code);
  AddSim(app, exit_code);
  AddDevInfo(app, exit_code);
  AddDecode(app, exit_code);
  std::vector<std::string> program;
  AddRun(app, program, exit_code);
  // Last: sub-commands would inherit it.
  app.footer(
      "URLs are stagecoach://HOST:PORT/PATH; the port is 20049 unless given.\n\n"
      "  stagecoach serve ~/export &\n"
      "  stagecoach put -r photos stagecoach://127.0.0.1/photos\n"
      "  stagecoach ls stagecoach://127.0.0.1/photos\n"
      "  stagecoach get --stats stagecoach://127.0.0.1/photos/one.jpg .\n\n"
      "stagecoach COMMAND --help says more.");
  if (argc == 1) {
    fmt::print("{}", app.help());
    return kExitUsage;
  }
  // CLI11 reports by exception, and so does the C++ library when the system has nothing left to give.
  try {
    const int count = TakeProgram(app, argc, argv, &program);
    if (const std::string words = RuleInPieces(argc, argv, count); !words.empty()) {
      Complain(argv[1], words);
      return std::string_view(argv[1]) == "run" ? kExitRunFailed : kExitUsage;
    }
    app.parse(count, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return UsageError(app, error);
    app.exit(error);  // --help and --version
    return kExitOk;
  } catch (const std::bad_alloc&) {
    Complain(argv[1], "there is no memory left for it");
    return kExitFailure;
  } catch (const std::system_error& error) {
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    Complain(argv[1], fmt::format("the system has {} left for it: {}", thread ? "no thread" : "nothing", error.what()));
    return kExitFailure;
  }
  // What cannot be written has not been said.
  if (std::fflush(stdout) != 0 && exit_code == kExitOk) {
    Complain("standard output", "cannot be written");
    return kExitFailure;
  }
  return exit_code;
}

}  // namespace
}  // namespace stagecoach::cli

int main(int argc, char** argv) {
  return stagecoach::cli::Main(argc, argv);
}
