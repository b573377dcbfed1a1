#include "scenarios/runner/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "emu/world/rule_words.h"
#include "scenarios/runner/client_program.h"
#include "scenarios/runner/connection_checker.h"
#include "scenarios/runner/file_copy_program.h"
#include "scenarios/runner/nic_checker.h"
#include "scenarios/runner/old_words.h"
#include "scenarios/runner/ping_pong_program.h"
#include "scenarios/runner/service_program.h"
#include "scenarios/runner/session_program.h"
#include "scenarios/runner/silent_peer_program.h"
#include "scenarios/runner/stage.h"
#include "scenarios/runner/trace_fanout.h"

namespace stagecoach::scenario {
namespace {

// A run that needs more virtual time than this after its last injection hangs. Longer than any time-out of the stack
// and than a retransmitting TCP waits (924 s).
constexpr Duration kLivenessLimit = 2400s;
// Rounds of probes. Pools and caches warm up in the first ones; what grows afterwards grows without end. Of many
// clients one or another may still have had more calls under way at a time than ever: who doubts goes on, and sees that
// end.
constexpr int kWarmRounds = 6;
constexpr int kProbeRounds = 10;
constexpr int kRoundsInDoubt = 16;
// What a round of probes leaves behind is over after this time: streams linger for two seconds.
constexpr Duration kAftermath = 3s;
// How long rules last after the last injection, if there is work so long.
constexpr Duration kTroubleTime = 60s;

// Losses of a network that loses by luck last: with them, too, everything comes to an end.
bool IsOverWithTheWork(const emu::InjectionRule& rule) {
  constexpr emu::ActionSet kLosses = emu::SetOf(emu::InjectionAction::kDrop, emu::InjectionAction::kDuplicate,
                                                emu::InjectionAction::kOvertake, emu::InjectionAction::kNotReady);
  return (emu::SetOf(rule.action) & kLosses) == 0 || !IsNowAndThen(rule);
}

class Play {
 public:
  Play(const Scenario& scenario, const RunOptions& options) : scenario_(scenario), options_(options) {
    trace_.Add(&hash_);
    trace_.Add(options.observer);
    stage_.emplace(scenario_, &trace_, options.capture);
    connections_.emplace(&stage_->violations());
    nics_.emplace(&stage_->violations());
    trace_.Add(&stage_->evidence());
    trace_.Add(&*connections_);
    trace_.Add(&*nics_);
  }

  RunReport Run() {
    before_ = CountEverywhere();
    MakePrograms();
    if (options_.sabotage) options_.sabotage(stage_->world());
    for (const auto& program : programs_) As(*program).Start();
    const bool complete = PlayInjections() && Finish() && ProbeAll() && End();
    report_.stopped = Stopped();
    if (!complete || !stage_->violations().empty()) report_.state = Describe();
    report_.virtual_time = stage_->Now() - Instant();
    report_.violations = stage_->violations().list();
    NoteRules();
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
      if (client.session()) {
        programs_.push_back(std::make_unique<SessionProgram>(*stage_, client, index++));
      } else {
        programs_.push_back(std::make_unique<ClientProgram>(*stage_, client, index++));
      }
    }
    index = 0;
    for (const FileCopy& copy : scenario_.file_copy()) {
      programs_.push_back(std::make_unique<FileCopyProgram>(*stage_, copy, index++));
    }
    index = 0;
    for (const SilentPeer& peer : scenario_.silent_peer()) {
      programs_.push_back(std::make_unique<SilentPeerProgram>(*stage_, peer, index++));
    }
  }

  // --- Injections ---

