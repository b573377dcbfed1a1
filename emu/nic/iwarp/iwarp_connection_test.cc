// Two NICs joined by a simulated stream: what arrives, in which order it completes, and how a connection ends.
#include "emu/nic/iwarp/iwarp_connection.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <utility>

#include "base/cursor.h"
#include "emu/engine/mpa_framing.h"
#include "emu/llp/llp_over.h"
#include "emu/nic/nic_test_support.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {
namespace {

void Fill(TestBuffer& buffer, uint64_t seed) {
  Prng prng(seed);
  for (std::byte& byte : buffer.bytes) byte = static_cast<std::byte>(prng.Next());
}

class ConnectionTest : public ::testing::Test {
 protected:
  void Join(const JoinOptions& options = {}) { pair_.Join(a_, b_, options); }
  bool RunUntil(const std::function<bool()>& done) { return pair_.world.RunUntil(done); }
  bool BothClosed() { return !a_.observer.closed().empty() && !b_.observer.closed().empty(); }
  // The end of a peer that is no NIC.
  std::unique_ptr<Llp> Records(std::unique_ptr<Stream> stream) {
    return records_.fabric().RecordsOver(std::move(stream), {.crc = false});
  }
  // One record of it.
  void Say(Llp& peer, const wire::SegmentHeader& header) {
    std::array<std::byte, 64> bytes{};
    ByteWriter writer(bytes);
    header.Encode(writer);
    SayRecord(pair_.world, peer, writer.written());
  }
  // Attaches `host` over a layer of this kind, over the one that the test has.
  template <typename Meddler>
  Meddler& AttachOver(TestHost& host, std::unique_ptr<Stream> stream, bool initiator) {
    host.ToInit();
    ConnectionSetup setup = SetupOf(host.nic->fabric(), std::move(stream), initiator, {}, host.Observer());
    auto meddler = std::make_unique<Meddler>(std::move(setup.llp));
    Meddler& made = *meddler;
    setup.llp = std::move(meddler);
    EXPECT_EQ(host.nic->AttachConnection(host.qp->qp_number(), std::move(setup)), 0);
    return made;
  }

  TraceLog trace_;
  SimPair pair_;
  const TestRecords records_{pair_.fabric_a};
  TestHost a_{pair_.fabric_a, "a", IwarpProfile(), &trace_};
  TestHost b_{pair_.fabric_b, "b", IwarpProfile(), &trace_};
};

TEST_F(ConnectionTest, SendFillsThePostedReceive) {
  Join();
  TestBuffer source = a_.Register(1000);
  TestBuffer sink = b_.Register(2000);
  Fill(source, 1);
  ASSERT_EQ(b_.Receive(7, {sink.Sge(0, 300), sink.Sge(500, 1500)}), 0);
  ASSERT_EQ(a_.Send(8, {source.Sge(0, 400), source.Sge(400, 600)}), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(1) && b_.Completed(1); }));
  EXPECT_EQ(a_.completions[0].wr_id, 8u);
  EXPECT_EQ(a_.completions[0].opcode, CompletionOpcode::kSend);
  EXPECT_EQ(b_.completions[0].wr_id, 7u);
  EXPECT_EQ(b_.completions[0].opcode, CompletionOpcode::kReceive);
  EXPECT_EQ(b_.completions[0].byte_length, 1000u);
  EXPECT_EQ(b_.completions[0].qp_number, b_.qp->qp_number());
  EXPECT_TRUE(std::equal(source.bytes.begin(), source.bytes.begin() + 300, sink.bytes.begin()));
  EXPECT_TRUE(std::equal(source.bytes.begin() + 300, source.bytes.end(), sink.bytes.begin() + 500));
}

