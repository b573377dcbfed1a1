#include "emu/engine/rdmap_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "base/cursor.h"
#include "base/prng.h"
#include "emu/engine/transport_test_support.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {
namespace {

namespace terminate = wire::terminate;
using Bytes = TestBytes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using wire::RdmapOpcode;
using wire::SegmentHeader;

Bytes Pattern(size_t size, uint8_t seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 11 + (i >> 8) * 3);
  return bytes;
}

// One end of a connection with everything it needs.
class End final : public TransportEnd {
 public:
  End(const RdmapOptions& options, std::string name)
      : TransportEnd(256), stream(options, memory, receives, &trace, std::move(name)) {}

  bool Fill(size_t budget = 1000) { return stream.FillTx(out, budget); }
  bool Arrive(ConstBytes record) { return TransportEnd::Arrive(record, Instant{}); }
  bool Arrive(const SegmentHeader& header, ConstBytes payload = {}) {
    Bytes record(header.EncodedSize() + payload.size());
    ByteWriter writer(record);
    header.Encode(writer);
    writer.Bytes(payload);
    return Arrive(record);
  }

  // The Terminate among the queued records, which all leave.
  std::optional<wire::TerminateHeader> SentTerminate() {
    Fill();
    std::optional<wire::TerminateHeader> found;
    while (!out.records.empty()) {
      const Bytes record = Leave();
      const auto header =
          wire::DecodeSegment(ConstBytes(record).first(std::min(record.size(), kMaxRecordHead)), record.size());
      if (!header || header->opcode() != RdmapOpcode::kTerminate) continue;
      EXPECT_FALSE(found) << "two Terminates";
      EXPECT_TRUE(out.records.empty()) << "something follows the Terminate";
      const auto reading = wire::DecodeTerminate(ConstBytes(record).subspan(header->EncodedSize()));
      EXPECT_TRUE(reading.has_value());
      if (reading) found = reading->header;
    }
    return found;
  }

  RdmapStream stream;

 private:
  QpTransport& engine() override { return stream; }
};

template <typename Message>
bool ArriveWith(End& end, const SegmentHeader& header, const Message& message) {
  Bytes payload(message.EncodedSize());
  ByteWriter writer(payload);
  message.Encode(writer);
  return end.Arrive(header, payload);
}

class RdmapStreamTest : public ::testing::Test {
 protected:
  // Moves records both ways until nothing moves any more.
  static void Exchange(End& one, End& other) {
    bool moved = true;
    while (moved) {
      moved = one.Fill();
      moved = other.Fill() || moved;
      moved = Deliver(one, other) || moved;
      moved = Deliver(other, one) || moved;
    }
  }
  void Run() { Exchange(a, b); }
  static bool Deliver(End& from, End& to) {
    bool any = false;
    while (!from.out.records.empty()) {
      const Bytes record = from.Leave();
      if (record.empty()) break;
      to.Arrive(record);
      any = true;
    }
    return any;
  }
  // Asserts that `end` raised this fault and nothing else: a Terminate with the code, then finished.
  static void ExpectTerminate(End& end, wire::TerminateCode code) {
    EXPECT_FALSE(end.stream.Receiving());
    EXPECT_FALSE(end.stream.Finished());
    const auto sent = end.SentTerminate();
    ASSERT_TRUE(sent.has_value());
    EXPECT_EQ(wire::ToString(sent->code), wire::ToString(code));
    EXPECT_TRUE(end.stream.Finished());
    const auto fault = end.stream.TakeFault();
    ASSERT_TRUE(fault.has_value());
    EXPECT_FALSE(fault->from_peer);
    EXPECT_EQ((wire::TerminateCode{fault->layer, fault->error_type, fault->error_code}), code);
    EXPECT_THAT(fault->description, HasSubstr(wire::ToString(code)));
    EXPECT_FALSE(end.stream.TakeFault().has_value());
    EXPECT_TRUE(end.memory.GuardsIntact());
  }
  static uint64_t At(uint32_t stag) { return FakeMemory::Address(stag); }

  End a{RdmapOptions{.ird = 4, .ord = 4}, "a"};
  End b{RdmapOptions{.ird = 4, .ord = 4}, "b"};
};

// --- Operations ---

TEST_F(RdmapStreamTest, SendFillsTheNextReceive) {
  const uint32_t from = a.memory.Add(1000);
  CopyBytes(a.memory.Bytes(from), Pattern(1000, 1));
  const uint32_t to = b.PostReceive(1200);
  const SendWork* work = a.PostSend(from, 1000);
  Run();
  const auto sends = a.TakeSends();
  ASSERT_EQ(sends.size(), 1u);
  EXPECT_EQ(sends[0].work, work);
  EXPECT_EQ(sends[0].status, WorkStatus::kSuccess);
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
  EXPECT_EQ(received[0].byte_length, 1000u);
  EXPECT_FALSE(received[0].solicited);
  EXPECT_FALSE(received[0].invalidated);
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to).first(1000), a.memory.Bytes(from)));
  EXPECT_FALSE(a.stream.HasOutstandingWork());
}

TEST_F(RdmapStreamTest, ScatterGatherListsOfBothSidesNeedNotMatch) {
  const uint32_t from = a.memory.Add(900);
  CopyBytes(a.memory.Bytes(from), Pattern(900, 1));
  const uint32_t to = b.memory.Add(900, FakeMemory::kLocalWrite);
  b.PostReceive({b.Sge(to, 600, 300), b.Sge(to, 0, 0), b.Sge(to, 0, 7), b.Sge(to, 7, 593)});
  // More elements than one segment takes, empty ones among them.
  std::vector<ScatterGather> list;
  for (uint32_t i = 0; i < 90; ++i) {
    list.push_back(a.Sge(from, i * 10, 10));
    list.push_back({});
  }
  a.Post({.opcode = SendOpcode::kSend}, list);
  Run();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  ASSERT_EQ(b.TakeReceives().size(), 1u);
  const ConstBytes sent = a.memory.Bytes(from);
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to).subspan(600, 300), sent.first(300)));
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to).first(600), sent.subspan(300)));
}

TEST_F(RdmapStreamTest, InlineSendNeedsNoMemoryOfThePort) {
  const Bytes data = Pattern(400, 5);
  const uint32_t to = b.PostReceive(400);
  a.Post({.opcode = SendOpcode::kSend, .solicited = true, .is_inline = true, .inline_data = data});
  Run();
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to), data));
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_TRUE(received[0].solicited);
}

TEST_F(RdmapStreamTest, EmptySendConsumesAReceive) {
  b.PostReceive({});
  a.Post({.opcode = SendOpcode::kSend});
  Run();
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].byte_length, 0u);
  EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
}

TEST_F(RdmapStreamTest, SendWithInvalidateRevokesTheStagBeforeTheReceiveCompletes) {
  const uint32_t exposed = b.memory.Add(100);
  b.PostReceive(300);
  const uint32_t from = a.memory.Add(300);
  a.Post({.opcode = SendOpcode::kSendInvalidate, .solicited = true, .remote_stag = exposed}, {a.Sge(from, 0, 300)});
  Run();
  EXPECT_FALSE(b.memory.IsValid(exposed));
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
  EXPECT_TRUE(received[0].invalidated);
  EXPECT_TRUE(received[0].solicited);
  EXPECT_EQ(received[0].invalidated_stag, exposed);
}

TEST_F(RdmapStreamTest, WritePlacesBytesAndCompletesNothingAtTheTarget) {
  const uint32_t from = a.memory.Add(1000);
  CopyBytes(a.memory.Bytes(from), Pattern(1000, 1));
  const uint32_t to = b.memory.Add(2000, FakeMemory::kRemoteWrite);
  a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = At(to) + 500}, {a.Sge(from, 0, 1000)});
  Run();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to).subspan(500, 1000), a.memory.Bytes(from)));
  EXPECT_TRUE(b.TakeReceives().empty());
  EXPECT_EQ(b.memory.Bytes(to)[499], std::byte{0});
  EXPECT_EQ(b.memory.Bytes(to)[1500], std::byte{0});
}

TEST_F(RdmapStreamTest, ReadBringsBytesAndSaysHowMany) {
  const uint32_t source = b.memory.Add(1000, FakeMemory::kRemoteRead);
  CopyBytes(b.memory.Bytes(source), Pattern(1000, 1));
  const uint32_t sink = a.memory.Add(1000, FakeMemory::kLocalWrite | FakeMemory::kRemoteWrite);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source) + 100},
         {a.Sge(sink, 50, 700)});
  Run();
  const auto sends = a.TakeSends();
  ASSERT_EQ(sends.size(), 1u);
  EXPECT_EQ(sends[0].status, WorkStatus::kSuccess);
  EXPECT_EQ(sends[0].byte_length, 700u);
  EXPECT_TRUE(SameBytes(a.memory.Bytes(sink).subspan(50, 700), b.memory.Bytes(source).subspan(100, 700)));
  EXPECT_FALSE(a.stream.HasOutstandingWork());
  EXPECT_FALSE(b.stream.HasOutstandingWork());
}

TEST_F(RdmapStreamTest, ReadScattersOverSeveralElements) {
  const uint32_t source = b.memory.Add(600, FakeMemory::kRemoteRead);
  CopyBytes(b.memory.Bytes(source), Pattern(600, 1));
  const uint8_t rights = FakeMemory::kLocalWrite | FakeMemory::kRemoteWrite;
  const uint32_t first = a.memory.Add(100, rights);
  const uint32_t second = a.memory.Add(500, rights);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)},
         {a.Sge(first, 0, 100), a.Sge(second, 0, 500)});
  Run();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(a.memory.Bytes(first), b.memory.Bytes(source).first(100)));
  EXPECT_TRUE(SameBytes(a.memory.Bytes(second), b.memory.Bytes(source).subspan(100)));
}

TEST_F(RdmapStreamTest, EmptyWriteAndReadAreNotCheckedAgainstMemory) {
  a.Post({.opcode = SendOpcode::kWrite, .remote_stag = 0xdead, .remote_offset = UINT64_MAX});
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = 0xdead, .remote_offset = UINT64_MAX});
  Run();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
  EXPECT_TRUE(b.stream.Receiving());
}

TEST_F(RdmapStreamTest, SegmentsFillTheMulpdu) {
  a.out.max_ulpdu = 114;
  const uint32_t from = a.memory.Add(250);
  a.Post({.opcode = SendOpcode::kWrite}, {a.Sge(from, 0, 250)});
  a.Fill();
  ASSERT_EQ(a.out.records.size(), 3u);
  EXPECT_EQ(a.Leave().size(), 114u);
  EXPECT_EQ(a.Leave().size(), 114u);
  EXPECT_TRUE(a.TakeSends().empty());  // not before the last segment has left
  EXPECT_EQ(a.Leave().size(), 64u);
  EXPECT_EQ(a.TakeSends().size(), 1u);
}

