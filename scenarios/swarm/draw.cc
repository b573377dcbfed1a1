#include "scenarios/swarm/draw.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "emu/inject/rule.h"
#include "scenarios/swarm/draw_trouble.h"
#include "scenarios/swarm/luck.h"

namespace stagecoach::scenario {
namespace {

using emu::ActionRow;
using emu::InjectionAction;
using emu::InjectionRule;

class Drawer {
 public:
  Drawer(uint64_t seed, const std::string& profile)
      : prng_(Prng(seed).Fork("swarm")),
        device_prng_(Prng(seed).Fork("swarm/profile")),
        session_prng_(Prng(seed).Fork("swarm/sessions")),
        reverse_prng_(Prng(seed).Fork("swarm/reverse")),
        document_prng_(Prng(seed).Fork("swarm/documents")),
        version_prng_(Prng(seed).Fork("swarm/versions")),
        mix_prng_(Prng(seed).Fork("swarm/mixes")),
        silence_prng_(Prng(seed).Fork("swarm/silence")),
        storm_prng_(Prng(seed).Fork("swarm/storms")),
        rule_prng_(Prng(seed).Fork("swarm/rules")),
        silent_peer_prng_(Prng(seed).Fork("swarm/silent-peers")) {
    const bool infiniband = device_prng_.OneIn(2);
    profile_ = !profile.empty() ? profile : infiniband ? "roce" : "iwarp";
    loses_packets_ = device_prng_.OneIn(4);
    scenario_.set_name("seed-" + std::to_string(seed));
    scenario_.set_seed(seed);
  }

  Scenario Draw() {
    DrawHosts();
    DrawLinks();
    DrawServices();
    DrawClients();
    const bool storm = storm_prng_.OneIn(40);
    if (storm) DrawStorm(storm_prng_, scenario_);
    if (prng_.OneIn(12)) DrawFileCopies();
    if (prng_.OneIn(6)) DrawPingPongs();
    if (!prng_.OneIn(3)) DrawInjections(prng_, scenario_);
    if (silence_prng_.OneIn(5)) DrawSilence(silence_prng_, scenario_);
    if (session_prng_.OneIn(3)) DrawSessions();
    const bool reverse = reverse_prng_.OneIn(5);
    if (reverse) DrawReverse();
    if (!reverse && reverse_prng_.OneIn(4)) DrawSharedReceives();
    if (document_prng_.OneIn(4)) DrawDocuments();
    if (document_prng_.OneIn(8)) DrawConfiguration();
    const bool mixed = mix_prng_.OneIn(4);
    if (mixed) DrawMixes();
    if (!mixed && version_prng_.OneIn(4)) DrawVersions();
    if (storm) DrawBacklog(storm_prng_, scenario_);
    if (rule_prng_.OneIn(6)) DrawRules();
    if (profile_ == "roce" && loses_packets_) DrawLosses();
    RaiseImpossibleLimits();
    AdmitSuccessors();
    // With hosts of their own, behind all that is drawn for hosts.
    if (silent_peer_prng_.OneIn(10)) DrawSilentPeers(silent_peer_prng_, scenario_);
    return std::move(scenario_);
  }

 private:
  template <typename T, size_t N>
  T OneOf(const std::array<T, N>& choices) {
    return choices[prng_.Below(N)];
  }
  uint64_t Scaled(uint64_t low, uint64_t high) { return ScaledBy(prng_, low, high); }
  const std::string& AnyHost() { return scenario_.host(static_cast<int>(prng_.Below(scenario_.host_size()))).name(); }

  const Service& ServiceOf(const Client& client) const {
    const auto& services = scenario_.service();
    return *std::find_if(services.begin(), services.end(),
                         [&](const Service& service) { return service.host() == client.server(); });
  }

  const Service& AnyService() {
    return scenario_.service(static_cast<int>(prng_.Below(static_cast<uint64_t>(scenario_.service_size()))));
  }

  void DrawHosts() {
    const uint64_t count = prng_.OneIn(4) ? prng_.Between(3, 5) : 2;
    const bool crc = prng_.OneIn(2);
    for (uint64_t i = 0; i < count; ++i) {
      Host& host = *scenario_.add_host();
      host.set_name(std::string(1, static_cast<char>('a' + i)));
      Device& device = *host.mutable_device();
      if (profile_ != device.profile()) device.set_profile(profile_);
      if (crc != prng_.OneIn(8)) device.set_crc(true);
      if (prng_.OneIn(3)) device.set_max_ord(static_cast<uint32_t>(Scaled(1, 16)));
      if (prng_.OneIn(3)) device.set_max_ird(static_cast<uint32_t>(Scaled(1, 16)));
      if (prng_.OneIn(3)) device.set_max_mr_size(uint64_t{1} << prng_.Between(12, 18));
      if (prng_.OneIn(4)) device.set_max_qp_wr(static_cast<uint32_t>(Scaled(3, 512)));
      if (prng_.OneIn(6)) device.set_max_cqe(static_cast<uint32_t>(Scaled(8, 512)));
      if (prng_.OneIn(4)) device.set_max_inline(OneOf(std::array<uint32_t, 3>{0, 16, 220}));
      // The smallest that is still honest: the checker of stale STags has a shorter memory.
      if (prng_.OneIn(3)) device.set_stag_quarantine(65536);
      DrawDeviceRules(device);
    }
  }

