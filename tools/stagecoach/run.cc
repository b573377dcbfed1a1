// stagecoach run [OPTIONS] [--] PROGRAM [ARGUMENT...]: an unmodified RDMA program on the emulated device.
//
// The program finds libibverbs and librdmacm of this project before the system's (LD_LIBRARY_PATH), and everything they
// are told stands in its environment (emu/world/world.h), which its children inherit. Exit codes are the program's; 126
// and 127 when it cannot be run, as env(1) has them.
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"

namespace stagecoach::cli {
namespace {

constexpr int kExitCannotRun = 126;
constexpr int kExitNotFound = 127;

// Half of the programs that people try first connect QPs by hand, which iWARP has no form for.
constexpr const char* kDefaultProfile = "roce";

struct RunOptions {
  DeviceOptions device;
  std::string trace;
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

// Where execvp(3) would find it; empty: nowhere.
std::string FindProgram(const std::string& name) {
  const auto is_file = [](const std::string& path) {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
  };
  if (name.find('/') != std::string::npos) return is_file(name) ? name : std::string();
  const char* const path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin";
  while (true) {
    const std::string_view folder = rest.substr(0, rest.find(':'));
    const std::string candidate = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    if (is_file(candidate) && ::access(candidate.c_str(), X_OK) == 0) return candidate;
    if (folder.size() == rest.size()) return {};
    rest.remove_prefix(folder.size() + 1);
  }
}

// Why the dynamic loader would give this program the system's libraries all the same; empty: it would not, as far as
// can be seen.
std::string WhyNot(const std::string& program) {
  struct stat status {};
  if (::stat(program.c_str(), &status) == 0 && (status.st_mode & (S_ISUID | S_ISGID)) != 0 && ::geteuid() != 0) {
    return "it is set-user-ID or set-group-ID, and such programs take no libraries from LD_LIBRARY_PATH; run a copy of "
           "it";
  }
  if (::geteuid() != 0 && ::getxattr(program.c_str(), "security.capability", nullptr, 0) > 0) {
    return "it has file capabilities, and such programs take no libraries from LD_LIBRARY_PATH; run a copy of it";
  }
  const int fd = ::open(program.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const std::unique_ptr<const int, void (*)(const int*)> closer(&fd, [](const int* open) { ::close(*open); });
  Elf64_Ehdr header{};
  if (::pread(fd, &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header))) return {};
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return {};  // a script, whose interpreter will do
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return "it is a 32-bit program, and the libraries have 64 bits";
  for (uint16_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    const auto at = static_cast<off_t>(header.e_phoff + uint64_t{i} * header.e_phentsize);
    if (::pread(fd, &segment, sizeof(segment), at) != static_cast<ssize_t>(sizeof(segment))) return {};
    if (segment.p_type == PT_INTERP) return {};
  }
  return "it is linked statically, and loads no libraries; build it with shared libibverbs and librdmacm";
}

bool SetVariable(const char* name, const std::string& value) {
  if (::setenv(name, value.c_str(), 1) == 0) return true;
  Complain("run", fmt::format("{}: {}", name, std::strerror(errno)));
  return false;
}

int Run(const RunOptions& options, std::vector<std::string> program) {
  if (program.empty()) {
    Complain("run", "PROGRAM is required\nstagecoach run --help says more.");
    return kExitUsage;
  }
  const std::string shown = rpcrdma::file::Printable(program.front());
  const std::string folder = LibraryFolder();
  if (folder.empty()) {
    Complain("run", "libibverbs.so.1 is not beside this program (../lib/stagecoach), nor where the build puts it");
    return kExitFailure;
  }
  const std::string path = FindProgram(program.front());
  if (path.empty()) {
    Complain("run", fmt::format("'{}': no such program", shown));
    return kExitNotFound;
  }
  if (const std::string reason = WhyNot(path); !reason.empty()) {
    Complain("run", fmt::format("'{}': {}", shown, reason));
    return kExitCannotRun;
  }
  DeviceOptions device = options.device;
  if (device.profile.empty() && std::getenv("STAGECOACH_PROFILE") == nullptr) device.profile = kDefaultProfile;
  if (!ApplyDeviceOptions("run", device)) return kExitFailure;
  if (!options.trace.empty() && !ApplyRecordOption("run", "--trace", options.trace, "STAGECOACH_TRACE")) {
    return kExitFailure;
  }
  const char* const before = std::getenv("LD_LIBRARY_PATH");
  const bool alone = before == nullptr || *before == '\0';
  if (!SetVariable("LD_LIBRARY_PATH", alone ? folder : fmt::format("{}:{}", folder, before))) return kExitFailure;

  std::vector<char*> arguments;
  for (std::string& argument : program) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  ::execv(path.c_str(), arguments.data());
  Complain("run", fmt::format("'{}': {}", shown, std::strerror(errno)));
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
  command->footer(
      "PROGRAM and its arguments stand behind the options, and behind -- if they could be taken for some.\n\n"
      "  stagecoach run rping -s -a 127.0.0.1 &\n"
      "  stagecoach run rping -c -a 127.0.0.1 -C 10 -v\n"
      "  stagecoach run ibv_rc_pingpong -g 0 &\n"
      "  stagecoach run ibv_rc_pingpong -g 0 127.0.0.1");
  command->callback([options, &program, &exit_code] { exit_code = Run(*options, program); });
}

}  // namespace stagecoach::cli