TEST_F(RdmapStreamTest, FillTxHonoursBudgetAndSink) {
  a.out.max_ulpdu = 114;
  a.out.capacity = 4;
  const uint32_t from = a.memory.Add(1000);
  a.Post({.opcode = SendOpcode::kWrite}, {a.Sge(from, 0, 1000)});
  EXPECT_TRUE(a.Fill(1));
  EXPECT_EQ(a.out.records.size(), 1u);
  EXPECT_TRUE(a.Fill(100));
  EXPECT_EQ(a.out.records.size(), 4u);
  EXPECT_FALSE(a.Fill(100));
}

TEST_F(RdmapStreamTest, UnsignaledWorkIsReportedToo) {
  SendWork work{.opcode = SendOpcode::kWrite};
  a.stream.Submit(&work);
  Run();
  const auto sends = a.TakeSends();
  ASSERT_EQ(sends.size(), 1u);
  EXPECT_FALSE(sends[0].work->signaled);
}

TEST_F(RdmapStreamTest, OperationsOfOtherTransportsFailAsLocalOperations) {
  for (const SendOpcode opcode :
       {SendOpcode::kSendImmediate, SendOpcode::kWriteImmediate, SendOpcode::kCompareSwap, SendOpcode::kFetchAdd}) {
    End end{RdmapOptions{}, "c"};
    const uint32_t local = end.memory.Add(8);
    end.Post({.opcode = opcode, .remote_stag = 1}, {end.Sge(local, 0, 8)});
    end.Post({.opcode = SendOpcode::kSend});
    end.Fill();
    ExpectTerminate(end, terminate::kRdmapLocalCatastrophic);
    EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalOperationError, WorkStatus::kFlushed))
        << ToString(opcode);
  }
}

// --- RFC 7306 ---

class Rfc7306StreamTest : public RdmapStreamTest {
 protected:
  Rfc7306StreamTest() {
    c.emplace(Extended(), "c");
    d.emplace(Extended(), "d");
  }
  static RdmapOptions Extended(uint16_t ird = 4) {
    return {.ird = ird, .ord = 4, .extensions = wire::RdmapExtensions::kRfc7306};
  }
  void RunExtended() { Exchange(*c, *d); }
  static uint64_t WordAt(End& end, uint32_t stag, size_t offset = 0) {
    uint64_t word = 0;
    CopyBytes(AsMutableBytes(&word, sizeof(word)), end.memory.Bytes(stag).subspan(offset));
    return word;
  }
  static void SetWord(End& end, uint32_t stag, uint64_t word, size_t offset = 0) {
    CopyBytes(end.memory.Bytes(stag).subspan(offset), AsBytes(&word, sizeof(word)));
  }
  static const SendWork* PostAdd(End& end, uint32_t sink, uint32_t target, uint64_t add, uint64_t offset = 0) {
    return end.Post({.opcode = SendOpcode::kFetchAdd,
                     .remote_stag = target,
                     .remote_offset = At(target) + offset,
                     .compare_add = add},
                    {End::Sge(sink, 0, 8)});
  }

  std::optional<End> c, d;
};

TEST_F(Rfc7306StreamTest, WriteWithImmediatePlacesItsBytesAndConsumesAReceive) {
  const uint32_t from = c->memory.Add(1000);
  CopyBytes(c->memory.Bytes(from), Pattern(1000, 1));
  const uint32_t to = d->memory.Add(1000, FakeMemory::kRemoteWrite);
  const uint32_t receive = d->PostReceive(64);
  c->Post({.opcode = SendOpcode::kWriteImmediate,
           .solicited = true,
           .remote_stag = to,
           .remote_offset = At(to),
           .immediate = 0x0d0c0b0a},
          {End::Sge(from, 0, 1000)});
  RunExtended();
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(d->memory.Bytes(to), c->memory.Bytes(from)));
  const auto received = d->TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
  EXPECT_TRUE(received[0].write_immediate);
  EXPECT_TRUE(received[0].has_immediate);
  EXPECT_TRUE(received[0].solicited);
  EXPECT_EQ(received[0].immediate, 0x0d0c0b0au);
  EXPECT_EQ(received[0].byte_length, 1000u);
  EXPECT_EQ(d->memory.Bytes(receive)[0], std::byte{0}) << "nothing of it is the Receive's";
}

TEST_F(Rfc7306StreamTest, TheLengthOfAWriteWithImmediateIsThatOfItsWriteAlone) {
  const uint32_t from = c->memory.Add(600);
  const uint32_t to = d->memory.Add(600);
  for (int i = 0; i < 4; ++i) d->PostReceive(8);
  const auto write = [&](SendOpcode opcode, uint32_t length) {
    std::vector<ScatterGather> sges;
    if (length > 0) sges.push_back(End::Sge(from, 0, length));
    c->Post({.opcode = opcode, .remote_stag = to, .remote_offset = At(to), .immediate = length}, std::move(sges));
  };
  write(SendOpcode::kWrite, 500);
  write(SendOpcode::kWriteImmediate, 600);
  write(SendOpcode::kWriteImmediate, 0);
  c->PostSend(from, 3);
  write(SendOpcode::kWriteImmediate, 20);
  RunExtended();
  EXPECT_EQ(c->TakeSends().size(), 5u);
  const auto received = d->TakeReceives();
  ASSERT_EQ(received.size(), 4u);
  EXPECT_EQ(received[0].byte_length, 600u);
  EXPECT_EQ(received[1].byte_length, 0u);
  EXPECT_EQ(received[2].byte_length, 3u);
  EXPECT_FALSE(received[2].has_immediate);
  EXPECT_EQ(received[3].byte_length, 20u);
}

TEST_F(Rfc7306StreamTest, AWriteWithImmediateIsDoneWhenItsLastRecordHasLeft) {
  const uint32_t from = c->memory.Add(10);
  c->Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = 1}, {End::Sge(from, 0, 10)});
  c->Fill();
  ASSERT_EQ(c->out.records.size(), 2u);
  c->Leave();
  EXPECT_TRUE(c->TakeSends().empty());
  c->Leave();
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
}

TEST_F(Rfc7306StreamTest, SendWithImmediateHasNoForm) {
  const uint32_t local = c->memory.Add(8);
  c->Post({.opcode = SendOpcode::kSendImmediate}, {End::Sge(local, 0, 8)});
  c->Fill();
  ExpectTerminate(*c, terminate::kRdmapLocalCatastrophic);
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kLocalOperationError));
}

TEST_F(Rfc7306StreamTest, AtomicsChangeTheTargetAndBringBackWhatWasThere) {
  const uint32_t target = d->memory.Add(16, FakeMemory::kRemoteAtomic);
  SetWord(*d, target, 40, 8);
  const uint32_t sink = c->memory.Add(24, FakeMemory::kLocalWrite);
  PostAdd(*c, sink, target, 2, 8);
  c->Post({.opcode = SendOpcode::kCompareSwap,
           .remote_stag = target,
           .remote_offset = At(target) + 8,
           .compare_add = 42,
           .swap = 7},
          {End::Sge(sink, 8, 3), End::Sge(sink, 11, 5)});
  c->Post({.opcode = SendOpcode::kCompareSwap,
           .remote_stag = target,
           .remote_offset = At(target) + 8,
           .compare_add = 42,
           .swap = 9},
          {End::Sge(sink, 16, 8)});
  RunExtended();
  const auto sends = c->TakeSends();
  ASSERT_EQ(sends.size(), 3u);
  for (const SendCompletion& send : sends) {
    EXPECT_EQ(send.status, WorkStatus::kSuccess);
    EXPECT_EQ(send.byte_length, 8u);
  }
  EXPECT_EQ(WordAt(*c, sink), 40u);
  EXPECT_EQ(WordAt(*c, sink, 8), 42u);
  EXPECT_EQ(WordAt(*c, sink, 16), 7u) << "does not compare, and swaps nothing";
  EXPECT_EQ(WordAt(*d, target, 8), 7u);
  EXPECT_EQ(WordAt(*d, target), 0u);
  EXPECT_FALSE(c->stream.HasOutstandingWork());
  EXPECT_FALSE(d->stream.HasOutstandingWork());
}

TEST_F(Rfc7306StreamTest, ReadsAndAtomicsShareTheDepthAndAreAnsweredInTurn) {
  const uint32_t target = d->memory.Add(64);
  const uint32_t sink = c->memory.Add(64);
  for (int i = 0; i < 4; ++i) {
    PostAdd(*c, sink, target, 1);
    c->Post({.opcode = SendOpcode::kRead, .remote_stag = target, .remote_offset = At(target)}, {End::Sge(sink, 8, 8)});
  }
  c->Fill();
  EXPECT_EQ(c->out.records.size(), 4u) << "ORD is 4";
  RunExtended();
  EXPECT_EQ(c->TakeSends().size(), 8u);
  EXPECT_EQ(WordAt(*c, sink), 3u);
  EXPECT_EQ(WordAt(*c, sink, 8), 4u);
}

TEST_F(Rfc7306StreamTest, AFenceWaitsForAtomics) {
  const uint32_t target = d->memory.Add(8);
  const uint32_t sink = c->memory.Add(8);
  d->PostReceive(8);
  PostAdd(*c, sink, target, 5);
  c->Post({.opcode = SendOpcode::kSend, .fence = true}, {End::Sge(sink, 0, 8)});
  c->Fill();
  EXPECT_EQ(c->out.records.size(), 1u);
  RunExtended();
  EXPECT_EQ(c->TakeSends().size(), 2u);
  EXPECT_EQ(d->TakeReceives().size(), 1u);
}

TEST_F(Rfc7306StreamTest, AnAtomicNeedsEightBytesToAnswerInto) {
  for (const uint32_t size : {0u, 7u, 9u}) {
    End end(Extended(), "end");
    const uint32_t sink = end.memory.Add(16);
    end.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = 1}, {End::Sge(sink, 0, size)});
    end.Fill();
    ExpectTerminate(end, terminate::kRdmapLocalCatastrophic);
    EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalLengthError)) << size;
  }
  const uint32_t read_only = c->memory.Add(8, FakeMemory::kNone);
  c->Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = 1}, {End::Sge(read_only, 0, 8)});
  c->Fill();
  ExpectTerminate(*c, terminate::kRdmapLocalCatastrophic);
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
}

TEST_F(Rfc7306StreamTest, AnAtomicWhoseSinkHasGoneFails) {
  const uint32_t target = d->memory.Add(8);
  const uint32_t sink = c->memory.Add(8);
  PostAdd(*c, sink, target, 1);
  c->Fill();
  Deliver(*c, *d);
  c->memory.Invalidate(sink);
  d->Fill();
  Deliver(*d, *c);
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
  ExpectTerminate(*c, terminate::kRdmapLocalCatastrophic);
}

