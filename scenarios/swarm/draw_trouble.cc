#include "scenarios/swarm/draw_trouble.h"

#include <algorithm>
#include <string>

#include "scenarios/swarm/luck.h"

namespace stagecoach::scenario {
namespace {

constexpr uint64_t kSecondNs = 1'000'000'000;

template <typename List>
const auto& AnyOf(Prng& prng, const List& list) {
  return list[static_cast<int>(prng.Below(static_cast<uint64_t>(list.size())))];
}

void DrawPairInto(Prng& prng, const Scenario& scenario, Injection& injection) {
  injection.set_a(AnyOf(prng, scenario.host()).name());
  do {
    injection.set_b(AnyOf(prng, scenario.host()).name());
  } while (injection.b() == injection.a());
}

}  // namespace

void DrawLinkInto(Prng& prng, Link& link) {
  link.set_latency_ns(ScaledBy(prng, 500, 5'000'000));
  if (prng.OneIn(2)) link.set_jitter_ns(ScaledBy(prng, 100, 500'000));
  if (prng.OneIn(3)) link.set_bytes_per_second(ScaledBy(prng, 1'000'000, 10'000'000'000));
  if (prng.OneIn(3)) link.set_buffer_bytes(static_cast<uint32_t>(ScaledBy(prng, 4096, 1 << 20)));
  if (prng.OneIn(3)) link.set_segment_bytes(static_cast<uint32_t>(prng.Between(536, 9000)));
  link.set_chop(prng.OneIn(2));
}

void DrawInjections(Prng& prng, Scenario& scenario) {
  const uint64_t count = ScaledBy(prng, 1, 6);
  for (uint64_t i = 0; i < count; ++i) {
    Injection& injection = *scenario.add_injection();
    injection.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
    switch (prng.Below(8)) {
      case 0:
        injection.set_kind(Injection::PARTITION);
        DrawPairInto(prng, scenario, injection);
        injection.set_for_ns(ScaledBy(prng, 1000, prng.OneIn(4) ? 60 * kSecondNs : 100'000'000));
        break;
      case 1:
        injection.set_kind(Injection::RESET);
        DrawPairInto(prng, scenario, injection);
        break;
      case 2:
        injection.set_kind(Injection::FORGET);
        injection.set_a(AnyOf(prng, scenario.host()).name());
        break;
      case 3:
      case 4:
        injection.set_kind(Injection::KILL);
        injection.set_a(AnyOf(prng, scenario.host()).name());
        if (!prng.OneIn(6)) injection.set_for_ns(ScaledBy(prng, 1000, 50'000'000));
        break;
      case 5:
        injection.set_kind(Injection::POWER_LOSS);
        injection.set_a(AnyOf(prng, scenario.host()).name());
        if (!prng.OneIn(6)) injection.set_for_ns(ScaledBy(prng, 1000, 50'000'000));
        break;
      case 6:
        injection.set_kind(Injection::LINK);
        DrawPairInto(prng, scenario, injection);
        DrawLinkInto(prng, *injection.mutable_link());
        if (!prng.OneIn(3)) injection.set_for_ns(ScaledBy(prng, 1000, kTroubleNs));
        break;
      default:
        injection.set_kind(Injection::RESTART_SERVICE);
        injection.set_a(AnyOf(prng, scenario.service()).host());
        injection.set_for_ns(ScaledBy(prng, 1, 10'000'000));
        break;
    }
  }
}

void DrawSilence(Prng& prng, Scenario& scenario) {
  const uint64_t stops = prng.Below(3);
  for (uint64_t i = 0; i < stops; ++i) {
    Injection& injection = *scenario.add_injection();
    injection.set_kind(Injection::STOP);
    injection.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
    injection.set_a(AnyOf(prng, scenario.host()).name());
    injection.set_for_ns(prng.OneIn(2) ? prng.Between(kSecondNs, 20 * kSecondNs) : ScaledBy(prng, 1000, kSecondNs));
  }
  if (stops > 0 && prng.OneIn(2)) return;
  Injection& injection = *scenario.add_injection();
  injection.set_kind(Injection::PARTITION);
  injection.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
  DrawPairInto(prng, scenario, injection);
  injection.set_for_ns(prng.Between(5 * kSecondNs, 60 * kSecondNs));
}

void DrawStorm(Prng& prng, Scenario& scenario) {
  constexpr uint32_t kRepeatsMax = 3;
  constexpr uint32_t kCreditsMax = 4;
  Client one = scenario.client(0);
  one.mutable_call()->DeleteSubrange(1, one.call_size() - 1);
  Call& call = *one.mutable_call(0);
  call.set_repeat(std::min(call.repeat(), kRepeatsMax));
  // What many of them bring at once is what a connection costs, and not megabytes.
  call.clear_argument_bytes();
  call.clear_plain_argument_bytes();
  call.clear_result_bytes();
  call.clear_plain_result_bytes();
  call.clear_result_room_bytes();
  call.clear_plain_result_room_bytes();
  one.set_credits(std::min(one.credits(), kCreditsMax));
  one.set_concurrency(1);
  one.set_queued_calls_max(1);
  one.set_start_ns(ScaledBy(prng, 1, kTroubleNs));
  const bool from_everywhere = prng.OneIn(2);
  const uint64_t count = prng.Between(kStormLeast, kStormMost);
  for (uint64_t i = 0; i < count; ++i) {
    Client& client = *scenario.add_client() = one;
    client.set_name("client-" + std::to_string(scenario.client_size() - 1));
    if (from_everywhere) client.set_host(AnyOf(prng, scenario.host()).name());
  }
  // Who is to be let in.
  for (Service& service : *scenario.mutable_service()) {
    if (service.host() == one.server()) service.clear_clients_max();
  }
}

void DrawBacklog(Prng& prng, Scenario& scenario) {
  if (prng.OneIn(3)) return;
  for (Service& service : *scenario.mutable_service()) {
    uint64_t connections = 0;
    for (const Client& client : scenario.client()) {
      if (client.server() == service.host()) connections += client.session() ? client.connections() : 1;
    }
    if (connections < kStormLeast) continue;
    // An InfiniBand device's clients ask for seconds, and have to be taken in a few lots.
    service.set_backlog(static_cast<uint32_t>(prng.Between(connections / 6, connections / 2)));
  }
}

void DrawSilentPeers(Prng& prng, Scenario& scenario) {
  constexpr uint32_t kHalfOpenLimit = 128;
  // The shortest beginning of any peer's first words that is not all of them.
  constexpr uint64_t kSaidMost = 19;
  const bool too_many = prng.OneIn(3);
  const uint64_t count = prng.Between(1, 3);
  for (uint64_t i = 0; i < count; ++i) {
    Host& host = *scenario.add_host();
    host.set_name("silent-" + std::to_string(i));
    const Device& usual = scenario.host(0).device();
    Device& device = *host.mutable_device();
    if (usual.has_profile()) device.set_profile(usual.profile());
    SilentPeer& peer = *scenario.add_silent_peer();
    peer.set_host(host.name());
    if (scenario.ping_pong_size() > 0 && prng.OneIn(3)) {
      const PingPong& ping_pong = AnyOf(prng, scenario.ping_pong());
      peer.set_server(ping_pong.server());
      peer.set_port(ping_pong.port());
    } else {
      peer.set_server(AnyOf(prng, scenario.service()).host());
    }
    peer.set_streams(static_cast<uint32_t>(too_many ? prng.Between(kHalfOpenLimit, 2 * kHalfOpenLimit)
                                                    : ScaledBy(prng, 1, kHalfOpenLimit / 3)));
    if (prng.OneIn(2)) peer.set_start_ns(ScaledBy(prng, 1, kTroubleNs));
    if (prng.OneIn(2)) peer.set_said_bytes(static_cast<uint32_t>(prng.Between(1, kSaidMost)));
    if (prng.OneIn(2)) peer.set_times(static_cast<uint32_t>(prng.Between(2, 6)));
    if (prng.OneIn(2)) peer.set_again_ns(ScaledBy(prng, 1'000'000, 2 * kSecondNs));
  }
}

bool HasSilentInjections(const Scenario& scenario) {
  return std::any_of(scenario.injection().begin(), scenario.injection().end(), [](const Injection& injection) {
    return injection.kind() == Injection::FORGET || injection.kind() == Injection::POWER_LOSS ||
           injection.kind() == Injection::PARTITION;
  });
}

}  // namespace stagecoach::scenario