TEST_F(ConnectionTest, WriteAndReadMoveMemoryWithoutTheTarget) {
  Join();
  constexpr size_t kSize = 300000;
  TestBuffer local = a_.Register(kSize);
  TestBuffer remote = b_.Register(kSize);
  TestBuffer back = a_.Register(kSize);
  Fill(local, 2);
  ASSERT_EQ(a_.Send(1, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_EQ(a_.Send(2, {back.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[0].opcode, CompletionOpcode::kWrite);
  EXPECT_EQ(a_.completions[1].opcode, CompletionOpcode::kRead);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kSuccess);
  EXPECT_EQ(remote.bytes, local.bytes);
  EXPECT_EQ(back.bytes, local.bytes);
  EXPECT_FALSE(b_.Completed(1)) << "the target sees nothing of one-sided work";
}

TEST_F(ConnectionTest, WithoutAgreementImmediateDataAndAtomicsAreRefusedAtPost) {
  Join();
  TestBuffer local = a_.Register(8);
  for (const PostOpcode opcode :
       {PostOpcode::kWriteImmediate, PostOpcode::kCompareSwap, PostOpcode::kFetchAdd, PostOpcode::kSendImmediate}) {
    EXPECT_EQ(a_.Send(1, {local.All()}, opcode), EOPNOTSUPP);
  }
  EXPECT_FALSE(a_.Completed(1));
  EXPECT_TRUE(a_.qp->IsConnected()) << "nothing has been posted";
}

TEST_F(ConnectionTest, WithAgreementATargetThatDoesNothingServesAtomics) {
  SimPair pair;
  TestHost a(pair.fabric_a, "a");
  TestHost b(pair.fabric_b, "b");
  pair.Join(a, b, {.extensions = true});
  TestBuffer back = a.Register(8);
  TestBuffer remote = b.Register(8, kFullAccess | kAccessRemoteAtomic, 1);
  EXPECT_EQ(a.Send(1, {back.All()}, PostOpcode::kSendImmediate), EOPNOTSUPP);
  ASSERT_EQ(a.Send(2, {back.All()}, PostOpcode::kFetchAdd, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(1); }));
  EXPECT_EQ(a.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a.completions[0].opcode, CompletionOpcode::kFetchAdd);
  EXPECT_EQ(a.completions[0].byte_length, 8u);
  EXPECT_EQ(back.bytes, remote.bytes) << "nothing was added";
  EXPECT_FALSE(b.Completed(1));
}

TEST_F(ConnectionTest, PayloadIsNotCopiedOnItsWay) {
  // Room for all of it, so that what is read at a time depends on the connection and not on the stream's flow control.
  LinkOptions link;
  link.buffer = 4 << 20;
  link.max_segment_size = 1 << 16;
  SimPair pair(link);
  TestHost a(pair.fabric_a, "a");
  TestHost b(pair.fabric_b, "b");
  pair.Join(a, b);
  TestBuffer local = a.Register(1 << 20);
  TestBuffer remote = b.Register(1 << 20);
  ASSERT_EQ(a.Send(1, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_EQ(a.Send(2, {local.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(2); }));
  for (QueuePair* qp : {a.qp, b.qp}) {
    const Llp::Counters llp = qp->counters().llp;
    EXPECT_GE(llp.rx_payload_bytes, 1u << 20);
    EXPECT_EQ(llp.tx_copied_bytes, 0u);
    // The look-ahead may hold the beginning of a payload; each read takes one look-ahead at most.
    EXPECT_LE(llp.rx_copied_bytes, llp.reads * MpaReceiver::kLookAheadSize);
    EXPECT_LT(llp.rx_copied_bytes, llp.rx_payload_bytes / 20);
  }
}

TEST_F(ConnectionTest, WorkSurvivesOddStreamsAndCrc) {
  LinkOptions link;
  link.chop = true;
  link.buffer = 5000;
  SimPair pair(link, 42);
  TestHost a(pair.fabric_a, "a");
  TestHost b(pair.fabric_b, "b");
  pair.Join(a, b, {.crc = true});
  TestBuffer source = a.Register(40000);
  TestBuffer sink = b.Register(40000);
  TestBuffer back = a.Register(40000);
  Fill(source, 3);
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(b.Receive(i, {sink.Sge(i * 2000, 2000)}), 0);
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(a.Send(i, {source.Sge(i * 2000, 2000)}), 0);
  ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(20) && b.Completed(20); }));
  EXPECT_EQ(sink.bytes, source.bytes);
  ASSERT_EQ(a.Send(99, {back.All()}, PostOpcode::kRead, sink.region.stag, sink.address()), 0);
  ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(21); }));
  EXPECT_EQ(back.bytes, source.bytes);
  for (uint64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(a.completions[i].wr_id, i);
    EXPECT_EQ(b.completions[i].wr_id, i);
  }
}

TEST_F(ConnectionTest, InlineDataMayChangeAfterThePost) {
  Join();
  TestBuffer sink = b_.Register(64);
  ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
  std::string text = "stage";
  const ScatterGather sge{reinterpret_cast<uintptr_t>(text.data()), 5, 0};
  SendRequest request;
  request.is_inline = true;
  request.sges = {&sge, 1};
  ASSERT_EQ(a_.qp->EnqueueSend(request), 0);
  text = "coach";
  a_.qp->RingDoorbell();
  ASSERT_TRUE(RunUntil([&] { return b_.Completed(1); }));
  EXPECT_EQ(AsText(sink.bytes).substr(0, 5), "stage");
  EXPECT_FALSE(a_.Completed(1)) << "it was not signaled";
}

TEST_F(ConnectionTest, ResponderHearsOfTheFirstRecord) {
  Join();
  ASSERT_TRUE(RunUntil([&] { return b_.observer.first_records() == 1; }));
  pair_.world.RunUntilIdle();
  EXPECT_EQ(b_.observer.first_records(), 1);
  EXPECT_EQ(a_.observer.first_records(), 0);
}

TEST_F(ConnectionTest, ResponderWithoutRtrHoldsItsSendsUntilTheInitiatorHasSpoken) {
  auto [client, server] = pair_.Streams();
  a_.ToInit();
  b_.ToInit();
  ConnectionSetup initiator = SetupOf(a_.nic->fabric(), std::move(client), true, {}, nullptr);
  initiator.rtr = ConnectionSetup::Rtr::kNone;
  ConnectionSetup responder = SetupOf(b_.nic->fabric(), std::move(server), false, {}, nullptr);
  responder.rtr = ConnectionSetup::Rtr::kNone;
  ASSERT_EQ(a_.nic->AttachConnection(a_.qp->qp_number(), std::move(initiator)), 0);
  ASSERT_EQ(b_.nic->AttachConnection(b_.qp->qp_number(), std::move(responder)), 0);
  TestBuffer at_a = a_.Register(64);
  TestBuffer at_b = b_.Register(64);
  ASSERT_EQ(a_.Receive(1, {at_a.All()}), 0);
  ASSERT_EQ(b_.Receive(1, {at_b.All()}), 0);
  ASSERT_EQ(b_.Send(2, {at_b.All()}), 0);
  pair_.world.RunFor(1s);
  EXPECT_FALSE(a_.Completed(1));
  EXPECT_FALSE(b_.Completed(1));
  ASSERT_EQ(a_.Send(3, {at_a.All()}), 0);
  EXPECT_TRUE(RunUntil([&] { return a_.Completed(2) && b_.Completed(2); }));
}

