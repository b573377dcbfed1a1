// The outer edges of the numbers in RDMAP's and DDP's headers, from one engine to the other: at their largest value,
// at one less, and where they wrap.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "base/cursor.h"
#include "emu/engine/rdmap_stream.h"
#include "emu/engine/transport_test_support.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {
namespace {

namespace terminate = wire::terminate;
using ::testing::ElementsAre;

using wire::RdmapOpcode;
using wire::SegmentHeader;

constexpr std::array<uint32_t, 7> kEdgesOf32 = {0, 1, 0xff, 0x7fffffff, 0x80000000, UINT32_MAX - 1, UINT32_MAX};
constexpr std::array<uint64_t, 8> kEdgesOf64 = {
    0,         1, UINT32_MAX, uint64_t{UINT32_MAX} + 1, uint64_t{INT64_MAX}, uint64_t{INT64_MAX} + 1, UINT64_MAX - 1,
    UINT64_MAX};
constexpr uint32_t kFirstStag = 0x15a;  // of a FakeMemory

RdmapOptions Options(uint16_t depth = 4) {
  return {.ird = depth, .ord = depth, .extensions = wire::RdmapExtensions::kRfc7306};
}

class End final : public TransportEnd {
 public:
  explicit End(const RdmapOptions& options = Options())
      : TransportEnd(256), stream(options, memory, receives, &trace, "end") {}

  bool Fill() { return stream.FillTx(out, 1000); }
  bool Arrive(ConstBytes record) { return TransportEnd::Arrive(record, Instant{}); }
  bool Arrive(const SegmentHeader& header, ConstBytes payload = {}) {
    TestBytes record(header.EncodedSize() + payload.size());
    ByteWriter writer(record);
    header.Encode(writer);
    writer.Bytes(payload);
    return Arrive(record);
  }
  // What the stream has died of.
  std::optional<wire::TerminateCode> Fault() {
    const auto fault = stream.TakeFault();
    if (!fault) return std::nullopt;
    return wire::TerminateCode{fault->layer, fault->error_type, fault->error_code};
  }

  RdmapStream stream;

