#include "emu/world/world.h"

#include <pthread.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "base/once/once.h"
#include "emu/inject/reach.h"

namespace stagecoach::emu {
namespace {

// Takes what is wrong, in words.
using Complaints = std::function<void(const std::string&)>;

void Switch(const char* name, bool* value, const Complaints& complain) {
  const char* text = std::getenv(name);
  if (text == nullptr) return;
  const std::string_view word(text);
  if (word == "on" || word == "1") {
    *value = true;
  } else if (word == "off" || word == "0") {
    *value = false;
  } else {
    complain(std::string(name) + "=" + text + ": neither on nor off");
  }
}

void Profile(const char* name, DeviceProfile* value, const Complaints& complain) {
  const char* text = std::getenv(name);
  if (text == nullptr) return;
  if (const auto profile = ProfileByName(text)) {
    *value = *profile;
  } else {
    complain(std::string(name) + "=" + text + ": no such profile; there are iwarp, roce, minimal, hostile");
  }
}

template <typename Value>
struct Word {
  const char* word;
  Value value;
};
constexpr Word<BackendChoice> kBackends[] = {
    {"auto", BackendChoice::kAuto}, {"shm", BackendChoice::kShm}, {"tcp", BackendChoice::kTcp}};
constexpr Word<ShmUsers> kUsers[] = {{"any-user", ShmUsers::kAny}, {"same-user", ShmUsers::kSame}};
constexpr Word<ShmPayload> kPayloads[] = {{"copy", ShmPayload::kCopied}, {"read", ShmPayload::kRead}};

// One of some words.
template <typename Value, size_t kCount>
void OneOf(const char* name, const Word<Value> (&words)[kCount], Value* value, const Complaints& complain) {
  const char* text = std::getenv(name);
  if (text == nullptr) return;
  std::string known;
  for (const Word<Value>& each : words) {
    if (std::string_view(text) == each.word) {
      *value = each.value;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(each.word);
  }
  complain(std::string(name) + "=" + text + ": there are " + known);
}

// "base+count"
void Ports(const char* name, DeviceProfile* profile, const Complaints& complain) {
  const char* text = std::getenv(name);
  if (text == nullptr) return;
  const std::string_view word(text);
  const size_t plus = word.find('+');
  uint16_t base = 0;
  uint16_t count = 0;
  const auto whole = [](std::string_view digits, uint16_t* value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *value);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  constexpr uint32_t kSlots = 256;
  if (plus != std::string_view::npos && whole(word.substr(0, plus), &base) && whole(word.substr(plus + 1), &count) &&
      base > 0 && count > 0 && count <= kSlots && uint32_t{base} + count <= 65536) {
    profile->port_base = base;
    profile->port_count = count;
  } else {
    complain(std::string(name) + "=" + text + ": not a port and a count of at most 256 (24791+256)");
  }
}

struct Unit {
  Duration length;
  uint32_t most;
  const char* name;
};
constexpr Unit kMilliseconds{1ms, UINT32_MAX, "milliseconds"};
// Of who polls: signals and timers of the program wait for as long.
constexpr Unit kMicroseconds{1us, 1000, "microseconds from 0 to 1000"};

// A number of units.
void Time(const char* name, const Unit& unit, Duration* value, const Complaints& complain) {
  const char* text = std::getenv(name);
  if (text == nullptr) return;
  const std::string_view word(text);
  uint32_t count = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), count);
  if (error == std::errc() && end == word.data() + word.size() && count <= unit.most) {
    *value = count * unit.length;
  } else {
    complain(std::string(name) + "=" + text + ": no number of " + unit.name);
  }
}

void Path(const char* name, std::string* value) {
  if (const char* text = std::getenv(name)) *value = text;
}

WorldOptions FromEnvironment(WorldOptions defaults, const Complaints& complain) {
  Profile("STAGECOACH_PROFILE", &defaults.profile, complain);
  Ports("STAGECOACH_PORTS", &defaults.profile, complain);
  Switch("STAGECOACH_CRC", &defaults.crc, complain);
  Switch("STAGECOACH_PEER_TO_PEER", &defaults.cm.peer_to_peer, complain);
  Time("STAGECOACH_LISTENER_PATIENCE", kMilliseconds, &defaults.cm.listener_patience, complain);
  Time("STAGECOACH_KEEPALIVE", kMilliseconds, &defaults.cm.keepalive, complain);
  Time("STAGECOACH_USER_TIMEOUT", kMilliseconds, &defaults.cm.user_timeout, complain);
  OneOf("STAGECOACH_BACKEND", kBackends, &defaults.backend, complain);
  OneOf("STAGECOACH_SHM", kUsers, &defaults.shm_users, complain);
  OneOf("STAGECOACH_SHM_PAYLOAD", kPayloads, &defaults.shm_payload, complain);
  Switch("STAGECOACH_VERBOSE", &defaults.verbose, complain);
  Time("STAGECOACH_BUSY_POLL", kMicroseconds, &defaults.busy_poll, complain);
  Path("STAGECOACH_PCAP", &defaults.capture_path);
  Path("STAGECOACH_TRACE", &defaults.trace_path);
  return defaults;
}

void IgnoreAloud(const std::string& complaint) {
  std::fprintf(stderr, "stagecoach: %s; ignored\n", complaint.c_str());
}

// Those of the environment, if all of them can be carried out.
void Rules(const char* name, WorldOptions* options) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return;
  options->rules.clear();
  const auto rules = ParseInjectionRules(text);
  std::string wrong = rules ? WhyNoRules(options->profile, *rules) : rules.error().Explain(text);
  if (wrong.empty()) {
    options->rules = *rules;
    return;
  }
  options->without_device = true;
  std::fprintf(stderr, "stagecoach: %s: %s\nstagecoach: without what it asks for, no device can be opened\n", name,
               wrong.c_str());
}