  bool PlayInjections() {
    // Beginnings and ends in the order of time; of one moment, in the order of the scenario, ends first.
    std::multimap<Instant, std::function<void()>> timeline;
    for (const Injection& injection : scenario_.injection()) {
      const Instant begin = Instant(Duration(injection.at_ns()));
      timeline.emplace(begin, [this, &injection] { BeginInjection(injection); });
      const bool lasts = injection.kind() == Injection::PARTITION || injection.kind() == Injection::KILL ||
                         injection.kind() == Injection::POWER_LOSS || injection.kind() == Injection::LINK ||
                         injection.kind() == Injection::STOP;
      const bool ends = injection.for_ns() != 0 && lasts;
      if (ends) timeline.emplace(begin + Duration(injection.for_ns()), [this, &injection] { EndInjection(injection); });
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

  void BeginInjection(const Injection& injection) {
    emu::SimWorld& sim = stage_->sim();
    Trace(&trace_, stage_->Now(), "injection", Injection::Kind_Name(injection.kind()),
          {{"a", injection.a()}, {"b", injection.b()}});
    const bool down = injection.kind() == Injection::KILL || injection.kind() == Injection::POWER_LOSS;
    const bool is_of_processes =
        down || injection.kind() == Injection::RESTART_SERVICE || injection.kind() == Injection::STOP;
    if (IsDown(injection.a()) && is_of_processes) return;
    const bool for_good = injection.for_ns() == 0 && down;
    // A link that changes is nothing to fail by: how long calls may take counts it (Stage::Patience).
    if (injection.kind() != Injection::LINK) {
      // An InfiniBand connection outlives the streams that carry its packets: another is opened, and they are sent
      // again.
      const bool takes_streams = injection.kind() == Injection::RESET || injection.kind() == Injection::FORGET;
      const bool waits =
          (takes_streams && stage_->IsInfiniband(injection.a())) ||
          (injection.kind() == Injection::PARTITION &&
           Duration(injection.for_ns()) < stage_->OutlivesSilence(injection.a())) ||
          (injection.kind() == Injection::STOP && Duration(injection.for_ns()) < stage_->OutlivesStop(injection.a()));
      const auto harm = waits                                            ? Stage::Harm::kWaits
                        : injection.kind() == Injection::RESTART_SERVICE ? Stage::Harm::kServiceEnds
                                                                         : Stage::Harm::kEnds;
      disturbances_[&injection] = stage_->BeginDisturbance(injection.a(), injection.b(), harm);
    }
    switch (injection.kind()) {
      case Injection::PARTITION:
        ++partitions_[PairOf(injection)];
        return sim.Partition(Fabric(injection.a()), Fabric(injection.b()), true);
      case Injection::RESET:
        stage_->EndDisturbance(disturbances_.at(&injection));
        return sim.ResetConnections(Fabric(injection.a()), Fabric(injection.b()));
      case Injection::FORGET:
        stage_->EndDisturbance(disturbances_.at(&injection));
        if (!stage_->IsInfiniband(injection.a())) stage_->NoteSilence(injection.a());
        return sim.ForgetConnections(Fabric(injection.a()));
      case Injection::KILL:
      case Injection::POWER_LOSS:
        down_[injection.a()] = &injection;
        EndStopsOf(injection.a());
        if (for_good) stage_->NoteGone(injection.a());
        if (injection.kind() == Injection::POWER_LOSS) stage_->NoteSilence(injection.a());
        sim.CutHost(Fabric(injection.a()), injection.kind() == Injection::KILL ? emu::Cut::kReset : emu::Cut::kSilent);
        for (const auto& program : programs_) {
          if (program->host() == injection.a()) As(*program).Kill();
        }
        return;
      case Injection::LINK:
        changed_links_[PairOf(injection)] = &injection;
        return sim.SetLink(Fabric(injection.a()), Fabric(injection.b()), MakeLink(injection.link()));
      case Injection::RESTART_SERVICE:
        stage_->world().ActAs(injection.a());
        restarts_.push_back(&injection);
        services_.at(injection.a())->Restart(Duration(injection.for_ns()), [this, host = injection.a()] {
          EndRestartsOf(host);
        });
        return;
      case Injection::STOP:
        stops_[injection.a()].insert(&injection);
        return sim.Stop(Fabric(injection.a()), true);
      case Injection::NONE:
        return;
    }
  }

  // It runs no more, or begins anew.
  void EndStopsOf(const std::string& host) {
    for (const Injection* injection : std::exchange(stops_[host], {}))
      stage_->EndDisturbance(disturbances_.at(injection));
  }

  void EndInjection(const Injection& injection) {
    emu::SimWorld& sim = stage_->sim();
    Trace(&trace_, stage_->Now(), "injection", "over", {{"a", injection.a()}, {"b", injection.b()}});
    switch (injection.kind()) {
      case Injection::PARTITION:
        stage_->EndDisturbance(disturbances_.at(&injection));
        // Those of one pair may overlap.
        if (--partitions_[PairOf(injection)] > 0) return;
        return sim.Partition(Fabric(injection.a()), Fabric(injection.b()), false);
      case Injection::LINK:
        if (changed_links_[PairOf(injection)] != &injection) return;
        return sim.SetLink(Fabric(injection.a()), Fabric(injection.b()),
                           MakeLink(LinkBetween(injection.a(), injection.b())));
      case Injection::KILL:
      case Injection::POWER_LOSS:
        // A kill of a host that was down has changed nothing.
        if (!IsDown(injection.a()) || down_[injection.a()] != &injection) return;
        down_.erase(injection.a());
        // Its blocked programs unwind first.
        sim.RunUntil([&] { return !sim.HasBlocked(Fabric(injection.a())); });
        stage_->world().Restart(injection.a());
        for (const auto& program : programs_) {
          if (program->host() == injection.a()) As(*program).Start();
        }
        stage_->EndDisturbance(disturbances_.at(&injection));
        // A service that was being restarted is up with its host.
        EndRestartsOf(injection.a());
        return;
      case Injection::STOP: {
        // Of those of one host that overlap the last one counts.
        std::set<const Injection*>& stops = stops_[injection.a()];
        if (stops.erase(&injection) == 0) return;
        stage_->EndDisturbance(disturbances_.at(&injection));
        if (stops.empty()) sim.Stop(Fabric(injection.a()), false);
        return;
      }
      default:
        return;
    }
  }

  // The service of `host` listens again.
  void EndRestartsOf(const std::string& host) {
    for (const Injection* injection : restarts_) {
      if (injection->a() == host) stage_->EndDisturbance(disturbances_.at(injection));
    }
  }

  Link LinkBetween(const std::string& a, const std::string& b) const {
    for (const Link& link : scenario_.link()) {
      if ((link.a() == a && link.b() == b) || (link.a() == b && link.b() == a)) return link;
    }
    return Link();
  }

  using HostPair = std::pair<std::string, std::string>;
  static HostPair PairOf(const Injection& injection) { return std::minmax(injection.a(), injection.b()); }

  void EndRules() {
    NoteRules();
    rules_are_over_ = true;
    for (const Host& host : scenario_.host()) {
      stage_->world().host(host.name()).nic().injections()->End(IsOverWithTheWork);
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
    const Instant limit = stage_->Now() + kLivenessLimit + LongestWork();
    const emu::SimLoop& loop = stage_->sim().loop();
    const auto over = [&] { return Stopped() || AllIdle() || stage_->Now() > limit; };
    while (!stage_->sim().RunUntil(over)) {
      // Nothing is scheduled: whoever waits waits for ever.
      if (loop.IsDry()) break;
      // Nothing is for so long that the world stalled.
      stage_->sim().RunFor(loop.NextDue() - stage_->Now());
    }
    if (Stopped()) return false;
    if (AllIdle()) return true;
    const bool dry = loop.IsDry();
    stage_->Violate(dry ? "liveness.deadlock" : "liveness.slow",
                    fmt::format("{} {}", what, dry ? "can never come to an end" : "does not come to an end"));
    return false;
  }

  // How long the scenario itself has its programs wait, at most: until they start, between calls, for the service, and
  // at last for what its rules have held back.
  Duration LongestWork() const {
    double longest = 0;
    for (const Client& client : scenario_.client()) {
      double work = static_cast<double>(std::max({client.start_ns(), client.close_ns(), client.destroy_ns()}));
      for (const Call& call : client.call()) {
        work += static_cast<double>(call.repeat()) * (static_cast<double>(call.pause_ns()) + call.service_ns());
      }
      longest = std::max(longest, work);
    }
    for (const FileCopy& copy : scenario_.file_copy()) {
      longest = std::max(longest, static_cast<double>(copy.start_ns()));
    }
    for (const PingPong& ping_pong : scenario_.ping_pong()) {
      longest = std::max(longest, static_cast<double>(ping_pong.start_ns()));
    }
    longest += static_cast<double>(stage_->LongestHold().count());
    return Duration(static_cast<int64_t>(std::min(longest, kLongestWait)));
  }

  // The rules of devices stay while the work is done, for as long as that may take with them.
  bool Finish() {
    const Instant enough = stage_->Now() + kTroubleTime;
    stage_->sim().RunUntil([&] { return Stopped() || AllIdle() || stage_->Now() > enough; });
    EndRules();
    return AwaitIdle("the work");
  }

  bool ProbeAll() {
    std::map<std::string, size_t> before;
    std::map<std::string, size_t> last;
    std::map<std::string, int> growing;  // in so many rounds, when all is as large as it will be
    int rounds = kProbeRounds;
    // What grows without end grows always; what happens to be larger than before does so now and then.
    const auto grows = [&](const std::string& what) {
      return last.at(what) > before[what] && growing[what] >= (rounds - kWarmRounds) * 3 / 4;
    };
    for (int round = 0; round < rounds; ++round) {
      for (const auto& program : programs_) {
        if (!IsDown(program->host())) As(*program).Probe(round < kWarmRounds);
      }
      if (!AwaitIdle("probing")) return false;
      // What the last replies leave behind ends a little later.
      if (!Advance(stage_->Now() + kAftermath)) return false;
      const std::map<std::string, size_t> counts = CountObjects();
      for (const auto& [what, count] : counts) {
        // The most of any round: a timer that is set again only when it is needed comes and goes.
        if (round < kWarmRounds) before[what] = std::max(before[what], count);
        if (round >= kWarmRounds && count > last[what]) ++growing[what];
      }
      last = counts;
      for (const auto& [host, service] : services_) service->CheckNothingHeld();
      // A client that goes without a word leaves what it was to read.
      if (!HasSilentInjections()) connections_->CheckNothingExposed(stage_->Now());
      const bool is_last = round + 1 == kProbeRounds;
      if (is_last && std::any_of(last.begin(), last.end(), [&](const auto& entry) { return grows(entry.first); })) {
        rounds += kRoundsInDoubt;
      }
    }
    for (const auto& [what, count] : last) {
      if (!grows(what)) continue;
      stage_->Violate("growth", fmt::format("{}: {} after {} rounds of the same work, at most {} in the first {}", what,
                                            count, rounds, before[what], kWarmRounds));
    }
    return true;
  }

  bool HasSilentInjections() const {
    const auto is_silent = [](const Injection& injection) {
      return injection.kind() == Injection::FORGET || injection.kind() == Injection::POWER_LOSS ||
             injection.kind() == Injection::PARTITION;
    };
    const auto stalls = [this](const Host& host) { return stage_->MayStall(host.name()); };
    return std::any_of(scenario_.injection().begin(), scenario_.injection().end(), is_silent) ||
           std::any_of(scenario_.host().begin(), scenario_.host().end(), stalls);
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
      // Which connection of several a session uses is luck, and so is when each has been at its most.
      if (!HasManyConnections(host)) {
        counts[host + ": pool blocks"] = held.pool_blocks;
        counts[host + ": pool bytes"] = held.pool_bytes;
      }
      // Blocks are registered once, at first need: which of those kept is used next is luck.
      size_t& registrations = counts[host + ": registrations"];
      registrations -= std::min<size_t>(registrations, held.registered_blocks);
      counts[host + ": registrations of clients"] = held.registration_records;
    }
    for (const auto& program : programs_) {
      counts[program->host() + ": records of calls and registrations"] += program->records();
      if (const auto calls = program->calls_open()) counts[program->host() + ": calls open"] += *calls;
    }
    counts["streams"] = stage_->sim().connections();
    // Deadlines of queue pairs, of connection managers, ports and streams.
    counts["timers of NICs"] = stage_->sim().loop().CountOf(emu::SimLoop::kNobody).timers;
    return counts;
  }

  // A session calls the service of `host` on more than one at a time.
  bool HasManyConnections(const std::string& host) const {
    return std::any_of(scenario_.client().begin(), scenario_.client().end(), [&](const Client& client) {
      return client.server() == host && client.session() && client.connections() > 1;
    });
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
      report_.tally.silent_streams += tally.silent_streams;
      report_.tally.shut_out += tally.shut_out;
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
      if (stage_->world().host(host.name()).nic().HoldsTimerForNobody()) {
        stage_->Violate("teardown.loop", host.name() + ": the device keeps a timer that nobody waits for");
      }
      const emu::SimLoop::Objects left = stage_->world().fabric(host.name()).program_objects();
      if (left.timers + left.due + left.watches + left.pollers == 0) continue;
      stage_->Violate("teardown.loop",
                      fmt::format("{}: {} timers, {} posted functions, {} watches, {} pollers are left", host.name(),
                                  left.timers, left.due, left.watches, left.pollers));
    }
  }

  // What has become of each until now; of those that are over, until then.
  void NoteRules() {
    size_t at = 0;
    for (const Host& host : scenario_.host()) {
      const emu::InjectionPlan& plan = *stage_->world().host(host.name()).nic().injections();
      for (size_t i = 0; i < plan.rules().size(); ++i, ++at) {
        if (rules_are_over_ && IsOverWithTheWork(plan.rules()[i])) continue;
        report_.rules.resize(std::max(report_.rules.size(), at + 1));
        const uint64_t fired = stage_->evidence().TimesFired(host.name(), i + 1);
        report_.rules[at] = host.name() + ": " + emu::WordsOf(plan, i, fired);
      }
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
  std::map<std::string, const Injection*> down_;     // hosts, and what took them down
  std::map<const Injection*, Stage::DisturbanceId> disturbances_;
  std::vector<const Injection*> restarts_;                   // of services, so far
  std::map<std::string, std::set<const Injection*>> stops_;  // by host, those that are not over
  std::map<HostPair, int> partitions_;
  std::map<HostPair, const Injection*> changed_links_;  // the latest
  std::map<std::string, size_t> before_;                // CountEverywhere
  bool rules_are_over_ = false;
};

}  // namespace

RunReport RunScenario(const Scenario& scenario, const RunOptions& options) {
  STAGECOACH_CHECK(!HasOldWords(scenario));
  return Play(scenario, options).Run();
}

}  // namespace stagecoach::scenario
