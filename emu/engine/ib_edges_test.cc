// The outer edges of the numbers in InfiniBand's packets and in the attributes of QPs, from one engine to the other:
// fields at every value they can have, or at both their ends and where they wrap.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "emu/engine/ib_test_support.h"

namespace stagecoach::emu {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using wire::IbOp;
using wire::kPsnMask;
using wire::PsnAdd;

constexpr uint32_t kHalf = 1u << 23;  // of the circle of PSNs
// Where numbers of 24 bits begin, end, and change their sign.
constexpr std::array<uint32_t, 8> kPsnEdges = {0, 1, kHalf - 1, kHalf, kHalf + 1, kPsnMask - 2, kPsnMask - 1, kPsnMask};
constexpr std::array<uint32_t, 7> kEdgesOf32 = {0, 1, 0xff, 0x7fffffff, 0x80000000, UINT32_MAX - 1, UINT32_MAX};
constexpr std::array<uint64_t, 8> kEdgesOf64 = {
    0,         1, UINT32_MAX, uint64_t{UINT32_MAX} + 1, uint64_t{INT64_MAX}, uint64_t{INT64_MAX} + 1, UINT64_MAX - 1,
    UINT64_MAX};

// --- Timers ---

// Table 45 of section 9.7.5.2.8, in microseconds.
constexpr std::array<uint32_t, 32> kRnrTimers = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

TEST(IbEdges, EveryTimerOfAResponderIsHowLongItsRequesterWaits) {
  for (uint8_t code = 0; code < 32; ++code) {
    SCOPED_TRACE(int{code});
    IbOptions of_b = TestOptions();
    of_b.min_rnr_timer = code;
    IbPair pair(TestOptions(), of_b);
    const uint32_t from = pair.a.AddPattern(10, 1);
    pair.a.PostSend(from, 10);
    pair.Exchange();
    const Instant due = pair.now + std::chrono::microseconds(kRnrTimers[code]);
    ASSERT_EQ(pair.a.transport.Deadline(), due);
    const size_t sent = pair.from_a.sent;
    pair.b.PostReceive(10);
    pair.now = due - std::chrono::nanoseconds(1);
    pair.a.transport.OnDeadline(pair.now);
    pair.Exchange();
    EXPECT_EQ(pair.from_a.sent, sent) << "nothing is sent before its time";
    pair.now = due;
    pair.a.transport.OnDeadline(pair.now);
    pair.Exchange();
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  }
}

TEST(IbEdges, EveryTimeoutIsHowLongARequesterWaitsForAnAnswer) {
  for (uint8_t code = 0; code < 32; ++code) {
    SCOPED_TRACE(int{code});
    IbOptions of_a = TestOptions();
    of_a.timeout = code;
    IbPair pair(of_a);
    pair.from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
    pair.a.PostSend(pair.a.AddPattern(10, 1), 10);
    pair.Exchange();
    ASSERT_EQ(pair.from_a.sent, 1u);
    if (code == 0) {
      EXPECT_EQ(pair.a.transport.Deadline(), std::nullopt);
      continue;
    }
    // Section 9.9.2.1.2: 4.096 us times a power of two.
    const Instant due = pair.now + std::chrono::nanoseconds(4096) * (int64_t{1} << code);
    ASSERT_EQ(pair.a.transport.Deadline(), due);
    for (const Instant when : {due - std::chrono::nanoseconds(1), due}) {
      pair.now = when;
      pair.a.transport.OnDeadline(when);
      pair.Exchange();
      EXPECT_EQ(pair.from_a.sent, when == due ? 2u : 1u);
    }
  }
}

TEST(IbEdges, EveryCountOfRetriesIsAsManyRetries) {
  for (uint8_t count = 0; count <= 7; ++count) {
    SCOPED_TRACE(int{count});
    IbOptions of_a = TestOptions();
    of_a.retry_count = count;
    of_a.rnr_retry = count;
    {
      IbPair silent(of_a);
      silent.from_a.fate = [](size_t, ConstBytes) { return Fate::kDrop; };
      silent.a.PostSend(silent.a.AddPattern(10, 1), 10);
      ASSERT_TRUE(silent.Run());
      EXPECT_EQ(silent.from_a.sent, 1u + count);
      EXPECT_THAT(silent.a.TakeSendStatuses(), ElementsAre(WorkStatus::kRetryExceeded));
    }
    IbPair not_ready(of_a);
    not_ready.a.PostSend(not_ready.a.AddPattern(10, 1), 10);
    constexpr int kTries = 100;
    for (int i = 0; i < kTries && !not_ready.a.transport.Finished(); ++i) {
      not_ready.Exchange();
      not_ready.now = not_ready.NextDeadline().value_or(not_ready.now);
      not_ready.a.transport.OnDeadline(not_ready.now);
    }
    const bool for_ever = count == 7;
    EXPECT_EQ(not_ready.from_a.sent, for_ever ? kTries : 1u + count);
    EXPECT_EQ(not_ready.a.transport.Finished(), !for_ever);
  }
}

// --- Syndromes ---

struct Answer {
  WorkStatus status = WorkStatus::kSuccess;  // of the Send that is answered, if `completes`
  bool completes = true;
};

Answer MeaningOf(uint8_t syndrome) {
  if (syndrome < 0x20) return {};  // whatever credits it tells of
  if (syndrome < 0x40) return {.completes = false};
  switch (syndrome) {
    case 0x60:
      return {.completes = false};
    case 0x61:
      return {.status = WorkStatus::kRemoteInvalidRequest};
    case 0x62:
      return {.status = WorkStatus::kRemoteAccessError};
    case 0x63:
      return {.status = WorkStatus::kRemoteOperationError};
    default:
      return {.status = WorkStatus::kBadResponse};
  }
}

TEST(IbEdges, EverySyndromeMeansOneThing) {
  for (unsigned value = 0; value <= UINT8_MAX; ++value) {
    const auto syndrome = static_cast<uint8_t>(value);
    SCOPED_TRACE(wire::SyndromeToString(syndrome));
    IbEnd end(TestOptions(), IbPair::kQpA, IbPair::kQpB, "a");
    end.transport.OnCarrier(true, {});
    end.transport.StartSending();
    end.PostSend(end.AddPattern(10, 1), 10);
    end.Fill({});
    end.Leave();
    ASSERT_TRUE(end.out.records.empty());
    end.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = 100, .syndrome = syndrome}, {});
    const Answer meaning = MeaningOf(syndrome);
    const std::vector<WorkStatus> completed = end.TakeSendStatuses();
    if (meaning.completes) {
      EXPECT_THAT(completed, ElementsAre(meaning.status));
      continue;
    }
    EXPECT_THAT(completed, IsEmpty());
    const bool waits = (syndrome & 0xe0) == 0x20;
    end.Fill({});
    EXPECT_EQ(end.out.records.empty(), waits) << "what is missing is sent again at once";
    if (waits) {
      EXPECT_EQ(end.transport.Deadline(), Instant{} + std::chrono::microseconds(kRnrTimers[syndrome & 0x1f]));
    }
  }
}

