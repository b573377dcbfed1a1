#include "scenarios/runner/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "scenarios/runner/client_program.h"
#include "scenarios/runner/connection_checker.h"
#include "scenarios/runner/file_copy_program.h"
#include "scenarios/runner/limits.h"
#include "scenarios/runner/nic_checker.h"
#include "scenarios/runner/ping_pong_program.h"
#include "scenarios/runner/service_program.h"
#include "scenarios/runner/stage.h"
#include "scenarios/runner/trace_fanout.h"

namespace stagecoach::scenario {
namespace {

// A run that needs more virtual time than this after its last fault hangs. Longer than any time-out of the stack and
// than a retransmitting TCP waits (924 s).
constexpr Duration kLivenessLimit = 2400s;
// Rounds of probes. Pools and caches warm up in the first ones; what grows afterwards grows without end.
constexpr int kWarmRounds = 6;
constexpr int kProbeRounds = 8;
// What a disturbance may still cause after it is over: what was under way, and programs that start again.
constexpr Duration kAftermath = 500ms;
// How long devices keep their habits after the last fault, if there is work so long.
constexpr Duration kTroubleTime = 60s;
// Later than any run ends, and far from where arithmetic does.
constexpr Instant kForEver = Instant() + std::chrono::hours(24 * 365);

class Play {
 public:
  Play(const Scenario& scenario, const RunOptions& options) : scenario_(scenario), options_(options) {
    trace_.Add(&hash_);
    trace_.Add(options.observer);
    stage_.emplace(scenario, &trace_, options.capture);
    connections_.emplace(&stage_->violations());
    nics_.emplace(&stage_->violations());
    trace_.Add(stage_->registration_watch());
    trace_.Add(&*connections_);
    trace_.Add(&*nics_);
  }

  RunReport Run() {
    before_ = CountEverywhere();
    MakePrograms();
    SetDeviceFaults(true);
    if (options_.sabotage) options_.sabotage(stage_->world());
    for (const auto& program : programs_) As(*program).Start();
    const bool complete = PlayFaults() && Finish() && ProbeAll() && End();
    report_.stopped = Stopped();
    if (!complete || !stage_->violations().empty()) report_.state = Describe();
    report_.virtual_time = stage_->Now() - Instant();
    report_.violations = stage_->violations().list();
    TearDown(complete);
    // What is torn down in the middle breaks off, and is not judged.
    if (complete) report_.violations = stage_->violations().list();
    report_.trace_hash = hash_.value();
    report_.trace_events = hash_.events();
    return std::move(report_);
  }

 private:
  bool Stopped() const { return options_.stop && options_.stop(); }

  void MakePrograms() {
    for (const Service& service : scenario_.service()) {
      auto program = std::make_unique<ServiceProgram>(*stage_, service);
      services_[service.host()] = program.get();
      programs_.push_back(std::move(program));
    }
    uint32_t index = 0;
    for (const PingPong& spec : scenario_.ping_pong()) {
      using Role = PingPongProgram::Role;
      auto client = std::make_unique<PingPongProgram>(*stage_, spec, index, Role::kClient, nullptr);
      auto server = std::make_unique<PingPongProgram>(*stage_, spec, index++, Role::kServer, client.get());
      programs_.push_back(std::move(server));
      programs_.push_back(std::move(client));
    }
    index = 0;
    for (const Client& client : scenario_.client()) {
      programs_.push_back(std::make_unique<ClientProgram>(*stage_, client, index++));
    }
    index = 0;
    for (const FileCopy& copy : scenario_.file_copy()) {
      programs_.push_back(std::make_unique<FileCopyProgram>(*stage_, copy, index++));
    }
  }

  // --- Faults ---

  bool PlayFaults() {
    // Beginnings and ends in the order of time; of one moment, in the order of the scenario, ends first.
    std::multimap<Instant, std::function<void()>> timeline;
    for (const Fault& fault : scenario_.fault()) {
      const Instant begin = Instant(Duration(fault.at_ns()));
      timeline.emplace(begin, [this, &fault] { BeginFault(fault); });
      const bool lasts = fault.kind() == Fault::PARTITION || fault.kind() == Fault::KILL ||
                         fault.kind() == Fault::POWER_LOSS || fault.kind() == Fault::LINK;
      const bool ends = fault.for_ns() != 0 && lasts;
      if (ends) timeline.emplace(begin + Duration(fault.for_ns()), [this, &fault] { EndFault(fault); });
    }
    for (const auto& [when, action] : timeline) {
      if (!Advance(when)) return false;
      action();
    }
    return true;
  }

