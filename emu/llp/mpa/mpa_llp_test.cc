#include "emu/llp/mpa/mpa_llp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <vector>

#include "base/prng.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {
namespace {

using Bytes = std::vector<std::byte>;
using ::testing::ElementsAre;

Bytes Pattern(size_t size, uint8_t seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 13 + (i >> 8));
  return bytes;
}

// A stream whose incoming bytes and willingness to write are set by the test.
class ScriptedStream final : public Stream {
 public:
  // Incoming.
  Bytes incoming;
  size_t read_limit = SIZE_MAX;  // most bytes a Read yields
  bool eof = false;
  int read_error = 0;
  // Outgoing. Each Write takes the front of `write_limits`, and everything when that is empty; 0 is kWouldBlock.
  Bytes written;
  std::deque<size_t> write_limits;
  int write_error = 0;
  size_t segment_size = 1460;
  const FakeMemory* memory = nullptr;  // to see pins from inside a write
  int pins_during_write = 0;
  int segment_size_asked = 0;

  IoResult Read(std::span<const MutableBytes> into) override {
    if (read_error != 0) return {.status = IoStatus::kError, .error = read_error};
    size_t total = 0;
    for (const MutableBytes& part : into) {
      const size_t n = CopyBytes(part.first(std::min(part.size(), read_limit - total)),
                                 ConstBytes(incoming).subspan(read_position_));
      read_position_ += n;
      total += n;
    }
    if (total > 0) return {.status = IoStatus::kOk, .bytes = total};
    return {.status = eof ? IoStatus::kEof : IoStatus::kWouldBlock};
  }
  IoResult Write(std::span<const ConstBytes> from) override {
    if (memory != nullptr) pins_during_write = memory->pins();
    if (write_error != 0) return {.status = IoStatus::kError, .error = write_error};
    size_t limit = SIZE_MAX;
    if (!write_limits.empty()) {
      limit = write_limits.front();
      write_limits.pop_front();
    }
    if (limit == 0) return {.status = IoStatus::kWouldBlock};
    size_t total = 0;
    for (const ConstBytes& part : from) {
      const ConstBytes taken = part.first(std::min(part.size(), limit - total));
      written.insert(written.end(), taken.begin(), taken.end());
      total += taken.size();
    }
    return {.status = IoStatus::kOk, .bytes = total};
  }
  void Arm(bool, bool) override {}
  void SetWatcher(ReadyWatcher*) override {}
  void Shutdown() override {}
  void Abort() override {}
  int PollDescriptor() const override { return -1; }
  IpEndpoint local() const override { return {}; }
  IpEndpoint remote() const override { return {}; }
  size_t MaxSegmentSize() const override {
    ++const_cast<ScriptedStream*>(this)->segment_size_asked;
    return segment_size;
  }

 private:
  size_t read_position_ = 0;
};

constexpr size_t kHead = 14;

struct Received {
  RxResult end;
  std::vector<Bytes> records;  // head and payload together
};

// Takes records until the Llp has no more.
Received ReceiveAll(MpaLlp& llp) {
  Received received;
  while (true) {
    RecordHead head;
    received.end = llp.NextRecord(&head);
    if (received.end.status != RxStatus::kReady) return received;
    Bytes record(head.length);
    const size_t head_size = std::min(head.length, kHead);
    CopyBytes(record, head.head.first(head_size));
    const MutableBytes payload = MutableBytes(record).subspan(head_size);
    const std::array<MutableBytes, 2> parts = {payload.first(payload.size() / 2), payload.subspan(payload.size() / 2)};
    // A stream that ends inside the record says so soon; one that trickles takes a read for each byte.
    for (size_t patience = head.length * 2 + 10; patience > 0; --patience) {
      received.end = llp.Place(head_size, parts);
      if (received.end.status != RxStatus::kWouldBlock) break;
    }
    if (received.end.status != RxStatus::kReady) return received;
    received.records.push_back(std::move(record));
  }
}

std::vector<uint64_t> TakeAllSent(MpaLlp& llp) {
  std::vector<uint64_t> sent;
  for (uint64_t cookie; llp.TakeSent(&cookie);) sent.push_back(cookie);
  return sent;
}

// Queues a record of `payload` bytes, half of it by key and half by value; returns the ULPDU.
class Sender {
 public:
  Sender(MpaLlp& llp, FakeMemory& memory) : llp_(llp), memory_(memory) {}

