// Validate (run.h): what a scenario must say for a run of it to mean something. Whatever is refused here would
// otherwise end as a failure that is no fault of the product.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "rpcrdma/api/client.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/profile.h"
#include "scenarios/runner/limits.h"
#include "scenarios/runner/model_call.h"
#include "scenarios/runner/old_words.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/run.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

namespace {

// What one connection has registered from its beginning, and what a call of its needs in addition.
constexpr uint64_t kRegistrationsOfConnection = 2;
constexpr uint64_t kRegistrationsOfCall = 3;
// Completions a ping-pong asks for.
constexpr uint64_t kPingPongCompletions = 8;
// Headers of a call or a reply.
constexpr uint64_t kHeaders = 4096;

// The longer of the two registrations of a connection: send buffers for each credit, and some that are not done yet.
uint64_t ArenaBytes(uint32_t credits, uint32_t inline_threshold, uint32_t reverse_credits = 0) {
  uint64_t slots = credits + 2 * std::clamp(credits / 4, 1u, 16u);
  if (reverse_credits > 0) slots += reverse_credits + 2;
  return slots * inline_threshold + kHeaders;
}

uint32_t ReceivesForDone(const Service& service) {
  return DocumentOf(service.rpcrdma_profile()).replies_by_read_chunk ? service.exposed_replies_max() : 0;
}

// The longest piece of memory that a call of the client has a server register: it comes in powers of two.
uint64_t LongestBlock(const Client& client) {
  uint64_t longest = 0;
  for (const Call& call : client.call()) {
    longest = std::max({longest, uint64_t{call.argument_bytes()}, uint64_t{call.plain_argument_bytes()} + kHeaders,
                        uint64_t{call.result_bytes()}, uint64_t{call.plain_result_bytes()} + kHeaders});
  }
  return std::bit_ceil(longest);
}

bool IsName(const std::string& name) {
  return std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
}

class Validator {
 public:
  // `scenario` is what was `written`, in today's words.
  Validator(const Scenario& scenario, const Scenario& written) : scenario_(scenario), written_(written) {}

