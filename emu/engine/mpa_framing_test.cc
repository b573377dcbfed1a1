#include "emu/engine/mpa_framing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/prng.h"

namespace stagecoach::emu {
namespace {

using Bytes = std::vector<std::byte>;
using Step = MpaReceiver::Step;

Bytes Pattern(size_t size, uint8_t seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 7 + (i >> 8));
  return bytes;
}

void AppendFpdu(MpaFramer& framer, ConstBytes ulpdu, Bytes* stream) {
  Bytes out(framer.MaxFramedSize(ulpdu.size()));
  framer.Begin(out, ulpdu.size());
  framer.Append(ulpdu.first(ulpdu.size() / 3));
  framer.Append(ulpdu.subspan(ulpdu.size() / 3));
  const size_t size = framer.Finish();
  stream->insert(stream->end(), out.begin(), out.begin() + static_cast<ptrdiff_t>(size));
}

Bytes FrameAll(const std::vector<Bytes>& ulpdus, bool crc) {
  MpaFramer framer(crc, false);
  Bytes stream;
  for (const Bytes& ulpdu : ulpdus) AppendFpdu(framer, ulpdu, &stream);
  return stream;
}

// Drives one receiver: the head of each record is at most `head_limit` bytes, the rest goes to a destination in `parts`
// pieces.
class Reader {
 public:
  explicit Reader(bool crc, size_t head_limit = 14, size_t parts = 1)
      : receiver_(crc), head_limit_(head_limit), parts_(parts) {}

  // Takes whatever records the bytes so far complete. False when the stream is broken.
  bool Advance() {
    while (true) {
      if (!placing_) {
        const Step step = receiver_.NextRecord(&record_);
        if (step != Step::kReady) return step == Step::kNeedBytes;
        placing_ = true;
        head_size_ = std::min(record_.length, head_limit_);
        ulpdu_.assign(record_.length, std::byte{0});
        CopyBytes(ulpdu_, record_.head.first(head_size_));
        MakeParts();
      }
      if (receiver_.Place(head_size_, destination_) != Step::kReady) return true;
      placing_ = false;
      records.push_back(ulpdu_);
    }
  }

  // Hands over all of `bytes`, as much at a time as the receiver wants.
  bool Feed(ConstBytes bytes) {
    if (!Advance()) return false;
    while (!bytes.empty()) {
      size_t taken = 0;
      ++reads;
      for (const MutableBytes& part : receiver_.NextRx()) {
        const size_t n = CopyBytes(part, bytes);
        bytes = bytes.subspan(n);
        taken += n;
      }
      if (taken == 0) {
        ADD_FAILURE() << "the receiver wants bytes and has no room for any";
        return false;
      }
      receiver_.OnRx(taken);
      if (!Advance()) return false;
    }
    return true;
  }

  MpaReceiver& receiver() { return receiver_; }
  std::vector<Bytes> records;
  size_t reads = 0;

 private:
  void MakeParts() {
    destination_.clear();
    MutableBytes rest = MutableBytes(ulpdu_).subspan(head_size_);
    for (size_t i = 0; i < parts_; ++i) {
      const size_t n = i + 1 == parts_ ? rest.size() : std::min<size_t>(rest.size(), ulpdu_.size() / parts_);
      destination_.push_back(rest.first(n));
      rest = rest.subspan(n);
    }
  }

