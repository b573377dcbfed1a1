#include "emu/llp/shm/ring.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

constexpr uint64_t kWord = sizeof(uint64_t);
// The upper half of a record's word. Not 0, which is what memory holds that nobody has written.
constexpr uint32_t kInline = 1;
constexpr uint32_t kReferring = 2;

static_assert(kMaxRecordHead % kWord == 0);
static_assert(LargestRecord(OwnHalf::kMostCapacity) <= UINT32_MAX);

// With its word.
constexpr uint64_t FramedSize(size_t size) {
  return kWord + (size + kWord - 1) / kWord * kWord;
}

// With both words and the references.
constexpr uint64_t FramedSize(size_t inline_size, size_t references) {
  return FramedSize(kWord + references * sizeof(Reference) + inline_size);
}

constexpr size_t kReferenceWords = sizeof(Reference) / kWord;
static_assert(sizeof(Reference) % kWord == 0 && FramedSize(kMaxTxHeader, kMostReferences) <= OwnHalf::kLeastCapacity);
static_assert(kMaxRecordHead <= kMaxTxHeader);

// `size` bytes of the ring from `position` on, in the order of the ring: the second part is empty unless they go across
// its end.
template <typename Bytes>
std::array<Bytes, 2> PartsOf(Bytes ring, uint64_t position, size_t size) {
  const size_t at = position & (ring.size() - 1);
  const size_t first = std::min(size, ring.size() - at);
  return {ring.subspan(at, first), ring.first(size - first)};
}

void CheckRing(ConstBytes ring) {
  STAGECOACH_CHECK(std::has_single_bit(ring.size()) && reinterpret_cast<uintptr_t>(ring.data()) % kWord == 0);
}

}  // namespace

const char* ToString(RingFault fault) {
  switch (fault) {
    case RingFault::kNone:
      return "none";
    case RingFault::kIndex:
      return "an index that cannot be";
    case RingFault::kLength:
      return "a record too long";
    case RingFault::kKind:
      return "a record of no known kind";
    case RingFault::kReference:
      return "references that cannot be";
  }
  return "?";
}

// --- Writing ---

RingWriter::RingWriter(HalfWords& own, MutableBytes ring, const HalfWords& peer) : own_(own), ring_(ring), peer_(peer) {
  CheckRing(ring);
}

RingWriter::Room RingWriter::Begin(size_t size) {
  STAGECOACH_CHECK(size <= LargestRecord(ring_.size()));
  const Room room = Make(FramedSize(size));
  if (room != Room::kEnough) return room;
  Put(uint64_t{kInline} << 32 | size);
  end_ = next_ + size;
  return Room::kEnough;
}

RingWriter::Room RingWriter::BeginReferring(size_t inline_size, std::span<const Reference> references) {
  size_t size = inline_size;
  for (const Reference& each : references) size += each.length;
  STAGECOACH_CHECK(size <= LargestRecord(ring_.size()) && inline_size >= kMaxRecordHead && inline_size <= kMaxTxHeader);
  const Room room = Make(FramedSize(inline_size, references.size()));
  if (room != Room::kEnough) return room;
  Put(uint64_t{kReferring} << 32 | size);
  Put(uint64_t{inline_size} << 32 | references.size());
  for (const Reference& each : references) {
    for (const uint64_t word : {each.at, each.length, each.guard_at, each.guard}) Put(word);
  }
  end_ = next_ + inline_size;
  return Room::kEnough;
}

RingWriter::Room RingWriter::Make(uint64_t framed) {
  next_ = end_ = produced_;
  if (fault_ != RingFault::kNone) return Room::kFault;
  if (ring_.size() - (produced_ - freed_) < framed) {
    if (!Consumed()) return Room::kFault;
    if (ring_.size() - (produced_ - freed_) < framed) return Room::kTooLittle;
  }
  return Room::kEnough;
}

std::optional<uint64_t> RingWriter::Consumed() {
  if (fault_ != RingFault::kNone) return std::nullopt;
  // Acquire: the bytes that are written next go where the other end has read.
  const uint64_t consumed = peer_.consumed.load(std::memory_order_acquire);
  if (produced_ - consumed > produced_ - freed_ || consumed % kWord != 0) {
    fault_ = RingFault::kIndex;
    return std::nullopt;
  }
  freed_ = consumed;
  return consumed;
}

void RingWriter::Put(uint64_t word) {
  std::memcpy(&ring_[next_ & (ring_.size() - 1)], &word, sizeof word);
  next_ += kWord;
}

bool RingWriter::Append(ConstBytes bytes) {
  STAGECOACH_CHECK(bytes.size() <= end_ - next_);
  for (const MutableBytes& part : PartsOf(ring_, next_, bytes.size())) {
    if (!SafeCopy(part, bytes.first(part.size()))) return false;
    bytes = bytes.subspan(part.size());
    next_ += part.size();
  }
  return true;
}

void RingWriter::Publish() {
  STAGECOACH_CHECK(next_ == end_ && next_ > produced_);
  produced_ += FramedSize(end_ - produced_ - kWord);
  own_.produced.store(produced_, std::memory_order_release);
}

// --- Reading ---

RingReader::RingReader(HalfWords& own, const HalfWords& peer, ConstBytes ring) : own_(own), peer_(peer), ring_(ring) {
  CheckRing(ring);
}