TEST_F(ConnectionTest, DisconnectDeliversWhatWasSentThenClosesBothEnds) {
  Join();
  TestBuffer source = a_.Register(100);
  TestBuffer sink = b_.Register(100);
  ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
  ASSERT_EQ(b_.Receive(2, {sink.All()}), 0);
  ASSERT_EQ(a_.Receive(3, {source.All()}), 0);
  ASSERT_EQ(a_.Send(4, {source.All()}), 0);
  a_.qp->Disconnect();
  a_.qp->Disconnect();
  EXPECT_EQ(a_.qp->state(), QpState::kErr);
  ASSERT_TRUE(RunUntil([&] { return BothClosed(); }));
  EXPECT_EQ(a_.observer.closed().size(), 1u);
  EXPECT_EQ(a_.observer.closed()[0].reason, CloseReason::kLocalClose);
  EXPECT_EQ(b_.observer.closed()[0].reason, CloseReason::kPeerClosed);
  ASSERT_TRUE(a_.Completed(2) && b_.Completed(2));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kFlushed);
  EXPECT_EQ(b_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(b_.completions[1].status, CompletionStatus::kFlushed);
  EXPECT_EQ(b_.qp->state(), QpState::kErr);
  EXPECT_TRUE(pair_.world.RunUntilIdle());
}

TEST_F(ConnectionTest, QpMayBeConnectedAgainAfterReset) {
  for (int round = 0; round < 3; ++round) {
    Join();
    TestBuffer source = a_.Register(100);
    TestBuffer sink = b_.Register(100);
    ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
    ASSERT_EQ(a_.Send(2, {source.All()}), 0);
    a_.completions.clear();
    b_.completions.clear();
    ASSERT_TRUE(RunUntil([&] { return a_.Completed(1) && b_.Completed(1); }));
    ASSERT_EQ(a_.ToState(QpState::kReset), 0);
    ASSERT_TRUE(RunUntil([&] { return b_.observer.closed().size() == static_cast<size_t>(round) + 1; }));
    ASSERT_EQ(b_.ToState(QpState::kReset), 0);
  }
  EXPECT_EQ(a_.qp->counters().sends, 3u);
}

TEST_F(ConnectionTest, FlushKeepsTheOrderOfPosting) {
  Join();
  TestBuffer buffer = a_.Register(1 << 16);
  TestBuffer remote = b_.Register(1 << 16);
  for (uint64_t i = 0; i < 5; ++i) ASSERT_EQ(a_.Receive(i, {buffer.All()}), 0);
  for (uint64_t i = 10; i < 40; ++i) {
    ASSERT_EQ(a_.Send(i, {buffer.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  }
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(5); }));
  ASSERT_EQ(a_.ToState(QpState::kErr), 0);
  ASSERT_TRUE(a_.Completed(35)) << "all of it completes at once";
  uint64_t next_send = 10;
  uint64_t next_receive = 0;
  bool flushing = false;
  for (const WorkCompletion& completion : a_.completions) {
    if (completion.opcode == CompletionOpcode::kReceive) {
      EXPECT_EQ(completion.wr_id, next_receive++);
      EXPECT_EQ(completion.status, CompletionStatus::kFlushed);
      continue;
    }
    EXPECT_EQ(completion.wr_id, next_send++);
    if (completion.status == CompletionStatus::kFlushed) flushing = true;
    EXPECT_EQ(completion.status, flushing ? CompletionStatus::kFlushed : CompletionStatus::kSuccess);
  }
  EXPECT_EQ(next_send, 40u);
  EXPECT_EQ(next_receive, 5u);
}

TEST_F(ConnectionTest, WhatWasCarriedOutBehindAFlushedReadIsFlushedToo) {
  Join();
  TestBuffer local = a_.Register(4096);
  TestBuffer remote = b_.Register(4096);
  ASSERT_EQ(a_.Send(1, {local.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  SendRequest unsignaled;
  unsignaled.wr_id = 2;
  unsignaled.opcode = PostOpcode::kWrite;
  ASSERT_EQ(a_.qp->PostSend(unsignaled), 0);
  ASSERT_EQ(a_.Send(3, {}, PostOpcode::kWrite), 0);
  // All three are with the stream, and no answer to the Read can be here yet.
  ASSERT_EQ(a_.ToState(QpState::kErr), 0);
  ASSERT_TRUE(a_.Completed(3));
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(a_.completions[i].wr_id, i + 1);
    EXPECT_EQ(a_.completions[i].status, CompletionStatus::kFlushed);
  }
}

TEST_F(ConnectionTest, WriteToAForeignStagTerminatesTheStream) {
  Join();
  TestBuffer local = a_.Register(100);
  TestBuffer remote = b_.Register(100, kAccessLocalWrite | kAccessRemoteRead);
  fcntl(b_.context->async_events().fd(), F_SETFL, O_NONBLOCK);
  ASSERT_EQ(a_.Receive(1, {local.All()}), 0);
  ASSERT_EQ(a_.Send(2, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return BothClosed(); }));
  const CloseNotice at_a = a_.observer.closed()[0];
  const CloseNotice at_b = b_.observer.closed()[0];
  EXPECT_EQ(at_a.reason, CloseReason::kPeerFault) << "the Terminate must arrive before the end of the stream";
  EXPECT_EQ(at_b.reason, CloseReason::kLocalFault);
  ASSERT_TRUE(at_a.fault && at_b.fault);
  EXPECT_EQ(at_a.fault->layer, at_b.fault->layer);
  EXPECT_EQ(at_a.fault->error_type, at_b.fault->error_type);
  EXPECT_EQ(at_a.fault->error_code, at_b.fault->error_code);
  const auto event = b_.context->async_events().GetEvent();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->type, AsyncEventType::kQpAccessError);
  EXPECT_EQ(event->qp, b_.qp);
  b_.context->async_events().Ack(*event);
}