 private:
  QpTransport& engine() override { return stream; }
};

bool Deliver(End& from, End& to) {
  bool any = from.Fill();
  while (!from.out.records.empty()) {
    const TestBytes record = from.Leave();
    if (record.empty()) break;
    to.Arrive(record);
    any = true;
  }
  return any;
}

void Exchange(End& a, End& b) {
  while (Deliver(a, b) || Deliver(b, a)) {
  }
}

// --- Tagged offsets ---

// Whether the last of `length` bytes from `offset` on has a number.
bool Wraps(uint64_t offset, uint32_t length) {
  return length > 0 && static_cast<unsigned __int128>(offset) + length > static_cast<unsigned __int128>(UINT64_MAX) + 1;
}

TEST(RdmapEdges, NoTaggedOffsetReachesMemoryBesideItsRegion) {
  constexpr uint32_t kSize = 100;
  const uint64_t begin = FakeMemory::Address(kFirstStag);
  for (const uint32_t length : {1u, 2u, kSize - 1, kSize, kSize + 1}) {
    for (const uint64_t offset : {begin, begin - 1, begin + 1, begin + kSize - 1, begin + kSize, begin + kSize - length,
                                  begin + kSize - length + 1, uint64_t{0}, uint64_t{0} - length,
                                  uint64_t{0} - length + 1, UINT64_MAX - 1, UINT64_MAX, uint64_t{INT64_MAX}}) {
      SCOPED_TRACE(testing::Message() << offset << ", " << length);
      const bool inside = offset >= begin && offset - begin + length <= kSize;
      {
        End end;
        const uint32_t stag = end.memory.Add(kSize);
        EXPECT_EQ(end.Arrive(SegmentHeader::Write(stag, offset, true), TestBytes(length, std::byte{1})), inside);
        if (!inside) {
          EXPECT_EQ(end.Fault(), Wraps(offset, length) ? terminate::kDdpOffsetWrap : terminate::kDdpBounds);
        }
        EXPECT_TRUE(end.memory.GuardsIntact());
      }
      End end;
      const uint32_t stag = end.memory.Add(kSize);
      const wire::ReadRequest request{.sink_stag = 1, .length = length, .source_stag = stag, .source_offset = offset};
      EXPECT_EQ(end.Arrive(SegmentHeader::Read(1, request)), inside);
      if (inside) continue;
      EXPECT_EQ(end.Fault(), Wraps(offset, length) ? terminate::kRdmapOffsetWrap : terminate::kRdmapBounds);
    }
  }
}

TEST(RdmapEdges, AReadMayAskForAsMuchAsALengthCanSayAndGetsWhatIsThere) {
  for (const uint32_t length : {0x7fffffffu, 0x80000000u, UINT32_MAX - 1, UINT32_MAX}) {
    for (const uint64_t beyond : {uint64_t{0}, uint64_t{99}, uint64_t{100}}) {
      End end;
      const uint32_t stag = end.memory.Add(100);
      EXPECT_FALSE(end.Arrive(SegmentHeader::Read(1, {.sink_stag = 1,
                                                      .length = length,
                                                      .source_stag = stag,
                                                      .source_offset = FakeMemory::Address(stag) + beyond})));
      EXPECT_EQ(end.Fault(), terminate::kRdmapBounds);
    }
  }
}

// The sink is the requester's business: what it names comes back, also where it wraps.
TEST(RdmapEdges, AnAnswerCountsTheOffsetsOfItsSinkModulo64Bits) {
  constexpr uint32_t kSize = 1000;
  for (const uint64_t sink : {UINT64_MAX, UINT64_MAX - 300, uint64_t{0} - kSize, uint64_t{INT64_MAX} - 10}) {
    SCOPED_TRACE(sink);
    End end;
    const uint32_t stag = end.memory.Add(kSize);
    ASSERT_TRUE(end.Arrive(SegmentHeader::Read(1, {.sink_stag = UINT32_MAX,
                                                   .sink_offset = sink,
                                                   .length = kSize,
                                                   .source_stag = stag,
                                                   .source_offset = FakeMemory::Address(stag)})));
    end.Fill();
    uint32_t answered = 0;
    while (!end.out.records.empty()) {
      const TestBytes record = end.Leave();
      const auto header = wire::DecodeSegment(record, record.size());
      ASSERT_TRUE(header.has_value());
      EXPECT_EQ(header->stag, UINT32_MAX);
      EXPECT_EQ(header->tagged_offset, sink + answered);
      answered += static_cast<uint32_t>(record.size() - header->EncodedSize());
      EXPECT_EQ(header->last, answered == kSize);
    }
    EXPECT_EQ(answered, kSize);
  }
}

// --- Message sequence numbers and message offsets ---

// The edges, and what differs from `next` in one bit: all 32 count.
std::vector<uint32_t> NumbersAround(uint32_t next) {
  std::vector<uint32_t> numbers(std::begin(kEdgesOf32), std::end(kEdgesOf32));
  for (int bit = 0; bit < 32; ++bit) numbers.push_back(next ^ (1u << bit));
  numbers.push_back(next);
  return numbers;
}

TEST(RdmapEdges, OneSequenceNumberOfAllIsTheNext) {
  for (const uint32_t msn : NumbersAround(1)) {
    SCOPED_TRACE(msn);
    End sent_to;
    sent_to.PostReceive(10);
    EXPECT_EQ(sent_to.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, msn, 0, true)), msn == 1);
    End read_from;
    EXPECT_EQ(read_from.Arrive(SegmentHeader::Read(msn, {.sink_stag = 1})), msn == 1);
    if (msn == 1) continue;
    EXPECT_EQ(sent_to.Fault(), terminate::kDdpMsnRange);
    EXPECT_EQ(read_from.Fault(), terminate::kDdpMsnRange);
  }
}

TEST(RdmapEdges, OneMessageOffsetOfAllIsTheNext) {
  for (const uint32_t begun : {0u, 40u}) {
    std::vector<uint32_t> offsets = NumbersAround(begun);
    offsets.insert(offsets.end(), {39u, 40u, 41u, UINT32_MAX - 39});
    for (const uint32_t offset : offsets) {
      SCOPED_TRACE(testing::Message() << begun << ' ' << offset);
      End end;
      end.PostReceive(100);
      if (begun > 0) {
        ASSERT_TRUE(end.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, 0, false), TestBytes(begun)));
      }
      const bool next = offset == begun;
      EXPECT_EQ(end.Arrive(SegmentHeader::Send(RdmapOpcode::kSend, 0, 1, offset, true), TestBytes(40)), next);
      if (!next) {
        EXPECT_EQ(end.Fault(), terminate::kDdpMessageOffset);
      }
    }
  }
}

