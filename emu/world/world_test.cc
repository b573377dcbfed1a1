#include "emu/world/world.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "emu/world/rule_words.h"
#include "emu/world/simulated_world.h"

namespace stagecoach::emu {
namespace {

IpEndpoint Address(const char* text) {
  return *IpEndpoint::Parse(text, 0);
}

// Sets a variable for one test.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST(WorldOptions, TheDefaultAsksForNoCrcAndForPeerToPeer) {
  const WorldOptions options = OptionsFromEnvironment();
  EXPECT_FALSE(options.crc);
  EXPECT_TRUE(options.cm.peer_to_peer);
  EXPECT_EQ(options.cm.keepalive, 30s);
  EXPECT_EQ(options.cm.user_timeout, 60s);
  EXPECT_EQ(options.busy_poll, 100us);
  EXPECT_EQ(options.backend, BackendChoice::kAuto);
  EXPECT_EQ(options.shm_users, ShmUsers::kAny);
  EXPECT_EQ(options.shm_payload, ShmPayload::kCopied);
  EXPECT_FALSE(options.verbose);
  EXPECT_EQ(options.capture_path, "");
}

TEST(WorldOptions, TheEnvironmentOverrides) {
  Environment crc("STAGECOACH_CRC", "on");
  Environment peer("STAGECOACH_PEER_TO_PEER", "off");
  Environment patience("STAGECOACH_LISTENER_PATIENCE", "250");
  Environment keepalive("STAGECOACH_KEEPALIVE", "5000");
  Environment user_timeout("STAGECOACH_USER_TIMEOUT", "0");
  Environment busy_poll("STAGECOACH_BUSY_POLL", "200");
  Environment backend("STAGECOACH_BACKEND", "shm");
  Environment users("STAGECOACH_SHM", "same-user");
  Environment payload("STAGECOACH_SHM_PAYLOAD", "read");
  Environment verbose("STAGECOACH_VERBOSE", "on");
  Environment capture("STAGECOACH_PCAP", "/some/where.pcapng");
  const WorldOptions options = OptionsFromEnvironment();
  EXPECT_TRUE(options.crc);
  EXPECT_FALSE(options.cm.peer_to_peer);
  EXPECT_EQ(options.cm.listener_patience, 250ms);
  EXPECT_EQ(options.cm.keepalive, 5s);
  EXPECT_EQ(options.cm.user_timeout, Duration::zero());
  EXPECT_EQ(options.busy_poll, 200us);
  EXPECT_EQ(options.backend, BackendChoice::kShm);
  EXPECT_EQ(options.shm_users, ShmUsers::kSame);
  EXPECT_EQ(options.shm_payload, ShmPayload::kRead);
  EXPECT_TRUE(options.verbose);
  EXPECT_EQ(options.capture_path, "/some/where.pcapng");
}

TEST(WorldOptions, PortsAreTakenFromTheEnvironmentWhoeverChoseTheProfile) {
  Environment ports("STAGECOACH_PORTS", "30000+8");
  Environment name("STAGECOACH_PROFILE", "roce");
  const DeviceProfile named = OptionsFromEnvironment().profile;
  EXPECT_EQ(named.name, "roce");
  EXPECT_EQ(named.port_base, 30000);
  DeviceProfile chosen = HostileProfile();
  TakePortsFromEnvironment(&chosen);
  EXPECT_EQ(chosen.name, "hostile");
  EXPECT_EQ(chosen.port_base, 30000);
  EXPECT_EQ(chosen.port_count, 8);
}

TEST(WorldOptions, RulesAreTakenFromTheEnvironment) {
  Environment rules("STAGECOACH_RULES", "disconnect message=10; stall connection=2");
  const WorldOptions options = OptionsFromEnvironment();
  EXPECT_EQ(ToString(options.rules), "disconnect message=10; stall connection=2");
  EXPECT_FALSE(options.without_device);
}

// A test of a fault must not run without it.
TEST(WorldOptions, WithRulesThatCannotBeCarriedOutThereIsNoDevice) {
  for (const char* const text : {"disconect message=10", "stall; drop message=3"}) {
    Environment rules("STAGECOACH_RULES", text);
    testing::internal::CaptureStderr();
    const WorldOptions options = OptionsFromEnvironment();
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(options.rules.empty());
    ASSERT_TRUE(options.without_device);
    EXPECT_NE(said.find("stagecoach: STAGECOACH_RULES: '"), std::string::npos) << said;
    EXPECT_NE(said.find("no device can be opened"), std::string::npos) << said;
    SimulatedWorld world(SimWorld::Options{}, options);
    EXPECT_EQ(world.AddHost("a", {Address("10.0.0.1")}).nic().OpenContext().error(), EIO);
  }
}

TEST(WorldOptions, WhatATransportCanDoDependsOnTheProfile) {
  Environment rules("STAGECOACH_RULES", "drop message=3");
  Environment name("STAGECOACH_PROFILE", "roce");
  EXPECT_EQ(OptionsFromEnvironment().rules.size(), 1u);
  WorldOptions options;
  options.rules = OptionsFromEnvironment().rules;
  const auto made = MakeTcpWorld(options);
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().find("'drop message=3': iWARP cannot lose a segment"), std::string::npos) << made.error();
}

