#include "rpcrdma/xdr/xdr_writer.h"

#include <algorithm>
#include <limits>

namespace stagecoach::rpcrdma {

void XdrWriter::Count(size_t size) {
  if (size > std::numeric_limits<uint32_t>::max()) {
    ok_ = false;
    return;
  }
  out_.U32(static_cast<uint32_t>(size));
}

// [5666bis:3.1.3.1+1] [5666bis:3.1.3.2+1] Count, bytes as they are, zeros.
void XdrWriter::Opaque(ConstBytes value) {
  Count(value.size());
  FixedOpaque(value);
}

void XdrWriter::FixedOpaque(ConstBytes value) {
  longest_inside_ = std::max<uint64_t>(longest_inside_, value.size());
  out_.Bytes(value);
  out_.Zeros(XdrPad(value.size()));
}

void XdrWriter::EligibleOpaque(ConstBytes value) {
  Count(value.size());
  const size_t before = eligible_.size();
  EligibleBytes(value);
  if (eligible_.size() > before) eligible_.back().counted = true;
}

// [5666bis:5+1] [5666:4+2] [2004:4+2] But for what leaves it the message stays what it is.
void XdrWriter::EligibleBytes(ConstBytes value) {
  // An item that failed to get its count in must not be planned for.
  if (!ok()) return;
  if (eligible_.size() >= eligible_max_) return FixedOpaque(value);
  eligible_.push_back({.position = position(), .data = value});
  reduced_ += XdrRoundUp(value.size());
}

}  // namespace stagecoach::rpcrdma
