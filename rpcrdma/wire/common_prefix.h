// The four words with which the header of every version begins.
//
// draft-ietf-nfsv4-rfc5666bis-01 section 5.1, draft-cel-nfsv4-rpcrdma-version-two-09 section 3.1 (rpcrdma_common). They
// say which version the rest is of, so whoever does not know the version of a message yet reads these first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/header.h"

namespace stagecoach::rpcrdma {

inline constexpr size_t kCommonPrefixSize = 16;

// [v2:3.1+1]
struct CommonPrefix {
  uint32_t xid = 0;
  uint32_t version = 0;
  uint32_t credits = 0;
  uint32_t type = 0;  // of a numbering that the version chooses; 4 is an error in all

  // A fault of a header that begins so, noticed where `in` stands.
  HeaderFault Fault(HeaderFault::Kind kind, FaultAction action, const ByteReader& in) const;

  friend bool operator==(const CommonPrefix&, const CommonPrefix&) = default;
};

// The only fault is kTooShort. It reports the XID all the same if that is there, for whoever logs it.
Result<CommonPrefix, HeaderFault> DecodeCommonPrefix(ByteReader& in);
void EncodeCommonPrefix(const CommonPrefix& prefix, ByteWriter& out);

}  // namespace stagecoach::rpcrdma