TEST_F(Rfc7306StreamTest, ARefusedAtomicFailsItsWorkAtTheRequester) {
  const uint32_t target = d->memory.Add(8, FakeMemory::kLocalWrite | FakeMemory::kRemoteRead);
  const uint32_t sink = c->memory.Add(8);
  c->PostSend(sink, 0);
  d->PostReceive(8);
  PostAdd(*c, sink, target, 1);
  RunExtended();
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kRemoteAccessError));
  const auto fault = c->stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_TRUE(fault->from_peer);
  EXPECT_THAT(fault->description, HasSubstr("our Fetch and Add"));
  EXPECT_EQ(d->memory.atomics(), 0);
}

TEST_F(Rfc7306StreamTest, AtomicsThatWereCarriedOutAreAnsweredBeforeARefusalEndsTheStream) {
  const uint32_t target = d->memory.Add(64);
  const uint32_t source = d->memory.Add(2000);
  const uint32_t no_atomics = d->memory.Add(8, FakeMemory::kLocalWrite | FakeMemory::kRemoteRead);
  const uint32_t sink = c->memory.Add(2000);
  const SendOpcode last_kinds[] = {SendOpcode::kFetchAdd, SendOpcode::kRead};
  for (const SendOpcode last : last_kinds) {
    SCOPED_TRACE(ToString(last));
    c.emplace(Extended(), "c");
    d.emplace(Extended(), "d");
    d->memory.Add(64);
    d->memory.Add(2000);
    d->memory.Add(8, FakeMemory::kLocalWrite | FakeMemory::kRemoteRead);
    c->memory.Add(2000);
    d->out.max_ulpdu = 1000;  // the Read's answer takes several records
    PostAdd(*c, sink, target, 1);
    c->Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)},
            {End::Sge(sink, 0, 2000)});
    PostAdd(*c, sink, target, 1);
    c->Post({.opcode = last,
             .remote_stag = last == SendOpcode::kRead ? 0x4242 : no_atomics,
             .remote_offset = At(no_atomics)},
            {End::Sge(sink, 0, 8)});
    c->Fill();
    ASSERT_EQ(c->out.records.size(), 4u);
    for (int i = 0; i < 3; ++i) d->Arrive(c->Leave());
    d->Fill(2);  // the first answer, and a part of the second
    d->Arrive(c->Leave());
    EXPECT_FALSE(d->stream.Receiving());
    EXPECT_TRUE(d->stream.TakeFault().has_value()) << "the owner is told at once";
    RunExtended();
    EXPECT_EQ(WordAt(*d, target), 2u);
    EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess, WorkStatus::kSuccess,
                                                   WorkStatus::kRemoteAccessError));
    EXPECT_TRUE(d->stream.Finished());
  }
}

TEST_F(Rfc7306StreamTest, AReadBehindAnAtomicIsAnsweredTooWhenTheStreamEnds) {
  const uint32_t target = d->memory.Add(64);
  const uint32_t sink = c->memory.Add(8);
  PostAdd(*c, sink, target, 1);
  c->Post({.opcode = SendOpcode::kRead, .remote_stag = target, .remote_offset = At(target)}, {End::Sge(sink, 0, 8)});
  c->Fill();
  Deliver(*c, *d);
  EXPECT_FALSE(d->Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 7, 0, true), Bytes(8)));
  RunExtended();
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
}

TEST_F(Rfc7306StreamTest, ATerminateThatNamesTheWriteOfAWriteWithImmediateFailsIt) {
  const uint32_t from = c->memory.Add(10);
  c->Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = 0x4242, .remote_offset = 64}, {End::Sge(from, 0, 10)});
  d->PostReceive(8);
  c->Fill();
  EXPECT_FALSE(d->Arrive(c->Leave())) << "nothing has this STag";
  EXPECT_EQ(d->receives.posted.size(), 1u) << "the Receive is for the Immediate Data, which has not come";
  EXPECT_TRUE(d->TakeReceives().empty());
  d->Fill();
  Deliver(*d, *c);
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteAccessError));
}

TEST_F(Rfc7306StreamTest, AWriteWithImmediateThatIsCutOffBetweenItsPartsIsFlushedOnce) {
  const uint32_t from = c->memory.Add(10);
  c->Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = 1}, {End::Sge(from, 0, 10)});
  c->Fill(1);
  ASSERT_EQ(c->out.records.size(), 1u);
  c->stream.OnLlpFault(2);
  EXPECT_TRUE(c->TakeSends().empty()) << "a record of it has not left";
  c->Leave();
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  c->Fill();
  EXPECT_TRUE(c->SentTerminate().has_value()) << "and no Immediate Data";
  EXPECT_TRUE(c->TakeSends().empty());
}

TEST_F(Rfc7306StreamTest, ImmediateDataBehindAnUnfinishedWriteSaysNoLength) {
  const uint32_t to = d->memory.Add(100);
  d->PostReceive(8);
  d->PostReceive(8);
  EXPECT_TRUE(d->Arrive(SegmentHeader::Write(to, At(to), /*last=*/false), Bytes(10)));
  EXPECT_TRUE(d->Arrive(SegmentHeader::Immediate(false, 1), Bytes(8)));
  EXPECT_TRUE(d->Arrive(SegmentHeader::Write(to, At(to), /*last=*/true), Bytes(20)));
  EXPECT_TRUE(d->Arrive(SegmentHeader::Immediate(false, 2), Bytes(8)));
  const auto received = d->TakeReceives();
  ASSERT_EQ(received.size(), 2u);
  EXPECT_EQ(received[0].byte_length, 0u);
  EXPECT_EQ(received[1].byte_length, 20u);
}

TEST_F(Rfc7306StreamTest, ImmediateDataWithoutAReceiveFailsTheWriteIfItIsNotDone) {
  c->Post({.opcode = SendOpcode::kWriteImmediate});
  c->Fill();
  EXPECT_TRUE(d->Arrive(c->Leave()));
  EXPECT_FALSE(d->Arrive(SegmentHeader::Immediate(false, 1), Bytes(8)));
  d->Fill();
  Deliver(*d, *c);
  EXPECT_THAT(c->TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteOperationError));
}

TEST_F(Rfc7306StreamTest, EachFaultOfAPeerHasItsTerminateCode) {
  FakeMemory layout;
  const uint32_t good = layout.Add(64);
  const uint32_t no_atomics = layout.Add(64, FakeMemory::kLocalWrite | FakeMemory::kRemoteRead);
  wire::AtomicRequest unknown = wire::AtomicRequest::FetchAdd(1, good, At(good), 1);
  unknown.operation = 1;
  wire::AtomicRequest masked = wire::AtomicRequest::FetchAdd(1, good, At(good), 1);
  masked.add_or_swap_mask = 0x80;
  const auto add = [](uint32_t stag, uint64_t offset) { return wire::AtomicRequest::FetchAdd(1, stag, offset, 1); };
  const struct {
    const char* name;
    wire::AtomicRequest request;
    wire::TerminateCode code;
  } kRequests[] = {
      {"unknown operation", unknown, terminate::kRdmapOpcode},
      {"masks", masked, terminate::kRdmapUnspecified},
      {"unknown STag", add(0x7f00005a, 0), terminate::kRdmapInvalidStag},
      {"wrong key", add(good ^ 1, At(good)), terminate::kRdmapInvalidStag},
      {"no right", add(no_atomics, At(no_atomics)), terminate::kRdmapAccess},
      {"beyond the region", add(good, At(good) + 64), terminate::kRdmapBounds},
      {"before the region", add(good, At(good) - 8), terminate::kRdmapBounds},
      {"misaligned", add(good, At(good) + 4), terminate::kRdmapProtectionUnspecified},
      {"at the end of all addresses", add(good, UINT64_MAX - 7), terminate::kRdmapBounds},
  };
  for (const auto& r : kRequests) {
    SCOPED_TRACE(r.name);
    End end(Extended(), "end");
    end.memory.Add(64);
    end.memory.Add(64, FakeMemory::kLocalWrite | FakeMemory::kRemoteRead);
    ArriveWith(end, SegmentHeader::AtomicRequest(1), r.request);
    EXPECT_EQ(end.memory.atomics(), 0);
    EXPECT_TRUE(SameBytes(end.memory.Bytes(good), Bytes(64)));
    ExpectTerminate(end, r.code);
  }

  const auto expect = [&](const char* name, wire::TerminateCode code, const std::function<bool(End&)>& arrive) {
    SCOPED_TRACE(name);
    End end(Extended(/*ird=*/2), "end");
    end.memory.Add(64);
    end.receives.posted.clear();
    EXPECT_FALSE(arrive(end));
    ExpectTerminate(end, code);
  };
  expect("MSN of an Atomic Request", terminate::kDdpMsnRange,
         [&](End& end) { return ArriveWith(end, SegmentHeader::AtomicRequest(2), add(good, At(good))); });
  expect("more atomics than IRD", terminate::kRdmapStreamCatastrophic, [&](End& end) {
    EXPECT_TRUE(ArriveWith(end, SegmentHeader::AtomicRequest(1), add(good, At(good))));
    EXPECT_TRUE(end.Arrive(SegmentHeader::Read(2, {.length = 0})));
    return ArriveWith(end, SegmentHeader::AtomicRequest(3), add(good, At(good)));
  });
  expect("answer to nothing", terminate::kRdmapOpcode, [&](End& end) {
    return ArriveWith(end, SegmentHeader::AtomicResponse(1), wire::AtomicResponse{1, 1});
  });
  expect("MSN of an answer", terminate::kDdpMsnRange, [&](End& end) {
    return ArriveWith(end, SegmentHeader::AtomicResponse(2), wire::AtomicResponse{1, 1});
  });
  expect("Immediate Data without a Receive", terminate::kDdpNoBuffer,
         [&](End& end) { return end.Arrive(SegmentHeader::Immediate(false, 1), Bytes(8)); });
  expect("MSN of Immediate Data", terminate::kDdpMsnRange, [&](End& end) {
    end.PostReceive(8);
    return end.Arrive(SegmentHeader::Immediate(false, 2), Bytes(8));
  });
  expect("Immediate Data inside a Send", terminate::kRdmapOpcode, [&](End& end) {
    end.PostReceive(8);
    EXPECT_TRUE(end.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, false), Bytes(4)));
    return end.Arrive(SegmentHeader::Immediate(false, 1), Bytes(8));
  });
}