  // Lets the world live until `when`. False when the run is to be stopped.
  bool Advance(Instant when) {
    bool there = false;
    EventLoop& loop = stage_->sim().loop();
    const auto timer = loop.At(when, [&there] { there = true; });
    // A world where nothing else happens may stall on the way.
    while (!there && !Stopped()) stage_->sim().RunUntil([&] { return there || Stopped(); });
    loop.Cancel(timer);
    return !Stopped();
  }

  void BeginFault(const Fault& fault) {
    emu::SimWorld& sim = stage_->sim();
    Trace(&trace_, stage_->Now(), "fault", Fault::Kind_Name(fault.kind()), {{"a", fault.a()}, {"b", fault.b()}});
    const bool down = fault.kind() == Fault::KILL || fault.kind() == Fault::POWER_LOSS;
    if (IsDown(fault.a()) && (down || fault.kind() == Fault::RESTART_SERVICE)) return;
    const bool for_good = fault.for_ns() == 0 && down;
    // A link that changes is nothing to fail by: how long calls may take counts it (Stage::Patience).
    if (fault.kind() != Fault::LINK) {
      stage_->NoteDisturbance(fault.a(), fault.b(),
                              for_good ? kForEver : stage_->Now() + Duration(fault.for_ns()) + kAftermath,
                              /*severs=*/fault.kind() != Fault::PARTITION);
    }
    switch (fault.kind()) {
      case Fault::PARTITION:
        ++partitions_[PairOf(fault)];
        return sim.Partition(Fabric(fault.a()), Fabric(fault.b()), true);
      case Fault::RESET:
        return sim.ResetConnections(Fabric(fault.a()), Fabric(fault.b()));
      case Fault::FORGET:
        stage_->NoteSilence(fault.a());
        return sim.ForgetConnections(Fabric(fault.a()));
      case Fault::KILL:
      case Fault::POWER_LOSS:
        down_[fault.a()] = &fault;
        if (for_good) stage_->NoteGone(fault.a());
        if (fault.kind() == Fault::POWER_LOSS) stage_->NoteSilence(fault.a());
        sim.CutHost(Fabric(fault.a()), fault.kind() == Fault::KILL ? emu::Cut::kReset : emu::Cut::kSilent);
        for (const auto& program : programs_) {
          if (program->host() == fault.a()) As(*program).Kill();
        }
        return;
      case Fault::LINK:
        changed_links_[PairOf(fault)] = &fault;
        return sim.SetLink(Fabric(fault.a()), Fabric(fault.b()), MakeLink(fault.link()));
      case Fault::RESTART_SERVICE:
        stage_->world().ActAs(fault.a());
        services_.at(fault.a())->Restart(Duration(fault.for_ns()));
        return;
      case Fault::NONE:
        return;
    }
  }

  void EndFault(const Fault& fault) {
    emu::SimWorld& sim = stage_->sim();
    Trace(&trace_, stage_->Now(), "fault", "over", {{"a", fault.a()}, {"b", fault.b()}});
    switch (fault.kind()) {
      case Fault::PARTITION:
        // Those of one pair may overlap.
        if (--partitions_[PairOf(fault)] > 0) return;
        return sim.Partition(Fabric(fault.a()), Fabric(fault.b()), false);
      case Fault::LINK:
        if (changed_links_[PairOf(fault)] != &fault) return;
        return sim.SetLink(Fabric(fault.a()), Fabric(fault.b()), MakeLink(LinkBetween(fault.a(), fault.b())));
      case Fault::KILL:
      case Fault::POWER_LOSS:
        // A kill of a host that was down has changed nothing.
        if (!IsDown(fault.a()) || down_[fault.a()] != &fault) return;
        down_.erase(fault.a());
        // Its blocked programs unwind first.
        sim.RunUntil([&] { return !sim.HasBlocked(Fabric(fault.a())); });
        stage_->world().Restart(fault.a());
        SetDeviceFaultsOf(fault.a(), true);
        for (const auto& program : programs_) {
          if (program->host() == fault.a()) As(*program).Start();
        }
        return;
      default:
        return;
    }
  }

  Link LinkBetween(const std::string& a, const std::string& b) const {
    for (const Link& link : scenario_.link()) {
      if ((link.a() == a && link.b() == b) || (link.a() == b && link.b() == a)) return link;
    }
    return Link();
  }

  using HostPair = std::pair<std::string, std::string>;
  static HostPair PairOf(const Fault& fault) { return std::minmax(fault.a(), fault.b()); }

