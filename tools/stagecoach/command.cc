#include "tools/stagecoach/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/ulb/file/names.h"
#include "rpcrdma/ulb/file/types.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/profile.h"
#include "tools/stagecoach/text.h"

#if !defined(STAGECOACH_RDMA_CORE)
#include "emu/inject/rule.h"
#include "emu/nic/device_profile.h"
#include "emu/world/record_file.h"
#include "emu/world/world.h"
#endif

namespace stagecoach::cli {
namespace {

#if !defined(STAGECOACH_RDMA_CORE)
// What says to the device, when it is first used, which one it is (emu/world/world.h).
constexpr const char* kProfileVariable = "STAGECOACH_PROFILE";
constexpr const char* kRulesVariable = "STAGECOACH_RULES";
#endif

// Those that the two ends can tell each other (ClientOptions::inline_threshold).
constexpr uint64_t kThresholdStep = 1024;

// In the largest unit that ParseSize takes it in.
std::string SizeText(uint64_t bytes) {
  std::string_view unit;
  for (const std::string_view larger : {"K", "M", "G"}) {
    if (bytes == 0 || bytes % 1024 != 0) break;
    bytes /= 1024;
    unit = larger;
  }
  return fmt::format("{}{}", bytes, unit);
}

// Who runs this, as AUTH_SYS says it; groups beyond the first are of no use to a server that only asks for the flavor.
rpcrdma::OpaqueAuth OwnAuthSys() {
  std::array<char, rpcrdma::kAuthSysMachineNameMax + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) name[0] = '\0';
  return *rpcrdma::MakeAuthSys({.machine_name = name.data(), .uid = ::getuid(), .gid = ::getgid()});
}

}  // namespace

std::function<std::string(const std::string&)> SizeFrom(uint64_t low, uint64_t high, uint64_t step) {
  return [=](const std::string& text) -> std::string {
    const auto size = ParseSize(text);
    if (size && *size >= low && *size <= high && *size % step == 0) return {};
    return fmt::format("'{}' is not a size from {} to {}{}", text, SizeText(low), SizeText(high),
                       step == 1 ? "" : fmt::format(", in steps of {}", SizeText(step)));
  };
}

std::string CheckDataSize(const std::string& text) {
  return SizeFrom(4096, rpcrdma::file::kDataMax)(text);
}

std::string CheckThreshold(const std::string& text) {
  return SizeFrom(rpcrdma::kDefaultInlineThreshold, rpcrdma::kMaxInlineThreshold, kThresholdStep)(text);
}

void Complain(std::string_view command, std::string_view text) {
  // What is on standard output came first, also when both are one file.
  std::fflush(stdout);
  fmt::print(stderr, "stagecoach: {}: {}\n", command, text);
}

std::optional<Url> UrlArgument(std::string_view command, const std::string& text) {
  auto url = ParseUrl(text);
  if (url) return std::move(*url);
  Complain(command, url.error());
  return std::nullopt;
}

std::string_view ProviderName() {
#if defined(STAGECOACH_RDMA_CORE)
  return "rdma-core";
#else
  const char* const name = std::getenv(kProfileVariable);
  const auto profile = emu::ProfileByName(name != nullptr ? name : "");
  return profile && profile->transport == emu::TransportKind::kInfiniband ? "emulated InfiniBand" : "emulated iWARP";
#endif
}

