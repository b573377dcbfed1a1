// One ring, both of its ends, and what an end makes of an other that says what cannot be.
#include "emu/llp/shm/ring.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

using Bytes = std::vector<std::byte>;
using Room = RingWriter::Room;
using Step = RingReader::Step;

constexpr size_t kCapacity = OwnHalf::kLeastCapacity;
constexpr uint64_t kWord = 8;

Bytes Pattern(size_t size, uint8_t seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 13 + (i >> 8));
  return bytes;
}

uint64_t WordOf(uint32_t length, uint32_t kind = 1) {
  return uint64_t{kind} << 32 | length;
}

class RingTest : public testing::Test {
 protected:
  Room Say(const Bytes& record) {
    const Room room = writer_.Begin(record.size());
    if (room != Room::kEnough) return room;
    EXPECT_TRUE(writer_.Append(record));
    writer_.Publish();
    return room;
  }
  // All of the record in front, as its head and `cut` parts give it.
  std::optional<Bytes> Hear(size_t head_size = 14, size_t cut = 1) {
    RecordHead record;
    if (reader_.Next(&record) != Step::kReady) return std::nullopt;
    EXPECT_EQ(record.head.size(), std::min(record.length, kMaxRecordHead));
    head_size = std::min(head_size, record.head.size());
    Bytes all(record.length);
    CopyBytes(all, record.head.first(head_size));
    std::vector<MutableBytes> parts;
    MutableBytes rest = MutableBytes(all).subspan(head_size);
    for (size_t i = 1; i < cut; ++i) {
      parts.push_back(rest.first(rest.size() / 2));
      rest = rest.subspan(rest.size() / 2);
    }
    parts.push_back(rest);
    EXPECT_TRUE(reader_.Place(head_size, parts));
    reader_.Release();
    return all;
  }
  // As a hostile writer: whatever it likes into the ring.
  void Write(uint64_t position, uint64_t word) { std::memcpy(&ring_[position % kCapacity], &word, sizeof word); }
  RingFault FaultOfNext() {
    RecordHead record;
    EXPECT_EQ(reader_.Next(&record), Step::kFault);
    EXPECT_EQ(reader_.Next(&record), Step::kFault) << "for good";
    EXPECT_EQ(reader_.Discard(), Step::kFault);
    return reader_.fault();
  }

  HalfWords writers_;
  HalfWords readers_;
  alignas(64) std::array<std::byte, kCapacity> ring_{};
  RingWriter writer_{writers_, ring_, readers_};
  RingReader reader_{readers_, writers_, ring_};
};

TEST_F(RingTest, RecordsOfEverySizeComeOutAsTheyWentInAcrossTheEndOfTheRing) {
  for (size_t size = 0; size <= LargestRecord(kCapacity); ++size) {
    const Bytes record = Pattern(size, static_cast<uint8_t>(size));
    ASSERT_EQ(Say(record), Room::kEnough) << size;
    ASSERT_EQ(Hear(size % 49, 1 + size % 3), record) << size;
  }
  EXPECT_GT(writer_.produced(), 10 * kCapacity);
  EXPECT_EQ(Hear(), std::nullopt);
  EXPECT_EQ(reader_.fault(), RingFault::kNone);
}

TEST_F(RingTest, AFullRingTakesNoMoreUntilARecordIsReleased) {
  const Bytes record = Pattern(LargestRecord(kCapacity), 1);
  size_t said = 0;
  while (Say(record) == Room::kEnough) ASSERT_LT(++said, 8u);
  EXPECT_EQ(said, 7u) << "eight would fit without their words";
  RecordHead head;
  ASSERT_EQ(reader_.Next(&head), Step::kReady);
  EXPECT_EQ(Say(record), Room::kTooLittle) << "as long as the reader looks at it";
  ASSERT_EQ(Hear(), record);
  EXPECT_EQ(Say(record), Room::kEnough);
  while (said-- > 0) ASSERT_EQ(Hear(), record);
  EXPECT_EQ(Hear(), std::nullopt);
}

TEST_F(RingTest, ARecordThatIsNotPublishedNeverWas) {
  ASSERT_EQ(writer_.Begin(100), Room::kEnough);
  ASSERT_TRUE(writer_.Append(Pattern(50, 1)));
  EXPECT_EQ(Hear(), std::nullopt);
  EXPECT_EQ(Say(Pattern(20, 2)), Room::kEnough);
  EXPECT_EQ(Hear(), Pattern(20, 2));
}