// Reads before the one at fault have what they asked for, however long the way of it is.
TEST_F(ConnectionTest, ARefusedReadDoesNotOvertakeTheAnswersToEarlierOnes) {
  pair_.world.SetLink(pair_.fabric_a, pair_.fabric_b, {.bytes_per_second = 100'000'000});
  Join();
  constexpr size_t kSize = 2'000'000;  // 20 ms
  TestBuffer local = a_.Register(kSize);
  TestBuffer remote = b_.Register(kSize, kFullAccess, 9);
  ASSERT_EQ(a_.Send(1, {local.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  ASSERT_EQ(a_.Send(2, {local.Sge(0, 16)}, PostOpcode::kRead, remote.region.stag ^ 0x5a5a5a00, remote.address()), 0);
  ASSERT_EQ(a_.Send(3, {local.Sge(0, 16)}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(3); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kRemoteAccessError);
  EXPECT_EQ(a_.completions[2].status, CompletionStatus::kFlushed);
  EXPECT_EQ(local.bytes, remote.bytes);
}

// Nothing that is queued there leaves.
class BrokenLlp final : public LlpOver {
 public:
  explicit BrokenLlp(std::unique_ptr<Llp> below) : LlpOver(std::move(below)) {}
  TxResult Flush(MemoryPort&) override { return {.status = TxStatus::kReset, .error = EPIPE}; }
};

// An initiator that reads nothing, with a Read to be answered and a fault behind it.
class UnreadTerminateTest : public ConnectionTest {
 protected:
  void SetUp() override {
    auto [client, server] = pair_.Streams();
    initiator_ = Records(std::move(client));
    Attach(b_, std::move(server), /*initiator=*/false);
    const TestBuffer remote = b_.Register(4 << 20);
    const TestBuffer sink = b_.Register(16);
    ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
    Say(*initiator_, wire::SegmentHeader::Read(
                         1, {.length = 4 << 20, .source_stag = remote.region.stag, .source_offset = remote.address()}));
    Say(*initiator_, wire::SegmentHeader::Read(9, {}));  // out of turn
    ASSERT_TRUE(RunUntil([&] { return b_.qp->state() == QpState::kErr; }));
    EXPECT_FALSE(b_.Completed(1)) << "the answer is still on its way";
  }
  void ExpectEnded() {
    ASSERT_TRUE(b_.Completed(1));
    EXPECT_EQ(b_.completions[0].status, CompletionStatus::kFlushed);
    EXPECT_EQ(b_.observer.closed().size(), 1u);
  }

  std::unique_ptr<Llp> initiator_;
};

TEST_F(UnreadTerminateTest, HoldsTheQpForABoundedTime) {
  pair_.world.RunFor(3s);
  ExpectEnded();
}

TEST_F(UnreadTerminateTest, HoldsNothingUpOnceItCanNeverLeave) {
  initiator_->Abort();
  pair_.world.RunFor(10ms);
  ExpectEnded();
}

// What is wrong is found in the same turn as that nothing can be written any more.
TEST_F(ConnectionTest, AFaultIsToldOfEvenIfItsTerminateCannotLeave) {
  auto [client, server] = pair_.Streams();
  fcntl(b_.context->async_events().fd(), F_SETFL, O_NONBLOCK);
  AttachOver<BrokenLlp>(b_, std::move(server), /*initiator=*/false);
  const auto peer = Records(std::move(client));
  Say(*peer, wire::SegmentHeader::Read(9, {}));  // out of turn
  ASSERT_TRUE(RunUntil([&] { return !b_.observer.closed().empty(); }));
  EXPECT_EQ(b_.observer.closed()[0].reason, CloseReason::kLocalFault);
  const auto event = b_.context->async_events().GetEvent();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->type, AsyncEventType::kQpRequestError);
  b_.context->async_events().Ack(*event);
}

// No page of it is looked at before its turn has come, and none is sent that is not there.
TEST_F(ConnectionTest, AReadWithAHoleInTheMiddleOfItsSourceIsRefused) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = 64 * page;
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  {
    SimPair pair;
    TestHost a(pair.fabric_a, "a");
    TestHost b(pair.fabric_b, "b");
    pair.Join(a, b);
    RegionRequest request{.pd = b.pd, .address = mapped, .length = size, .access = kFullAccess};
    const auto region = b.nic->RegisterRegion(*b.context, request);
    ASSERT_TRUE(region.has_value());
    ASSERT_EQ(mprotect(static_cast<std::byte*>(mapped) + 30 * page, page, PROT_NONE), 0);
    TestBuffer local = a.Register(size);
    const auto read = [&](uint64_t id, size_t from, size_t bytes) {
      ASSERT_EQ(a.Send(id, {local.Sge(0, bytes)}, PostOpcode::kRead, region->stag, from), 0);
    };
    read(1, 0, 30 * page);
    read(2, 0, size);
    read(3, 0, 16);
    ASSERT_TRUE(pair.world.RunUntil([&] { return a.Completed(3); }));
    EXPECT_EQ(a.completions[0].status, CompletionStatus::kSuccess);
    EXPECT_EQ(a.completions[1].status, CompletionStatus::kRemoteAccessError);
    EXPECT_EQ(a.completions[2].status, CompletionStatus::kFlushed);
    ASSERT_TRUE(pair.world.RunUntil([&] { return !a.observer.closed().empty(); }));
    const CloseNotice notice = a.observer.closed()[0];
    EXPECT_EQ(notice.reason, CloseReason::kPeerFault);
    ASSERT_TRUE(notice.fault.has_value());
    EXPECT_NE(notice.fault->description.find("our Read of " + std::to_string(size)), std::string::npos)
        << notice.fault->description;
  }
  munmap(mapped, size);
}

TEST_F(ConnectionTest, TerminateArrivesEvenIfTheQpIsDestroyedAtOnce) {
  Join();
  TestBuffer local = a_.Register(200000);
  TestBuffer remote = b_.Register(200000, kAccessLocalWrite);
  // Much more is under way when the fault is found: closing at once would reset the stream.
  ASSERT_EQ(a_.Send(2, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_EQ(a_.Send(3, {local.All()}, PostOpcode::kWrite, remote.region.stag, remote.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return b_.qp->state() == QpState::kErr; }));
  ASSERT_EQ(b_.nic->DestroyQp(b_.qp->handle()), 0);
  EXPECT_EQ(b_.nic->DestroyCq(b_.cq->handle()), 0) << "a lingering stream needs no CQ";
  ASSERT_TRUE(RunUntil([&] { return !a_.observer.closed().empty(); }));
  EXPECT_EQ(a_.observer.closed()[0].reason, CloseReason::kPeerFault);
  EXPECT_TRUE(pair_.world.RunUntilIdle());
}

// During each of its reads and writes, so while the connection's lock is held, another thread looks for completions:
// what a tight polling loop comes to, without its chance.
class LlpUnderPolling final : public LlpOver {
 public:
  explicit LlpUnderPolling(std::unique_ptr<Llp> below) : LlpOver(std::move(below)) {}
  void PollWith(QueuePair* qp) {
    qp_ = qp;
    polls_left_ = 1000;
  }
  int polls_left() const { return polls_left_; }

  RxResult NextRecord(RecordHead* record) override {
    Poll();
    return LlpOver::NextRecord(record);
  }
  TxResult Flush(MemoryPort& memory) override {
    Poll();
    return LlpOver::Flush(memory);
  }

 private:
  void Poll() {
    if (polls_left_ == 0) return;
    --polls_left_;
    EXPECT_FALSE(qp_->Drive()) << "another is at it";
  }

  QueuePair* qp_ = nullptr;
  int polls_left_ = 0;
};

TEST_F(ConnectionTest, PollersDoNotKeepAPosterOrTheLoopInTheConnection) {
  auto [client, server] = pair_.Streams();
  Attach(b_, std::move(server), /*initiator=*/false);
  LlpUnderPolling& llp = AttachOver<LlpUnderPolling>(a_, std::move(client), /*initiator=*/true);
  TestBuffer source = a_.Register(100);
  TestBuffer sink = b_.Register(100);
  ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
  ASSERT_TRUE(RunUntil([&] { return b_.observer.first_records() == 1; }));

  llp.PollWith(a_.qp);
  ASSERT_EQ(a_.Send(2, {source.All()}), 0);
  a_.qp->OnContinue();
  EXPECT_LT(llp.polls_left(), 1000) << "nobody polled";
  EXPECT_GT(llp.polls_left(), 900) << "each poll has bought one more turn";
  EXPECT_EQ(a_.qp->counters().pumps_by_poller, 0u);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(1) && b_.Completed(1); }));
}

