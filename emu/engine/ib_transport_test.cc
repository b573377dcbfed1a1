// IbTransport: every operation, what is on the wire, order and limits, errors of both sides, states and carriers.
#include "emu/engine/ib_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "emu/engine/ib_test_support.h"

namespace stagecoach::emu {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using wire::IbHeader;
using wire::IbOp;
using wire::IbService;

constexpr uint32_t kMtu = 256;
constexpr uint32_t kSizes[] = {0, 1, kMtu - 1, kMtu, kMtu + 1, 3 * kMtu, 3 * kMtu + 5};

std::vector<IbOp> OpsOf(const IbLink& link) {
  std::vector<IbOp> ops;
  for (const TestBytes& record : link.log) ops.push_back(HeaderOf(record).op);
  return ops;
}

IbOptions Uc() {
  IbOptions options = TestOptions();
  options.service = IbService::kUc;
  return options;
}

uint64_t Word(IbEnd& end, uint32_t key, size_t offset = 0) {
  uint64_t value = 0;
  CopyBytes(AsMutableBytes(&value, sizeof(value)), end.memory.Bytes(key).subspan(offset));
  return value;
}
void SetWord(IbEnd& end, uint32_t key, uint64_t value) {
  CopyBytes(end.memory.Bytes(key), AsBytes(&value, sizeof(value)));
}

class Services : public ::testing::TestWithParam<IbService> {
 protected:
  IbOptions Options() const { return GetParam() == IbService::kRc ? TestOptions() : Uc(); }
};
INSTANTIATE_TEST_SUITE_P(IbTransport, Services, ::testing::Values(IbService::kRc, IbService::kUc),
                         [](const auto& info) { return std::string(ToString(info.param)); });

// --- Operations ---

TEST_P(Services, SendOfEverySizeFillsTheNextReceive) {
  for (const uint32_t size : kSizes) {
    for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kSendImmediate}) {
      IbPair pair(Options(), Options());
      const uint32_t from = pair.a.AddPattern(1000, size);
      const uint32_t to = pair.b.PostReceive(1000);
      const SendWork* work =
          pair.a.Post({.opcode = opcode, .solicited = true, .immediate = 0x04030201}, {pair.a.Sge(from, 0, size)});
      EXPECT_TRUE(pair.Run());
      const auto sends = pair.a.TakeSends();
      ASSERT_EQ(sends.size(), 1u);
      EXPECT_EQ(sends[0].work, work);
      EXPECT_EQ(sends[0].status, WorkStatus::kSuccess);
      EXPECT_EQ(sends[0].byte_length, 0u);
      const auto received = pair.b.TakeReceives();
      ASSERT_EQ(received.size(), 1u);
      EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
      EXPECT_EQ(received[0].byte_length, size);
      EXPECT_TRUE(received[0].solicited);
      EXPECT_FALSE(received[0].invalidated);
      EXPECT_FALSE(received[0].write_immediate);
      EXPECT_EQ(received[0].has_immediate, opcode == SendOpcode::kSendImmediate);
      EXPECT_EQ(received[0].immediate, opcode == SendOpcode::kSendImmediate ? 0x04030201u : 0u);
      EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).first(size), pair.a.memory.Bytes(from).first(size)));
      EXPECT_FALSE(pair.a.transport.HasOutstandingWork());
      EXPECT_TRUE(pair.b.memory.GuardsIntact());
    }
  }
}

TEST_P(Services, WriteOfEverySizePlacesBytesAndNotOneMore) {
  for (const uint32_t size : kSizes) {
    for (const SendOpcode opcode : {SendOpcode::kWrite, SendOpcode::kWriteImmediate}) {
      IbPair pair(Options(), Options());
      const uint32_t from = pair.a.AddPattern(1000, size);
      const uint32_t to = pair.b.memory.Add(2000, FakeMemory::kRemoteWrite, 0xee);
      const ReceiveWork* receive = pair.b.PostReceive(std::vector<ScatterGather>{});
      pair.a.Post({.opcode = opcode, .remote_stag = to, .remote_offset = pair.b.At(to, 500), .immediate = 7},
                  {pair.a.Sge(from, 0, size)});
      EXPECT_TRUE(pair.Run());
      EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
      const ConstBytes target = pair.b.memory.Bytes(to);
      EXPECT_TRUE(SameBytes(target.subspan(500, size), pair.a.memory.Bytes(from).first(size)));
      EXPECT_EQ(target[499], std::byte{0xee});
      EXPECT_EQ(target[500 + size], std::byte{0xee});
      const auto received = pair.b.TakeReceives();
      if (opcode == SendOpcode::kWrite) {
        EXPECT_TRUE(received.empty());
        continue;
      }
      ASSERT_EQ(received.size(), 1u);
      EXPECT_EQ(received[0].work, receive);
      EXPECT_EQ(received[0].byte_length, size);
      EXPECT_TRUE(received[0].write_immediate);
      EXPECT_TRUE(received[0].has_immediate);
      EXPECT_EQ(received[0].immediate, 7u);
      EXPECT_FALSE(received[0].solicited);
    }
  }
}

TEST(IbTransportTest, ReadOfEverySizeBringsBytesAndSaysHowMany) {
  for (const uint32_t size : kSizes) {
    IbPair pair;
    const uint32_t source = pair.b.AddPattern(1000, size, FakeMemory::kRemoteRead);
    const uint32_t first = pair.a.memory.Add(1000, FakeMemory::kLocalWrite);
    const uint32_t second = pair.a.memory.Add(1000, FakeMemory::kLocalWrite);
    const uint32_t cut = size / 3;
    pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source, 100)},
                {pair.a.Sge(first, 10, cut), pair.a.Sge(second, 0, size - cut)});
    EXPECT_TRUE(pair.Run());
    const auto sends = pair.a.TakeSends();
    ASSERT_EQ(sends.size(), 1u);
    EXPECT_EQ(sends[0].status, WorkStatus::kSuccess);
    EXPECT_EQ(sends[0].byte_length, size);
    const ConstBytes from = pair.b.memory.Bytes(source).subspan(100);
    EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(first).subspan(10, cut), from.first(cut)));
    EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(second).first(size - cut), from.subspan(cut, size - cut)));
    EXPECT_FALSE(pair.b.transport.HasOutstandingWork());
    EXPECT_TRUE(pair.a.memory.GuardsIntact());
  }
}

TEST(IbTransportTest, AtomicsReturnWhatStoodThereInHostOrder) {
  IbPair pair;
  const uint32_t target = pair.b.memory.Add(16, FakeMemory::kRemoteAtomic);
  SetWord(pair.b, target, 0x1122334455667788);
  const uint32_t results = pair.a.memory.Add(24, FakeMemory::kLocalWrite);
  const SendWork at{.remote_stag = target, .remote_offset = pair.b.At(target)};
  SendWork add = at, miss = at, swap = at;
  add.opcode = SendOpcode::kFetchAdd;
  add.compare_add = 0x10;
  miss.opcode = swap.opcode = SendOpcode::kCompareSwap;
  miss.compare_add = 1;
  miss.swap = 2;
  swap.compare_add = 0x1122334455667798;
  swap.swap = 3;
  pair.a.Post(add, {pair.a.Sge(results, 0, 8)});
  pair.a.Post(miss, {pair.a.Sge(results, 8, 3), pair.a.Sge(results, 11, 5)});
  pair.a.Post(swap, {pair.a.Sge(results, 16, 8)});
  EXPECT_TRUE(pair.Run());
  const auto sends = pair.a.TakeSends();
  ASSERT_EQ(sends.size(), 3u);
  for (const SendCompletion& c : sends) {
    EXPECT_EQ(c.status, WorkStatus::kSuccess);
    EXPECT_EQ(c.byte_length, 8u);
  }
  EXPECT_EQ(Word(pair.a, results), 0x1122334455667788u);
  EXPECT_EQ(Word(pair.a, results, 8), 0x1122334455667798u);
  EXPECT_EQ(Word(pair.a, results, 16), 0x1122334455667798u);
  EXPECT_EQ(Word(pair.b, target), 3u);
  EXPECT_EQ(Word(pair.b, target, 8), 0u);
  EXPECT_EQ(pair.b.memory.atomics(), 3);
}

TEST(IbTransportTest, SendWithInvalidateRevokesTheKeyBeforeTheReceiveCompletes) {
  for (const uint32_t size : kSizes) {
    IbPair pair;
    const uint32_t exposed = pair.b.memory.Add(100);
    pair.b.PostReceive(1000);
    const uint32_t from = pair.a.memory.Add(1000);
    pair.a.Post({.opcode = SendOpcode::kSendInvalidate, .remote_stag = exposed}, {pair.a.Sge(from, 0, size)});
    EXPECT_TRUE(pair.Run());
    EXPECT_FALSE(pair.b.memory.IsValid(exposed));
    const auto received = pair.b.TakeReceives();
    ASSERT_EQ(received.size(), 1u);
    EXPECT_EQ(received[0].status, WorkStatus::kSuccess);
    EXPECT_EQ(received[0].byte_length, size);
    EXPECT_TRUE(received[0].invalidated);
    EXPECT_EQ(received[0].invalidated_stag, exposed);
    EXPECT_FALSE(received[0].has_immediate);
  }
}

TEST_P(Services, InlineDataNeedsNoMemoryOfThePort) {
  IbPair pair(Options(), Options());
  const TestBytes data = Pattern(400, 5);
  const uint32_t to = pair.b.PostReceive(400);
  pair.a.Post({.opcode = SendOpcode::kSend, .is_inline = true, .inline_data = data});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to), data));
}

TEST_P(Services, ScatterGatherListsOfBothSidesNeedNotMatch) {
  IbPair pair(Options(), Options());
  const uint32_t from = pair.a.AddPattern(900, 1);
  const uint32_t to = pair.b.memory.Add(900, FakeMemory::kLocalWrite);
  pair.b.PostReceive({pair.b.Sge(to, 600, 300), pair.b.Sge(to, 0, 0), pair.b.Sge(to, 0, 7), pair.b.Sge(to, 7, 593)});
  std::vector<ScatterGather> list;
  for (uint32_t i = 0; i < 90; ++i) {
    list.push_back(pair.a.Sge(from, i * 10, 10));
    list.push_back({});
  }
  pair.a.Post({.opcode = SendOpcode::kSend}, list);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  const ConstBytes sent = pair.a.memory.Bytes(from);
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).subspan(600, 300), sent.first(300)));
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).first(600), sent.subspan(300)));
}

// What the trace says of memory, without the time and the component.
std::vector<std::string> MemoryEvents(const TraceLog& trace) {
  std::vector<std::string> events;
  for (const std::string& line : trace.lines()) {
    if (line.find(" stag=") == std::string::npos) continue;
    const size_t component = line.find(' ') + 1;
    events.push_back(line.substr(line.find(' ', component) + 1));
  }
  return events;
}
std::string In(uint32_t key, uint64_t offset) {
  return " stag=" + std::to_string(key) + " offset=" + std::to_string(offset);
}

