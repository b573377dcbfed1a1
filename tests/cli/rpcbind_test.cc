// stagecoach serve --rpcbind and stagecoach ping HOST, with Debian's rpcbind as the daemon and rpcinfo as the referee.
//
// The daemon wants port 111 and files below /run. It has both in namespaces of this test's own, in which this program
// starts itself again; the machine's network, /run and rpcbind, if it runs one, are not touched.
#include <netinet/in.h>
#include <signal.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <regex>
#include <sstream>

#include "tests/cli/cli_fixture.h"
#include "tests/support/loopback.h"

namespace stagecoach::tests {
namespace {

constexpr const char* kOwnNetwork = "STAGECOACH_TEST_OWN_NETWORK";
constexpr const char* kRpcbind = "/sbin/rpcbind";
constexpr const char* kRpcinfo = "/usr/sbin/rpcinfo";
constexpr const char* kSocket = "/run/rpcbind.sock";
constexpr uint16_t kRpcbindPort = 111;

// Why there is no such place; empty inside of it.
std::string g_no_namespaces;

// Goes on in namespaces of its own, by exec. Returns if that cannot be, with the reason.
std::string EnterOwnNetwork(char** argv) {
  if (::access(kRpcbind, X_OK) != 0) return std::string(kRpcbind) + " is not there: package rpcbind";
  // rpcbind gives up being root, for which it needs more users than one: root's own namespaces have them, and those of
  // a user who has subordinate ids (package uidmap).
  const std::vector<std::vector<std::string>> ways = {
      {"unshare", "--net", "--mount"},
      {"unshare", "--user", "--map-root-user", "--map-auto", "--net", "--mount"},
  };
  std::string reasons = "no namespaces of its own here:";
  for (std::vector<std::string> command : ways) {
    for (const char* argument : {"bash", "-c", "mount -t tmpfs none /run && exec \"$@\"", "bash"}) {
      command.emplace_back(argument);
    }
    std::vector<std::string> probe = command;
    probe.emplace_back("true");
    Process process(::testing::TempDir(), probe);
    if (process.Wait() != 0) {
      reasons += " " + process.Err();
      continue;
    }
    ::setenv(kOwnNetwork, "1", 1);
    command.push_back(fs::read_symlink("/proc/self/exe"));
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    for (char** argument = argv + 1; *argument != nullptr; ++argument) arguments.push_back(*argument);
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    return std::string("exec: ") + std::strerror(errno);
  }
  return reasons;
}

bool Connects(const sockaddr* address, socklen_t size) {
  const int fd = ::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = ::connect(fd, address, size) == 0;
  ::close(fd);
  return connected;
}

// The last two numbers of a universal address.
std::string PortOctets(uint16_t port) {
  return "." + std::to_string(port >> 8) + "." + std::to_string(port & 0xff);
}

class RpcbindDaemonTest : public CliTest {
 protected:
  void SetUp() override {
    if (!g_no_namespaces.empty()) GTEST_SKIP() << g_no_namespaces;
    CliTest::SetUp();
    StartDaemon();
  }
  void TearDown() override {
    if (!g_no_namespaces.empty()) return;
    StopDaemon();
    CliTest::TearDown();
  }

  void StartDaemon() {
    daemon_ = std::make_unique<Process>(base_.string(), std::vector<std::string>{kRpcbind, "-f"});
    ASSERT_TRUE(WaitUntil([&] { return Answers() || !daemon_->Running(); }));
    ASSERT_TRUE(daemon_->Running()) << daemon_->Err();
  }
  void StopDaemon() {
    if (!daemon_) return;
    daemon_->Signal(SIGTERM);
    daemon_->Signal(SIGCONT);  // a test that failed may have left it stopped
    EXPECT_TRUE(daemon_->Wait().has_value());
    daemon_.reset();
  }
  static bool Answers() {
    sockaddr_un local = {};
    local.sun_family = AF_UNIX;
    std::strcpy(local.sun_path, kSocket);
    sockaddr_in in = {};
    in.sin_family = AF_INET;
    in.sin_port = htons(kRpcbindPort);
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 in6 = {};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(kRpcbindPort);
    in6.sin6_addr = in6addr_loopback;
    return Connects(reinterpret_cast<sockaddr*>(&local), sizeof(local)) &&
           Connects(reinterpret_cast<sockaddr*>(&in), sizeof(in)) &&
           Connects(reinterpret_cast<sockaddr*>(&in6), sizeof(in6));
  }