  Bytes Queue(size_t payload, uint64_t cookie) {
    const Bytes head = Pattern(kHead, static_cast<uint8_t>(cookie));
    const size_t by_key = payload / 2;
    const uint32_t stag = memory_.Add(by_key);
    stags.push_back(stag);
    CopyBytes(memory_.Bytes(stag), Pattern(by_key, static_cast<uint8_t>(cookie + 1)));
    values_.push_back(Pattern(payload - by_key, static_cast<uint8_t>(cookie + 2)));
    const std::array<TxPart, 2> parts = {
        TxPart{
            .by_key = true, .key = stag, .address = FakeMemory::Address(stag), .length = static_cast<uint32_t>(by_key)},
        TxPart{.bytes = values_.back()}};
    llp_.QueueRecord(head, parts, cookie);
    Bytes ulpdu(kHead + payload);
    CopyBytes(ulpdu, head);
    CopyBytes(MutableBytes(ulpdu).subspan(kHead), memory_.Bytes(stag));
    CopyBytes(MutableBytes(ulpdu).subspan(kHead + by_key), values_.back());
    return ulpdu;
  }

  std::vector<uint32_t> stags;

 private:
  MpaLlp& llp_;
  FakeMemory& memory_;
  std::deque<Bytes> values_;
};

std::vector<Bytes> Parse(const Bytes& stream_bytes, bool crc) {
  ScriptedStream stream;
  stream.incoming = stream_bytes;
  stream.eof = true;
  MpaLlp llp(stream, {.crc = crc});
  Received received = ReceiveAll(llp);
  while (received.end.status == RxStatus::kWouldBlock) {
    Received more = ReceiveAll(llp);
    received.end = more.end;
    std::move(more.records.begin(), more.records.end(), std::back_inserter(received.records));
  }
  EXPECT_EQ(received.end.status, RxStatus::kEof);
  return received.records;
}

class MpaLlpTest : public ::testing::TestWithParam<bool> {
 protected:
  bool crc() const { return GetParam(); }
  RecordOptions options() const { return {.crc = crc()}; }
};
INSTANTIATE_TEST_SUITE_P(Crc, MpaLlpTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "WithCrc" : "WithoutCrc"; });