// --- Packet sequence numbers ---

TEST(IbEdges, MessagesOfEveryKindPassWhereverTheirNumbersBegin) {
  for (const uint32_t psn_a : kPsnEdges) {
    for (const uint32_t psn_b : {0u, kHalf, kPsnMask}) {
      SCOPED_TRACE(testing::Message() << psn_a << ' ' << psn_b);
      IbOptions of_a = TestOptions();
      IbOptions of_b = TestOptions();
      of_a.send_psn = of_b.receive_psn = psn_a;
      of_b.send_psn = of_a.receive_psn = psn_b;
      IbPair pair(of_a, of_b);
      for (IbEnd* end : {&pair.a, &pair.b}) {
        IbEnd& peer = end == &pair.a ? pair.b : pair.a;
        const uint32_t here = end->AddPattern(1000, 1);
        const uint32_t read = end->memory.Add(1000);
        const uint32_t there = peer.AddPattern(1000, 2);
        const uint32_t sink = peer.PostReceive(1000);
        end->PostSend(here, 1000);
        end->Post({.opcode = SendOpcode::kRead, .remote_stag = there, .remote_offset = IbEnd::At(there)},
                  {end->Sge(read, 0, 1000)});
        end->Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = there, .remote_offset = IbEnd::At(there)},
                  {end->Sge(read, 0, 8)});
        end->Post(
            {.opcode = SendOpcode::kWrite, .fence = true, .remote_stag = there, .remote_offset = IbEnd::At(there)},
            {end->Sge(here, 0, 1000)});
        ASSERT_TRUE(pair.Run());
        EXPECT_THAT(end->TakeSendStatuses(), testing::Each(WorkStatus::kSuccess));
        EXPECT_THAT(peer.TakeReceiveStatuses(), ElementsAre(WorkStatus::kSuccess));
        EXPECT_TRUE(SameBytes(peer.memory.Bytes(sink), Pattern(1000, 1)));
        EXPECT_TRUE(SameBytes(end->memory.Bytes(read), Pattern(1000, 2)));
        EXPECT_TRUE(SameBytes(peer.memory.Bytes(there), Pattern(1000, 1)));
      }
    }
  }
}

