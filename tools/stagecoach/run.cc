// stagecoach run [OPTIONS] [--] PROGRAM [ARGUMENT...]: an unmodified RDMA program on the emulated device.
//
// The program finds libibverbs and librdmacm of this project before the system's (LD_LIBRARY_PATH), what it looks for
// of a device outside of them (surroundings.h), and in its environment everything that they are told
// (emu/world/world.h). Its children inherit all of it. This process becomes the program: no one stands between it and
// its signals, terminal and exit code. Other exit codes are those of env(1): 125 when `run` itself fails, 126 and 127
// when the program cannot be run or is not there. docs/run.md says more.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "emu/world/world.h"
#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/program.h"
#include "tools/stagecoach/surroundings.h"

namespace stagecoach::cli {
namespace {

constexpr int kExitCannotRun = 126;
constexpr int kExitNotFound = 127;

// Half of the programs that people try first connect QPs by hand, which iWARP has no form for.
constexpr const char* kDefaultProfile = "roce";

// Two processes may share a processor with a dozen others, so that a listener is late by many slices of time; and some
// programs do not survive that.
constexpr const char* kListenerPatienceVariable = "STAGECOACH_LISTENER_PATIENCE";
constexpr const char* kListenerPatience = "1000";

struct RunOptions {
  DeviceOptions device;
  std::string trace;
  std::string surroundings = "auto";
};

// The folder with the libraries; empty: there is none.
std::string LibraryFolder() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return {};
  // As installed, and as built.
  for (const char* folder : {"../lib/stagecoach", "../../verbs_shim/dropin"}) {
    const auto path = (self.parent_path() / folder).lexically_normal();
    if (std::filesystem::exists(path / "libibverbs.so.1", error)) return path.string();
  }
  return {};
}

bool SetVariable(const char* name, const std::string& value) {
  if (::setenv(name, value.c_str(), 1) == 0) return true;
  Complain("run", fmt::format("{}: {}", name, std::strerror(errno)));
  return false;
}

std::string ValueOf(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr ? value : "";
}

// What valgrind is not to report of the libraries, whatever script it is that starts it. Nothing where the file has a
// name that the variable cannot hold: its words end at white space, and nothing quotes one.
bool SetValgrindOptions(const std::string& libraries) {
  const std::string file = libraries + "/stagecoach.supp";
  std::error_code error;
  if (!std::filesystem::exists(file, error) || file.find_first_of(" \t\n\r\f\v") != std::string::npos) return true;
  const std::string before = ValueOf("VALGRIND_OPTS");
  return SetVariable("VALGRIND_OPTS", fmt::format("{}{}--suppressions={}", before, before.empty() ? "" : " ", file));
}

// The environment of the device, of the dynamic loader and of valgrind. False: said why not.
bool SetEnvironment(const RunOptions& options, const std::string& libraries) {
  DeviceOptions device = options.device;
  if (device.profile.empty() && std::getenv("STAGECOACH_PROFILE") == nullptr) device.profile = kDefaultProfile;
  // Files are emptied when all else is right.
  const std::string pcap = std::exchange(device.pcap, {});
  if (ApplyDeviceOptions("run", device) != kExitOk) return false;
  if (std::getenv(kListenerPatienceVariable) == nullptr && !SetVariable(kListenerPatienceVariable, kListenerPatience)) {
    return false;
  }
  // Programs with a device ignore what means nothing. Here is somebody who can mend it.
  if (const std::vector<std::string> wrong = emu::WrongInEnvironment(); !wrong.empty()) {
    for (const std::string& words : wrong) Complain("run", rpcrdma::file::Printable(words));
    return false;
  }
  if (!options.trace.empty() && !ApplyRecordOption("run", "--trace", options.trace, "STAGECOACH_TRACE")) return false;
  if (!pcap.empty() && !ApplyRecordOption("run", "--pcap", pcap, "STAGECOACH_PCAP")) return false;
  if (!SetValgrindOptions(libraries)) return false;
  const std::string before = ValueOf("LD_LIBRARY_PATH");
  return SetVariable("LD_LIBRARY_PATH", before.empty() ? libraries : fmt::format("{}:{}", libraries, before));
}

// False: the program must not run.
bool Surround(const RunOptions& options) {
  if (options.surroundings == "off") return true;
  const std::vector<verbs::emulated::SysfsFile> files = FilesOfDevice();
  const Surroundings result = EnterSurroundings(files);
  if (result.outcome == Surroundings::Outcome::kEntered) {
    if (options.device.verbose) Complain("run", "the program sees /sys/class/infiniband and /dev/infiniband/uverbs0");
    return true;
  }
  const std::string words =
      fmt::format("the program cannot be shown /sys/class/infiniband and /dev/infiniband/uverbs0: {}", result.reason);
  // Few programs look there, and those that do not should not hear of it.
  const bool goes_on = options.surroundings == "auto" && result.outcome == Surroundings::Outcome::kUnavailable;
  if (!goes_on || options.device.verbose) Complain("run", words);
  return goes_on;
}

int Run(const RunOptions& options, std::vector<std::string> program) {
  if (program.empty()) {
    Complain("run", "PROGRAM is required\nstagecoach run --help says more.");
    return kExitRunFailed;
  }
  const std::string libraries = LibraryFolder();
  if (libraries.empty()) {
    Complain("run", "libibverbs.so.1 is not beside this program (../lib/stagecoach), nor where the build puts it");
    return kExitRunFailed;
  }
  if (libraries.find_first_of(":;$") != std::string::npos) {
    Complain(
        "run",
        fmt::format("'{}', where the libraries are, has one of : ; $ in its name, which LD_LIBRARY_PATH cannot name",
                    rpcrdma::file::Printable(libraries)));
    return kExitRunFailed;
  }
  const std::string shown = rpcrdma::file::Printable(program.front());
  const Program found = ExamineProgram(program.front(), libraries);
  if (!found.problem.empty()) {
    Complain("run", fmt::format("'{}': {}", shown, found.problem));
    return found.path.empty() ? kExitNotFound : kExitCannotRun;
  }
  if (!found.warning.empty()) Complain("run", fmt::format("'{}': {}", shown, found.warning));
  if (!SetEnvironment(options, libraries)) return kExitRunFailed;
  if (options.device.verbose) {
    Complain("run", fmt::format("{} device, profile {}; libraries of {}", ProviderName(),
                                emu::OptionsFromEnvironment().profile.name, rpcrdma::file::Printable(libraries)));
  }
  if (!Surround(options)) return kExitRunFailed;

  std::vector<char*> arguments;
  for (std::string& argument : program) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  ::execv(found.path.c_str(), arguments.data());
  // What is neither a program nor a script may have had an interpreter all the same (binfmt_misc).
  Complain("run", fmt::format("'{}': {}", shown,
                              errno == ENOEXEC ? "it is neither a program nor a script whose first line names an "
                                                 "interpreter (#!/bin/sh)"
                                               : std::strerror(errno)));
  return kExitCannotRun;
}

}  // namespace

