// XdrReader: bounded decoding of XDR (RFC 4506), over plain bytes or over a message whose eligible items came by chunk.
//
// Failure is sticky: the first fault is kept, with the name of the field and the position; everything read afterwards
// is zero or empty. A decoder reads a whole structure and asks once. Every count is checked against its maximum and
// against the bytes that are left before it is returned, so that a caller may size its storage by it.
//
// Chunks. Only EligibleOpaque and EligibleBytes accept an item that came by chunk. A chunk where any other item is
// expected is a fault, which is how a violation of DDP-eligibility is noticed [5666bis:4.4.1#2] [5666bis:6.1#2]. So is
// one for an item beyond those that the Binding lists (LimitEligible). A stream says when its sender's document has
// other rules (ReducedStream).
//
// Returned views point into the memory the reader was made over; nothing is copied. The reader itself allocates
// nothing. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

enum class XdrFaultKind : uint8_t {
  kTruncated,         // the stream ends inside the field
  kTooLong,           // a length or count above the field's maximum
  kBadValue,          // a Boolean, discriminator or enumeration outside its range
  kTrailingBytes,     // bytes are left after the last field
  kUnexpectedChunk,   // a chunk where this field does not allow one, or left over at the end
  kChunkSizeMismatch  // the chunk does not hold what the count in the stream says [5666bis:4.4.3.1#2]
};

struct XdrFault {
  XdrFaultKind kind = XdrFaultKind::kTruncated;
  const char* field = "";  // a string literal given by the decoder
  uint64_t position = 0;   // in the unreduced stream, where the field began

  friend bool operator==(const XdrFault&, const XdrFault&) = default;
};

const char* ToString(XdrFaultKind kind);
// "file_name at byte 44: longer than allowed"
std::string ToString(const XdrFault& fault);

class XdrReader {
 public:
  explicit XdrReader(ConstBytes bytes) : base_(bytes) {}
  // `stream` must outlive the reader.
  explicit XdrReader(const ReducedStream& stream)
      : base_(stream.base),
        reads_(stream.order == ReducedStream::ChunkOrder::kByPosition ? stream.chunks.view() : stream.reads),
        order_(stream.order),
        any_item_by_chunk_(stream.any_item_by_chunk),
        round_up_goes_beyond_(stream.round_up_goes_beyond),
        round_up_in_base_(stream.round_up_in_base),
        wrong_lengths_(stream.wrong_lengths),
        padding_(stream.padding) {
    if (order_ == ReducedStream::ChunkOrder::kInOrder) writes_ = stream.chunks.view();
  }

  // Of the items read as eligible from here on, only the first `items` may have come by chunk.
  void LimitEligible(size_t items) { eligible_left_ = items; }

  bool ok() const { return !fault_.has_value(); }
  const std::optional<XdrFault>& fault() const { return fault_; }
  // Bytes of the unreduced stream consumed so far.
  uint64_t position() const { return position_; }
  // Bytes of the base not read yet; no chunk is counted.
  size_t base_remaining() const { return base_.size() - base_position_; }
  // Read chunks used up so far.
  size_t reads_used() const { return next_read_; }

  uint32_t U32(const char* field);
  int32_t I32(const char* field) { return static_cast<int32_t>(U32(field)); }
  uint64_t U64(const char* field);
  int64_t I64(const char* field) { return static_cast<int64_t>(U64(field)); }
  // RFC 4506 section 4.4: 0 or 1, anything else is a fault.
  bool Bool(const char* field);
  // An enumeration or union discriminator of at most `max`.
  uint32_t Enum(const char* field, uint32_t max);
  // The "is present" word of optional-data (RFC 4506 section 4.19).
  bool Optional(const char* field) { return Bool(field); }

  // The count of a variable-length array of at most `max` elements, each at least `element_size_min` bytes long as
  // encoded. On success the elements can still all be there: count * element_size_min <= base_remaining(), unless any
  // item may have come by chunk.
  uint32_t Count(const char* field, uint32_t max, uint32_t element_size_min);

  // Opaque data and strings, with their round-up, whose content receivers ignore.
  ConstBytes Opaque(const char* field, uint32_t max);
  ConstBytes FixedOpaque(const char* field, uint64_t size);
  std::string_view String(const char* field, uint32_t max) { return AsText(Opaque(field, max)); }

  // Counted opaque data that a Binding calls eligible: the count is in the base, the bytes follow it or came by chunk.
  ConstBytes EligibleOpaque(const char* field, uint32_t max);
  // `size` bytes of eligible data whose size is known from elsewhere (fixed-length opaque, present optional-data, the
  // elements of a counted array).
  ConstBytes EligibleBytes(const char* field, uint64_t size);

  // Marks the reader failed, for values a decoder finds illegal; keeps an earlier fault.
  void Fail(XdrFaultKind kind, const char* field) { FailAt(kind, field, position_); }

  // The verdict over the whole message: fault-free, nothing left over, no chunk unused (unused Write chunks are legal
  // [5666bis:4.4.5.1#1], but must be empty).
  Result<void, XdrFault> Finish();

 private:
  void FailAt(XdrFaultKind kind, const char* field, uint64_t position);
  bool ReadIsHere() const;
  bool InRead() const { return in_read_ > 0 || ReadIsHere(); }
  void SkipPadding(const char* field, uint64_t size, uint64_t started);
  // Takes `size` bytes and their round-up off the base; no chunk may lie inside.
  ConstBytes TakeBase(const char* field, uint64_t size, uint64_t started);
  ConstBytes TakeEligible(const char* field, uint64_t size, uint64_t started);
  // The whole of a chunk that is at hand.
  ConstBytes TakeChunk(const ChunkData& chunk, const char* field, uint64_t size, uint64_t started);
  ConstBytes TakeRead(const char* field, uint64_t size, uint64_t started);
  ConstBytes TakeWrite(const char* field, uint64_t size, uint64_t started);
  // The next bytes of the Read chunk that the stream is at.
  ConstBytes TakeOfRead(const char* field, uint64_t size, uint64_t started);

  ConstBytes base_;
  size_t base_position_ = 0;
  std::span<const ChunkData> reads_;   // by position
  std::span<const ChunkData> writes_;  // in order
  size_t next_read_ = 0;
  size_t next_write_ = 0;
  uint64_t in_read_ = 0;  // bytes of the next Read chunk that were taken already
  ReducedStream::ChunkOrder order_ = ReducedStream::ChunkOrder::kByPosition;
  uint64_t position_ = 0;
  size_t eligible_left_ = std::numeric_limits<size_t>::max();
  bool any_item_by_chunk_ = false;
  bool round_up_goes_beyond_ = false;
  bool round_up_in_base_ = false;
  WrongLengths* wrong_lengths_ = nullptr;
  Padding padding_;
  std::optional<XdrFault> fault_;
};

}  // namespace stagecoach::rpcrdma