TEST(IbTransportTest, TraceNamesMemoryByRegionAndOffset) {
  IbPair pair;
  const uint32_t ours = pair.a.memory.Add(1000);
  const uint32_t theirs = pair.b.memory.Add(1000);
  const uint32_t first = pair.b.memory.Add(100);
  const uint32_t second = pair.b.memory.Add(100);
  pair.b.PostReceive({pair.b.Sge(first, 90, 10), pair.b.Sge(second, 7, 50)});
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 33)},
              {pair.a.Sge(ours, 0, 300)});
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 5)}, {});
  pair.a.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 16)},
              {pair.a.Sge(ours, 0, 8)});
  pair.a.PostSend(ours, 60);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 77)},
              {pair.a.Sge(ours, 0, 300)});
  EXPECT_TRUE(pair.Run());
  const std::string placed = "record.placed opcode=";
  EXPECT_THAT(MemoryEvents(pair.b.trace),
              ElementsAre(placed + "Write First length=256 last=0 psn=100" + In(theirs, 33) + " run=256",
                          placed + "Write Last length=44 last=1 psn=101" + In(theirs, 33 + 256) + " run=44",
                          placed + "Write Only length=0 last=1 psn=102" + In(0, 0) + " run=0",
                          placed + "Fetch and Add length=0 last=1 psn=103" + In(theirs, 16) + " run=8",
                          placed + "Send Only length=60 last=1 psn=104" + In(first, 90) + " run=10",
                          "part.placed length=50" + In(second, 7),
                          placed + "Read Request length=0 last=1 psn=105" + In(0, 0) + " run=0",
                          "response.started length=300 psn=105" + In(theirs, 77)));
}

TEST(IbTransportTest, TraceNamesMemoryThatAnswersAreWrittenTo) {
  IbPair pair;
  const uint32_t theirs = pair.b.memory.Add(1000);
  const uint32_t first = pair.a.memory.Add(400);
  const uint32_t second = pair.a.memory.Add(400);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 77)},
              {pair.a.Sge(first, 30, 200), pair.a.Sge(second, 7, 100)});
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 1)}, {});
  pair.a.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = theirs, .remote_offset = pair.b.At(theirs, 16)},
              {pair.a.Sge(first, 1, 3), pair.a.Sge(second, 0, 5)});
  EXPECT_TRUE(pair.Run());
  const std::string placed = "record.placed opcode=";
  EXPECT_THAT(MemoryEvents(pair.a.trace),
              ElementsAre(placed + "Read Response First length=256 last=0 psn=100" + In(first, 30) + " run=200",
                          "part.placed length=56" + In(second, 7),
                          placed + "Read Response Last length=44 last=1 psn=101" + In(second, 7 + 56) + " run=44",
                          placed + "Read Response Only length=0 last=1 psn=102" + In(0, 0) + " run=0",
                          placed + "Atomic Acknowledge length=8 last=1 psn=103" + In(first, 1) + " run=3",
                          "part.placed length=5" + In(second, 0)));
}

TEST(IbTransportTest, AnswerWhoseMemoryHasGoneIsNotToldOfAsPlaced) {
  IbPair pair;
  const uint32_t theirs = pair.b.memory.Add(1000);
  const uint32_t ours = pair.a.memory.Add(600);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = theirs, .remote_offset = pair.b.At(theirs)},
              {pair.a.Sge(ours, 0, 600)});
  pair.a.memory.Invalidate(ours);
  pair.Run();
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
  EXPECT_THAT(MemoryEvents(pair.a.trace), testing::IsEmpty());
}

TEST(IbTransportTest, EmptyWriteAndReadAreNotCheckedAgainstMemory) {
  IbPair pair;
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = 0xdead, .remote_offset = UINT64_MAX});
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = 0xdead, .remote_offset = UINT64_MAX});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
  EXPECT_TRUE(pair.b.transport.Receiving());
}

// --- What is on the wire ---

TEST(IbTransportTest, PacketsAreCutAtThePathMtuAndNumberedAcrossTheWrap) {
  IbOptions of_a = TestOptions(), of_b = TestOptions();
  of_a.send_psn = of_b.receive_psn = 0xfffffe;
  IbPair pair(of_a, of_b);
  const uint32_t from = pair.a.AddPattern(1000, 1);
  pair.b.PostReceive(1000);
  const uint32_t target = pair.b.memory.Add(1000);
  pair.a.PostSend(from, 1000);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = target, .remote_offset = pair.b.At(target)},
              {pair.a.Sge(from, 0, 600)});
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = target, .remote_offset = pair.b.At(target)},
              {pair.a.Sge(from, 0, 256)});
  EXPECT_TRUE(pair.Run());
  std::vector<std::string> lines;
  for (const TestBytes& record : pair.from_a.log) {
    const IbHeader header = HeaderOf(record);
    EXPECT_EQ((record.size() - header.EncodedSize() + header.pad) % 4, 0u);
    EXPECT_EQ(header.destination_qp, IbPair::kQpB);
    lines.push_back(std::string(ToString(header.op)) + " " + std::to_string(header.psn) +
                    (header.ack_request ? " A " : " ") + std::to_string(record.size() - header.EncodedSize()));
  }
  EXPECT_THAT(lines, ElementsAre("Send First 16777214 256", "Send Middle 16777215 256", "Send Middle 0 256",
                                 "Send Last 1 A 232", "Read Request 2 A 0", "Write Only 5 A 256"));
  lines.clear();
  for (const TestBytes& record : pair.from_b.log) {
    const IbHeader header = HeaderOf(record);
    lines.push_back(std::string(ToString(header.op)) + " " + std::to_string(header.psn) + " MSN " +
                    std::to_string(header.msn));
  }
  // The Send's acknowledgement is in the answer to the Read.
  EXPECT_THAT(lines, ElementsAre("Read Response First 2 MSN 2", "Read Response Middle 3 MSN 0",
                                 "Read Response Last 4 MSN 2", "Acknowledge 5 MSN 3"));
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess, WorkStatus::kSuccess));
}

TEST(IbTransportTest, OneAcknowledgementSpeaksForAllThatArrivedInATurn) {
  IbPair pair;
  for (int i = 0; i < 20; ++i) {
    pair.b.PostReceive(std::vector<ScatterGather>{});
    pair.a.Post({.opcode = SendOpcode::kSend});
  }
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 20u);
  ASSERT_EQ(pair.from_b.log.size(), 1u);
  EXPECT_EQ(HeaderOf(pair.from_b.log[0]).psn, 119u);
  EXPECT_EQ(HeaderOf(pair.from_b.log[0]).msn, 20u);
  EXPECT_EQ(HeaderOf(pair.from_b.log[0]).syndrome, wire::kIbAck);
}

TEST(IbTransportTest, LongMessagesAreAcknowledgedOnTheWay) {
  IbPair pair;
  const uint32_t from = pair.a.memory.Add(100 * kMtu);
  const uint32_t to = pair.b.memory.Add(100 * kMtu);
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 100 * kMtu)});
  EXPECT_TRUE(pair.Run());
  std::vector<uint32_t> asked;
  for (const TestBytes& record : pair.from_a.log) {
    if (HeaderOf(record).ack_request) asked.push_back(HeaderOf(record).psn - 100);
  }
  EXPECT_THAT(asked, ElementsAre(31, 63, 95, 99));
}

TEST(IbTransportTest, WindowBoundsWhatIsUnacknowledged) {
  IbOptions options = TestOptions();
  options.window_packets = 5;
  IbPair pair(options);
  const uint32_t from = pair.a.AddPattern(20 * kMtu, 3);
  const uint32_t to = pair.b.memory.Add(20 * kMtu);
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 20 * kMtu)});
  pair.a.Fill(pair.now);
  ASSERT_EQ(pair.a.out.records.size(), 5u);
  EXPECT_TRUE(HeaderOf(pair.a.out.records.back().header).ack_request);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(from), pair.b.memory.Bytes(to)));
}

TEST(IbTransportTest, FillTxHonoursBudgetAndSink) {
  IbPair pair;
  pair.a.out.capacity = 4;
  const uint32_t from = pair.a.memory.Add(10 * kMtu);
  pair.a.Post({.opcode = SendOpcode::kWrite}, {pair.a.Sge(from, 0, 10 * kMtu)});
  EXPECT_TRUE(pair.a.Fill(pair.now, 1));
  EXPECT_EQ(pair.a.out.records.size(), 1u);
  EXPECT_TRUE(pair.a.Fill(pair.now));
  EXPECT_EQ(pair.a.out.records.size(), 4u);
  EXPECT_FALSE(pair.a.Fill(pair.now));
}

TEST(IbTransportTest, AnswersAndRequestsTakeTurns) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(10 * kMtu);
  const uint32_t local = pair.a.memory.Add(10 * kMtu);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(local, 0, 10 * kMtu)});
  pair.b.Post({.opcode = SendOpcode::kWrite, .remote_stag = local, .remote_offset = pair.a.At(local)},
              {pair.b.Sge(source, 0, 10 * kMtu)});
  pair.a.Fill(pair.now);
  pair.b.Arrive(pair.a.Leave(), pair.now);
  pair.b.Fill(pair.now, 6);
  int answers = 0;
  for (const auto& record : pair.b.out.records) answers += record.header[0] >= std::byte{0x0d};
  EXPECT_EQ(answers, 3);
}

// --- Order and limits ---

TEST(IbTransportTest, ReadsAndAtomicsAreLimitedByMaxRdAtomicAndHoldBackWhatFollows) {
  IbOptions options = TestOptions();
  options.max_rd_atomic = 2;
  IbPair pair(options);
  const uint32_t source = pair.b.memory.Add(64);
  const uint32_t sink = pair.a.memory.Add(64);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  const SendWork read{.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)};
  pair.a.Post(read, {pair.a.Sge(sink, 0, 8)});
  SendWork add = read;
  add.opcode = SendOpcode::kFetchAdd;
  pair.a.Post(add, {pair.a.Sge(sink, 8, 8)});
  pair.a.Post(read, {pair.a.Sge(sink, 16, 8)});
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Fill(pair.now);
  EXPECT_EQ(pair.a.out.records.size(), 2u);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(OpsOf(pair.from_a),
              ElementsAre(IbOp::kReadRequest, IbOp::kFetchAdd, IbOp::kReadRequest, IbOp::kSendOnly));
  EXPECT_EQ(pair.a.TakeSends().size(), 4u);
}

TEST(IbTransportTest, FenceWaitsForReadsAndAtomicsButNotForWrites) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(64);
  const uint32_t sink = pair.a.memory.Add(64);
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 8)});
  pair.a.Post({.opcode = SendOpcode::kWrite, .fence = true, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 8)});
  pair.a.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 8, 8)});
  pair.a.Post({.opcode = SendOpcode::kWrite, .fence = true, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 8)});
  pair.a.Fill(pair.now);
  EXPECT_EQ(pair.a.out.records.size(), 3u);
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 4u);
}

TEST(IbTransportTest, MoreReadsThanTheResponderAllowsAreAnInvalidRequest) {
  IbOptions of_b = TestOptions();
  of_b.max_dest_rd_atomic = 2;
  IbPair pair(TestOptions(), of_b);
  const uint32_t source = pair.b.memory.Add(64);
  const uint32_t sink = pair.a.memory.Add(64);
  for (int i = 0; i < 3; ++i) {
    pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
                {pair.a.Sge(sink, 0, 8)});
  }
  EXPECT_TRUE(pair.Run());
  // What came before is answered first.
  EXPECT_THAT(pair.a.TakeSendStatuses(),
              ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess, WorkStatus::kRemoteInvalidRequest));
  EXPECT_TRUE(pair.b.transport.Finished());
}