TEST_F(Rfc7306StreamTest, AnswersOfTheWrongKindEndTheStream) {
  const uint32_t remote = d->memory.Add(8);
  const uint32_t sink = c->memory.Add(16);
  PostAdd(*c, sink, remote, 1);
  c->Fill();
  EXPECT_FALSE(c->Arrive(SegmentHeader::ReadResponse(sink, At(sink), true), Bytes(8)));
  ExpectTerminate(*c, terminate::kRdmapOpcode);

  End reader(Extended(), "reader");
  const uint32_t local = reader.memory.Add(8);
  reader.Post({.opcode = SendOpcode::kRead, .remote_stag = remote}, {End::Sge(local, 0, 8)});
  reader.Fill();
  EXPECT_FALSE(ArriveWith(reader, SegmentHeader::AtomicResponse(1), wire::AtomicResponse{1, 1}));
  ExpectTerminate(reader, terminate::kRdmapOpcode);

  End other(Extended(), "other");
  const uint32_t place = other.memory.Add(8);
  PostAdd(other, place, remote, 1);
  other.Fill();
  ArriveWith(other, SegmentHeader::AtomicResponse(1), wire::AtomicResponse{77, 1});
  EXPECT_TRUE(SameBytes(other.memory.Bytes(place), Bytes(8))) << "an answer to something else is not placed";
  ExpectTerminate(other, terminate::kRdmapUnspecified);
}

TEST_F(Rfc7306StreamTest, APeerThatHasNotAgreedMayUseNoneOfIt) {
  const auto expect = [](wire::TerminateCode code, const SegmentHeader& header, size_t size) {
    End end(RdmapOptions{}, "end");
    end.PostReceive(8);
    EXPECT_FALSE(end.Arrive(header, Bytes(size)));
    ExpectTerminate(end, code);
    EXPECT_EQ(end.receives.posted.size(), 1u);
  };
  expect(terminate::kRdmapOpcode, SegmentHeader::Immediate(false, 1), wire::kImmediateDataSize);
  expect(terminate::kRdmapOpcode, SegmentHeader::AtomicRequest(1), wire::kAtomicRequestSize);
  expect(terminate::kDdpQueueNumber, SegmentHeader::AtomicResponse(1), wire::kAtomicResponseSize);
}

TEST_F(Rfc7306StreamTest, TracesNameTheMemoryThatIsChanged) {
  const uint32_t target = d->memory.Add(64);
  const uint32_t sink = c->memory.Add(64);
  d->PostReceive(8);
  PostAdd(*c, sink, target, 1, 16);
  c->Post({.opcode = SendOpcode::kWriteImmediate});
  RunExtended();
  const auto places = [](uint32_t stag, uint64_t offset, uint64_t run) {
    return " stag=" + std::to_string(stag) + " offset=" + std::to_string(offset) + " run=" + std::to_string(run);
  };
  const auto has = [](const std::string& text) { return ::testing::Contains(HasSubstr(text)); };
  EXPECT_THAT(d->trace.lines(), has("Atomic Request length=0 last=1 msn=1" + places(target, 16, 8)));
  EXPECT_THAT(d->trace.lines(), has("Immediate Data length=0 last=1 msn=1" + places(0, 0, 0)));
  EXPECT_THAT(c->trace.lines(), has("Atomic Response length=8 last=1 msn=1" + places(sink, 0, 8)));
}

// What is told of it is what was done, whatever has become of the STag since.
TEST_F(Rfc7306StreamTest, AnAtomicPinsItsTargetOnceWithATraceToo) {
  const uint32_t target = d->memory.Add(64);
  PostAdd(*c, c->memory.Add(64), target, 1, 16);
  c->Fill();
  const int before = d->memory.pins_taken();
  Deliver(*c, *d);
  EXPECT_EQ(d->memory.pins_taken() - before, 1);
}

// --- Order and limits ---

TEST_F(RdmapStreamTest, CompletionsComeInOrderOfSubmission) {
  const uint32_t source = b.memory.Add(400);
  const uint32_t local = a.memory.Add(400);
  b.PostReceive(400);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 400)});
  a.PostSend(local, 10);
  a.Fill();
  Deliver(a, b);
  // The Send has left, but the Read before it is not answered.
  EXPECT_EQ(b.TakeReceives().size(), 1u);
  EXPECT_TRUE(a.TakeSends().empty());
  Run();
  const auto sends = a.TakeSends();
  ASSERT_EQ(sends.size(), 2u);
  EXPECT_EQ(sends[0].work->opcode, SendOpcode::kRead);
  EXPECT_EQ(sends[1].work->opcode, SendOpcode::kSend);
}

TEST_F(RdmapStreamTest, FenceWaitsForEarlierReads) {
  const uint32_t source = b.memory.Add(400);
  const uint32_t local = a.memory.Add(400);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 400)});
  a.Post({.opcode = SendOpcode::kWrite, .fence = true});
  a.Fill();
  EXPECT_EQ(a.out.records.size(), 1u);
  Deliver(a, b);
  EXPECT_FALSE(a.Fill());
  Run();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
}

TEST_F(RdmapStreamTest, ReadsBeyondOrdWaitInTheQueue) {
  const uint32_t source = b.memory.Add(400);
  const uint32_t local = a.memory.Add(400);
  for (int i = 0; i < 6; ++i) {
    a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 8)});
  }
  a.Fill();
  EXPECT_EQ(a.out.records.size(), 4u);
  Run();
  EXPECT_EQ(a.TakeSends().size(), 6u);
  EXPECT_TRUE(b.stream.Receiving());
}

TEST_F(RdmapStreamTest, ReadWithoutOrdIsRefusedInsteadOfWaitingForever) {
  End none(RdmapOptions{.ird = 4, .ord = 0}, "none");
  const uint32_t local = none.memory.Add(400);
  none.Post({.opcode = SendOpcode::kRead}, {none.Sge(local, 0, 8)});
  none.Fill();
  EXPECT_THAT(none.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalOperationError));
}

TEST_F(RdmapStreamTest, AnswersAndOwnWorkTakeTurns) {
  const uint32_t source = b.memory.Add(2000);
  const uint32_t local = a.memory.Add(2000);
  for (int i = 0; i < 3; ++i) {
    a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 500)});
  }
  a.Fill();
  Deliver(a, b);
  for (int i = 0; i < 3; ++i) {
    b.Post({.opcode = SendOpcode::kWrite, .remote_stag = local, .remote_offset = At(local)}, {b.Sge(source, 0, 500)});
  }
  b.Fill();
  // Message by message, and never one inside another.
  std::vector<RdmapOpcode> messages;
  bool last = true;
  while (!b.out.records.empty()) {
    const Bytes record = b.Leave();
    const auto header = wire::DecodeSegment(ConstBytes(record).first(kMaxRecordHead), record.size());
    ASSERT_TRUE(header.has_value());
    if (last) messages.push_back(header->opcode());
    EXPECT_EQ(messages.back(), header->opcode());
    last = header->last;
  }
  EXPECT_THAT(messages, ElementsAre(RdmapOpcode::kReadResponse, RdmapOpcode::kWrite, RdmapOpcode::kReadResponse,
                                    RdmapOpcode::kWrite, RdmapOpcode::kReadResponse, RdmapOpcode::kWrite));
}

// --- Connection opening ---

TEST_F(RdmapStreamTest, ResponderHoldsItsQueueUntilTheFirstRecord) {
  End held(RdmapOptions{.hold_until_first_record = true}, "held");
  held.Post({.opcode = SendOpcode::kWrite});
  EXPECT_FALSE(held.Fill());
  EXPECT_FALSE(held.stream.FirstRecordReceived());
  a.stream.Nudge();
  a.Fill();
  ASSERT_EQ(a.out.records.size(), 1u);
  held.Arrive(a.Leave());
  EXPECT_TRUE(held.stream.FirstRecordReceived());
  EXPECT_TRUE(held.Fill());
}

TEST_F(RdmapStreamTest, RtrGoesAheadOfSubmittedWork) {
  b.PostReceive(10);
  a.Post({.opcode = SendOpcode::kSend});
  a.stream.SendRtr(RtrKind::kWrite);
  a.Fill();
  ASSERT_EQ(a.out.records.size(), 2u);
  // The very bytes that siw sends.
  EXPECT_EQ(ToHex(a.out.records[0].header), "c140000000010000000000000000");
  Run();
  EXPECT_EQ(a.TakeSends().size(), 1u);
  EXPECT_EQ(b.TakeReceives().size(), 1u);
}

TEST_F(RdmapStreamTest, RtrReadIsAnsweredAndCompletesNoWork) {
  a.stream.SendRtr(RtrKind::kRead);
  const uint32_t source = b.memory.Add(8);
  const uint32_t local = a.memory.Add(8);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 8)});
  EXPECT_FALSE(a.stream.RtrReadAnswered());
  Run();
  EXPECT_TRUE(a.stream.RtrReadAnswered());
  EXPECT_TRUE(b.stream.FirstRecordReceived());
  EXPECT_EQ(a.TakeSends().size(), 1u);
  EXPECT_FALSE(a.stream.HasOutstandingWork());
}

TEST_F(RdmapStreamTest, NudgeWaitsForTheEndOfAMessage) {
  const uint32_t local = a.memory.Add(600);
  b.PostReceive(600);
  a.PostSend(local, 600);
  a.Fill(1);
  a.stream.Nudge();
  Run();
  EXPECT_TRUE(b.stream.Receiving());
  EXPECT_EQ(b.TakeReceives().size(), 1u);
}

// --- Local faults ---

TEST_F(RdmapStreamTest, BadLocalMemoryFailsItsWorkAndFlushesTheRest) {
  const uint32_t local = a.memory.Add(100);
  const uint32_t read_only = a.memory.Add(100, FakeMemory::kNone);
  struct Case {
    SendOpcode opcode;
    ScatterGather sge;
  };
  const std::vector<Case> cases = {
      {SendOpcode::kSend, {.address = At(local), .length = 101, .lkey = local}},
      {SendOpcode::kWrite, {.address = At(local) - 1, .length = 10, .lkey = local}},
      {SendOpcode::kSend, {.address = 0, .length = 10, .lkey = 0x123456}},
      {SendOpcode::kSend, {.address = At(local), .length = 10, .lkey = local ^ 1}},
      {SendOpcode::kRead, {.address = At(read_only), .length = 10, .lkey = read_only}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    End end(RdmapOptions{}, "end");
    EXPECT_EQ(end.memory.Add(100), local);
    EXPECT_EQ(end.memory.Add(100, FakeMemory::kNone), read_only);
    end.PostSend(local, 10);
    end.Post({.opcode = cases[i].opcode}, {cases[i].sge});
    end.PostSend(local, 10);
    end.Fill();
    ExpectTerminate(end, terminate::kRdmapLocalCatastrophic);
    EXPECT_THAT(end.TakeSendStatuses(),
                ElementsAre(WorkStatus::kSuccess, WorkStatus::kLocalProtectionError, WorkStatus::kFlushed))
        << "case " << i;
    end.PostSend(local, 10);
    EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  }
}

TEST_F(RdmapStreamTest, MessageLongerThanTheProfileIsALengthError) {
  End small(RdmapOptions{.max_message_bytes = 100}, "small");
  const uint32_t local = small.memory.Add(101);
  small.PostSend(local, 101);
  small.Fill();
  EXPECT_THAT(small.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalLengthError));
}