// What lies behind the number that is expected has come before, up to half of the circle; what lies ahead is missing
// something.
TEST(IbEdges, HalfOfAllNumbersAreOldAndHalfAreNew) {
  for (const uint32_t expected : kPsnEdges) {
    for (const uint32_t ahead : {uint32_t{0}, uint32_t{1}, kHalf - 1, kHalf, kPsnMask - 1, kPsnMask}) {
      SCOPED_TRACE(testing::Message() << expected << " + " << ahead);
      IbOptions options = TestOptions();
      options.receive_psn = expected;
      IbEnd end(options, IbPair::kQpB, IbPair::kQpA, "b");
      end.transport.OnCarrier(true, {});
      end.PostReceive(10);
      end.Arrive(
          {.op = IbOp::kSendOnly, .destination_qp = IbPair::kQpB, .ack_request = true, .psn = PsnAdd(expected, ahead)},
          {});
      end.Fill({});
      ASSERT_EQ(end.out.records.size(), 1u);
      const wire::IbHeader answer = HeaderOf(end.Leave());
      const bool newer = ahead > 0 && ahead < kHalf;
      EXPECT_EQ(answer.syndrome, newer ? wire::kIbNakSequence : wire::kIbAck);
      EXPECT_EQ(answer.psn, newer || ahead == 0 ? expected : PsnAdd(expected, kPsnMask));
      EXPECT_EQ(end.TakeReceives().size(), ahead == 0 ? 1u : 0u);
    }
  }
}

TEST(IbEdges, AnAcknowledgementOfWhatWasNotSentIsNone) {
  for (const uint32_t first : kPsnEdges) {
    // Three packets are outstanding: these are before them, the first after them, and as far away as can be.
    for (const uint32_t off : {kPsnMask, 3u, 4u, kHalf - 1, kHalf, kHalf + 2, kPsnMask - 1}) {
      SCOPED_TRACE(testing::Message() << first << " + " << off);
      IbOptions options = TestOptions();
      options.send_psn = first;
      IbEnd end(options, IbPair::kQpA, IbPair::kQpB, "a");
      end.transport.OnCarrier(true, {});
      end.transport.StartSending();
      const uint32_t from = end.AddPattern(10, 1);
      for (int i = 0; i < 3; ++i) end.PostSend(from, 10);
      end.Fill({});
      while (!end.out.records.empty()) end.Leave();
      for (const uint8_t syndrome : {wire::kIbAck, wire::kIbRnrNak, wire::kIbNakRemoteAccess}) {
        end.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = PsnAdd(first, off), .syndrome = syndrome},
                   {});
      }
      EXPECT_THAT(end.TakeSendStatuses(), IsEmpty());
      end.Arrive({.op = IbOp::kAck, .destination_qp = IbPair::kQpA, .psn = PsnAdd(first, 2), .syndrome = wire::kIbAck},
                 {});
      EXPECT_EQ(end.TakeSendStatuses(), std::vector<WorkStatus>(3, WorkStatus::kSuccess));
    }
  }
}

// --- Numbers of QPs ---