// --- Errors, one by one: status at the initiator, NAK, what the target is told, Receive there ---

struct ErrorCase {
  const char* name;
  // Posts what is at fault; the pair is fresh.
  std::function<void(IbPair&)> post;
  WorkStatus initiator;
  uint8_t syndrome;
  FaultKind kind;
  std::vector<WorkStatus> receives;
  std::function<void(IbOptions&)> target_options = [](IbOptions&) {};
};

std::vector<ErrorCase> ErrorCases() {
  using W = WorkStatus;
  const auto to = [](IbPair& pair, SendOpcode opcode, uint32_t key, uint64_t offset, uint32_t length) {
    const uint32_t local = pair.a.memory.Add(std::max(length, 8u));
    pair.a.Post({.opcode = opcode, .remote_stag = key, .remote_offset = pair.b.At(key, offset)},
                {pair.a.Sge(local, 0, length)});
  };
  std::vector<ErrorCase> cases;
  cases.push_back({"Send longer than the Receive",
                   [](IbPair& p) {
                     p.b.PostReceive(100);
                     p.a.PostSend(p.a.memory.Add(101), 101);
                   },
                   W::kRemoteInvalidRequest,
                   wire::kIbNakInvalidRequest,
                   FaultKind::kWork,
                   {W::kLocalLengthError}});
  cases.push_back({"Send longer than the Receive, found in its second packet",
                   [](IbPair& p) {
                     p.b.PostReceive(300);
                     p.a.PostSend(p.a.memory.Add(301), 301);
                   },
                   W::kRemoteInvalidRequest,
                   wire::kIbNakInvalidRequest,
                   FaultKind::kWork,
                   {W::kLocalLengthError}});
  cases.push_back({"Receive without the right to write its memory",
                   [](IbPair& p) {
                     const uint32_t key = p.b.memory.Add(100, FakeMemory::kNone);
                     p.b.PostReceive({p.b.Sge(key, 0, 100)});
                     p.a.PostSend(p.a.memory.Add(100), 100);
                   },
                   W::kRemoteOperationError,
                   wire::kIbNakRemoteOperation,
                   FaultKind::kWork,
                   {W::kLocalProtectionError}});
  for (const auto opcode : {SendOpcode::kWrite, SendOpcode::kRead}) {
    cases.push_back({"Write or Read with an unknown key",
                     [=](IbPair& p) { to(p, opcode, 0x7f005a, 0, 10); },
                     W::kRemoteAccessError,
                     wire::kIbNakRemoteAccess,
                     FaultKind::kProtection,
                     {}});
    cases.push_back({"Write or Read beyond the region",
                     [=](IbPair& p) { to(p, opcode, p.b.memory.Add(1000), 700, 301); },
                     W::kRemoteAccessError,
                     wire::kIbNakRemoteAccess,
                     FaultKind::kProtection,
                     {}});
    cases.push_back({"Write or Read without the region's right",
                     [=](IbPair& p) { to(p, opcode, p.b.memory.Add(1000, FakeMemory::kLocalWrite), 0, 10); },
                     W::kRemoteAccessError,
                     wire::kIbNakRemoteAccess,
                     FaultKind::kProtection,
                     {}});
    cases.push_back({"Write or Read of another protection domain",
                     [=](IbPair& p) {
                       const uint32_t key = p.b.memory.Add(1000);
                       p.b.memory.MakeForeign(key);
                       to(p, opcode, key, 0, 10);
                     },
                     W::kRemoteAccessError,
                     wire::kIbNakRemoteAccess,
                     FaultKind::kProtection,
                     {}});
    cases.push_back({"Write or Read that the QP does not allow",
                     [=](IbPair& p) { to(p, opcode, p.b.memory.Add(1000), 0, 10); },
                     W::kRemoteInvalidRequest,
                     wire::kIbNakInvalidRequest,
                     FaultKind::kProtocol,
                     {},
                     [=](IbOptions& o) {
                       o.access &= ~(opcode == SendOpcode::kWrite ? ib_access::kRemoteWrite : ib_access::kRemoteRead);
                     }});
  }
  cases.push_back({"Write with Immediate to memory it may not write",
                   [=](IbPair& p) {
                     p.b.PostReceive(std::vector<ScatterGather>{});
                     to(p, SendOpcode::kWriteImmediate, p.b.memory.Add(1000, FakeMemory::kNone), 0, 10);
                   },
                   W::kRemoteAccessError,
                   wire::kIbNakRemoteAccess,
                   FaultKind::kProtection,
                   {W::kLocalAccessError}});
  cases.push_back({"atomic on memory without the right",
                   [=](IbPair& p) { to(p, SendOpcode::kFetchAdd, p.b.memory.Add(64, FakeMemory::kRemoteWrite), 0, 8); },
                   W::kRemoteAccessError,
                   wire::kIbNakRemoteAccess,
                   FaultKind::kProtection,
                   {}});
  cases.push_back({"atomic that is not aligned",
                   [=](IbPair& p) { to(p, SendOpcode::kCompareSwap, p.b.memory.Add(64), 4, 8); },
                   W::kRemoteInvalidRequest,
                   wire::kIbNakInvalidRequest,
                   FaultKind::kProtocol,
                   {}});
  cases.push_back({"atomic that the QP does not allow",
                   [=](IbPair& p) { to(p, SendOpcode::kFetchAdd, p.b.memory.Add(64), 0, 8); },
                   W::kRemoteInvalidRequest,
                   wire::kIbNakInvalidRequest,
                   FaultKind::kProtocol,
                   {},
                   [](IbOptions& o) { o.access &= ~ib_access::kRemoteAtomic; }});
  cases.push_back({"Read where none is allowed outstanding",
                   [=](IbPair& p) { to(p, SendOpcode::kRead, p.b.memory.Add(64), 0, 8); },
                   W::kRemoteInvalidRequest,
                   wire::kIbNakInvalidRequest,
                   FaultKind::kProtocol,
                   {},
                   [](IbOptions& o) { o.max_dest_rd_atomic = 0; }});
  return cases;
}

TEST(IbTransportTest, FaultsOfTheInitiatorAreAnsweredAndTold) {
  for (const ErrorCase& each : ErrorCases()) {
    SCOPED_TRACE(each.name);
    IbOptions of_b = TestOptions();
    each.target_options(of_b);
    IbPair pair(TestOptions(), of_b);
    // Something good ahead, something unlucky behind, and work of the target's own.
    const uint32_t good = pair.b.memory.Add(600);
    const uint32_t local = pair.a.AddPattern(600, 1);
    const bool writes = (of_b.access & ib_access::kRemoteWrite) != 0;
    if (writes) {
      pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = good, .remote_offset = pair.b.At(good)},
                  {pair.a.Sge(local, 0, 600)});
    }
    each.post(pair);
    pair.a.Post({.opcode = SendOpcode::kSend});
    pair.b.Post({.opcode = SendOpcode::kSend});
    EXPECT_TRUE(pair.Run());
    std::vector<WorkStatus> expected = {each.initiator, WorkStatus::kFlushed};
    if (writes) expected.insert(expected.begin(), WorkStatus::kSuccess);
    EXPECT_EQ(pair.a.TakeSendStatuses(), expected);
    EXPECT_EQ(pair.b.TakeReceiveStatuses(), each.receives);
    EXPECT_THAT(pair.b.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
    if (writes) {
      EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(good), pair.a.memory.Bytes(local)));
    }
    const auto at_target = pair.b.transport.TakeFault();
    ASSERT_TRUE(at_target.has_value());
    EXPECT_EQ(at_target->kind, each.kind) << at_target->description;
    EXPECT_EQ(at_target->syndrome, each.syndrome);
    EXPECT_FALSE(at_target->from_peer);
    EXPECT_THAT(at_target->description, HasSubstr(wire::SyndromeToString(each.syndrome)));
    const auto at_initiator = pair.a.transport.TakeFault();
    ASSERT_TRUE(at_initiator.has_value());
    EXPECT_EQ(at_initiator->kind, FaultKind::kWork);
    EXPECT_EQ(at_initiator->syndrome, each.syndrome);
    EXPECT_TRUE(at_initiator->from_peer);
    EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
    for (IbEnd* end : {&pair.a, &pair.b}) {
      EXPECT_FALSE(end->transport.Receiving());
      EXPECT_TRUE(end->transport.Finished());
      EXPECT_TRUE(end->memory.GuardsIntact());
    }
    // What is submitted from now on is flushed.
    pair.a.Post({.opcode = SendOpcode::kSend});
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
  }
}

TEST(IbTransportTest, KeyThatGoesInTheMiddleOfAWriteIsARemoteAccessErrorAndNothingMoreIsStored) {
  IbPair pair;
  const uint32_t from = pair.a.AddPattern(3 * kMtu, 1);
  const uint32_t to = pair.b.memory.Add(3 * kMtu);
  pair.from_a.fate = [&](size_t number, ConstBytes) {
    if (number == 1) pair.b.memory.Invalidate(to);
    return Fate::kDeliver;
  };
  pair.a.Post({.opcode = SendOpcode::kWrite, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 3 * kMtu)});
  pair.a.Post({.opcode = SendOpcode::kSend});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteAccessError, WorkStatus::kFlushed));
  const auto at_target = pair.b.transport.TakeFault();
  ASSERT_TRUE(at_target.has_value());
  EXPECT_EQ(at_target->kind, FaultKind::kProtection);
  EXPECT_EQ(at_target->syndrome, wire::kIbNakRemoteAccess);
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).first(kMtu), pair.a.memory.Bytes(from).first(kMtu)));
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).subspan(kMtu), TestBytes(2 * kMtu)));
}

// [IBTA 9.9.3, class J] No NAK, the Receive in error, the QP in error; and no acknowledgement, which would say that all
// of it is done.
TEST(IbTransportTest, InvalidatingABadKeyFailsTheReceiverWithoutAnAnswer) {
  for (const uint32_t size : {10u, 2 * kMtu + 1}) {
    SCOPED_TRACE(size);
    IbOptions options = TestOptions();
    options.retry_count = 2;
    IbPair pair(options);
    pair.b.PostReceive(10);
    const uint32_t to = pair.b.PostReceive(size);
    const uint32_t behind = pair.b.PostReceive(10);
    const uint32_t from = pair.a.AddPattern(size, 4);
    pair.a.PostSend(from, 10);
    pair.a.Post({.opcode = SendOpcode::kSendInvalidate, .remote_stag = 0x7f005a}, {pair.a.Sge(from, 0, size)});
    pair.a.PostSend(from, 10);
    EXPECT_TRUE(pair.Run());
    // What came before it is acknowledged.
    EXPECT_THAT(pair.a.TakeSendStatuses(),
                ElementsAre(WorkStatus::kSuccess, WorkStatus::kRetryExceeded, WorkStatus::kFlushed));
    EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kRemoteInvalidRequest));
    EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to), pair.a.memory.Bytes(from)));
    EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(behind), TestBytes(10)));
    EXPECT_TRUE(pair.b.transport.Finished());
    EXPECT_EQ(pair.b.transport.TakeFault()->kind, FaultKind::kWork);
    EXPECT_EQ(pair.a.transport.TakeFault()->kind, FaultKind::kWork);
    for (const TestBytes& packet : pair.from_b.log) {
      const IbHeader answer = HeaderOf(packet);
      EXPECT_EQ(answer.syndrome, wire::kIbAck) << Describe(answer);
      EXPECT_LT(wire::PsnOffset(answer.psn, 100), IbPacketsOf(size, kMtu)) << Describe(answer);
    }
  }
}

