// XdrWriter: encodes XDR (RFC 4506) into memory the caller provides, leaving eligible items where they are.
//
// An item written with EligibleOpaque or EligibleBytes is not copied: its bytes and round-up stay out of the buffer,
// and the item is recorded with its position in the unreduced stream [5666bis:4.4.4#1]. The chunk planner then decides
// whether it travels in a chunk or is gathered inline. A Binding may allow fewer items than the encoder marks: the
// others stay in the message, copied like anything else [5666bis:6.1#2]. The count of an eligible opaque stays in the
// buffer [5666bis:4.4.3.1#1] [5666:3.4+6] [2004:3.3#10], and so does the "is present" word of optional-data whose data
// is eligible [5666bis:4.4.3.1#3].
//
// Failure (buffer full, item longer than XDR can count) is sticky. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/cursor.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma {

class XdrWriter {
 public:
  // The first `eligible_max` items that are marked eligible may leave the message.
  explicit XdrWriter(MutableBytes buffer, size_t eligible_max = std::numeric_limits<size_t>::max())
      : out_(buffer), eligible_max_(eligible_max) {}

  bool ok() const { return ok_ && out_.ok(); }
  // What is in the buffer: the message without its eligible items.
  ConstBytes written() const { return out_.written(); }
  const EligibleItems& eligible() const { return eligible_; }
  // Bytes of the longest opaque data in the buffer.
  uint64_t longest_inside() const { return longest_inside_; }
  // Bytes of the unreduced stream so far.
  uint64_t position() const { return out_.position() + reduced_; }

  void U32(uint32_t value) { out_.U32(value); }
  void I32(int32_t value) { out_.U32(static_cast<uint32_t>(value)); }
  void U64(uint64_t value) { out_.U64(value); }
  void I64(int64_t value) { out_.U64(static_cast<uint64_t>(value)); }
  void Bool(bool value) { out_.U32(value ? 1 : 0); }
  void Optional(bool present) { Bool(present); }

  void Opaque(ConstBytes value);
  void FixedOpaque(ConstBytes value);
  void String(std::string_view value) { Opaque(AsBytes(value)); }

  // `value` is not copied, unless the item may not leave, and must stay alive and unchanged until the message has been
  // sent.
  void EligibleOpaque(ConstBytes value);
  void EligibleBytes(ConstBytes value);

 private:
  void Count(size_t size);

  ByteWriter out_;
  const size_t eligible_max_;
  EligibleItems eligible_;
  uint64_t reduced_ = 0;  // bytes, round-up included, that left the stream
  uint64_t longest_inside_ = 0;
  bool ok_ = true;
};

// Bytes of `size` bytes of opaque data as encoded, round-up included, without a count.
constexpr uint64_t XdrRoundUp(uint64_t size) {
  return size + XdrPad(size);
}

}  // namespace stagecoach::rpcrdma