TEST_P(MpaLlpTest, SeveralRecordsLeaveInOneWriteAndArriveAsTheyWere) {
  FakeMemory memory;
  ScriptedStream stream;
  MpaLlp llp(stream, options());
  Sender sender(llp, memory);
  std::vector<Bytes> expected;
  for (uint64_t cookie = 1; cookie <= 6; ++cookie) expected.push_back(sender.Queue(cookie * 37, cookie));
  EXPECT_FALSE(llp.TxIdle());
  EXPECT_EQ(llp.Flush(memory).status, TxStatus::kIdle);
  EXPECT_TRUE(llp.TxIdle());
  EXPECT_EQ(llp.counters().writes, 1u);
  EXPECT_EQ(llp.counters().tx_records, 6u);
  EXPECT_THAT(TakeAllSent(llp), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(Parse(stream.written, crc()), expected);
}

TEST_P(MpaLlpTest, AWriteMayStopAtAnyByte) {
  FakeMemory memory;
  Bytes whole;
  for (size_t stop = 0; stop == 0 || stop < whole.size(); ++stop) {
    ScriptedStream stream;
    if (stop > 0) stream.write_limits = {stop, 0};
    MpaLlp llp(stream, options());
    Sender sender(llp, memory);
    const std::vector<Bytes> expected = {sender.Queue(0, 1), sender.Queue(25, 2), sender.Queue(90, 3)};
    if (stop > 0) {
      ASSERT_EQ(llp.Flush(memory).status, TxStatus::kWouldBlock);
      ASSERT_EQ(stream.written.size(), stop);
      ASSERT_EQ(llp.Flush(memory).status, TxStatus::kWouldBlock);
      // A record counts as sent when its last byte has left, and not before.
      const size_t first = wire::FpduSize(expected[0].size());
      const size_t second = first + wire::FpduSize(expected[1].size());
      ASSERT_EQ(TakeAllSent(llp).size(), (stop >= first ? 1u : 0u) + (stop >= second ? 1u : 0u)) << stop;
    }
    ASSERT_EQ(llp.Flush(memory).status, TxStatus::kIdle);
    if (stop == 0) {
      whole = stream.written;
      ASSERT_EQ(Parse(whole, crc()), expected);
    }
    ASSERT_EQ(stream.written, whole) << "stopped at byte " << stop;
  }
}

TEST_P(MpaLlpTest, ByteByByteInBothDirections) {
  FakeMemory memory;
  ScriptedStream stream;
  MpaLlp llp(stream, options());
  Sender sender(llp, memory);
  std::vector<Bytes> expected;
  for (uint64_t cookie = 1; cookie <= 5; ++cookie) expected.push_back(sender.Queue(cookie * 11, cookie));
  while (!llp.TxIdle()) {
    stream.write_limits = {1};
    ASSERT_NE(llp.Flush(memory).status, TxStatus::kReset);
  }
  ScriptedStream back;
  back.incoming = stream.written;
  back.read_limit = 1;
  back.eof = true;
  MpaLlp receiver(back, options());
  std::vector<Bytes> got;
  while (true) {
    Received received = ReceiveAll(receiver);
    std::move(received.records.begin(), received.records.end(), std::back_inserter(got));
    if (received.end.status == RxStatus::kEof) break;
    ASSERT_EQ(received.end.status, RxStatus::kWouldBlock);
  }
  EXPECT_EQ(got, expected);
}

TEST_P(MpaLlpTest, RandomRecordsOverARandomStreamArriveAsTheyWere) {
  Prng prng(11);
  for (int round = 0; round < 10; ++round) {
    FakeMemory memory;
    ScriptedStream stream;
    MpaLlp llp(stream, options());
    Sender sender(llp, memory);
    std::vector<Bytes> expected;
    while (expected.size() < 60) {
      if (prng.OneIn(2) && llp.CanQueue()) {
        expected.push_back(sender.Queue(prng.Below(prng.OneIn(5) ? 60000 : 900), expected.size()));
      } else {
        stream.write_limits = {prng.Between(0, prng.OneIn(2) ? 200 : 100000)};
        llp.Flush(memory);
      }
      ASSERT_EQ(memory.pins(), 0);
    }
    stream.write_limits.clear();
    ASSERT_EQ(llp.Flush(memory).status, TxStatus::kIdle);
    std::vector<uint64_t> cookies(expected.size());
    for (size_t i = 0; i < cookies.size(); ++i) cookies[i] = i;
    EXPECT_EQ(TakeAllSent(llp), cookies);
    ASSERT_TRUE(Parse(stream.written, crc()) == expected);
  }
}

TEST_P(MpaLlpTest, ALoneMessageCostsOneWriteAndOneRead) {
  FakeMemory memory;
  ScriptedStream out;
  ScriptedStream in;
  MpaLlp sender_llp(out, options());
  MpaLlp receiver(in, options());
  Sender sender(sender_llp, memory);
  for (uint64_t i = 1; i <= 20; ++i) {
    const Bytes expected = sender.Queue(64, i);
    sender_llp.Flush(memory);
    EXPECT_EQ(out.written.size(), wire::FpduSize(expected.size()));
    in.incoming.insert(in.incoming.end(), out.written.begin(), out.written.end());
    out.written.clear();
    const Received received = ReceiveAll(receiver);
    EXPECT_EQ(received.end.status, RxStatus::kWouldBlock);
    EXPECT_THAT(received.records, ElementsAre(expected));
    EXPECT_EQ(sender_llp.counters().writes, i);
    EXPECT_EQ(receiver.counters().reads, i);
  }
}

TEST_P(MpaLlpTest, AfterAShortReadTheStreamIsAskedAgainOnTheSecondCall) {
  FakeMemory memory;
  ScriptedStream out;
  MpaLlp sender_llp(out, options());
  Sender sender(sender_llp, memory);
  const Bytes first = sender.Queue(64, 1);
  const Bytes second = sender.Queue(64, 2);
  sender_llp.Flush(memory);
  ScriptedStream in;
  in.incoming = out.written;
  in.read_limit = wire::FpduSize(first.size());
  MpaLlp receiver(in, options());
  EXPECT_THAT(ReceiveAll(receiver).records, ElementsAre(first));
  EXPECT_THAT(ReceiveAll(receiver).records, ElementsAre(second));
}

TEST_P(MpaLlpTest, MemoryThatGoesWhileARecordWaitsIsAFaultOfThatRecord) {
  FakeMemory memory;
  ScriptedStream stream;
  MpaLlp llp(stream, options());
  Sender sender(llp, memory);
  const Bytes first = sender.Queue(40, 1);
  sender.Queue(50, 2);
  sender.Queue(60, 3);
  memory.Invalidate(sender.stags[1]);
  const TxResult result = llp.Flush(memory);
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.memory_fault, MemoryFault::kStaleStag);
  EXPECT_EQ(result.cookie, 2u);
  // What stood before it has left; nothing behind it ever does.
  EXPECT_THAT(TakeAllSent(llp), ElementsAre(1));
  const size_t size = stream.written.size();
  EXPECT_GE(size, wire::FpduSize(first.size()));
  EXPECT_EQ(llp.Flush(memory).status, TxStatus::kMemoryFault);
  EXPECT_EQ(stream.written.size(), size);
  EXPECT_EQ(memory.pins(), 0);
}