  void SetDeviceFaults(bool on) {
    for (const Host& host : scenario_.host()) SetDeviceFaultsOf(host.name(), on);
  }

  void SetDeviceFaultsOf(const std::string& name, bool on) {
    emu::NicFaults& faults = stage_->world().host(name).nic().faults();
    faults = {};
    if (!on) return;
    faults.luck = stage_->Luck("nic-faults/" + name);
    for (const Host& host : scenario_.host()) {
      if (host.name() != name) continue;
      for (const DeviceFault& fault : host.device().fault()) {
        switch (fault.kind()) {
          case DeviceFault::FAIL_REGISTRATION:
            faults.registration_fails_one_in = fault.one_in();
            break;
          case DeviceFault::DELAY_COMPLETION:
            faults.completion_delayed_one_in = fault.one_in();
            faults.completion_delay_max = Duration(fault.delay_ns());
            break;
          case DeviceFault::ADVERSARIAL_PLACEMENT:
            faults.adversarial_placement = true;
            break;
          case DeviceFault::NONE:
            break;
        }
      }
    }
  }

  // What we have a program do here it does on its own host.
  Program& As(Program& program) {
    stage_->world().ActAs(program.host());
    return program;
  }
  emu::SimFabric& Fabric(const std::string& host) { return stage_->world().fabric(host); }
  bool IsDown(const std::string& host) const { return down_.count(host) > 0; }

  // --- Phases ---

  bool AllIdle() const {
    return std::all_of(programs_.begin(), programs_.end(),
                       [&](const auto& program) { return IsDown(program->host()) || program->Idle(); });
  }
  // Until every program on a living host is idle.
  bool AwaitIdle(std::string_view what) {
    const Instant limit = stage_->Now() + kLivenessLimit;
    const bool done = stage_->sim().RunUntil([&] { return Stopped() || AllIdle() || stage_->Now() > limit; });
    if (Stopped()) return false;
    if (done && AllIdle()) return true;
    stage_->Violate(done ? "liveness.slow" : "liveness.deadlock",
                    fmt::format("{} {}", what, done ? "does not come to an end" : "can never come to an end"));
    return false;
  }

  // The habits of devices stay while the work is done, for as long as that may take with them.
  bool Finish() {
    const Instant enough = stage_->Now() + kTroubleTime;
    stage_->sim().RunUntil([&] { return Stopped() || AllIdle() || stage_->Now() > enough; });
    SetDeviceFaults(false);
    return AwaitIdle("the work");
  }

  bool ProbeAll() {
    std::map<std::string, size_t> before;
    for (int round = 0; round < kProbeRounds; ++round) {
      for (const auto& program : programs_) {
        if (!IsDown(program->host())) As(*program).Probe();
      }
      if (!AwaitIdle("probing")) return false;
      // What the last replies leave behind ends a little later.
      if (!Advance(stage_->Now() + kAftermath)) return false;
      if (round >= kWarmRounds) continue;
      // The most of any round: a timer that is set again only when it is needed comes and goes.
      for (const auto& [what, count] : CountObjects()) before[what] = std::max(before[what], count);
    }
    for (const auto& [what, count] : CountObjects()) {
      if (count <= before[what]) continue;
      stage_->Violate("growth", fmt::format("{}: {} after {} rounds of the same work, at most {} in the first {}", what,
                                            count, kProbeRounds, before[what], kWarmRounds));
    }
    return true;
  }

  // What must be the same after each round of the same work.
  std::map<std::string, size_t> CountObjects() {
    std::map<std::string, size_t> counts = CountEverywhere();
    for (const Host& host : scenario_.host()) {
      if (IsDown(host.name())) continue;
      emu::Host& machine = stage_->world().host(host.name());
      const emu::Nic::Objects objects = machine.nic().objects();
      counts[host.name() + ": registrations"] = objects.regions + objects.windows;
      counts[host.name() + ": queues"] = objects.cqs + objects.qps;
      counts[host.name() + ": other objects"] = objects.pds + objects.channels;
      counts[host.name() + ": rdma_cm ids"] = machine.cm().counters().ids;
      counts[host.name() + ": half-open connections"] = machine.cm().counters().half_open;
      const emu::SimLoop::Objects loop = stage_->world().fabric(host.name()).program_objects();
      counts[host.name() + ": timers"] = loop.timers;
      counts[host.name() + ": posted functions"] = loop.due;
      counts[host.name() + ": watches"] = loop.watches;
      counts[host.name() + ": pollers"] = loop.pollers;
    }
    for (const auto& [host, service] : services_) {
      const rpcrdma::ServerHoldings held = service->holdings();
      counts[host + ": clients"] = held.connections;
      counts[host + ": requests"] = held.requests;
      counts[host + ": pool blocks"] = held.pool_blocks;
      counts[host + ": pool bytes"] = held.pool_bytes;
      counts[host + ": registered pool bytes"] = held.registered_bytes;
    }
    for (const auto& program : programs_) {
      if (const auto calls = program->calls_open()) counts[program->host() + ": calls open"] += *calls;
    }
    counts["streams"] = stage_->sim().connections();
    return counts;
  }

