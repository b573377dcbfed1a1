#include "rpcrdma/xdr/xdr_reader.h"

#include <algorithm>

#include "base/mark.h"

namespace stagecoach::rpcrdma {

const char* ToString(XdrFaultKind kind) {
  switch (kind) {
    case XdrFaultKind::kTruncated:
      return "the message ends inside it";
    case XdrFaultKind::kTooLong:
      return "longer than allowed";
    case XdrFaultKind::kBadValue:
      return "value out of range";
    case XdrFaultKind::kTrailingBytes:
      return "bytes left over";
    case XdrFaultKind::kUnexpectedChunk:
      return "a chunk where none is allowed";
    case XdrFaultKind::kChunkSizeMismatch:
      return "the chunk holds another number of bytes";
  }
  return "unknown fault";
}

std::string ToString(const XdrFault& fault) {
  return std::string(fault.field) + " at byte " + std::to_string(fault.position) + ": " + ToString(fault.kind);
}

void XdrReader::FailAt(XdrFaultKind kind, const char* field, uint64_t position) {
  if (!fault_.has_value()) fault_ = XdrFault{kind, field, position};
}

bool XdrReader::ReadIsHere() const {
  return next_read_ < reads_.size() && reads_[next_read_].position == position_;
}

// [5666bis:3.1.3.2+2] [5666:3.7+2] Nobody looks into round-up.
ConstBytes XdrReader::TakeBase(const char* field, uint64_t size, uint64_t started) {
  if (!ok()) return {};
  if (any_item_by_chunk_ && size > 0 && InRead()) return TakeOfRead(field, size, started);
  const uint64_t pad = XdrPad(size);
  // [5666bis:4.6.3+3] [5666bis:6.3+3]
  // [5666bis:4.4.1#2] [5666bis:6.1#2] Bytes taken from the base must not have a chunk among them: either this item may
  // not travel by chunk, or the chunk begins in the middle of it.
  if (next_read_ < reads_.size() && size > 0) {
    const uint64_t gap = reads_[next_read_].position - position_;
    if (gap < size || gap - size < pad) {
      FailAt(XdrFaultKind::kUnexpectedChunk, field, started);
      return {};
    }
  }
  if (size > base_remaining() || pad > base_remaining() - size) {
    FailAt(XdrFaultKind::kTruncated, field, started);
    return {};
  }
  const ConstBytes taken = base_.subspan(base_position_, size);
  base_position_ += size + pad;
  position_ += size + pad;
  return taken;
}

ConstBytes XdrReader::TakeChunk(const ChunkData& chunk, const char* field, uint64_t size, uint64_t started) {
  const ConstBytes data = chunk.data;
  // [5666bis:4.4.3.1+1] [5666:3.4+7] [2004:3.4+6]
  // [5666bis:4.4.3.1#2] [5666:3.4#6] [2004:3.3#11] The count and the chunk agree. [5666bis:4.4.4.1#3] [5666:3.7#1]
  // [5666:3.7+7] [5666bis:4.4.5.2#4] The chunk may or may not hold the round-up; in both cases the stream continues
  // behind it.
  if (data.size() != size && data.size() != size + XdrPad(size)) {
    FailAt(XdrFaultKind::kChunkSizeMismatch, field, started);
    return {};
  }
  if (XdrPad(size) > 0 && data.size() == size) STAGECOACH_MARK("xdr.chunk_without_round_up");
  if (XdrPad(size) > 0 && data.size() > size) STAGECOACH_MARK("xdr.chunk_with_round_up");
  position_ += size + XdrPad(size);
  return data.first(size);
}

ConstBytes XdrReader::TakeRead(const char* field, uint64_t size, uint64_t started) {
  if (any_item_by_chunk_) return TakeOfRead(field, size, started);
  return TakeChunk(reads_[next_read_++], field, size, started);
}

// The returned length is judged by the item, whether or not there was memory for all of it.
ConstBytes XdrReader::TakeWrite(const char* field, uint64_t size, uint64_t started) {
  const size_t place = next_write_++;
  const ChunkData& chunk = writes_[place];
  if (chunk.beyond == 0 && (chunk.data.size() == size || chunk.data.size() == size + XdrPad(size))) {
    return TakeChunk(chunk, field, size, started);
  }
  const uint64_t returned = chunk.data.size() + chunk.beyond;
  const uint64_t excess = returned > size ? returned - size : 0;
  const bool round_up = round_up_goes_beyond_ && excess > 0 && excess == XdrPad(size);
  const bool wrong = !round_up && wrong_lengths_ != nullptr && excess > 0 && excess <= WrongLengths::kExcessMax;
  if ((!round_up && !wrong) || chunk.data.size() < size) {
    FailAt(XdrFaultKind::kChunkSizeMismatch, field, started);
    return {};
  }
  // [traps:interop#21]
  if (wrong) {
    STAGECOACH_MARK("xdr.write_chunk_with_a_wrong_length");
    wrong_lengths_->Count(place);
  }
  return TakeChunk({.data = chunk.data.first(size)}, field, size, started);
}

// [5666:3.7#1] The chunk need not hold the round-up of the last item in it.
ConstBytes XdrReader::TakeOfRead(const char* field, uint64_t size, uint64_t started) {
  const ConstBytes data = reads_[next_read_].data;
  const uint64_t left = data.size() - in_read_;
  if (size > left) {
    FailAt(XdrFaultKind::kChunkSizeMismatch, field, started);
    return {};
  }
  const ConstBytes taken = data.subspan(in_read_, size);
  const uint64_t pad = XdrPad(size);
  const uint64_t pad_here = std::min(pad, left - size);
  in_read_ += size + pad_here;
  position_ += size + pad;
  if (in_read_ < data.size()) return taken;
  ++next_read_;
  in_read_ = 0;
  if (round_up_in_base_ && pad_here == 0) base_position_ += std::min<uint64_t>(pad, base_remaining());
  return taken;
}

ConstBytes XdrReader::TakeEligible(const char* field, uint64_t size, uint64_t started) {
  if (!ok()) return {};
  if (eligible_left_ == 0) return TakeBase(field, size, started);
  --eligible_left_;
  // An empty item takes no room, so a chunk with data at its position belongs to the item behind it.
  const bool by_read = in_read_ > 0 || (ReadIsHere() && (size > 0 || reads_[next_read_].data.empty()));
  if (order_ == ReducedStream::ChunkOrder::kByPosition) {
    return by_read ? TakeRead(field, size, started) : TakeBase(field, size, started);
  }
  // [5666bis:5.2.2+4] [5666:3.6+3] [2004:3.7+3] Each result uses up an entry.
  if (next_write_ == writes_.size()) {
    return by_read ? TakeRead(field, size, started) : TakeBase(field, size, started);
  }
  if (by_read && writes_[next_write_].data.empty()) {
    ++next_write_;
    return TakeRead(field, size, started);
  }
  if (size > 0 && writes_[next_write_].data.empty()) {
    // An unused Write chunk: the responder left this result in the stream. The entry is used up all the same.
    STAGECOACH_MARK("xdr.result_inline_beside_unused_write_chunk");
    ++next_write_;
    return TakeBase(field, size, started);
  }
  return TakeWrite(field, size, started);
}

// [5666:3.9#1] [2004:3.5+4] Counted items alone: the figure has four bytes of length before the padding.
void XdrReader::SkipPadding(const char* field, uint64_t size, uint64_t started) {
  if (padding_.align < 2 || size == 0 || size < padding_.shortest || !ok() || InRead()) return;
  const uint64_t padding = padding_.Before(base_position_);
  if (padding > base_remaining()) return FailAt(XdrFaultKind::kTruncated, field, started);
  base_position_ += padding;
}

uint32_t XdrReader::U32(const char* field) {
  const ConstBytes bytes = TakeBase(field, 4, position_);
  return ok() ? ByteReader(bytes).U32() : 0;
}

uint64_t XdrReader::U64(const char* field) {
  const ConstBytes bytes = TakeBase(field, 8, position_);
  return ok() ? ByteReader(bytes).U64() : 0;
}

bool XdrReader::Bool(const char* field) {
  return Enum(field, 1) == 1;
}

uint32_t XdrReader::Enum(const char* field, uint32_t max) {
  const uint64_t started = position_;
  const uint32_t value = U32(field);
  if (value <= max) return value;
  FailAt(XdrFaultKind::kBadValue, field, started);
  return 0;
}

uint32_t XdrReader::Count(const char* field, uint32_t max, uint32_t element_size_min) {
  const uint64_t started = position_;
  const uint32_t count = U32(field);
  if (count > max) {
    FailAt(XdrFaultKind::kTooLong, field, started);
    return 0;
  }
  uint64_t remaining = base_remaining();
  if (any_item_by_chunk_) {
    for (const ChunkData& chunk : reads_.subspan(next_read_)) remaining += chunk.data.size();
  }
  if (uint64_t{count} * element_size_min > remaining) {
    FailAt(XdrFaultKind::kTruncated, field, started);
    return 0;
  }
  return count;
}

ConstBytes XdrReader::Opaque(const char* field, uint32_t max) {
  const uint64_t started = position_;
  const uint32_t size = U32(field);
  if (size > max) {
    FailAt(XdrFaultKind::kTooLong, field, started);
    return {};
  }
  SkipPadding(field, size, started);
  return TakeBase(field, size, started);
}

ConstBytes XdrReader::FixedOpaque(const char* field, uint64_t size) {
  return TakeBase(field, size, position_);
}

ConstBytes XdrReader::EligibleOpaque(const char* field, uint32_t max) {
  const uint64_t started = position_;
  const uint32_t size = U32(field);
  if (size > max) {
    FailAt(XdrFaultKind::kTooLong, field, started);
    return {};
  }
  SkipPadding(field, size, started);
  return TakeEligible(field, size, started);
}

ConstBytes XdrReader::EligibleBytes(const char* field, uint64_t size) {
  return TakeEligible(field, size, position_);
}

Result<void, XdrFault> XdrReader::Finish() {
  if (base_remaining() > 0) FailAt(XdrFaultKind::kTrailingBytes, "end of message", position_);
  if (ok() && next_read_ < reads_.size()) FailAt(XdrFaultKind::kUnexpectedChunk, "end of message", position_);
  for (; ok() && next_write_ < writes_.size(); ++next_write_) {
    if (!writes_[next_write_].data.empty()) FailAt(XdrFaultKind::kUnexpectedChunk, "end of message", position_);
  }
  if (fault_.has_value()) return Err(*fault_);
  return {};
}

}  // namespace stagecoach::rpcrdma
