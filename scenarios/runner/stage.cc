#include "scenarios/runner/stage.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace stagecoach::scenario {
emu::DeviceProfile MakeProfile(const Device& device) {
  emu::DeviceProfile profile = emu::IwarpProfile();
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

// A time-out that began in a fault ends in this time: calls have 30 s, a connect that was lost 127 s.
constexpr Duration kEchoOfAFault = 130s;
// For so long after a fault a service may still refuse.
constexpr Duration kBlink = 50ms;
// What a failed registration did to a call shows at once.
constexpr Duration kEchoOfAHabit = 1s;

Duration CountPatience(const Scenario& scenario) {
  constexpr uint64_t kRoundsOfOneCall = 20;
  double bytes = 1e6;
  uint64_t together = 16;
  uint64_t slowest_service = 0;
  for (const Client& client : scenario.client()) {
    together += client.concurrency();
    for (const Call& call : client.call()) {
      bytes += static_cast<double>(call.repeat()) * (4000.0 + call.argument_bytes() + call.plain_argument_bytes() +
                                                     call.result_bytes() + call.plain_result_bytes());
      slowest_service = std::max<uint64_t>(slowest_service, call.service_ns());
    }
  }
  for (const FileCopy& copy : scenario.file_copy()) bytes += 4.0 * static_cast<double>(copy.bytes());
  double slowest = 1e9;
  uint64_t one_way = Link().latency_ns();
  const auto look_at = [&](const Link& link) {
    const uint64_t way = link.latency_ns() + link.jitter_ns();
    one_way = std::max(one_way, way);
    if (link.bytes_per_second() != 0) slowest = std::min(slowest, static_cast<double>(link.bytes_per_second()));
    // A stream may have so much under way.
    slowest = std::min(slowest, link.buffer_bytes() * 1e9 / (8.0 * static_cast<double>(way) + 1));
  };
  for (const Link& link : scenario.link()) look_at(link);
  for (const Fault& fault : scenario.fault()) look_at(fault.link());
  uint64_t delay = 0;
  for (const Host& host : scenario.host()) {
    for (const DeviceFault& fault : host.device().fault()) delay = std::max<uint64_t>(delay, fault.delay_ns());
  }
  const double moving = 8e9 * bytes / slowest;
  const uint64_t waiting = together * (kRoundsOfOneCall * (one_way + delay) + slowest_service);
  return 1s + Duration(static_cast<int64_t>(moving)) + Duration(waiting);
}

}  // namespace

Stage::Stage(const Scenario& scenario, TraceSink* trace, std::shared_ptr<emu::CaptureSink> capture)
    : scenario_(scenario), trace_(trace), prng_(scenario.seed()), patience_(CountPatience(scenario)) {
  emu::SimWorld::Options options;
  options.seed = scenario.seed();
  options.trace = trace;
  options.link = MakeLink(Link());
  emu::WorldOptions world_options;
  world_options.capture = std::move(capture);
  auto world = std::make_unique<emu::SimulatedWorld>(options, std::move(world_options));
  for (const Host& host : scenario.host()) {
    world->AddHost(host.name(), {*emu::IpEndpoint::Parse(AddressOf(host.name()), 0)}, MakeProfile(host.device()));
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

uint32_t Stage::FirstXid(std::string_view connection) const {
  return static_cast<uint32_t>(Luck("xid/" + std::string(connection)).Between(1, UINT32_MAX));
}

void Stage::NoteDisturbance(const std::string& a, const std::string& b, Instant until) {
  disturbances_.push_back({a, b, until});
}

bool Stage::Disturbed(const std::string& a, const std::string& b, Instant since) const {
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& disturbance) {
    if (disturbance.until < since - kBlink) return false;
    if (!WentSilent(a, b) && Now() - disturbance.until > kEchoOfAFault) return false;
    if (disturbance.b.empty()) return disturbance.a == a || disturbance.a == b;
    return (disturbance.a == a && disturbance.b == b) || (disturbance.a == b && disturbance.b == a);
  });
}

void Stage::SetHabits(bool on) {
  habits_ = on;
  habits_until_ = Now();
}

bool Stage::FailsRegistrations(const std::string& host) const {
  if (!habits_ && Now() - habits_until_ > kEchoOfAHabit) return false;
  for (const Host& each : scenario_.host()) {
    if (each.name() != host) continue;
    return std::any_of(each.device().fault().begin(), each.device().fault().end(),
                       [](const DeviceFault& fault) { return fault.kind() == DeviceFault::FAIL_REGISTRATION; });
  }
  return false;
}

}  // namespace stagecoach::scenario
