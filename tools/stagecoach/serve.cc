// stagecoach serve DIR: offers one directory with the bulk file program.
//
// Network on one thread, disk on a few others (FileService). There is no authentication and no encryption; hence
// loopback, unless told otherwise.
//
// With --rpcbind it can be found by program number: what it registers is there before it says that it listens, and gone
// when it ends because somebody asked it to. A registration that is there already is replaced, unless a server answers
// at its address. While it serves it looks from time to time whether the registration is still there: a daemon that was
// started again has none.
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <asio/signal_set.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/metrics.h"
#include "rpcrdma/api/rpcbind.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/ulb/file/executor.h"
#include "rpcrdma/ulb/file/file_service.h"
#include "rpcrdma/ulb/file/file_store.h"
#include "rpcrdma/ulb/file/names.h"
#include "tools/stagecoach/command.h"
#include "tools/stagecoach/metrics_file.h"
#include "tools/stagecoach/signals.h"
#include "tools/stagecoach/text.h"

namespace stagecoach::cli {
namespace {

namespace file = rpcrdma::file;

struct ServeOptions {
  CommonOptions common;
  std::string directory;
  std::string listen = "127.0.0.1:20049";
  bool read_only = false;
  bool rpcbind = false;
  uint32_t rpcbind_check_seconds = 60;
  uint32_t clients = 128;
  uint32_t address_clients = 0;  // 0: half of clients
  uint32_t credits = 64;
  uint32_t handles = 64;
  uint32_t idle_seconds = 60;
  uint32_t client_idle_seconds = 60;
  uint32_t data_seconds = 30;
  std::string data_rate = "16K";
  std::string chunk = "1M";
  std::string client_memory = "256M";
  std::string memory = "1G";
  std::string metrics;  // a file; empty: none
  bool ccp = false;
  std::string ccp_max = "4K";
  std::string ccp_auth = "none";
};

// A universal address has no place for a zone. Of an address of this host it is the interface that has the address.
sockaddr_storage WithZone(sockaddr_storage address) {
  auto* in6 = reinterpret_cast<sockaddr_in6*>(&address);
  if (address.ss_family != AF_INET6 || !IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr)) return address;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return address;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET6) continue;
    const auto* own = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
    if (IN6_ARE_ADDR_EQUAL(&own->sin6_addr, &in6->sin6_addr)) in6->sin6_scope_id = own->sin6_scope_id;
  }
  ::freeifaddrs(list);
  return address;
}

constexpr Duration kGrace = 5s;
// For how long a start is held up by looking for what killed servers have left; what is left then is done beside.
constexpr Duration kCleaning = 1s;
// How long a server that may be there is given to take a connection.
constexpr Duration kProbe = 3s;

// What is done with rpcbind, one thing after the other: before the server's loop runs, and then from it.
class Registrar {
 public:
  // `stopped` says whether the user has asked for the end.
  Registrar(AsioLoop& loop, std::function<bool()> stopped)
      : loop_(loop), stopped_(std::move(stopped)), rpcbind_(loop, {}) {}
  ~Registrar() { loop_.Cancel(timer_); }
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;

  // Does not wait for other servers once the user has asked for the end, and may then have done nothing.
  Result<void, std::string> Register(const rpcrdma::RpcbindService& service) {
    using rpcrdma::RpcbindConflict;
    service_ = service;
    const Outcome first = Try(RpcbindConflict::kRefuse);
    if (first) return {};
    if (first.error().kind != rpcrdma::RpcbindError::Kind::kInUse) return Err(first.error().message);
    for (const rpcrdma::UniversalAddress& holder : first.error().holders) {
      if (IsOurs(holder)) continue;
      const bool answers = Answers(holder);
      if (stopped_()) return {};
      if (answers) return Err(first.error().message + ", and a server answers there");
    }
    const Outcome second = Try(RpcbindConflict::kReplace);
    if (!second) return Err(second.error().message);
    return {};
  }

  // Registers again every `interval`: what is there is left as it is, also what somebody else has put there. `report`
  // hears of the first that fails, and of the first that does not after that.
  void Watch(Duration interval, std::function<void(const std::string&)> report) {
    interval_ = interval;
    report_ = std::move(report);
    ArmTimer();
  }

