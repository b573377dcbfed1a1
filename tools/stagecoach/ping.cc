// stagecoach ping URL: NULL calls, one after the other, and how long they took.
//
// Any program and version can be asked, so any RPC-over-RDMA server: --program 100003 --version 3 is NFSv3 of a Linux
// NFS server.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "tools/stagecoach/command.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {
namespace {

struct PingOptions {
  ClientCommandOptions client;
  std::string url;
  uint32_t count = 10;
  uint32_t program = rpcrdma::file::kProgram;
  uint32_t version = rpcrdma::file::kVersion;
};

// The smallest sample that at least `percent` of all are not above.
Duration Percentile(const std::vector<Duration>& sorted, uint64_t percent) {
  return sorted[(sorted.size() * percent + 99) / 100 - 1];
}

// Numbers of the user-defined range read better in hexadecimal; the registered ones are known in decimal.
std::string ProgramText(uint32_t program) {
  return program >= 0x20000000 ? fmt::format("{:#x}", program) : fmt::format("{}", program);
}

Result<Duration, Error> OneCall(Session& session, const PingOptions& options) {
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;
  struct Slot {
    std::optional<Outcome> outcome;
    Instant end;
  };
  const auto slot = std::make_shared<Slot>();
  rpcrdma::CallOptions call;
  call.timeout = ToSessionOptions(options.client).timeout;
  const Instant start = session.Now();
  session.client().Call(
      {options.program, options.version, 0}, [](rpcrdma::XdrWriter&) {}, call,
      [slot, &session](Outcome outcome) {
        slot->end = session.Now();
        slot->outcome.emplace(std::move(outcome));
      });
  while (!slot->outcome) {
    if (!session.RunOnce()) return Err(Session::InterruptedError());
  }
  if (!*slot->outcome) return Err(Error{slot->outcome->error().ToString(), true});
  return slot->end - start;
}

int Ping(const PingOptions& options) {
  const auto url = UrlArgument("ping", options.url);
  if (!url) return kExitUsage;
  if (!ApplyCommonOptions("ping", options.client.common)) return kExitFailure;
  Session session(url->server, ToSessionOptions(options.client));
  std::vector<Duration> samples;
  const auto run = [&]() -> Result<void, Error> {
    if (auto connected = session.Connect(); !connected) return connected;
    while (samples.size() < options.count) {
      const auto sample = OneCall(session, options);
      if (!sample) return Err(sample.error());
      samples.push_back(*sample);
    }
    return {};
  };
  const auto done = run();
  const auto stats = session.client().stats();
  session.Disconnect();
  if (!samples.empty()) {
    std::sort(samples.begin(), samples.end());
    fmt::print("{} NULL call{} of program {} version {} at {}: min {}, median {}, p99 {}, max {}\n", samples.size(),
               samples.size() == 1 ? "" : "s", ProgramText(options.program), options.version, ToString(url->server),
               FormatDuration(samples.front()), FormatDuration(Percentile(samples, 50)),
               FormatDuration(Percentile(samples, 99)), FormatDuration(samples.back()));
  }
  if (!done) {
    Complain(fmt::format("ping {}", ToString(url->server)), done.error().text);
    return kExitFailure;
  }
  if (options.client.stats) fmt::print("{}", FormatStats(stats));
  return kExitOk;
}

}  // namespace

void AddPing(CLI::App& app, int& exit_code) {
  const auto options = std::make_shared<PingOptions>();
  CLI::App* command = app.add_subcommand("ping", "Measure NULL calls to an RPC-over-RDMA server");
  command->add_option("URL", options->url, "stagecoach://HOST:PORT/")->required();
  command->add_option("-c,--count", options->count, "How many calls")
      ->type_name("N")
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  const CLI::Range any_number(uint32_t{0}, std::numeric_limits<uint32_t>::max());
  command->add_option("--program", options->program, "RPC program number")
      ->type_name("N")
      ->check(any_number)
      ->capture_default_str();
  command->add_option("--version", options->version, "RPC program version")
      ->type_name("N")
      ->check(any_number)
      ->capture_default_str();
  AddClientOptions(*command, options->client);
  command->callback([options, &exit_code] { exit_code = Ping(*options); });
}

}  // namespace stagecoach::cli