TEST_F(RingTest, MemoryThatIsGoneHarmsNoRecord) {
  CatchMemoryFaults();
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const gone = mmap(nullptr, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  ASSERT_EQ(writer_.Begin(64), Room::kEnough);
  EXPECT_FALSE(writer_.Append({static_cast<std::byte*>(gone), 64}));
  ASSERT_EQ(Say(Pattern(64, 3)), Room::kEnough);
  RecordHead record;
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  const MutableBytes into(static_cast<std::byte*>(gone), 64);
  EXPECT_FALSE(reader_.Place(0, {&into, 1}));
  EXPECT_TRUE(reader_.Place(0, {})) << "the rest is thrown away";
  EXPECT_EQ(Hear(0), Pattern(64, 3)) << "or placed elsewhere";
  munmap(gone, page);
}

TEST_F(RingTest, WhatIsThrownAwayMakesRoom) {
  while (Say(Pattern(200, 1)) == Room::kEnough) continue;
  RecordHead record;
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  EXPECT_EQ(reader_.Discard(), Step::kReady);
  EXPECT_EQ(reader_.Discard(), Step::kEmpty);
  ASSERT_EQ(Say(Pattern(9, 2)), Room::kEnough);
  EXPECT_EQ(Hear(), Pattern(9, 2)) << "and not the rest of the record in front";
}

// --- Records that refer to memory ---

class ReferringRingTest : public RingTest {
 protected:
  ReferringRingTest() { reader_.TakeReferences(); }
  Room Refer(const Bytes& inline_bytes, std::span<const Reference> references) {
    const Room room = writer_.BeginReferring(inline_bytes.size(), references);
    if (room != Room::kEnough) return room;
    EXPECT_TRUE(writer_.Append(inline_bytes));
    writer_.Publish();
    return room;
  }
  // As a hostile writer: the words of such a record, which it has at `position`, and an end that leaves room for all.
  void WriteReferring(uint64_t length, uint64_t inline_size, uint64_t count, const Reference& each) {
    Write(0, WordOf(static_cast<uint32_t>(length), 2));
    Write(kWord, inline_size << 32 | count);
    for (uint64_t i = 0; i < std::min<uint64_t>(count, kMostReferences); ++i) {
      uint64_t at = 2 * kWord + i * sizeof(Reference);
      for (const uint64_t word : {each.at, each.length, each.guard_at, each.guard})
        Write(std::exchange(at, at + 8), word);
    }
    writers_.produced = kCapacity;
  }
};

TEST_F(ReferringRingTest, TheyComeOutAsTheyWentInAmongOthersAndAcrossTheEndOfTheRing) {
  for (size_t i = 0; i < 500; ++i) {
    const Bytes inline_bytes =
        Pattern(kMaxRecordHead + i % (kMaxTxHeader - kMaxRecordHead + 1), static_cast<uint8_t>(i));
    std::vector<Reference> references(1 + i % kMostReferences);
    uint64_t rest = 0;
    for (size_t k = 0; k < references.size(); ++k) {
      references[k] = {.at = i * 1000 + k, .length = 1 + k % 10, .guard_at = 8 * k, .guard = i};
      rest += references[k].length;
    }
    ASSERT_EQ(Refer(inline_bytes, references), Room::kEnough) << i;
    ASSERT_EQ(Say(Pattern(i % 100, 7)), Room::kEnough);
    RecordHead record;
    ASSERT_EQ(reader_.Next(&record), Step::kReady) << i;
    EXPECT_EQ(record.length, inline_bytes.size() + rest);
    EXPECT_EQ(Bytes(record.head.begin(), record.head.end()), Bytes(inline_bytes.begin(), inline_bytes.begin() + 48));
    ASSERT_EQ(reader_.inline_size(), inline_bytes.size());
    ASSERT_EQ(reader_.references().size(), references.size());
    EXPECT_EQ(std::memcmp(reader_.references().data(), references.data(), references.size() * sizeof(Reference)), 0);
    Bytes placed(inline_bytes.size() - 14 + rest, std::byte{0xa5});
    const MutableBytes into(placed);
    ASSERT_TRUE(reader_.Place(14, {&into, 1}));
    EXPECT_TRUE(std::equal(inline_bytes.begin() + 14, inline_bytes.end(), placed.begin()));
    EXPECT_TRUE(std::all_of(placed.end() - static_cast<ptrdiff_t>(rest), placed.end(),
                            [](std::byte b) { return b == std::byte{0xa5}; }));
    reader_.Release();
    ASSERT_EQ(Hear(), Pattern(i % 100, 7)) << i;
    EXPECT_TRUE(reader_.references().empty());
  }
  EXPECT_GT(writer_.produced(), 10 * kCapacity);
}

TEST_F(ReferringRingTest, AFullRingTakesNoMoreOfThem) {
  const Bytes inline_bytes = Pattern(kMaxRecordHead, 1);
  const std::vector<Reference> references(kMostReferences, {.at = 1, .length = 1});
  size_t said = 0;
  while (Refer(inline_bytes, references) == Room::kEnough) ASSERT_LT(++said, 10u);
  EXPECT_EQ(said, kCapacity / (2 * kWord + kMaxRecordHead + kMostReferences * sizeof(Reference)));
  EXPECT_EQ(writer_.Consumed(), 0u);
  RecordHead record;
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  reader_.Release();
  EXPECT_EQ(writer_.Consumed(), readers_.consumed);
  EXPECT_EQ(Refer(inline_bytes, references), Room::kEnough);
}

TEST_F(ReferringRingTest, WhatIsWrittenAfterwardsChangesNothingOfThem) {
  ASSERT_EQ(Refer(Pattern(kMaxRecordHead, 1), {{Reference{.at = 5, .length = 6, .guard_at = 7, .guard = 8}}}),
            Room::kEnough);
  RecordHead record;
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  const uint64_t end = writer_.produced();
  for (uint64_t at = 0; at < end; at += kWord) Write(at, ~uint64_t{0});
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  EXPECT_EQ(record.length, kMaxRecordHead + 6);
  EXPECT_EQ(reader_.references()[0].at, 5u);
  EXPECT_EQ(reader_.references()[0].guard, 8u);
  reader_.Release();
  EXPECT_EQ(readers_.consumed, end);
}

TEST_F(RingTest, WhoReadsNoMemoryIsReferredToNone) {
  writer_.BeginReferring(kMaxRecordHead, {{Reference{.at = 1, .length = 1}}});
  ASSERT_TRUE(writer_.Append(Pattern(kMaxRecordHead, 1)));
  writer_.Publish();
  EXPECT_EQ(FaultOfNext(), RingFault::kKind);
}

TEST_F(ReferringRingTest, AReferenceToNothing) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 1, {.at = 1, .length = 0});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, MoreThanTheRecordHas) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 2, {.at = 1, .length = 5});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, LessThanTheRecordHas) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 1, {.at = 1, .length = 7});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, LengthsThatWrap) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 2, {.at = 1, .length = (uint64_t{1} << 63) + 4});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, AnAddressThatWraps) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 1, {.at = UINT64_MAX - 6, .length = 8});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, NoReferences) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 0, {});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, MoreReferencesThanThereMayBe) {
  WriteReferring(kMaxRecordHead + kMostReferences + 1, kMaxRecordHead, kMostReferences + 1, {.at = 1, .length = 1});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, TooLittleInTheRing) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead - 1, 1, {.at = 1, .length = 9});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, TooMuchInTheRing) {
  WriteReferring(kMaxTxHeader + 9, kMaxTxHeader + 1, 1, {.at = 1, .length = 8});
  EXPECT_EQ(FaultOfNext(), RingFault::kReference);
}