DeviceProfile ProfileOf(const WorldOptions& options) {
  DeviceProfile profile = options.profile;
  profile.want_crc = options.crc;
  return profile;
}

InjectionTransport InjectionTransportOf(const DeviceProfile& profile) {
  switch (profile.transport) {
    case TransportKind::kIwarp:
      return InjectionTransport::kIwarp;
    case TransportKind::kInfiniband:
      return InjectionTransport::kInfiniband;
  }
  return InjectionTransport::kIwarp;
}

CaptureStyle StyleOf(const DeviceProfile& profile) {
  switch (profile.transport) {
    case TransportKind::kIwarp:
      return CaptureStyle::kIwarp;
    case TransportKind::kInfiniband:
      return CaptureStyle::kRoce;
  }
  return CaptureStyle::kIwarp;
}

NicOptions NicOptionsOf(HostParts& parts) {
  NicOptions options;
  options.name = parts.name;
  options.stags = std::move(parts.stags);
  options.trace = parts.trace;
  options.complain = std::move(parts.complain);
  options.injections = parts.injections;
  return options;
}

std::mutex& CurrentMutex() {
  static std::mutex mutex;
  return mutex;
}

// Not a static object: it must survive the destructors of the program's own.
World*& CurrentWorld() {
  static World* world = nullptr;
  return world;
}

// The one that was started by its first use.
World*& StartedWorld() {
  static World* world = nullptr;
  return world;
}

// No thread is in here at the moment of a fork, so that the child finds the lock free; and it finds no world, since the
// thread that moved the parent's is not with it.
void PrepareForFork() {
  static Once once;
  once.Do([] {
    const int error = pthread_atfork([] { CurrentMutex().lock(); }, [] { CurrentMutex().unlock(); },
                                     [] {
                                       CurrentWorld() = nullptr;
                                       CurrentMutex().unlock();
                                     });
    if (error != 0) throw std::bad_alloc();  // the only one that there is; it is tried again
  });
}

// On the loop: gives what is posted to it its turn, then what that has posted, and so on for some rounds; then waits
// for what is on its way to links. Then says so.
void CatchUp(Host& host, int rounds, const std::shared_ptr<std::promise<void>>& caught_up) {
  Reactor& loop = host.fabric().loop();
  const auto again = [&host, rounds, caught_up] { CatchUp(host, std::max(rounds - 1, 0), caught_up); };
  if (rounds > 0) return loop.Post(again);
  if (!host.nic().is_infiniband() || !host.nic().datagrams().HasUnsent()) return caught_up->set_value();
  constexpr Duration kPause = 1ms;
  loop.At(loop.Now() + kPause, again);
}

