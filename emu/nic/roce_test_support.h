// For tests: two hosts of a simulated world with an InfiniBand QP each, connected by hand.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/nic_test_support.h"

namespace stagecoach::emu {

inline constexpr uint32_t kAllRemote = kAccessRemoteWrite | kAccessRemoteRead | kAccessRemoteAtomic;

// What a QP is told on its way to RTS: of its peer, and how patient to be.
inline QpAttributes HandAttributes(QpState state, const QueuePair& peer, const IpEndpoint& address) {
  QpAttributes attributes;
  attributes.state = state;
  attributes.access = kAllRemote;
  attributes.path_mtu = 3;
  attributes.path.is_global = true;
  attributes.path.gid = GidOf(address);
  attributes.destination_qp_number = peer.qp_number();
  attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4;
  attributes.timeout = 10;  // 4 ms
  attributes.retry_count = 7;
  attributes.rnr_retry = 7;
  return attributes;
}

// What ibv_modify_qp wants to hear on the way to `state`.
inline uint32_t HandMask(QpKind kind, QpState state) {
  using namespace qp_attr;  // NOLINT: the bits and nothing else
  const bool rc = kind == QpKind::kRc;
  switch (state) {
    case QpState::kInit:
      return kState | kPkeyIndex | kPort | kAccessFlags;
    case QpState::kRtr:
      return kState | kAv | kPathMtu | kDestQpn | kRqPsn | (rc ? kMaxDestRdAtomic | kMinRnrTimer : 0u);
    case QpState::kRts:
      return kState | kSqPsn | (rc ? kTimeout | kRetryCnt | kRnrRetry | kMaxQpRdAtomic : 0u);
    default:
      return kState;
  }
}

inline int Modify(QueuePair& qp, const QpAttributes& attributes) {
  return qp.Modify(attributes, HandMask(qp.kind(), attributes.state));
}

// From RESET to RTS.
inline void ReadyFor(QueuePair& qp, const QueuePair& peer, const IpEndpoint& address) {
  for (const QpState state : {QpState::kInit, QpState::kRtr, QpState::kRts}) {
    ASSERT_EQ(Modify(qp, HandAttributes(state, peer, address)), 0);
  }
}

// Two hosts, a QP of each in RESET. a's has the smaller name, so that it comes to b's.
class RocePairTest : public ::testing::Test {
 protected:
  void ReadyA() { ReadyFor(*a_.qp, *b_.qp, at_b_); }
  void ReadyB() { ReadyFor(*b_.qp, *a_.qp, at_a_); }
  void Connect() {
    ReadyA();
    ReadyB();
  }
  void Reset(TestHost& host) { ASSERT_EQ(host.ToState(QpState::kReset), 0); }

  // Sends of `from` to `to`, all of which arrive.
  void ExpectTraffic(TestHost& from, TestHost& to, uint64_t count) {
    const TestBuffer source = from.Register(4000, kFullAccess, 7);
    const TestBuffer sink = to.Register(4000);
    from.completions.clear();
    to.completions.clear();
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(to.Receive(i, {sink.All()}), 0);
      ASSERT_EQ(from.Send(i, {source.All()}), 0);
    }
    ASSERT_TRUE(pair_.world.RunUntil([&] { return BothCompleted(from, to, count); }))
        << a_.nic->Describe() << b_.nic->Describe();
    for (const WorkCompletion& completion : from.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
    for (const WorkCompletion& completion : to.completions) EXPECT_EQ(completion.status, CompletionStatus::kSuccess);
    EXPECT_EQ(sink.bytes, source.bytes);
  }
  void ExpectTraffic(uint64_t count) { ExpectTraffic(a_, b_, count); }

  SimPair pair_;
  const IpEndpoint at_a_ = *IpEndpoint::Parse("10.0.0.1", 0);
  const IpEndpoint at_b_ = *IpEndpoint::Parse("10.0.0.2", 0);
  TestHost a_{pair_.fabric_a, "a", RoceProfile()};
  TestHost b_{pair_.fabric_b, "b", RoceProfile()};
};

}  // namespace stagecoach::emu