// --- Lengths ---

TEST(RdmapEdges, TheLongestMessageIsSentAndOneByteMoreIsNot) {
  constexpr uint32_t kLongest = 1000;
  for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kWrite, SendOpcode::kRead}) {
    for (const uint32_t length : {kLongest - 1, kLongest, kLongest + 1}) {
      SCOPED_TRACE(testing::Message() << ToString(opcode) << ' ' << length);
      RdmapOptions limited = Options();
      limited.max_message_bytes = kLongest;
      End a(limited);
      End b;
      const uint32_t here = a.memory.Add(kLongest + 1);
      const uint32_t there = b.memory.Add(kLongest + 1);
      b.PostReceive(kLongest + 1);
      a.Post({.opcode = opcode, .remote_stag = there, .remote_offset = FakeMemory::Address(there)},
             {End::Sge(here, 0, length)});
      Exchange(a, b);
      EXPECT_THAT(a.TakeSendStatuses(),
                  ElementsAre(length <= kLongest ? WorkStatus::kSuccess : WorkStatus::kLocalLengthError));
    }
  }
}

TEST(RdmapEdges, AListOfMoreBytesThanALengthCanSayIsTooLong) {
  for (const SendOpcode opcode : {SendOpcode::kSend, SendOpcode::kWrite, SendOpcode::kRead}) {
    // In 32 bits their sums are 0 and 2^32 - 2.
    for (const auto& [first, second] : {std::pair{1u << 31, 1u << 31}, {UINT32_MAX, UINT32_MAX}}) {
      End a;
      const uint32_t here = a.memory.Add(10);
      a.Post({.opcode = opcode}, {End::Sge(here, 0, first), End::Sge(here, 0, second)});
      a.Fill();
      EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kLocalLengthError));
    }
  }
}

TEST(RdmapEdges, AReceiveMayHaveRoomForMoreThanALengthCanSay) {
  End a;
  End b;
  const uint32_t sink = b.memory.Add(10);
  b.PostReceive({End::Sge(sink, 0, 10), End::Sge(sink, 0, UINT32_MAX), End::Sge(sink, 0, UINT32_MAX)});
  a.PostSend(a.memory.Add(10, FakeMemory::kAll, 7), 10);
  Exchange(a, b);
  EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  EXPECT_TRUE(SameBytes(b.memory.Bytes(sink), TestBytes(10, std::byte{7})));
}

TEST(RdmapEdges, AsManyReadsAsAgreedOnAndNotOneMore) {
  for (const uint16_t depth : {1, 2, 255}) {
    SCOPED_TRACE(depth);
    End a(Options(depth));
    End b(Options(depth));
    a.out.capacity = depth + 1;
    for (int i = 0; i <= depth; ++i) a.Post({.opcode = SendOpcode::kRead});
    a.Fill();
    EXPECT_EQ(a.out.records.size(), depth) << "and one waits";
    while (!a.out.records.empty()) EXPECT_TRUE(b.Arrive(a.Leave()));
    EXPECT_FALSE(b.Arrive(SegmentHeader::Read(depth + 1, {.sink_stag = 1})));
    EXPECT_EQ(b.Fault(), terminate::kRdmapStreamCatastrophic);
  }
}

// --- What is only passed on ---

TEST(RdmapEdges, ImmediateDataArrivesWhateverItIs) {
  for (const uint32_t immediate : kEdgesOf32) {
    End a;
    End b;
    b.PostReceive(0u);
    a.Post({.opcode = SendOpcode::kWriteImmediate, .immediate = immediate});
    Exchange(a, b);
    const auto received = b.TakeReceives();
    ASSERT_EQ(received.size(), 1u);
    EXPECT_EQ(received[0].immediate, immediate);
    EXPECT_THAT(a.TakeSendStatuses(), ElementsAre(WorkStatus::kSuccess));
  }
}