TEST_P(MpaLlpTest, EofBetweenRecordsIsOrderlyAndWithinOneIsNot) {
  FakeMemory memory;
  ScriptedStream out;
  MpaLlp sender_llp(out, options());
  Sender sender(sender_llp, memory);
  sender.Queue(64, 1);
  sender_llp.Flush(memory);
  for (size_t size = 0; size <= out.written.size(); ++size) {
    ScriptedStream in;
    in.incoming.assign(out.written.begin(), out.written.begin() + static_cast<ptrdiff_t>(size));
    in.eof = true;
    MpaLlp receiver(in, options());
    Received received = ReceiveAll(receiver);
    for (int i = 0; i < 3 && received.end.status == RxStatus::kWouldBlock; ++i) received = ReceiveAll(receiver);
    const bool whole = size == 0 || size == out.written.size();
    EXPECT_EQ(received.end.status, whole ? RxStatus::kEof : RxStatus::kReset) << size;
    EXPECT_EQ(received.end.error, 0);
  }
}

TEST_P(MpaLlpTest, AnErrorOfTheStreamIsFinal) {
  FakeMemory memory;
  ScriptedStream stream;
  MpaLlp llp(stream, options());
  Sender sender(llp, memory);
  sender.Queue(64, 1);
  stream.read_error = ECONNRESET;
  stream.write_error = EPIPE;
  RecordHead head;
  EXPECT_EQ(llp.NextRecord(&head).error, ECONNRESET);
  EXPECT_EQ(llp.Flush(memory).error, EPIPE);
  stream.read_error = stream.write_error = 0;
  EXPECT_EQ(llp.NextRecord(&head).status, RxStatus::kReset);
  EXPECT_EQ(llp.Flush(memory).status, TxStatus::kReset);
  EXPECT_TRUE(TakeAllSent(llp).empty());
}

TEST_P(MpaLlpTest, QueuesABoundedAmount) {
  FakeMemory memory;
  ScriptedStream stream;
  MpaLlp llp(stream, options());
  Sender sender(llp, memory);
  int queued = 0;
  for (; llp.CanQueue() && queued < 10000; ++queued) sender.Queue(60000, 1);
  EXPECT_THAT(queued, ::testing::AllOf(::testing::Ge(2), ::testing::Le(16)));
  llp.Flush(memory);
  EXPECT_TRUE(llp.CanQueue());
  for (queued = 0; llp.CanQueue() && queued < 10000; ++queued) sender.Queue(0, 1);
  EXPECT_THAT(queued, ::testing::AllOf(::testing::Ge(32), ::testing::Le(1000)));
}

TEST(MpaLlpCopyTest, PayloadIsGatheredFromWhereItLies) {
  FakeMemory memory;
  ScriptedStream stream;
  stream.memory = &memory;
  MpaLlp llp(stream, {.crc = false});
  Sender sender(llp, memory);
  sender.Queue(60000, 1);
  llp.Flush(memory);
  EXPECT_EQ(llp.counters().tx_payload_bytes, 60000u);
  EXPECT_EQ(llp.counters().tx_copied_bytes, 0u);
  // Pinned during the write, and only then.
  EXPECT_EQ(stream.pins_during_write, 1);
  EXPECT_EQ(memory.pins(), 0);
}

TEST(MpaLlpCopyTest, WithCrcTheBytesThatLeaveAreThoseTheCrcCovers) {
  FakeMemory memory;
  ScriptedStream stream;
  stream.write_limits = {50};
  MpaLlp llp(stream, {.crc = true});
  Sender sender(llp, memory);
  const Bytes expected = sender.Queue(600, 1);
  llp.Flush(memory);
  // The owner writes to the memory, or even invalidates it, in the middle of the record.
  std::fill(memory.Bytes(sender.stags[0]).begin(), memory.Bytes(sender.stags[0]).end(), std::byte{0xee});
  memory.Invalidate(sender.stags[0]);
  EXPECT_EQ(llp.Flush(memory).status, TxStatus::kIdle);
  EXPECT_THAT(Parse(stream.written, true), ElementsAre(expected));
  EXPECT_EQ(llp.counters().tx_copied_bytes, 600u);
}