  // Ends the watch. Not at the same time as it registers: that might be the later of the two for the daemon.
  void Withdraw(rpcrdma::Rpcbind::DoneHandler handler) {
    loop_.Cancel(std::exchange(timer_, 0));
    if (checking_) {
      withdraw_ = std::move(handler);
    } else {
      rpcbind_.Withdraw(service_, std::move(handler));
    }
  }

 private:
  using Outcome = Result<void, rpcrdma::RpcbindError>;

  // To its end, which a timeout bounds: what is half done could not be withdrawn.
  Outcome Try(rpcrdma::RpcbindConflict conflict) {
    const auto slot = std::make_shared<std::optional<Outcome>>();
    rpcbind_.Register(service_, conflict, [slot](Outcome outcome) { slot->emplace(std::move(outcome)); });
    while (!slot->has_value()) loop_.RunOnce();
    return std::move(**slot);
  }

  // Whether this server has taken the holder's place: it listens on the same port, and one of the two on all addresses.
  bool IsOurs(const rpcrdma::UniversalAddress& holder) const {
    return std::any_of(service_.addresses.begin(), service_.addresses.end(), [&](const auto& own) {
      return own.netid == holder.netid && own.port == holder.port && (own.wildcard() || holder.wildcard());
    });
  }

  // Whether a server on this host takes connections there.
  bool Answers(rpcrdma::UniversalAddress holder) {
    if (holder.wildcard()) {
      if (holder.netid == rpcrdma::Netid::kRdma) holder.host[0] = std::byte{127};
      holder.host[holder.netid == rpcrdma::Netid::kRdma ? 3 : 15] = std::byte{1};
    }
    rpcrdma::ClientOptions options;
    options.connect_timeout = kProbe;
    rpcrdma::Client client(loop_, options);
    const auto connected = std::make_shared<std::optional<bool>>();
    const sockaddr_storage address = WithZone(rpcrdma::ToSockaddr(holder));
    client.Connect(reinterpret_cast<const sockaddr*>(&address),
                   [connected](Result<void, rpcrdma::CallError> outcome) { *connected = outcome.has_value(); });
    while (!connected->has_value() && !stopped_()) loop_.RunOnce();
    return connected->value_or(false);
  }

  void ArmTimer() {
    timer_ = loop_.At(loop_.Now() + interval_, [this] {
      timer_ = 0;
      checking_ = true;
      rpcbind_.Register(service_, rpcrdma::RpcbindConflict::kRefuse, [this](const Outcome& outcome) {
        checking_ = false;
        if (withdraw_) return rpcbind_.Withdraw(service_, std::exchange(withdraw_, nullptr));
        if (outcome && failing_) report_("registered with rpcbind again");
        if (!outcome && !failing_) report_(outcome.error().message);
        failing_ = !outcome;
        ArmTimer();
      });
    });
  }

  AsioLoop& loop_;
  const std::function<bool()> stopped_;
  rpcrdma::Rpcbind rpcbind_;
  rpcrdma::RpcbindService service_;
  Duration interval_{};
  std::function<void(const std::string&)> report_;
  EventLoop::TimerId timer_ = 0;
  bool checking_ = false;
  bool failing_ = false;                    // the latest check did
  rpcrdma::Rpcbind::DoneHandler withdraw_;  // waits for the check that is under way
};

// Removes the files in the making that killed processes have left in the tree, and says so.
class Cleaning {
 public:
  Cleaning(AsioLoop& loop, const file::FileStore& store, file::Executor& disk)
      : loop_(loop), disk_(disk), sweep_(store.SweepAbandoned()) {}

  // Before the loop runs, for kCleaning at most; then by the executor, while this object and it live.
  void Start() {
    const Instant until = loop_.Now() + kCleaning;
    bool more = true;
    // An entry may be a long file to remove.
    while (more && loop_.Now() < until) more = sweep_.Step(1);
    GoOn(more);
  }

 private:
  static constexpr size_t kEntries = 256;
  static constexpr file::Executor::Lane kLane = 0;
  static_assert(kLane < file::FileService::kFirstLane);

  void GoOn(bool more) {
    if (!more) return Report();
    disk_.Submit(
        kLane, file::Executor::Kind::kLong, [this] { more_ = sweep_.Step(kEntries); }, [this] { GoOn(more_); });
  }