TEST(SimulatedWorld, EachHostCountsByItself) {
  WorldOptions options;
  options.rules = ParseInjectionRules("stall message=4").value();
  SimulatedWorld world(SimWorld::Options{}, options);
  Host& a = world.AddHost("a", {Address("10.0.0.1")});
  Host& b = world.AddHost("b", {Address("10.0.0.2")});
  ASSERT_NE(a.injections(), nullptr);
  EXPECT_NE(a.injections(), b.injections());
  EXPECT_EQ(a.injections()->rules(), options.rules);
}

SegmentFacts WholeMessage() {
  return {};
}

TEST(RuleWords, ARuleThatNeverFiredIsNamedWithWhatThereWas) {
  const auto plan = InjectionPlan::Make(
      ParseInjectionRules("stall message=9; delay=1us; stall message=2 every=5; disconnect message=3").value());
  const auto injections = plan->NewConnection();
  for (int i = 0; i < 3; ++i) injections->Judge(InjectionDirection::kSent, WholeMessage());
  EXPECT_EQ(LastWordsOf(*plan),
            (std::vector<std::string>{
                "rule 'stall message=9' never fired: 1 connection, 3 messages sent and 0 received",
                "rule 'stall message=2 every=5' never fired: 1 connection, 3 messages sent and 0 received, of which "
                "1 segment matched"}));
  const auto of_the_device = InjectionPlan::Make(ParseInjectionRules("fail-registration number=3").value());
  PlaceInjections registrations(of_the_device, SetOf(InjectionAction::kFailRegistration), "registrations");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(registrations.Judge(), nullptr);
  EXPECT_EQ(LastWordsOf(*of_the_device),
            std::vector<std::string>{"rule 'fail-registration number=3' never fired: 2 registrations"});
  const auto unused = InjectionPlan::Make(ParseInjectionRules("stall").value());
  EXPECT_EQ(LastWordsOf(*unused), (std::vector<std::string>{"rule 'stall' never fired: 0 connections"}));
}

// Of a rule that fires again and again the first ten times are told, and the number at the end.
TEST(RuleWords, FiringsAreToldAsLongAsTheyAreNews) {
  testing::internal::CaptureStderr();
  const auto plan = PlanThatSpeaks(ParseInjectionRules("delay=1us; delay=2us message=4").value());
  const auto injections = plan->NewConnection();
  for (int i = 0; i < 12; ++i) injections->Judge(InjectionDirection::kSent, WholeMessage());
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 11) << said;
  EXPECT_NE(said.find("stagecoach: rule 'delay=2us message=4' fired: connection 1, message 4 sent (send)\n"),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("message 10 sent (send); that makes ten, and no more is said\n"), std::string::npos) << said;
  EXPECT_EQ(LastWordsOf(*plan), (std::vector<std::string>{"rule 'delay=1us' fired 12 times"}));
}