  // Connections to the daemon's local socket that it has not accepted; while it is stopped, it accepts none.
  static int ConnectionsWaiting() {
    constexpr const char* kConnecting = "02";
    int count = 0;
    std::ifstream sockets("/proc/self/net/unix");
    for (std::string line; std::getline(sockets, line);) {
      std::istringstream words(line);
      std::string number, references, protocol, flags, type, state, inode, path;
      words >> number >> references >> protocol >> flags >> type >> state >> inode >> path;
      if (path == kSocket && state == kConnecting) ++count;
    }
    return count;
  }

  // What rpcinfo shows of the file program: "1 rdma 127.0.0.1.156.65", by version and netid.
  std::set<std::string> Registered() {
    Process rpcinfo(base_.string(), {kRpcinfo});
    EXPECT_EQ(rpcinfo.Wait(), 0) << rpcinfo.Err();
    std::set<std::string> registered;
    std::istringstream lines(rpcinfo.Out());
    uint32_t program = 0;
    std::string version, netid, address;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      if (words >> program >> version >> netid >> address && program == kProgram) {
        registered.insert(version + " " + netid + " " + address);
      }
    }
    return registered;
  }

  // A server with --rpcbind, and its port.
  struct Published {
    std::unique_ptr<Process> process;
    uint16_t port = 0;
  };
  Published Publish(const std::string& listen, const std::string& check_seconds = "60") {
    Published server;
    server.process =
        Start({"serve", "--rpcbind", "--rpcbind-check", check_seconds, "--listen", listen, exported_.string()});
    EXPECT_TRUE(WaitUntil([&] { return server.process->Out().ends_with('\n') || !server.process->Running(); }));
    EXPECT_TRUE(server.process->Running()) << server.process->Err();
    const std::string out = server.process->Out();
    std::smatch match;
    if (!std::regex_search(out, match, std::regex("listening on \\S+:(\\d+) for"))) {
      ADD_FAILURE() << out;
      return server;
    }
    server.port = static_cast<uint16_t>(std::stoi(match[1]));
    return server;
  }

  static constexpr uint32_t kProgram = 0x20534347;
  std::unique_ptr<Process> daemon_;
};

TEST_F(RpcbindDaemonTest, AServerIsFoundByItsProgramUntilItIsAskedToEnd) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const Published server = Publish("127.0.0.1:0");
    EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 127.0.0.1" + PortOctets(server.port)}));
    const Outcome ping = Run({"ping", "-c", "3", "127.0.0.1"});
    EXPECT_EQ(ping.code, 0) << ping.err;
    EXPECT_NE(ping.out.find("3 NULL calls of program 0x20534347 version 1 at 127.0.0.1:" + std::to_string(server.port)),
              std::string::npos)
        << ping.out;

    server.process->Signal(signal);
    EXPECT_EQ(server.process->Wait(), 0) << server.process->Err();
    EXPECT_EQ(server.process->Err(), "");
    EXPECT_EQ(Registered(), std::set<std::string>());
    const Outcome gone = Run({"ping", "127.0.0.1"});
    EXPECT_EQ(gone.code, 1);
    EXPECT_EQ(gone.err,
              "stagecoach: ping 127.0.0.1: look up program 0x20534347 version 1 by rpcbind at 127.0.0.1:111: the "
              "program is not registered there\n");
  }
}

TEST_F(RpcbindDaemonTest, AServerOnIpv6IsRegisteredForRdma6) {
  const Published server = Publish("[::1]:0");
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma6 ::1" + PortOctets(server.port)}));
  for (const char* host : {"::1", "[::1]"}) {
    const Outcome ping = Run({"ping", "-c", "1", host});
    EXPECT_EQ(ping.code, 0) << ping.err;
    EXPECT_NE(ping.out.find("at [::1]:" + std::to_string(server.port)), std::string::npos) << ping.out;
  }
  const Outcome ipv4 = Run({"ping", "127.0.0.1"});
  EXPECT_EQ(ipv4.code, 1);
  EXPECT_TRUE(ipv4.err.ends_with(": the program is registered for 'rdma6', not for rdma\n")) << ipv4.err;
}