int TakeProgram(const CLI::App& app, int argc, char** argv, std::vector<std::string>* program) {
  if (argc < 2 || std::string_view(argv[1]) != "run") return argc;
  const CLI::App* const command = app.get_subcommand("run");
  int end = 2;
  while (end < argc) {
    const std::string argument = argv[end];
    if (argument == "--" || !argument.starts_with('-')) break;
    const size_t equals = argument.find('=');
    const CLI::Option* const option = command->get_option_no_throw(argument.substr(0, equals));
    if (option == nullptr) return argc;  // to be complained of
    end += equals == std::string::npos && option->get_items_expected_max() > 0 ? 2 : 1;
  }
  end = std::min(end, argc);
  const bool marked = end < argc && std::string_view(argv[end]) == "--";
  program->assign(argv + end + (marked ? 1 : 0), argv + argc);
  return end;
}

void AddRun(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  auto* command = app.add_subcommand("run", "Run an unmodified RDMA program on the emulated device");
  const auto options = std::make_shared<RunOptions>();
  AddDeviceOptions(*command, options->device);
  command->get_option("--profile")->default_str(kDefaultProfile);
  command->add_option("--trace", options->trace, "Write one line per decision of the device into FILE")
      ->type_name("FILE");
  command
      ->add_option(
          "--surroundings", options->surroundings,
          "Show the program a device in /sys/class and /dev, too: where that is possible, or else fail, or not")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  command->add_flag("--verbose", options->device.verbose,
                    "Say what the program is given, and what not and why; and what carries each connection");
  command->footer(
      "PROGRAM and its arguments stand behind the options, and behind -- if they could be taken for some.\n"
      "In the names of files %p is the process id; processes never share a file.\n\n"
      "  stagecoach run rping -s -a 127.0.0.1 &\n"
      "  stagecoach run rping -c -a 127.0.0.1 -C 10 -v\n"
      "  stagecoach run ibv_rc_pingpong -g 0 &\n"
      "  stagecoach run ibv_rc_pingpong -g 0 127.0.0.1");
  command->callback([options, &program, &exit_code] { exit_code = Run(*options, program); });
}

}  // namespace stagecoach::cli
