// Both ends of a ring of ours while the other end, which the input plays, says and writes what it likes. Nothing
// outside of the rings is touched, no record is larger than records are, and what we say ourselves only grows, by whole
// words.
//
// Input: operations of one byte each, with what they need behind them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "emu/engine/record.h"
#include "emu/llp/shm/half.h"
#include "emu/llp/shm/reference.h"
#include "emu/llp/shm/ring.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using namespace emu;

constexpr size_t kCapacity = OwnHalf::kLeastCapacity;
constexpr uint64_t kWord = sizeof(uint64_t);

uint64_t Word(testing::FuzzInput& input) {
  uint64_t word = 0;
  const ConstBytes bytes = input.Bytes(sizeof word);
  std::memcpy(&word, bytes.data(), bytes.size());
  return word;
}

class Game {
 public:
  Game() { reader_.TakeReferences(); }

  void Play(testing::FuzzInput& input) {
    while (!input.empty()) {
      const uint64_t consumed = own_.consumed;
      const uint64_t produced = own_.produced;
      switch (input.Byte() % 11) {
        case 0:
          peer_.produced = consumed + kWord * input.Byte();
          break;
        case 1:
          peer_.consumed = produced - kWord * input.Byte();
          break;
        case 2:
          peer_.produced = Word(input);
          break;
        case 3:
          peer_.consumed = Word(input);
          break;
        case 4: {  // what may be a record, at `consumed`
          const uint64_t word = uint64_t{1} << 32 | (uint64_t{input.Byte()} << 2);
          Write(consumed, AsBytes(&word, sizeof word));
          break;
        }
        case 5: {  // anything, not far from there
          const uint64_t at = consumed + input.Byte();
          Write(at, input.Bytes(input.Byte()));
          break;
        }
        case 6:
          Receive(input.Byte());
          break;
        case 7:
          FUZZ_PROPERTY(reader_.Discard() != RingReader::Step::kFault || reader_.fault() != RingFault::kNone);
          break;
        case 8:
          Send(size_t{input.Byte()} * 2);
          break;
        case 9: {  // what may be a record that refers to memory, at `consumed`
          const uint64_t count = input.Byte();
          const uint64_t inline_size = input.Byte();
          const uint64_t length = input.Byte();
          std::vector<uint64_t> words = {uint64_t{2} << 32 | (inline_size + count * length), inline_size << 32 | count};
          for (uint64_t i = 0; i < std::min<uint64_t>(count, kMostReferences); ++i) {
            words.insert(words.end(), {Word(input), length, Word(input), i});
          }
          Write(consumed, AsBytes(words.data(), words.size() * kWord));
          break;
        }
        case 10:
          Refer(input.Byte(), input.Byte());
          break;
      }
      FUZZ_PROPERTY(own_.consumed - consumed <= kCapacity * 2 && own_.consumed % kWord == 0);
      FUZZ_PROPERTY(own_.produced - produced <= kCapacity && own_.produced % kWord == 0);
    }
  }

 private:
  static std::vector<uint64_t> NewRing() { return std::vector<uint64_t>(kCapacity / kWord); }
  static MutableBytes BytesOf(std::vector<uint64_t>& ring) { return AsMutableBytes(ring.data(), kCapacity); }

  void Write(uint64_t position, ConstBytes bytes) {
    for (const std::byte& byte : bytes) BytesOf(peer_ring_)[position++ % kCapacity] = byte;
  }
  void Receive(size_t head_size) {
    RecordHead record;
    if (reader_.Next(&record) != RingReader::Step::kReady) return;
    FUZZ_PROPERTY(record.length <= LargestRecord(kCapacity));
    FUZZ_PROPERTY(record.head.size() == std::min(record.length, kMaxRecordHead));
    FUZZ_PROPERTY(reader_.inline_size() >= record.head.size() && reader_.inline_size() <= record.length);
    FUZZ_PROPERTY(reader_.references().size() <= kMostReferences);
    const std::vector<Reference> references(reader_.references().begin(), reader_.references().end());
    size_t rest = record.length - reader_.inline_size();
    for (const Reference& each : references) {
      FUZZ_PROPERTY(each.length > 0 && each.length <= rest && each.at + each.length > each.at);
      rest -= each.length;
    }
    FUZZ_PROPERTY(rest == 0);
    const std::vector<std::byte> judged(record.head.begin(), record.head.end());
    // The other end writes meanwhile.
    std::reverse(peer_ring_.begin(), peer_ring_.end());
    head_size = std::min(head_size, judged.size());
    std::vector<std::byte> payload(record.length - head_size);
    const MutableBytes into(payload);
    FUZZ_PROPERTY(reader_.Place(head_size, {&into, 1}));
    FUZZ_PROPERTY(std::equal(judged.begin() + static_cast<ptrdiff_t>(head_size), judged.end(), payload.begin()));
    FUZZ_PROPERTY(std::equal(
        references.begin(), references.end(), reader_.references().begin(), [](const Reference& a, const Reference& b) {
          return a.at == b.at && a.length == b.length && a.guard_at == b.guard_at && a.guard == b.guard;
        }));
    FUZZ_PROPERTY(reader_.Next(&record) == RingReader::Step::kReady && std::ranges::equal(record.head, judged));
    reader_.Release();
  }
  void Send(size_t size) {
    if (writer_.Begin(size) != RingWriter::Room::kEnough) return;
    const std::vector<std::byte> record(size, std::byte{7});
    FUZZ_PROPERTY(writer_.Append(record));
    writer_.Publish();
  }

  void Refer(size_t count, size_t inline_size) {
    count = 1 + count % kMostReferences;
    inline_size = kMaxRecordHead + inline_size % (kMaxTxHeader - kMaxRecordHead + 1);
    const std::vector<Reference> references(count, {.at = 8, .length = 1});
    if (writer_.BeginReferring(inline_size, references) != RingWriter::Room::kEnough) return;
    const std::vector<std::byte> first(inline_size, std::byte{7});
    FUZZ_PROPERTY(writer_.Append(first));
    writer_.Publish();
  }

  HalfWords own_;
  HalfWords peer_;
  std::vector<uint64_t> own_ring_ = NewRing();
  std::vector<uint64_t> peer_ring_ = NewRing();
  RingReader reader_{own_, peer_, BytesOf(peer_ring_)};
  RingWriter writer_{own_, BytesOf(own_ring_), peer_};
};

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::testing::FuzzInput input(data, size);
  stagecoach::Game().Play(input);
  return 0;
}
