#include "rpcrdma/wire/common_prefix.h"

namespace stagecoach::rpcrdma {

HeaderFault CommonPrefix::Fault(HeaderFault::Kind kind, FaultAction action, const ByteReader& in) const {
  return {.kind = kind, .action = action, .xid = xid, .version = version, .type = type, .offset = in.position()};
}

Result<CommonPrefix, HeaderFault> DecodeCommonPrefix(ByteReader& in) {
  HeaderFault too_short{.kind = HeaderFault::Kind::kTooShort, .action = FaultAction::kDrop, .offset = in.remaining()};
  CommonPrefix prefix;
  prefix.xid = in.U32();
  if (!in.ok()) return Err(too_short);
  too_short.xid = prefix.xid;
  prefix.version = in.U32();  // [v2:7+2]
  too_short.version = prefix.version;
  prefix.credits = in.U32();
  prefix.type = in.U32();
  if (!in.ok()) return Err(too_short);
  return prefix;
}

void EncodeCommonPrefix(const CommonPrefix& prefix, ByteWriter& out) {
  out.U32(prefix.xid);
  out.U32(prefix.version);
  out.U32(prefix.credits);
  out.U32(prefix.type);
}

}  // namespace stagecoach::rpcrdma