TEST_F(RpcbindDaemonTest, AServerOnAllAddressesIsRegisteredForThoseItTakesConnectionsOf) {
  const Published server = Publish("[::]:0");
  const std::string port = PortOctets(server.port);
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 0.0.0.0" + port, "1 rdma6 ::" + port}));
  for (const char* host : {"127.0.0.1", "::1"}) {
    const Outcome ping = Run({"ping", "-c", "1", host});
    EXPECT_EQ(ping.code, 0) << ping.err;
  }
  server.process->Signal(SIGTERM);
  EXPECT_EQ(server.process->Wait(), 0) << server.process->Err();
  EXPECT_EQ(Registered(), std::set<std::string>());

  const Published ipv4 = Publish("0.0.0.0:0");
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 0.0.0.0" + PortOctets(ipv4.port)}));
}

TEST_F(RpcbindDaemonTest, WhatADeadServerLeftBehindIsReplaced) {
  const Published dead = Publish("0.0.0.0:0");
  dead.process->Signal(SIGKILL);
  ASSERT_EQ(dead.process->Wait(), -SIGKILL);
  const std::string left = "0.0.0.0" + PortOctets(dead.port);
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma " + left}));
  const Outcome stale = Run({"ping", "127.0.0.1"});
  EXPECT_EQ(stale.code, 1);
  EXPECT_TRUE(stale.err.starts_with("stagecoach: ping 127.0.0.1:" + std::to_string(dead.port) + ": connect to "))
      << stale.err;
  EXPECT_TRUE(stale.err.ends_with("; rpcbind at 127.0.0.1 has " + left + " for it, netid rdma\n")) << stale.err;

  // First on another address, then on the port of the one before, where the new server itself would answer.
  Published server = Publish("127.0.0.1:0");
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 127.0.0.1" + PortOctets(server.port)}));
  server.process->Signal(SIGKILL);
  ASSERT_EQ(server.process->Wait(), -SIGKILL);
  const Published again = Publish("0.0.0.0:" + std::to_string(server.port));
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 0.0.0.0" + PortOctets(server.port)}));
  const Outcome ping = Run({"ping", "-c", "1", "127.0.0.1"});
  EXPECT_EQ(ping.code, 0) << ping.err;
}

TEST_F(RpcbindDaemonTest, AServerThatAnswersKeepsItsRegistration) {
  for (const char* listen : {"127.0.0.1:0", "0.0.0.0:0", "[::]:0"}) {
    const Published first = Publish(listen);
    const std::set<std::string> registered = Registered();
    const Outcome second = Run({"serve", "--rpcbind", "--listen", "127.0.0.1:0", exported_.string()});
    EXPECT_EQ(second.code, 1);
    EXPECT_EQ(second.out, "");
    EXPECT_TRUE(
        second.err.starts_with("stagecoach: serve: --rpcbind: register program 0x20534347 version 1 at 127.0.0.1."))
        << second.err;
    EXPECT_TRUE(second.err.ends_with(": it is registered already: version 1 for rdma at '" +
                                     std::string(listen[0] == '1' ? "127.0.0.1" : "0.0.0.0") + PortOctets(first.port) +
                                     "', and a server answers there\n"))
        << second.err;
    EXPECT_EQ(Registered(), registered);
    first.process->Signal(SIGTERM);
    EXPECT_EQ(first.process->Wait(), 0) << first.process->Err();
  }
}

