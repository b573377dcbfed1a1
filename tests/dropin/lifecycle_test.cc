// Programs that fork, exec, are killed or end without a word: what their peers hear of it, and what is left of them.
//
// Real processes: peer.c, which is what a user's program is, and Debian's. They run in namespaces of the test's own
// where these can be had, so that whatever is left there is theirs: listening ports, names, files, processes.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <ostream>

#include "tests/dropin/dropin_fixture.h"
#include "tests/support/loopback.h"

namespace stagecoach::tests {
namespace {

// Whether this process has its own network and /dev/shm.
bool g_alone = false;

void WriteFile(const char* path, const std::string& text) {
  std::ofstream(path) << text;
}

bool TryToEnterNamespaces() {
  const uid_t user = ::geteuid();
  const gid_t group = ::getegid();
  if (::unshare(CLONE_NEWNET | CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS) != 0) return false;
    WriteFile("/proc/self/setgroups", "deny");
    WriteFile("/proc/self/uid_map", "0 " + std::to_string(user) + " 1");
    WriteFile("/proc/self/gid_map", "0 " + std::to_string(group) + " 1");
  }
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("none", "/dev/shm", "tmpfs", 0, nullptr) == 0 && BringUpLoopback();
}

// Tried by a child first: who has entered some of it cannot go back.
bool EnterOwnNamespaces() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(TryToEnterNamespaces() ? 0 : 1);
  int status = -1;
  return child > 0 && ::waitpid(child, &status, 0) == child && status == 0 && TryToEnterNamespaces();
}

size_t CountLines(const std::string& text, std::string_view line) {
  std::istringstream in(text);
  size_t count = 0;
  for (std::string each; std::getline(in, each);) count += each == line ? 1 : 0;
  return count;
}

class LifecycleTest : public DropInTest {
 protected:
  void SetUp() override {
    DropInTest::SetUp();
    if (const char* const before = std::getenv("TMPDIR")) temporary_before_ = before;
    std::filesystem::create_directory(temporary());
    ::setenv("TMPDIR", temporary().c_str(), 1);
  }
  void TearDown() override {
    client_.reset();
    server_.reset();
    ExpectNothingLeft();
    ::unsetenv("TMPDIR");
    if (temporary_before_) ::setenv("TMPDIR", temporary_before_->c_str(), 1);
    DropInTest::TearDown();
  }

  std::string temporary() const { return base_ + "/tmp"; }
  static std::string Peer() { return (std::filesystem::current_path() / "tests/dropin/peer").string(); }

  // A server that ends when `connections` have.
  void StartServer(int connections) {
    port_ = FreePort();
    server_ = Start(Peer() + " serve PORT " + std::to_string(connections), port_);
    ASSERT_TRUE(WaitUntil([&] { return Says(*server_, "listening") || !server_->Running(); }));
    ASSERT_TRUE(server_->Running()) << server_->Err();
  }
  void StartClient(const std::string& mode) { client_ = Start(Peer() + " " + mode + " PORT", port_); }
  static bool Says(const Process& process, std::string_view line) { return CountLines(process.Out(), line) > 0; }

  // The server has heard of the end of each of its connections, and has got back what it had posted for it.
  void ExpectServerHeard(size_t connections) {
    // Sooner than any time-out that would tell it in the end; much longer than it takes on a busy machine.
    constexpr auto kAtOnce = std::chrono::seconds(20);
    EXPECT_EQ(server_->Wait(kAtOnce), 0) << server_->Out() << server_->Err();
    EXPECT_EQ(CountLines(server_->Out(), "established"), connections) << server_->Out();
    EXPECT_EQ(CountLines(server_->Out(), "disconnected"), connections) << server_->Out();
    EXPECT_TRUE(Says(*server_, "all over")) << server_->Out();
    EXPECT_EQ(server_->Err(), "");
  }

  void ExpectNothingLeft() {
    // This process is the parent of whoever has lost his. Each has been waited for, or ends by itself and soon.
    EXPECT_TRUE(WaitUntil([] {
      while (::waitpid(-1, nullptr, WNOHANG) > 0) continue;
      return errno == ECHILD;
    })) << "a process is left";
    ExpectNoTraces();
  }
  // Of what is no process.
  void ExpectNoTraces() {
    EXPECT_TRUE(std::filesystem::is_empty(temporary()));
    if (!g_alone) return;
    EXPECT_TRUE(std::filesystem::is_empty("/dev/shm"));
    EXPECT_FALSE(AnyLine("/proc/self/net/unix", [](const std::string& line) {
      return line.find("@stagecoach") != std::string::npos;
    })) << "a name is left";
    const auto listens = [](const std::string& line) { return line.find(" 0A ") != std::string::npos; };
    EXPECT_FALSE(AnyLine("/proc/self/net/tcp", listens) || AnyLine("/proc/self/net/tcp6", listens)) << "a port is left";
  }