  MpaReceiver receiver_;
  const size_t head_limit_;
  const size_t parts_;
  bool placing_ = false;
  RecordHead record_;
  size_t head_size_ = 0;
  Bytes ulpdu_;
  std::vector<MutableBytes> destination_;
};

TEST(MulpduTest, FollowsTheSegmentSize) {
  EXPECT_EQ(Mulpdu(1448, false), 1442u);  // what Linux siw uses at MTU 1500 with timestamps
  EXPECT_EQ(Mulpdu(1460, false), 1454u);
  EXPECT_EQ(Mulpdu(65483, false), 65474u);
  EXPECT_EQ(Mulpdu(1460, true), 1460u - 6 - 4 * 3);
  EXPECT_EQ(Mulpdu(1448, true), 1448u - 6 - 4 * 3);
  EXPECT_EQ(Mulpdu(512, true), 512u - 6 - 4);
  EXPECT_EQ(Mulpdu(513, true), 512u - 6 - 8);
}

TEST(MulpduTest, StaysWithinWhatAHeaderNeedsAndALengthFieldCanSay) {
  EXPECT_EQ(Mulpdu(0, false), kMinMulpdu);
  EXPECT_EQ(Mulpdu(64, true), kMinMulpdu);
  EXPECT_EQ(Mulpdu(1 << 20, false), wire::kMpaUlpduMax);
  // With markers the whole FPDU must be within reach of a 16-bit FPDUPTR.
  const size_t most = Mulpdu(SIZE_MAX, true);
  EXPECT_LE(MpaFramer(true, true).MaxFramedSize(most), 65536u + 4u);
  EXPECT_EQ(most, 65532u - 6 - 4 * 128);
}

TEST(MpaFramerTest, BuildsTheFpduThatLinuxSends) {
  // The RTR Write of an rping with CRC between two siw devices.
  const std::array<uint8_t, 14> ulpdu = {0xc1, 0x40, 0, 0, 0, 1};
  Bytes stream;
  MpaFramer framer(true, false);
  AppendFpdu(framer, AsBytes(ulpdu.data(), ulpdu.size()), &stream);
  EXPECT_EQ(ToHex(stream), "000ec140000000010000000000000000ebd34c5f");
}

TEST(MpaFramerTest, WithoutCrcTheFieldIsZero) {
  const std::array<uint8_t, 5> ulpdu = {1, 2, 3, 4, 5};
  Bytes stream;
  MpaFramer framer(false, false);
  AppendFpdu(framer, AsBytes(ulpdu.data(), ulpdu.size()), &stream);
  EXPECT_EQ(ToHex(stream),
            "0005010203040500"
            "00000000");
}

TEST(MpaFramerTest, FirstMarkerStandsInFrontOfTheFirstFpduAndPointsAtZero) {
  const std::array<uint8_t, 14> ulpdu = {0xc1, 0x40, 0, 0, 0, 1};
  Bytes stream;
  MpaFramer framer(false, true);
  AppendFpdu(framer, AsBytes(ulpdu.data(), ulpdu.size()), &stream);
  EXPECT_EQ(ToHex(stream),
            "00000000"
            "000ec140000000010000000000000000"
            "00000000");
}

// Takes the markers out again, knowing only that one stands at every multiple of 512, and checks each against the
// FPDUs.
void CheckMarkedStream(const std::vector<Bytes>& ulpdus, ConstBytes stream, bool crc) {
  Bytes plain;
  std::vector<uint64_t> position_of;  // stream position of each plain byte
  std::vector<std::pair<uint64_t, uint16_t>> markers;
  for (size_t at = 0; at < stream.size();) {
    if (at % 512 == 0) {
      ASSERT_LE(at + 4, stream.size());
      const auto marker = wire::MpaMarker::Decode(stream.subspan(at).first<4>());
      EXPECT_EQ(marker.reserved, 0);
      markers.emplace_back(at, marker.fpdu_pointer);
      at += 4;
      continue;
    }
    plain.push_back(stream[at]);
    position_of.push_back(at);
    ++at;
  }
  size_t at = 0;
  size_t next_marker = 0;
  for (const Bytes& ulpdu : ulpdus) {
    const size_t size = wire::FpduSize(ulpdu.size());
    ASSERT_LE(at + size, plain.size());
    EXPECT_EQ(ByteReader(ConstBytes(plain).subspan(at)).U16(), ulpdu.size());
    EXPECT_TRUE(std::equal(ulpdu.begin(), ulpdu.end(), plain.begin() + static_cast<ptrdiff_t>(at) + 2));
    const uint64_t start = position_of[at];
    const uint64_t end = position_of[at + size - 1] + 1;
    // A marker directly in front belongs to this FPDU.
    uint64_t covered_from = start;
    for (; next_marker < markers.size() && markers[next_marker].first < end; ++next_marker) {
      const auto [where, pointer] = markers[next_marker];
      if (where < start) {
        EXPECT_EQ(where + 4, start);
        EXPECT_EQ(pointer, 0u);
        covered_from = where;
      } else {
        EXPECT_EQ(pointer, where - start);
      }
    }
    const uint64_t crc_at = end - 4;
    if (crc) {
      EXPECT_EQ(wire::DecodeFpduCrc(stream.subspan(crc_at).first<4>()),
                ComputeCrc32c(stream.subspan(covered_from, crc_at - covered_from)));
    }
    at += size;
  }
  EXPECT_EQ(at, plain.size());
  EXPECT_EQ(next_marker, markers.size());
}

TEST(MpaFramerTest, MarkersStandEvery512BytesAndPointBackToTheirFpdu) {
  // Every length around the interval, so that markers fall on each place of an FPDU: before it, in the header, before
  // the CRC.
  for (const bool crc : {false, true}) {
    MpaFramer framer(crc, true);
    std::vector<Bytes> ulpdus;
    Bytes stream;
    // 502 bytes make an FPDU that ends where the second marker stands, in front of its successor.
    ulpdus.push_back(Pattern(502, 1));
    AppendFpdu(framer, ulpdus.back(), &stream);
    ASSERT_EQ(stream.size(), 512u);
    for (size_t size = 0; size < 1100; size += 3) {
      ulpdus.push_back(Pattern(size, static_cast<uint8_t>(size)));
      AppendFpdu(framer, ulpdus.back(), &stream);
    }
    ulpdus.push_back(Pattern(Mulpdu(SIZE_MAX, true), 9));
    AppendFpdu(framer, ulpdus.back(), &stream);
    CheckMarkedStream(ulpdus, stream, crc);
  }
}

class MpaReceiverTest : public ::testing::TestWithParam<bool> {
 protected:
  bool crc() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Crc, MpaReceiverTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "WithCrc" : "WithoutCrc"; });

