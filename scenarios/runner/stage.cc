#include "scenarios/runner/stage.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"

namespace stagecoach::scenario {

const rpcrdma::ProtocolProfile& DocumentOf(const std::string& rpcrdma_profile) {
  const rpcrdma::ProtocolProfile* const profile = rpcrdma::FindProfile(rpcrdma_profile);
  STAGECOACH_CHECK(profile != nullptr);
  return *profile;
}

bool IsOlderDocument(const std::string& rpcrdma_profile) {
  return DocumentOf(rpcrdma_profile) != rpcrdma::kRfc5666bis;
}

bool HavePrivateData(const Client& client, const Service& service) {
  return DocumentOf(client.rpcrdma_profile()).private_data && DocumentOf(service.rpcrdma_profile()).private_data;
}

bool MayBeOfVersion1(const Client& client, const Service& service) {
  return std::max(client.version_low(), service.version_low()) == 1;
}

bool MayBeOfVersion2(const Client& client, const Service& service) {
  return std::min(client.version_high(), service.version_high()) == 2;
}

bool RepliesAreRead(const Client& client, const Service& service) {
  return DocumentOf(client.rpcrdma_profile()).replies_by_read_chunk &&
         DocumentOf(service.rpcrdma_profile()).replies_by_read_chunk && client.outgoing_reads() > 0 &&
         service.incoming_reads() > 0 && service.exposed_replies_max() > 0;
}

emu::DeviceProfile MakeProfile(const Device& device) {
  emu::DeviceProfile profile = *emu::ProfileByName(device.profile());
  const auto set = [](bool present, auto value, auto* field) {
    if (present) *field = static_cast<std::remove_pointer_t<decltype(field)>>(value);
  };
  set(device.has_max_qp_wr(), device.max_qp_wr(), &profile.max_qp_wr);
  set(device.has_max_cqe(), device.max_cqe(), &profile.max_cqe);
  set(device.has_max_mr(), device.max_mr(), &profile.max_mr);
  set(device.has_max_mw(), device.max_mw(), &profile.max_mw);
  set(device.has_max_mr_size(), device.max_mr_size(), &profile.max_mr_size);
  set(device.has_max_ird(), device.max_ird(), &profile.max_ird);
  set(device.has_max_ord(), device.max_ord(), &profile.max_ord);
  set(device.has_max_inline(), device.max_inline(), &profile.max_inline);
  set(device.has_stag_quarantine(), device.stag_quarantine(), &profile.stag_quarantine);
  profile.want_crc = device.crc();
  return profile;
}

bool HasFewRegistrations(const Device& device) {
  const emu::DeviceProfile profile = MakeProfile(device);
  const emu::DeviceProfile usual;
  return profile.max_mr < usual.max_mr || profile.max_mw < usual.max_mw;
}

emu::LinkOptions MakeLink(const Link& link) {
  emu::LinkOptions options;
  options.latency = Duration(link.latency_ns());
  options.jitter = Duration(link.jitter_ns());
  options.bytes_per_second = link.bytes_per_second();
  options.buffer = link.buffer_bytes();
  options.max_segment_size = link.segment_bytes();
  options.chop = link.chop();
  return options;
}

namespace {

// For so long after an injection a service that admits few clients may still count those that it took away: streams say
// at once that their peer has gone, managers of InfiniBand connections ask for it.
constexpr Duration kBlink = 50ms;
constexpr Duration kBlinkOfInfiniband = 10s;

// So many attempts to connect of one program may come to nothing where packets are lost, and one more for so many that
// were rejected.
constexpr uint32_t kUnansweredMax = 3;
constexpr uint32_t kRejectedPerUnanswered = 4;

// A client whose request found no room asks again after so long (CmOptions::response_timeout).
constexpr Duration kAsksAgain = 540ms;

// So often may a call be sent again for what a server says that it needs (Requester::Config::resends_max).
constexpr double kResendsMax = 4;

// The service of this host; null: it has none.
const Service* FindService(const Scenario& scenario, const std::string& host) {
  const auto& services = scenario.service();
  const auto found =
      std::find_if(services.begin(), services.end(), [&](const Service& each) { return each.host() == host; });
  return found != services.end() ? &*found : nullptr;
}

// Of one connection.
struct Segments {
  double longest = 1 << 30;  // bytes in one
  double reads = 1;          // that the server reads at a time
  double more_rounds = 0;    // of a call whose reply the client reads: the Read, RDMA_DONE, and the fences of both
  double attempts = 1;       // of a call that an error of version 2 has sent again
};

Segments SegmentsOf(const Scenario& scenario, const Client& client) {
  Segments segments;
  segments.reads = client.incoming_reads();
  for (const Service& service : scenario.service()) {
    if (service.host() != client.server()) continue;
    segments.reads = std::min<double>(segments.reads, service.outgoing_reads());
    if (RepliesAreRead(client, service)) segments.more_rounds = 4;
    if (MayBeOfVersion2(client, service)) segments.attempts = 1 + kResendsMax;
  }
  for (const Host& host : scenario.host()) {
    const emu::DeviceProfile device = MakeProfile(host.device());
    if (host.name() == client.host()) {
      segments.longest = std::min(segments.longest, static_cast<double>(device.max_mr_size));
      segments.reads = std::min<double>(segments.reads, device.max_ird);
    }
    if (host.name() == client.server()) segments.reads = std::min<double>(segments.reads, device.max_ord);
  }
  return segments;
}

}  // namespace

Stage::Stage(const Scenario& scenario, TraceSink* trace, std::shared_ptr<emu::CaptureSink> capture)
    : scenario_(scenario), trace_(trace), prng_(scenario.seed()) {
  emu::SimWorld::Options options;
  options.seed = scenario.seed();
  options.trace = trace;
  options.link = MakeLink(Link());
  options.needs_descriptors = true;
  emu::WorldOptions world_options;
  world_options.capture = std::move(capture);
  auto world = std::make_unique<emu::SimulatedWorld>(options, std::move(world_options));
  for (const Host& host : scenario.host()) {
    emu::DeviceProfile profile = MakeProfile(host.device());
    profile.luck_seed = Luck("device/" + host.name()).Next();
    world->AddHost(host.name(), {*emu::IpEndpoint::Parse(AddressOf(host.name()), 0)}, profile,
                   rules_[host.name()] = GivenRules(host.device()));
  }
  for (const Link& link : scenario.link()) {
    world->sim().SetLink(world->fabric(link.a()), world->fabric(link.b()), MakeLink(link));
  }
  world_ = world.get();
  emu::World::Install(std::move(world));
}

Stage::~Stage() {
  emu::World::Install(nullptr);
}

std::string Stage::AddressOf(const std::string& host) const {
  for (int i = 0; i < scenario_.host_size(); ++i) {
    if (scenario_.host(i).name() == host) return "10.0.0." + std::to_string(i + 1);
  }
  return {};
}

Duration Stage::OutlivesSilence(const std::string& host) const {
  // A stream retransmits as long (SimWorld::Options::retransmit_timeout).
  constexpr Duration kStreamGivesUp = 900s;
  // Seven retries, half a second each (CmOptions::ack_timeout), some of which may have been used up before. They count
  // from the beginning where packets are lost anyway, and else when a host has given no sign of life for so long
  // (IbConnection).
  constexpr Duration kRetriesUsedUp = 3s;
  constexpr Duration kHostSilence = 7s;
  if (!IsInfiniband(host)) return kStreamGivesUp;
  return AnyLosesPackets() ? kRetriesUsedUp : kHostSilence;
}

Duration Stage::OutlivesStop(const std::string& host) const {
  return IsInfiniband(host) && AnyLosesPackets() ? OutlivesSilence(host) : Duration::max();
}

bool Stage::Loses(const Host& host, emu::KindSet kinds) const {
  return LoseOrDelay(RulesAt(host.name()), kinds) || LoseOrDelay(MakeProfile(host.device()).habits, kinds);
}

bool Stage::AnyLosesPackets() const {
  return std::any_of(scenario_.host().begin(), scenario_.host().end(),
                     [this](const Host& host) { return Loses(host, emu::kKindsOfConnections); });
}

uint32_t Stage::DrawXid(std::string_view name, uint32_t last) const {
  return static_cast<uint32_t>(Luck("xid/" + std::string(name)).Between(1, last));
}

struct Stage::Path {
  double way = 0;       // ns, one way
  double delay = 0;     // ns a device adds to a round trip
  double retries = 0;   // ns that a call waits for what was lost
  double per_byte = 0;  // ns, sent or received
};

Stage::Path Stage::PathBetween(const std::string& one, const std::string& other) const {
  const auto on_it = [&](const std::string& a, const std::string& b) {
    return (a == one && b == other) || (a == other && b == one);
  };
  double streams = 0;
  for (const Client& client : scenario_.client()) streams += on_it(client.host(), client.server()) ? 1 : 0;
  for (const FileCopy& copy : scenario_.file_copy()) streams += on_it(copy.host(), copy.server()) ? 1 : 0;
  for (const PingPong& ping_pong : scenario_.ping_pong()) {
    streams += on_it(ping_pong.client(), ping_pong.server()) ? 1 : 0;
  }
  Path path;
  const auto look_at = [&](const Link& link) {
    const auto way = static_cast<double>(link.latency_ns() + link.jitter_ns());
    path.way = std::max(path.way, way);
    // So much may be under way until word of its arrival is back.
    path.per_byte = std::max(path.per_byte, 2 * way / link.buffer_bytes());
    const auto bandwidth = static_cast<double>(link.bytes_per_second());
    if (bandwidth > 0) path.per_byte = std::max(path.per_byte, streams * 1e9 / bandwidth);
  };
  bool has_own = false;
  for (const Link& link : scenario_.link()) {
    if (!on_it(link.a(), link.b())) continue;
    look_at(link);
    has_own = true;
  }
  if (!has_own) look_at(Link());
  for (const Injection& injection : scenario_.injection()) {
    if (injection.kind() == Injection::LINK && on_it(injection.a(), injection.b())) look_at(injection.link());
  }
  for (const Host& host : scenario_.host()) {
    if (host.name() != one && host.name() != other) continue;
    for (const emu::InjectionRule& rule : RulesAt(host.name())) {
      if (rule.action == emu::InjectionAction::kDelay) path.way += static_cast<double>(rule.delay.count());
      if (rule.action == emu::InjectionAction::kDelayCompletion) path.delay += static_cast<double>(rule.delay.count());
    }
    // The last packet of a message is missed after half a second (CmOptions::ack_timeout), others at once.
    constexpr double kSeveralTimeouts = 5e9;
    if (Loses(host, emu::kAllKinds)) path.retries = kSeveralTimeouts;
  }
  return path;
}

Duration Stage::Patience(const Client& client) const {
  // To be sent, to be pulled, to be answered, to be let go: more than any of them takes when one waits for nothing
  // else.
  constexpr double kRounds = 8;
  // Headers of the RPC, of the transport, of each record.
  constexpr double kHeaders = 4000;
  constexpr double kRecordOverhead = 1.25;
  const Path path = PathBetween(client.host(), client.server());
  const Segments segments = SegmentsOf(scenario_, client);
  double longest = 0;
  bool cancels = false;
  // What the server calls meanwhile.
  double reverse = 0;
  for (const Call& call : client.reverse_call()) {
    const double bytes =
        2 * kHeaders + kRecordOverhead * (static_cast<double>(call.argument_bytes()) + call.plain_argument_bytes() +
                                          call.result_bytes() + call.plain_result_bytes());
    reverse += call.repeat() * (2 * (2 * path.way + path.delay) + bytes * path.per_byte);
  }
  for (const Call& call : client.call()) {
    const auto count = [&](uint32_t bytes) { return std::ceil(bytes / segments.longest); };
    const double reads = count(call.argument_bytes()) + count(call.plain_argument_bytes());
    // A device with a short queue takes them one by one.
    const double writes = count(call.result_bytes()) + count(call.plain_result_bytes());
    const double rounds = kRounds + std::ceil(reads / segments.reads) + writes + segments.more_rounds;
    const double bytes =
        kHeaders + kRecordOverhead * (static_cast<double>(call.argument_bytes()) + call.plain_argument_bytes() +
                                      call.result_bytes() + call.plain_result_bytes());
    longest = std::max(longest, segments.attempts * (rounds * (2 * path.way + path.delay) + bytes * path.per_byte +
                                                     path.retries + static_cast<double>(call.service_ns()) + reverse));
    cancels = cancels || call.cancel_ns() != 0;
  }
  const double together = client.concurrency() + (cancels ? client.credits() : 0.0);
  return Duration(static_cast<int64_t>(std::min(2 * together * longest, kLongestWait)));
}

Stage::DisturbanceId Stage::BeginDisturbance(const std::string& a, const std::string& b, Harm harm) {
  disturbances_.push_back({a, b, Now(), std::nullopt, harm});
  return disturbances_.size() - 1;
}

void Stage::EndDisturbance(DisturbanceId disturbance) {
  std::optional<Instant>& until = disturbances_.at(disturbance).until;
  if (!until) until = Now();
}

bool Stage::Disturbed(const std::string& client, const std::string& server, Instant since, Use use) const {
  return std::any_of(disturbances_.begin(), disturbances_.end(),
                     [&](const Disturbance& disturbance) {
                       return disturbance.Concerns(client, server, use) && disturbance.Meets(client, since);
                     }) ||
         CutSince(client, server, since, /*is_established=*/false);
}

const DeviceRules& Stage::RulesAt(const std::string& host) const {
  return rules_.find(host)->second;
}

template <typename Which>
bool Stage::FiredSince(const std::string& host, Instant since, Which which) const {
  const DeviceRules& rules = RulesAt(host);
  for (size_t i = 0; i < rules.size(); ++i) {
    if (!which(rules[i])) continue;
    if (const auto last = evidence_.LastFired(host, i + 1); last && *last >= since) return true;
  }
  return false;
}

bool Stage::CutSince(const std::string& a, const std::string& b, Instant since, bool is_established) const {
  const auto has_cut = [&](const std::string& host) {
    const Duration delays = DelaysOf(RulesAt(host));
    return FiredSince(host, since,
                      [&](const emu::InjectionRule& rule) { return MayCut(rule, delays, is_established); });
  };
  return has_cut(a) || has_cut(b);
}

bool Stage::MayStall(const std::string& host) const {
  return emu::Has(RulesAt(host), emu::InjectionAction::kStall);
}

bool Stage::HasStalled(const std::string& host) const {
  return FiredSince(host, Instant(),
                    [](const emu::InjectionRule& rule) { return rule.action == emu::InjectionAction::kStall; });
}

Duration Stage::LongestHold() const {
  Duration longest{};
  for (const Host& host : scenario_.host()) longest += scenario::LongestHold(RulesAt(host.name()));
  return longest;
}

bool Stage::Severed(const std::string& client, const std::string& server, Instant since,
                    std::optional<Instant> established, Use use) const {
  // Word that it is established waits its turn on a slow link, behind a first call each of other connections.
  constexpr double kFirstBytes = 512;
  if (CutSince(client, server, since, established.has_value())) return true;
  const Path path = PathBetween(client, server);
  const Duration way(static_cast<int64_t>(path.way + kFirstBytes * path.per_byte));
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& disturbance) {
    if (!disturbance.Concerns(client, server, use) || !disturbance.Meets(client, since)) return false;
    return disturbance.harm != Harm::kWaits || !established || disturbance.from <= *established + way;
  });
}