  std::optional<std::string> temporary_before_;
  uint16_t port_ = 0;
  std::unique_ptr<Process> server_;
  std::unique_ptr<Process> client_;
};

// --- Programs that end ---

struct End {
  std::string mode;  // of peer.c
  int code = 0;      // of its exit; minus the signal
  std::string last_message = "hello";
};
void PrintTo(const End& end, std::ostream* out) {
  *out << end.mode;
}

std::string NameOf(std::string mode) {
  std::replace_if(
      mode.begin(), mode.end(), [](char c) { return c == '-'; }, '_');
  return mode;
}

class Ends : public LifecycleTest, public ::testing::WithParamInterface<End> {};

TEST_P(Ends, ThePeerHearsOfItAtOnce) {
  StartServer(1);
  ASSERT_FALSE(HasFatalFailure());
  StartClient(GetParam().mode);
  EXPECT_EQ(client_->Wait(), GetParam().code) << client_->Err();
  EXPECT_EQ(client_->Err(), "");
  ExpectServerHeard(1);
  EXPECT_TRUE(Says(*server_, "message " + GetParam().last_message)) << server_->Out();
}

INSTANTIATE_TEST_SUITE_P(Without, Ends,
                         testing::Values(End{"exit", 7}, End{"_exit", 7}, End{"abort", -SIGABRT}, End{"segv", -SIGSEGV},
                                         End{"segv-handler", 42}, End{"atexit", 0, "last-words"},
                                         End{"atexit-only-words", 0, "last-words"}),
                         [](const auto& info) { return NameOf(info.param.mode); });

// What a device of hardware or the kernel would have sent by then.
TEST_F(LifecycleTest, WhatAProgramSaysBeforeItExitsIsHeard) {
  for (int i = 0; i < 5; ++i) {
    port_ = FreePort();
    server_ = Serve(Peer() + " refuse PORT", port_);
    ASSERT_FALSE(HasFailure());
    StartClient("be-refused");
    EXPECT_EQ(client_->Wait(), 0) << client_->Err();
    EXPECT_EQ(server_->Wait(), 0) << server_->Err();
  }
}

class Killed : public LifecycleTest, public ::testing::WithParamInterface<int> {};

TEST_P(Killed, ThePeerHearsOfItAtOnce) {
  StartServer(1);
  ASSERT_FALSE(HasFatalFailure());
  StartClient("hang");
  ASSERT_TRUE(WaitUntil([&] { return Says(*client_, "ready"); })) << client_->Err();
  client_->Signal(GetParam());
  EXPECT_EQ(client_->Wait(), -GetParam());
  ExpectServerHeard(1);
}

INSTANTIATE_TEST_SUITE_P(By, Killed, testing::Values(SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGSEGV, SIGUSR1),
                         [](const auto& info) { return std::string("SIG") + ::sigabbrev_np(info.param); });

TEST_F(LifecycleTest, AProgramsOwnHandlerRunsOnItsOwnThread) {
  StartServer(1);
  ASSERT_FALSE(HasFatalFailure());
  StartClient("terminate");
  ASSERT_TRUE(WaitUntil([&] { return Says(*client_, "ready"); })) << client_->Err();
  client_->Signal(SIGTERM);
  EXPECT_EQ(client_->Wait(), 3) << client_->Err();
  ExpectServerHeard(1);
}

// A child that does nothing has copies of its parent's descriptors; the connection ends with the parent all the same.
TEST_F(LifecycleTest, APeerHearsOfAKilledProgramWhoseChildLivesOn) {
  StartServer(1);
  ASSERT_FALSE(HasFatalFailure());
  StartClient("fork-hang");
  const auto child = [&] {
    const std::string out = client_->Out();
    return out.starts_with("child ") && out.ends_with('\n') ? std::atoi(out.c_str() + 6) : 0;
  };
  ASSERT_TRUE(WaitUntil([&] { return child() > 0; })) << client_->Err();
  client_->Signal(SIGKILL);
  EXPECT_EQ(client_->Wait(), -SIGKILL);
  ExpectServerHeard(1);
  ExpectNoTraces();
  EXPECT_EQ(::kill(child(), SIGKILL), 0) << "it has ended before";
}