TEST_P(MpaReceiverTest, EverySplitOfAShortStreamYieldsTheSameRecords) {
  // 8 + 8 bytes: 2^15 ways to cut it. The stream ends between records, so one receiver can take them all.
  const std::vector<Bytes> ulpdus = {{}, Pattern(2, 1)};
  const Bytes stream = FrameAll(ulpdus, crc());
  ASSERT_EQ(stream.size(), 16u);
  Reader reader(crc(), 2);
  for (uint32_t cuts = 0; cuts < (1u << 15); ++cuts) {
    reader.records.clear();
    size_t from = 0;
    for (size_t at = 1; at <= stream.size(); ++at) {
      if (at < stream.size() && (cuts >> (at - 1) & 1) == 0) continue;
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(from, at - from)));
      from = at;
    }
    ASSERT_EQ(reader.records, ulpdus) << "cuts " << cuts;
    ASSERT_TRUE(reader.receiver().BetweenRecords());
  }
}

TEST_P(MpaReceiverTest, EveryPairOfCutsYieldsTheSameRecords) {
  const std::vector<Bytes> ulpdus = {Pattern(14, 1), Pattern(46, 2), Pattern(101, 3), Pattern(18, 4)};
  const Bytes stream = FrameAll(ulpdus, crc());
  Reader reader(crc(), 14, 3);
  for (size_t first = 0; first <= stream.size(); ++first) {
    for (size_t second = first; second <= stream.size(); ++second) {
      reader.records.clear();
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).first(first)));
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(first, second - first)));
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(second)));
      ASSERT_EQ(reader.records, ulpdus) << first << ", " << second;
    }
  }
}