TEST_F(ReferringRingTest, ReferencesBeyondWhatWasProduced) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 1, {.at = 1, .length = 8});
  writers_.produced = 2 * kWord + sizeof(Reference) + kMaxRecordHead - kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

TEST_F(ReferringRingTest, NotEvenTheSecondWordWasProduced) {
  WriteReferring(kMaxRecordHead + 8, kMaxRecordHead, 1, {.at = 1, .length = 8});
  writers_.produced = kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

TEST_F(ReferringRingTest, ARecordLongerThanRecordsAreRefersToNothing) {
  WriteReferring(LargestRecord(kCapacity) + 1, kMaxRecordHead, 1,
                 {.at = 1, .length = LargestRecord(kCapacity) + 1 - kMaxRecordHead});
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

// --- A hostile writer ---

TEST_F(RingTest, AWriterThatHasProducedMoreThanTheRingHolds) {
  writers_.produced = kCapacity + kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kIndex);
}

TEST_F(RingTest, AWriterThatTakesBackWhatItHasProduced) {
  ASSERT_EQ(Say(Pattern(24, 1)), Room::kEnough);
  ASSERT_TRUE(Hear());
  writers_.produced = kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kIndex);
}

TEST_F(RingTest, AWriterThatProducesHalfAWord) {
  writers_.produced = kWord + 4;
  EXPECT_EQ(FaultOfNext(), RingFault::kIndex);
}

