// The two ends of a ring of records in shared memory: one writes, one reads, neither believes the other.
//
// A record is a word (its length, its kind) and its bytes, filled up to a multiple of eight, so that the word never
// lies across the end of the ring and is read by one load. Of a record that refers to memory only the first bytes
// follow, behind another word (how many they are, and how many references there are) and the references (reference.h),
// of four words each. Positions are bytes since the beginning, as 64-bit numbers
// that never wrap in practice; the ring's size, a power of two, cuts them down. A record is published whole.
//
// What the other end says (half.h) is hostile. Each word of it is loaded once, judged against our own positions, which
// are in our own memory, and used as it was loaded. The head of a record is copied before anyone looks at it, and its
// bytes are not read again; so are references. The bytes behind it go to where they belong, once. So what the other end
// writes meanwhile changes what is received, and nothing else. After a fault nothing moves any more.
//
// Threading: one thread at a time for each; the other end is another thread or process. Who sleeps and who wakes whom
// is not decided here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "emu/engine/record.h"
#include "emu/llp/shm/half.h"
#include "emu/llp/shm/reference.h"

namespace stagecoach::emu {

// What the other end said that cannot be.
enum class RingFault : uint8_t {
  kNone,
  kIndex,      // it has produced or consumed more than there can be, or less than before, or no whole word
  kLength,     // a record is longer than records are, or than what was produced
  kKind,       // a record of no kind that we know, or one that refers to memory though we read none
  kReference,  // references that do not make up a record
};
const char* ToString(RingFault fault);

// In bytes. Several fit, so that both ends can be at work.
constexpr size_t LargestRecord(size_t capacity) {
  return capacity / 8;
}

class RingWriter {
 public:
  // All that is referred to outlives it. `ring` is that of our own half, and `own` its words.
  RingWriter(HalfWords& own, MutableBytes ring, const HalfWords& peer);

  enum class Room : uint8_t { kEnough, kTooLittle, kFault };
  // Begins a record of so many bytes, LargestRecord() at the most. One that was begun before and not published never
  // was.
  Room Begin(size_t size);
  // Likewise, of which the first `inline_size` bytes are in the ring, kMaxRecordHead to kMaxTxHeader, and the others
  // where these say: one to kMostReferences, none of them empty.
  Room BeginReferring(size_t inline_size, std::span<const Reference> references);
  // The next bytes of it, from memory that may be gone: false, and it can only be begun again.
  [[nodiscard]] bool Append(ConstBytes bytes);
  // All of its bytes are there: the other end may have it.
  void Publish();

  uint64_t produced() const { return produced_; }
  // How far the other end has consumed, asked again; nothing where that cannot be.
  std::optional<uint64_t> Consumed();
  RingFault fault() const { return fault_; }

 private:
  // Of the framed size.
  Room Make(uint64_t framed);
  void Put(uint64_t word);

  HalfWords& own_;
  const MutableBytes ring_;
  const HalfWords& peer_;
  uint64_t produced_ = 0;
  uint64_t freed_ = 0;  // what the other end has consumed, as it last said
  uint64_t next_ = 0;   // where the record that was begun goes on
  uint64_t end_ = 0;    // and ends
  RingFault fault_ = RingFault::kNone;
};

class RingReader {
 public:
  // `ring` is that of the other end's half, and `peer` its words.
  RingReader(HalfWords& own, const HalfWords& peer, ConstBytes ring);

  enum class Step : uint8_t { kReady, kEmpty, kFault };
  // The record in front, until Release().
  Step Next(RecordHead* record);
  // Records that refer to memory are taken from now on.
  void TakeReferences() { takes_references_ = true; }
  // Of the record in front: how many of its bytes are in the ring, and where the others are.
  size_t inline_size() const { return inline_size_; }
  std::span<const Reference> references() const { return std::span(references_).first(reference_count_); }
  // Scatters what follows the first `head_size` bytes of it, which are no more than its head has, and is in the ring;
  // as far as `destination` goes. False: some of that is not mapped.
  [[nodiscard]] bool Place(size_t head_size, std::span<const MutableBytes> destination) const;
  // The other end may use its room again.
  void Release();

  // Throws away all that has been published, the record in front included. kReady: there was something.
  Step Discard();

  RingFault fault() const { return fault_; }

 private:
  // kReady: seen_ is beyond consumed_.
  Step Look();
  Step Fail(RingFault fault);
  void Consume(uint64_t to);
  RingFault ReadRecord();
  RingFault ReadReferences();
  uint64_t WordAt(uint64_t position) const;

  HalfWords& own_;
  const HalfWords& peer_;
  const ConstBytes ring_;
  uint64_t consumed_ = 0;
  uint64_t seen_ = 0;  // what the other end has produced, as it last said
  bool takes_references_ = false;
  bool has_record_ = false;
  size_t length_ = 0;  // of the record in front, as what follows
  size_t inline_size_ = 0;
  uint64_t inline_at_ = 0;  // where its bytes begin
  uint64_t end_ = 0;        // where it ends
  size_t reference_count_ = 0;
  std::array<Reference, kMostReferences> references_{};
  alignas(uint64_t) std::array<std::byte, kMaxRecordHead> head_{};
  RingFault fault_ = RingFault::kNone;
};

}  // namespace stagecoach::emu
