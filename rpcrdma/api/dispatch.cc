#include "rpcrdma/api/dispatch.h"

#include <utility>
#include <vector>

#include "base/mark.h"
#include "rpcrdma/onc/credentials.h"

namespace stagecoach::rpcrdma::internal {
namespace {

Verdict Denied(uint32_t xid, AuthStat stat) {
  STAGECOACH_MARK("server.credentials_denied");
  return {.reply = AuthErrorReply(xid, stat), .denied = stat};
}

}  // namespace

Verdict Judge(const std::map<uint32_t, Service*>& services, uint32_t xid, RequestState& state) {
  Result<CallHeader, RpcFault> header = DecodeCall(state.args);
  if (!header) {
    switch (header.error().kind) {
      case RpcFault::Kind::kRpcMismatch:
        return {.reply = RpcMismatchReply(xid)};
      case RpcFault::Kind::kMalformed:
        // [5666bis:5.5#4]
        return {.reply = ErrorReply(xid, AcceptStat::kGarbageArgs)};
      case RpcFault::Kind::kBadAuth:
        return Denied(xid, header.error().auth_stat);
      case RpcFault::Kind::kNotACall:
      case RpcFault::Kind::kNotAReply:
        return {};
    }
  }
  state.header = std::move(*header);
  const auto service = services.find(state.header.prog);
  if (service == services.end()) return {.reply = ErrorReply(xid, AcceptStat::kProgUnavail)};
  const AuthStat stat = JudgeAuth(state.header, service->second->flavors());
  if (stat != AuthStat::kOk) return Denied(xid, stat);
  const VersionRange versions = service->second->versions();
  if (state.header.vers < versions.low || state.header.vers > versions.high) {
    return {.reply = ProgMismatchReply(xid, versions)};
  }
  return {.service = service->second};
}

// [5666bis:6+2] [5666bis:6+3] [5666bis:6.3+1]
std::optional<AcceptStat> Bind(const BindingRegistry& bindings, const ReducedStream& stream, RequestState& state) {
  const Binding* binding = bindings.Find(state.header.prog, state.header.vers);
  const ProcedureBinding* procedure = binding == nullptr ? nullptr : binding->Find(state.header.proc);
  const size_t eligible = procedure == nullptr ? 0 : procedure->arguments.size();
  if (!stream.any_item_by_chunk && stream.chunks.size() > eligible) {
    STAGECOACH_MARK("server.chunk_for_an_item_not_eligible");
    return binding == nullptr ? AcceptStat::kGarbageArgs : binding->on_violation;
  }
  state.args.LimitEligible(eligible);
  if (procedure != nullptr) state.eligible_results = procedure->results.size();
  return std::nullopt;
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