bool Stage::MayFailToConnect(const std::string& host, const std::string& server, Instant since,
                             rpcrdma::CallError::Kind kind, Attempts* attempts) const {
  using Kind = rpcrdma::CallError::Kind;
  if (kind == Kind::kRefused || kind == Kind::kRejected) ++attempts->rejected;
  switch (kind) {
    case Kind::kUnreachable:
      if (Disturbed(host, server, since)) return true;
      // A manager asks again, so that several losses in a row make a server seem out of reach: too many. But a request
      // whose answer is on its way is not repeated for a minute (MRA), and a rejection that is lost may not be
      // repeated.
      return LosesPackets(host, server) &&
             ++attempts->unanswered <= kUnansweredMax + attempts->rejected / kRejectedPerUnanswered;
    // On iWARP a peer that declines looks like a port where nobody listens.
    case Kind::kRefused:
    case Kind::kRejected:
      return Disturbed(host, server, since) || MayBeTurnedAway(server, since) || ServerMayBeFull(server, since) ||
             FailedRegistration(server, since);
    case Kind::kDevice:
      return FailedRegistration(host, since);
    default:
      return false;
  }
}

bool Stage::LosesPackets(const std::string& a, const std::string& b) const {
  return std::any_of(scenario_.host().begin(), scenario_.host().end(), [&](const Host& host) {
    return (host.name() == a || host.name() == b) && Loses(host, emu::kAllKinds);
  });
}

