// The swarm's own parts: drawing is a function of the seed, and shrinking keeps what matters and drops the rest.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "emu/inject/rule.h"
#include "scenarios/runner/run.h"
#include "scenarios/runner/stage.h"
#include "scenarios/swarm/draw.h"
#include "scenarios/swarm/shrink.h"

namespace stagecoach::scenario {
namespace {

using emu::InjectionAction;

TEST(Draw, TheSameSeedDrawsTheSameValidScenario) {
  std::set<std::string> all;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const Scenario scenario = Draw(seed);
    const auto valid = Validate(scenario);
    ASSERT_TRUE(valid.has_value()) << "seed " << seed << ": " << valid.error();
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(scenario, Draw(seed)));
    all.insert(scenario.SerializeAsString());
  }
  EXPECT_EQ(all.size(), 2000u);
}

TEST(Draw, EveryKindOfInjectionComesUp) {
  std::set<int> injections;
  std::set<InjectionAction> actions;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const Scenario scenario = Draw(seed);
    for (const Injection& injection : scenario.injection()) injections.insert(injection.kind());
    for (const Host& host : scenario.host()) {
      for (const emu::InjectionRule& rule : GivenRules(host.device())) actions.insert(rule.action);
    }
  }
  EXPECT_EQ(injections.size(), static_cast<size_t>(Injection::Kind_MAX));
  // Nobody would ever hear of a stall whose calls have no time-outs.
  actions.insert(InjectionAction::kStall);
  EXPECT_EQ(actions.size(), emu::kInjectionActions);
}