TEST(IbEdges, QpsMayHaveAnyNumberOf24Bits) {
  constexpr uint32_t kLast = wire::kIbQpMask;
  for (const auto& [one, other] : {std::pair{1u, kLast}, {kLast, kLast - 1}, {kHalf, kHalf - 1}}) {
    SCOPED_TRACE(testing::Message() << one << ' ' << other);
    IbEnd a(TestOptions(), one, other, "a");
    IbEnd b(TestOptions(), other, one, "b");
    for (IbEnd* end : {&a, &b}) {
      end->transport.OnCarrier(true, {});
      end->transport.StartSending();
    }
    b.PostReceive(10);
    a.PostSend(a.AddPattern(10, 1), 10);
    a.Fill({});
    EXPECT_TRUE(b.Arrive(a.Leave(), {}));
    EXPECT_EQ(b.TakeReceives().size(), 1u);
    b.Fill({});
    a.Arrive(b.Leave(), {});
    EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  }
}

// --- Addresses and lengths ---

struct Range {
  uint64_t address;
  uint32_t length;
};

// Ranges at, across and beyond both ends of a region and of all addresses.
std::vector<Range> RangesAround(uint64_t begin, uint32_t size) {
  std::vector<Range> ranges;
  for (const uint32_t length : {1u, 2u, size - 1, size, size + 1}) {
    for (const uint64_t address :
         {begin, begin - 1, begin + 1, begin + size - 1, begin + size, begin + size - length, begin + size - length + 1,
          uint64_t{0}, uint64_t{0} - length, uint64_t{0} - length + 1, UINT64_MAX, uint64_t{INT64_MAX}}) {
      ranges.push_back({address, length});
    }
  }
  return ranges;
}

TEST(IbEdges, NoRangeReachesMemoryBesideItsRegion) {
  constexpr uint32_t kSize = 700;  // three packets
  for (const SendOpcode opcode : {SendOpcode::kWrite, SendOpcode::kWriteImmediate, SendOpcode::kRead}) {
    // The first region is the one at the lowest address; nothing else lies below it.
    for (const Range& range : RangesAround(FakeMemory::Address(0x100), kSize)) {
      SCOPED_TRACE(testing::Message() << ToString(opcode) << " at " << range.address << ", " << range.length);
      IbPair pair;
      const uint32_t there = pair.b.AddPattern(kSize, 2);
      const uint32_t here = pair.a.AddPattern(kSize + 1, 1);
      pair.b.PostReceive(0u);
      const uint64_t begin = FakeMemory::Address(there);
      const bool inside = range.address >= begin && range.address - begin + range.length <= kSize;
      pair.a.Post({.opcode = opcode, .remote_stag = there, .remote_offset = range.address},
                  {pair.a.Sge(here, 0, range.length)});
      ASSERT_TRUE(pair.Run());
      EXPECT_THAT(pair.a.TakeSendStatuses(),
                  ElementsAre(inside ? WorkStatus::kSuccess : WorkStatus::kRemoteAccessError));
      EXPECT_TRUE(pair.b.memory.GuardsIntact());
      if (inside) continue;
      EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(there), Pattern(kSize, 2)));
    }
  }
}

TEST(IbEdges, NoAtomicReachesMemoryBesideItsRegion) {
  constexpr uint32_t kSize = 16;
  const uint64_t begin = FakeMemory::Address(0x100);
  for (const uint64_t address : {begin, begin + 8, begin - 8, begin + 16, uint64_t{0}, uint64_t{0} - 8,
                                 uint64_t{INT64_MAX} - 7, begin + 1, begin + 15, UINT64_MAX, UINT64_MAX - 6}) {
    SCOPED_TRACE(address);
    IbPair pair;
    const uint32_t there = pair.b.AddPattern(kSize, 2);
    const uint32_t here = pair.a.AddPattern(8, 1);
    pair.a.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = there, .remote_offset = address, .compare_add = 1},
                {pair.a.Sge(here, 0, 8)});
    ASSERT_TRUE(pair.Run());
    const bool inside = address >= begin && address - begin <= kSize - 8;
    const WorkStatus refusal = address % 8 != 0 ? WorkStatus::kRemoteInvalidRequest : WorkStatus::kRemoteAccessError;
    EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(inside && address % 8 == 0 ? WorkStatus::kSuccess : refusal));
    EXPECT_TRUE(pair.b.memory.GuardsIntact());
  }
}

