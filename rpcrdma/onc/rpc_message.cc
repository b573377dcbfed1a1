#include "rpcrdma/onc/rpc_message.h"

#include <array>
#include <cstdio>
#include <utility>

namespace stagecoach::rpcrdma {
namespace {

// RFC 5531 section 8.2: flavor, count, body and round-up.
constexpr size_t kAuthSysBodyMax = 4 + (4 + 256) + 4 + 4 + 4 + 4 * kAuthSysGidsMax;
static_assert(kAuthSysBodyMax <= kAuthBodyMax);

std::string Hex(uint32_t value) {
  std::array<char, 9> text;
  std::snprintf(text.data(), text.size(), "%08x", value);
  return text.data();
}

OpaqueAuth DecodeAuth(XdrReader& in, const char* flavor_field, const char* body_field) {
  OpaqueAuth auth;
  auth.flavor = in.U32(flavor_field);
  auth.body.append(in.Opaque(body_field, kAuthBodyMax));
  return auth;
}

void EncodeAuth(const OpaqueAuth& auth, XdrWriter& out) {
  out.U32(auth.flavor);
  out.Opaque(auth.body.view());
}

size_t AuthSize(const OpaqueAuth& auth) {
  return 4 + 4 + XdrRoundUp(auth.body.size());
}

VersionRange DecodeRange(XdrReader& in) {
  VersionRange range;
  range.low = in.U32("low version");
  range.high = in.U32("high version");
  return range;
}

void EncodeRange(const VersionRange& range, XdrWriter& out) {
  out.U32(range.low);
  out.U32(range.high);
}

RpcFault Malformed(std::optional<uint32_t> xid, const XdrReader& in) {
  return {.kind = RpcFault::Kind::kMalformed, .xid = xid, .xdr = *in.fault()};
}

// Of a credential or verifier of a call, that was read last. One that is too long is wrong by itself (RFC 5531 section
// 9), as one that the message ends in is not.
RpcFault AuthFault(uint32_t xid, const XdrReader& in, AuthStat stat) {
  RpcFault fault = Malformed(xid, in);
  if (fault.xdr.kind != XdrFaultKind::kTooLong) return fault;
  fault.kind = RpcFault::Kind::kBadAuth;
  fault.auth_stat = stat;
  return fault;
}

// Reads xid and direction; `wrong` is the fault of a message that is not of direction `expected`.
Result<uint32_t, RpcFault> DecodePrefix(XdrReader& in, MessageDirection expected, RpcFault::Kind wrong) {
  const uint32_t xid = in.U32("xid");
  if (!in.ok()) return Err(Malformed(std::nullopt, in));
  const uint32_t direction = in.U32("message type");
  if (!in.ok()) return Err(Malformed(xid, in));
  if (direction != static_cast<uint32_t>(expected)) return Err(RpcFault{.kind = wrong, .xid = xid});
  return xid;
}

std::string AuthName(const OpaqueAuth& auth) {
  switch (static_cast<AuthFlavor>(auth.flavor)) {
    case AuthFlavor::kNone:
      return "AUTH_NONE";
    case AuthFlavor::kSys:
      if (const auto sys = ParseAuthSys(auth)) {
        return "AUTH_SYS uid " + std::to_string(sys->uid) + " gid " + std::to_string(sys->gid);
      }
      return "AUTH_SYS (malformed)";
    case AuthFlavor::kShort:
      return "AUTH_SHORT";
    case AuthFlavor::kDh:
      return "AUTH_DH";
    case AuthFlavor::kRpcsecGss:
      return "RPCSEC_GSS";
  }
  return "auth flavor " + std::to_string(auth.flavor);
}

std::string RangeText(const VersionRange& range) {
  return "(" + std::to_string(range.low) + " to " + std::to_string(range.high) + " supported)";
}

AcceptedReply DecodeAccepted(XdrReader& in) {
  AcceptedReply accepted;
  accepted.verf = DecodeAuth(in, "verifier flavor", "verifier body");
  accepted.stat = static_cast<AcceptStat>(in.Enum("accept_stat", static_cast<uint32_t>(AcceptStat::kSystemErr)));
  if (accepted.stat == AcceptStat::kProgMismatch) accepted.mismatch = DecodeRange(in);
  return accepted;
}

DeniedReply DecodeDenied(XdrReader& in) {
  DeniedReply denied;
  denied.stat = static_cast<RejectStat>(in.Enum("reject_stat", static_cast<uint32_t>(RejectStat::kAuthError)));
  if (denied.stat == RejectStat::kRpcMismatch) {
    denied.mismatch = DecodeRange(in);
  } else {
    denied.auth_stat = static_cast<AuthStat>(in.U32("auth_stat"));
  }
  return denied;
}

}  // namespace

OpaqueAuth AuthNone() {
  return {};
}

Result<OpaqueAuth, XdrFault> MakeAuthSys(const AuthSys& sys) {
  if (sys.machine_name.size() > kAuthSysMachineNameMax) {
    return Err(XdrFault{XdrFaultKind::kTooLong, "machine name", 4});
  }
  std::array<std::byte, kAuthSysBodyMax> body;
  XdrWriter out(body);
  out.U32(sys.stamp);
  out.String(sys.machine_name);
  out.U32(sys.uid);
  out.U32(sys.gid);
  if (sys.gids.size() > kAuthSysGidsMax) return Err(XdrFault{XdrFaultKind::kTooLong, "gids", out.position()});
  out.U32(static_cast<uint32_t>(sys.gids.size()));
  for (uint32_t gid : sys.gids) out.U32(gid);
  STAGECOACH_CHECK(out.ok());
  OpaqueAuth auth;
  auth.flavor = static_cast<uint32_t>(AuthFlavor::kSys);
  auth.body.append(out.written());
  return auth;
}

Result<AuthSys, XdrFault> ParseAuthSys(const OpaqueAuth& auth) {
  if (auth.flavor != static_cast<uint32_t>(AuthFlavor::kSys)) {
    return Err(XdrFault{XdrFaultKind::kBadValue, "auth flavor", 0});
  }
  XdrReader in(auth.body.view());
  AuthSys sys;
  sys.stamp = in.U32("stamp");
  sys.machine_name = std::string(in.String("machine name", kAuthSysMachineNameMax));
  sys.uid = in.U32("uid");
  sys.gid = in.U32("gid");
  const uint32_t count = in.Count("gids", kAuthSysGidsMax, 4);
  for (uint32_t i = 0; i < count; ++i) sys.gids.push_back(in.U32("gid of group"));
  if (auto finished = in.Finish(); !finished) return Err(finished.error());
  return sys;
}

ReplyHeader SuccessReply(uint32_t xid) {
  return {.xid = xid, .body = AcceptedReply{}};
}

ReplyHeader ErrorReply(uint32_t xid, AcceptStat stat) {
  STAGECOACH_CHECK(stat != AcceptStat::kSuccess && stat != AcceptStat::kProgMismatch);
  return {.xid = xid, .body = AcceptedReply{.stat = stat}};
}

ReplyHeader ProgMismatchReply(uint32_t xid, VersionRange supported) {
  return {.xid = xid, .body = AcceptedReply{.stat = AcceptStat::kProgMismatch, .mismatch = supported}};
}

ReplyHeader RpcMismatchReply(uint32_t xid) {
  return {.xid = xid,
          .body = DeniedReply{.stat = RejectStat::kRpcMismatch, .mismatch = {.low = kRpcVersion, .high = kRpcVersion}}};
}

ReplyHeader AuthErrorReply(uint32_t xid, AuthStat stat) {
  return {.xid = xid, .body = DeniedReply{.stat = RejectStat::kAuthError, .auth_stat = stat}};
}

Result<CallHeader, RpcFault> DecodeCall(XdrReader& in) {
  const auto xid = DecodePrefix(in, MessageDirection::kCall, RpcFault::Kind::kNotACall);
  if (!xid) return Err(xid.error());
  CallHeader header;
  header.xid = *xid;
  const uint32_t rpc_version = in.U32("rpc version");
  if (in.ok() && rpc_version != kRpcVersion) {
    // What follows is laid out as that version says, which we do not know.
    return Err(RpcFault{.kind = RpcFault::Kind::kRpcMismatch, .xid = *xid, .rpc_version = rpc_version});
  }
  header.prog = in.U32("program");
  header.vers = in.U32("program version");
  header.proc = in.U32("procedure");
  header.cred = DecodeAuth(in, "credential flavor", "credential body");
  if (!in.ok()) return Err(AuthFault(*xid, in, AuthStat::kBadCred));
  header.verf = DecodeAuth(in, "verifier flavor", "verifier body");
  if (!in.ok()) return Err(AuthFault(*xid, in, AuthStat::kBadVerf));
  return header;
}

Result<ReplyHeader, RpcFault> DecodeReply(XdrReader& in) {
  const auto xid = DecodePrefix(in, MessageDirection::kReply, RpcFault::Kind::kNotAReply);
  if (!xid) return Err(xid.error());
  ReplyHeader header;
  header.xid = *xid;
  if (in.Enum("reply_stat", 1) == 0) {
    header.body = DecodeAccepted(in);
  } else {
    header.body = DecodeDenied(in);
  }
  if (!in.ok()) return Err(Malformed(*xid, in));
  return header;
}

void EncodeCall(const CallHeader& header, XdrWriter& out) {
  out.U32(header.xid);
  out.U32(static_cast<uint32_t>(MessageDirection::kCall));
  out.U32(kRpcVersion);
  out.U32(header.prog);
  out.U32(header.vers);
  out.U32(header.proc);
  EncodeAuth(header.cred, out);
  EncodeAuth(header.verf, out);
}

void EncodeReply(const ReplyHeader& header, XdrWriter& out) {
  out.U32(header.xid);
  out.U32(static_cast<uint32_t>(MessageDirection::kReply));
  if (const auto* accepted = std::get_if<AcceptedReply>(&header.body)) {
    out.U32(0);
    EncodeAuth(accepted->verf, out);
    out.U32(static_cast<uint32_t>(accepted->stat));
    if (accepted->stat == AcceptStat::kProgMismatch) EncodeRange(accepted->mismatch, out);
    return;
  }
  const auto& denied = std::get<DeniedReply>(header.body);
  out.U32(1);
  out.U32(static_cast<uint32_t>(denied.stat));
  if (denied.stat == RejectStat::kRpcMismatch) {
    EncodeRange(denied.mismatch, out);
  } else {
    out.U32(static_cast<uint32_t>(denied.auth_stat));
  }
}

size_t EncodedSize(const CallHeader& header) {
  return 6 * 4 + AuthSize(header.cred) + AuthSize(header.verf);
}

size_t EncodedSize(const ReplyHeader& header) {
  if (const auto* accepted = std::get_if<AcceptedReply>(&header.body)) {
    return 3 * 4 + AuthSize(accepted->verf) + 4 + (accepted->stat == AcceptStat::kProgMismatch ? 8 : 0);
  }
  const auto& denied = std::get<DeniedReply>(header.body);
  return 4 * 4 + (denied.stat == RejectStat::kRpcMismatch ? 8 : 4);
}

std::optional<MessagePrefix> PeekMessage(ConstBytes message) {
  ByteReader in(message);
  MessagePrefix prefix;
  prefix.xid = in.U32();
  const uint32_t direction = in.U32();
  if (!in.ok() || direction > static_cast<uint32_t>(MessageDirection::kReply)) return std::nullopt;
  prefix.direction = static_cast<MessageDirection>(direction);
  return prefix;
}

std::string ToString(const RpcFault& fault) {
  const std::string xid = fault.xid.has_value() ? " xid " + Hex(*fault.xid) : "";
  switch (fault.kind) {
    case RpcFault::Kind::kMalformed:
    case RpcFault::Kind::kBadAuth:
      return "malformed RPC message" + xid + ": " + ToString(fault.xdr);
    case RpcFault::Kind::kNotACall:
      return "not an RPC call" + xid;
    case RpcFault::Kind::kNotAReply:
      return "not an RPC reply" + xid;
    case RpcFault::Kind::kRpcMismatch:
      return "RPC version " + std::to_string(fault.rpc_version) + " instead of 2" + xid;
  }
  return "unknown fault" + xid;
}

std::string ToString(const CallHeader& header) {
  return "call xid " + Hex(header.xid) + " program " + std::to_string(header.prog) + " version " +
         std::to_string(header.vers) + " procedure " + std::to_string(header.proc) + " " + AuthName(header.cred);
}

std::string ToString(const ReplyHeader& header) {
  const std::string prefix = "reply xid " + Hex(header.xid) + " ";
  if (const auto* accepted = std::get_if<AcceptedReply>(&header.body)) {
    const std::string stat = prefix + ToString(accepted->stat);
    return accepted->stat == AcceptStat::kProgMismatch ? stat + " " + RangeText(accepted->mismatch) : stat;
  }
  const auto& denied = std::get<DeniedReply>(header.body);
  if (denied.stat == RejectStat::kRpcMismatch) return prefix + "denied RPC_MISMATCH " + RangeText(denied.mismatch);
  return prefix + "denied " + ToString(denied.auth_stat);
}

const char* ToString(AcceptStat stat) {
  switch (stat) {
    case AcceptStat::kSuccess:
      return "SUCCESS";
    case AcceptStat::kProgUnavail:
      return "PROG_UNAVAIL";
    case AcceptStat::kProgMismatch:
      return "PROG_MISMATCH";
    case AcceptStat::kProcUnavail:
      return "PROC_UNAVAIL";
    case AcceptStat::kGarbageArgs:
      return "GARBAGE_ARGS";
    case AcceptStat::kSystemErr:
      return "SYSTEM_ERR";
  }
  return "unknown accept_stat";
}

const char* ToString(AuthStat stat) {
  switch (stat) {
    case AuthStat::kOk:
      return "AUTH_OK";
    case AuthStat::kBadCred:
      return "AUTH_BADCRED";
    case AuthStat::kRejectedCred:
      return "AUTH_REJECTEDCRED";
    case AuthStat::kBadVerf:
      return "AUTH_BADVERF";
    case AuthStat::kRejectedVerf:
      return "AUTH_REJECTEDVERF";
    case AuthStat::kTooWeak:
      return "AUTH_TOOWEAK";
    case AuthStat::kInvalidResp:
      return "AUTH_INVALIDRESP";
    case AuthStat::kFailed:
      return "AUTH_FAILED";
  }
  return "unknown auth_stat";
}

}  // namespace stagecoach::rpcrdma