// With the default for SIGPIPE, which ends a process.
TEST_F(LifecycleTest, WritingToAPeerThatWasKilledIsACompletionAndNoSignal) {
  StartServer(1);
  ASSERT_FALSE(HasFatalFailure());
  StartClient("pump");
  ASSERT_TRUE(WaitUntil([&] { return Says(*client_, "ready"); })) << client_->Err();
  server_->Signal(SIGKILL);
  EXPECT_EQ(client_->Wait(), 0) << client_->Err();
  EXPECT_TRUE(Says(*client_, "disconnected"));
}

// --- Programs with children, handlers and threads ---

struct Life {
  std::string mode;
  size_t connections = 1;
};
void PrintTo(const Life& life, std::ostream* out) {
  *out << life.mode;
}

class Lives : public LifecycleTest, public ::testing::WithParamInterface<Life> {};

TEST_P(Lives, AndItsConnectionsAreWhole) {
  StartServer(static_cast<int>(GetParam().connections));
  ASSERT_FALSE(HasFatalFailure());
  StartClient(GetParam().mode);
  EXPECT_EQ(client_->Wait(), 0) << client_->Err();
  ExpectServerHeard(GetParam().connections);
  // Neither has it said anything that it was not asked for.
  EXPECT_EQ(client_->Out(), "");
  EXPECT_EQ(client_->Err(), "");
}

INSTANTIATE_TEST_SUITE_P(AProgram, Lives,
                         testing::Values(Life{"orderly"}, Life{"fork-exit"}, Life{"fork-busy"}, Life{"fork-device", 2},
                                         Life{"fork-exec", 2}, Life{"vfork-exec", 2}, Life{"spawn", 2}, Life{"exec", 2},
                                         Life{"system"}, Life{"daemon-first"}, Life{"daemon", 2}, Life{"interrupt"},
                                         Life{"restart"}, Life{"cancel"}, Life{"hygiene"}),
                         [](const auto& info) { return NameOf(info.param.mode); });

// --- Debian's ---

// A server for one client after the other loses some of them.
TEST_F(LifecycleTest, RpingsServerOutlivesItsClients) {
  const uint16_t port = FreePort();
  const auto server = Serve("rping -s -P -a 127.0.0.1 -p PORT", port);
  ASSERT_FALSE(HasFailure());
  for (int i = 0; i < 3; ++i) {
    const auto client = Start("rping -c -v -a 127.0.0.1 -p PORT", port);
    ASSERT_TRUE(WaitUntil([&] { return client->Out().find("ping data") != std::string::npos; })) << client->Err();
    client->Signal(i == 0 ? SIGKILL : SIGTERM);
    EXPECT_TRUE(client->Wait().has_value());
  }
  const auto client = Start("rping -c -C 5 -V -a 127.0.0.1 -p PORT", port);
  EXPECT_TRUE(HasEndedWell(client->Wait(), *client)) << client->Err();
  EXPECT_TRUE(server->Running()) << server->Err();
}

// QPs that were connected by hand hear of a dead peer by what they send: retries are exceeded. So the client dies with
// a message of the server's before it; with its own under way the server would wait for ever, here and on hardware.
TEST_F(LifecycleTest, PingpongsServerEndsWithItsClient) {
  if (!OnRoce()) GTEST_SKIP() << "skipped: iWARP has no QPs that are connected by hand";
  const uint16_t port = FreePort();
  const std::string command = "ibv_rc_pingpong -g 0 -e -n 100000000 -p PORT";
  const auto server = Serve(command, port);
  ASSERT_FALSE(HasFailure());
  const auto client = Start(command + " 127.0.0.1", port, {"--rule", "stall message=100 direction=received"});
  ASSERT_TRUE(WaitUntil([&] { return client->Err().find("fired") != std::string::npos; })) << client->Err();
  client->Signal(SIGKILL);
  EXPECT_EQ(server->Wait(), 1);
  EXPECT_NE(server->Err().find("(12) for wr_id"), std::string::npos) << server->Err();  // IBV_WC_RETRY_EXC_ERR
}

}  // namespace
}  // namespace stagecoach::tests

int main(int argc, char** argv) {
  using namespace stagecoach::tests;
  ::testing::InitGoogleTest(&argc, argv);
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  g_alone = EnterOwnNamespaces();
  if (!g_alone) std::printf("no namespaces of its own here: what is left in the network is not looked at\n");
  return RUN_ALL_TESTS();
}