  // What belongs to the world itself: NICs, connection managers, streams.
  std::map<std::string, size_t> CountEverywhere() {
    const emu::SimLoop& loop = stage_->sim().loop();
    const emu::SimLoop::Objects objects = loop.CountOf(emu::SimLoop::kNobody);
    size_t contexts = 0;
    for (const Host& host : scenario_.host()) contexts += stage_->world().host(host.name()).nic().objects().contexts;
    // Each open device has one, for its asynchronous events.
    return {{"watches of NICs", objects.watches},
            {"pollers of NICs", objects.pollers},
            {"descriptors", loop.descriptors() - contexts}};
  }

  // Everybody stops, in an orderly way.
  bool End() {
    for (const auto& program : programs_) {
      if (!IsDown(program->host()) && services_.count(program->host()) == 0) As(*program).Stop();
    }
    for (const auto& program : programs_) {
      if (!IsDown(program->host()) && services_.count(program->host()) > 0) As(*program).Stop();
    }
    return AwaitIdle("stopping");
  }

  void TearDown(bool complete) {
    // What still blocks, a listener nobody came to, is woken with an error.
    stage_->NoteEnd();
    stage_->sim().EndPrograms();
    for (const auto& program : programs_) As(*program).Kill();
    if (complete) CheckLoops();
    for (const auto& program : programs_) {
      const Tally& tally = program->tally();
      report_.tally.calls += tally.calls;
      report_.tally.answered += tally.answered;
      report_.tally.refused += tally.refused;
      report_.tally.disturbed += tally.disturbed;
      report_.tally.connections += tally.connections;
      report_.tally.files_copied += tally.files_copied;
      report_.tally.pings += tally.pings;
    }
    // Time for what is posted, the last words of clients among it, and for streams that linger.
    const bool dry = stage_->sim().RunUntilIdle();
    services_.clear();
    programs_.clear();
    if (!complete) return;
    if (!dry) stage_->Violate("teardown.busy", "something still goes on when everything has ended");
    for (const Host& host : scenario_.host()) {
      const emu::Nic::Objects objects = stage_->world().host(host.name()).nic().objects();
      // One open context is the connection manager's, which keeps it, as librdmacm does.
      if (objects.contexts > 1 ||
          objects.pds + objects.regions + objects.windows + objects.channels + objects.cqs + objects.qps != 0) {
        stage_->Violate("teardown.objects", fmt::format("{}: left over: {}", host.name(),
                                                        stage_->world().host(host.name()).nic().Describe()));
      }
    }
    for (const auto& [what, count] : CountEverywhere()) {
      if (count > before_[what]) {
        stage_->Violate("teardown.objects", fmt::format("{}: {}, and {} at the beginning", what, count, before_[what]));
      }
    }
    connections_->Finish(stage_->Now());
    nics_->Finish(stage_->Now());
  }

  // Nobody is left who could want to be called. What was posted before is for what is already gone, and runs first: it
  // must not wait for time to pass.
  void CheckLoops() {
    stage_->sim().RunFor(Duration());
    for (const Host& host : scenario_.host()) {
      const emu::SimLoop::Objects left = stage_->world().fabric(host.name()).program_objects();
      if (left.timers + left.due + left.watches + left.pollers == 0) continue;
      stage_->Violate("teardown.loop",
                      fmt::format("{}: {} timers, {} posted functions, {} watches, {} pollers are left", host.name(),
                                  left.timers, left.due, left.watches, left.pollers));
    }
  }

  std::string Describe() {
    std::string text = fmt::format("at {} ns\n", (stage_->Now() - Instant()).count());
    for (const auto& program : programs_) text += program->Describe();
    for (const Host& host : scenario_.host()) text += stage_->world().host(host.name()).nic().Describe();
    return text + stage_->sim().Describe();
  }