  Result<void, std::string> Validate() {
    if (scenario_.host_size() == 0) return Err(std::string("host: a scenario needs at least one"));
    if (scenario_.host_size() > 200) return Err(std::string("host: at most 200"));
    for (const Host& host : scenario_.host()) {
      if (host.name().empty()) return Err(std::string("host.name: is empty"));
      if (!IsName(host.name())) Say("host.name", host.name(), "letters, digits, '-', '_' and '.'");
      if (!hosts_.insert(host.name()).second) return Err(fmt::format("host.name: \"{}\" is there twice", host.name()));
      const auto profile = emu::ProfileByName(host.device().profile());
      if (!profile) {
        return Err(fmt::format("host.device.profile: \"{}\", expected iwarp, roce, minimal or hostile",
                               host.device().profile()));
      }
      transports_[host.name()] = profile->transport;
    }
    for (const Host& host : written_.host()) {
      if (const std::string wrong = WhyNoDevice(host.device()); !wrong.empty()) {
        return Err(fmt::format("host.device.{}\n(of host \"{}\")", wrong, host.name()));
      }
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
      if (service.shared_receives() > 0 && service.reverse_credits() > 0) {
        Say("service.shared_receives", std::to_string(service.shared_receives()), "none with reverse_credits");
      }
      if (CheckDocument("service.rpcrdma_profile", service.rpcrdma_profile())) CheckOlderService(service);
      CheckVersions("service", service);
      if (!std::has_single_bit(service.receive_align())) {
        Say("service.receive_align", std::to_string(service.receive_align()), "a power of two");
      }
      if (service.ccp_inline_max() > 0 && service.ccp_inline_max() < rpcrdma::kDefaultInlineThreshold) {
        Say("service.ccp_inline_max", std::to_string(service.ccp_inline_max()), "0, or 1024 and more");
      }
    }
    std::set<std::string> names;
    for (const Client& client : scenario_.client()) {
      Known("client.host", client.host());
      if (client.name().empty() || !names.insert(client.name()).second) {
        Say("client.name", client.name(), "a name of its own");
      }
      if (services.count(client.server()) == 0) Say("client.server", client.server(), "a host with a service");
      Talk("client.server", client.host(), client.server());
      if (CheckDocument("client.rpcrdma_profile", client.rpcrdma_profile())) CheckOlderClient(client);
      if (client.padding_align() > 1 && client.padding_align() % 4 != 0) {
        Say("client.padding_align", std::to_string(client.padding_align()), "0, 1 or a multiple of 4");
      }
      CheckConfiguration(client);
      CheckVersions("client", client);
      for (const Service& service : scenario_.service()) {
        if (service.host() == client.server() &&
            (service.version_low() > client.version_high() || client.version_low() > service.version_high())) {
          Say("client.version_high", client.name(), "a version that the service speaks");
        }
      }
      if (client.session()) CheckSession(client);
      if (client.reverse_call_size() > 0) CheckReverse(client);
    }
    for (const FileCopy& copy : scenario_.file_copy()) {
      Known("file_copy.host", copy.host());
      if (files.count(copy.server()) == 0) Say("file_copy.server", copy.server(), "a host whose service serves files");
      Talk("file_copy.server", copy.host(), copy.server());
    }
    std::set<std::pair<std::string, uint32_t>> ports;
    for (const PingPong& ping_pong : scenario_.ping_pong()) {
      Pair("ping_pong", ping_pong.client(), ping_pong.server());
      Talk("ping_pong.server", ping_pong.client(), ping_pong.server());
      if (!ports.emplace(ping_pong.server(), ping_pong.port()).second) {
        Say("ping_pong.port", std::to_string(ping_pong.port()), "each port once on a host");
      }
      if (ping_pong.port() == kServicePort && services.count(ping_pong.server()) > 0) {
        Say("ping_pong.port", std::to_string(ping_pong.port()), "another port than that of the host's service");
      }
    }
    for (const SilentPeer& peer : scenario_.silent_peer()) {
      Known("silent_peer.host", peer.host());
      Known("silent_peer.server", peer.server());
    }
    for (const Injection& fault : written_.fault()) CheckInjection("fault", fault, services);
    for (const Injection& injection : written_.injection()) CheckInjection("injection", injection, services);
    if (!problem_.empty()) return Err(problem_);
    for (const Host& host : scenario_.host()) CheckDevice(host);
    if (!problem_.empty()) return Err(problem_);
    return {};
  }

 private:
  // What of its rules, or of what older files have for them, can do nothing.
  static std::string WhyNoDevice(const Device& device) {
    const emu::DeviceProfile profile = *emu::ProfileByName(device.profile());
    size_t old = 0;
    for (int i = 0; i < device.fault_size(); ++i) {
      const auto rule = RuleOf(device.fault(i));
      if (!rule) continue;
      ++old;
      const auto why = emu::WhyNoRule(profile, *rule);
      if (why) return fmt::format("fault[{}].kind: {}: {}", i, DeviceFault::Kind_Name(device.fault(i).kind()), *why);
    }
    const auto rules = ReadRules(device);
    if (!rules) return rules.error();
    return rules->size() + old <= emu::kMostRules ? "" : "fault: with those of rule " + emu::MoreThanMostRules();
  }

  // `word` is what the scenario calls it.
  void CheckInjection(const std::string& word, const Injection& injection, const std::set<std::string>& services) {
    Known(word + ".a", injection.a());
    const bool pair = injection.kind() == Injection::PARTITION || injection.kind() == Injection::RESET ||
                      injection.kind() == Injection::LINK;
    if (pair) Pair(word, injection.a(), injection.b());
    if (!pair && injection.has_b()) Say(word + ".b", injection.b(), "nothing: this kind has one host");
    if (injection.kind() == Injection::NONE) Say(word + ".kind", "NONE", "a kind of " + word);
    if (injection.kind() == Injection::RESTART_SERVICE && services.count(injection.a()) == 0) {
      Say(word + ".a", injection.a(), "a host with a service");
    }
    if (injection.kind() == Injection::LINK && !injection.has_link()) Say(word + ".link", "", "what the link becomes");
    const bool must_end = injection.kind() == Injection::PARTITION || injection.kind() == Injection::STOP;
    if (must_end && injection.for_ns() == 0) Say(word + ".for_ns", "0", "how long it lasts");
  }