RingReader::Step RingReader::Fail(RingFault fault) {
  fault_ = fault;
  return Step::kFault;
}

uint64_t RingReader::WordAt(uint64_t position) const {
  // One load, whatever the other end does to it meanwhile.
  const auto* const at = reinterpret_cast<const uint64_t*>(&ring_[position & (ring_.size() - 1)]);
  return __atomic_load_n(at, __ATOMIC_RELAXED);
}

RingReader::Step RingReader::Look() {
  if (fault_ != RingFault::kNone) return Step::kFault;
  if (consumed_ != seen_) return Step::kReady;
  const uint64_t produced = peer_.produced.load(std::memory_order_acquire);
  if (produced == consumed_) return Step::kEmpty;
  if (produced - consumed_ > ring_.size() || produced % kWord != 0) return Fail(RingFault::kIndex);
  seen_ = produced;
  return Step::kReady;
}

RingReader::Step RingReader::Next(RecordHead* record) {
  if (!has_record_) {
    if (const Step step = Look(); step != Step::kReady) return step;
    if (const RingFault fault = ReadRecord(); fault != RingFault::kNone) return Fail(fault);
    for (uint64_t at = 0; at < std::min<uint64_t>(length_, head_.size()); at += kWord) {
      const uint64_t bytes = WordAt(inline_at_ + at);
      std::memcpy(&head_[at], &bytes, sizeof bytes);
    }
    has_record_ = true;
  }
  *record = {ConstBytes(head_).first(std::min(length_, head_.size())), length_};
  return Step::kReady;
}

RingFault RingReader::ReadRecord() {
  const uint64_t word = WordAt(consumed_);
  length_ = static_cast<uint32_t>(word);
  const uint64_t kind = word >> 32;
  if (kind != kInline && (kind != kReferring || !takes_references_)) return RingFault::kKind;
  if (length_ > LargestRecord(ring_.size())) return RingFault::kLength;
  if (kind == kReferring) return ReadReferences();
  if (FramedSize(length_) > seen_ - consumed_) return RingFault::kLength;
  inline_size_ = length_;
  inline_at_ = consumed_ + kWord;
  end_ = consumed_ + FramedSize(length_);
  reference_count_ = 0;
  return RingFault::kNone;
}

RingFault RingReader::ReadReferences() {
  if (seen_ - consumed_ < 2 * kWord) return RingFault::kLength;
  const uint64_t word = WordAt(consumed_ + kWord);
  const auto count = static_cast<uint32_t>(word);
  inline_size_ = word >> 32;
  if (count == 0 || count > kMostReferences || inline_size_ < kMaxRecordHead || inline_size_ > kMaxTxHeader ||
      inline_size_ >= length_) {
    return RingFault::kReference;
  }
  if (FramedSize(inline_size_, count) > seen_ - consumed_) return RingFault::kLength;
  uint64_t at = consumed_ + 2 * kWord;
  uint64_t rest = length_ - inline_size_;
  for (Reference& each : std::span(references_).first(count)) {
    std::array<uint64_t, kReferenceWords> words;
    for (uint64_t& each_word : words) {
      each_word = WordAt(at);
      at += kWord;
    }
    each = {.at = words[0], .length = words[1], .guard_at = words[2], .guard = words[3]};
    if (each.length == 0 || each.length > rest || each.length > ~each.at) return RingFault::kReference;
    rest -= each.length;
  }
  if (rest != 0) return RingFault::kReference;
  reference_count_ = count;
  inline_at_ = at;
  end_ = consumed_ + FramedSize(inline_size_, count);
  return RingFault::kNone;
}

bool RingReader::Place(size_t head_size, std::span<const MutableBytes> destination) const {
  STAGECOACH_CHECK(has_record_ && head_size <= std::min(length_, head_.size()));
  const size_t copied = std::min(length_, head_.size());
  const auto [first, second] = PartsOf(ring_, inline_at_ + copied, inline_size_ - copied);
  size_t part = 0;
  MutableBytes into;
  for (ConstBytes from : {ConstBytes(head_).first(copied).subspan(head_size), first, second}) {
    while (!from.empty()) {
      if (into.empty()) {
        if (part == destination.size()) return true;
        into = destination[part++];
        continue;
      }
      const size_t size = std::min(into.size(), from.size());
      if (!SafeCopy(into, from.first(size))) return false;
      into = into.subspan(size);
      from = from.subspan(size);
    }
  }
  return true;
}

void RingReader::Consume(uint64_t to) {
  has_record_ = false;
  consumed_ = to;
  // Release: what was read has been read before the other end writes there.
  own_.consumed.store(consumed_, std::memory_order_release);
}

void RingReader::Release() {
  STAGECOACH_CHECK(has_record_);
  Consume(end_);
}

RingReader::Step RingReader::Discard() {
  bool any = false;
  // Twice: what was seen before, and what has come since. Not more, or it could go on for ever.
  for (int i = 0; i < 2; ++i) {
    const Step step = Look();
    if (step == Step::kFault) return step;
    if (step == Step::kEmpty) break;
    any = true;
    Consume(seen_);
  }
  return any ? Step::kReady : Step::kEmpty;
}

}  // namespace stagecoach::emu