struct LocalCase {
  const char* name;
  SendWork work;
  uint32_t length;
  uint8_t rights;
  WorkStatus status;
};

TEST(IbTransportTest, FaultsOfOnesOwnWaitForWhatCameBeforeAndSendNothing) {
  IbOptions options = TestOptions();
  options.max_message_bytes = 2000;
  const LocalCase cases[] = {
      {"beyond the region", {.opcode = SendOpcode::kSend}, 1001, 0, WorkStatus::kLocalProtectionError},
      {"too long", {.opcode = SendOpcode::kSend}, 2001, 0, WorkStatus::kLocalLengthError},
      {"atomic of 4 bytes", {.opcode = SendOpcode::kFetchAdd}, 4, FakeMemory::kAll, WorkStatus::kLocalLengthError},
      {"inline Read", {.opcode = SendOpcode::kRead, .is_inline = true}, 8, 0, WorkStatus::kLocalOperationError},
  };
  for (const LocalCase& each : cases) {
    SCOPED_TRACE(each.name);
    IbPair pair(options);
    const uint32_t good = pair.b.memory.Add(64);
    const uint32_t sink = pair.a.memory.Add(64);
    pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = good, .remote_offset = pair.b.At(good)},
                {pair.a.Sge(sink, 0, 64)});
    const uint32_t key = pair.a.memory.Add(1000, each.rights);
    pair.a.Post(each.work, {pair.a.Sge(key, 0, each.length)});
    pair.a.Post({.opcode = SendOpcode::kSend});
    pair.a.Fill(pair.now);
    EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
    EXPECT_TRUE(pair.a.transport.Receiving());
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, each.status, WorkStatus::kFlushed));
    EXPECT_THAT(OpsOf(pair.from_a), ElementsAre(IbOp::kReadRequest));
    EXPECT_EQ(pair.a.transport.TakeFault()->kind, FaultKind::kWork);
    EXPECT_TRUE(pair.a.transport.Finished());
    EXPECT_TRUE(pair.b.transport.Receiving());
  }
}

// The request has been carried out when its answer finds no memory here.
TEST(IbTransportTest, MemoryOfAnAnswerIsJudgedWhenTheAnswerIsThere) {
  for (const SendOpcode opcode : {SendOpcode::kRead, SendOpcode::kFetchAdd, SendOpcode::kCompareSwap}) {
    SCOPED_TRACE(ToString(opcode));
    IbPair pair;
    const uint32_t target = pair.b.memory.Add(64);
    const uint32_t closed = pair.a.memory.Add(64, FakeMemory::kNone);
    pair.b.PostReceive(10);
    pair.a.Post({.opcode = opcode, .remote_stag = target, .remote_offset = pair.b.At(target)},
                {pair.a.Sge(closed, 0, 8)});
    pair.a.Post({.opcode = SendOpcode::kSend});
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError, WorkStatus::kFlushed));
    EXPECT_EQ(pair.b.memory.atomics(), opcode == SendOpcode::kRead ? 0 : 1);
    EXPECT_EQ(pair.a.transport.TakeFault()->kind, FaultKind::kWork);
    EXPECT_TRUE(pair.a.transport.Finished());
    EXPECT_TRUE(pair.b.transport.Receiving()) << "the peer hears nothing of it";
  }
}

TEST(IbTransportTest, WhatThePeerRefusesComesBeforeABadKeyHere) {
  struct Case {
    SendOpcode opcode;
    uint64_t misplaced;  // so many bytes from the beginning of the target
    bool known_key;
    WorkStatus status;
  };
  const Case cases[] = {
      {SendOpcode::kRead, 0, false, WorkStatus::kRemoteAccessError},
      {SendOpcode::kRead, 57, true, WorkStatus::kRemoteAccessError},
      {SendOpcode::kFetchAdd, 0, false, WorkStatus::kRemoteAccessError},
      {SendOpcode::kFetchAdd, 1, true, WorkStatus::kRemoteInvalidRequest},
      {SendOpcode::kCompareSwap, 7, true, WorkStatus::kRemoteInvalidRequest},
      {SendOpcode::kCompareSwap, 4, false, WorkStatus::kRemoteInvalidRequest},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(std::string(ToString(each.opcode)) + " at " + std::to_string(each.misplaced));
    IbPair pair;
    const uint32_t target = pair.b.memory.Add(64);
    const uint32_t sink = pair.a.memory.Add(64);
    ScatterGather unknown = pair.a.Sge(sink, 0, 8);
    unknown.lkey ^= 0x7f0000;
    pair.a.Post({.opcode = each.opcode,
                 .remote_stag = each.known_key ? target : target ^ 0x7f0000,
                 .remote_offset = pair.b.At(target) + each.misplaced},
                {unknown});
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(each.status));
    EXPECT_EQ(pair.b.memory.atomics(), 0);
  }
}

TEST(IbTransportTest, ReadWithMaxRdAtomicOfZeroIsALocalOperationError) {
  IbOptions options = TestOptions();
  options.max_rd_atomic = 0;
  IbPair pair(options);
  pair.a.Post({.opcode = SendOpcode::kRead});
  pair.Run();
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalOperationError));
}

TEST(IbTransportTest, ForgedAnswersAreBadResponses) {
  const auto base = [](IbOp op, uint32_t psn) {
    return IbHeader{.op = op, .destination_qp = IbPair::kQpA, .psn = psn, .syndrome = wire::kIbAck};
  };
  struct Case {
    const char* name;
    SendOpcode opcode;
    IbHeader header;
    size_t payload;
  };
  const auto with = [](IbHeader header, uint8_t syndrome) {
    header.syndrome = syndrome;
    return header;
  };
  const Case cases[] = {
      {"answer to a Send", SendOpcode::kSend, base(IbOp::kReadOnly, 100), 8},
      {"atomic answer to a Send", SendOpcode::kSend, base(IbOp::kAtomicAck, 100), 0},
      {"atomic answer to a Read", SendOpcode::kRead, base(IbOp::kAtomicAck, 100), 0},
      {"Read answer to an atomic", SendOpcode::kFetchAdd, base(IbOp::kReadOnly, 100), 8},
      {"short answer to a Read", SendOpcode::kRead, base(IbOp::kReadOnly, 100), 7},
      {"long answer to a Read", SendOpcode::kRead, base(IbOp::kReadOnly, 100), 9},
      {"a first packet where there is one", SendOpcode::kRead, base(IbOp::kReadFirst, 100), 8},
      {"a middle packet at the end", SendOpcode::kRead, base(IbOp::kReadMiddle, 100), 8},
      {"NAK in a Read answer", SendOpcode::kRead, with(base(IbOp::kReadOnly, 100), 0x62), 8},
      {"RNR NAK in an atomic answer", SendOpcode::kFetchAdd, with(base(IbOp::kAtomicAck, 100), 0x21), 0},
      {"reserved syndrome", SendOpcode::kSend, with(base(IbOp::kAck, 100), 0x5f), 0},
      {"reserved NAK code", SendOpcode::kSend, with(base(IbOp::kAck, 100), 0x65), 0},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    IbPair pair;
    const uint32_t local = pair.a.memory.Add(8);
    pair.a.Post({.opcode = each.opcode}, {pair.a.Sge(local, 0, 8)});
    pair.a.Post({.opcode = SendOpcode::kSend});
    pair.a.Fill(pair.now);
    pair.a.out.records.clear();
    const TestBytes payload = Pattern(each.payload, 9);
    pair.a.Arrive(each.header, pair.now, payload);
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kBadResponse, WorkStatus::kFlushed));
    EXPECT_TRUE(pair.a.memory.GuardsIntact());
    EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(local), TestBytes(8)));
    EXPECT_TRUE(pair.a.transport.Finished());
  }
}

TEST(IbTransportTest, AnswersToNothingAreIgnored) {
  IbPair pair;
  const uint32_t local = pair.a.memory.Add(8);
  pair.a.PostSend(local, 8);
  pair.a.Fill(pair.now);
  for (const IbOp op : {IbOp::kAck, IbOp::kReadOnly, IbOp::kReadFirst, IbOp::kAtomicAck}) {
    for (const uint32_t psn : {99u, 101u, 5000u, 0xffffffu, 8388708u}) {
      for (const uint8_t syndrome : {wire::kIbAck, wire::kIbNakRemoteAccess, wire::kIbRnrNak}) {
        pair.a.Arrive({.op = op, .destination_qp = IbPair::kQpA, .psn = psn, .syndrome = syndrome}, pair.now);
      }
    }
  }
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
  EXPECT_TRUE(pair.a.transport.Receiving());
}