  static void AddRule(Device& device, const InjectionRule& rule) { device.add_rule(ToString(rule)); }

  void DrawDeviceRules(Device& device) {
    if (prng_.OneIn(3)) AddRule(device, {.action = InjectionAction::kPlaceLate, .delay = 50us});
    if (prng_.OneIn(4)) {
      InjectionRule rule{.action = InjectionAction::kDelayCompletion};
      rule.one_in = static_cast<uint32_t>(prng_.Between(1, 8));
      rule.delay = Duration(Scaled(1000, 2'000'000));
      AddRule(device, rule);
    }
    if (prng_.OneIn(12)) {
      InjectionRule rule{.action = InjectionAction::kFailRegistration};
      rule.one_in = static_cast<uint32_t>(Scaled(2, 200));
      AddRule(device, rule);
    }
  }

  // Seldom enough that seven retries in a row are not lost; what is overtaken costs one, too. Behind what any device
  // has.
  void DrawLosses() {
    constexpr std::array<std::pair<InjectionAction, uint64_t>, 4> kMostOften = {{
        {InjectionAction::kDrop, 20},
        {InjectionAction::kDuplicate, 5},
        {InjectionAction::kNotReady, 5},
        {InjectionAction::kOvertake, 60},
    }};
    for (Host& host : *scenario_.mutable_host()) {
      for (const auto& [action, most_often] : kMostOften) {
        if (device_prng_.OneIn(3)) continue;
        const ActionRow& row = RowOf(action);
        InjectionRule rule{.action = action, .sent = row.sent, .received = !row.sent, .kinds = emu::kEveryRecord};
        rule.one_in = static_cast<uint32_t>(device_prng_.Between(most_often, 10 * most_often));
        AddRule(*host.mutable_device(), rule);
      }
    }
  }

  // Messages that are late, and connections that are cut at one.
  void DrawRules() {
    for (Host& host : *scenario_.mutable_host()) {
      if (rule_prng_.OneIn(2)) {
        InjectionRule rule{.action = InjectionAction::kDelay, .received = false};
        rule.one_in = static_cast<uint32_t>(rule_prng_.Between(2, 20));
        rule.delay = Duration(ScaledBy(rule_prng_, 1000, 2'000'000));
        AddRule(*host.mutable_device(), rule);
      }
      const uint64_t cuts = rule_prng_.Below(3);
      for (uint64_t i = 0; i < cuts; ++i) {
        InjectionRule rule{.action = InjectionAction::kDisconnect};
        rule.connection.first = rule.connection.last = rule_prng_.Between(1, 6);
        rule.message.first = rule.message.last = ScaledBy(rule_prng_, 1, 200);
        if (rule_prng_.OneIn(2)) rule.kinds = emu::KindBit(emu::MessageKind::kSend);
        AddRule(*host.mutable_device(), rule);
      }
    }
  }

  void DrawLinks() {
    for (int a = 0; a < scenario_.host_size(); ++a) {
      for (int b = a + 1; b < scenario_.host_size(); ++b) {
        if (prng_.OneIn(4)) continue;
        Link& link = *scenario_.add_link();
        link.set_a(scenario_.host(a).name());
        link.set_b(scenario_.host(b).name());
        DrawLinkInto(prng_, link);
      }
    }
  }

  uint32_t Threshold() { return prng_.OneIn(2) ? 4096 : 1024 * static_cast<uint32_t>(Scaled(1, 16)); }
  uint32_t Credits() { return prng_.OneIn(4) ? 1 : static_cast<uint32_t>(Scaled(1, 64)); }

  void DrawServices() {
    const uint64_t count = scenario_.host_size() > 2 ? prng_.Between(1, 2) : 1;
    for (uint64_t i = 0; i < count; ++i) {
      Service& service = *scenario_.add_service();
      service.set_host(scenario_.host(static_cast<int>(i)).name());
      service.set_credits(Credits());
      service.set_inline_threshold(Threshold());
      if (prng_.OneIn(3)) service.set_outgoing_reads(static_cast<uint32_t>(Scaled(1, 16)));
      if (prng_.OneIn(4)) service.set_client_bytes_max(Scaled(1 << 20, 64 << 20));
      if (prng_.OneIn(6)) service.set_call_bytes_max(Scaled(65536, 8 << 20));
      if (prng_.OneIn(8)) service.set_message_bytes_max(static_cast<uint32_t>(Scaled(4096, 1 << 20)));
      if (prng_.OneIn(8)) service.set_clients_max(static_cast<uint32_t>(prng_.Between(1, 3)));
    }
  }