  // The least that a device must be able to do for what runs on its host: to have its connections, and calls on them
  // that need memory.
  struct Needs {
    uint64_t registrations = 0;
    uint64_t windows = 0;
    uint64_t registration_bytes = 0;
    uint64_t completions = 0;

    void AddConnection(uint64_t arena_bytes, bool has_windows) {
      registrations += kRegistrationsOfConnection + kRegistrationsOfCall;
      windows += has_windows ? kRegistrationsOfCall : 0;
      registration_bytes = std::max(registration_bytes, arena_bytes);
    }
  };

  Needs NeedsOf(const std::string& host) const {
    Needs needs;
    const Service* service = nullptr;
    for (const Service& each : scenario_.service()) {
      if (each.host() == host) service = &each;
    }
    const uint64_t service_arena =
        service != nullptr
            ? ArenaBytes(service->credits() + ReceivesForDone(*service),
                         std::max({service->inline_threshold(), service->ccp_inline_max(), service->receive_align()}),
                         service->reverse_credits())
            : 0;
    for (const Client& client : scenario_.client()) {
      for (uint32_t i = 0; i < (client.session() ? client.connections() : 1); ++i) {
        if (client.host() == host) {
          // Version 2 has a reverse direction, if only to say that nobody is there.
          const uint32_t reverse = std::max(client.reverse_credits(), client.version_high() - 1);
          needs.AddConnection(ArenaBytes(client.credits(), client.inline_threshold(), reverse),
                              client.memory_windows());
        }
        if (client.server() == host) needs.AddConnection(std::max(service_arena, LongestBlock(client)), false);
      }
    }
    for (const FileCopy& copy : scenario_.file_copy()) {
      const uint64_t block = std::bit_ceil(copy.chunk_bytes() + kHeaders);
      if (copy.host() == host) {
        const rpcrdma::ClientOptions usual;
        needs.AddConnection(std::max(ArenaBytes(usual.credits, usual.inline_threshold), block), usual.memory_windows);
      }
      if (copy.server() == host) needs.AddConnection(std::max(service_arena, block), false);
    }
    for (const PingPong& ping_pong : scenario_.ping_pong()) {
      if (ping_pong.client() != host && ping_pong.server() != host) continue;
      ++needs.registrations;
      needs.registration_bytes = std::max(needs.registration_bytes, uint64_t{2} * ping_pong.bytes());
      needs.completions = kPingPongCompletions;
    }
    return needs;
  }

  void CheckDevice(const Host& host) {
    const emu::DeviceProfile device = MakeProfile(host.device());
    const Needs needs = NeedsOf(host.name());
    const auto check = [&](std::string_view field, uint64_t value, uint64_t least) {
      if (value < least) {
        Say(fmt::format("host.device.{}", field), std::to_string(value),
            fmt::format("at least {}, for what runs on {}", least, host.name()));
      }
    };
    check("max_cqe", device.max_cqe, needs.completions);
    check("max_mr", device.max_mr, needs.registrations);
    check("max_mw", device.max_mw, needs.windows);
    check("max_mr_size", device.max_mr_size, needs.registration_bytes);
  }

  // Whether it is one of the older documents.
  bool CheckDocument(std::string_view field, const std::string& name) {
    const rpcrdma::ProtocolProfile* const profile = rpcrdma::FindProfile(name);
    if (profile == nullptr) Say(field, name, "draft-2004, rfc5666 or rfc5666bis");
    return profile != nullptr && *profile != rpcrdma::kRfc5666bis;
  }

  template <typename End>
  void CheckVersions(const std::string& where, const End& end) {
    if (end.version_low() > end.version_high()) {
      Say(where + ".version_low", std::to_string(end.version_low()), "no more than version_high");
    }
    if (end.version_high() < 2) return;
    if (end.inline_threshold() < 4096) {
      Say(where + ".inline_threshold", std::to_string(end.inline_threshold()), "at least 4096 with version 2");
    }
  }