TEST(IbTransportTest, PacketsForOthersAreDropped) {
  IbPair pair;
  pair.b.PostReceive(std::vector<ScatterGather>{});
  const IbHeader good{.op = IbOp::kSendOnly, .destination_qp = IbPair::kQpB, .psn = 100};
  IbHeader other = good;
  other.destination_qp = 0x23;
  pair.b.Arrive(other, pair.now);
  other = good;
  other.service = IbService::kUc;
  pair.b.Arrive(other, pair.now);
  other = good;
  other.pkey = 0x8001;
  pair.b.Arrive(other, pair.now);
  const TestBytes garbage = Pattern(90, 1);
  for (size_t size = 0; size <= garbage.size(); ++size) pair.b.Arrive(ConstBytes(garbage).first(size), pair.now);
  EXPECT_THAT(pair.b.TakeReceives(), IsEmpty());
  EXPECT_FALSE(pair.b.transport.TakeFirstPacket());
  pair.b.Arrive(good, pair.now);
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbTransportTest, RequestsOutOfSequenceOrOfWrongLengthAreInvalid) {
  struct Case {
    const char* name;
    std::vector<std::pair<IbHeader, size_t>> packets;
    std::vector<WorkStatus> receives;
  };
  const auto p = [](IbOp op, uint32_t psn, uint32_t dma = 0) {
    return IbHeader{.op = op, .destination_qp = IbPair::kQpB, .psn = psn, .dma_length = dma};
  };
  const auto invalid = WorkStatus::kRemoteInvalidRequest;
  const std::vector<Case> cases = {
      {"Send Middle first", {{p(IbOp::kSendMiddle, 100), kMtu}}, {}},
      {"Write Last first", {{p(IbOp::kWriteLast, 100), 10}}, {}},
      {"Send within a Send", {{p(IbOp::kSendFirst, 100), kMtu}, {p(IbOp::kSendOnly, 101), 5}}, {invalid}},
      {"Write goes on with Send", {{p(IbOp::kWriteFirst, 100, 600), kMtu}, {p(IbOp::kSendLast, 101), 5}}, {}},
      {"Read within a Send", {{p(IbOp::kSendFirst, 100), kMtu}, {p(IbOp::kReadRequest, 101, 8), 0}}, {invalid}},
      {"short first packet", {{p(IbOp::kSendFirst, 100), kMtu - 4}}, {invalid}},
      {"long only packet", {{p(IbOp::kSendOnly, 100), kMtu + 4}}, {invalid}},
      {"empty last packet", {{p(IbOp::kSendFirst, 100), kMtu}, {p(IbOp::kSendLast, 101), 0}}, {invalid}},
      {"Write longer than announced", {{p(IbOp::kWriteOnly, 100, 4), 8}}, {}},
      {"Write shorter than announced", {{p(IbOp::kWriteOnly, 100, 9), 8}}, {}},
      {"Write ends early", {{p(IbOp::kWriteFirst, 100, 600), kMtu}, {p(IbOp::kWriteLast, 101), 8}}, {}},
      {"Write does not end", {{p(IbOp::kWriteFirst, 100, 300), kMtu}, {p(IbOp::kWriteMiddle, 101), kMtu}}, {}},
      {"Write of 2 GiB and a byte", {{p(IbOp::kWriteFirst, 100, 0x80000001), kMtu}}, {}},
      {"Read of 2 GiB and a byte", {{p(IbOp::kReadRequest, 100, 0x80000001), 0}}, {}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    IbPair pair;
    const uint32_t target = pair.b.memory.Add(4096);
    pair.b.PostReceive(4096);
    for (auto [header, payload] : each.packets) {
      if (header.op == IbOp::kWriteFirst || header.op == IbOp::kWriteOnly || header.op == IbOp::kReadRequest) {
        header.rkey = target;
        header.address = pair.b.At(target);
      }
      EXPECT_TRUE(pair.b.transport.Receiving());
      const TestBytes bytes = Pattern(payload, 1);
      pair.b.Arrive(header, pair.now, bytes);
    }
    EXPECT_FALSE(pair.b.transport.Receiving());
    const auto fault = pair.b.transport.TakeFault();
    ASSERT_TRUE(fault.has_value());
    EXPECT_EQ(fault->kind, FaultKind::kProtocol);
    EXPECT_EQ(fault->syndrome, wire::kIbNakInvalidRequest);
    auto receives = pair.b.TakeReceiveStatuses();
    EXPECT_EQ(receives, each.receives);
    // The NAK names the packet.
    pair.b.Fill(pair.now);
    ASSERT_EQ(pair.b.out.records.size(), 1u);
    EXPECT_FALSE(pair.b.transport.Finished());
    const IbHeader nak = HeaderOf(pair.b.Leave());
    EXPECT_EQ(nak.syndrome, wire::kIbNakInvalidRequest);
    EXPECT_EQ(nak.psn, each.packets.back().first.psn);
    EXPECT_TRUE(pair.b.transport.Finished());
    EXPECT_TRUE(pair.b.memory.GuardsIntact());
  }
}

// --- No Receive ---

TEST(IbTransportTest, RnrNakIsRetriedAsOftenAsRnrRetrySaysAndAfterItsTimer) {
  for (const uint8_t retries : {0, 1, 3}) {
    IbOptions options = TestOptions();
    options.rnr_retry = retries;
    IbPair pair(options);
    pair.a.Post({.opcode = SendOpcode::kSend});
    pair.a.Post({.opcode = SendOpcode::kSend});
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRnrRetryExceeded, WorkStatus::kFlushed));
    EXPECT_EQ(pair.from_b.log.size(), size_t{retries} + 1);
    for (const TestBytes& record : pair.from_b.log) EXPECT_EQ(HeaderOf(record).syndrome, wire::kIbRnrNak | 12);
    EXPECT_GE(pair.now - Instant{}, wire::RnrTimer(12) * retries);
    // The target knows nothing of it.
    EXPECT_TRUE(pair.b.transport.Receiving());
    EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
  }
}

TEST(IbTransportTest, RnrRetrySevenWaitsForEver) {
  IbPair pair;  // rnr_retry 7
  const uint32_t from = pair.a.AddPattern(700, 2);
  pair.a.PostSend(from, 700);
  EXPECT_FALSE(pair.Run(2000));
  EXPECT_GT(pair.from_b.log.size(), 300u);
  const uint32_t to = pair.b.PostReceive(700);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(from), pair.b.memory.Bytes(to)));
}

TEST(IbTransportTest, WriteWithImmediateFindsNoReceiveOnlyAtItsEnd) {
  IbPair pair;
  const uint32_t from = pair.a.AddPattern(700, 2);
  const uint32_t to = pair.b.memory.Add(700);
  pair.a.Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 700)});
  pair.Exchange();
  ASSERT_EQ(pair.from_b.log.size(), 1u);
  EXPECT_EQ(HeaderOf(pair.from_b.log[0]).syndrome, wire::kIbRnrNak | 12);
  EXPECT_EQ(HeaderOf(pair.from_b.log[0]).psn, 102u);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.from_a.log.size(), 4u);  // its last packet alone is sent again
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
  EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(from), pair.b.memory.Bytes(to)));
}

TEST(IbTransportTest, RnrRetriesCountAnewForEachMessage) {
  IbOptions options = TestOptions();
  options.rnr_retry = 1;
  IbPair pair(options);
  for (int i = 0; i < 5; ++i) pair.a.Post({.opcode = SendOpcode::kSend});
  for (int i = 0; i < 5; ++i) {
    pair.Exchange();  // an RNR NAK
    pair.b.PostReceive(std::vector<ScatterGather>{});
    ASSERT_TRUE(pair.NextDeadline().has_value());
    pair.now = *pair.NextDeadline();
    pair.a.transport.OnDeadline(pair.now);
    pair.Exchange();
  }
  EXPECT_EQ(pair.a.TakeSends().size(), 5u);
  EXPECT_TRUE(pair.a.transport.Receiving());
}

// --- Silence ---

TEST(IbTransportTest, SilenceIsRetriedAsOftenAsRetryCountSaysEachTimeoutApart) {
  for (const uint8_t retries : {0, 1, 7}) {
    IbOptions options = TestOptions();
    options.retry_count = retries;
    options.timeout = 10;
    IbPair pair(options);
    pair.from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
    pair.a.Post({.opcode = SendOpcode::kSend});
    pair.a.Post({.opcode = SendOpcode::kWrite});
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded, WorkStatus::kFlushed));
    EXPECT_EQ(pair.from_a.log.size(), 2 * (size_t{retries} + 1));
    EXPECT_EQ(pair.now - Instant{}, wire::AckTimeout(10) * (retries + 1));
    EXPECT_EQ(pair.a.transport.TakeFault()->kind, FaultKind::kWork);
    EXPECT_TRUE(pair.a.transport.Finished());
  }
}

TEST(IbTransportTest, TimeoutZeroWaitsForEver) {
  IbOptions options = TestOptions();
  options.timeout = 0;
  IbPair pair(options);
  pair.from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
  pair.a.Post({.opcode = SendOpcode::kSend});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
  EXPECT_FALSE(pair.a.transport.Deadline().has_value());
  EXPECT_TRUE(pair.a.transport.Receiving());
}

TEST(IbTransportTest, TheTimerIsMovedLazilyAndGoesOutWhenNothingIsAwaited) {
  IbPair pair;
  const Duration timeout = wire::AckTimeout(14);
  for (int i = 0; i < 3; ++i) pair.b.PostReceive(std::vector<ScatterGather>{});
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.Exchange();
  const Instant first = Instant{} + timeout;
  EXPECT_EQ(pair.a.transport.Deadline(), first);  // though it has been acknowledged
  pair.now = Instant{} + timeout / 2;
  pair.from_b.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.Exchange();
  EXPECT_EQ(pair.a.transport.Deadline(), first);
  pair.now = first;
  pair.a.transport.OnDeadline(pair.now);
  // It is the second Send that is waited for now.
  EXPECT_EQ(pair.a.transport.Deadline(), first + timeout / 2);
  pair.from_b.fate = nullptr;
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 2u);
  EXPECT_FALSE(pair.a.transport.Deadline().has_value());
  EXPECT_EQ(pair.b.TakeReceives().size(), 2u);
}

TEST(IbTransportTest, PeerThatWantsAnotherPacketForEverEndsWithRetriesExceeded) {
  IbPair pair;
  pair.from_b.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
  pair.a.Post({.opcode = SendOpcode::kSend});
  int sent = 0;
  for (; sent < 100 && pair.a.transport.Receiving(); ++sent) {
    pair.a.Fill(pair.now);
    pair.a.out.records.clear();
    pair.a.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = 100, .syndrome = wire::kIbNakSequence},
                  pair.now);
  }
  EXPECT_EQ(sent, 8);
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded));
}

// --- Repeats ---

TEST(IbTransportTest, ReadGoesOnWhereItsAnswerBroke) {
  IbPair pair;
  const uint32_t source = pair.b.AddPattern(10 * kMtu, 7);
  const uint32_t sink = pair.a.memory.Add(10 * kMtu);
  pair.from_b.fate = [](size_t n, ConstBytes) { return n == 4 ? Fate::kDrop : Fate::kDeliver; };
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 10 * kMtu)});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(sink), pair.b.memory.Bytes(source)));
  ASSERT_EQ(pair.from_a.log.size(), 2u);
  const IbHeader again = HeaderOf(pair.from_a.log[1]);
  EXPECT_EQ(again.psn, 104u);
  EXPECT_EQ(again.address, pair.b.At(source, 4 * kMtu));
  EXPECT_EQ(again.dma_length, 6 * kMtu);
}

TEST(IbTransportTest, AnAtomicPinsItsTargetOnceWithATraceToo) {
  IbPair pair;
  const uint32_t target = pair.b.memory.Add(16, FakeMemory::kRemoteAtomic);
  const uint32_t result = pair.a.memory.Add(8);
  pair.a.Post(
      {.opcode = SendOpcode::kFetchAdd, .remote_stag = target, .remote_offset = pair.b.At(target), .compare_add = 1},
      {pair.a.Sge(result, 0, 8)});
  pair.a.Fill(pair.now);
  const int before = pair.b.memory.pins_taken();
  pair.b.Arrive(pair.a.Leave(), pair.now);
  EXPECT_EQ(pair.b.memory.atomics(), 1);
  EXPECT_EQ(pair.b.memory.pins_taken() - before, 1);
}

TEST(IbTransportTest, AtomicThatComesTwiceIsCarriedOutOnceAndAnsweredTheSame) {
  IbPair pair;
  const uint32_t target = pair.b.memory.Add(8);
  const uint32_t result = pair.a.memory.Add(8);
  SetWord(pair.b, target, 5);
  pair.from_b.fate = [](size_t n, ConstBytes) { return n < 3 ? Fate::kDrop : Fate::kDeliver; };
  pair.a.Post(
      {.opcode = SendOpcode::kFetchAdd, .remote_stag = target, .remote_offset = pair.b.At(target), .compare_add = 10},
      {pair.a.Sge(result, 0, 8)});
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.from_a.log.size(), 4u);
  EXPECT_EQ(pair.b.memory.atomics(), 1);
  EXPECT_EQ(Word(pair.a, result), 5u);
  EXPECT_EQ(Word(pair.b, target), 15u);
}

