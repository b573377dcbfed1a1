// Objects, limits, dependencies, and what may be posted in which state.
#include "emu/nic/nic.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>
#include <vector>

#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {
namespace {

class NicTest : public ::testing::Test {
 protected:
  QpCreate QpOf(CompletionQueue* cq) {
    QpCreate create;
    create.pd = host_.pd;
    create.send_cq = create.receive_cq = cq;
    create.capabilities = {4, 4, 2, 2, 32};
    return create;
  }
  std::vector<CompletionStatus> Statuses() {
    host_.Completed(0);
    std::vector<CompletionStatus> statuses;
    for (const WorkCompletion& completion : host_.completions) statuses.push_back(completion.status);
    return statuses;
  }

  SimPair pair_;
  TestHost host_{pair_.fabric_a,
                 "a",
                 [] {
                   DeviceProfile profile;
                   profile.max_pd = 2;
                   profile.max_cq = 2;
                   profile.max_qp = 2;
                   return profile;
                 }(),
                 nullptr,
                 64,
                 {4, 4, 2, 2, 32}};
  Nic& nic_ = *host_.nic;
};

TEST_F(NicTest, LimitsAreEnforced) {
  const uint32_t pd = *nic_.AllocatePd(*host_.context);
  EXPECT_EQ(nic_.AllocatePd(*host_.context), Err(ENOMEM));
  EXPECT_EQ(nic_.DeallocatePd(pd), 0);
  EXPECT_TRUE(nic_.AllocatePd(*host_.context).has_value());

  EXPECT_EQ(nic_.CreateCq(*host_.context, 0, nullptr, nullptr), Err(EINVAL));
  EXPECT_EQ(nic_.CreateCq(*host_.context, nic_.profile().max_cqe + 1, nullptr, nullptr), Err(EINVAL));
  ASSERT_TRUE(nic_.CreateCq(*host_.context, 1, nullptr, nullptr).has_value());
  EXPECT_EQ(nic_.CreateCq(*host_.context, 1, nullptr, nullptr), Err(ENOMEM));

  QpCreate create = QpOf(host_.cq);
  create.capabilities.max_send_wr = nic_.profile().max_qp_wr + 1;
  EXPECT_EQ(nic_.CreateQp(*host_.context, create), Err(EINVAL));
  create = QpOf(host_.cq);
  create.capabilities.max_inline = nic_.profile().max_inline + 1;
  EXPECT_EQ(nic_.CreateQp(*host_.context, create), Err(EINVAL));
  create = QpOf(host_.cq);
  create.capabilities.max_receive_sge = nic_.profile().max_sge + 1;
  EXPECT_EQ(nic_.CreateQp(*host_.context, create), Err(EINVAL));
  ASSERT_TRUE(nic_.CreateQp(*host_.context, QpOf(host_.cq)).has_value());
  EXPECT_EQ(nic_.CreateQp(*host_.context, QpOf(host_.cq)), Err(ENOMEM));
}

// Of the numbers that a process has, two are the port's own.
TEST_F(NicTest, AsManyQpsAsThereAreNumbersAndNoMore) {
  DeviceProfile profile = RoceProfile();
  TestHost host(pair_.fabric_b, "roce", profile, nullptr, 4, {1, 1, 1, 1, 0});
  QpCreate create;
  create.pd = host.pd;
  create.send_cq = create.receive_cq = host.cq;
  std::vector<QueuePair*> qps;
  std::set<uint32_t> numbers{host.qp->qp_number()};
  while (qps.size() + 1 < profile.max_qp - 2) {
    const auto qp = host.nic->CreateQp(*host.context, create);
    ASSERT_TRUE(qp.has_value()) << qps.size();
    qps.push_back(*qp);
    ASSERT_TRUE(numbers.insert((*qp)->qp_number()).second);
  }
  EXPECT_GE(*numbers.begin(), 2u);
  EXPECT_LE(*numbers.rbegin(), 0xffffu);
  EXPECT_EQ(host.nic->CreateQp(*host.context, create), Err(ENOMEM));
  const uint32_t gone = qps[1000]->qp_number();
  ASSERT_EQ(host.nic->DestroyQp(qps[1000]->handle()), 0);
  const auto again = host.nic->CreateQp(*host.context, create);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ((*again)->qp_number(), gone);
}

// Programs send inline what they did not ask room for (rdma_xclient).
TEST_F(NicTest, InlineDataHaveAtLeastTheRoomOfTheListOfBuffers) {
  QpCreate create = QpOf(host_.cq);
  create.capabilities.max_send_sge = 2;
  create.capabilities.max_inline = 0;
  const auto qp = nic_.CreateQp(*host_.context, create);
  ASSERT_TRUE(qp.has_value());
  EXPECT_EQ((*qp)->capabilities().max_inline, 32u);
}

TEST_F(NicTest, WhatIsInUseCannotGo) {
  EXPECT_EQ(nic_.DeallocatePd(host_.pd), EBUSY);
  EXPECT_EQ(nic_.DestroyCq(host_.cq->handle()), EBUSY);
  EXPECT_EQ(nic_.DestroyChannel(host_.channel), EBUSY);
  ASSERT_EQ(nic_.DestroyQp(host_.qp->handle()), 0);
  TestBuffer buffer = host_.Register(64);
  EXPECT_EQ(nic_.DeallocatePd(host_.pd), EBUSY) << "a region";
  ASSERT_EQ(nic_.DeregisterRegion(buffer.region.handle), 0);
  const auto window = nic_.AllocateWindow(*host_.context, host_.pd);
  EXPECT_EQ(nic_.DeallocatePd(host_.pd), EBUSY) << "a window";
  ASSERT_EQ(nic_.DeallocateWindow(window->handle), 0);
  EXPECT_EQ(nic_.DeallocatePd(host_.pd), 0);
  EXPECT_EQ(nic_.DestroyCq(host_.cq->handle()), 0);
  EXPECT_EQ(nic_.DestroyChannel(host_.channel), 0);
}

TEST_F(NicTest, HandlesThatNameNothingAreToldApart) {
  EXPECT_EQ(nic_.DeallocatePd(99999), ENOENT);
  EXPECT_EQ(nic_.DeregisterRegion(99999), ENOENT);
  EXPECT_EQ(nic_.DeallocateWindow(99999), ENOENT);
  EXPECT_EQ(nic_.DestroyCq(99999), ENOENT);
  EXPECT_EQ(nic_.DestroyQp(99999), ENOENT);
  EXPECT_EQ(nic_.ResizeCq(99999, 4), ENOENT);
  EXPECT_EQ(nic_.FindQp(99999), nullptr);
  QpCreate create = QpOf(host_.cq);
  create.pd = 99999;
  EXPECT_EQ(nic_.CreateQp(*host_.context, create), Err(EINVAL));
  EXPECT_EQ(nic_.AttachConnection(99999, {}), EINVAL);
}

TEST_F(NicTest, RegionOfAnUnknownPdIsRefusedAndAFailedOneLeavesThePdFree) {
  RegionRequest request;
  request.pd = 99999;
  EXPECT_EQ(nic_.RegisterRegion(*host_.context, request).error(), EINVAL);
  const uint32_t pd = *nic_.AllocatePd(*host_.context);
  request.pd = pd;
  request.length = 4096;  // at address 0
  EXPECT_EQ(nic_.RegisterRegion(*host_.context, request).error(), EFAULT);
  EXPECT_EQ(nic_.DeallocatePd(pd), 0);
}

TEST_F(NicTest, ClosingAContextFreesEverythingOfIt) {
  TestBuffer buffer = host_.Register(64);
  ASSERT_EQ(nic_.CloseContext(host_.context), 0);
  EXPECT_EQ(nic_.DeregisterRegion(buffer.region.handle), ENOENT);
  EXPECT_EQ(nic_.counters().memory.regions, 0u);
  NicContext* const next = *nic_.OpenContext();
  EXPECT_TRUE(nic_.AllocatePd(*next).has_value());
  EXPECT_TRUE(nic_.AllocatePd(*next).has_value());
}

TEST_F(NicTest, PostingFollowsTheState) {
  TestBuffer buffer = host_.Register(64);
  EXPECT_EQ(host_.Send(1, {buffer.All()}), EINVAL);
  EXPECT_EQ(host_.Receive(1, {buffer.All()}), EINVAL);
  host_.ToInit();
  EXPECT_EQ(host_.Send(1, {buffer.All()}), EINVAL);
  EXPECT_EQ(host_.Receive(2, {buffer.All()}), 0);
  ASSERT_EQ(host_.ToState(QpState::kErr), 0);
  EXPECT_EQ(Statuses(), (std::vector{CompletionStatus::kFlushed}));
  EXPECT_EQ(host_.Send(3, {buffer.All()}), 0);
  EXPECT_EQ(host_.Receive(4, {buffer.All()}), 0);
  EXPECT_EQ(Statuses(), std::vector(3, CompletionStatus::kFlushed));
  EXPECT_EQ(host_.completions[1].wr_id, 3u);
  EXPECT_EQ(host_.completions[2].wr_id, 4u);
}

TEST_F(NicTest, ResetForgetsWorkAndCompletions) {
  TestBuffer buffer = host_.Register(64);
  host_.ToInit();
  ASSERT_EQ(host_.Receive(1, {buffer.All()}), 0);
  ASSERT_EQ(host_.ToState(QpState::kErr), 0);
  ASSERT_EQ(host_.ToState(QpState::kReset), 0);
  EXPECT_TRUE(Statuses().empty());
  EXPECT_EQ(host_.Receive(1, {buffer.All()}), EINVAL);
  host_.ToInit();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(host_.Receive(1, {buffer.All()}), 0);
  EXPECT_TRUE(Statuses().empty());
}

TEST_F(NicTest, FullQueueAndOversizedRequestsAreRefused) {
  TestBuffer buffer = host_.Register(64);
  host_.ToInit();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(host_.Receive(1, {buffer.All()}), 0);
  EXPECT_EQ(host_.Receive(1, {buffer.All()}), ENOMEM);
  EXPECT_EQ(host_.Receive(1, {buffer.All(), buffer.All(), buffer.All()}), EINVAL);

  auto [client, server] = pair_.Streams();
  ASSERT_EQ(nic_.AttachConnection(host_.qp->qp_number(), SetupOf(nic_.fabric(), std::move(server), false, {}, nullptr)),
            0);
  EXPECT_EQ(host_.Send(1, {buffer.All(), buffer.All(), buffer.All()}), EINVAL);
  EXPECT_EQ(host_.Send(1, {buffer.All(), buffer.All()}, PostOpcode::kRead), EINVAL) << "a Read has one sink";
  SendRequest too_much;
  too_much.is_inline = true;
  const ScatterGather sge = buffer.Sge(0, 33);
  too_much.sges = {&sge, 1};
  EXPECT_EQ(host_.qp->PostSend(too_much), EINVAL);
  // The responder may not speak before the initiator has: the queue fills.
  for (int i = 0; i < 4; ++i) EXPECT_EQ(host_.Send(1, {buffer.All()}), 0);
  EXPECT_EQ(host_.Send(1, {buffer.All()}), ENOMEM);
}

TEST_F(NicTest, ModifyIsJudgedByTheTable) {
  EXPECT_EQ(host_.ToState(QpState::kRts), EINVAL);
  EXPECT_EQ(host_.ToState(QpState::kInit), EINVAL) << "attributes are missing";
  QpAttributes attributes;
  attributes.state = QpState::kInit;
  attributes.port = 2;
  const uint32_t mask = qp_attr::kState | qp_attr::kAccessFlags | qp_attr::kPkeyIndex | qp_attr::kPort;
  EXPECT_EQ(host_.qp->Modify(attributes, mask), EINVAL) << "there is one port";
  attributes.port = 1;
  attributes.access = kAccessRemoteRead;
  EXPECT_EQ(host_.qp->Modify(attributes, mask), 0);
  EXPECT_EQ(host_.qp->Query().state, QpState::kInit);
  EXPECT_EQ(host_.qp->Query().access, uint32_t{kAccessRemoteRead});
}

TEST_F(NicTest, ConnectionNeedsAQpInInitWithoutOne) {
  auto [client, server] = pair_.Streams();
  EXPECT_EQ(nic_.AttachConnection(host_.qp->qp_number(), SetupOf(nic_.fabric(), std::move(client), true, {}, nullptr)),
            EINVAL);
  auto [client2, server2] = pair_.Streams();
  host_.ToInit();
  EXPECT_EQ(nic_.AttachConnection(host_.qp->qp_number(), SetupOf(nic_.fabric(), std::move(client2), true, {}, nullptr)),
            0);
  EXPECT_EQ(host_.qp->state(), QpState::kRts);
  EXPECT_TRUE(host_.qp->IsConnected());
  EXPECT_EQ(nic_.AttachConnection(host_.qp->qp_number(), SetupOf(nic_.fabric(), std::move(server2), true, {}, nullptr)),
            EISCONN);
  EXPECT_TRUE(host_.qp->IsConnected());
}

TEST_F(NicTest, AQpThatExpectsAConnectionTakesWork) {
  TestBuffer buffer = host_.Register(64);
  const uint32_t number = host_.qp->qp_number();
  nic_.ExpectConnection(number, true);
  EXPECT_EQ(host_.qp->state(), QpState::kReset) << "it has to be in INIT";
  host_.ToInit();
  nic_.ExpectConnection(number, false);
  EXPECT_EQ(host_.qp->state(), QpState::kRts);
  EXPECT_EQ(host_.Send(1, {buffer.All()}, PostOpcode::kFetchAdd), EOPNOTSUPP) << "it will be without RFC 7306";
  EXPECT_EQ(host_.Send(2, {buffer.All()}), 0);
  EXPECT_TRUE(Statuses().empty());
  auto [client, server] = pair_.Streams();
  EXPECT_EQ(nic_.AttachConnection(number, SetupOf(nic_.fabric(), std::move(client), true, {}, nullptr)), 0);
  EXPECT_EQ(Statuses(), (std::vector{CompletionStatus::kSuccess}));
  nic_.ForgoConnection(number);
  EXPECT_TRUE(host_.qp->IsConnected()) << "it has come";
}

TEST_F(NicTest, WorkForAConnectionThatDoesNotComeIsFlushed) {
  TestBuffer buffer = host_.Register(64);
  host_.ToInit();
  EXPECT_EQ(host_.Receive(1, {buffer.All()}), 0);
  nic_.ExpectConnection(host_.qp->qp_number(), true);
  EXPECT_EQ(host_.Send(2, {buffer.All()}), 0);
  nic_.ForgoConnection(host_.qp->qp_number());
  EXPECT_EQ(Statuses(), std::vector(2, CompletionStatus::kFlushed));
  EXPECT_EQ(host_.qp->state(), QpState::kErr);
  auto [client, server] = pair_.Streams();
  EXPECT_EQ(nic_.AttachConnection(host_.qp->qp_number(), SetupOf(nic_.fabric(), std::move(client), true, {}, nullptr)),
            EINVAL);
}

TEST_F(NicTest, DestroyedQpReadsTheProgramsMemoryNoMore) {
  auto [near, other] = pair_.Streams();
  const auto far = std::move(other);
  Attach(host_, std::move(near), /*initiator=*/true);
  TestBuffer buffer = host_.Register(1 << 20, kFullAccess, 0x11);
  // The peer does not read: most of this waits behind a full stream.
  ASSERT_EQ(host_.Send(1, {buffer.All()}, PostOpcode::kWrite, 0x1234, 0), 0);
  ASSERT_EQ(nic_.DestroyQp(host_.qp->handle()), 0);
  std::fill(buffer.bytes.begin(), buffer.bytes.end(), std::byte{0xee});

  std::vector<std::byte> scratch(64 * 1024);
  const MutableBytes into(scratch);
  IoResult last;
  size_t foreign = 0;
  ASSERT_TRUE(pair_.world.RunUntil([&] {
    while ((last = far->Read({&into, 1})).status == IoStatus::kOk) {
      const auto end = scratch.begin() + static_cast<ptrdiff_t>(last.bytes);
      // More of them in a row than any header has.
      foreign += std::search_n(scratch.begin(), end, 64, std::byte{0xee}) != end;
    }
    return last.status != IoStatus::kWouldBlock;
  }));
  EXPECT_EQ(foreign, 0u) << "the peer was sent what the program wrote after the QP was gone";
  EXPECT_EQ(last.status, IoStatus::kError) << "an orderly end would hide that something was lost";
}

}  // namespace
}  // namespace stagecoach::emu