TEST_P(MpaReceiverTest, RandomSplitsOfALongStreamYieldTheSameRecords) {
  Prng prng(7);
  for (int round = 0; round < 20; ++round) {
    std::vector<Bytes> ulpdus;
    for (int i = 0; i < 30; ++i) {
      const size_t most = prng.OneIn(4) ? wire::kMpaUlpduMax : prng.OneIn(2) ? 6000 : 100;
      ulpdus.push_back(Pattern(prng.Between(0, most), static_cast<uint8_t>(i)));
    }
    ulpdus.push_back(Pattern(wire::kMpaUlpduMax, 77));
    const Bytes stream = FrameAll(ulpdus, crc());
    Reader reader(crc(), 18, static_cast<size_t>(prng.Between(1, 40)));
    for (size_t at = 0; at < stream.size();) {
      const size_t n = std::min<size_t>(stream.size() - at, prng.Between(1, prng.OneIn(3) ? 100000 : 900));
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(at, n)));
      at += n;
    }
    ASSERT_EQ(reader.records.size(), ulpdus.size());
    ASSERT_TRUE(reader.records == ulpdus);
    EXPECT_TRUE(reader.receiver().BetweenRecords());
  }
}

TEST_P(MpaReceiverTest, BetweenRecordsOnlyWhenNothingIsHalfThere) {
  const Bytes stream = FrameAll({Pattern(20, 1)}, crc());
  Reader reader(crc());
  EXPECT_TRUE(reader.receiver().BetweenRecords());
  for (size_t i = 0; i < stream.size(); ++i) {
    ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(i, 1)));
    EXPECT_EQ(reader.receiver().BetweenRecords(), i + 1 == stream.size());
  }
}

TEST_P(MpaReceiverTest, DiscardedPayloadLeavesTheNextRecordInPlace) {
  const Bytes stream = FrameAll({Pattern(50000, 1), Pattern(60000, 2)}, crc());
  MpaReceiver receiver(crc());
  ConstBytes rest = stream;
  RecordHead record;
  std::vector<size_t> lengths;
  bool placing = false;
  while (lengths.size() < 2) {
    // No parts, or parts without bytes: both mean discard.
    const std::array<MutableBytes, 1> nothing{};
    const std::span<const MutableBytes> destination(nothing.data(), lengths.size());
    const Step step = placing ? receiver.Place(14, destination) : receiver.NextRecord(&record);
    ASSERT_NE(step, Step::kBadCrc);
    if (step == Step::kReady) {
      if (placing) lengths.push_back(record.length);
      placing = !placing;
      continue;
    }
    ASSERT_FALSE(rest.empty());
    ASSERT_FALSE(receiver.NextRx().empty());
    const size_t n = CopyBytes(receiver.NextRx()[0], rest);
    receiver.OnRx(n);
    rest = rest.subspan(n);
  }
  EXPECT_THAT(lengths, ::testing::ElementsAre(50000u, 60000u));
}

TEST_P(MpaReceiverTest, CountsEveryPayloadByteThatPassesThroughItsBuffer) {
  Reader reader(crc());
  ASSERT_TRUE(reader.Feed(FrameAll({Pattern(1014, 1), Pattern(114, 2)}, crc())));
  EXPECT_EQ(reader.receiver().records(), 2u);
  EXPECT_EQ(reader.receiver().payload_bytes(), 1100u);
  EXPECT_EQ(reader.receiver().copied_bytes(), 1100u);
}

TEST_P(MpaReceiverTest, PrimedBytesComeFirst) {
  const std::vector<Bytes> ulpdus = {Pattern(40, 1), Pattern(70, 2)};
  const Bytes stream = FrameAll(ulpdus, crc());
  for (size_t primed = 0; primed <= stream.size(); ++primed) {
    Reader reader(crc());
    reader.receiver().Prime(ConstBytes(stream).first(primed));
    ASSERT_TRUE(reader.Feed(ConstBytes(stream).subspan(primed)));
    ASSERT_EQ(reader.records, ulpdus);
  }
}