TEST_F(RdmapStreamTest, MessageOfMoreThan32BitsIsALengthError) {
  const ScatterGather huge{.address = 0, .length = 0xffffffffu, .lkey = 1};
  a.Post({.opcode = SendOpcode::kWrite}, {huge, huge});
  a.Fill();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalLengthError));
}

TEST_F(RdmapStreamTest, MemoryThatGoesWhileARecordWaitsEndsTheStreamWithoutTerminate) {
  const uint32_t local = a.memory.Add(100);
  a.PostSend(local, 100);
  a.PostSend(local, 100);
  a.Fill();
  a.memory.Invalidate(local);
  EXPECT_TRUE(a.Leave().empty());
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_FALSE(a.Fill());
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError, WorkStatus::kFlushed));
  const auto fault = a.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_THAT(fault->description, HasSubstr("stale STag"));
}

TEST_F(RdmapStreamTest, BadMemoryOfAReceiveFailsIt) {
  const uint32_t to = b.PostReceive(100);
  b.memory.Invalidate(to);
  b.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true), Pattern(10, 1));
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kLocalProtectionError);
  ExpectTerminate(b, terminate::kRdmapLocalCatastrophic);
}

TEST_F(RdmapStreamTest, TheSinkOfAReadMustAdmitThePeersWriting) {
  const uint32_t source = b.memory.Add(100);
  const uint32_t sink = a.memory.Add(100, FakeMemory::kLocalWrite);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(sink, 0, 100)});
  a.Fill();
  ExpectTerminate(a, terminate::kRdmapLocalCatastrophic);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
}

TEST_F(RdmapStreamTest, BadMemoryOfAReadSinkFailsTheRead) {
  const uint32_t source = b.memory.Add(100);
  const uint32_t sink = a.memory.Add(100);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(sink, 0, 100)});
  a.Fill();
  Deliver(a, b);
  a.memory.Invalidate(sink);
  b.Fill();
  Deliver(b, a);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
  ExpectTerminate(a, terminate::kRdmapLocalCatastrophic);
}

// --- The peer's faults: what it sends, and the exact Terminate ---

struct UntaggedFault {
  const char* name;
  SegmentHeader header;
  size_t payload;
  wire::TerminateCode code;
};

TEST_F(RdmapStreamTest, UntaggedHeadersOutOfSequenceAreTerminated) {
  SegmentHeader wrong_queue = SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true);
  wrong_queue.queue_number = 5;
  const std::vector<UntaggedFault> faults = {
      {"MSN 7 for 1", SegmentHeader::Send(RdmapOpcode::kSend, 0, 7, 0, true), 4, terminate::kDdpMsnRange},
      {"MSN 0", SegmentHeader::Send(RdmapOpcode::kSend, 0, 0, 0, true), 4, terminate::kDdpMsnRange},
      {"offset 4 at the beginning", SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 4, true), 4,
       terminate::kDdpMessageOffset},
      {"queue 5", wrong_queue, 4, terminate::kDdpQueueNumber},
      {"longer than the Receive", SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true), 101, terminate::kDdpTooLong},
      {"Read Request with MSN 2", SegmentHeader::Read(2, {}), 0, terminate::kDdpMsnRange},
  };
  for (const UntaggedFault& fault : faults) {
    SCOPED_TRACE(fault.name);
    End end(RdmapOptions{}, "end");
    end.PostReceive(100);
    EXPECT_FALSE(end.Arrive(fault.header, Pattern(fault.payload, 1)));
    ExpectTerminate(end, fault.code);
  }
}

TEST_F(RdmapStreamTest, SecondSegmentMustContinueTheFirst) {
  const std::vector<UntaggedFault> faults = {
      {"hole", SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 41, true), 4, terminate::kDdpMessageOffset},
      {"overlap", SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 39, true), 4, terminate::kDdpMessageOffset},
      {"other message", SegmentHeader::Send(RdmapOpcode::kSend, 0, 2, 40, true), 4, terminate::kDdpMsnRange},
      {"other opcode", SegmentHeader::Send(RdmapOpcode::kSendSolicited, 0, 1, 40, true), 4, terminate::kRdmapOpcode},
      {"too long", SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 40, true), 61, terminate::kDdpTooLong},
  };
  for (const UntaggedFault& fault : faults) {
    SCOPED_TRACE(fault.name);
    End end(RdmapOptions{}, "end");
    end.PostReceive(100);
    EXPECT_TRUE(end.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, false), Pattern(40, 1)));
    EXPECT_FALSE(end.Arrive(fault.header, Pattern(fault.payload, 1)));
    const auto received = end.TakeReceives();
    ASSERT_EQ(received.size(), 1u);
    EXPECT_EQ(received[0].status,
              fault.code == terminate::kDdpTooLong ? WorkStatus::kLocalLengthError : WorkStatus::kFlushed);
    ExpectTerminate(end, fault.code);
  }
}

TEST_F(RdmapStreamTest, SendWithoutAPostedReceiveIsTerminated) {
  b.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true), Pattern(4, 1));
  ExpectTerminate(b, terminate::kDdpNoBuffer);
}

TEST_F(RdmapStreamTest, SendLongerThanTheReceiveFailsItWithALengthErrorAndChangesNothing) {
  const uint32_t to = b.PostReceive(10);
  b.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true), Pattern(11, 1));
  const auto received = b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kLocalLengthError);
  EXPECT_TRUE(SameBytes(b.memory.Bytes(to), Bytes(10)));
  ExpectTerminate(b, terminate::kDdpTooLong);
}

struct MemoryCase {
  const char* name;
  uint32_t stag;
  uint64_t offset;
  uint32_t length;
  wire::TerminateCode write_code;
  wire::TerminateCode read_code;
};

TEST_F(RdmapStreamTest, RemoteAccessFaultsHaveTheirOwnCodes) {
  FakeMemory layout;
  const uint32_t good = layout.Add(100);
  const uint32_t local_only = layout.Add(100, FakeMemory::kLocalWrite);
  const uint32_t foreign = layout.Add(100);
  const uint32_t gone = layout.Add(100);
  const std::vector<MemoryCase> cases = {
      {"unknown STag", 0x7f00005a, 0, 10, terminate::kDdpInvalidStag, terminate::kRdmapInvalidStag},
      {"wrong key", good ^ 1, At(good), 10, terminate::kDdpInvalidStag, terminate::kRdmapInvalidStag},
      {"invalidated", gone, At(gone), 10, terminate::kDdpInvalidStag, terminate::kRdmapInvalidStag},
      {"other protection domain", foreign, At(foreign), 10, terminate::kDdpForeignStag, terminate::kRdmapForeignStag},
      {"one byte too many", good, At(good) + 91, 10, terminate::kDdpBounds, terminate::kRdmapBounds},
      {"before the region", good, At(good) - 1, 10, terminate::kDdpBounds, terminate::kRdmapBounds},
      {"wraps", good, UINT64_MAX - 4, 10, terminate::kDdpOffsetWrap, terminate::kRdmapOffsetWrap},
      {"no permission", local_only, At(local_only), 10, terminate::kRdmapAccess, terminate::kRdmapAccess},
  };
  for (const MemoryCase& c : cases) {
    for (const bool write : {true, false}) {
      SCOPED_TRACE(std::string(write ? "Write: " : "Read: ") + c.name);
      End end(RdmapOptions{}, "end");
      end.memory.Add(100);
      end.memory.Add(100, FakeMemory::kLocalWrite);
      end.memory.MakeForeign(end.memory.Add(100));
      end.memory.Invalidate(end.memory.Add(100));
      if (write) {
        EXPECT_FALSE(end.Arrive(SegmentHeader::Write(c.stag, c.offset, true), Pattern(c.length, 1)));
      } else {
        EXPECT_FALSE(end.Arrive(SegmentHeader::Read(
            1, {.sink_stag = 1, .length = c.length, .source_stag = c.stag, .source_offset = c.offset})));
      }
      EXPECT_TRUE(SameBytes(end.memory.Bytes(good), Bytes(100)));
      ExpectTerminate(end, write ? c.write_code : c.read_code);
    }
  }
}

TEST_F(RdmapStreamTest, TerminateQuotesTheHeaderAtFault) {
  b.Arrive(SegmentHeader::Read(1, {.sink_stag = 1, .length = 5, .source_stag = 0x77, .source_offset = 8}));
  const auto sent = b.SentTerminate();
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(sent->SegmentLength(), 46);
  EXPECT_EQ(sent->DdpHeader().size(), 18u);
  ASSERT_TRUE(sent->QuotedReadRequest().has_value());
  EXPECT_EQ(sent->QuotedReadRequest()->source_stag, 0x77u);

  a.Arrive(SegmentHeader::Write(0x77, 0, true), Pattern(9, 1));
  const auto other = a.SentTerminate();
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(other->SegmentLength(), 23);
  EXPECT_EQ(other->DdpHeader().size(), 14u);
}

TEST_F(RdmapStreamTest, ReadsBeyondIrdAreTerminated) {
  const uint32_t source = b.memory.Add(100);
  for (uint32_t msn = 1; msn <= 4; ++msn) {
    EXPECT_TRUE(b.Arrive(
        SegmentHeader::Read(msn, {.sink_stag = 1, .length = 10, .source_stag = source, .source_offset = At(source)})));
  }
  EXPECT_FALSE(b.Arrive(
      SegmentHeader::Read(5, {.sink_stag = 1, .length = 10, .source_stag = source, .source_offset = At(source)})));
  ExpectTerminate(b, terminate::kRdmapStreamCatastrophic);
}

TEST_F(RdmapStreamTest, SourceThatGoesBeforeTheAnswerIsTerminated) {
  const uint32_t source = b.memory.Add(100);
  b.Arrive(SegmentHeader::Read(1, {.sink_stag = 1, .length = 10, .source_stag = source, .source_offset = At(source)}));
  b.memory.Invalidate(source);
  b.Fill();
  ExpectTerminate(b, terminate::kRdmapInvalidStag);
}

TEST_F(RdmapStreamTest, ReadResponseNobodyAskedForIsTerminated) {
  a.Arrive(SegmentHeader::ReadResponse(1, 0, true), Pattern(4, 1));
  ExpectTerminate(a, terminate::kRdmapOpcode);
}