// Counts how often it was asked for the record in front, and how often there was one.
class LlpThatCounts final : public LlpOver {
 public:
  explicit LlpThatCounts(std::unique_ptr<Llp> below) : LlpOver(std::move(below)) {}
  RxResult NextRecord(RecordHead* record) override {
    ++asked;
    const RxResult next = LlpOver::NextRecord(record);
    there += next.status == RxStatus::kReady;
    return next;
  }
  uint64_t asked = 0;
  uint64_t there = 0;
};

TEST_F(ConnectionTest, APollAsksForARecordOnceWhetherThereIsOneOrNot) {
  constexpr uint64_t kMessages = 5;
  auto [client, server] = pair_.Streams();
  LlpThatCounts& llp = AttachOver<LlpThatCounts>(b_, std::move(server), /*initiator=*/false);
  Attach(a_, std::move(client), /*initiator=*/true);
  TestBuffer source = a_.Register(100);
  TestBuffer sink = b_.Register(100);
  for (uint64_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(b_.Receive(i, {sink.All()}), 0);
    ASSERT_EQ(a_.Send(i, {source.All()}), 0);
    ASSERT_TRUE(RunUntil([&] {
      b_.qp->Drive();
      return b_.Completed(i + 1);
    }));
  }
  EXPECT_GT(b_.qp->counters().pumps_by_poller, 0u);
  EXPECT_EQ(llp.there, b_.qp->counters().llp.rx_records);

  const uint64_t asked = llp.asked;
  EXPECT_FALSE(b_.qp->Drive());
  EXPECT_EQ(llp.asked, asked + 1);
}