TEST(MpaLlpCopyTest, OneMebibyteInLargeRecordsIsHardlyCopied) {
  FakeMemory memory;
  ScriptedStream out;
  MpaLlp sender_llp(out, {.crc = false});
  Sender sender(sender_llp, memory);
  for (uint64_t i = 0; i < 16; ++i) {
    sender.Queue(65000, i);
    sender_llp.Flush(memory);
  }
  ScriptedStream in;
  in.incoming = out.written;
  MpaLlp receiver(in, {.crc = false});
  EXPECT_EQ(ReceiveAll(receiver).records.size(), 16u);
  EXPECT_EQ(receiver.counters().rx_payload_bytes, 16 * 65000u);
  EXPECT_LE(receiver.counters().rx_copied_bytes, MpaReceiver::kLookAheadSize + 16 * kMaxRecordHead);
  EXPECT_LE(receiver.counters().reads, 18u);
}

TEST(MpaLlpCrcTest, AFlippedBitIsAFaultAndNothingIsPlaced) {
  FakeMemory memory;
  ScriptedStream out;
  MpaLlp sender_llp(out, {.crc = true});
  Sender sender(sender_llp, memory);
  sender.Queue(64, 1);
  sender_llp.Flush(memory);
  // Behind the length field: a flipped length only makes the receiver wait for more.
  for (size_t bit = 16; bit < out.written.size() * 8; ++bit) {
    ScriptedStream in;
    in.incoming = out.written;
    in.incoming[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    MpaLlp receiver(in, {.crc = true});
    RecordHead head;
    const RxResult result = receiver.NextRecord(&head);
    EXPECT_EQ(result.status, RxStatus::kFault) << bit;
    EXPECT_EQ(result.fault, LlpFault::kBadCrc);
    EXPECT_EQ(receiver.NextRecord(&head).status, RxStatus::kFault);
  }
}

TEST(MpaLlpSizeTest, MaxUlpduFollowsTheSegmentSizeUnlessGiven) {
  ScriptedStream stream;
  stream.segment_size = 1448;
  EXPECT_EQ(MpaLlp(stream, {.crc = false}).MaxUlpdu(), 1442u);
  EXPECT_EQ(MpaLlp(stream, {.insert_markers = true}).MaxUlpdu(), 1430u);
  EXPECT_EQ(MpaLlp(stream, {.max_record = 4000}).MaxUlpdu(), 4000u);
  EXPECT_EQ(MpaLlp(stream, {.max_record = 1}).MaxUlpdu(), kMinMulpdu);
  EXPECT_EQ(MpaLlp(stream, {.max_record = 1 << 20}).MaxUlpdu(), wire::kMpaUlpduMax);
}

TEST(MpaLlpSizeTest, ThePathIsAskedNowAndThenAndNotForEachRecord) {
  ScriptedStream stream;
  stream.segment_size = 1448;
  MpaLlp llp(stream, {.crc = false});
  EXPECT_EQ(llp.MaxUlpdu(), 1442u);
  stream.segment_size = 1024;
  int calls = 1;
  while (llp.MaxUlpdu() == 1442u && calls < 10000) ++calls;
  EXPECT_EQ(llp.MaxUlpdu(), Mulpdu(1024, false));
  EXPECT_EQ(stream.segment_size_asked, 2);
  EXPECT_GE(calls, 64);
}

TEST(MpaLlpMarkerTest, TheLargestRecordWithMarkersStaysWithinReachOfItsPointer) {
  FakeMemory memory;
  ScriptedStream stream;
  stream.segment_size = SIZE_MAX;
  MpaLlp llp(stream, {.crc = true, .insert_markers = true});
  Sender sender(llp, memory);
  sender.Queue(llp.MaxUlpdu() - kHead, 1);
  EXPECT_EQ(llp.Flush(memory).status, TxStatus::kIdle);
  EXPECT_LE(stream.written.size(), 65536u);
  // The last marker of the stream points all the way back.
  const size_t last = (stream.written.size() - 1) / 512 * 512;
  const auto marker = wire::MpaMarker::Decode(ConstBytes(stream.written).subspan(last).first<4>());
  EXPECT_EQ(marker.fpdu_pointer, last - 4);
}

}  // namespace
}  // namespace stagecoach::emu
