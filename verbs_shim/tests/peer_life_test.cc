// A peer's process that stands still, forks, becomes another program, or has no descriptors left; and two that have
// nothing to do. Whatever carries the records, it is the same.
//
// Not in simulation.

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "verbs_shim/tests/party_test_support.h"

namespace stagecoach::verbs {
namespace {

class PeerLifeTest : public PartyTest, public testing::WithParamInterface<Who> {
 protected:
  void SetUp() override {
    PartyTest::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) Begin(GetParam());
  }
};

// Longer than a QP of an adapter would be waited for with what rdma_cm asks for.
TEST_P(PeerLifeTest, OneThatStandsStillIsWaitedFor) {
  Conversation* const busy = Meet({.point = "met"});
  ExpectTraffic(*busy);
  process_->Stop();
  ASSERT_NO_FATAL_FAILURE(ExpectNoMoreRoom(*busy));
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(party_->Until([&] {
    return busy->end() || !busy->failures().empty() ||
           std::chrono::steady_clock::now() - begin > std::chrono::seconds(3);
  }));
  EXPECT_FALSE(busy->end());
  EXPECT_TRUE(busy->failures().empty());
  process_->Continue();
  ExpectTraffic(*busy);
  EXPECT_TRUE(busy->failures().empty());
}

TEST_P(PeerLifeTest, OneThatForksGoesOn) {
  Conversation* const busy = Meet({.point = "met"});
  for (int i = 0; i < 5; ++i) {
    ExpectTraffic(*busy);
    Command('f');
    ASSERT_TRUE(Hear());
  }
  ExpectTraffic(*busy);
  EXPECT_TRUE(busy->failures().empty());
}

TEST_P(PeerLifeTest, WhoForksHereGoesOn) {
  Conversation* const busy = Meet({.point = "met"});
  for (int i = 0; i < 5; ++i) {
    ExpectTraffic(*busy);
    const pid_t child = fork();
    if (child == 0) _exit(0);
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  ExpectTraffic(*busy);
  EXPECT_TRUE(busy->failures().empty());
}

TEST_P(PeerLifeTest, OneThatBecomesAnotherProgramHasEnded) {
  Conversation* const busy = Meet({.point = "met"});
  ExpectTraffic(*busy);
  Command('e');
  ExpectDisconnected(*busy);
  char echo = 'x';
  ASSERT_EQ(send(process_->socket(), &echo, 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(shutdown(process_->socket(), SHUT_WR), 0);
  EXPECT_EQ(process_->Wait(), 0) << "the other program runs";
  ExpectGood();
}

// --- Descriptors ---

// Whatever it is that there is no descriptor for: the connection comes up, by shared memory or by TCP, or fails. A
// listener may be waiting for one to take the call with, as any is, and who calls from an InfiniBand device tries again
// for as long as rdma_cm does: they are not waited for.
TEST_P(PeerLifeTest, OneWithoutDescriptorsConnectsOrFails) {
  constexpr int kWaits = -1;
  std::map<int, int> ends;
  ASSERT_NO_FATAL_FAILURE(ExpectGood());
  const bool is_iwarp = IsIwarp(party_->conversations().back().id());
  for (int left = 0; left <= 14; ++left) {
    SCOPED_TRACE(left);
    const size_t known = party_->conversations().size();
    Start({.point = "finished", .messages = 2 * kMuch, .descriptors = left});
    const auto begin = std::chrono::steady_clock::now();
    const bool may_wait = GetParam() == Who::kPeerListens || !is_iwarp;
    pollfd gone{.fd = process_->socket(), .events = POLLRDHUP, .revents = 0};
    ASSERT_TRUE(party_->Until([&] {
      return poll(&gone, 1, 0) == 1 ||
             (may_wait && std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(500));
    }));
    if (gone.revents == 0) process_->Kill();
    const int end = gone.revents == 0 ? kWaits : process_->Wait();
    ++ends[end];
    EXPECT_TRUE(end == 0 || end == kPeerWasRefused || end == kWaits) << end;
    if (party_->conversations().size() == known) continue;
    ASSERT_NO_FATAL_FAILURE(ExpectEnded(party_->conversations().back()));
  }
  EXPECT_GT(ends[0], 0);
  EXPECT_GT(ends[kPeerWasRefused] + ends[kWaits], 0) << "there was no want";
  ExpectGood();
}

// --- Nothing to do ---

// What the threads of a process have had of the processors: time, time until it came, and turns.
std::string TurnsOf(pid_t process) {
  std::string turns;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task")) {
    std::string line;
    std::getline(std::ifstream(task.path() / "schedstat"), line);
    turns += task.path().filename().string() + ": " + line + "\n";
  }
  return turns;
}

TEST_P(PeerLifeTest, TwoThatHaveNothingToDoDoNothing) {
  Begin(GetParam(), kMuch);
  Conversation* const quiet = Meet({.point = "quiet", .messages = kMuch});
  ASSERT_TRUE(party_->Until([&] { return quiet->is_quiet(); }));
  // This process waits for the other to end, which it does not.
  pollfd gone{.fd = process_->socket(), .events = POLLIN, .revents = 0};
  bool has_rested = false;
  for (int i = 0; i < 10 && !has_rested; ++i) {
    const std::string before = TurnsOf(process_->pid());
    ASSERT_EQ(poll(&gone, 1, 1500), 0);
    has_rested = TurnsOf(process_->pid()) == before;
  }
  EXPECT_TRUE(has_rested) << TurnsOf(process_->pid());
}

INSTANTIATE_TEST_SUITE_P(A, PeerLifeTest, testing::Values(Who::kPeerCalls, Who::kPeerListens),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  return stagecoach::verbs::RunPartyTests(argc, argv);
}