TEST_F(RdmapStreamTest, ReadResponseMustMatchTheOldestRead) {
  struct Case {
    const char* name;
    uint32_t stag_xor;
    uint64_t offset_add;
    size_t length;
    bool last;
    wire::TerminateCode code;
  };
  const std::vector<Case> cases = {
      {"other STag", 0x100, 0, 100, true, terminate::kDdpInvalidStag},
      {"shifted", 0, 1, 100, true, terminate::kDdpBounds},
      {"too long", 0, 0, 101, true, terminate::kDdpBounds},
      {"too short", 0, 0, 99, true, terminate::kDdpBounds},
      {"complete, but more announced", 0, 0, 100, false, terminate::kDdpBounds},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    End end(RdmapOptions{}, "end");
    const uint32_t sink = end.memory.Add(200);
    end.Post({.opcode = SendOpcode::kRead}, {end.Sge(sink, 0, 100)});
    end.Post({.opcode = SendOpcode::kRead}, {end.Sge(sink, 100, 100)});
    end.Fill();
    while (!end.out.records.empty()) end.Leave();
    EXPECT_FALSE(end.Arrive(SegmentHeader::ReadResponse(sink ^ c.stag_xor, At(sink) + c.offset_add, c.last),
                            Pattern(c.length, 1)));
    EXPECT_TRUE(SameBytes(end.memory.Bytes(sink), Bytes(200)));
    ExpectTerminate(end, c.code);
    EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed, WorkStatus::kFlushed));
  }
}

TEST_F(RdmapStreamTest, InvalidateThatFailsFailsTheReceive) {
  struct Case {
    const char* name;
    bool foreign;
    wire::TerminateCode code;
  };
  for (const Case& c : {Case{"unknown STag", false, terminate::kRdmapCannotInvalidate},
                        Case{"other protection domain", true, terminate::kRdmapProtectionCannotInvalidate}}) {
    SCOPED_TRACE(c.name);
    End end(RdmapOptions{}, "end");
    uint32_t stag = 0x7777005a;
    if (c.foreign) {
      stag = end.memory.Add(10);
      end.memory.MakeForeign(stag);
    }
    const uint32_t to = end.PostReceive(10);
    EXPECT_TRUE(end.Arrive(SegmentHeader::Send(RdmapOpcode::kSendInvalidate, stag, 1, 0, true), Pattern(10, 1)));
    EXPECT_TRUE(SameBytes(end.memory.Bytes(to), Pattern(10, 1)));
    const auto received = end.TakeReceives();
    ASSERT_EQ(received.size(), 1u);
    EXPECT_EQ(received[0].status, WorkStatus::kRemoteInvalidRequest);
    EXPECT_FALSE(received[0].invalidated);
    ExpectTerminate(end, c.code);
  }
}

TEST_F(RdmapStreamTest, RecordTooShortForItsHeaderIsReportedAtOnce) {
  for (size_t size = 0; size < 14; ++size) {
    End end(RdmapOptions{}, "end");
    Bytes record = Pattern(size, 0);
    if (size > 0) record[0] = std::byte{0xc1};
    if (size > 1) record[1] = std::byte{0x40};
    EXPECT_FALSE(end.Arrive(record)) << size;
    ExpectTerminate(end, terminate::kMpaMarkerOrLength);
  }
}

TEST_F(RdmapStreamTest, VersionsAndOpcodesAreChecked) {
  struct Case {
    uint8_t ddp;
    uint8_t rdmap;
    wire::TerminateCode code;
  };
  for (const Case& c :
       {Case{0xc2, 0x40, terminate::kDdpTaggedVersion}, Case{0x42, 0x43, terminate::kDdpUntaggedVersion},
        Case{0x41, 0x83, terminate::kRdmapVersion}, Case{0x41, 0x4c, terminate::kRdmapOpcode},
        Case{0xc1, 0x43, terminate::kRdmapOpcode}, Case{0x41, 0x40, terminate::kRdmapOpcode}}) {
    End end(RdmapOptions{}, "end");
    end.PostReceive(100);
    Bytes record(46);
    record[0] = std::byte{c.ddp};
    record[1] = std::byte{c.rdmap};
    EXPECT_FALSE(end.Arrive(record));
    ExpectTerminate(end, c.code);
  }
}

TEST_F(RdmapStreamTest, LlpFaultIsTerminatedAsMpa) {
  a.stream.OnLlpFault(terminate::kMpaCrc.error_code);
  ExpectTerminate(a, terminate::kMpaCrc);
}

TEST_F(RdmapStreamTest, NothingIsReceivedAfterAFault) {
  b.PostReceive(100);
  b.Arrive(SegmentHeader::Write(0x77, 0, true), Pattern(9, 1));
  EXPECT_FALSE(b.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, true), Pattern(4, 1)));
  EXPECT_EQ(b.receives.posted.size(), 1u);
  ExpectTerminate(b, terminate::kDdpInvalidStag);
}

TEST_F(RdmapStreamTest, TerminateGoesOutAtTheNextRecordBoundaryOfACutMessage) {
  const uint32_t local = a.memory.Add(1000);
  a.PostSend(local, 1000);
  a.Fill(2);
  a.Arrive(SegmentHeader::Write(0x77, 0, true), Pattern(9, 1));
  // Two records of the Send are queued; its memory may not go before they have left.
  EXPECT_TRUE(a.TakeSends().empty());
  a.Fill();
  ASSERT_EQ(a.out.records.size(), 3u);
  a.Leave();
  EXPECT_TRUE(a.TakeSends().empty());
  a.Leave();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  EXPECT_FALSE(a.stream.Finished());
  a.Leave();
  EXPECT_TRUE(a.stream.Finished());
}

TEST_F(RdmapStreamTest, BehindACutMessageOfOursReadsAreNotAnswered) {
  const uint32_t local = a.memory.Add(1000);
  const uint32_t sink = b.memory.Add(100);
  b.PostReceive(1000);
  a.PostSend(local, 1000);
  a.Fill(2);
  b.Post({.opcode = SendOpcode::kRead, .remote_stag = local, .remote_offset = At(local)}, {End::Sge(sink, 0, 100)});
  b.Fill();
  Deliver(b, a);
  a.Arrive(SegmentHeader::Write(0x77, 0, true), Pattern(9, 1));
  EXPECT_FALSE(a.stream.Deadline().has_value());
  a.Fill();
  EXPECT_EQ(a.out.records.size(), 3u) << "half of the Send, and the Terminate";
  Deliver(a, b);
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_THAT(b.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  const auto fault = b.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_TRUE(fault->from_peer);
}

// Whatever is at fault, and however much of the answers has left by then.
TEST_F(RdmapStreamTest, ReadsBeforeAFaultAreAnsweredBeforeTheTerminate) {
  const uint32_t kSize = 700;  // several records
  for (const SendOpcode culprit : {SendOpcode::kRead, SendOpcode::kWrite, SendOpcode::kSend}) {
    for (size_t already = 0; already <= 5; ++already) {
      SCOPED_TRACE(ToString(culprit) + std::string(" after ") + std::to_string(already) + " records");
      End c(RdmapOptions{.ird = 4, .ord = 4}, "c");
      End d(RdmapOptions{.ird = 4, .ord = 4}, "d");
      const uint32_t source = d.memory.Add(kSize);
      const uint32_t sink = c.memory.Add(kSize);
      CopyBytes(d.memory.Bytes(source), Pattern(kSize, 3));
      for (int i = 0; i < 2; ++i) {
        c.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)},
               {End::Sge(sink, 0, kSize)});
      }
      c.Post({.opcode = culprit, .remote_stag = 0x4242}, {End::Sge(sink, 0, 8)});
      c.Fill();
      ASSERT_EQ(c.out.records.size(), 3u);
      for (int i = 0; i < 2; ++i) d.Arrive(c.Leave());
      d.Fill(already);
      d.Arrive(c.Leave());
      EXPECT_FALSE(d.stream.Receiving());
      EXPECT_TRUE(d.stream.Deadline().has_value());
      d.Fill();
      Deliver(d, c);
      EXPECT_TRUE(d.stream.Finished());
      EXPECT_FALSE(d.stream.Deadline().has_value());
      EXPECT_TRUE(c.stream.Finished());
      EXPECT_THAT(c.TakeSendStatuses(),
                  ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess,
                              culprit == SendOpcode::kRead ? WorkStatus::kRemoteAccessError : WorkStatus::kSuccess));
      EXPECT_TRUE(SameBytes(c.memory.Bytes(sink), Pattern(kSize, 3)));
      ASSERT_TRUE(c.stream.TakeFault().has_value()) << "the Terminate has come";
    }
  }
}

TEST_F(RdmapStreamTest, ATerminateWaitsForAnswersOnlySoLong) {
  const uint32_t source = b.memory.Add(2000);
  const uint32_t sink = a.memory.Add(2000);
  b.out.max_ulpdu = 514;  // four records to an answer
  for (int i = 0; i < 2; ++i) {
    a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)},
           {End::Sge(sink, 0, 2000)});
  }
  a.Fill();
  Deliver(a, b);
  b.stream.BeginTurn(Instant(5s));
  EXPECT_FALSE(b.TransportEnd::Arrive(Bytes(40, std::byte{0x41}), Instant(5s)));
  ASSERT_EQ(b.stream.Deadline(), Instant(5s) + b.stream.options().answer_time);
  b.Fill(5);
  Deliver(b, a);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  b.stream.OnDeadline(*b.stream.Deadline() - 1ns);
  b.Fill(1);
  EXPECT_FALSE(b.stream.Finished());
  ASSERT_TRUE(b.stream.Deadline().has_value());
  b.stream.OnDeadline(*b.stream.Deadline());
  EXPECT_FALSE(b.stream.Deadline().has_value());
  ASSERT_EQ(b.out.records.size(), 1u);
  b.Fill();
  EXPECT_EQ(b.out.records.size(), 2u) << "the Terminate, at the next record boundary";
  Deliver(b, a);
  EXPECT_TRUE(b.stream.Finished());
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  const auto fault = a.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_TRUE(fault->from_peer);
}

TEST_F(RdmapStreamTest, SourceThatGoesWithinItsAnswerIsTerminated) {
  const uint32_t first = b.memory.Add(2000);
  const uint32_t second = b.memory.Add(2000);
  const uint32_t sink = a.memory.Add(2000);
  b.out.max_ulpdu = 514;
  for (const uint32_t source : {first, second, first}) {
    a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)},
           {End::Sge(sink, 0, 2000)});
  }
  a.Fill();
  Deliver(a, b);
  b.Fill(6);  // the first answer, and half of the second
  Deliver(b, a);
  b.memory.Invalidate(second);
  b.Fill();
  Deliver(b, a);
  EXPECT_TRUE(b.stream.Finished());
  EXPECT_THAT(a.TakeSendStatuses(),
              ElementsAre(WorkStatus::kSuccess, WorkStatus::kRemoteAccessError, WorkStatus::kFlushed));
  const auto fault = a.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ((wire::TerminateCode{fault->layer, fault->error_type, fault->error_code}), terminate::kRdmapInvalidStag);
  EXPECT_THAT(fault->description, HasSubstr("our Read of 2000 bytes"));
}

// --- The peer's Terminate ---

