// A peer's process that is killed, at any point: what is seen of it, within a bound, and what is left of it. Whatever
// carries the records, it is the same.
//
// Not in simulation.

#include <sys/socket.h>

#include "base/prng.h"
#include "verbs_shim/tests/party_test_support.h"

namespace stagecoach::verbs {
namespace {

using PeerDeathTest = PartyTest;

TEST_F(PeerDeathTest, ACallerThatHasNotAskedYetIsNotMissed) {
  Begin(Who::kPeerCalls);
  EXPECT_EQ(Reach({.point = "resolved"}), nullptr);
  process_->Kill();
  ExpectGood();
  EXPECT_EQ(party_->conversations().size(), 1u);
}

TEST_F(PeerDeathTest, ACallerThatIsGoneWhenItIsAcceptedDoesNotConnect) {
  Begin(Who::kPeerCalls);
  Start({.point = "asked"});
  uint16_t asked = 1;
  ASSERT_EQ(recv(process_->socket(), &asked, sizeof asked, MSG_WAITALL), ssize_t{sizeof asked});
  process_->Kill();
  // It may not have been heard at all.
  ExpectGood();
  for (Conversation& each : party_->conversations()) {
    ASSERT_NO_FATAL_FAILURE(ExpectEnded(each));
  }
}

TEST_F(PeerDeathTest, AListenerThatIsGoneWhenItIsCalledDoesNotAnswer) {
  Begin(Who::kPeerListens);
  Start({.point = "listening"});
  const auto port = Hear();
  ASSERT_TRUE(port);
  process_->Kill();
  party_->Call(*port);
  ASSERT_TRUE(party_->Until([&] { return !party_->conversations().empty(); }));
  Conversation& call = party_->conversations().front();
  ASSERT_NO_FATAL_FAILURE(ExpectEnded(call));
  EXPECT_FALSE(call.is_established());
  EXPECT_EQ(*call.end(), RDMA_CM_EVENT_REJECTED) << rdma_event_str(*call.end());
  ExpectGood();
}

TEST_F(PeerDeathTest, AListenerThatDiesBeforeItAcceptsDoesNotConnect) {
  Begin(Who::kPeerListens);
  Conversation* const call = Reach({.point = "asked"});
  ASSERT_NE(call, nullptr);
  EXPECT_FALSE(call->end());
  process_->Kill();
  ASSERT_NO_FATAL_FAILURE(ExpectEnded(*call));
  EXPECT_FALSE(call->is_established());
  EXPECT_EQ(*call->end(), RDMA_CM_EVENT_REJECTED) << rdma_event_str(*call->end());
  ExpectGood();
}

class ConnectedPeerDeathTest : public PartyTest, public testing::WithParamInterface<Who> {
 protected:
  void SetUp() override {
    PartyTest::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) Begin(GetParam());
  }
};

TEST_P(ConnectedPeerDeathTest, ReceivesComeBack) {
  Conversation* const silent = Meet({.point = "met", .messages = 0});
  process_->Kill();
  ExpectDisconnected(*silent);
  ExpectGood();
}

TEST_P(ConnectedPeerDeathTest, ThatConnectsAndIsKilledAtOnce) {
  Start({.point = "met"});
  ASSERT_TRUE(party_->Until([&] { return !party_->conversations().empty(); }));
  process_->Kill();
  ExpectEnded(party_->conversations().front());
  ExpectGood();
}

TEST_P(ConnectedPeerDeathTest, InTheMiddleOfEverything) {
  for (const size_t done : {1, 2, 5, 17, 50, 200, 700}) {
    Conversation* const busy = Meet({.point = "met"});
    ASSERT_TRUE(party_->Until([&] { return busy->done() >= done; })) << busy->done();
    process_->Kill();
    ASSERT_NO_FATAL_FAILURE(ExpectDisconnected(*busy)) << done;
  }
  ExpectGood();
}

TEST_P(ConnectedPeerDeathTest, WhileItStandsStill) {
  Conversation* const busy = Meet({.point = "met"});
  ExpectTraffic(*busy);
  process_->Stop();
  ASSERT_NO_FATAL_FAILURE(ExpectNoMoreRoom(*busy));
  EXPECT_FALSE(busy->end());
  process_->Kill();
  ExpectDisconnected(*busy);
  ExpectGood();
}

// It has children that live on: they have nothing of the connection.
TEST_P(ConnectedPeerDeathTest, AndHasAChild) {
  Conversation* const busy = Meet({.point = "met"});
  ExpectTraffic(*busy);
  Command('c');
  ASSERT_TRUE(Hear());
  process_->Kill();
  ExpectDisconnected(*busy);
  ExpectGood();
}

TEST_P(ConnectedPeerDeathTest, AtAnyTime) {
  Prng prng(11);
  for (int i = 0; i < 25; ++i) {
    const size_t known = party_->conversations().size();
    Start({.point = "met", .life = static_cast<int>(prng.Between(1, 60'000))});
    while (Hear()) continue;
    EXPECT_EQ(process_->Wait(), -1) << "it was killed";
    if (GetParam() == Who::kPeerListens && party_->conversations().size() > known) {
      ASSERT_NO_FATAL_FAILURE(ExpectEnded(party_->conversations().back()));
    }
  }
  ExpectGood();
  for (Conversation& each : party_->conversations()) {
    ASSERT_NO_FATAL_FAILURE(ExpectEnded(each));
  }
}

INSTANTIATE_TEST_SUITE_P(A, ConnectedPeerDeathTest, testing::Values(Who::kPeerCalls, Who::kPeerListens),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  return stagecoach::verbs::RunPartyTests(argc, argv);
}
