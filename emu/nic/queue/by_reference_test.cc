// Connections whose record layer has payload fetched from where it is: what completes when, and that memory which is
// given back to its program is not read any more.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "emu/llp/shm/reference.h"
#include "emu/llp/shm/shm_llp.h"
#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

// Two records, both of which are large enough.
constexpr size_t kSize = 50'000;

// Two ends, each in a loop, that read what the other refers to.
std::array<std::unique_ptr<ShmLlp>, 2> NewEnds(EpollLoop& loop_a, EpollLoop& loop_b) {
  LetSameUserRead();
  int sockets[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
  auto a = *OwnHalf::Create();
  auto b = *OwnHalf::Create();
  a.Offer(sockets[0]);
  b.Offer(sockets[1]);
  auto of_a = *PeerHalf::Map(a.fd());
  auto of_b = *PeerHalf::Map(b.fd());
  std::array<std::unique_ptr<ShmLlp>, 2> ends = {ShmLlp::Create(loop_a, std::move(a), std::move(of_b), sockets[0], {}),
                                                 ShmLlp::Create(loop_b, std::move(b), std::move(of_a), sockets[1], {})};
  for (const auto& end : ends) EXPECT_EQ(end->reference(), Reading::kPossible);
  return ends;
}

void Attach(TestHost& host, std::unique_ptr<Llp> llp, bool initiator) {
  host.ToInit();
  ConnectionSetup setup;
  setup.llp = std::move(llp);
  setup.initiator = initiator;
  setup.ird = setup.ord = 16;
  setup.rtr = ConnectionSetup::Rtr::kWrite;
  setup.observer = host.Observer();
  ASSERT_EQ(host.nic->AttachConnection(host.qp->qp_number(), std::move(setup)), 0);
}

TEST(ByReferenceTest, EveryOperationMovesWhatItShould) {
  TcpFabric fabric_a;
  TcpFabric fabric_b;
  TestHost a(fabric_a, "a");
  TestHost b(fabric_b, "b");
  auto [end_a, end_b] = NewEnds(fabric_a.epoll_loop(), fabric_b.epoll_loop());
  Attach(b, std::move(end_b), false);
  Attach(a, std::move(end_a), true);
  const TestBuffer from = a.Register(1 << 20, kFullAccess, 0x5a);
  for (size_t i = 0; i < from.bytes.size(); ++i) from.bytes[i] = static_cast<std::byte>(i * 7 + (i >> 9));
  const TestBuffer written = b.Register(1 << 20);
  const TestBuffer received = b.Register(1 << 20);
  const TestBuffer back = a.Register(1 << 20);
  ASSERT_EQ(b.Receive(1, {received.All()}), 0);
  ASSERT_EQ(a.Send(1, {from.All()}, PostOpcode::kWrite, written.region.stag, written.address()), 0);
  ASSERT_EQ(a.Send(2, {from.All()}), 0);
  ASSERT_TRUE(Eventually([&] { return a.Completed(2) && b.Completed(1); }));
  ASSERT_EQ(a.Send(3, {back.All()}, PostOpcode::kRead, written.region.stag, written.address()), 0);
  ASSERT_TRUE(Eventually([&] { return a.Completed(3); }));
  EXPECT_EQ(written.bytes, from.bytes);
  EXPECT_EQ(received.bytes, from.bytes);
  EXPECT_EQ(back.bytes, from.bytes);
  for (const WorkCompletion& each : a.completions) EXPECT_EQ(each.status, CompletionStatus::kSuccess);
}

// A NIC, and another end that fetches what the test has it fetch.
class OneNicTest : public testing::Test {
 protected:
  OneNicTest() {
    auto [end_a, end_b] = NewEnds(fabric_.epoll_loop(), fabric_.epoll_loop());
    peer_ = std::move(end_b);
    Attach(a_, std::move(end_a), true);
    EXPECT_EQ(a_.Send(1, {from_.All()}, PostOpcode::kWrite, 0x100, 0), 0);
  }
  ~OneNicTest() override { peer_.reset(); }

  RxResult Next(RecordHead* record) {
    RxResult result;
    EXPECT_TRUE(Eventually([&] {
      result = peer_->NextRecord(record);
      return result.status != RxStatus::kWouldBlock;
    }));
    return result;
  }
  // The next record that refers to memory is there, and was not fetched.
  void AwaitReference() {
    RecordHead record;
    while (Next(&record).status == RxStatus::kReady && record.length < ShmLlp::kLeastReferred) {
      ASSERT_EQ(peer_->Place(0, {}).status, RxStatus::kReady);
    }
  }
  RxResult Fetch() {
    RecordHead record;
    const RxResult next = Next(&record);
    if (next.status != RxStatus::kReady) return next;
    std::vector<std::byte> into(record.length);
    const MutableBytes to(into);
    return peer_->Place(0, {&to, 1});
  }

  TcpFabric fabric_;
  TestHost a_{fabric_, "a"};
  TestBuffer from_ = a_.Register(kSize, kFullAccess, 0x5a);
  std::unique_ptr<ShmLlp> peer_;
};

TEST_F(OneNicTest, AWriteIsCompleteWhenItWasFetched) {
  AwaitReference();
  size_t fetched = 0;
  while (fetched < kSize) {
    EXPECT_FALSE(a_.Completed(1));
    RecordHead record;
    ASSERT_EQ(Next(&record).status, RxStatus::kReady);
    fetched += record.length - 14;  // the header of a tagged segment
    ASSERT_EQ(Fetch().status, RxStatus::kReady);
  }
  ASSERT_TRUE(Eventually([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
}

TEST_F(OneNicTest, DeregistrationDoesNotWaitAndWhatIsReadLaterIsRefused) {
  AwaitReference();
  ASSERT_EQ(a_.nic->DeregisterRegion(from_.region.handle), 0);
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
  ASSERT_TRUE(Eventually([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kLocalProtectionError);
}

TEST_F(OneNicTest, WorkThatIsGivenBackTakesItsMemoryAlong) {
  AwaitReference();
  ASSERT_EQ(a_.ToState(QpState::kErr), 0);
  ASSERT_TRUE(Eventually([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kFlushed);
  EXPECT_EQ(Fetch().status, RxStatus::kReset);
}

TEST_F(OneNicTest, APeerThatGoesGivesTheMemoryBack) {
  AwaitReference();
  peer_.reset();
  ASSERT_TRUE(Eventually([&] { return a_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kFlushed);
  EXPECT_EQ(a_.nic->DeregisterRegion(from_.region.handle), 0);
}

}  // namespace
}  // namespace stagecoach::emu
