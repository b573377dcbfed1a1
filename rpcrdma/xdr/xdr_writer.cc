#include "rpcrdma/xdr/xdr_writer.h"

#include <limits>

namespace stagecoach::rpcrdma {

void XdrWriter::Count(size_t size) {
  if (size > std::numeric_limits<uint32_t>::max()) {
    ok_ = false;
    return;
  }
  out_.U32(static_cast<uint32_t>(size));
}

void XdrWriter::Opaque(ConstBytes value) {
  Count(value.size());
  FixedOpaque(value);
}

void XdrWriter::FixedOpaque(ConstBytes value) {
  out_.Bytes(value);
  out_.Zeros(XdrPad(value.size()));
}

void XdrWriter::EligibleOpaque(ConstBytes value) {
  Count(value.size());
  EligibleBytes(value);
}

void XdrWriter::EligibleBytes(ConstBytes value) {
  // An item that failed to get its count in must not be planned for.
  if (!ok()) return;
  if (eligible_.size() >= eligible_max_) return FixedOpaque(value);
  eligible_.push_back({.position = position(), .data = value});
  reduced_ += XdrRoundUp(value.size());
}

}  // namespace stagecoach::rpcrdma