void AddDeviceOptions(CLI::App& command, DeviceOptions& options) {
  command.add_option("--pcap", options.pcap, "Capture all RDMA traffic of this process into FILE, for Wireshark")
      ->type_name("FILE");
  command.add_option("--profile", options.profile, "Which device to emulate; both ends need one of the same transport")
      ->type_name("NAME")
      ->check(CLI::IsMember({"iwarp", "roce", "minimal", "hostile"}));
  command
      .add_option("--backend", options.backend,
                  "What carries RDMA between processes of one host: shared memory (shm), TCP (tcp), or shared memory "
                  "where both ends have it (auto, the default; docs/shared_memory.md)")
      ->type_name("WHAT")
      ->check(CLI::IsMember({"auto", "shm", "tcp"}));
  command
      .add_option("--shm", options.shm,
                  "With whom memory is shared: processes of any user (any-user, the default) or of this one's alone "
                  "(same-user)")
      ->type_name("USERS")
      ->check(CLI::IsMember({"any-user", "same-user"}));
  command
      .add_option(
          "--shm-payload", options.shm_payload,
          "What becomes of large payload in shared memory: it is copied (copy, the default), or processes of this "
          "user that say so, too, read it where it lies (read)")
      ->type_name("HOW")
      ->check(CLI::IsMember({"copy", "read"}));
  command
      .add_option(
          "--rule", options.rules,
          "Do something to the device or its connections, such as 'disconnect message=10'; may be given several "
          "times (docs/injections.md)")
      ->type_name("RULE")
      ->allow_extra_args(false);
}

void AddCommonOptions(CLI::App& command, CommonOptions& options) {
  AddDeviceOptions(command, options.device);
  command
      .add_option("--inline-threshold", options.inline_threshold,
                  "Largest message that travels without chunks; the smaller of both ends' counts")
      ->type_name("SIZE")
      ->check(CheckThreshold)
      ->capture_default_str();
  std::vector<std::string> profiles;
  for (const rpcrdma::ProtocolProfile& profile : rpcrdma::AllProfiles()) profiles.emplace_back(profile.name);
  command
      .add_option("--rpcrdma-profile", options.rpcrdma_profile,
                  "Which document of RPC-over-RDMA version 1 to follow (docs/profiles.md)")
      ->type_name("NAME")
      ->check(CLI::IsMember(profiles))
      ->capture_default_str();
  command
      .add_option(
          "--rpcrdma", options.rpcrdma,
          "Which version of RPC-over-RDMA to speak; auto: 2 if the peer does and --inline-threshold is at least "
          "4K, else 1 (docs/version2.md)")
      ->type_name("VERSION")
      ->check(CLI::IsMember({"1", "2", "auto"}))
      ->capture_default_str();
  command.parse_complete_callback([&command, &options] {
    if (options.rpcrdma != "2") return;
    if (InlineThresholdOf(options) < rpcrdma::kDefaultReceiveBufferSize) {
      throw CLI::ValidationError(
          "--rpcrdma", fmt::format("2 carries 4K inline, and --inline-threshold is {}", options.inline_threshold));
    }
    if (command.count("--ccp") > 0) throw CLI::ValidationError("--rpcrdma", "--ccp is of version 1");
  });
}

rpcrdma::TransportVersions RpcrdmaVersionsOf(const CommonOptions& options) {
  if (options.rpcrdma == "2") return rpcrdma::kVersion2Alone;
  const bool may_be_2 = options.rpcrdma == "auto" && !WhyNotVersion2(options);
  return may_be_2 ? rpcrdma::kVersions1And2 : rpcrdma::kVersion1Alone;
}

std::optional<std::string> WhyNotVersion2(const CommonOptions& options) {
  if (options.rpcrdma != "auto" || InlineThresholdOf(options) >= rpcrdma::kDefaultReceiveBufferSize) {
    return std::nullopt;
  }
  return fmt::format("version 2 needs an --inline-threshold of at least {}, and this one is {}",
                     SizeText(rpcrdma::kDefaultReceiveBufferSize), options.inline_threshold);
}

uint32_t InlineThresholdOf(const CommonOptions& options) {
  return static_cast<uint32_t>(*ParseSize(options.inline_threshold));
}

const rpcrdma::ProtocolProfile& RpcrdmaProfileOf(const CommonOptions& options) {
  return *rpcrdma::FindProfile(options.rpcrdma_profile);
}

