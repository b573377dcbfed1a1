// Programs of one host that share memory, and what is said of it: of two users, in two containers, and where memory is
// shared with nobody or cannot be had. There is no room in /dev/shm, which nothing here needs.
#include <sys/mount.h>

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

constexpr const char* kOtherUser =
    "the other end is of another user, and this one was told to share memory with its own user alone";
// How peer.c ends that cannot be where it is to be.
constexpr int kCannotBe = 77;

bool g_is_full = false;

// Of this process and its children alone.
bool FillDevShm() {
  if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", "/dev/shm", "tmpfs", 0, "size=4k,mode=1777") != 0) {
    return false;
  }
  std::ofstream file("/dev/shm/all of it");
  for (int i = 0; i < 100 && file << std::string(4096, 'x') << std::flush; ++i) continue;
  return !file;
}

// One of the two programs: where it is, and what it was told.
struct Side {
  std::string setting{};  // of peer.c: "PEER_USER=65534"
  std::vector<std::string> options{};
};

class NeighboursTest : public DropInTest {
 protected:
  // True: both have run, whatever has become of them.
  void Run(const Side& server, const Side& client) {
    const uint16_t port = FreePort();
    server_ = StartAt(server, "serve PORT 1", port);
    ASSERT_TRUE(WaitUntil([&] { return server_->Out().starts_with("listening\n") || !server_->Running(); }));
    if (!server_->Running() && server_->Wait() == kCannotBe) GTEST_SKIP() << server_->Err();
    ASSERT_TRUE(server_->Running()) << server_->Err();
    client_ = StartAt(client, "orderly PORT", port);
    const auto code = client_->Wait();
    if (code == kCannotBe) GTEST_SKIP() << client_->Err();
    ASSERT_TRUE(code);
    client_code_ = *code;
  }
  // They have talked, and this is what each says.
  void ExpectTalk(const Side& server, const Side& client, const std::string& of_server, const std::string& of_client) {
    Run(server, client);
    if (IsSkipped() || HasFatalFailure()) return;
    EXPECT_EQ(client_code_, 0) << client_->Err();
    EXPECT_EQ(server_->Wait(), 0) << server_->Err();
    EXPECT_NE(server_->Err().find(" is carried by " + of_server), std::string::npos) << server_->Err();
    EXPECT_NE(client_->Err().find(" is carried by " + of_client), std::string::npos) << client_->Err();
  }
  void ExpectShared(const Side& server, const Side& client) { ExpectTalk(server, client, "shm", "shm"); }

  std::unique_ptr<Process> server_;
  std::unique_ptr<Process> client_;
  int client_code_ = -1;

 private:
  std::unique_ptr<Process> StartAt(const Side& side, const std::string& what, uint16_t port) {
    const std::string name = side.setting.substr(0, side.setting.find('='));
    if (!name.empty()) ::setenv(name.c_str(), side.setting.substr(name.size() + 1).c_str(), 1);
    std::vector<std::string> options = side.options;
    options.push_back("--verbose");
    auto process = Start((std::filesystem::current_path() / "tests/dropin/peer").string() + " " + what, port, options);
    if (!name.empty()) ::unsetenv(name.c_str());
    return process;
  }
};

TEST_F(NeighboursTest, AFullDevShmChangesNothing) {
  if (!g_is_full) GTEST_SKIP() << "no mounts of its own here";
  ExpectShared({}, {});
}

TEST_F(NeighboursTest, WhoIsToldToUseTcpSaysSo) {
  ExpectTalk({}, {.options = {"--backend", "tcp"}}, "tcp: the other end did not ask for shared memory",
             "tcp: this end was told to use TCP");
  ExpectTalk({.options = {"--backend", "tcp"}}, {}, "tcp: this end was told to use TCP",
             "tcp: the other end does not offer shared memory");
}

// --- Users ---

class UsersTest : public NeighboursTest {
 protected:
  void SetUp() override {
    NeighboursTest::SetUp();
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  }
  const std::string other_ = "PEER_USER=65534";
};

TEST_F(UsersTest, TwoShareMemory) {
  ExpectShared({.setting = other_}, {});
  ExpectShared({}, {.setting = other_});
  ExpectShared({.setting = other_, .options = {"--shm", "same-user"}},
               {.setting = other_, .options = {"--shm", "same-user"}});
}

TEST_F(UsersTest, ACallerThatSharesWithItsOwnAloneGoesByTcp) {
  ExpectTalk({.setting = other_}, {.options = {"--shm", "same-user"}},
             "tcp: the other end did not ask for shared memory", std::string("tcp: ") + kOtherUser);
}

TEST_F(UsersTest, AListenerThatSharesWithItsOwnAloneGoesByTcp) {
  ExpectTalk({.options = {"--shm", "same-user"}}, {.setting = other_}, std::string("tcp: ") + kOtherUser,
             "tcp: the other end did not take the offer of shared memory");
}

TEST_F(UsersTest, WhoInsistsAsWellDoesNotConnect) {
  Run({.setting = other_}, {.options = {"--shm", "same-user", "--backend", "shm"}});
  if (IsSkipped() || HasFatalFailure()) return;
  EXPECT_NE(client_code_, 0);
  EXPECT_NE(client_->Err().find("stagecoach: no connection from "), std::string::npos) << client_->Err();
  EXPECT_NE(client_->Err().find(std::string(" by shared memory: ") + kOtherUser + "\n"), std::string::npos)
      << client_->Err();
}

// --- Containers, which share a network namespace ---

TEST_F(NeighboursTest, ProcessesOfTwoPidNamespacesShareMemory) {
  ExpectShared({.setting = "PEER_CONTAINER=pid"}, {.setting = "PEER_CONTAINER=pid"});
}

TEST_F(NeighboursTest, AProcessOfTheHostSharesMemoryWithOneOfAPidNamespace) {
  ExpectShared({}, {.setting = "PEER_CONTAINER=pid"});
  ExpectShared({.setting = "PEER_CONTAINER=pid"}, {});
}

TEST_F(NeighboursTest, ProcessesOfTwoUserNamespacesShareMemory) {
  ExpectShared({.setting = "PEER_CONTAINER=user"}, {.setting = "PEER_CONTAINER=user"});
  ExpectShared({.setting = "PEER_CONTAINER=user", .options = {"--shm", "same-user"}}, {});
}

// --- Want ---

// Memory that is shared counts as a file, and who makes a larger one than it may is killed (setrlimit(2)).
TEST_F(NeighboursTest, AProgramWhoseFilesMayNotBeLargeGoesByTcp) {
  const std::string own = "tcp: the system does not let this process share memory";
  ExpectTalk({}, {.setting = "PEER_FILE_SIZE=1000"}, "tcp: the other end did not ask for shared memory", own);
  ExpectTalk({.setting = "PEER_FILE_SIZE=1000"}, {}, own, "tcp: the other end did not take the offer of shared memory");
}

}  // namespace
}  // namespace stagecoach::tests

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // Apart from the processes of other tests.
  ::setenv("STAGECOACH_PORTS", "23780+16", 0);
  stagecoach::tests::g_is_full = stagecoach::tests::FillDevShm();
  return RUN_ALL_TESTS();
}