TEST(MpaReceiverCopyTest, LargeRecordsGoStraightToTheirDestination) {
  constexpr size_t kRecords = 17;
  std::vector<Bytes> ulpdus(kRecords, Pattern(61704, 3));  // 1 MiB together
  const Bytes stream = FrameAll(ulpdus, false);
  Reader reader(false);
  ASSERT_TRUE(reader.Feed(stream));
  ASSERT_TRUE(reader.records == ulpdus);
  const uint64_t payload = kRecords * (61704 - 14);
  EXPECT_EQ(reader.receiver().payload_bytes(), payload);
  // Of the first record a whole look-ahead may be copied, because nothing was known; of the others what shares the
  // head's bytes.
  EXPECT_LE(reader.receiver().copied_bytes(), MpaReceiver::kLookAheadSize + (kRecords - 1) * kMaxRecordHead);
  // One read per record.
  EXPECT_LE(reader.reads, kRecords + 1);
}

TEST(MpaReceiverCopyTest, ManySmallRecordsComeInOneRead) {
  std::vector<Bytes> ulpdus;
  for (size_t i = 0; i < 1000; ++i) ulpdus.push_back(Pattern(60 + i % 67, 3));
  const Bytes stream = FrameAll(ulpdus, false);
  Reader reader(false);
  ASSERT_TRUE(reader.Feed(stream));
  ASSERT_EQ(reader.records, ulpdus);
  EXPECT_LE(reader.reads, stream.size() / MpaReceiver::kLookAheadSize + 2);
  EXPECT_GT(reader.receiver().copied_bytes(), reader.receiver().payload_bytes() * 8 / 10);
}

TEST(MpaReceiverCopyTest, AnInlineMessageOf4KiBTakesOneReadWhenItArrivesAlone) {
  Reader reader(false, 18);
  const Bytes stream = FrameAll({Pattern(4096 + 18, 3)}, false);
  for (size_t i = 1; i <= 5; ++i) {
    ASSERT_TRUE(reader.Feed(stream));
    EXPECT_EQ(reader.reads, i);
  }
}

TEST(MpaReceiverCrcTest, EveryFlippedBitIsCaughtBeforeAnythingIsReleased) {
  const Bytes good = FrameAll({Pattern(21, 5)}, true);
  // A flipped length bit makes the FPDU longer: whatever follows must not save it.
  const Bytes tail = Pattern(70000, 9);
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    bad.insert(bad.end(), tail.begin(), tail.end());
    Reader reader(true);
    EXPECT_FALSE(reader.Feed(bad)) << "bit " << bit;
    EXPECT_TRUE(reader.records.empty()) << "bit " << bit;
    EXPECT_EQ(reader.receiver().copied_bytes(), 0u) << "bit " << bit;
    RecordHead record;
    EXPECT_EQ(reader.receiver().NextRecord(&record), Step::kBadCrc);
  }
}

TEST(MpaReceiverCrcTest, WithoutCrcTheFieldIsNotLookedAt) {
  Bytes stream = FrameAll({Pattern(21, 5)}, false);
  stream.back() ^= std::byte{0xff};
  Reader reader(false);
  EXPECT_TRUE(reader.Feed(stream));
  EXPECT_EQ(reader.records.size(), 1u);
}

TEST(MpaReceiver, KnowsWhichFieldTheBytesEndInside) {
  using Inside = MpaReceiver::Inside;
  const Bytes ulpdu = Pattern(101, 5);  // length 2, head 48 of 101, pad 1, CRC 4: 108 bytes
  for (const bool crc : {false, true}) {
    const Bytes stream = FrameAll({ulpdu}, crc);
    ASSERT_EQ(stream.size(), 108u);
    for (size_t at = 0; at <= stream.size(); ++at) {
      Inside expected = Inside::kTrailer;
      if (at == 0 || at == 2 || at == 103 || at == 108) {
        expected = Inside::kBetweenFields;
      } else if (at < 2) {
        expected = Inside::kLengthField;
      } else if (at < 50) {
        expected = Inside::kRecordHead;
      } else if (at < 103) {
        expected = Inside::kPayload;
      }
      Reader reader(crc);
      ASSERT_TRUE(reader.Feed(ConstBytes(stream).first(at)));
      EXPECT_EQ(reader.receiver().EndsInside(), expected) << at << " crc " << crc;
    }
  }
}

}  // namespace
}  // namespace stagecoach::emu