  const Scenario& scenario_;
  const RunOptions& options_;
  RunReport report_;
  TraceHash hash_;
  TraceFanout trace_;
  std::optional<Stage> stage_;
  std::optional<ConnectionChecker> connections_;
  std::optional<NicChecker> nics_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::map<std::string, ServiceProgram*> services_;  // by host
  std::map<std::string, const Fault*> down_;         // hosts, and what took them down
  std::map<HostPair, int> partitions_;
  std::map<HostPair, const Fault*> changed_links_;  // the latest
  std::map<std::string, size_t> before_;            // CountEverywhere
};

}  // namespace

RunReport RunScenario(const Scenario& scenario, const RunOptions& options) {
  return Play(scenario, options).Run();
}

// --- Validation ---

namespace {

class Validator {
 public:
  explicit Validator(const Scenario& scenario) : scenario_(scenario) {}

  Result<void, std::string> Validate() {
    if (scenario_.host_size() == 0) return Err(std::string("host: a scenario needs at least one"));
    if (scenario_.host_size() > 200) return Err(std::string("host: at most 200"));
    for (const Host& host : scenario_.host()) {
      if (host.name().empty()) return Err(std::string("host.name: is empty"));
      if (!hosts_.insert(host.name()).second) return Err(fmt::format("host.name: \"{}\" is there twice", host.name()));
    }
    std::set<std::pair<std::string, std::string>> links;
    for (const Link& link : scenario_.link()) {
      Pair("link", link.a(), link.b());
      if (!links.insert(std::minmax(link.a(), link.b())).second)
        Say("link", link.a() + "-" + link.b(), "one for each pair");
    }
    std::set<std::string> services;
    std::set<std::string> files;
    for (const Service& service : scenario_.service()) {
      Known("service.host", service.host());
      if (!services.insert(service.host()).second) Say("service.host", service.host(), "a host without a service");
      if (service.files()) files.insert(service.host());
    }
    std::set<std::string> names;
    for (const Client& client : scenario_.client()) {
      Known("client.host", client.host());
      if (client.name().empty() || !names.insert(client.name()).second) {
        Say("client.name", client.name(), "a name of its own");
      }
      if (services.count(client.server()) == 0) Say("client.server", client.server(), "a host with a service");
    }
    for (const FileCopy& copy : scenario_.file_copy()) {
      Known("file_copy.host", copy.host());
      if (files.count(copy.server()) == 0) Say("file_copy.server", copy.server(), "a host whose service serves files");
    }
    std::set<std::pair<std::string, uint32_t>> ports;
    for (const PingPong& ping_pong : scenario_.ping_pong()) {
      Pair("ping_pong", ping_pong.client(), ping_pong.server());
      if (!ports.emplace(ping_pong.server(), ping_pong.port()).second) {
        Say("ping_pong.port", std::to_string(ping_pong.port()), "each port once on a host");
      }
    }
    for (const Fault& fault : scenario_.fault()) {
      Known("fault.a", fault.a());
      const bool pair = fault.kind() == Fault::PARTITION || fault.kind() == Fault::RESET || fault.kind() == Fault::LINK;
      if (pair) Pair("fault", fault.a(), fault.b());
      if (!pair && fault.has_b()) Say("fault.b", fault.b(), "nothing: this kind of fault has one host");
      if (fault.kind() == Fault::NONE) Say("fault.kind", "NONE", "a kind of fault");
      if (fault.kind() == Fault::RESTART_SERVICE && services.count(fault.a()) == 0) {
        Say("fault.a", fault.a(), "a host with a service");
      }
      if (fault.kind() == Fault::LINK && !fault.has_link()) Say("fault.link", "", "what the link becomes");
      if (fault.kind() == Fault::PARTITION && fault.for_ns() == 0) Say("fault.for_ns", "0", "how long it lasts");
    }
    if (!problem_.empty()) return Err(problem_);
    return {};
  }

 private:
  void Say(std::string_view field, std::string_view what, std::string_view expected) {
    if (problem_.empty()) problem_ = fmt::format("{}: \"{}\", expected {}", field, what, expected);
  }
  void Known(std::string_view field, const std::string& host) {
    if (hosts_.count(host) == 0) Say(field, host, "the name of a host");
  }
  void Pair(const std::string& where, const std::string& a, const std::string& b) {
    Known(where + ".a", a);
    Known(where + ".b", b);
    if (a == b) Say(where, a, "two different hosts");
  }

  const Scenario& scenario_;
  std::set<std::string> hosts_;
  std::string problem_;
};

}  // namespace

Result<void, std::string> Validate(const Scenario& scenario) {
  if (auto checked = CheckLimits(scenario); !checked) return checked;
  return Validator(scenario).Validate();
}

}  // namespace stagecoach::scenario