TEST_F(ConnectionTest, NoReceivePostedEndsTheStream) {
  Join();
  TestBuffer local = a_.Register(100);
  ASSERT_EQ(a_.Send(1, {local.All()}), 0);
  ASSERT_TRUE(RunUntil([&] { return BothClosed(); }));
  EXPECT_EQ(a_.observer.closed()[0].reason, CloseReason::kPeerFault);
}

TEST_F(ConnectionTest, SendOfMemoryNotRegisteredFailsLocally) {
  Join();
  TestBuffer local = a_.Register(100);
  ASSERT_EQ(a_.Send(1, {{local.address(), 100, local.region.stag ^ 0x100}}), 0);
  ASSERT_EQ(a_.Send(2, {local.All()}), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kLocalProtectionError);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kFlushed);
  EXPECT_EQ(a_.qp->state(), QpState::kErr);
}

TEST_F(ConnectionTest, BoundWindowIsReachableAndEndsByRemoteInvalidation) {
  Join();
  TestBuffer exposed = a_.Register(4096, kAccessLocalWrite | kAccessWindowBind);
  TestBuffer reply = a_.Register(64);
  TestBuffer sink = b_.Register(4096);
  Fill(exposed, 4);
  const Nic::Region window = *a_.nic->AllocateWindow(*a_.context, a_.pd);
  const uint32_t rkey = (window.stag & ~0xffu) | ((window.stag + 1) & 0xff);
  ASSERT_EQ(a_.Receive(1, {reply.All()}), 0);
  SendRequest bind;
  bind.wr_id = 2;
  bind.opcode = PostOpcode::kBindWindow;
  bind.signaled = true;
  bind.bind = {window.stag, rkey, exposed.region.stag, exposed.address(), 4096, kAccessRemoteRead};
  ASSERT_EQ(a_.qp->PostSend(bind), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(1) && b_.observer.first_records() == 1; }));
  EXPECT_EQ(a_.completions[0].opcode, CompletionOpcode::kBindWindow);
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);

  ASSERT_EQ(b_.Send(3, {sink.All()}, PostOpcode::kRead, rkey, exposed.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return b_.Completed(1); }));
  EXPECT_EQ(sink.bytes, exposed.bytes);

  ASSERT_EQ(b_.Send(4, {sink.Sge(0, 64)}, PostOpcode::kSendInvalidate, rkey), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(2); }));
  EXPECT_TRUE(a_.completions[1].with_invalidate);
  EXPECT_EQ(a_.completions[1].invalidated_rkey, rkey);
  EXPECT_EQ(a_.nic->counters().memory.remote_invalidations, 1u);

  // Using it once more is a fault.
  ASSERT_EQ(b_.Send(5, {sink.All()}, PostOpcode::kRead, rkey, exposed.address()), 0);
  ASSERT_TRUE(RunUntil([&] { return BothClosed(); }));
  EXPECT_EQ(b_.observer.closed()[0].reason, CloseReason::kPeerFault);
  EXPECT_EQ(a_.nic->counters().memory.stale_uses, 1u);
}

TEST_F(ConnectionTest, TraceNamesRegionsAndWindowsWithTheirRightsAndNeverAnAddress) {
  Join();
  TestBuffer exposed = a_.Register(4096, kAccessLocalWrite | kAccessWindowBind);
  TestBuffer sink = b_.Register(4096);
  const Nic::Region window = *a_.nic->AllocateWindow(*a_.context, a_.pd);
  SendRequest bind;
  bind.opcode = PostOpcode::kBindWindow;
  bind.signaled = true;
  bind.bind = {window.stag, window.stag, exposed.region.stag, exposed.address() + 1000, 500, kAccessRemoteWrite};
  ASSERT_EQ(a_.qp->PostSend(bind), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(1) && b_.observer.first_records() == 1; }));
  ASSERT_EQ(b_.Send(1, {sink.Sge(0, 100)}, PostOpcode::kWrite, window.stag, exposed.address() + 1200), 0);
  const auto traced = [&](const std::string& event) {
    const auto has = [&](const std::string& line) { return line.find(event) != std::string::npos; };
    return std::any_of(trace_.lines().begin(), trace_.lines().end(), has);
  };
  const std::string pd = std::to_string(a_.pd);
  const auto index = [](uint32_t stag) { return std::to_string(StagIndex(stag)); };
  EXPECT_TRUE(RunUntil([&] {
    return traced("record.placed opcode=Write length=100 last=1 msn=0 stag=" + std::to_string(window.stag) +
                  " offset=200 run=100");
  }));
  EXPECT_TRUE(traced("connection.attached pd=" + pd));
  EXPECT_TRUE(traced("stag.allocated index=" + index(exposed.region.stag) +
                     " key=" + std::to_string(StagKey(exposed.region.stag)) + " bytes=4096 pd=" + pd + " access=17"));
  EXPECT_TRUE(traced("window.allocated index=" + index(window.stag) + " pd=" + pd));
  EXPECT_TRUE(traced("window.bound stag=" + std::to_string(window.stag) +
                     " region=" + std::to_string(exposed.region.stag) + " offset=1000 bytes=500 access=2 type=2"));
  for (const TestBuffer* buffer : {&exposed, &sink}) {
    for (const uint64_t offset : {0, 1000, 1200}) {
      EXPECT_FALSE(traced("=" + std::to_string(buffer->address() + offset)));
    }
  }
}