TEST(RdmapEdges, ASendInvalidatesTheStagItNamesWhateverItIs) {
  for (const uint32_t stag : kEdgesOf32) {
    SCOPED_TRACE(stag);
    End a;
    End b;
    b.PostReceive(0u);
    const uint32_t bystander = b.memory.Add(10);
    a.Post({.opcode = SendOpcode::kSendInvalidate, .remote_stag = stag});
    Exchange(a, b);
    EXPECT_TRUE(b.memory.IsValid(bystander));
    EXPECT_EQ(b.Fault(), terminate::kRdmapCannotInvalidate) << "none of them is one of its";
  }
}

TEST(RdmapEdges, AtomicsCountModulo64BitsAndCompareAllOfThem) {
  for (const uint64_t stands : kEdgesOf64) {
    for (const uint64_t operand : kEdgesOf64) {
      SCOPED_TRACE(testing::Message() << stands << ' ' << operand);
      for (const SendOpcode opcode : {SendOpcode::kFetchAdd, SendOpcode::kCompareSwap}) {
        End a;
        End b;
        const uint32_t there = b.memory.Add(8);
        const uint32_t here = a.memory.Add(8);
        CopyBytes(b.memory.Bytes(there), AsBytes(&stands, 8));
        a.Post({.opcode = opcode,
                .remote_stag = there,
                .remote_offset = FakeMemory::Address(there),
                .compare_add = operand,
                .swap = ~stands},
               {End::Sge(here, 0, 8)});
        Exchange(a, b);
        const uint64_t swapped = stands == operand ? ~stands : stands;
        const uint64_t after = opcode == SendOpcode::kFetchAdd ? stands + operand : swapped;
        EXPECT_TRUE(SameBytes(a.memory.Bytes(here), AsBytes(&stands, 8)));
        EXPECT_TRUE(SameBytes(b.memory.Bytes(there), AsBytes(&after, 8)));
      }
    }
  }
}

TEST(RdmapEdges, NoAtomicReachesMemoryBesideItsRegion) {
  const uint64_t begin = FakeMemory::Address(kFirstStag);
  for (const uint64_t offset : {begin, begin + 8, begin - 8, begin + 16, uint64_t{0}, uint64_t{0} - 8,
                                uint64_t{INT64_MAX} - 7, begin + 1, begin + 15, UINT64_MAX, UINT64_MAX - 6}) {
    SCOPED_TRACE(offset);
    End a;
    End b;
    const uint32_t there = b.memory.Add(16);
    const uint32_t here = a.memory.Add(8);
    a.Post({.opcode = SendOpcode::kFetchAdd, .remote_stag = there, .remote_offset = offset, .compare_add = 1},
           {End::Sge(here, 0, 8)});
    Exchange(a, b);
    const bool good = offset >= begin && offset - begin <= 8 && offset % 8 == 0;
    EXPECT_EQ(b.memory.atomics(), good ? 1 : 0);
    EXPECT_EQ(b.Fault().has_value(), !good);
    EXPECT_TRUE(b.memory.GuardsIntact());
  }
}

// --- Terminates ---

// Of each code that there can be: whoever gets it is told of it, whatever it means.
TEST(RdmapEdges, EveryCodeOfATerminateIsTold) {
  for (unsigned layer = 0; layer <= 0xf; ++layer) {
    for (unsigned type = 0; type <= 0xf; ++type) {
      for (unsigned code = 0; code <= UINT8_MAX; ++code) {
        End end;
        end.PostSend(end.memory.Add(10), 10);
        // Layer and type share a byte; none of the header at fault is quoted.
        const TestBytes control = {static_cast<std::byte>(layer << 4 | type), static_cast<std::byte>(code),
                                   std::byte{0}, std::byte{0}};
        end.Arrive(SegmentHeader::Terminate(), control);
        ASSERT_TRUE(end.stream.Finished()) << layer << ' ' << type << ' ' << code;
        EXPECT_THAT(end.TakeSendStatuses(), ElementsAre(WorkStatus::kFlushed));
        const auto fault = end.stream.TakeFault();
        ASSERT_TRUE(fault.has_value());
        EXPECT_TRUE(fault->from_peer);
        // Linux siw has the two the other way round, which is how what makes no sense otherwise is read.
        EXPECT_EQ(fault->layer, fault->siw_bit_order ? type : layer);
        EXPECT_EQ(fault->error_type, fault->siw_bit_order ? layer : type);
        EXPECT_EQ(fault->error_code, code);
      }
    }
  }
}

}  // namespace
}  // namespace stagecoach::emu