TEST_F(RingTest, ARecordLongerThanRecordsAre) {
  Write(0, WordOf(LargestRecord(kCapacity) + 1));
  writers_.produced = kCapacity;
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

TEST_F(RingTest, ARecordLongerThanWhatWasProduced) {
  Write(0, WordOf(17));
  writers_.produced = kWord + 16;
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

TEST_F(RingTest, ALengthThatWraps) {
  Write(0, WordOf(UINT32_MAX));
  writers_.produced = kCapacity;
  EXPECT_EQ(FaultOfNext(), RingFault::kLength);
}

TEST_F(RingTest, ARecordOfNoKindThatWeKnow) {
  Write(0, WordOf(8, 3));
  writers_.produced = 2 * kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kKind);
}

TEST_F(RingTest, MemoryThatNobodyHasWrittenHoldsNoRecord) {
  writers_.produced = 2 * kWord;
  EXPECT_EQ(FaultOfNext(), RingFault::kKind);
}

TEST_F(RingTest, WhatIsWrittenAfterTheHeadWasJudgedChangesNothingOfIt) {
  ASSERT_EQ(Say(Pattern(kMaxRecordHead + 8, 1)), Room::kEnough);
  RecordHead record;
  ASSERT_EQ(reader_.Next(&record), Step::kReady);
  // Length, kind and head become others.
  for (uint64_t at = 0; at < kWord + kMaxRecordHead; at += kWord) Write(at, ~uint64_t{0});
  EXPECT_EQ(Hear(14), Pattern(kMaxRecordHead + 8, 1));
  EXPECT_EQ(readers_.consumed, kWord + kMaxRecordHead + 8);
}

// --- A hostile reader ---

TEST_F(RingTest, AReaderThatHasConsumedWhatIsNotThereYet) {
  while (Say(Pattern(200, 1)) == Room::kEnough) continue;
  readers_.consumed = writer_.produced() + kWord;
  EXPECT_EQ(Say(Pattern(200, 1)), Room::kFault);
  EXPECT_EQ(writer_.fault(), RingFault::kIndex);
  readers_.consumed = writer_.produced();
  EXPECT_EQ(Say(Pattern(200, 1)), Room::kFault) << "for good";
}

TEST_F(RingTest, AReaderThatTakesBackWhatItHasConsumed) {
  while (Say(Pattern(200, 1)) == Room::kEnough) continue;
  ASSERT_EQ(reader_.Discard(), Step::kReady);
  while (Say(Pattern(200, 1)) == Room::kEnough) continue;
  readers_.consumed = 0;
  EXPECT_EQ(Say(Pattern(200, 1)), Room::kFault);
  EXPECT_EQ(writer_.fault(), RingFault::kIndex);
}

TEST_F(RingTest, AReaderThatConsumesHalfAWord) {
  while (Say(Pattern(200, 1)) == Room::kEnough) continue;
  readers_.consumed = kWord + 4;
  EXPECT_EQ(Say(Pattern(200, 1)), Room::kFault);
}

// --- Two at once ---

// Both ends over halves, as two processes have them.
class HalvesTest : public testing::Test {
 protected:
  HalvesTest() {
    for (int i = 0; i < 2; ++i) {
      auto own = OwnHalf::Create(kCapacity);
      own_.push_back(std::move(own.value()));
      peer_.push_back(std::move(PeerHalf::Map(own_.back().fd()).value()));
    }
  }

  std::vector<OwnHalf> own_;
  std::vector<PeerHalf> peer_;
};

TEST_F(HalvesTest, TwoThreadsPassRecordsInOrder) {
  constexpr int kRecords = 20000;
  std::thread writing([&] {
    RingWriter writer(own_[0].words(), own_[0].ring(), peer_[1].words());
    Prng prng(1);
    for (int i = 0; i < kRecords;) {
      const Bytes record = Pattern(static_cast<size_t>(i) % 500, static_cast<uint8_t>(i));
      if (writer.Begin(record.size()) != Room::kEnough) {
        std::this_thread::yield();
        continue;
      }
      const size_t cut = prng.Below(record.size() + 1);
      ASSERT_TRUE(writer.Append(ConstBytes(record).first(cut)) && writer.Append(ConstBytes(record).subspan(cut)));
      writer.Publish();
      ++i;
    }
  });
  RingReader reader(own_[1].words(), peer_[0].words(), peer_[0].ring());
  for (int i = 0; i < kRecords;) {
    RecordHead record;
    const Step step = reader.Next(&record);
    ASSERT_NE(step, Step::kFault) << ToString(reader.fault());
    if (step == Step::kEmpty) {
      std::this_thread::yield();
      continue;
    }
    const Bytes expected = Pattern(static_cast<size_t>(i) % 500, static_cast<uint8_t>(i));
    Bytes got(record.length);
    const MutableBytes into(got);
    ASSERT_TRUE(reader.Place(0, {&into, 1}));
    reader.Release();
    ASSERT_EQ(got, expected) << i;
    ++i;
  }
  writing.join();
}

// The other end changes its words and its ring all the time, mostly to what could be, while we read and write.
TEST_F(HalvesTest, ANeighbourThatRacesUsHarmsNothing) {
  std::atomic<bool> over{false};
  std::atomic<uint64_t> consumed{0};
  std::atomic<uint64_t> produced{0};
  std::thread racing([&] {
    Prng prng(2);
    HalfWords& words = own_[0].words();
    const MutableBytes ring = own_[0].ring();
    while (!over.load(std::memory_order_relaxed)) {
      const uint64_t at = prng.Below(kCapacity / kWord) * kWord;
      const uint64_t word =
          prng.OneIn(16) ? prng.Next() : WordOf(static_cast<uint32_t>(prng.Below(600)), prng.OneIn(2) ? 2 : 1);
      __atomic_store_n(reinterpret_cast<uint64_t*>(&ring[at]), word, __ATOMIC_RELAXED);
      words.produced = consumed + (prng.OneIn(64) ? prng.Next() : prng.Below(kCapacity / kWord + 1) * kWord);
      words.consumed = produced - (prng.OneIn(64) ? prng.Next() : prng.Below(kCapacity / kWord + 1) * kWord);
    }
  });
  constexpr std::byte kGuard{0xa5};
  constexpr size_t kRounds = 3000;
  size_t received = 0;
  size_t sent = 0;
  size_t rx_faults = 0;
  size_t tx_faults = 0;
  const auto has_raced = [&] { return received > 0 && sent > 0 && rx_faults > 0 && tx_faults > 0; };
  for (size_t round = 0; round < kRounds || (!has_raced() && round < 1000 * kRounds); ++round) {
    HalfWords& own = own_[1].words();
    own.produced = own.consumed = 0;
    consumed = produced = 0;
    RingReader reader(own, peer_[0].words(), peer_[0].ring());
    reader.TakeReferences();
    RingWriter writer(own, own_[1].ring(), peer_[0].words());
    for (int i = 0; i < 50; ++i) {
      RecordHead record;
      if (reader.Next(&record) == Step::kReady) {
        ASSERT_LE(record.length, LargestRecord(kCapacity));
        ASSERT_EQ(record.head.size(), std::min(record.length, kMaxRecordHead));
        Bytes into(record.length + 16, kGuard);
        const MutableBytes payload = MutableBytes(into).subspan(8, record.length);
        ASSERT_TRUE(reader.Place(0, {&payload, 1}));
        ASSERT_TRUE(std::equal(record.head.begin(), record.head.end(), payload.begin())) << "as it was judged";
        size_t size = reader.inline_size();
        for (const Reference& each : reader.references()) size += each.length;
        ASSERT_EQ(size, record.length);
        ASSERT_TRUE(std::all_of(into.begin(), into.begin() + 8, [&](std::byte b) { return b == kGuard; }));
        ASSERT_TRUE(std::all_of(into.end() - 8, into.end(), [&](std::byte b) { return b == kGuard; }));
        reader.Release();
        ++received;
        consumed = own.consumed.load();
      }
      const Bytes record_of_ours = Pattern(static_cast<size_t>(i) * 10, 1);
      if (writer.Begin(record_of_ours.size()) == Room::kEnough) {
        ASSERT_TRUE(writer.Append(record_of_ours));
        writer.Publish();
        ++sent;
        produced = writer.produced();
      }
    }
    rx_faults += reader.fault() != RingFault::kNone ? 1 : 0;
    tx_faults += writer.fault() != RingFault::kNone ? 1 : 0;
  }
  over = true;
  racing.join();
  EXPECT_TRUE(has_raced()) << received << " " << sent << " " << rx_faults << " " << tx_faults;
}

}  // namespace
}  // namespace stagecoach::emu