// What a program has said last (rdma_reject, rdma_disconnect) goes out, as it has when a kernel's device is told: here
// it may be with the loop still, whose thread ends with the process. Bounded, as nobody knows what exit() has found the
// thread at. Without memory it is lost: nobody is left to hear of that, and exit() lets no exception by.
void LetTheLoopCatchUp() try {
  // A message is posted to the connection manager, to its port, and to the stream.
  constexpr int kRounds = 8;
  constexpr auto kPatience = std::chrono::seconds(1);
  const auto caught_up = std::make_shared<std::promise<void>>();
  {
    // A signal's handler may have called exit() in the middle of World::Current(), whose lock this thread has then.
    std::unique_lock lock(CurrentMutex(), std::try_to_lock);
    if (!lock) return;
    // Not of a forked child, whose parent's it was.
    if (CurrentWorld() == nullptr || CurrentWorld() != StartedWorld()) return;
    Host& host = CurrentWorld()->current_host();
    host.fabric().loop().Post([&host, caught_up] { CatchUp(host, kRounds, caught_up); });
  }
  caught_up->get_future().wait_for(kPatience);
} catch (const std::bad_alloc&) {
}

// A program that runs is worth more than a file about it.
std::unique_ptr<World> StartTcpWorld() {
  WorldOptions options = OptionsFromEnvironment();
  auto made = MakeTcpWorld(options);
  for (std::string* const file : {&options.trace_path, &options.capture_path}) {
    if (made) break;
    std::fprintf(stderr, "stagecoach: %s; going on without it\n", made.error().c_str());
    file->clear();
    made = MakeTcpWorld(options);
  }
  // After what says the last words on injection rules (rule_words.h) has been registered, and so before it is called.
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(LetTheLoopCatchUp); });
  return std::move(*made);
}

}  // namespace

std::optional<std::string> WhyNoRule(const DeviceProfile& profile, const InjectionRule& rule) {
  return WhyNotOn(InjectionTransportOf(profile), rule);
}

std::string WhyNoRules(const DeviceProfile& profile, const std::vector<InjectionRule>& rules) {
  for (const InjectionRule& rule : rules) {
    if (const auto why = WhyNoRule(profile, rule)) return "'" + ToString(rule) + "': " + *why;
  }
  return {};
}

void TakePortsFromEnvironment(DeviceProfile* profile) {
  Ports("STAGECOACH_PORTS", profile, IgnoreAloud);
}

WorldOptions OptionsFromEnvironment(WorldOptions defaults) {
  WorldOptions options = FromEnvironment(std::move(defaults), IgnoreAloud);
  Rules("STAGECOACH_RULES", &options);
  return options;
}

std::vector<std::string> WrongInEnvironment() {
  std::vector<std::string> wrong;
  FromEnvironment({}, [&](const std::string& complaint) { wrong.push_back(complaint); });
  return wrong;
}

Host::Host(HostParts parts, const WorldOptions& options)
    : name_(parts.name),
      capturing_(parts.capture != nullptr
                     ? std::make_unique<CaptureFabric>(parts.fabric, parts.capture, StyleOf(options.profile))
                     : nullptr),
      fabric_(capturing_ != nullptr ? static_cast<Fabric&>(*capturing_) : *parts.fabric),
      injections_(parts.injections),
      nic_(fabric_, ProfileOf(options), NicOptionsOf(parts)),
      cm_(nic_, options.cm) {
  if (options.without_device) nic_.Fail();
}

Host::~Host() {
  api_state.reset();
}

World& World::Current() {
  PrepareForFork();
  std::lock_guard lock(CurrentMutex());
  World*& world = CurrentWorld();
  if (world == nullptr) world = StartedWorld() = StartTcpWorld().release();
  return *world;
}

void World::Install(std::unique_ptr<World> world) {
  PrepareForFork();
  std::unique_ptr<World> old;  // ends after the lock
  std::lock_guard lock(CurrentMutex());
  old.reset(std::exchange(CurrentWorld(), world.release()));
}

}  // namespace stagecoach::emu