// A universal address has no place for a zone.
TEST_F(RpcbindDaemonTest, AServerAtALinkLocalAddressIsRegisteredWithoutItsZoneAndFoundInIt) {
  Process link(base_.string(),
               {"sh", "-c",
                "ip link add name zone0 type veth peer name zone1 && ip address add fe80::7/64 dev zone0 "
                "nodad && ip link set zone0 up && ip link set zone1 up"});
  ASSERT_EQ(link.Wait(), 0) << link.Err();
  {
    const Published first = Publish("[fe80::7%zone0]:0");
    EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma6 fe80::7" + PortOctets(first.port)}));
    for (const char* host : {"fe80::7%zone0", "[fe80::7%zone0]"}) {
      const Outcome ping = Run({"ping", "-c", "1", host});
      EXPECT_EQ(ping.code, 0) << ping.err;
      EXPECT_NE(ping.out.find(" at [fe80::7%zone0]:" + std::to_string(first.port)), std::string::npos) << ping.out;
    }
    for (const char* listen : {"[fe80::7%zone0]:0", "[::]:0"}) {
      const Outcome second = Run({"serve", "--rpcbind", "--listen", listen, exported_.string()});
      EXPECT_EQ(second.code, 1);
      EXPECT_TRUE(second.err.ends_with("'fe80::7" + PortOctets(first.port) + "', and a server answers there\n"))
          << second.err;
    }
  }
  Process gone(base_.string(), {"ip", "link", "del", "zone0"});
  EXPECT_EQ(gone.Wait(), 0) << gone.Err();
}

TEST_F(RpcbindDaemonTest, AServerLeavesTheRegistrationOfTheOneThatReplacedIt) {
  const Published first = Publish("127.0.0.1:0");
  // Stopped, it takes no connections, so that the second one believes it dead.
  first.process->Signal(SIGSTOP);
  const Published second = Publish("127.0.0.1:0");
  first.process->Signal(SIGCONT);
  first.process->Signal(SIGTERM);
  EXPECT_EQ(first.process->Wait(), 0) << first.process->Err();
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 127.0.0.1" + PortOctets(second.port)}));
}

TEST_F(RpcbindDaemonTest, AServerRegistersAgainWhenTheDaemonWasStartedAgain) {
  const Published server = Publish("[::]:0", "1");
  const std::set<std::string> registered = Registered();
  ASSERT_EQ(registered.size(), 2u);
  // Quicker than it looks.
  server.process->Signal(SIGSTOP);
  StopDaemon();
  StartDaemon();
  EXPECT_EQ(Registered(), std::set<std::string>()) << "this daemon forgets nothing";
  server.process->Signal(SIGCONT);
  ASSERT_TRUE(WaitUntil([&] { return Registered() == registered; }));

  // And when it finds none at first.
  StopDaemon();
  ASSERT_TRUE(WaitUntil([&] { return server.process->Err().find("no rpcbind there: ") != std::string::npos; }));
  StartDaemon();
  ASSERT_TRUE(WaitUntil([&] { return server.process->Err().ends_with("registered with rpcbind again\n"); }));
  EXPECT_EQ(Registered(), registered);
  const Outcome ping = Run({"ping", "-c", "1", "127.0.0.1"});
  EXPECT_EQ(ping.code, 0) << ping.err;
  server.process->Signal(SIGTERM);
  EXPECT_EQ(server.process->Wait(), 0) << server.process->Err();
  EXPECT_EQ(Registered(), std::set<std::string>());
}

TEST_F(RpcbindDaemonTest, AServerThatIsStoppedWhileItLooksLeavesNothingBehind) {
  const Published server = Publish("127.0.0.1:0", "1");
  daemon_->Signal(SIGSTOP);
  // It has connected, and waits for an answer.
  ASSERT_TRUE(WaitUntil([&] { return ConnectionsWaiting() > 0; }));
  server.process->Signal(SIGTERM);
  daemon_->Signal(SIGCONT);
  EXPECT_EQ(server.process->Wait(), 0) << server.process->Err();
  EXPECT_EQ(server.process->Err(), "");
  EXPECT_EQ(Registered(), std::set<std::string>());
}

TEST_F(RpcbindDaemonTest, AServerComesBackWhenTheOneThatReplacedItHasEnded) {
  const Published first = Publish("127.0.0.1:0", "1");
  const std::set<std::string> registered = Registered();
  // Stopped, it takes no connections, so that the second one believes it dead.
  first.process->Signal(SIGSTOP);
  const Published second = Publish("127.0.0.1:0");
  first.process->Signal(SIGCONT);
  ASSERT_TRUE(
      WaitUntil([&] { return first.process->Err().find(": it is registered already: ") != std::string::npos; }));
  EXPECT_EQ(Registered(), (std::set<std::string>{"1 rdma 127.0.0.1" + PortOctets(second.port)}));
  second.process->Signal(SIGTERM);
  EXPECT_EQ(second.process->Wait(), 0) << second.process->Err();
  ASSERT_TRUE(WaitUntil([&] { return Registered() == registered; }));
  ASSERT_TRUE(WaitUntil([&] { return first.process->Err().ends_with("registered with rpcbind again\n"); }));
}

