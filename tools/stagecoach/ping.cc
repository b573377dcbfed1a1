// stagecoach ping HOST: NULL calls, one after the other, and how long they took.
//
// Any program and version can be asked, so any RPC-over-RDMA server: --program 100003 --version 3 is NFSv3 of a Linux
// NFS server. The port is the one given, or the one that rpcbind on HOST has for the program, or the program's
// well-known one.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {
namespace {

struct PingOptions {
  ClientCommandOptions client;
  std::string server;  // as ParseServer has it
  uint32_t count = 10;
  uint32_t program = rpcrdma::file::kProgram;
  uint32_t version = rpcrdma::file::kVersion;
};

// The smallest sample that at least `percent` of all are not above.
Duration Percentile(const std::vector<Duration>& sorted, uint64_t percent) {
  return sorted[(sorted.size() * percent + 99) / 100 - 1];
}

// Whether a program with a well-known port may still be there: rpcbind has not said that the program is elsewhere.
// Linux's NFS server does not register itself for RDMA at all, and firewalls often hide rpcbind.
bool MayBeAtWellKnownPort(rpcrdma::RpcbindError::Kind kind) {
  using Kind = rpcrdma::RpcbindError::Kind;
  return kind == Kind::kNoRpcbind || kind == Kind::kTimedOut || kind == Kind::kVersions ||
         kind == Kind::kNotRegistered || kind == Kind::kNotForRdma;
}

// Gives the session its port; returns where that is from, for messages.
Result<std::string, Error> FindPort(Session& session, const PingOptions& options) {
  const std::string host = session.server().host;
  const auto found = session.LookUp({options.program, options.version});
  if (found) {
    return fmt::format("rpcbind at {} has {} for it, netid {}", host, rpcrdma::ToString(found->registered),
                       rpcrdma::ToString(found->registered.netid));
  }
  const auto well_known = rpcrdma::WellKnownPort(options.program);
  if (!well_known || !MayBeAtWellKnownPort(found.error().kind)) return Err(Error{found.error().message, true});
  session.set_port(*well_known);
  fmt::print(stderr, "stagecoach: ping {}: {}; trying port {}, where program {} is by convention\n", host,
             found.error().message, *well_known, rpcrdma::ProgramText(options.program));
  return fmt::format("port {} is that of program {} by convention", *well_known, rpcrdma::ProgramText(options.program));
}

// What --ccp has come to.
void PrintConfiguration(const rpcrdma::ConnectionConfiguration& configuration) {
  fmt::print("{}; {} bytes go inline to the server, {} from it{}\n",
             configuration.applied ? "the server configured the connection"
                                   : fmt::format("the server did not configure the connection ({})",
                                                 rpcrdma::file::Printable(configuration.why_not)),
             configuration.inline_send, configuration.inline_receive,
             configuration.read_chunks ? "" : ", and it reads nothing");
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
  if (!*slot->outcome) return Err(session.FromCall(slot->outcome->error()));
  return slot->end - start;
}

int Ping(const PingOptions& options) {
  const auto server = ParseServer(options.server);
  if (!server) {
    Complain("ping", server.error());
    return kExitUsage;
  }
  if (const int code = ApplyDeviceOptions("ping", options.client.common.device); code != kExitOk) return code;
  Session::Options session_options = ToSessionOptions(options.client);
  session_options.probe = {options.program, options.version, 0};
  Session session({server->host, server->port.value_or(kDefaultPort)}, session_options);
  std::string where = server->port ? ToString(session.server()) : server->host;
  std::vector<Duration> samples;
  const auto run = [&]() -> Result<void, Error> {
    std::string port_from;
    if (!server->port) {
      auto found = FindPort(session, options);
      if (!found) return Err(found.error());
      port_from = std::move(*found);
      where = ToString(session.server());
    }
    if (auto connected = session.Connect(); !connected) {
      // A server that is gone, or not of this device, may have left its registration behind.
      if (!port_from.empty() && !session.interrupted()) connected.error().text += "; " + port_from;
      return connected;
    }
    if (options.client.common.rpcrdma != "1") {
      fmt::print("RPC-over-RDMA version {}\n", session.client().version());
    }
    if (const auto& configuration = session.client().configuration()) PrintConfiguration(*configuration);
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
               samples.size() == 1 ? "" : "s", rpcrdma::ProgramText(options.program), options.version, where,
               FormatDuration(samples.front()), FormatDuration(Percentile(samples, 50)),
               FormatDuration(Percentile(samples, 99)), FormatDuration(samples.back()));
  }
  if (!done) {
    Complain(fmt::format("ping {}", where), done.error().text);
    return kExitFailure;
  }
  if (options.client.stats) fmt::print("{}", FormatStats(stats));
  return kExitOk;
}

}  // namespace

void AddPing(CLI::App& app, int& exit_code) {
  const auto options = std::make_shared<PingOptions>();
  CLI::App* command = app.add_subcommand("ping", "Measure NULL calls to an RPC-over-RDMA server");
  command
      ->add_option("HOST", options->server,
                   "HOST:PORT, stagecoach://HOST:PORT/, or HOST alone: then rpcbind there is asked for the port")
      ->required();
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