  void Report() const {
    if (sweep_.removed() == 0) return;
    fmt::print(stderr, "stagecoach: removed {} unfinished {} of processes that were killed\n", sweep_.removed(),
               sweep_.removed() == 1 ? "file" : "files");
  }

  AsioLoop& loop_;
  file::Executor& disk_;
  file::PartSweep sweep_;  // of one thread at a time
  bool more_ = false;
};

// By what a limit of the server can be changed; empty: by nothing here.
std::string_view FlagFor(std::string_view server_option) {
  if (server_option == "clients_max") return "--max-clients";
  if (server_option == "address_connections_max") return "--max-address-clients";
  return {};
}

void TellOfRefusal(const rpcrdma::RefusedClient& refused) {
  const std::string_view flag = FlagFor(refused.option);
  std::string line = fmt::format("{} refused: {}", refused.peer, file::Printable(refused.why));
  if (!flag.empty()) line += fmt::format(" ({})", flag);
  if (refused.untold > 0) line += fmt::format("; {} more since this was last said", refused.untold);
  Complain("serve", line);
}

int Serve(const ServeOptions& options) {
  const auto where = ParseHostPort(options.listen);
  if (!where) {
    Complain("serve", fmt::format("--listen {}", where.error()));
    return kExitUsage;
  }
  if (const int code = ApplyDeviceOptions("serve", options.common.device); code != kExitOk) return code;
  const auto store = file::FileStore::Open(options.directory, {.read_only = options.read_only, .follow_links = true});
  if (!store) {
    Complain("serve", store.error().text);
    return kExitFailure;
  }

  AsioLoop loop;
  std::optional<Cleaning> cleaning;  // outlives the work that it has submitted
  const auto disk = file::WorkerPool::Make(loop);
  if (!disk) {
    Complain("serve", fmt::format("too few threads for the work with the disk: {}", disk.error().message()));
    return kExitFailure;
  }
  file::FileService::Options service_options;
  service_options.data_max = static_cast<uint32_t>(*ParseSize(options.chunk));
  service_options.handles_max = options.handles;
  service_options.idle = std::chrono::seconds(options.idle_seconds);
  file::FileService service(loop, **store, **disk, service_options);

  rpcrdma::ServerOptions server_options;
  server_options.credits = options.credits;
  server_options.inline_threshold = InlineThresholdOf(options.common);
  server_options.profile = RpcrdmaProfileOf(options.common);
  server_options.versions = RpcrdmaVersionsOf(options.common);
  server_options.clients_max = options.clients;
  // All of them may come at once.
  server_options.backlog = static_cast<int>(std::max<uint32_t>(options.clients, server_options.backlog));
  server_options.address_connections_max = options.address_clients;
  server_options.idle_timeout = std::chrono::seconds(options.client_idle_seconds);
  server_options.data_time = std::chrono::seconds(options.data_seconds);
  server_options.data_rate_min = *ParseSize(options.data_rate);
  server_options.call_bytes_max = service_options.data_max + 4096;
  server_options.ccp.enabled = options.ccp;
  server_options.ccp.inline_send_max = server_options.ccp.inline_receive_max =
      static_cast<uint32_t>(*ParseSize(options.ccp_max));
  if (options.ccp_auth == "sys") server_options.ccp.flavors = {rpcrdma::AuthFlavor::kSys};
  server_options.client_bytes_max = std::max(*ParseSize(options.client_memory), 2 * server_options.call_bytes_max);
  server_options.bytes_max = *ParseSize(options.memory);
  rpcrdma::Server server(loop, server_options);
  server.OnClientRefused(TellOfRefusal);
  server.Register(&service);
  if (options.common.device.verbose) {
    server.OnClientConnected([](const std::string& peer) { fmt::print(stderr, "stagecoach: {} connected\n", peer); });
    server.OnClientGone([](const std::string& peer, const std::string& why, const rpcrdma::ConnectionStats& stats) {
      fmt::print(stderr, "stagecoach: {} gone ({})\n{}", peer, file::Printable(why), FormatStats(stats));
    });
  }
  if (const auto listening = server.Listen(where->host, where->port); !listening) {
    Complain("serve", listening.error().ToString());
    return kExitFailure;
  }

  if (!options.read_only) cleaning.emplace(loop, **store, **disk).Start();

  std::optional<MetricsFile> metrics;
  if (!options.metrics.empty()) {
    const auto page = [&server] {
      rpcrdma::MetricsPage page;
      page.Add({}, server);
      return page.Text();
    };
    metrics.emplace(loop, options.metrics, page, [](const std::string& why) { Complain("serve", why); });
    if (const auto started = metrics->Start(); !started) {
      Complain("serve", started.error());
      return kExitFailure;
    }
  }

  std::optional<Registrar> registrar;
  int parts_left = 0;  // that an end in order waits for
  const auto end = [&] {
    const auto part_ended = [&] {
      if (--parts_left == 0) loop.Stop();
    };
    parts_left = registrar ? 2 : 1;
    // First, so that nobody finds a server that is about to end.
    if (registrar) {
      registrar->Withdraw([&, part_ended](Result<void, rpcrdma::RpcbindError> withdrawn) {
        if (!withdrawn) Complain("serve", fmt::format("--rpcbind: {}", withdrawn.error().message));
        part_ended();
      });
    }
    server.Stop(kGrace, part_ended);
  };

  asio::signal_set signals(loop.context());
  AddEndingSignals(signals);
  bool serving = false;
  bool stopped = false;
  signals.async_wait([&](asio::error_code error, int) {
    if (error) return;
    stopped = true;
    if (!serving) {
      // What is being registered is withdrawn before the end. The next signal does not wait for it.
      signals.clear(error);
      return;
    }
    // A second signal does not wait for any client, a third not even for the disk.
    signals.async_wait([&](asio::error_code again, int) {
      if (again) return;
      signals.clear(again);
      loop.Stop();
    });
    end();
  });

  const HostPort bound{where->host, server.port()};
  if (!IsLoopback(where->host)) {
    fmt::print(stderr,
               "stagecoach: warning: {} is not loopback: whoever reaches it may read {}everything below '{}'; there is "
               "no authentication and no encryption\n",
               ToString(bound), options.read_only ? "" : "and write ", file::Printable(options.directory));
  }
  if (const auto why = WhyNotVersion2(options.common)) {
    fmt::print(stderr, "stagecoach: warning: version 1 of RPC-over-RDMA alone is served: {}\n", *why);
  }
  if (options.rpcbind) {
    registrar.emplace(loop, [&] { return stopped; });
    rpcrdma::RpcbindService published{.program = service.program()};
    for (uint32_t version = service.versions().low; version <= service.versions().high; ++version) {
      published.versions.push_back(version);
    }
    published.addresses = rpcrdma::ListeningAddresses(*server.address());
    if (const auto registered = registrar->Register(published); !registered) {
      Complain("serve", fmt::format("--rpcbind: {}", registered.error()));
      return kExitFailure;
    }
  }
  serving = true;
  if (stopped) {
    end();
  } else {
    if (registrar) {
      registrar->Watch(std::chrono::seconds(options.rpcbind_check_seconds),
                       [](const std::string& what) { Complain("serve", fmt::format("--rpcbind: {}", what)); });
    }
    fmt::print("stagecoach: listening on {} for '{}' ({}, {})\n", ToString(bound), file::Printable(options.directory),
               options.read_only ? "read-only" : "read and write", ProviderName());
    if (std::fflush(stdout) != 0) {
      // Not worth refusing to serve, and the address must be known.
      Complain("serve", fmt::format("standard output cannot be written; listening on {}", ToString(bound)));
    }
  }

  loop.Run();
  asio::error_code error;
  signals.cancel(error);
  if (metrics) {
    if (const auto written = metrics->Write(); !written) Complain("serve", written.error());
  }
  if (options.common.device.verbose) {
    const auto& counters = service.counters();
    fmt::print(stderr, "stagecoach: served {}, stored {} in {} {}; {} abandoned, {} {} refused\n",
               FormatBytes(counters.bytes_read), FormatBytes(counters.bytes_written), counters.files_committed,
               counters.files_committed == 1 ? "file" : "files", counters.files_abandoned, counters.refused,
               counters.refused == 1 ? "request" : "requests");
  }
  return kExitOk;
}

}  // namespace