uint64_t Stage::ConnectionsTo(const std::string& server) const {
  const auto to_server = [&](const auto& other) { return other.server() == server; };
  const auto& copies = scenario_.file_copy();
  auto connections = static_cast<uint64_t>(std::count_if(copies.begin(), copies.end(), to_server));
  for (const Client& client : scenario_.client()) {
    if (to_server(client)) connections += client.session() ? client.connections() : 1;
  }
  return connections;
}

bool Stage::MayBeTurnedAway(const std::string& server, Instant since) const {
  const auto last = evidence_.LastTurnedAway(server);
  if (!last || *last < since) return false;
  const Service* const service = FindService(scenario_, server);
  // Whoever comes may have come before, for something that it has given up.
  return service != nullptr && !IsInfiniband(server) && 2 * ConnectionsTo(server) > service->backlog();
}

Duration Stage::WaitForRoom(const std::string& server) const {
  const Service* const service = FindService(scenario_, server);
  if (service == nullptr || !IsInfiniband(server)) return Duration::zero();
  return static_cast<int64_t>(2 * ConnectionsTo(server) / service->backlog()) * kAsksAgain;
}

bool Stage::ServerMayBeFull(const std::string& server, Instant since) const {
  const auto to_server = [&](const auto& other) { return other.server() == server; };
  const auto& clients = scenario_.client();
  const uint64_t rivals = ConnectionsTo(server);
  const Service* const service = FindService(scenario_, server);
  if (service == nullptr) return false;
  // A connection that is being replaced may still count, and so may any number of them while the service holds calls
  // of theirs.
  if (rivals * 2 > service->clients_max()) return true;
  // Of shared Receives a quarter is kept for those to come, one for each.
  const bool shares = service->shared_receives() > 0 && IsInfiniband(server);
  if (shares && rivals * 2 > service->shared_receives() / 4) return true;
  if (!service->has_clients_max() && !shares) return false;
  if (std::any_of(clients.begin(), clients.end(), [&](const Client& other) {
        return to_server(other) &&
               (other.calls_per_connection() > 0 || other.has_close_ns() || other.has_destroy_ns() || other.session());
      })) {
    return true;
  }
  // Connections that an injection has taken from their clients count until the server knows.
  const Duration blink = IsInfiniband(server) ? kBlinkOfInfiniband : kBlink;
  for (const Host& host : scenario_.host()) {
    if (HasStalled(host.name()) || CutSince(host.name(), host.name(), since - blink, /*is_established=*/false))
      return true;
  }
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& disturbance) {
    const bool concerns = disturbance.a == server || disturbance.b == server || disturbance.b.empty();
    if (!concerns) return false;
    return WentSilent(disturbance.a, server) || !disturbance.until || since <= *disturbance.until + blink;
  });
}

bool Stage::FailedRegistration(const std::string& host, Instant since) const {
  const auto last = evidence_.LastFailedRegistration(host);
  if (!last || *last < since) return false;
  // A device without such a rule has no reason to, and a leak is none.
  return std::any_of(scenario_.host().begin(), scenario_.host().end(), [&](const Host& each) {
    return each.name() == host &&
           (HasFewRegistrations(each.device()) || emu::Has(RulesAt(host), emu::InjectionAction::kFailRegistration));
  });
}

}  // namespace stagecoach::scenario
