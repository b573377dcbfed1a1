#include "rpcrdma/api/dispatch.h"

#include <utility>
#include <vector>

namespace stagecoach::rpcrdma::internal {

Verdict Judge(const std::map<uint32_t, Service*>& services, uint32_t xid, RequestState& state) {
  Result<CallHeader, RpcFault> header = DecodeCall(state.args);
  if (!header) {
    switch (header.error().kind) {
      case RpcFault::Kind::kRpcMismatch:
        return {.reply = RpcMismatchReply(xid)};
      case RpcFault::Kind::kMalformed:
        // [5666bis:5.5#4]
        return {.reply = ErrorReply(xid, AcceptStat::kGarbageArgs)};
      case RpcFault::Kind::kNotACall:
      case RpcFault::Kind::kNotAReply:
        return {};
    }
  }
  state.header = std::move(*header);
  const auto service = services.find(state.header.prog);
  if (service == services.end()) return {.reply = ErrorReply(xid, AcceptStat::kProgUnavail)};
  const VersionRange versions = service->second->versions();
  if (state.header.vers < versions.low || state.header.vers > versions.high) {
    return {.reply = ProgMismatchReply(xid, versions)};
  }
  return {.service = service->second};
}

std::shared_ptr<const void> CopyItems(EligibleItems* items) {
  size_t total = 0;
  for (const EligibleItem& item : *items) total += item.data.size();
  auto copy = std::make_shared<std::vector<std::byte>>(total);
  size_t at = 0;
  for (EligibleItem& item : *items) {
    const MutableBytes place = MutableBytes(*copy).subspan(at, item.data.size());
    at += CopyBytes(place, item.data);
    item.data = place;
  }
  return copy;
}

}  // namespace stagecoach::rpcrdma::internal