#if defined(STAGECOACH_RDMA_CORE)
int ApplyDeviceOptions(std::string_view command, const DeviceOptions& options) {
  const struct {
    bool given;
    const char* text;
  } kEmulated[] = {
      {!options.pcap.empty(), "--pcap: captures are made by"},
      {!options.profile.empty(), "--profile: is of"},
      {!options.rules.empty(), "--rule: injections are of"},
      {!options.backend.empty(), "--backend: is of"},
      {!options.shm.empty(), "--shm: is of"},
      {!options.shm_payload.empty(), "--shm-payload: is of"},
  };
  for (const auto& option : kEmulated) {
    if (!option.given) continue;
    Complain(command, fmt::format("{} the emulated device, and this build uses rdma-core; a build without "
                                  "--config=rdma_core has it",
                                  option.text));
    return kExitFailure;
  }
  return kExitOk;
}

std::string RuleInPieces(int, char**, int) {
  return {};
}
#else
namespace {

// The rules of the options, or else of the environment, which no program is to start with when they are wrong. Says so,
// and returns false.
bool ApplyRules(std::string_view command, const std::vector<std::string>& options) {
  const char* const inherited = std::getenv(kRulesVariable);
  if (options.empty() && inherited == nullptr) return true;
  const char* const profile_name = std::getenv(kProfileVariable);
  const emu::DeviceProfile profile =
      emu::ProfileByName(profile_name != nullptr ? profile_name : "").value_or(emu::IwarpProfile());
  std::vector<emu::InjectionRule> rules;
  const auto add = [&](std::string_view from, std::string_view text) {
    const auto parsed = emu::ParseInjectionRules(text);
    std::string wrong = parsed ? emu::WhyNoRules(profile, *parsed) : parsed.error().Explain(text);
    if (parsed && parsed->empty() && !options.empty()) wrong = emu::kNoRule;
    if (parsed) rules.insert(rules.end(), parsed->begin(), parsed->end());
    if (wrong.empty() && rules.size() > emu::kMostRules) wrong = emu::MoreThanMostRules();
    if (!wrong.empty()) Complain(command, fmt::format("{}: {}", from, wrong));
    return wrong.empty();
  };
  for (const std::string& text : options) {
    if (!add("--rule", text)) return false;
  }
  if (options.empty()) return add(kRulesVariable, inherited);
  if (::setenv(kRulesVariable, emu::ToString(rules).c_str(), 1) == 0) return true;
  Complain(command, fmt::format("--rule: {}", std::strerror(errno)));
  return false;
}

// A rule is in it, and one alone.
bool IsRule(const std::string& text) {
  const auto parsed = emu::ParseInjectionRules(text);
  return parsed && parsed->size() == 1;
}

}  // namespace

std::string RuleInPieces(int argc, char** argv, int count) {
  constexpr std::string_view kOption = "--rule";
  for (int i = 1; i < count; ++i) {
    const std::string_view argument = argv[i];
    const bool is_joined = argument.starts_with("--rule=");
    const int first = is_joined ? i : i + 1;
    if (!(is_joined || argument == kOption) || first + 1 >= argc) continue;
    const std::string begin(is_joined ? argument.substr(kOption.size() + 1) : std::string_view(argv[first]));
    const std::string all = begin + " " + argv[first + 1];
    // Of `sim` it may begin with a host.
    const size_t colon = begin.find(':');
    const std::string rule = colon == std::string::npos ? begin : begin.substr(colon + 1);
    const bool is_host = colon != std::string::npos && rule.find_first_not_of(' ') == std::string::npos;
    if (!(is_host || IsRule(rule)) || !IsRule(all.substr(begin.size() - rule.size()))) continue;
    return fmt::format("--rule {}: a rule is one argument, so quote it: --rule '{}'", rpcrdma::file::Printable(all),
                       rpcrdma::file::Printable(all));
  }
  return {};
}