// Peers that stand still for longer than a program's time-outs, and hosts that are cut off for longer than one is
// waited for: of either, one in so many worlds.
TEST(Draw, PeersAreSilent) {
  constexpr int kWorlds = 1000;
  std::map<std::string, int> worlds;
  for (uint64_t seed = 1; seed <= kWorlds; ++seed) {
    const Scenario scenario = Draw(seed);
    std::set<std::string> seen;
    for (const Injection& injection : scenario.injection()) {
      if (injection.kind() == Injection::STOP) seen.insert("stopped");
      if (injection.kind() == Injection::STOP && injection.for_ns() >= 6'000'000'000) seen.insert("stopped for long");
      if (injection.kind() == Injection::PARTITION && injection.for_ns() >= 10'000'000'000) seen.insert("cut off");
    }
    if (seen.count("stopped") != 0 && seen.count("cut off") != 0) seen.insert("both");
    for (const std::string& each : seen) ++worlds[each];
  }
  EXPECT_GE(worlds["stopped"], kWorlds / 10);
  EXPECT_GE(worlds["stopped for long"], kWorlds / 20);
  EXPECT_GE(worlds["cut off"], kWorlds / 15);
  EXPECT_GE(worlds["both"], kWorlds / 40);
}

// Many clients that come to one server at one moment, mostly to one whose backlog has no room for all of them: in one
// of so many worlds, for they take long.
TEST(Draw, ConnectionsComeInStorms) {
  constexpr int kWorlds = 2000;
  constexpr uint64_t kStorm = 16;
  std::map<std::string, int> worlds;
  for (uint64_t seed = 1; seed <= kWorlds; ++seed) {
    const Scenario scenario = Draw(seed);
    std::map<std::pair<std::string, uint64_t>, uint64_t> at_once;
    for (const Client& client : scenario.client()) {
      if (client.start_ns() != 0) ++at_once[{client.server(), client.start_ns()}];
    }
    for (const auto& [where, clients] : at_once) {
      if (clients < kStorm) continue;
      EXPECT_LE(clients, 41u) << "seed " << seed;
      ++worlds["storm"];
      for (const Service& service : scenario.service()) {
        if (service.host() != where.first) continue;
        EXPECT_FALSE(service.has_clients_max()) << "seed " << seed;
        ++worlds[service.backlog() < clients ? "too many at once" : "room for all"];
        if (service.backlog() < clients) ++worlds["too many at once of " + scenario.host(0).device().profile()];
      }
    }
  }
  EXPECT_GE(worlds["storm"], kWorlds / 60);
  EXPECT_LE(worlds["storm"], kWorlds / 30);
  EXPECT_GE(worlds["too many at once"], kWorlds / 100);
  EXPECT_GE(worlds["room for all"], kWorlds / 400);
  EXPECT_GE(worlds["too many at once of iwarp"], kWorlds / 250);
  EXPECT_GE(worlds["too many at once of roce"], kWorlds / 250);
}

// Peers that connect and say nothing, or half of what a peer says first: in one of so many worlds, on hosts that nobody
// else uses. In a third of these they are more than a listener holds.
TEST(Draw, StrangersSayNothing) {
  constexpr int kWorlds = 2000;
  constexpr uint32_t kHeld = 128;
  std::map<std::string, int> worlds;
  for (uint64_t seed = 1; seed <= kWorlds; ++seed) {
    const Scenario scenario = Draw(seed);
    std::set<std::string> seen;
    std::set<std::string> others;
    for (const Service& service : scenario.service()) others.insert(service.host());
    for (const Client& client : scenario.client()) others.insert({client.host(), client.server()});
    for (const PingPong& ping_pong : scenario.ping_pong()) others.insert({ping_pong.client(), ping_pong.server()});
    for (const FileCopy& copy : scenario.file_copy()) others.insert({copy.host(), copy.server()});
    for (const SilentPeer& peer : scenario.silent_peer()) {
      EXPECT_EQ(others.count(peer.host()), 0u) << "seed " << seed;
      EXPECT_EQ(others.count(peer.server()), 1u) << "seed " << seed;
      seen.insert("any");
      seen.insert("of " + scenario.host(0).device().profile());
      seen.insert(peer.said_bytes() > 0 ? "half a word" : "not a word");
      if (peer.streams() > kHeld) seen.insert("more than are held");
      if (peer.times() > 1) seen.insert("again");
      if (peer.port() != SilentPeer().port()) seen.insert("to a ping-pong");
    }
    for (const std::string& each : seen) ++worlds[each];
  }
  EXPECT_GE(worlds["any"], kWorlds / 14);
  EXPECT_LE(worlds["any"], kWorlds / 8);
  EXPECT_GE(worlds["of iwarp"], kWorlds / 35);
  EXPECT_GE(worlds["of roce"], kWorlds / 35);
  EXPECT_GE(worlds["not a word"], kWorlds / 35);
  EXPECT_GE(worlds["half a word"], kWorlds / 35);
  EXPECT_GE(worlds["more than are held"], kWorlds / 50);
  EXPECT_GE(worlds["again"], kWorlds / 35);
  EXPECT_GE(worlds["to a ping-pong"], kWorlds / 400);
}

std::string VersionsOf(const auto& end) {
  return std::to_string(end.version_low()) + "-" + std::to_string(end.version_high());
}

// Ends of each kind, alone and beside others: one in so many worlds has each.
TEST(Draw, VersionsAndDocumentsMeet) {
  constexpr int kWorlds = 400;
  std::map<std::string, int> worlds;
  for (uint64_t seed = 1; seed <= kWorlds; ++seed) {
    const Scenario scenario = Draw(seed);
    std::set<std::string> seen;
    for (const Service& service : scenario.service()) {
      seen.insert("service " + service.rpcrdma_profile() + " " + VersionsOf(service));
      std::set<std::string> versions;
      std::set<std::string> documents;
      for (const Client& client : scenario.client()) {
        if (client.server() != service.host()) continue;
        seen.insert("client " + client.rpcrdma_profile() + " " + VersionsOf(client));
        versions.insert(VersionsOf(client));
        documents.insert(client.rpcrdma_profile());
        // What it falls back to, from a server that speaks version 2 and from one that does not.
        if (client.version_high() == 2 && client.version_low() == 1 && client.rpcrdma_profile() != "rfc5666bis") {
          seen.insert("auto and older to " + VersionsOf(service));
        }
      }
      if (versions.size() > 1) seen.insert("clients of several versions");
      if (documents.size() > 1) seen.insert("clients of several documents");
      if (versions.size() > 1 && documents.size() > 1) seen.insert("clients of several versions and documents");
    }
    for (const std::string& each : seen) ++worlds[each];
  }
  for (const std::string end : {"service", "client"}) {
    for (const std::string document : {"draft-2004", "rfc5666", "rfc5666bis"}) {
      for (const std::string versions : {"1-1", "1-2", "2-2"}) {
        const std::string kind = end + " " + document + " " + versions;
        EXPECT_GE(worlds[kind], kWorlds / 80) << kind;
      }
    }
  }
  for (const std::string service : {"1-1", "1-2", "2-2"}) {
    EXPECT_GE(worlds["auto and older to " + service], kWorlds / 80) << service;
  }
  EXPECT_GE(worlds["clients of several versions"], kWorlds / 6);
  EXPECT_GE(worlds["clients of several documents"], kWorlds / 6);
  EXPECT_GE(worlds["clients of several versions and documents"], kWorlds / 10);
}

// So that a seed says the same of both transports, and what was known of it before there were two.
TEST(Draw, AllButTheProfileIsTheSameWithEachDevice) {
  std::set<std::string> drawn;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const Scenario iwarp = Draw(seed, "iwarp");
    Scenario roce = Draw(seed, "roce");
    const Scenario either = Draw(seed);
    drawn.insert(either.host(0).device().profile());
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(
        either, either.host(0).device().profile() == "roce" ? roce : iwarp));
    for (Host& host : *roce.mutable_host()) {
      EXPECT_EQ(host.device().profile(), "roce");
      host.mutable_device()->clear_profile();
      // What packets suffer stands behind what any device does.
      auto& rules = *host.mutable_device()->mutable_rule();
      const auto is_of_packets = [](const std::string& rule) {
        return !emu::RowOf(emu::ParseInjectionRules(rule)->front().action).why_not_on_iwarp.empty();
      };
      while (!rules.empty() && is_of_packets(*rules.rbegin())) rules.RemoveLast();
    }
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(iwarp, roce));
  }
  EXPECT_EQ(drawn, (std::set<std::string>{"iwarp", "roce"}));
}

