// Stage: the world a scenario plays in, as its programs see it.
//
// Knows the hosts, which injection touched whom and when, and where to report what is wrong. A program asks Severed(),
// Disturbed() and MayFailToConnect() to judge whether a failure it met is one it may meet: without a cause, a failure
// is a violation. An injection excuses what lived through it and nothing else: what began when it was over has no part
// in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/prng.h"
#include "base/trace.h"
#include "emu/world/simulated_world.h"
#include "rpcrdma/api/error.h"
#include "rpcrdma/wire/profile.h"
#include "scenarios/proto/scenario.pb.h"
#include "scenarios/runner/device_rules.h"
#include "scenarios/runner/evidence.h"
#include "scenarios/runner/model.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

// What an end of this name follows (docs/profiles.md), which FindProfile knows.
const rpcrdma::ProtocolProfile& DocumentOf(const std::string& rpcrdma_profile);
// One of those before RFC 8166.
bool IsOlderDocument(const std::string& rpcrdma_profile);
// They tell each other how long their messages may be.
bool HavePrivateData(const Client& client, const Service& service);
// Their connection may be of this version.
bool MayBeOfVersion1(const Client& client, const Service& service);
bool MayBeOfVersion2(const Client& client, const Service& service);
// In version 1 a reply that fits neither inline nor any chunk is read by the client from memory of the service: both
// ends know how, and have what it takes.
bool RepliesAreRead(const Client& client, const Service& service);
// The emulator's profile with what `device` changes. Its name is one that ProfileByName knows.
emu::DeviceProfile MakeProfile(const Device& device);
// Ten years, in nanoseconds: no scenario's program is waited for longer. Far from where arithmetic with times ends.
inline constexpr double kLongestWait = 3e17;
// So few that what runs on it may run out of them.
bool HasFewRegistrations(const Device& device);
emu::LinkOptions MakeLink(const Link& link);

class Stage {
 public:
  // `scenario` and `trace` outlive the stage. Installs a simulated world as the current one.
  Stage(const Scenario& scenario, TraceSink* trace, std::shared_ptr<emu::CaptureSink> capture);
  // Everything that uses verbs is gone by now.
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  const Scenario& scenario() const { return scenario_; }
  emu::SimulatedWorld& world() { return *world_; }
  emu::SimWorld& sim() { return world_->sim(); }
  Instant Now() const { return world_->sim().Now(); }
  TraceSink* trace() const { return trace_; }
  // Callbacks of a host's programs run on this.
  EventLoop& loop(const std::string& host) { return world_->fabric(host).program_loop(); }
  std::string AddressOf(const std::string& host) const;
  Prng Luck(std::string_view name) const { return prng_.Fork(name); }

  Violations& violations() { return violations_; }
  void Violate(std::string_view rule, std::string text) { violations_.Add(Now(), rule, std::move(text)); }
  Executions& executions() { return executions_; }
  // A number for one more incarnation of a service.
  uint32_t NewLife() { return ++lives_; }