  void CheckOlderService(const Service& service) {
    if (service.reverse_credits() > 0) {
      Say("service.reverse_credits", std::to_string(service.reverse_credits()), "none with an older document");
    }
    if (service.shared_receives() > 0) {
      Say("service.shared_receives", std::to_string(service.shared_receives()), "none with an older document");
    }
  }

  void CheckOlderClient(const Client& client) {
    if (client.reverse_credits() > 0) {
      Say("client.reverse_credits", std::to_string(client.reverse_credits()), "none with an older document");
    }
    for (const Service& service : scenario_.service()) {
      // Others take padding for data.
      if (service.host() == client.server() && client.padding_align() > 0 &&
          service.rpcrdma_profile() == rpcrdma::kRfc5666bis.name) {
        Say("client.padding_align", std::to_string(client.padding_align()), "none for a server by rfc5666bis");
      }
    }
  }

  // The protocol has no word for how long messages the server sends: a client that takes more than those expects more,
  // unless private data says so (docs/decisions/0046).
  void CheckConfiguration(const Client& client) {
    for (const Service& service : scenario_.service()) {
      if (service.host() == client.server() && client.ccp() && service.ccp() && problem_.empty() &&
          !HavePrivateData(client, service) && service.inline_threshold() < client.inline_threshold()) {
        Say("client.ccp", client.name(), "no inline_threshold above the service's");
      }
    }
  }

  void CheckSession(const Client& client) {
    if (client.calls_per_connection() > 0) {
      Say("client.calls_per_connection", std::to_string(client.calls_per_connection()), "none of a session");
    }
    if (client.reconnect_max_ns() < client.reconnect_ns()) {
      Say("client.reconnect_max_ns", std::to_string(client.reconnect_max_ns()), "no less than reconnect_ns");
    }
    // It keeps its connections, and more than one at a time.
    for (const Service& service : scenario_.service()) {
      if (service.host() == client.server() && service.has_clients_max()) {
        Say("service.clients_max", std::to_string(service.clients_max()), "no limit for a server of sessions");
      }
    }
  }

  void CheckReverse(const Client& client) {
    for (const Service& service : scenario_.service()) {
      // In version 1 an end that serves nothing cannot say so.
      const bool may_serve_none = client.version_low() == 2;
      if (service.host() == client.server() &&
          (service.reverse_credits() == 0 || (client.reverse_credits() == 0 && !may_serve_none))) {
        Say("client.reverse_call", client.name(), "reverse_credits of both ends");
      }
    }
    for (const Host& host : scenario_.host()) {
      if (host.name() == client.host() && !HasRoomForReverse(host.device())) {
        Say("client.reverse_call", client.name(), "a device with longer queues");
      }
    }
    for (const Call& call : client.reverse_call()) {
      // Those of a client that does not come back would wait for ever.
      if (call.timeout_ns() == 0) Say("client.reverse_call.timeout_ns", "0", "a time-out");
      if (call.has_result_room_bytes() || call.has_plain_result_room_bytes()) {
        Say("client.reverse_call.result_room_bytes", client.name(), "no room: a reverse call offers none");
      }
    }
  }

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

  // A client and its server, which are known.
  void Talk(std::string_view field, const std::string& client, const std::string& server) {
    if (!problem_.empty() || transports_.at(client) == transports_.at(server)) return;
    Say(field, server, fmt::format("a host with a device of the same transport as that of {}", client));
  }

  const Scenario& scenario_;
  const Scenario& written_;
  std::set<std::string> hosts_;
  std::map<std::string, emu::TransportKind> transports_;  // by host
  std::string problem_;
};

}  // namespace

Result<void, std::string> Validate(const Scenario& scenario) {
  if (auto checked = CheckLimits(scenario); !checked) return checked;
  const Scenario today = InTodaysWords(scenario);
  return Validator(today, scenario).Validate();
}

Result<Scenario, std::string> ReadWritten(Scenario written) {
  if (auto valid = Validate(written); !valid) return Err(std::move(valid.error()));
  return InTodaysWords(std::move(written));
}

}  // namespace stagecoach::scenario