  // A size where some part of the code may decide wrongly.
  uint32_t Size() {
    static constexpr std::array<uint32_t, 10> kEdges = {0, 4, 900, 1024, 2048, 4096, 8192, 16384, 65536, 262144};
    switch (prng_.Below(8)) {
      case 0:
        return 0;
      case 1:
        return static_cast<uint32_t>(prng_.Between(1, 16));
      case 2:
      case 3: {
        const uint32_t edge = OneOf(kEdges);
        return edge + static_cast<uint32_t>(prng_.Between(0, 4)) - std::min(edge, 2u);
      }
      case 4: {
        // Around what is left of an inline message beside its headers.
        const uint32_t edge = 1024 * static_cast<uint32_t>(Scaled(1, 16));
        return edge - static_cast<uint32_t>(prng_.Between(0, 260));
      }
      default:
        return static_cast<uint32_t>(Scaled(1, prng_.OneIn(20) ? 2 << 20 : 100'000));
    }
  }

  void DrawCall(Call& call) {
    if (prng_.OneIn(3)) call.set_repeat(static_cast<uint32_t>(Scaled(1, 30)));
    if (prng_.OneIn(3)) call.set_pause_ns(Scaled(1, 10'000'000));
    if (!prng_.OneIn(4)) call.set_argument_bytes(Size());
    if (!prng_.OneIn(4)) call.set_result_bytes(Size());
    if (prng_.OneIn(6)) call.set_plain_argument_bytes(std::min<uint32_t>(Size(), 300'000));
    if (prng_.OneIn(6)) call.set_plain_result_bytes(std::min<uint32_t>(Size(), 300'000));
    // Room to spare; seldom too little.
    if (prng_.OneIn(4)) call.set_result_room_bytes(call.result_bytes() + static_cast<uint32_t>(Scaled(1, 10'000)));
    if (prng_.OneIn(30)) call.set_result_room_bytes(call.result_bytes() / 2);
    if (prng_.OneIn(6)) {
      call.set_plain_result_room_bytes(call.plain_result_bytes() + static_cast<uint32_t>(Scaled(1, 10'000)));
    }
    if (prng_.OneIn(30)) call.set_plain_result_room_bytes(call.plain_result_bytes() / 2);
    if (prng_.OneIn(4)) call.set_service_ns(Scaled(1, 5'000'000));
    if (prng_.OneIn(12)) call.set_timeout_ns(Scaled(1000, 50'000'000));
    if (prng_.OneIn(12)) call.set_cancel_ns(Scaled(1, 10'000'000));
  }

  void DrawClients() {
    const uint64_t count = prng_.OneIn(20) ? prng_.Between(7, 40) : Scaled(1, 6);
    for (uint64_t i = 0; i < count; ++i) {
      Client& client = *scenario_.add_client();
      client.set_name("client-" + std::to_string(i));
      client.set_server(AnyService().host());
      // Seldom on the server's own host.
      const bool anywhere = prng_.OneIn(8);
      do {
        client.set_host(AnyHost());
      } while (client.host() == client.server() && !anywhere);
      if (prng_.OneIn(3)) client.set_start_ns(Scaled(1, kTroubleNs));
      client.set_credits(Credits());
      client.set_inline_threshold(Threshold());
      if (prng_.OneIn(3)) client.set_incoming_reads(static_cast<uint32_t>(Scaled(1, 16)));
      if (prng_.OneIn(8)) client.set_queued_calls_max(static_cast<uint32_t>(Scaled(1, 16)));
      if (prng_.OneIn(10)) client.set_message_bytes_max(static_cast<uint32_t>(Scaled(16384, 1 << 20)));
      client.set_memory_windows(!prng_.OneIn(3));
      client.set_concurrency(static_cast<uint32_t>(Scaled(1, 32)));
      if (prng_.OneIn(12)) client.set_close_ns(Scaled(1, kTroubleNs));
      if (prng_.OneIn(16)) client.set_destroy_ns(Scaled(1, kTroubleNs));
      if (prng_.OneIn(6)) client.set_calls_per_connection(static_cast<uint32_t>(Scaled(1, 8)));
      const uint64_t calls = Scaled(1, 12);
      for (uint64_t k = 0; k < calls; ++k) DrawCall(*client.add_call());
    }
  }

  void DrawFileCopies() {
    Service& service = *scenario_.mutable_service(0);
    service.set_files(true);
    service.clear_call_bytes_max();
    service.clear_message_bytes_max();
    const uint64_t count = prng_.OneIn(3) ? 2 : 1;
    for (uint64_t i = 0; i < count; ++i) {
      FileCopy& copy = *scenario_.add_file_copy();
      copy.set_server(service.host());
      do {
        copy.set_host(AnyHost());
      } while (copy.host() == copy.server());
      if (prng_.OneIn(2)) copy.set_start_ns(Scaled(1, kTroubleNs));
      copy.set_bytes(Scaled(1, 400'000));
      copy.set_chunk_bytes(static_cast<uint32_t>(Scaled(4096, 100'000)));
      copy.set_concurrency(static_cast<uint32_t>(prng_.Between(1, 6)));
    }
  }

  void DrawPingPongs() {
    const uint64_t count = prng_.Between(1, 2);
    for (uint64_t i = 0; i < count; ++i) {
      PingPong& ping_pong = *scenario_.add_ping_pong();
      ping_pong.set_server(AnyHost());
      do {
        ping_pong.set_client(AnyHost());
      } while (ping_pong.client() == ping_pong.server());
      ping_pong.set_port(7174 + static_cast<uint32_t>(i));
      ping_pong.set_count(static_cast<uint32_t>(Scaled(1, 20)));
      ping_pong.set_bytes(static_cast<uint32_t>(Scaled(1, 10'000)));
      if (prng_.OneIn(2)) ping_pong.set_start_ns(Scaled(1, kTroubleNs));
    }
  }

  // A device must be able to register what a connection holds from its beginning, and a server what a call sends it.
  void RaiseImpossibleLimits() {
    for (Host& host : *scenario_.mutable_host()) {
      Device& device = *host.mutable_device();
      if (!device.has_max_mr_size()) continue;
      uint64_t needed = 0;
      for (const Client& client : scenario_.client()) {
        if (client.host() == host.name()) {
          const uint64_t calls = uint64_t{client.credits()} + client.reverse_credits() + 8;
          needed = std::max(needed, 2 * calls * client.inline_threshold());
        }
      }
      const bool serves = std::any_of(scenario_.service().begin(), scenario_.service().end(),
                                      [&](const Service& service) { return service.host() == host.name(); });
      const bool copies = std::any_of(scenario_.file_copy().begin(), scenario_.file_copy().end(),
                                      [&](const FileCopy& copy) { return copy.host() == host.name(); });
      for (const PingPong& ping_pong : scenario_.ping_pong()) {
        if (ping_pong.client() == host.name() || ping_pong.server() == host.name()) {
          needed = std::max(needed, uint64_t{2} * ping_pong.bytes());
        }
      }
      if (serves || copies) {
        device.clear_max_mr_size();
      } else {
        device.set_max_mr_size(std::max(device.max_mr_size(), needed));
        DrawManySegments(host);
      }
    }
  }

  // Some clients become sessions, and what their servers remember of calls has its bounds.
  void DrawSessions() {
    Prng& prng = session_prng_;
    if (prng.OneIn(2)) scenario_.set_xids(static_cast<uint32_t>(ScaledBy(prng, 1, 64)));
    for (Service& service : *scenario_.mutable_service()) {
      if (prng.OneIn(8))
        service.set_replay_entries_max(static_cast<uint32_t>(prng.OneIn(2) ? 0 : ScaledBy(prng, 1, 64)));
      if (prng.OneIn(6)) service.set_replay_reply_bytes_max(static_cast<uint32_t>(ScaledBy(prng, 1024, 1 << 20)));
    }
    const bool all = prng.OneIn(2);
    for (Client& client : *scenario_.mutable_client()) {
      if (!all && prng.OneIn(2)) continue;
      client.set_session(true);
      client.clear_calls_per_connection();
      if (prng.OneIn(3)) client.set_connections(static_cast<uint32_t>(prng.Between(2, 4)));
      // Far below what calls are given, and so that more than one attempt falls into an injection.
      client.set_reconnect_ns(ScaledBy(prng, 1'000'000, 100'000'000));
      client.set_reconnect_max_ns(client.reconnect_ns() << prng.Below(4));
      if (prng.OneIn(4)) client.set_keepalive_ns(ScaledBy(prng, 1'000'000, 1'000'000'000));
      if (prng.OneIn(3)) client.set_idle_ns(ScaledBy(prng, 1'000'000, 1'000'000'000));
      for (Call& call : *client.mutable_call()) {
        if (prng.OneIn(6)) call.set_retransmit(false);
        if (prng.OneIn(6)) call.set_idempotent(true);
        // At work when something happens to its connection: that is when it comes again.
        if (prng.OneIn(3)) call.set_service_ns(ScaledBy(prng, 100'000, 50'000'000));
      }
      for (Service& service : *scenario_.mutable_service()) {
        if (service.host() != client.server()) continue;
        service.clear_clients_max();
        if (prng.OneIn(2)) service.set_credits(std::max(service.credits(), 8u));
      }
      if (prng.OneIn(2)) DrawCallsThatComeAgain(client);
    }
  }

  // Connections that end while calls are at work, and leave both ends alive: by resets, which take a stream, and by
  // calls that time out, whatever the transport.
  void DrawCallsThatComeAgain(Client& client) {
    Prng& prng = session_prng_;
    client.set_concurrency(std::max(client.concurrency(), 4u));
    client.set_credits(std::max(client.credits(), 8u));
    const uint64_t resets = client.host() == client.server() ? 0 : prng.Below(6);
    for (uint64_t i = 0; i < resets; ++i) {
      Injection& injection = *scenario_.add_injection();
      injection.set_kind(Injection::RESET);
      injection.set_at_ns(ScaledBy(prng, 100'000, kTroubleNs));
      injection.set_a(client.host());
      injection.set_b(client.server());
    }
    if (resets > 0 && prng.OneIn(2)) return;
    Call& late = *client.add_call();
    late.set_repeat(static_cast<uint32_t>(prng.Between(1, 4)));
    late.set_service_ns(ScaledBy(prng, 1'000'000, 50'000'000));
    late.set_timeout_ns(ScaledBy(prng, 10'000, 10'000'000));
    client.mutable_call()->SwapElements(client.call_size() - 1,
                                        static_cast<int>(prng.Below(static_cast<uint64_t>(client.call_size()))));
  }

  // Services call their clients.
  void DrawReverse() {
    Prng& prng = reverse_prng_;
    if (prng.OneIn(2)) scenario_.set_xids(static_cast<uint32_t>(ScaledBy(prng, 1, 64)));
    const auto credits = [&] { return static_cast<uint32_t>(prng.OneIn(4) ? 1 : ScaledBy(prng, 1, 32)); };
    for (Service& service : *scenario_.mutable_service()) service.set_reverse_credits(credits());
    for (Client& client : *scenario_.mutable_client()) {
      if (prng.OneIn(4) || HasShortQueues(client.host())) continue;
      client.set_reverse_credits(credits());
      client.set_wait_for_return(prng.OneIn(2));
      const uint64_t kinds = prng.Between(1, 2);
      for (uint64_t k = 0; k < kinds; ++k) {
        Call& call = *client.add_reverse_call();
        if (prng.OneIn(3)) call.set_repeat(static_cast<uint32_t>(prng.Between(2, 3)));
        // Seldom more than goes inline.
        const uint64_t most = prng.OneIn(12) ? 20'000 : 800;
        if (!prng.OneIn(4)) call.set_argument_bytes(static_cast<uint32_t>(ScaledBy(prng, 1, most)));
        if (!prng.OneIn(4)) call.set_result_bytes(static_cast<uint32_t>(ScaledBy(prng, 1, most)));
        if (prng.OneIn(3)) call.set_service_ns(ScaledBy(prng, 1, 5'000'000));
        if (prng.OneIn(8)) call.set_timeout_ns(ScaledBy(prng, 1000, 50'000'000));
        if (prng.OneIn(8)) call.set_cancel_ns(ScaledBy(prng, 1, 10'000'000));
      }
    }
  }

  // The connections of a service draw on the same Receives. Those of clients that go without a word would keep what
  // they were promised.
  void DrawSharedReceives() {
    if (HasSilentInjections(scenario_)) return;
    uint64_t connections = 0;
    for (const Client& client : scenario_.client()) connections += client.session() ? client.connections() : 1;
    const uint64_t least = 16 * (connections + static_cast<uint64_t>(scenario_.file_copy_size()) + 1);
    for (Service& service : *scenario_.mutable_service()) {
      if (HasShortQueues(service.host())) continue;
      service.set_shared_receives(static_cast<uint32_t>(ScaledBy(reverse_prng_, least, 8 * least)));
    }
  }

  // Ends follow an older document of version 1, all of them the same or each its own. Between any two there works what
  // docs/profiles.md says. Left out is what the older ones do not have, reverse calls and shared Receives, and padding
  // towards servers that take it for data.
  void DrawDocuments() {
    Prng& prng = document_prng_;
    const auto older = [&] { return std::string(prng.OneIn(2) ? "draft-2004" : "rfc5666"); };
    const std::string same = older();
    const bool mixed = prng.OneIn(3);
    const auto is_older = [](const auto& end) { return end.has_rpcrdma_profile(); };
    const auto draw_into = [&](auto& end) {
      if (end.reverse_credits() > 0 || (mixed && prng.OneIn(3))) return;
      end.set_rpcrdma_profile(mixed ? older() : same);
    };
    for (Service& service : *scenario_.mutable_service()) {
      if (service.shared_receives() == 0) draw_into(service);
      if (is_older(service)) DrawWhatOlderServicesHave(service);
    }
    for (Client& client : *scenario_.mutable_client()) {
      draw_into(client);
      if (is_older(client)) DrawWhatOlderClientsHave(client);
    }
  }

  void DrawWhatOlderServicesHave(Service& service) {
    Prng& prng = document_prng_;
    if (prng.OneIn(2)) service.set_exposed_replies_max(static_cast<uint32_t>(ScaledBy(prng, 1, 8)));
    if (prng.OneIn(6)) service.set_exposed_bytes_max(ScaledBy(prng, 4096, 1 << 20));
    if (prng.OneIn(8)) service.set_exposed_ns(ScaledBy(prng, 1'000'000, 1'000'000'000));
    if (prng.OneIn(3)) service.set_incoming_reads(static_cast<uint32_t>(ScaledBy(prng, 1, 16)));
    if (prng.OneIn(2)) service.set_receive_align(1u << prng.Between(2, 9));
  }

  void DrawWhatOlderClientsHave(Client& client) {
    Prng& prng = document_prng_;
    if (prng.OneIn(3)) client.set_outgoing_reads(static_cast<uint32_t>(prng.OneIn(6) ? 0 : ScaledBy(prng, 1, 16)));
    if (prng.OneIn(6)) client.set_read_bytes_max(ScaledBy(prng, 4096, 1 << 20));
    const bool reads = ServiceOf(client).has_rpcrdma_profile();
    if (!reads) return;
    if (prng.OneIn(3)) {
      client.set_padding_align(1u << prng.Between(2, 9));
      client.set_padding_threshold(static_cast<uint32_t>(ScaledBy(prng, 1, 512)));
    }
    // Replies that find no chunk, or too small a one.
    for (Call& call : *client.mutable_call()) {
      if (prng.OneIn(3)) call.set_result_room_bytes(prng.OneIn(2) ? 0 : call.result_bytes() / 2);
      if (prng.OneIn(4)) call.set_plain_result_room_bytes(call.plain_result_bytes() / 2);
    }
    if (prng.OneIn(2)) DrawRepliesToRead(client);
  }

  // Many of them at a time.
  void DrawRepliesToRead(Client& client) {
    Prng& prng = document_prng_;
    client.set_concurrency(std::max(client.concurrency(), 8u));
    client.set_credits(std::max(client.credits(), 4u));
    Call& call = *client.add_call();
    call.set_repeat(static_cast<uint32_t>(prng.Between(4, 16)));
    call.set_result_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 100'000)));
    call.set_result_room_bytes(0);
    if (prng.OneIn(3)) call.set_plain_result_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 20'000)));
    if (prng.OneIn(3)) call.set_service_ns(ScaledBy(prng, 1, 1'000'000));
    if (prng.OneIn(4)) call.set_cancel_ns(ScaledBy(prng, 1, 5'000'000));
    for (Service& service : *scenario_.mutable_service()) {
      if (service.host() == client.server() && prng.OneIn(2)) service.set_credits(std::max(service.credits(), 8u));
    }
  }

  // Clients configure their connections, and most servers let them, whichever document they follow. Left out are those
  // that would expect longer replies inline than the server sends, for want of private data that says so.
  void DrawConfiguration() {
    Prng& prng = document_prng_;
    for (Service& service : *scenario_.mutable_service()) {
      if (prng.OneIn(4)) continue;
      service.set_ccp(true);
      if (prng.OneIn(2)) service.set_ccp_inline_max(1024 * static_cast<uint32_t>(ScaledBy(prng, 1, 32)));
    }
    for (Client& client : *scenario_.mutable_client()) {
      if (!prng.OneIn(4) && !IsMisled(client)) client.set_ccp(true);
    }
  }

  // Whether it would be, once its connection is configured.
  bool IsMisled(const Client& client) const {
    const Service& service = ServiceOf(client);
    return service.inline_threshold() < client.inline_threshold() &&
           (service.has_rpcrdma_profile() || client.has_rpcrdma_profile());
  }

  // Ends speak version 2, with or without version 1. Some servers have not heard of it, those that follow an older
  // document among them, and their clients find out. Left out are clients that configure connections or follow the
  // older documents, which is about version 1; devices with short queues, which have no room for the reverse direction
  // that version 2 always has; and pairs without a version in common.
  void DrawVersions() {
    Prng& prng = version_prng_;
    const auto may = [&](const auto& end) {
      return !end.has_rpcrdma_profile() && !end.ccp() && !HasShortQueues(end.host());
    };
    const auto speak = [](auto& end, uint32_t low) { Speak(end, low, 2); };
    if (prng.OneIn(2)) AdmitVersion2();
    for (Service& service : *scenario_.mutable_service()) {
      std::vector<Client*> clients;
      for (Client& client : *scenario_.mutable_client()) {
        if (client.server() == service.host()) clients.push_back(&client);
      }
      const bool all = std::all_of(clients.begin(), clients.end(), [&](const Client* client) { return may(*client); });
      const bool never = prng.OneIn(6) || !may(service);
      const bool alone = prng.OneIn(2) && all && !service.files() && !never;
      if (!never) speak(service, alone ? 2 : 1);
      for (Client* client : clients) {
        if (!may(*client) || (!alone && prng.OneIn(4))) continue;
        speak(*client, !never && prng.OneIn(alone ? 2 : 3) ? 2 : 1);
        if (!never) DrawWhatVersion2Has(*client);
      }
      if (alone && !prng.OneIn(3)) DrawFewChunks(service, clients);
    }
  }

  template <typename End>
  static void Speak(End& end, uint32_t low, uint32_t high) {
    if (high < 2) return;
    end.set_version_low(low);
    end.set_version_high(high);
    end.set_inline_threshold(std::max(end.inline_threshold(), 4096u));
  }

  // Each end follows a document and speaks versions of its own, so that clients of several kinds meet on one server,
  // and ends fall back from version 2 to a version 1 by an older document. Left out is what the older documents do not
  // have, short queues with version 2 (DrawVersions), and pairs without a version in common.
  void DrawMixes() {
    Prng& prng = mix_prng_;
    ClearDocuments();
    if (!prng.OneIn(3)) AdmitMixes();
    AddCompany();
    const std::array<std::string, 3> documents = {"draft-2004", "rfc5666", "rfc5666bis"};
    // The newest is what an end follows that is told nothing.
    const auto follow = [&](auto& end) {
      const std::string& document = documents[prng.Below(documents.size())];
      if (document != end.rpcrdma_profile()) end.set_rpcrdma_profile(document);
      return end.has_rpcrdma_profile();
    };
    const auto range = [&](bool may_be_2, uint32_t low_max, uint32_t high_min) {
      // Version 1, both, or version 2.
      const uint64_t kind = may_be_2 ? prng.Between(high_min - 1, low_max) : 0;
      return std::pair<uint32_t, uint32_t>(kind == 2 ? 2 : 1, kind == 0 ? 1 : 2);
    };
    for (Service& service : *scenario_.mutable_service()) {
      std::vector<Client*> clients;
      for (Client& client : *scenario_.mutable_client()) {
        if (client.server() == service.host()) clients.push_back(&client);
      }
      const auto has_room = [&](const auto& end) { return !HasShortQueues(end.host()); };
      const bool all =
          std::all_of(clients.begin(), clients.end(), [&](const Client* client) { return has_room(*client); });
      if (service.reverse_credits() == 0 && service.shared_receives() == 0 && follow(service)) {
        DrawWhatOlderServicesHave(service);
      }
      // Who copies files speaks version 1.
      const auto [low, high] = range(has_room(service), all && !service.files() ? 2 : 1, 1);
      Speak(service, low, high);
      for (Client* client : clients) {
        const auto [its_low, its_high] = range(has_room(*client), high, low);
        Speak(*client, its_low, its_high);
        const bool is_older = client->reverse_credits() == 0 && follow(*client);
        if (is_older) DrawWhatOlderClientsHave(*client);
        if (std::min(high, its_high) == 2) DrawWhatVersion2Has(*client);
        if (its_low == 2 || IsMisled(*client)) client->clear_ccp();
      }
    }
  }

  // A client that has its server to itself gets another like it.
  void AddCompany() {
    for (const Service& service : scenario_.service()) {
      const auto& clients = scenario_.client();
      const auto comes_here = [&](const Client& client) { return client.server() == service.host(); };
      if (std::count_if(clients.begin(), clients.end(), comes_here) != 1) continue;
      Client another = *std::find_if(clients.begin(), clients.end(), comes_here);
      another.set_name("client-" + std::to_string(clients.size()));
      *scenario_.add_client() = std::move(another);
    }
  }

  void ClearDocuments() {
    for (Service& service : *scenario_.mutable_service()) service.clear_rpcrdma_profile();
    for (Client& client : *scenario_.mutable_client()) {
      client.clear_rpcrdma_profile();
      client.clear_padding_align();
    }
  }

  // Takes away what keeps ends from following older documents, or from speaking version 2.
  void AdmitMixes() {
    LengthenQueues();
    for (Service& service : *scenario_.mutable_service()) {
      service.clear_reverse_credits();
      service.clear_shared_receives();
    }
    for (Client& client : *scenario_.mutable_client()) {
      client.clear_reverse_credits();
      client.clear_reverse_call();
    }
  }

  // Takes away what keeps ends from it, and devices from long segments: what remains is about version 2.
  void AdmitVersion2() {
    LengthenQueues();
    for (Host& host : *scenario_.mutable_host()) host.mutable_device()->clear_max_mr_size();
    ClearDocuments();
    for (Service& service : *scenario_.mutable_service()) service.clear_ccp();
    for (Client& client : *scenario_.mutable_client()) client.clear_ccp();
  }

  void LengthenQueues() {
    for (Host& host : *scenario_.mutable_host()) {
      host.mutable_device()->clear_max_qp_wr();
      host.mutable_device()->clear_max_cqe();
    }
  }

  // Replies that find too little room, and reverse calls beyond what goes inline.
  void DrawWhatVersion2Has(Client& client) {
    Prng& prng = version_prng_;
    if (prng.OneIn(4)) client.set_grown_bytes_max(ScaledBy(prng, 1024, 1 << 20));
    for (Call& call : *client.mutable_call()) {
      if (prng.OneIn(4)) call.set_result_room_bytes(call.result_bytes() / 2);
      if (prng.OneIn(4)) call.set_plain_result_room_bytes(call.plain_result_bytes() / 2);
    }
    if (client.reverse_call_size() == 0) return;
    if (client.version_low() == 2 && prng.OneIn(4)) {
      client.clear_reverse_credits();
    } else if (prng.OneIn(2)) {
      client.set_reverse_chunks(true);
      for (Call& call : *client.mutable_reverse_call()) {
        if (prng.OneIn(2)) call.set_argument_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 50'000)));
        if (prng.OneIn(2)) call.set_result_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 50'000)));
        // With chunks either is the end of the connection, or may be.
        call.clear_timeout_ns();
        call.clear_cancel_ns();
      }
    }
  }

  // The service takes few chunks, or few segments of them, and gets calls that would have more. Where one segment is
  // enough for any chunk: fewer than the device makes there cannot be.
  void DrawFewChunks(Service& service, const std::vector<Client*>& clients) {
    Prng& prng = version_prng_;
    const bool long_segments = std::all_of(clients.begin(), clients.end(), [&](const Client* client) {
      return std::any_of(scenario_.host().begin(), scenario_.host().end(), [&](const Host& host) {
        return host.name() == client->host() && !host.device().has_max_mr_size();
      });
    });
    if (!long_segments) return;
    if (!prng.OneIn(3)) service.set_read_segments_max(static_cast<uint32_t>(prng.Between(1, 2)));
    if (prng.OneIn(4)) service.set_write_chunks_max(static_cast<uint32_t>(prng.Below(2)));
    if (prng.OneIn(2)) service.set_write_segments_max(static_cast<uint32_t>(prng.Below(2)));
    if (prng.OneIn(4)) service.set_segments_per_chunk_max(static_cast<uint32_t>(prng.Between(1, 2)));
    // A client that has been refused chunks puts later calls together as well, those among them that must be answered.
    constexpr uint64_t kPutTogether = 16384;
    for (Client* client : clients) {
      if (client->grown_bytes_max() < kPutTogether) client->set_grown_bytes_max(kPutTogether);
      if (prng.OneIn(3)) continue;
      Call& call = *client->add_call();
      call.set_repeat(static_cast<uint32_t>(prng.Between(1, 4)));
      call.set_plain_argument_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 40'000)));
      call.set_argument_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 40'000)));
      if (prng.OneIn(2)) call.set_result_bytes(static_cast<uint32_t>(ScaledBy(prng, 1000, 40'000)));
      if (prng.OneIn(4)) call.set_cancel_ns(ScaledBy(prng, 1, 5'000'000));
    }
  }

  // So short, maybe, that there is no reverse direction, or that hardly a Receive can be shared.
  bool HasShortQueues(const std::string& name) const {
    return std::any_of(scenario_.host().begin(), scenario_.host().end(), [&](const Host& host) {
      return host.name() == name && (host.device().has_max_cqe() || host.device().has_max_qp_wr());
    });
  }

  // A server does not ask silent clients whether they are still there, so one that is gone without a word keeps its
  // place among clients_max.
  void AdmitSuccessors() {
    if (!HasSilentInjections(scenario_)) return;
    for (Service& service : *scenario_.mutable_service()) service.clear_clients_max();
  }

  // Chunks of so many segments that a few calls fill a server's send queue.
  void DrawManySegments(const Host& host) {
    const uint64_t segment = host.device().max_mr_size();
    if (segment > 40'000) return;
    for (Client& client : *scenario_.mutable_client()) {
      if (client.host() != host.name() || !prng_.OneIn(2)) continue;
      for (Call& call : *client.mutable_call()) {
        if (!prng_.OneIn(3)) continue;
        call.clear_result_room_bytes();
        call.set_result_bytes(static_cast<uint32_t>(segment * prng_.Between(8, 60)));
      }
    }
  }

  Prng prng_;
  // What is about the device's transport is drawn by itself, so that all else of a world does not depend on it.
  Prng device_prng_;
  // The same for what came later, so that a seed is still the world that it was but for this.
  Prng session_prng_;
  Prng reverse_prng_;
  Prng document_prng_;
  Prng version_prng_;
  Prng mix_prng_;
  Prng silence_prng_;
  Prng storm_prng_;
  Prng rule_prng_;
  Prng silent_peer_prng_;
  std::string profile_;
  bool loses_packets_ = false;
  Scenario scenario_;
};

}  // namespace

Scenario Draw(uint64_t seed, const std::string& profile) {
  return Drawer(seed, profile).Draw();
}

}  // namespace stagecoach::scenario