  enum class Harm : uint8_t {
    kWaits,       // connections are kept waiting
    kEnds,        // they may end
    kServiceEnds  // those of the RPC service of `a` may
  };
  // Something happens, from now until it is called over, to all that runs between these hosts. An empty `b`: to
  // everything of `a`.
  using DisturbanceId = size_t;
  DisturbanceId BeginDisturbance(const std::string& a, const std::string& b, Harm harm);
  void EndDisturbance(DisturbanceId disturbance);
  bool IsInfiniband(const std::string& host) const { return world_->host(host).nic().is_infiniband(); }
  // Packets between these hosts may be lost: of all that is done some waits for half a second to be done again.
  bool LosesPackets(const std::string& a, const std::string& b) const;
  // How long a connection of this host's device lives without a word of its peer.
  Duration OutlivesSilence(const std::string& host) const;
  // The same where the peer's host is there and its processes stand still.
  Duration OutlivesStop(const std::string& host) const;
  // A first XID for a client, session or service of this name.
  uint32_t FirstXid(std::string_view name) const { return DrawXid(name, UINT32_MAX); }
  // The same for one of the model service, whose calls never have the same arguments: see Scenario::xids.
  uint32_t FirstModelXid(std::string_view name) const { return DrawXid(name, scenario_.xids()); }
  // What a connection is for.
  enum class Use : uint8_t { kRpc, kPingPong };
  // Whether something of a connection between a client's host and its server that began at `since`, and lasts until
  // now, lived through a disturbance.
  bool Disturbed(const std::string& client, const std::string& server, Instant since, Use use = Use::kRpc) const;
  // Whether a connection between them, which was begun at `since` and which its initiator calls established since then
  // (nullopt: not yet), may have ended by a disturbance. What only keeps it waiting ends it while word of it is on its
  // way: a responder that does not hear in time that its answer has come gives up.
  bool Severed(const std::string& client, const std::string& server, Instant since, std::optional<Instant> established,
               Use use = Use::kRpc) const;
  // What the attempts of one program to connect came to.
  struct Attempts {
    uint32_t rejected = 0;
    uint32_t unanswered = 0;  // for no reason but that packets are lost
  };
  // Whether `host` may fail so to connect to the service of `server`, having begun at `since`. Counts it.
  bool MayFailToConnect(const std::string& host, const std::string& server, Instant since,
                        rpcrdma::CallError::Kind kind, Attempts* attempts) const;
  // Whether the listener of `server` may have turned away somebody who began to connect at `since`, and has: so many
  // come that they do not fit its backlog. An InfiniBand device never does.
  bool MayBeTurnedAway(const std::string& server, Instant since) const;
  // For how long at most a client asks an InfiniBand device again until there is room in the backlog of `server`.
  Duration WaitForRoom(const std::string& server) const;
  // One of the hosts lost power or forgot its connections, at some time: what waits for it without a time-out may wait
  // for ever.
  void NoteSilence(const std::string& host) { silent_.push_back(host); }
  bool WentSilent(const std::string& a, const std::string& b) const {
    return HasStalled(a) || HasStalled(b) ||
           std::any_of(silent_.begin(), silent_.end(), [&](const auto& host) { return host == a || host == b; });
  }
  // How long a call of the client may take when nothing is wrong. All that may stand before it is counted as if done
  // one after the other, over the worst link its hosts ever have, and then twice:
  //   calls      those the client has under way at a time, and cancelled ones that the server is still at work for:
  //              they hold their credits
  //   a call     the service's time, and so many round trips: for credits, for RDMA Reads (so many segments, so few at
  //              a time), for what a device tells late
  //   its bytes  on a link whose bandwidth all streams between the hosts share, or as fast as a stream's buffer allows
  Duration Patience(const Client& client) const;
  // The run is over: what still waits is woken with an error, and that is no failure.
  void NoteEnd() { over_ = true; }
  bool IsOver() const { return over_; }
  // The host will not be started again.
  void NoteGone(const std::string& host) { gone_.push_back(host); }
  bool IsGone(std::string_view host) const { return std::find(gone_.begin(), gone_.end(), host) != gone_.end(); }
  // The host's device, which has a rule for that or little room, has failed a registration since then.
  bool FailedRegistration(const std::string& host, Instant since) const;
  // A rule of the host may have connections stall.
  bool MayStall(const std::string& host) const;
  // For how long rules may still hold back what is under way when they are over, with all that is behind it.
  Duration LongestHold() const;
  // Belongs into the trace.
  Evidence& evidence() { return evidence_; }

 private:
  // What a connection meets on its way, at its worst.
  struct Path;
  Path PathBetween(const std::string& one, const std::string& other) const;
  // The host's device has what is of these kinds lost, or late, by rules or habits: that is found out by time-outs.
  bool Loses(const Host& host, emu::KindSet kinds) const;
  bool AnyLosesPackets() const;
  // The rules of a host.
  const DeviceRules& RulesAt(const std::string& host) const;
  // Whether a rule of the host's of which `which` is true has fired since then.
  template <typename Which>
  bool FiredSince(const std::string& host, Instant since, Which which) const;
  // Rules of either host may have ended a connection between them that lived then, and is established or not yet.
  bool CutSince(const std::string& a, const std::string& b, Instant since, bool is_established) const;
  bool HasStalled(const std::string& host) const;

  struct Disturbance {
    std::string a;
    std::string b;
    Instant from{};
    std::optional<Instant> until;  // nullopt: it is not over
    Harm harm = Harm::kWaits;

    bool Concerns(const std::string& client, const std::string& server, Use use) const {
      if (harm == Harm::kServiceEnds) return use == Use::kRpc && a == server;
      if (b.empty()) return a == client || a == server;
      return (a == client && b == server) || (a == server && b == client);
    }
    // One that takes no time meets what is there already. Of the same instant is what a host that forgets its
    // connections begins anew.
    bool Meets(const std::string& client, Instant since) const {
      return !until || since < *until || since < from || (since == from && a != client);
    }
  };
  bool ServerMayBeFull(const std::string& server, Instant since) const;
  // Connections that clients and file copies may have to the service of `server` at a time.
  uint64_t ConnectionsTo(const std::string& server) const;
  uint32_t DrawXid(std::string_view name, uint32_t last) const;

  const Scenario& scenario_;
  TraceSink* const trace_;
  const Prng prng_;
  Violations violations_;
  Executions executions_;
  uint32_t lives_ = 0;
  emu::SimulatedWorld* world_ = nullptr;  // installed
  std::vector<Disturbance> disturbances_;
  bool over_ = false;
  Evidence evidence_;
  std::vector<std::string> gone_;
  std::vector<std::string> silent_;
  std::map<std::string, DeviceRules, std::less<>> rules_;  // by host
};

}  // namespace stagecoach::scenario