int ApplyDeviceOptions(std::string_view command, const DeviceOptions& options) {
  const struct {
    const char* option;
    const char* variable;
    std::string value;  // empty: what the environment says
  } kVariables[] = {
      {"--profile", kProfileVariable, options.profile},
      {"--backend", "STAGECOACH_BACKEND", options.backend},
      {"--shm", "STAGECOACH_SHM", options.shm},
      {"--shm-payload", "STAGECOACH_SHM_PAYLOAD", options.shm_payload},
      {"--verbose", "STAGECOACH_VERBOSE", options.verbose ? "on" : ""},
  };
  for (const auto& [option, variable, value] : kVariables) {
    if (value.empty() || ::setenv(variable, value.c_str(), 1) == 0) continue;
    Complain(command, fmt::format("{}: {}", option, std::strerror(errno)));
    return kExitFailure;
  }
  if (!ApplyRules(command, options.rules)) return kExitUsage;
  if (!options.pcap.empty() && !ApplyRecordOption(command, "--pcap", options.pcap, "STAGECOACH_PCAP")) {
    return kExitFailure;
  }
  return kExitOk;
}
#endif

#if !defined(STAGECOACH_RDMA_CORE)
bool ApplyRecordOption(std::string_view command, const char* option, const std::string& name, const char* variable) {
  // The emulated device opens the file when it is first used and could then only go on without it. It is its owner's
  // alone: captures show what was transferred.
  if (const auto made = emu::EmptyRecordFile(name, 0600); !made) {
    Complain(command, fmt::format("{} '{}': {}", option, rpcrdma::file::Printable(name), made.error()));
    return false;
  }
  std::error_code error;
  std::string path = name;
  if (!name.starts_with('/')) {
    path = std::filesystem::current_path(error).string();
    for (size_t at = path.find('%'); at != std::string::npos; at = path.find('%', at + 2)) path.insert(at, 1, '%');
    path += "/" + name;
  }
  if (!error && ::setenv(variable, path.c_str(), 1) == 0) return true;
  Complain(command, fmt::format("{}: {}", option, error ? error.message() : std::strerror(errno)));
  return false;
}
#endif

void AddClientOptions(CLI::App& command, ClientCommandOptions& options) {
  AddCommonOptions(command, options.common);
  command.add_flag("--stats,-v", options.stats, "At the end, print what RDMA did");
  command.add_flag("--verbose", options.common.device.verbose, "Say what carries each connection");
  command
      .add_option("--timeout", options.timeout_seconds,
                  "Give up on connecting (after 10 at most) or on a call after so long")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  CLI::Option* const ccp = command.add_flag(
      "--ccp", options.ccp,
      "Begin by asking the server for messages of --inline-threshold, as RFC 5666 does; for peers that "
      "exchange no private data");
  AddCcpAuthOption(command, ccp, "The credential that goes with the question", options.ccp_auth);
}

void AddCcpAuthOption(CLI::App& command, CLI::Option* ccp, const char* help, std::string& auth) {
  command.add_option("--ccp-auth", auth, help)
      ->needs(ccp)
      ->type_name("FLAVOR")
      ->check(CLI::IsMember({"none", "sys"}))
      ->capture_default_str();
}

void AddEntriesOption(CLI::App& command, uint64_t& entries_max) {
  command
      .add_option("--max-entries", entries_max, "Give up on a server that lists more files and directories than this")
      ->type_name("N")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1'000'000'000}))
      ->capture_default_str();
}

Session::Options ToSessionOptions(const ClientCommandOptions& options) {
  Session::Options session;
  session.inline_threshold = InlineThresholdOf(options.common);
  session.profile = RpcrdmaProfileOf(options.common);
  session.versions = RpcrdmaVersionsOf(options.common);
  session.why_not_version_2 = WhyNotVersion2(options.common);
  session.ccp.enabled = options.ccp;
  if (options.ccp_auth == "sys") session.ccp.credentials = OwnAuthSys();
  session.timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.timeout_seconds));
  return session;
}

}  // namespace stagecoach::cli
