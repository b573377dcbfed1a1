#include "scenarios/swarm/draw_trouble.h"

#include <algorithm>

#include "scenarios/swarm/luck.h"

namespace stagecoach::scenario {
namespace {

constexpr uint64_t kSecondNs = 1'000'000'000;

template <typename List>
const auto& AnyOf(Prng& prng, const List& list) {
  return list[static_cast<int>(prng.Below(static_cast<uint64_t>(list.size())))];
}

void DrawPairInto(Prng& prng, const Scenario& scenario, Fault& fault) {
  fault.set_a(AnyOf(prng, scenario.host()).name());
  do {
    fault.set_b(AnyOf(prng, scenario.host()).name());
  } while (fault.b() == fault.a());
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

void DrawFaults(Prng& prng, Scenario& scenario) {
  const uint64_t count = ScaledBy(prng, 1, 6);
  for (uint64_t i = 0; i < count; ++i) {
    Fault& fault = *scenario.add_fault();
    fault.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
    switch (prng.Below(8)) {
      case 0:
        fault.set_kind(Fault::PARTITION);
        DrawPairInto(prng, scenario, fault);
        fault.set_for_ns(ScaledBy(prng, 1000, prng.OneIn(4) ? 60 * kSecondNs : 100'000'000));
        break;
      case 1:
        fault.set_kind(Fault::RESET);
        DrawPairInto(prng, scenario, fault);
        break;
      case 2:
        fault.set_kind(Fault::FORGET);
        fault.set_a(AnyOf(prng, scenario.host()).name());
        break;
      case 3:
      case 4:
        fault.set_kind(Fault::KILL);
        fault.set_a(AnyOf(prng, scenario.host()).name());
        if (!prng.OneIn(6)) fault.set_for_ns(ScaledBy(prng, 1000, 50'000'000));
        break;
      case 5:
        fault.set_kind(Fault::POWER_LOSS);
        fault.set_a(AnyOf(prng, scenario.host()).name());
        if (!prng.OneIn(6)) fault.set_for_ns(ScaledBy(prng, 1000, 50'000'000));
        break;
      case 6:
        fault.set_kind(Fault::LINK);
        DrawPairInto(prng, scenario, fault);
        DrawLinkInto(prng, *fault.mutable_link());
        if (!prng.OneIn(3)) fault.set_for_ns(ScaledBy(prng, 1000, kTroubleNs));
        break;
      default:
        fault.set_kind(Fault::RESTART_SERVICE);
        fault.set_a(AnyOf(prng, scenario.service()).host());
        fault.set_for_ns(ScaledBy(prng, 1, 10'000'000));
        break;
    }
  }
}

void DrawSilence(Prng& prng, Scenario& scenario) {
  const uint64_t stops = prng.Below(3);
  for (uint64_t i = 0; i < stops; ++i) {
    Fault& fault = *scenario.add_fault();
    fault.set_kind(Fault::STOP);
    fault.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
    fault.set_a(AnyOf(prng, scenario.host()).name());
    fault.set_for_ns(prng.OneIn(2) ? prng.Between(kSecondNs, 20 * kSecondNs) : ScaledBy(prng, 1000, kSecondNs));
  }
  if (stops > 0 && prng.OneIn(2)) return;
  Fault& fault = *scenario.add_fault();
  fault.set_kind(Fault::PARTITION);
  fault.set_at_ns(ScaledBy(prng, 1000, kTroubleNs));
  DrawPairInto(prng, scenario, fault);
  fault.set_for_ns(prng.Between(5 * kSecondNs, 60 * kSecondNs));
}

bool HasSilentFaults(const Scenario& scenario) {
  return std::any_of(scenario.fault().begin(), scenario.fault().end(), [](const Fault& fault) {
    return fault.kind() == Fault::FORGET || fault.kind() == Fault::POWER_LOSS || fault.kind() == Fault::PARTITION;
  });
}

}  // namespace stagecoach::scenario
