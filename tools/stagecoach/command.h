// What the sub-commands share. Each lives in a file of its own and adds itself to the command line; its callback stores
// the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "tools/stagecoach/session.h"
#include "tools/stagecoach/url.h"

namespace stagecoach::cli {

inline constexpr std::string_view kReleaseVersion = "0.1.0";

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
// Of `run`, whose other exit codes are the program's; wrong usage, too.
inline constexpr int kExitRunFailed = 125;

void AddServe(CLI::App& app, int& exit_code);
void AddLs(CLI::App& app, int& exit_code);
void AddGet(CLI::App& app, int& exit_code);
void AddPut(CLI::App& app, int& exit_code);
void AddPing(CLI::App& app, int& exit_code);
void AddSim(CLI::App& app, int& exit_code);
void AddDevInfo(CLI::App& app, int& exit_code);
void AddDecode(CLI::App& app, int& exit_code);
// What it runs does not go through the parser, which would look for options in it.
void AddRun(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
// The program of `stagecoach run` with its arguments; returns how many arguments are left for the parser.
int TakeProgram(const CLI::App& app, int argc, char** argv, std::vector<std::string>* program);

// "stagecoach: COMMAND: TEXT" on standard error.
void Complain(std::string_view command, std::string_view text);
// The URL argument of a command. Complains, and is empty, when it is none: wrong usage.
std::optional<Url> UrlArgument(std::string_view command, const std::string& text);

// What the emulated device is like.
struct DeviceOptions {
  std::string pcap;
  std::string profile;             // empty: what the environment says
  std::vector<std::string> rules;  // empty: what the environment says
  std::string backend;             // likewise
  std::string shm;                 // likewise
  std::string shm_payload;         // likewise
  bool verbose = false;            // an option of commands; the device says what carries each connection
};
void AddDeviceOptions(CLI::App& command, DeviceOptions& options);
// Acts on them; before the first use of a device. Complains when one cannot be honoured, and returns the exit code; 0:
// go on.
int ApplyDeviceOptions(std::string_view command, const DeviceOptions& options);

// A rule that was not quoted, of which a shell has made several arguments: "--rule disconnect message=10". Says so, and
// what was meant; empty: there is none. Of the arguments the first `count` are the command's own, and a program's stand
// behind them.
std::string RuleInPieces(int argc, char** argv, int count);

// A file in which the device records, in a variable of its environment, for processes that may change their folder.
// Complains and returns false when it cannot be made. Not in builds over rdma-core.
bool ApplyRecordOption(std::string_view command, const char* option, const std::string& name, const char* variable);

// Options of every sub-command that serves or connects.
struct CommonOptions {
  DeviceOptions device;
  std::string inline_threshold = "4K";                     // a size that AddCommonOptions has checked
  std::string rpcrdma_profile{rpcrdma::kRfc5666bis.name};  // likewise
  std::string rpcrdma = "1";                               // "1", "2" or "auto"
};
// `options` lasts as long as the command.
void AddCommonOptions(CLI::App& command, CommonOptions& options);
// Bytes.
uint32_t InlineThresholdOf(const CommonOptions& options);
const rpcrdma::ProtocolProfile& RpcrdmaProfileOf(const CommonOptions& options);
// Version 1 alone is what is left of "auto" where messages are shorter than version 2 has to carry inline.
rpcrdma::TransportVersions RpcrdmaVersionsOf(const CommonOptions& options);
// Why it is, as a clause; nothing where "auto" is left as it is, or was not asked for.
std::optional<std::string> WhyNotVersion2(const CommonOptions& options);

// Options of the commands that connect.
struct ClientCommandOptions {
  CommonOptions common;
  bool stats = false;
  double timeout_seconds = 60;
  bool ccp = false;
  std::string ccp_auth = "none";
};
void AddClientOptions(CLI::App& command, ClientCommandOptions& options);

// --ccp-auth, which goes with --ccp.
void AddCcpAuthOption(CLI::App& command, CLI::Option* ccp, const char* help, std::string& auth);

// A check of options that are sizes, as ParseSize takes them, from `low` to `high` and whole multiples of `step`: says
// what is wrong with a text, or nothing. The text as it stands: complaints about wrong usage are made printable as a
// whole.
std::function<std::string(const std::string&)> SizeFrom(uint64_t low, uint64_t high, uint64_t step = 1);

// The same for options that say how many bytes one READ or WRITE moves.
std::string CheckDataSize(const std::string& text);

// The same for options that say how long a message may be that travels without chunks.
std::string CheckThreshold(const std::string& text);

// --max-entries, of the commands that list.
void AddEntriesOption(CLI::App& command, uint64_t& entries_max);

Session::Options ToSessionOptions(const ClientCommandOptions& options);

// "emulated iWARP", "emulated InfiniBand" or "rdma-core": what this process does RDMA with, its options applied.
std::string_view ProviderName();

}  // namespace stagecoach::cli