TEST(IbEdges, TheLongestMessageIsCarriedAndOneByteMoreIsNot) {
  constexpr uint32_t kLongest = 1000;
  for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kWrite, SendOpcode::kRead}) {
    for (const uint32_t length : {kLongest - 1, kLongest, kLongest + 1}) {
      for (const bool limited_here : {true, false}) {
        SCOPED_TRACE(testing::Message() << ToString(opcode) << ' ' << length << ' ' << limited_here);
        IbOptions limited = TestOptions();
        limited.max_message_bytes = kLongest;
        IbPair pair(limited_here ? limited : TestOptions(), limited_here ? TestOptions() : limited);
        const uint32_t there = pair.b.AddPattern(kLongest + 1, 2);
        const uint32_t here = pair.a.AddPattern(kLongest + 1, 1);
        pair.b.PostReceive(kLongest + 1);
        pair.a.Post({.opcode = opcode, .remote_stag = there, .remote_offset = IbEnd::At(there)},
                    {pair.a.Sge(here, 0, length)});
        ASSERT_TRUE(pair.Run());
        const WorkStatus too_long = limited_here ? WorkStatus::kLocalLengthError : WorkStatus::kRemoteInvalidRequest;
        EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(length <= kLongest ? WorkStatus::kSuccess : too_long));
      }
    }
  }
}

TEST(IbEdges, AListOfMoreBytesThanALengthCanSayIsTooLong) {
  for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kWrite, SendOpcode::kRead}) {
    // Their sum is 2^31 + 1, 2^32, which in 32 bits is 0, and 2^33 - 2.
    for (const auto& [first, second] : {std::pair{1u << 31, 1u}, {1u << 31, 1u << 31}, {UINT32_MAX, UINT32_MAX}}) {
      SCOPED_TRACE(testing::Message() << ToString(opcode) << ' ' << first << " + " << second);
      IbPair pair;
      const uint32_t here = pair.a.AddPattern(10, 1);
      pair.a.Post({.opcode = opcode, .remote_stag = 0x15a, .remote_offset = IbEnd::At(0x15a)},
                  {pair.a.Sge(here, 0, first), pair.a.Sge(here, 0, second)});
      ASSERT_TRUE(pair.Run());
      EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalLengthError));
      EXPECT_EQ(pair.from_a.sent, 0u);
    }
  }
}

// What a peer says of a message's length, whatever it sends.
TEST(IbEdges, ALengthBeyondTheLongestMessageIsInvalidWhateverTheMemory) {
  constexpr uint32_t kLongest = 1u << 31;
  for (const IbOp op : {IbOp::kWriteFirst, IbOp::kReadRequest}) {
    for (const uint32_t length : {kLongest - 1, kLongest, kLongest + 1, UINT32_MAX}) {
      SCOPED_TRACE(testing::Message() << ToString(op) << ' ' << length);
      IbEnd end(TestOptions(), IbPair::kQpB, IbPair::kQpA, "b");
      end.transport.OnCarrier(true, {});
      const uint32_t key = end.AddPattern(256, 1);
      end.Arrive({.op = op,
                  .destination_qp = IbPair::kQpB,
                  .psn = 100,
                  .address = IbEnd::At(key),
                  .rkey = key,
                  .dma_length = length},
                 {}, op == IbOp::kWriteFirst ? ConstBytes(Pattern(256, 2)) : ConstBytes{});
      end.Fill({});
      ASSERT_EQ(end.out.records.size(), 1u);
      EXPECT_EQ(HeaderOf(end.Leave()).syndrome,
                length <= kLongest ? wire::kIbNakRemoteAccess : wire::kIbNakInvalidRequest);
      EXPECT_TRUE(SameBytes(end.memory.Bytes(key), Pattern(256, 1)));
    }
  }
}