// A process that has rules says so when it ends, and a forked child has none of its parent's to speak of.
TEST(RuleWords, TheEndIsToldByWhoSawIt) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t process = fork();
  if (process == 0) {
    dup2(ends[1], STDERR_FILENO);
    PlanThatSpeaks(ParseInjectionRules("stall message=9").value());
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    int status = 0;
    std::exit(waitpid(child, &status, 0) == child ? status : 1);
  }
  close(ends[1]);
  std::string said;
  char buffer[256];
  for (ssize_t size = 0; (size = read(ends[0], buffer, sizeof(buffer))) > 0;) said.append(buffer, size);
  close(ends[0]);
  int status = 1;
  ASSERT_EQ(waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(said, "stagecoach: rule 'stall message=9' never fired: 0 connections\n");
}

TEST(WorldOptions, AValueThatMeansNothingIsReportedAndIgnored) {
  Environment crc("STAGECOACH_CRC", "perhaps");
  testing::internal::CaptureStderr();
  EXPECT_FALSE(OptionsFromEnvironment().crc);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("STAGECOACH_CRC=perhaps"), std::string::npos);
}

TEST(WorldOptions, AWordThatIsNoneOfThoseThereAreIsReportedAndIgnored) {
  Environment backend("STAGECOACH_BACKEND", "udp");
  Environment users("STAGECOACH_SHM", "");
  testing::internal::CaptureStderr();
  const WorldOptions options = OptionsFromEnvironment();
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "stagecoach: STAGECOACH_BACKEND=udp: there are auto, shm, tcp; ignored\n"
            "stagecoach: STAGECOACH_SHM=: there are any-user, same-user; ignored\n");
  EXPECT_EQ(options.backend, BackendChoice::kAuto);
  EXPECT_EQ(options.shm_users, ShmUsers::kAny);
}

TEST(WorldOptions, ATimeThatIsNoneIsReportedAndIgnored) {
  for (const char* text : {"", "-1", "1s", "4294967296"}) {
    Environment patience("STAGECOACH_LISTENER_PATIENCE", text);
    testing::internal::CaptureStderr();
    EXPECT_EQ(OptionsFromEnvironment().cm.listener_patience, Duration::zero()) << text;
    EXPECT_NE(testing::internal::GetCapturedStderr().find("no number of milliseconds"), std::string::npos) << text;
  }
  for (const std::string text : {"", "50us", "1001", "4294967296"}) {
    Environment busy_poll("STAGECOACH_BUSY_POLL", text.c_str());
    testing::internal::CaptureStderr();
    EXPECT_EQ(OptionsFromEnvironment().busy_poll, 100us);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("STAGECOACH_BUSY_POLL=" + text + ": no number of microseconds from 0 to 1000"),
              std::string::npos)
        << said;
  }
}

TEST(TcpWorld, AFileThatCannotBeMadeIsNamed) {
  WorldOptions options;
  options.capture_path = "/nonexistent/capture.pcapng";
  auto world = MakeTcpWorld(options);
  ASSERT_FALSE(world);
  EXPECT_NE(world.error().find("/nonexistent/capture.pcapng"), std::string::npos) << world.error();
  options.capture_path.clear();
  options.trace_path = "/nonexistent/trace";
  EXPECT_FALSE(MakeTcpWorld(options));
}

TEST(TcpWorld, WorldsMayFollowEachOther) {
  for (int i = 0; i < 3; ++i) {
    auto world = MakeTcpWorld({});
    ASSERT_TRUE(world);
    World::Install(std::move(*world));
    EXPECT_EQ(&World::Current().current_host(), World::Current().FindHost(Address("127.0.0.1")));
  }
  World::Install(nullptr);
}