TEST(IbTransportTest, RepeatedReadOfMemoryThatHasGoneIsNoFaultOnceItWasAnswered) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(64);
  const uint32_t sink = pair.a.memory.Add(64);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 64)});
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 1u);
  pair.b.memory.Invalidate(source);
  pair.b.Arrive(pair.from_a.log[0], pair.now);  // the network repeats the request
  EXPECT_TRUE(pair.Run());
  EXPECT_TRUE(pair.b.transport.Receiving());
  EXPECT_FALSE(pair.b.transport.HasOutstandingWork());
}

TEST(IbTransportTest, RepeatsOfReadsDoNotPileUp) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(4 * kMtu);
  const uint32_t sink = pair.a.memory.Add(4 * kMtu);
  for (int i = 0; i < 2; ++i) {
    pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
                {pair.a.Sge(sink, 0, 4 * kMtu)});
  }
  EXPECT_TRUE(pair.Run());
  for (int i = 0; i < 1000; ++i) {
    pair.b.Arrive(pair.from_a.log[static_cast<size_t>(i % 2)], pair.now);
  }
  pair.b.out.capacity = 1000;
  pair.b.Fill(pair.now);
  EXPECT_EQ(pair.b.out.records.size(), 8u);
}

TEST(IbTransportTest, RepeatOfAReadMayNotAskForMoreThanTheReadItself) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(4 * kMtu);
  const IbHeader read{.op = IbOp::kReadRequest,
                      .destination_qp = IbPair::kQpB,
                      .psn = 100,
                      .address = IbEnd::At(source),
                      .rkey = source,
                      .dma_length = 2 * kMtu};
  const auto answers = [&](uint32_t psn, uint64_t address, uint32_t length) {
    IbHeader again = read;
    again.psn = psn;
    again.address = address;
    again.dma_length = length;
    pair.b.Arrive(again, pair.now);
    pair.b.Fill(pair.now);
    // What brings nothing says what is acknowledged, by which a peer with other numbers knows that this end runs.
    size_t count = 0;
    while (!pair.b.out.records.empty()) {
      const IbHeader answer = HeaderOf(pair.b.Leave());
      if (answer.op != IbOp::kAck) {
        ++count;
        continue;
      }
      EXPECT_EQ(count, 0u);
      EXPECT_EQ(answer.psn, 101u);
      EXPECT_EQ(wire::KindOfSyndrome(answer.syndrome), wire::IbSyndromeKind::kAck);
    }
    return count;
  };
  EXPECT_EQ(answers(100, read.address, 2 * kMtu), 2u);
  EXPECT_EQ(answers(100, read.address, 2 * kMtu), 2u);
  EXPECT_EQ(answers(101, read.address + kMtu, kMtu), 1u);
  EXPECT_EQ(answers(100, read.address, 2 * kMtu + 1), 0u);
  EXPECT_EQ(answers(101, read.address + kMtu, kMtu + 1), 0u);
  EXPECT_EQ(answers(101, read.address, kMtu), 0u);
  EXPECT_EQ(answers(99, read.address, kMtu), 0u);
  EXPECT_TRUE(pair.b.transport.Receiving());
}

TEST(IbTransportTest, LostAnswerIsNoticedByTheAcknowledgementBehindIt) {
  IbPair pair;
  const uint32_t source = pair.b.AddPattern(kMtu, 1);
  const uint32_t sink = pair.a.memory.Add(kMtu);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  pair.from_b.fate = [](size_t n, ConstBytes) { return n == 0 ? Fate::kDrop : Fate::kDeliver; };
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, kMtu)});
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.Exchange();  // no time passes
  EXPECT_EQ(pair.a.TakeSends().size(), 2u);
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbTransportTest, EveryGapIsReportedOnceAndRepairedWithoutWaiting) {
  IbPair pair;
  for (int i = 0; i < 30; ++i) {
    pair.b.PostReceive(std::vector<ScatterGather>{});
    pair.a.Post({.opcode = SendOpcode::kSend});
  }
  pair.from_a.fate = [](size_t n, ConstBytes) { return n == 3 || n == 40 || n == 60 ? Fate::kDrop : Fate::kDeliver; };
  pair.a.out.capacity = 10;
  pair.Exchange();
  EXPECT_EQ(pair.a.TakeSends().size(), 30u);
  EXPECT_EQ(pair.b.TakeReceives().size(), 30u);
  const auto naks = std::count_if(pair.from_b.log.begin(), pair.from_b.log.end(), [](const TestBytes& record) {
    return HeaderOf(record).syndrome == wire::kIbNakSequence;
  });
  EXPECT_GE(naks, 2);
  EXPECT_LE(naks, 3);
}

TEST(IbTransportTest, NakThatComesTwiceCostsOneRetry) {
  IbOptions options = TestOptions();
  options.retry_count = 1;
  IbPair pair(options);
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Fill(pair.now);
  const IbHeader nak{.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = 100, .syndrome = wire::kIbNakSequence};
  pair.a.Arrive(nak, pair.now);
  pair.a.Arrive(nak, pair.now);
  EXPECT_TRUE(pair.a.transport.Receiving());
  pair.a.Fill(pair.now);
  pair.a.Arrive(nak, pair.now);
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded));
}

TEST(IbTransportTest, NakThatMissesNothingMoreIsAnAcknowledgement) {
  IbPair pair;
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Fill(pair.now);
  while (!pair.a.out.records.empty()) pair.a.Leave();
  pair.a.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = 102, .syndrome = wire::kIbNakSequence},
                pair.now);
  EXPECT_EQ(pair.a.TakeSends().size(), 2u);
  EXPECT_FALSE(pair.a.Fill(pair.now));
}

TEST(IbTransportTest, NakThatWaitsIsNotReplacedByTheAcknowledgementOfARepeat) {
  const IbHeader send{.op = IbOp::kSendOnly, .destination_qp = IbPair::kQpB, .ack_request = true, .psn = 100};
  for (const bool gap : {true, false}) {
    IbPair pair;
    IbHeader next = send;
    if (gap) next.psn = 102;
    pair.b.Arrive(next, pair.now);  // a gap, or no Receive
    IbHeader old = send;
    old.psn = 99;
    pair.b.Arrive(old, pair.now);
    pair.b.Fill(pair.now);
    ASSERT_EQ(pair.b.out.records.size(), 1u);
    const IbHeader answer = HeaderOf(pair.b.Leave());
    EXPECT_EQ(answer.syndrome, gap ? wire::kIbNakSequence : (wire::kIbRnrNak | 12));
    EXPECT_EQ(answer.psn, 100u);
  }
}

TEST(IbTransportTest, AnswerToTheLastReadAcknowledgesAllBeforeIt) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(kMtu);
  const uint32_t sink = pair.a.memory.Add(kMtu);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, kMtu)});
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 2u);
  EXPECT_THAT(OpsOf(pair.from_b), ElementsAre(IbOp::kReadOnly));
}

TEST(IbTransportTest, NoMoreThanHalfOfTheNumbersAreEverInUse) {
  IbPair pair;
  constexpr uint32_t kRegion = 1 << 20;
  const uint32_t sink = pair.a.memory.Add(kRegion);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  pair.a.Post({.opcode = SendOpcode::kSend});
  // 2 GiB, 2^23 packets: none may be outstanding beside them.
  pair.a.Post({.opcode = SendOpcode::kRead}, std::vector<ScatterGather>(2048, pair.a.Sge(sink, 0, kRegion)));
  pair.a.Post({.opcode = SendOpcode::kSend});
  pair.a.Fill(pair.now);
  ASSERT_EQ(pair.a.out.records.size(), 1u);
  pair.b.Arrive(pair.a.Leave(), pair.now);
  pair.b.Fill(pair.now);
  pair.a.Arrive(pair.b.Leave(), pair.now);
  pair.a.Fill(pair.now);
  ASSERT_EQ(pair.a.out.records.size(), 1u);
  const IbHeader read = HeaderOf(pair.a.Leave());
  EXPECT_EQ(read.op, IbOp::kReadRequest);
  EXPECT_EQ(read.dma_length, 0x80000000u);
  // The last number of the answer, half round the circle, is one of it still.
  pair.a.Arrive({.op = IbOp::kReadLast,
                 .destination_qp = IbPair::kQpA,
                 .psn = wire::PsnAdd(read.psn, (1u << 23) - 1),
                 .syndrome = wire::kIbAck},
                pair.now, Pattern(kMtu, 1));
  pair.a.Fill(pair.now);
  ASSERT_EQ(pair.a.out.records.size(), 1u);  // asked for again, as what comes before has not come
  EXPECT_EQ(HeaderOf(pair.a.Leave()).op, IbOp::kReadRequest);
}

TEST(IbTransportTest, PlacementOfAWriteMayWaitWhereNothingIsCompleted) {
  IbPair pair;
  const uint32_t target = pair.b.memory.Add(64);
  pair.b.PostReceive(64);
  const auto may_wait = [&](IbHeader header, size_t payload) {
    header.destination_qp = IbPair::kQpB;
    header.rkey = target;
    header.address = pair.b.At(target);
    header.pad = wire::IbPad(payload);
    TestBytes record(header.EncodedSize() + payload);
    ByteWriter writer(record);
    header.Encode(writer);
    EXPECT_TRUE(pair.b.transport.OnRecord({.head = record, .length = record.size()}, pair.now));
    return pair.b.transport.PlacementMayWait();
  };
  EXPECT_TRUE(may_wait({.op = IbOp::kWriteOnly, .psn = 100, .dma_length = 4}, 4));
  EXPECT_FALSE(may_wait({.op = IbOp::kWriteOnlyImm, .psn = 100, .dma_length = 4}, 4));
  EXPECT_FALSE(may_wait({.op = IbOp::kSendOnly, .psn = 100}, 4));
  EXPECT_FALSE(may_wait({.op = IbOp::kFetchAdd, .psn = 100}, 0));
  EXPECT_FALSE(may_wait({.op = IbOp::kReadRequest, .psn = 100, .dma_length = 4}, 0));
  EXPECT_FALSE(may_wait({.op = IbOp::kWriteOnly, .psn = 99, .dma_length = 4}, 4));  // to be discarded
  pair.b.transport.UnpinDestination();
}

// --- States ---

TEST(IbTransportTest, BeforeRtsRequestsAreServedAndNoneIsSent) {
  IbEnd a(TestOptions(), IbPair::kQpA, IbPair::kQpB, "a");
  a.transport.OnCarrier(true, Instant{});
  a.PostReceive(std::vector<ScatterGather>{});
  a.Post({.opcode = SendOpcode::kSend});
  EXPECT_FALSE(a.transport.TakeFirstPacket());
  a.Arrive({.op = IbOp::kSendOnly, .destination_qp = IbPair::kQpA, .ack_request = true, .psn = 100}, Instant{});
  EXPECT_TRUE(a.transport.TakeFirstPacket());
  EXPECT_FALSE(a.transport.TakeFirstPacket());
  a.Fill(Instant{});
  ASSERT_EQ(a.out.records.size(), 1u);
  EXPECT_EQ(HeaderOf(a.Leave()).op, IbOp::kAck);
  // The attributes of RTS come with it.
  IbOptions rts = a.transport.options();
  rts.send_psn = 0x1000abc;
  a.transport.SetAttributes(rts);
  a.transport.StartSending();
  a.Fill(Instant{});
  ASSERT_EQ(a.out.records.size(), 1u);
  EXPECT_EQ(HeaderOf(a.Leave()).psn, 0xabcu);
}