// A Receive's elements may promise more than any message can have.
TEST(IbEdges, AReceiveMayHaveRoomForMoreThanALengthCanSay) {
  IbPair pair;
  const uint32_t sink = pair.b.memory.Add(10, FakeMemory::kLocalWrite);
  pair.b.PostReceive({pair.b.Sge(sink, 0, 10), pair.b.Sge(sink, 0, UINT32_MAX), pair.b.Sge(sink, 0, UINT32_MAX)});
  pair.a.PostSend(pair.a.AddPattern(10, 1), 10);
  ASSERT_TRUE(pair.Run());
  EXPECT_THAT(pair.a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(sink), Pattern(10, 1)));
}

// --- What is only passed on ---

TEST(IbEdges, ImmediateDataArrivesWhateverItIs) {
  for (const SendOpcode opcode : {SendOpcode::kSendImmediate, SendOpcode::kWriteImmediate}) {
    for (const uint32_t immediate : kEdgesOf32) {
      IbPair pair;
      pair.b.PostReceive(0u);
      pair.a.Post({.opcode = opcode, .immediate = immediate});
      ASSERT_TRUE(pair.Run());
      const auto received = pair.b.TakeReceives();
      ASSERT_EQ(received.size(), 1u);
      EXPECT_TRUE(received[0].has_immediate);
      EXPECT_EQ(received[0].immediate, immediate);
    }
  }
}

TEST(IbEdges, AtomicsCountModulo64BitsAndCompareAllOfThem) {
  for (const uint64_t stands : kEdgesOf64) {
    for (const uint64_t operand : kEdgesOf64) {
      SCOPED_TRACE(testing::Message() << stands << ' ' << operand);
      for (const SendOpcode opcode : {SendOpcode::kFetchAdd, SendOpcode::kCompareSwap}) {
        IbPair pair;
        const uint32_t there = pair.b.memory.Add(8);
        const uint32_t here = pair.a.memory.Add(8);
        CopyBytes(pair.b.memory.Bytes(there), AsBytes(&stands, 8));
        pair.a.Post({.opcode = opcode,
                     .remote_stag = there,
                     .remote_offset = IbEnd::At(there),
                     .compare_add = operand,
                     .swap = ~stands},
                    {pair.a.Sge(here, 0, 8)});
        ASSERT_TRUE(pair.Run());
        const uint64_t swapped = stands == operand ? ~stands : stands;
        const uint64_t after = opcode == SendOpcode::kFetchAdd ? stands + operand : swapped;
        EXPECT_TRUE(SameBytes(pair.a.memory.Bytes(here), AsBytes(&stands, 8)));
        EXPECT_TRUE(SameBytes(pair.b.memory.Bytes(there), AsBytes(&after, 8)));
      }
    }
  }
}

// --- Depths ---

TEST(IbEdges, DepthsAreAsDeepAsAByteCanSay) {
  constexpr uint8_t kDeepest = UINT8_MAX;
  for (const uint8_t depth : {uint8_t{1}, uint8_t{kDeepest - 1}, kDeepest}) {
    SCOPED_TRACE(int{depth});
    IbOptions of_a = TestOptions();
    of_a.max_rd_atomic = kDeepest;
    IbOptions of_b = TestOptions();
    of_b.max_dest_rd_atomic = depth;
    IbPair pair(of_a, of_b);
    pair.a.out.capacity = kDeepest + 1;
    const uint32_t here = pair.a.AddPattern(1, 1);
    const uint32_t there = pair.b.AddPattern(1, 2);
    for (int i = 0; i <= kDeepest; ++i) {
      pair.a.Post({.opcode = SendOpcode::kRead, .remote_stag = there, .remote_offset = IbEnd::At(there)},
                  {pair.a.Sge(here, 0, 1)});
    }
    pair.a.Fill(pair.now);
    EXPECT_EQ(pair.a.out.records.size(), kDeepest) << "and one waits";
    // All of them come before the first is answered.
    while (!pair.a.out.records.empty()) pair.b.Arrive(pair.a.Leave(), pair.now);
    EXPECT_EQ(pair.b.transport.TakeFault().has_value(), depth < kDeepest);
  }
}

}  // namespace
}  // namespace stagecoach::emu