// ThreadSanitizer does not follow a process with threads through a fork.
#ifndef __SANITIZE_THREAD__
TEST(TcpWorld, AForkedChildStartsAWorldOfItsOwn) {
  World* const parents = &World::Current();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    World& own = World::Current();
    const bool works = &own != parents && own.current_host().nic().OpenContext().has_value();
    _exit(works ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(&World::Current(), parents);
  World::Install(nullptr);
}
#endif

TEST(TcpWorld, CrcIsTheOptionsAndNotTheProfiles) {
  WorldOptions options;
  options.crc = true;
  EXPECT_TRUE((*MakeTcpWorld(options))->current_host().nic().profile().want_crc);
  options.crc = false;
  EXPECT_FALSE((*MakeTcpWorld(options))->current_host().nic().profile().want_crc);
}

TEST(SimulatedWorld, AHostKeepsItsOwnDeviceWhenItIsRestarted) {
  SimulatedWorld world({});
  DeviceProfile profile = IwarpProfile();
  profile.max_ord = 3;
  profile.want_crc = true;
  world.AddHost("a", {Address("10.0.0.1")}, profile);
  world.AddHost("b", {Address("10.0.0.2")});
  EXPECT_EQ(world.host("a").nic().profile().max_ord, 3u);
  EXPECT_TRUE(world.host("a").nic().profile().want_crc);
  EXPECT_NE(world.host("b").nic().profile().max_ord, 3u);
  EXPECT_FALSE(world.host("b").nic().profile().want_crc);
  world.sim().CutHost(world.fabric("a"), Cut::kReset);
  EXPECT_EQ(world.Restart("a").nic().profile().max_ord, 3u);
}

TEST(SimulatedWorld, HostsAreFoundByAddressAndProgramsActAsOne) {
  SimulatedWorld world(SimWorld::Options{});
  Host& a = world.AddHost("a", {Address("10.0.0.1"), Address("fd00::1")});
  Host& b = world.AddHost("b", {Address("10.0.0.2")});
  EXPECT_EQ(&world.current_host(), &a);
  world.ActAs("b");
  EXPECT_EQ(&world.current_host(), &b);
  EXPECT_EQ(world.FindHost(Address("fd00::1").WithPort(99)), &a);
  EXPECT_EQ(world.FindHost(Address("0.0.0.0")), &b);
  EXPECT_EQ(world.FindHost(Address("10.0.0.3")), nullptr);
  EXPECT_EQ(&world.host("a"), &a);
  EXPECT_EQ(a.nic().name(), "a-rnic");
}

TEST(SimulatedWorld, AProgramsCallsAreItsHostsWhateverTheMainContextActsAs) {
  SimulatedWorld world(SimWorld::Options{});
  Host& a = world.AddHost("a", {Address("10.0.0.1")});
  Host& b = world.AddHost("b", {Address("10.0.0.2")});
  const auto program = world.sim().Spawn(world.fabric("b"), "program", [&] {
    EXPECT_EQ(&world.current_host(), &b);
    EXPECT_TRUE(world.sim().Sleep(1us));
    EXPECT_EQ(&world.current_host(), &b);
  });
  EXPECT_TRUE(world.sim().RunUntil([&] { return &world.current_host() == &a && program->IsFinished(); }));
  EXPECT_EQ(&world.current_host(), &a);
}

TEST(SimulatedWorld, ARestartedHostHasANewNicAtItsAddresses) {
  SimulatedWorld world(SimWorld::Options{});
  world.AddHost("a", {Address("10.0.0.1")});
  SimFabric& fabric = world.fabric("a");
  ASSERT_TRUE(world.host("a").nic().OpenContext().has_value());
  world.sim().CutHost(fabric, Cut::kSilent);
  Host& restarted = world.Restart("a");
  EXPECT_TRUE(fabric.IsUp());
  EXPECT_EQ(world.FindHost(Address("10.0.0.1")), &restarted);
  EXPECT_EQ(&world.fabric("a"), &fabric);
  EXPECT_EQ(restarted.nic().name(), "a-rnic");
}

}  // namespace
}  // namespace stagecoach::emu