TEST_F(RpcbindDaemonTest, OtherVersionsAndOtherNetidsAreTold) {
  const Published server = Publish("127.0.0.1:0");
  const Outcome version = Run({"ping", "--version", "7", "127.0.0.1"});
  EXPECT_EQ(version.code, 1);
  EXPECT_EQ(
      version.err,
      "stagecoach: ping 127.0.0.1: look up program 0x20534347 version 7 by rpcbind at 127.0.0.1:111: for rdma the "
      "program is registered in version 1 only\n");
  const Outcome netid = Run({"ping", "--program", "100000", "--version", "4", "127.0.0.1"});
  EXPECT_EQ(netid.code, 1);
  EXPECT_NE(netid.err.find("the program is registered for 'tcp6', 'udp6', 'tcp', 'udp', 'local', not for rdma"),
            std::string::npos)
      << netid.err;
}

TEST_F(RpcbindDaemonTest, NfsIsLookedForAtItsWellKnownPort) {
  // Nobody has to be NFS for that: the server answers that it has no such program.
  const auto server = Start({"serve", "--listen", "127.0.0.1:20049", exported_.string()});
  ASSERT_TRUE(WaitUntil([&] { return server->Out().ends_with('\n') || !server->Running(); }));
  const std::vector<std::string> nfs = {"ping", "--program", "100003", "--version", "3", "127.0.0.1"};
  const auto expect = [&](const std::string& why) {
    const Outcome ping = Run(nfs);
    EXPECT_EQ(ping.code, 1);
    EXPECT_EQ(ping.err,
              "stagecoach: ping 127.0.0.1: look up program 100003 version 3 by rpcbind at 127.0.0.1:111: " + why +
                  "; trying port 20049, where program 100003 is by convention\n"
                  "stagecoach: ping 127.0.0.1:20049: RPC: program 100003 not available\n");
  };
  expect("the program is not registered there");
  StopDaemon();
  expect("no rpcbind there: Connection refused");
}

TEST_F(RpcbindDaemonTest, WithoutADaemonBothSaySo) {
  StopDaemon();
  const Outcome ping = Run({"ping", "127.0.0.1"});
  EXPECT_EQ(ping.code, 1);
  EXPECT_EQ(ping.err,
            "stagecoach: ping 127.0.0.1: look up program 0x20534347 version 1 by rpcbind at 127.0.0.1:111: no rpcbind "
            "there: Connection refused\n");
  const Outcome serve = Run({"serve", "--rpcbind", "--listen", "127.0.0.1:0", exported_.string()});
  EXPECT_EQ(serve.code, 1);
  EXPECT_EQ(serve.out, "");
  EXPECT_NE(serve.err.find(" with rpcbind at /run/rpcbind.sock: no rpcbind there: "), std::string::npos) << serve.err;
}

TEST_F(RpcbindDaemonTest, AServerThatIsStoppedWhileItRegistersLeavesNothingBehind) {
  daemon_->Signal(SIGSTOP);
  const auto server = Start({"serve", "--rpcbind", "--listen", "0.0.0.0:0", exported_.string()});
  // The last that it says before it turns to the daemon.
  ASSERT_TRUE(WaitUntil([&] { return server->Err().ends_with('\n') || !server->Running(); }));
  server->Signal(SIGTERM);
  daemon_->Signal(SIGCONT);
  EXPECT_EQ(server->Wait(), 0) << server->Err();
  EXPECT_EQ(server->Out(), "");
  EXPECT_EQ(Registered(), std::set<std::string>());
}

}  // namespace
}  // namespace stagecoach::tests

int main(int argc, char** argv) {
  namespace tests = stagecoach::tests;
  if (std::getenv(tests::kOwnNetwork) == nullptr) {
    tests::g_no_namespaces = tests::EnterOwnNetwork(argv);
  } else if (!tests::BringUpLoopback()) {
    tests::g_no_namespaces = "no loopback interface in a network namespace of its own";
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