TEST(IbTransportTest, StopSendingFinishesWhatHasBegun) {
  IbOptions options = TestOptions();
  options.window_packets = 2;
  IbPair pair(options);
  const uint32_t from = pair.a.memory.Add(5 * kMtu);
  pair.b.PostReceive(5 * kMtu);
  pair.b.PostReceive(5 * kMtu);
  pair.a.PostSend(from, 5 * kMtu);
  pair.a.PostSend(from, 5 * kMtu);
  EXPECT_FALSE(pair.a.transport.SendsInProgress());
  pair.a.Fill(pair.now);
  EXPECT_TRUE(pair.a.transport.SendsInProgress());
  pair.a.transport.StopSending();
  EXPECT_TRUE(pair.Run());
  EXPECT_FALSE(pair.a.transport.SendsInProgress());
  EXPECT_EQ(pair.a.TakeSends().size(), 1u);
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
  IbOptions changed = pair.a.transport.options();
  changed.send_psn = 7;  // too late
  changed.mtu = 4096;
  pair.a.transport.SetAttributes(changed);
  pair.a.transport.StartSending();
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.a.TakeSends().size(), 1u);
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbTransportTest, FlushCompletesInOrderAndStillAcknowledgesWhatHasArrived) {
  IbPair pair;
  pair.b.PostReceive(10);
  const uint32_t source = pair.a.memory.Add(10);
  pair.a.PostSend(source, 10);
  pair.a.Fill(pair.now);
  pair.b.Arrive(pair.a.Leave(), pair.now);
  for (int i = 0; i < 3; ++i) pair.b.Post({.opcode = SendOpcode::kSend});
  pair.b.transport.Flush();
  EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_THAT(pair.b.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed, WorkStatus::kFlushed, WorkStatus::kFlushed));
  EXPECT_FALSE(pair.b.transport.Receiving());
  EXPECT_FALSE(pair.b.transport.Finished());
  EXPECT_TRUE(pair.Run());
  EXPECT_TRUE(pair.b.transport.Finished());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
}

TEST(IbTransportTest, FlushAnswersAtomicsThatWereCarriedOutAndNoReads) {
  IbPair pair;
  const uint32_t target = pair.b.memory.Add(64);
  IbHeader request{
      .op = IbOp::kFetchAdd, .destination_qp = IbPair::kQpB, .psn = 100, .address = IbEnd::At(target), .rkey = target};
  pair.b.Arrive(request, pair.now);
  request.op = IbOp::kReadRequest;
  request.psn = 101;
  request.dma_length = 64;
  pair.b.Arrive(request, pair.now);
  pair.b.PostReceive(std::vector<ScatterGather>{});
  pair.b.Arrive({.op = IbOp::kSendOnly, .destination_qp = IbPair::kQpB, .ack_request = true, .psn = 102}, pair.now);
  pair.b.transport.Flush();
  pair.b.Fill(pair.now);
  ASSERT_EQ(pair.b.out.records.size(), 1u);
  EXPECT_EQ(HeaderOf(pair.b.Leave()).op, IbOp::kAtomicAck);
  EXPECT_TRUE(pair.b.transport.Finished());
}

TEST(IbTransportTest, FlushInTheMiddleOfAMessageGivesItsReceiveBackFlushed) {
  IbPair pair;
  const uint32_t key = pair.b.memory.Add(1000);
  const ReceiveWork* receive = pair.b.PostReceive({pair.b.Sge(key, 0, 1000)});
  pair.b.Arrive({.op = IbOp::kSendFirst, .destination_qp = IbPair::kQpB, .psn = 100}, pair.now, Pattern(kMtu, 1));
  pair.b.transport.Flush();
  const auto received = pair.b.TakeReceives();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].work, receive);
  EXPECT_EQ(received[0].status, WorkStatus::kFlushed);
}

// --- Carriers ---

TEST(IbTransportTest, WithoutACarrierWorkWaitsAndAsksForOne) {
  IbEnd a(TestOptions(), IbPair::kQpA, IbPair::kQpB, "a");
  a.transport.StartSending();
  EXPECT_FALSE(a.transport.TakeRedialWish());
  a.Post({.opcode = SendOpcode::kSend});
  EXPECT_TRUE(a.transport.TakeRedialWish());
  EXPECT_FALSE(a.transport.TakeRedialWish());
  EXPECT_FALSE(a.Fill(Instant{}));
  // Each timeout asks again, until retries are used up.
  Instant now{};
  int wishes = 0;
  while (a.transport.Deadline()) {
    now = *a.transport.Deadline();
    a.transport.OnDeadline(now);
    wishes += a.transport.TakeRedialWish();
  }
  EXPECT_EQ(wishes, 7);
  EXPECT_EQ(now - Instant{}, wire::AckTimeout(14) * 8);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded));
}

TEST(IbTransportTest, ANewCarrierGetsWhatWasNotAcknowledged) {
  IbPair pair;
  pair.b.PostReceive(700);
  const uint32_t from = pair.a.AddPattern(700, 6);
  pair.a.PostSend(from, 700);
  pair.a.Fill(pair.now);
  pair.b.Arrive(pair.a.Leave(), pair.now);
  pair.Carrier(false);
  EXPECT_TRUE(pair.a.transport.Receiving());  // silence is no event
  EXPECT_TRUE(pair.a.transport.TakeRedialWish());
  EXPECT_FALSE(pair.b.transport.TakeRedialWish());
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
  pair.Carrier(true);
  pair.Exchange();  // at once, no timer is needed
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbTransportTest, AnIdleQpDoesNotMindTheLossOfItsCarrier) {
  IbPair pair;
  pair.a.transport.OnLost(/*orderly=*/false);
  pair.b.transport.OnLlpFault(2);
  for (IbEnd* end : {&pair.a, &pair.b}) {
    EXPECT_TRUE(end->transport.Receiving());
    EXPECT_FALSE(end->transport.TakeRedialWish());
    EXPECT_FALSE(end->transport.TakeFault().has_value());
    EXPECT_FALSE(end->transport.Deadline().has_value());
  }
}

TEST(IbTransportTest, MemoryThatGoesWhileItIsSentFailsItsWorkRequestInItsTurn) {
  IbPair pair;
  const uint32_t good = pair.a.memory.Add(10);
  const uint32_t bad = pair.a.memory.Add(10);
  pair.b.PostReceive(10);
  pair.b.PostReceive(10);
  pair.a.PostSend(good, 10);
  pair.a.PostSend(bad, 10);
  pair.a.PostSend(good, 10);
  pair.a.Fill(pair.now);
  pair.a.memory.Invalidate(bad);
  EXPECT_TRUE(pair.Run());  // the carrier is replaced on the way
  EXPECT_THAT(pair.a.TakeSendStatuses(),
              ElementsAre(WorkStatus::kSuccess, WorkStatus::kLocalProtectionError, WorkStatus::kFlushed));
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbTransportTest, MemoryThatGoesBeforeAPacketIsRepeatedFailsItsWorkRequest) {
  IbPair pair;
  const uint32_t key = pair.a.memory.Add(10);
  pair.b.PostReceive(10);
  pair.from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
  pair.a.PostSend(key, 10);
  pair.Exchange();
  pair.a.memory.Invalidate(key);
  pair.now = *pair.NextDeadline();
  pair.a.transport.OnDeadline(pair.now);
  EXPECT_FALSE(pair.a.Fill(pair.now));  // and the carrier is spared
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
}

TEST(IbTransportTest, MemoryThatGoesWhenThePeerHasAllIsNoFault) {
  IbPair pair;
  const uint32_t good = pair.a.memory.Add(10);
  const uint32_t gone = pair.a.memory.Add(10);
  for (int i = 0; i < 3; ++i) pair.b.PostReceive(10);
  pair.a.PostSend(good, 10);
  pair.a.PostSend(gone, 10);
  pair.from_b.fate = [](size_t n, ConstBytes) { return n == 0 ? Fate::kDrop : Fate::kDeliver; };
  pair.Exchange();
  pair.a.memory.Invalidate(gone);
  EXPECT_TRUE(pair.Run());  // the first is sent again, and the answer says that both have come
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
  pair.a.PostSend(good, 10);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
}

TEST(IbTransportTest, RepeatedAnswerWhoseMemoryGoesCostsTheCarrierAlone) {
  IbPair pair;
  const uint32_t source = pair.b.memory.Add(64);
  const uint32_t sink = pair.a.memory.Add(64);
  pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
              {pair.a.Sge(sink, 0, 64)});
  EXPECT_TRUE(pair.Run());
  pair.b.Arrive(pair.from_a.log[0], pair.now);
  pair.b.Fill(pair.now);
  ASSERT_EQ(pair.b.out.records.size(), 1u);
  pair.b.memory.Invalidate(source);
  EXPECT_TRUE(pair.b.Leave().empty());
  EXPECT_TRUE(pair.b.transport.Receiving());
  EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
}

TEST(IbTransportTest, SourceOfAReadThatGoesBeforeTheAnswerIsARemoteAccessError) {
  for (const bool while_sent : {false, true}) {
    SCOPED_TRACE(while_sent);
    IbPair pair;
    const uint32_t source = pair.b.memory.Add(4 * kMtu);
    const uint32_t sink = pair.a.memory.Add(4 * kMtu);
    pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = source, .remote_offset = pair.b.At(source)},
                {pair.a.Sge(sink, 0, 4 * kMtu)});
    pair.a.Fill(pair.now);
    pair.b.Arrive(pair.a.Leave(), pair.now);
    pair.b.Fill(pair.now, 1);
    pair.a.Arrive(pair.b.Leave(), pair.now);
    if (while_sent) pair.b.Fill(pair.now, 1);
    pair.b.memory.Invalidate(source);
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRemoteAccessError));
    EXPECT_EQ(pair.b.transport.TakeFault()->kind, FaultKind::kProtection);
    EXPECT_TRUE(pair.b.transport.Finished());
  }
}

TEST(IbTransportTest, AFatalNakThatLostItsCarrierWaitsForTheNext) {
  IbPair pair;
  pair.b.Arrive({.op = IbOp::kSendMiddle, .destination_qp = IbPair::kQpB, .psn = 100}, pair.now, Pattern(kMtu, 1));
  pair.b.Fill(pair.now);
  pair.b.out.records.clear();
  pair.b.transport.OnCarrier(false, pair.now);
  EXPECT_FALSE(pair.b.transport.Finished());
  EXPECT_TRUE(pair.b.transport.TakeRedialWish());
  pair.b.transport.OnCarrier(true, pair.now);
  pair.b.Fill(pair.now);
  ASSERT_EQ(pair.b.out.records.size(), 1u);
  EXPECT_EQ(HeaderOf(pair.b.Leave()).syndrome, wire::kIbNakInvalidRequest);
  EXPECT_TRUE(pair.b.transport.Finished());
}