TEST_F(ConnectionTest, SendWithInvalidateOfAPlainRegionTerminates) {
  Join();
  TestBuffer exposed = b_.Register(64);
  TestBuffer sink = b_.Register(64);
  ASSERT_EQ(b_.Receive(1, {sink.All()}), 0);
  ASSERT_EQ(a_.Send(2, {}, PostOpcode::kSendInvalidate, exposed.region.stag), 0);
  ASSERT_TRUE(RunUntil([&] { return BothClosed(); }));
  EXPECT_EQ(a_.observer.closed()[0].reason, CloseReason::kPeerFault);
  EXPECT_EQ(b_.nic->counters().memory.remote_invalidations, 0u);
}

TEST_F(ConnectionTest, LocalInvalidateEndsAWindowAndAFailedOneEndsTheQp) {
  Join();
  TestBuffer exposed = a_.Register(4096);
  const Nic::Region window = *a_.nic->AllocateWindow(*a_.context, a_.pd);
  SendRequest bind;
  bind.opcode = PostOpcode::kBindWindow;
  bind.bind = {window.stag, window.stag, exposed.region.stag, exposed.address(), 10, kAccessRemoteRead};
  ASSERT_EQ(a_.qp->PostSend(bind), 0);
  ASSERT_EQ(a_.Send(1, {}, PostOpcode::kLocalInvalidate, window.stag), 0);
  ASSERT_EQ(a_.Send(2, {}, PostOpcode::kLocalInvalidate, window.stag), 0);
  ASSERT_EQ(a_.Send(3, {exposed.All()}), 0);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(3); }));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kSuccess);
  EXPECT_EQ(a_.completions[0].opcode, CompletionOpcode::kLocalInvalidate);
  EXPECT_EQ(a_.completions[1].status, CompletionStatus::kWindowBindError);
  EXPECT_EQ(a_.completions[2].status, CompletionStatus::kFlushed);
  EXPECT_EQ(a_.qp->state(), QpState::kErr);
}

TEST_F(ConnectionTest, FencedLocalOperationWaitsForEarlierReads) {
  Join();
  TestBuffer local = a_.Register(4096);
  TestBuffer remote = b_.Register(4096);
  const Nic::Region window = *a_.nic->AllocateWindow(*a_.context, a_.pd);
  ASSERT_EQ(a_.Send(1, {local.All()}, PostOpcode::kRead, remote.region.stag, remote.address()), 0);
  SendRequest bind;
  bind.wr_id = 2;
  bind.opcode = PostOpcode::kBindWindow;
  bind.signaled = true;
  bind.fence = true;
  bind.bind = {window.stag, window.stag, local.region.stag, local.address(), 10, kAccessRemoteRead};
  ASSERT_EQ(a_.qp->PostSend(bind), 0);
  EXPECT_EQ(a_.nic->counters().memory.window_binds, 0u);
  ASSERT_TRUE(RunUntil([&] { return a_.Completed(2); }));
  EXPECT_EQ(a_.completions[0].wr_id, 1u);
  EXPECT_EQ(a_.completions[1].wr_id, 2u);
  EXPECT_EQ(a_.nic->counters().memory.window_binds, 1u);
}

TEST_F(ConnectionTest, OverrunCqEndsTheConnection) {
  TestHost small(pair_.fabric_b, "small", IwarpProfile(), nullptr, /*cq_capacity=*/2);
  pair_.Join(a_, small);
  TestBuffer source = a_.Register(64);
  TestBuffer sink = small.Register(64);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(small.Receive(i, {sink.All()}), 0);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(a_.Send(i, {source.All()}), 0);
  ASSERT_TRUE(RunUntil([&] { return !a_.observer.closed().empty() && !small.observer.closed().empty(); }));
  EXPECT_EQ(small.observer.closed()[0].reason, CloseReason::kLocalFault);
  EXPECT_EQ(small.qp->state(), QpState::kErr);
}

TEST_F(ConnectionTest, AResetFlushesAndSaysWhy) {
  auto [client, server] = pair_.Streams();
  Attach(a_, std::move(client), true);
  const auto peer = Records(std::move(server));
  TestBuffer buffer = a_.Register(64);
  ASSERT_EQ(a_.Receive(1, {buffer.All()}), 0);
  peer->Abort();
  ASSERT_TRUE(RunUntil([&] { return !a_.observer.closed().empty(); }));
  EXPECT_EQ(a_.observer.closed()[0].reason, CloseReason::kStreamFailed);
  EXPECT_EQ(a_.observer.closed()[0].error, ECONNRESET);
  ASSERT_TRUE(a_.Completed(1));
  EXPECT_EQ(a_.completions[0].status, CompletionStatus::kFlushed);
}

TEST_F(ConnectionTest, InitiatorNudgesAPeerThatIsSilentAfterItsFirstRecord) {
  auto [client, server] = pair_.Streams();
  a_.ToInit();
  ConnectionSetup setup = SetupOf(a_.nic->fabric(), std::move(client), true, {}, nullptr);
  setup.rtr = ConnectionSetup::Rtr::kNone;
  ASSERT_EQ(a_.nic->AttachConnection(a_.qp->qp_number(), std::move(setup)), 0);
  TestBuffer buffer = a_.Register(64);
  pair_.world.RunFor(5s);
  EXPECT_EQ(a_.qp->counters().llp.tx_records, 0u) << "nothing to nudge about before something was sent";
  ASSERT_EQ(a_.Send(1, {buffer.All()}), 0);
  pair_.world.RunFor(200ms);
  EXPECT_EQ(a_.qp->counters().llp.tx_records, 1u);
  pair_.world.RunFor(100ms);
  EXPECT_EQ(a_.qp->counters().llp.tx_records, 2u);
  pair_.world.RunFor(60s);
  EXPECT_EQ(a_.qp->counters().llp.tx_records, 4u) << "three nudges and no more";
}