void AddServe(CLI::App& app, int& exit_code) {
  const auto options = std::make_shared<ServeOptions>();
  CLI::App* command = app.add_subcommand("serve", "Serve a directory");
  command->add_option("DIR", options->directory, "What to serve; nothing outside it is reachable")->required();
  command->add_option("--listen", options->listen, "Where, [fe80::1%eth0]:PORT for instance; port 0 takes a free one")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  CLI::Option* const rpcbind =
      command->add_flag("--rpcbind", options->rpcbind,
                        "Register with this host's rpcbind, so that clients find the port by the program's number");
  command
      ->add_option("--rpcbind-check", options->rpcbind_check_seconds,
                   "Look so often whether rpcbind still knows, and register again if not")
      ->needs(rpcbind)
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  command->add_flag("--read-only", options->read_only, "Refuse every change");
  command->add_flag("-v,--verbose", options->common.device.verbose,
                    "Say who comes and goes, what carries each connection, and what RDMA did for them");
  command->add_option("--metrics", options->metrics, "Keep counts in a file that Prometheus's node exporter can read")
      ->type_name("FILE");
  options->common.rpcrdma = "auto";  // whatever a client speaks
  AddCommonOptions(*command, options->common);
  CLI::Option* const ccp = command->add_flag(
      "--ccp", options->ccp, "Let clients say how long their messages are, as RFC 5666 does, and make room for them");
  command->add_option("--ccp-max", options->ccp_max, "The longest that they can ask for")
      ->needs(ccp)
      ->type_name("SIZE")
      ->check(CheckThreshold)
      ->capture_default_str();
  AddCcpAuthOption(*command, ccp, "Ask for this credential; with 'sys' AUTH_NONE is too weak", options->ccp_auth);
  command->add_option("--max-clients", options->clients, "Connections at a time")
      ->type_name("N")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str()
      ->group("Limits");
  command
      ->add_option("--max-address-clients", options->address_clients,
                   "Of them, from one address or one /64 network of IPv6 (half of --max-clients)")
      ->type_name("N")
      ->check(CLI::Range(1, 65536))
      ->group("Limits");
  command
      ->add_option("--client-idle", options->client_idle_seconds,
                   "Disconnect a client that has asked for nothing for so long; 0: never")
      ->type_name("SECONDS")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str()
      ->group("Limits");
  command
      ->add_option("--data-time", options->data_seconds,
                   "Disconnect a client that keeps promised data, or leaves a reply, for so long; 0: never")
      ->type_name("SECONDS")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str()
      ->group("Limits");
  command
      ->add_option(
          "--data-rate", options->data_rate,
          "A client that moves fewer bytes per second than that uses up its --data-time; 0: any number will do")
      ->type_name("SIZE")
      ->check(SizeFrom(0, uint64_t{1} << 40))
      ->capture_default_str()
      ->group("Limits");
  command->add_option("--credits", options->credits, "Calls one client may have in progress")
      ->type_name("N")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group("Limits");
  command->add_option("--max-handles", options->handles, "Files one client may have open")
      ->type_name("N")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str()
      ->group("Limits");
  command->add_option("--idle", options->idle_seconds, "Close a client's file when unused for so long")
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str()
      ->group("Limits");
  command->add_option("--max-data", options->chunk, "Bytes in one READ or WRITE")
      ->type_name("SIZE")
      ->capture_default_str()
      ->check(CheckDataSize)
      ->group("Limits");
  command
      ->add_option("--client-memory", options->client_memory,
                   "Memory for the data of the calls from one address; at most half of --memory, where two calls fit")
      ->type_name("SIZE")
      ->capture_default_str()
      ->check(SizeFrom(uint64_t{1} << 20, uint64_t{1} << 40))
      ->group("Limits");
  command->add_option("--memory", options->memory, "Memory for the data of all calls together")
      ->type_name("SIZE")
      ->capture_default_str()
      ->check(SizeFrom(uint64_t{1} << 20, uint64_t{1} << 40))
      ->group("Limits");
  command->callback([options, &exit_code] { exit_code = Serve(*options); });
}

}  // namespace stagecoach::cli