TEST(IbTransportTest, CompletionWaitsUntilRepeatedPacketsOfItHaveLeft) {
  IbPair pair;
  pair.b.PostReceive(8);
  const uint32_t from = pair.a.memory.Add(8);
  pair.a.PostSend(from, 8);
  pair.a.Fill(pair.now);
  pair.b.Arrive(pair.a.Leave(), pair.now);
  pair.now += wire::AckTimeout(14);
  pair.a.transport.OnDeadline(pair.now);
  pair.a.Fill(pair.now);  // queued once more
  pair.b.Fill(pair.now);
  pair.a.Arrive(pair.b.Leave(), pair.now);
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());  // its memory is still to be read
  pair.a.Leave();
  EXPECT_EQ(pair.a.TakeSends().size(), 1u);
}

// --- UC ---

TEST(IbUcTest, WhatNeedsAnAnswerIsALocalOperationErrorAndStopsTheSendQueueAlone) {
  for (const SendOpcode opcode :
       {SendOpcode::kRead, SendOpcode::kFetchAdd, SendOpcode::kCompareSwap, SendOpcode::kSendInvalidate}) {
    IbPair pair(Uc(), Uc());
    const uint32_t local = pair.a.memory.Add(8);
    pair.b.PostReceive(8);
    pair.a.PostReceive(8);
    pair.a.PostSend(local, 8);
    pair.a.Post({.opcode = opcode}, {pair.a.Sge(local, 0, 8)});
    pair.a.PostSend(local, 8);
    pair.b.PostSend(pair.b.memory.Add(8), 8);
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(),
                ElementsAre(WorkStatus::kSuccess, WorkStatus::kLocalOperationError, WorkStatus::kFlushed));
    EXPECT_EQ(pair.a.transport.TakeFault()->kind, FaultKind::kSendQueue);
    EXPECT_TRUE(pair.a.transport.Receiving());
    EXPECT_EQ(pair.a.TakeReceives().size(), 1u);
    pair.a.PostSend(local, 8);
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
    // SQE to RTS.
    pair.a.transport.StartSending();
    pair.b.PostReceive(8);
    pair.a.PostSend(local, 8);
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
    EXPECT_EQ(pair.b.TakeReceives().size(), 2u);
  }
}

TEST(IbUcTest, NothingIsAnswered) {
  IbPair pair(Uc(), Uc());
  pair.b.PostReceive(1000);
  pair.a.PostSend(pair.a.memory.Add(1000), 1000);
  EXPECT_TRUE(pair.Run());
  EXPECT_TRUE(pair.from_b.log.empty());
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
  for (const TestBytes& record : pair.from_a.log) EXPECT_FALSE(HeaderOf(record).ack_request);
}

TEST(IbUcTest, LossOfAnyPacketLosesItsMessageAndKeepsItsReceive) {
  for (size_t lost = 0; lost < 4; ++lost) {
    IbPair pair(Uc(), Uc());
    pair.from_a.fate = [=](size_t n, ConstBytes) { return n == lost ? Fate::kDrop : Fate::kDeliver; };
    const uint32_t to = pair.b.PostReceive(1000);
    const uint32_t first = pair.a.AddPattern(1000, 1);
    const uint32_t second = pair.a.AddPattern(1000, 2);
    pair.a.PostSend(first, 1000);
    pair.a.PostSend(second, 1000);
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess, WorkStatus::kSuccess));
    EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess));
    EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to), pair.a.memory.Bytes(second)));
    EXPECT_TRUE(pair.b.transport.Receiving());
  }
}

TEST(IbUcTest, WhatRcWouldRefuseIsDropped) {
  for (const ErrorCase& each : ErrorCases()) {
    if (each.initiator == WorkStatus::kRemoteOperationError) continue;  // ends the QP, see below
    SCOPED_TRACE(each.name);
    IbOptions of_b = Uc();
    each.target_options(of_b);
    IbPair pair(Uc(), of_b);
    each.post(pair);
    EXPECT_TRUE(pair.Run());
    EXPECT_THAT(pair.b.TakeReceives(), IsEmpty());
    EXPECT_TRUE(pair.b.transport.Receiving());
    EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
    EXPECT_TRUE(pair.from_b.log.empty());
    EXPECT_TRUE(pair.b.memory.GuardsIntact());
    // The next message arrives.
    if (!pair.a.transport.TakeFault()) {
      pair.b.PostReceive(8);
      pair.a.TakeSends();
      pair.a.Post({.opcode = SendOpcode::kSend});  // fits whatever Receive was kept
      EXPECT_TRUE(pair.Run());
      EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess));
    }
  }
}

TEST(IbUcTest, KeyThatGoesInTheMiddleOfAWriteLosesTheRestAndNothingMoreIsStored) {
  IbPair pair(Uc(), Uc());
  const uint32_t from = pair.a.AddPattern(3 * kMtu, 1);
  const uint32_t to = pair.b.memory.Add(3 * kMtu);
  pair.from_a.fate = [&](size_t number, ConstBytes) {
    if (number == 1) pair.b.memory.Invalidate(to);
    return Fate::kDeliver;
  };
  pair.b.PostReceive(8);
  pair.a.Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 3 * kMtu)});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_THAT(pair.b.TakeReceives(), IsEmpty());
  EXPECT_FALSE(pair.b.transport.TakeFault().has_value());
  EXPECT_TRUE(pair.from_b.log.empty());
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).first(kMtu), pair.a.memory.Bytes(from).first(kMtu)));
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(to).subspan(kMtu), TestBytes(2 * kMtu)));
  // The next message finds the Receive.
  pair.a.Post({.opcode = SendOpcode::kSend});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess));
}

TEST(IbUcTest, MessagesWithoutAReceiveAreDropped) {
  IbPair pair(Uc(), Uc());
  const uint32_t from = pair.a.AddPattern(600, 1);
  const uint32_t to = pair.b.memory.Add(600);
  pair.a.PostSend(from, 600);
  pair.a.Post({.opcode = SendOpcode::kWriteImmediate, .remote_stag = to, .remote_offset = pair.b.At(to)},
              {pair.a.Sge(from, 0, 600)});
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.b.TakeReceives(), IsEmpty());
  EXPECT_EQ(pair.a.TakeSends().size(), 2u);
  pair.b.PostReceive(600);
  pair.a.PostSend(from, 600);
  EXPECT_TRUE(pair.Run());
  EXPECT_EQ(pair.b.TakeReceives().size(), 1u);
}

TEST(IbUcTest, ReceiveThatCannotBeFilledEndsTheQp) {
  IbPair pair(Uc(), Uc());
  const uint32_t key = pair.b.memory.Add(100, FakeMemory::kNone);
  pair.b.PostReceive({pair.b.Sge(key, 0, 100)});
  pair.a.PostSend(pair.a.memory.Add(100), 100);
  EXPECT_TRUE(pair.Run());
  EXPECT_THAT(pair.b.TakeReceiveStatuses(), ElementsAre(WorkStatus::kLocalProtectionError));
  EXPECT_TRUE(pair.b.transport.Finished());
  EXPECT_EQ(pair.b.transport.TakeFault()->kind, FaultKind::kWork);
}

TEST(IbUcTest, CompletionWaitsUntilTheLastPacketHasLeftOrItsCarrierIsGone) {
  IbPair pair(Uc(), Uc());
  const uint32_t from = pair.a.memory.Add(2 * kMtu);
  pair.a.PostSend(from, 2 * kMtu);
  pair.a.PostSend(from, 2 * kMtu);
  pair.a.Fill(pair.now, 4);
  pair.a.Leave();
  EXPECT_THAT(pair.a.TakeSends(), IsEmpty());
  pair.a.Leave();
  EXPECT_EQ(pair.a.TakeSends().size(), 1u);
  pair.a.transport.OnCarrier(false, pair.now);
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));  // lost, as packets of UC may be
  EXPECT_FALSE(pair.a.transport.Deadline().has_value());
}

// --- A peer that is out of reach for good ---

// The word of it fails what is under way as retries would, and flushes the rest, without any time passing.
TEST_P(Services, APeerOutOfReachEndsAllWorkAtOnce) {
  const bool acknowledged = GetParam() == IbService::kRc;
  IbOptions of_a = Options();
  of_a.send_psn = 7;
  IbOptions of_b = Options();
  of_b.receive_psn = 7;
  IbPair pair(of_a, of_b);
  const uint32_t key = pair.a.AddPattern(100, 1);
  for (int i = 0; i < 3; ++i) pair.a.PostSend(key, 100);
  pair.a.out.capacity = 1;
  pair.a.Fill(pair.now);
  // For another QP it means nothing, nor from a stranger, who does not know with what numbers the two have begun.
  EXPECT_TRUE(pair.a.Arrive(wire::EncodeIbUnreachable(IbPair::kQpB, 100), pair.now));
  for (const uint32_t psn : {0u, 8u, 99u, 101u}) {
    EXPECT_TRUE(pair.a.Arrive(wire::EncodeIbUnreachable(IbPair::kQpA, psn), pair.now));
  }
  EXPECT_TRUE(pair.a.transport.Receiving());
  EXPECT_TRUE(pair.a.Arrive(pair.b.transport.UnreachableWord(), pair.now));
  EXPECT_TRUE(pair.a.transport.Finished());
  const auto fault = pair.a.transport.TakeFault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, FaultKind::kWork);
  EXPECT_EQ(pair.a.TakeSendStatuses(),
            (std::vector<WorkStatus>{acknowledged ? WorkStatus::kRetryExceeded : WorkStatus::kFlushed,
                                     WorkStatus::kFlushed, WorkStatus::kFlushed}));
}

// An end that only receives (RTR) need not know with what it would begin to send.
TEST_P(Services, AnEndThatOnlyReceivesSaysAndHearsThatThePeerIsOutOfReach) {
  IbOptions sends = Options();
  sends.send_psn = 7;
  sends.receive_psn = 8;
  IbOptions receives = Options();
  receives.send_psn = 0;
  receives.receive_psn = 7;
  for (const bool receiver_is_told : {false, true}) {
    IbEnd sender(sends, IbPair::kQpA, IbPair::kQpB, "sender");
    IbEnd receiver(receives, IbPair::kQpB, IbPair::kQpA, "receiver");
    sender.transport.StartSending();
    IbEnd& told = receiver_is_told ? receiver : sender;
    const IbEnd& tells = receiver_is_told ? sender : receiver;
    EXPECT_TRUE(told.Arrive(wire::EncodeIbUnreachable(told.transport.options().qp_number, 0), Instant{}));
    EXPECT_TRUE(told.transport.Receiving());
    EXPECT_TRUE(told.Arrive(tells.transport.UnreachableWord(), Instant{}));
    EXPECT_FALSE(told.transport.Receiving());
  }
}

TEST(IbTransportTest, WhoHasNothingUnderWayFailsAllTheSameWhenThePeerIsOutOfReach) {
  IbPair pair;
  pair.a.transport.OnUnreachable();
  EXPECT_TRUE(pair.a.transport.TakeFault().has_value());
  pair.a.Fill(pair.now);
  EXPECT_TRUE(pair.a.transport.Finished());
  pair.a.transport.OnUnreachable();
  EXPECT_FALSE(pair.a.transport.TakeFault().has_value());
}

}  // namespace
}  // namespace stagecoach::emu