TEST_F(RdmapStreamTest, PeersTerminateFailsTheReadItNamesAndNoneBeforeIt) {
  const uint32_t local = a.memory.Add(100);
  const uint32_t source = b.memory.Add(100);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source)}, {a.Sge(local, 0, 50)});
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = 0x4242, .remote_offset = 0}, {a.Sge(local, 0, 50)});
  a.PostSend(local, 10);
  a.Fill();
  // The first Read is accepted, the second is not.
  b.Arrive(a.Leave());
  EXPECT_FALSE(b.Arrive(a.Leave()));
  a.Leave();
  b.Fill();
  Deliver(b, a);
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_THAT(a.TakeSendStatuses(),
              ElementsAre(WorkStatus::kSuccess, WorkStatus::kRemoteAccessError, WorkStatus::kSuccess));
  const auto fault = a.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_TRUE(fault->from_peer);
  EXPECT_FALSE(fault->siw_bit_order);
  EXPECT_THAT(fault->description, HasSubstr("our Read of 50 bytes from STag 0x00004242"));
}

TEST_F(RdmapStreamTest, PeersTerminateFailsAnUnfinishedWriteItNames) {
  const uint32_t local = a.memory.Add(2000);
  a.Post({.opcode = SendOpcode::kWrite, .remote_stag = 0x4242, .remote_offset = 77}, {a.Sge(local, 0, 2000)});
  a.Fill(1);
  EXPECT_FALSE(b.Arrive(a.Leave()));
  b.Fill();
  Deliver(b, a);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteAccessError));
}

TEST_F(RdmapStreamTest, PeersTerminateFailsAnUnfinishedSendItNames) {
  const uint32_t local = a.memory.Add(2000);
  a.PostSend(local, 2000);
  a.Fill(1);
  EXPECT_FALSE(b.Arrive(a.Leave()));
  b.Fill();
  Deliver(b, a);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteOperationError));
}

TEST_F(RdmapStreamTest, SiwsTerminateOfAReadIsUnderstood) {
  const uint32_t local = a.memory.Add(100);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = 0x4242, .remote_offset = 0}, {a.Sge(local, 0, 0x40)});
  a.Fill();
  Bytes request = a.Leave();
  // siw: its own bit order, the Read's size for its MSN, segment length without headers.
  ByteWriter(MutableBytes(request).subspan(10, 4)).U32(0x40);
  wire::TerminateHeader header = wire::TerminateHeader::For(terminate::kRdmapInvalidStag, request, 0);
  Bytes payload(header.EncodedSize());
  ByteWriter writer(payload);
  header.EncodeAsSiw(writer);
  EXPECT_EQ(payload[0], std::byte{0x10});
  EXPECT_EQ(payload[2], std::byte{0x07});
  a.Arrive(SegmentHeader::Terminate(), payload);
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteAccessError));
  const auto fault = a.stream.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_TRUE(fault->siw_bit_order);
  EXPECT_EQ((wire::TerminateCode{fault->layer, fault->error_type, fault->error_code}), terminate::kRdmapInvalidStag);
}

TEST_F(RdmapStreamTest, AnyTerminatePayloadEndsTheStreamInOrder) {
  // Every length up to beyond the longest, and one that fills an FPDU.
  std::vector<size_t> sizes;
  for (size_t size = 0; size < 90; ++size) sizes.push_back(size);
  sizes.push_back(65000);
  for (const size_t size : sizes) {
    End end(RdmapOptions{}, "end");
    const uint32_t local = end.memory.Add(100);
    end.Post({.opcode = SendOpcode::kRead}, {end.Sge(local, 0, 10)});
    end.Fill();
    end.Leave();
    end.Arrive(SegmentHeader::Terminate(), Pattern(size, 0x11));
    // What is too long to be a Terminate is refused as such; either way the stream ends.
    EXPECT_FALSE(end.stream.Receiving()) << size;
    EXPECT_TRUE(end.stream.TakeFault().has_value());
    EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  }
}

TEST_F(RdmapStreamTest, NoTerminateAnswersATerminate) {
  const wire::TerminateHeader header = wire::TerminateHeader::For(terminate::kMpaCrc);
  Bytes payload(header.EncodedSize());
  ByteWriter writer(payload);
  header.Encode(writer);
  a.Arrive(SegmentHeader::Terminate(), payload);
  EXPECT_FALSE(a.Fill());
  EXPECT_TRUE(a.stream.Finished());
}

// --- Endings ---

TEST_F(RdmapStreamTest, LostStreamFlushesEverything) {
  const uint32_t local = a.memory.Add(1000);
  a.PostReceive(100);
  a.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, false), Pattern(40, 1));
  a.PostSend(local, 1000);
  a.Post({.opcode = SendOpcode::kRead}, {a.Sge(local, 0, 10)});
  a.PostSend(local, 10);
  a.Fill(6);
  a.stream.OnLost(false);
  EXPECT_TRUE(a.stream.Finished());
  EXPECT_FALSE(a.stream.Receiving());
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed, WorkStatus::kFlushed, WorkStatus::kFlushed));
  const auto received = a.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].status, WorkStatus::kFlushed);
  EXPECT_FALSE(a.stream.TakeFault().has_value());
  EXPECT_FALSE(a.Fill());
  EXPECT_FALSE(a.stream.HasOutstandingWork());
}

TEST_F(RdmapStreamTest, FlushOnCommandSendsNoTerminate) {
  const uint32_t local = a.memory.Add(1000);
  a.PostSend(local, 10);
  a.stream.Flush();
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  EXPECT_FALSE(a.Fill());
  EXPECT_TRUE(a.stream.Finished());
  a.PostSend(local, 10);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
}

// The words of a trace for memory.
std::string In(uint32_t stag, uint64_t offset) {
  return " stag=" + std::to_string(stag) + " offset=" + std::to_string(offset);
}

TEST_F(RdmapStreamTest, TraceNamesTheMemoryOfWritesByRegionAndOffset) {
  const uint32_t to = b.memory.Add(500);
  const uint32_t from = a.memory.Add(500);
  a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = At(to) + 33}, {a.Sge(from, 40, 300)});
  a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = At(to) + 50}, {});
  Run();
  EXPECT_THAT(a.trace.lines(),
              ElementsAre(HasSubstr("a work.started opcode=Write length=300 msn=0" + In(from, 40) + " run=300"),
                          HasSubstr("a work.started opcode=Write length=0 msn=0" + In(0, 0) + " run=0")));
  EXPECT_THAT(
      b.trace.lines(),
      ElementsAre(HasSubstr("b record.placed opcode=Write length=242 last=0 msn=0" + In(to, 33) + " run=242"),
                  HasSubstr("b record.placed opcode=Write length=58 last=1 msn=0" + In(to, 33 + 242) + " run=58"),
                  HasSubstr("b record.placed opcode=Write length=0 last=1 msn=0" + In(0, 0) + " run=0")));
}

TEST_F(RdmapStreamTest, TraceNamesEachPartThatASegmentIsScatteredTo) {
  const uint32_t from = a.memory.Add(400);
  const uint32_t first = b.memory.Add(100);
  const uint32_t second = b.memory.Add(400);
  b.PostReceive({b.Sge(first, 90, 10), b.Sge(second, 7, 200), b.Sge(first, 0, 80)});
  a.PostSend(from, 260);
  Run();
  const std::string placed = "b record.placed opcode=Send length=";
  EXPECT_THAT(b.trace.lines(), ElementsAre(HasSubstr(placed + "238 last=0 msn=1" + In(first, 90) + " run=10"),
                                           HasSubstr("b part.placed length=200" + In(second, 7)),
                                           HasSubstr("b part.placed length=28" + In(first, 0)),
                                           HasSubstr(placed + "22 last=1 msn=1" + In(first, 28) + " run=22")));
}

TEST_F(RdmapStreamTest, TraceNamesBothEndsOfAReadByRegionAndOffset) {
  const uint32_t source = b.memory.Add(500);
  const uint32_t sink = a.memory.Add(500);
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source) + 77}, {a.Sge(sink, 5, 250)});
  a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = At(source) + 1}, {});
  Run();
  EXPECT_THAT(b.trace.lines(),
              ElementsAre(HasSubstr("b record.placed opcode=Read Request length=0 last=1 msn=1" + In(0, 0) + " run=0"),
                          HasSubstr("b record.placed opcode=Read Request length=0 last=1 msn=2" + In(0, 0) + " run=0"),
                          HasSubstr("b response.started length=250 msn=1" + In(source, 77)),
                          HasSubstr("b response.started length=0 msn=2" + In(0, 0))));
  const std::string placed = "a record.placed opcode=Read Response length=";
  EXPECT_THAT(a.trace.lines(), ElementsAre(HasSubstr("a work.started"), HasSubstr("a work.started"),
                                           HasSubstr(placed + "242 last=0 msn=0" + In(sink, 5) + " run=242"),
                                           HasSubstr(placed + "8 last=1 msn=0" + In(sink, 5 + 242) + " run=8"),
                                           HasSubstr(placed + "0 last=1 msn=0" + In(0, 0) + " run=0")));
}

TEST_F(RdmapStreamTest, TraceOfTheLastOfSeveralAttemptsToPlaceCountsOnce) {
  const uint32_t from = a.memory.Add(100);
  const uint32_t to = b.PostReceive(100);
  a.PostSend(from, 60);
  a.Fill();
  const Bytes record = a.Leave();
  ASSERT_TRUE(
      b.stream.OnRecord({.head = ConstBytes(record).first(kMaxRecordHead), .length = record.size()}, Instant{}));
  for (int attempt = 0; attempt < 3; ++attempt) {
    ASSERT_TRUE(b.stream.PinDestination());
    b.stream.UnpinDestination();
  }
  b.stream.OnPlaced(Instant{});
  EXPECT_THAT(b.trace.lines(), ElementsAre(HasSubstr("length=60 last=1 msn=1" + In(to, 0) + " run=60")));
}

// --- Random operations against a model ---

// Two ends submit random work; records move one at a time in random order. At the end each byte of both memories must
// be what the operations say, completions must have come in order, and nobody may have touched a guard byte.
class RdmapProperty {
 public:
  explicit RdmapProperty(uint64_t seed) : prng_(seed) {
    for (Side& side : sides_) {
      side.end =
          std::make_unique<End>(RdmapOptions{.ird = 3, .ord = static_cast<uint16_t>(prng_.Between(1, 3))}, "side");
      side.end->out.max_ulpdu = prng_.OneIn(3) ? prng_.Between(128, 160) : prng_.Between(128, 9000);
      side.end->out.capacity = prng_.Between(1, 8);
      side.arena = side.end->memory.Add(kArena);
      side.source = side.end->memory.Add(kArena);
      CopyBytes(side.end->memory.Bytes(side.source), Pattern(kArena, static_cast<uint8_t>(prng_.Next())));
      side.expected.assign(kArena, std::byte{0});
    }
  }