// A defect that shows when a client asks for more than 5000 bytes while its server's host is killed.
bool Fails(const Scenario& scenario) {
  for (const Injection& injection : scenario.injection()) {
    if (injection.kind() != Injection::KILL) continue;
    for (const Client& client : scenario.client()) {
      if (client.server() != injection.a()) continue;
      for (const Call& call : client.call()) {
        if (call.result_bytes() > 5000) return true;
      }
    }
  }
  return false;
}

TEST(Shrink, LeavesOfRulesWhatTheFailureNeeds) {
  Scenario scenario;
  scenario.add_host()->set_name("a");
  Device& device = *scenario.mutable_host(0)->mutable_device();
  for (const char* const rule : {"delay=1ms one-in=3", "disconnect connection=2 kind=send message=3..9 times=1"}) {
    device.add_rule(rule);
  }
  const auto fails = [](const Scenario& tried) {
    return tried.host_size() == 1 && tried.host(0).device().rule_size() > 0 &&
           tried.host(0).device().rule(tried.host(0).device().rule_size() - 1).find("kind=send") != std::string::npos;
  };
  const Scenario small = Shrink(scenario, fails).scenario;
  ASSERT_EQ(small.host(0).device().rule_size(), 1);
  EXPECT_EQ(small.host(0).device().rule(0), "disconnect kind=send");
}

TEST(Shrink, LeavesWhatTheFailureNeeds) {
  int shrunk = 0;
  for (uint64_t seed = 1; seed <= 400 && shrunk < 5; ++seed) {
    const Scenario scenario = Draw(seed);
    if (!Fails(scenario)) continue;
    ++shrunk;
    const Shrunk result = Shrink(scenario, Fails);
    const Scenario& small = result.scenario;
    SCOPED_TRACE(small.DebugString());
    EXPECT_TRUE(Fails(small));
    EXPECT_TRUE(Validate(small).has_value());
    EXPECT_EQ(small.injection_size(), 1);
    ASSERT_EQ(small.client_size(), 1);
    ASSERT_EQ(small.client(0).call_size(), 1);
    EXPECT_LT(small.client(0).call(0).result_bytes(), 5100u);
    EXPECT_LE(small.host_size(), 2);
    for (const Host& host : small.host()) EXPECT_FALSE(host.device().has_profile()) << "it fails with any device";
    EXPECT_EQ(small.link_size() + small.file_copy_size() + small.ping_pong_size(), 0);
    EXPECT_EQ(small.service_size(), 1);
    EXPECT_EQ(small.seed(), scenario.seed());
  }
  EXPECT_EQ(shrunk, 5);
}

TEST(Shrink, StopsWhenItsRunsAreUsedUp) {
  uint64_t seed = 1;
  while (!Fails(Draw(seed))) ++seed;
  const Shrunk result = Shrink(Draw(seed), Fails, 10);
  EXPECT_EQ(result.runs, 10u);
  EXPECT_TRUE(Fails(result.scenario));
}

}  // namespace
}  // namespace stagecoach::scenario