TEST_F(ConnectionTest, PeerThatReadsNothingCannotHoldADisconnectForEver) {
  auto [client, server] = pair_.Streams();
  Attach(a_, std::move(client), true);
  TestBuffer buffer = a_.Register(1 << 20);
  for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(a_.Send(i, {buffer.All()}, PostOpcode::kWrite, 1, 0), 0);
  pair_.world.RunFor(1s);
  a_.qp->Disconnect();
  pair_.world.RunFor(1s);
  EXPECT_TRUE(a_.observer.closed().empty()) << "queued records get their time";
  pair_.world.RunFor(2s);
  ASSERT_EQ(a_.observer.closed().size(), 1u);
  ASSERT_TRUE(a_.Completed(8));
  EXPECT_EQ(a_.completions[7].status, CompletionStatus::kFlushed);
  EXPECT_FALSE(a_.qp->IsConnected());
}

TEST_F(ConnectionTest, AnObserverIsHeldUntilItsLastWord) {
  auto [client, server] = pair_.Streams();
  Attach(b_, std::move(server), /*initiator=*/false);
  auto observer = std::make_shared<RecordingObserver>();
  const std::weak_ptr<RecordingObserver> held = observer;
  a_.ToInit();
  ASSERT_EQ(a_.nic->AttachConnection(a_.qp->qp_number(),
                                     SetupOf(a_.nic->fabric(), std::move(client), true, {}, std::move(observer))),
            0);
  pair_.world.RunUntilIdle();
  EXPECT_FALSE(held.expired());
  EXPECT_EQ(a_.nic->Disconnect(a_.qp->qp_number()), 0);
  ASSERT_TRUE(RunUntil([&] { return held.expired(); }));
}

TEST_F(ConnectionTest, AnObserverGoesWithItsQpAndHearsNothingMore) {
  Join();
  const uint32_t number = a_.qp->qp_number();
  EXPECT_EQ(a_.nic->DestroyQp(a_.qp->handle()), 0);
  ASSERT_TRUE(RunUntil([&] { return !b_.observer.closed().empty(); }));
  pair_.world.RunUntilIdle();
  EXPECT_TRUE(a_.observer.closed().empty());
  EXPECT_EQ(a_.nic->Disconnect(number), ENOENT);
}

// A peer may send anything; the connection ends in an orderly way and the memory of the program stays as it was.
TEST_F(ConnectionTest, HostileBytesEndTheConnectionAndNothingElse) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SimPair pair({}, seed);
    TestHost victim(pair.fabric_b, "victim");
    auto [attacker, stream] = pair.Streams();
    Attach(victim, std::move(stream), false, {.crc = seed % 2 == 0});
    TestBuffer exposed = victim.Register(256);
    TestBuffer sink = victim.Register(256);
    for (uint64_t i = 0; i < 4; ++i) ASSERT_EQ(victim.Receive(i, {sink.All()}), 0);
    Prng prng(seed);
    std::vector<std::byte> bytes(prng.Between(1, 3000));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(prng.Next());
    // Half of them begin like a tagged or untagged segment of a plausible length.
    if (prng.OneIn(2) && bytes.size() > 8) {
      bytes[0] = std::byte{0};
      bytes[1] = static_cast<std::byte>(prng.Between(14, 200));
      bytes[2] = static_cast<std::byte>(prng.OneIn(2) ? 0xc1 : 0x41);
      bytes[3] = static_cast<std::byte>(0x40 | prng.Below(8));
    }
    const ConstBytes part(bytes);
    attacker->Write({&part, 1});
    attacker->Shutdown();
    ASSERT_TRUE(pair.world.RunUntil([&] { return !victim.observer.closed().empty(); })) << "seed " << seed;
    EXPECT_EQ(victim.qp->state(), QpState::kErr);
    EXPECT_EQ(exposed.bytes, std::vector<std::byte>(256)) << "seed " << seed;
    attacker.reset();
    pair.world.RunUntilIdle();
  }
}

uint64_t TraceOfOneRun(uint64_t seed) {
  TraceHash hash;
  LinkOptions link;
  link.chop = true;
  link.jitter = 50us;
  SimPair pair(link, seed, &hash);
  TestHost a(pair.fabric_a, "a", IwarpProfile(), &hash);
  TestHost b(pair.fabric_b, "b", IwarpProfile(), &hash);
  pair.Join(a, b);
  TestBuffer source = a.Register(50000);
  TestBuffer sink = b.Register(50000);
  EXPECT_EQ(a.Send(1, {source.All()}, PostOpcode::kWrite, sink.region.stag, sink.address()), 0);
  EXPECT_EQ(a.Send(2, {source.All()}, PostOpcode::kRead, sink.region.stag, sink.address()), 0);
  EXPECT_TRUE(pair.world.RunUntil([&] { return a.Completed(2); }));
  a.qp->Disconnect();
  pair.world.RunUntilIdle();
  return hash.value();
}

TEST_F(ConnectionTest, SameSeedSameTrace) {
  EXPECT_EQ(TraceOfOneRun(11), TraceOfOneRun(11));
  EXPECT_NE(TraceOfOneRun(11), TraceOfOneRun(12));
}

}  // namespace
}  // namespace stagecoach::emu