  void Run() {
    int to_submit = 60;
    for (int idle = 0; idle < 200;) {
      const size_t from = prng_.Below(2);
      Side& side = sides_[from];
      bool moved = false;
      switch (prng_.Below(4)) {
        case 0:
          if (to_submit > 0) {
            --to_submit;
            SubmitRandom(side, sides_[1 - from]);
            moved = true;
          }
          break;
        case 1:
          moved = side.end->Fill(prng_.Between(1, 3));
          break;
        default:
          if (!side.end->out.records.empty()) {
            ASSERT_TRUE(sides_[1 - from].end->Arrive(side.end->Leave()));
            moved = true;
          }
          break;
      }
      for (Side& s : sides_) Collect(s);
      if (::testing::Test::HasFatalFailure()) return;
      idle = moved ? 0 : idle + 1;
    }
    for (Side& side : sides_) {
      EXPECT_TRUE(side.sent.empty()) << side.sent.size() << " never completed";
      EXPECT_TRUE(side.receives.empty());
      EXPECT_FALSE(side.end->stream.HasOutstandingWork());
      EXPECT_TRUE(side.end->stream.Receiving());
      EXPECT_TRUE(side.end->memory.GuardsIntact());
      EXPECT_TRUE(SameBytes(side.end->memory.Bytes(side.arena), side.expected));
    }
  }

 private:
  static constexpr size_t kArena = 400000;

  struct ExpectedReceive {
    const ReceiveWork* work;
    uint32_t length;
    bool solicited;
    uint32_t invalidated;  // 0: none
  };
  struct Side {
    std::unique_ptr<End> end;
    uint32_t arena = 0;   // all that is ever written here, in pieces that do not overlap
    uint32_t source = 0;  // all that is ever read from here
    size_t arena_used = 0;
    Bytes expected;
    std::deque<const SendWork*> sent;
    std::deque<ExpectedReceive> receives;
  };

  uint32_t RandomLength() {
    switch (prng_.Below(4)) {
      case 0:
        return 0;
      case 1:
        return static_cast<uint32_t>(prng_.Below(20));
      default:
        return static_cast<uint32_t>(prng_.Below(4000));
    }
  }

  // Cuts [offset, offset + length) of a region into a random scatter/gather list.
  std::vector<ScatterGather> Cut(End& end, uint32_t stag, size_t offset, uint32_t length) {
    std::vector<ScatterGather> list;
    while (length > 0) {
      const auto n = static_cast<uint32_t>(prng_.OneIn(2) ? length : prng_.Between(1, length));
      list.push_back(end.Sge(stag, offset, n));
      offset += n;
      length -= n;
      if (prng_.OneIn(8)) list.push_back({});
    }
    return list;
  }

  size_t Allocate(Side& side, size_t length) {
    const size_t at = side.arena_used + prng_.Below(10);
    side.arena_used = at + length;
    EXPECT_LE(side.arena_used, kArena);
    return at;
  }

  void SubmitRandom(Side& side, Side& peer) {
    const uint32_t length = RandomLength();
    const size_t source_at = prng_.Below(kArena - length);
    SendWork work{.solicited = prng_.OneIn(2), .fence = prng_.OneIn(4)};
    switch (prng_.Below(4)) {
      case 0: {  // Write
        const size_t to = Allocate(peer, length);
        work.opcode = SendOpcode::kWrite;
        work.remote_stag = peer.arena;
        work.remote_offset = FakeMemory::Address(peer.arena) + to;
        CopyBytes(MutableBytes(peer.expected).subspan(to), Source(side, source_at, length));
        side.sent.push_back(side.end->Post(work, Cut(*side.end, side.source, source_at, length)));
        return;
      }
      case 1: {  // Read
        const size_t to = Allocate(side, length);
        work.opcode = SendOpcode::kRead;
        work.remote_stag = peer.source;
        work.remote_offset = FakeMemory::Address(peer.source) + source_at;
        CopyBytes(MutableBytes(side.expected).subspan(to), Source(peer, source_at, length));
        side.sent.push_back(side.end->Post(work, Cut(*side.end, side.arena, to, length)));
        return;
      }
      default: {  // Send, half of them with Invalidate
        const size_t to = Allocate(peer, length + 8);
        work.opcode = prng_.OneIn(2) ? SendOpcode::kSend : SendOpcode::kSendInvalidate;
        uint32_t invalidated = 0;
        if (work.opcode == SendOpcode::kSendInvalidate) {
          invalidated = work.remote_stag = peer.end->memory.Add(8);
        }
        CopyBytes(MutableBytes(peer.expected).subspan(to), Source(side, source_at, length));
        const ReceiveWork* receive = peer.end->PostReceive(Cut(*peer.end, peer.arena, to, length + 8));
        peer.receives.push_back({receive, length, work.solicited, invalidated});
        side.sent.push_back(side.end->Post(work, Cut(*side.end, side.source, source_at, length)));
        return;
      }
    }
  }

  static ConstBytes Source(Side& side, size_t at, size_t length) {
    return ConstBytes(side.end->memory.Bytes(side.source)).subspan(at, length);
  }

  void Collect(Side& side) {
    for (const SendCompletion& c : side.end->TakeSends()) {
      ASSERT_FALSE(side.sent.empty());
      EXPECT_EQ(c.work, side.sent.front());
      EXPECT_EQ(c.status, WorkStatus::kSuccess);
      side.sent.pop_front();
    }
    for (const ReceiveCompletion& c : side.end->TakeReceives()) {
      ASSERT_FALSE(side.receives.empty());
      const ExpectedReceive& expected = side.receives.front();
      EXPECT_EQ(c.work, expected.work);
      EXPECT_EQ(c.status, WorkStatus::kSuccess);
      EXPECT_EQ(c.byte_length, expected.length);
      EXPECT_EQ(c.solicited, expected.solicited);
      EXPECT_EQ(c.invalidated, expected.invalidated != 0);
      EXPECT_EQ(c.invalidated_stag, expected.invalidated);
      EXPECT_TRUE(expected.invalidated == 0 || !side.end->memory.IsValid(expected.invalidated));
      side.receives.pop_front();
    }
  }

  Prng prng_;
  std::array<Side, 2> sides_;
};

TEST(RdmapStreamPropertyTest, RandomWorkArrivesExactly) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RdmapProperty(seed).Run();
    if (::testing::Test::HasFailure()) return;
  }
}

// A hostile peer: random records, well-formed headers with random fields among them. Whatever comes, only memory that
// was exposed may change, and what the stream keeps stays bounded.
TEST(RdmapStreamPropertyTest, RandomRecordsNeverTouchWhatWasNotExposed) {
  Prng prng(99);
  int terminated = 0;
  int answers = 0, taken = 0;  // Atomic Responses
  for (int round = 0; round < 400; ++round) {
    const bool extended = prng.OneIn(2);
    End end(RdmapOptions{.ird = 3,
                         .ord = 2,
                         .extensions = extended ? wire::RdmapExtensions::kRfc7306 : wire::RdmapExtensions::kNone},
            "end");
    const uint32_t exposed = end.memory.Add(300);
    const uint32_t secret = end.memory.Add(300, FakeMemory::kLocalWrite, 0x42);
    const uint32_t sink = end.memory.Add(300);
    for (int i = 0; i < 3; ++i) end.PostReceive(100);
    const bool atomic = extended && prng.OneIn(2);
    end.Post({.opcode = atomic ? SendOpcode::kFetchAdd : SendOpcode::kRead, .remote_stag = 9},
             {end.Sge(sink, 0, atomic ? 8 : 50)});
    end.Fill();
    uint32_t send_msn = 1;
    uint32_t read_msn = 1;
    for (int i = 0; i < 40 && end.stream.Receiving(); ++i) {
      const auto stag = [&] {
        return prng.OneIn(4) ? static_cast<uint32_t>(prng.Next()) : prng.OneIn(6) ? secret : exposed;
      };
      const auto offset = [&] { return FakeMemory::Address(exposed) + prng.Below(310) - 3; };
      const Bytes payload = Pattern(prng.Below(60), 7);
      switch (prng.Below(extended ? 9 : 6)) {
        case 0:
          end.Arrive(SegmentHeader::Write(stag(), offset(), prng.OneIn(2)), payload);
          break;
        case 6:
          end.Arrive(SegmentHeader::Immediate(prng.OneIn(2), send_msn++), Pattern(prng.OneIn(6) ? 7 : 8, 1));
          break;
        case 7: {
          Bytes request(wire::kAtomicRequestSize);
          ByteWriter writer(request);
          wire::AtomicRequest::FetchAdd(1, stag(), offset(), prng.Next()).Encode(writer);
          end.Arrive(SegmentHeader::AtomicRequest(read_msn++), request);
          break;
        }
        case 8:
          ++answers;
          if (ArriveWith(end, SegmentHeader::AtomicResponse(1),
                         wire::AtomicResponse{prng.OneIn(4) ? 2u : 1u, prng.Next()}) &&
              end.stream.Receiving()) {
            ++taken;
          }
          break;
        case 1:
          end.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, stag(), send_msn++, 0, true), payload);
          break;
        case 2:
          end.Arrive(SegmentHeader::Read(read_msn++, {.sink_stag = 1,
                                                      .length = static_cast<uint32_t>(prng.Below(200)),
                                                      .source_stag = stag(),
                                                      .source_offset = offset()}));
          break;
        case 3:
          end.Arrive(SegmentHeader::ReadResponse(prng.OneIn(2) ? sink : stag(), FakeMemory::Address(sink), true),
                     Pattern(prng.OneIn(2) ? 50 : prng.Below(80), 1));
          break;
        case 4: {
          Bytes record = Pattern(prng.Below(80), static_cast<uint8_t>(prng.Next()));
          if (prng.OneIn(2) && record.size() > 2) {
            record[0] = std::byte{0x41};
            record[1] = static_cast<std::byte>(0x40 | prng.Below(extended ? 12 : 8));
          }
          end.Arrive(record);
          break;
        }
        default:
          end.Fill(2);
          if (!end.out.records.empty()) end.Leave();
          break;
      }
    }
    if (!end.stream.Receiving()) ++terminated;
    EXPECT_TRUE(end.memory.GuardsIntact());
    const MutableBytes kept = end.memory.Bytes(secret);
    EXPECT_TRUE(std::all_of(kept.begin(), kept.end(), [](std::byte b) { return b == std::byte{0x42}; }));
    EXPECT_LE(end.out.records.size(), end.out.capacity);
    end.stream.OnLost(false);
    EXPECT_EQ(end.TakeSends().size(), 1u);
    EXPECT_FALSE(end.stream.HasOutstandingWork());
  }
  EXPECT_GT(terminated, 200);
  EXPECT_GT(taken, 5);
  EXPECT_GT(answers, 2 * taken);
}

}  // namespace
}  // namespace stagecoach::emu
