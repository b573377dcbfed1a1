// ONC RPC version 2 call and reply headers (RFC 5531), encoded and decoded strictly and within bounds.
//
// Credentials: AUTH_NONE and AUTH_SYS are understood; any other flavor is kept as opaque bytes. The header ends where
// the procedure's arguments or results begin; those are the program's, read on with the same XdrReader.
//
// Values own their bytes. Thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/result.h"
#include "base/small_vector.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRpcVersion = 2;
// RFC 5531 section 8.2: the body of an opaque_auth.
inline constexpr uint32_t kAuthBodyMax = 400;
// RFC 5531 appendix A.
inline constexpr uint32_t kAuthSysMachineNameMax = 255;
inline constexpr uint32_t kAuthSysGidsMax = 16;

enum class MessageDirection : uint32_t { kCall = 0, kReply = 1 };

enum class AuthFlavor : uint32_t { kNone = 0, kSys = 1, kShort = 2, kDh = 3, kRpcsecGss = 6 };

// opaque_auth: a flavor (any number) and up to 400 bytes.
struct OpaqueAuth {
  uint32_t flavor = 0;
  SmallVector<std::byte, 64> body;

  friend bool operator==(const OpaqueAuth&, const OpaqueAuth&) = default;
};

// The body of an AUTH_SYS credential.
struct AuthSys {
  uint32_t stamp = 0;
  std::string machine_name;  // at most 255 bytes, not necessarily text
  uint32_t uid = 0;
  uint32_t gid = 0;
  SmallVector<uint32_t, kAuthSysGidsMax> gids;

  friend bool operator==(const AuthSys&, const AuthSys&) = default;
};

OpaqueAuth AuthNone();
// Fails (kTooLong) when a bound above is exceeded.
Result<OpaqueAuth, XdrFault> MakeAuthSys(const AuthSys& sys);
// Fails when `auth` is not AUTH_SYS or its body is malformed.
Result<AuthSys, XdrFault> ParseAuthSys(const OpaqueAuth& auth);

struct CallHeader {
  uint32_t xid = 0;
  uint32_t prog = 0;
  uint32_t vers = 0;
  uint32_t proc = 0;
  OpaqueAuth cred;
  OpaqueAuth verf;

  friend bool operator==(const CallHeader&, const CallHeader&) = default;
};

// accept_stat, RFC 5531 section 9.
enum class AcceptStat : uint32_t {
  kSuccess = 0,
  kProgUnavail = 1,
  kProgMismatch = 2,
  kProcUnavail = 3,
  kGarbageArgs = 4,
  kSystemErr = 5,
};

enum class RejectStat : uint32_t { kRpcMismatch = 0, kAuthError = 1 };

// auth_stat, RFC 5531 section 9; other numbers exist and are kept.
enum class AuthStat : uint32_t {
  kOk = 0,
  kBadCred = 1,
  kRejectedCred = 2,
  kBadVerf = 3,
  kRejectedVerf = 4,
  kTooWeak = 5,
  kInvalidResp = 6,
  kFailed = 7,
};

struct VersionRange {
  uint32_t low = 0;
  uint32_t high = 0;

  friend bool operator==(const VersionRange&, const VersionRange&) = default;
};

struct AcceptedReply {
  OpaqueAuth verf;
  AcceptStat stat = AcceptStat::kSuccess;
  VersionRange mismatch;  // only with kProgMismatch

  friend bool operator==(const AcceptedReply&, const AcceptedReply&) = default;
};

struct DeniedReply {
  RejectStat stat = RejectStat::kAuthError;
  VersionRange mismatch;                   // only with kRpcMismatch
  AuthStat auth_stat = AuthStat::kFailed;  // only with kAuthError

  friend bool operator==(const DeniedReply&, const DeniedReply&) = default;
};

struct ReplyHeader {
  uint32_t xid = 0;
  std::variant<AcceptedReply, DeniedReply> body;

  // Whether results follow.
  bool success() const {
    const auto* accepted = std::get_if<AcceptedReply>(&body);
    return accepted != nullptr && accepted->stat == AcceptStat::kSuccess;
  }
  friend bool operator==(const ReplyHeader&, const ReplyHeader&) = default;
};

ReplyHeader SuccessReply(uint32_t xid);
ReplyHeader ErrorReply(uint32_t xid, AcceptStat stat);  // any but kSuccess and kProgMismatch
ReplyHeader ProgMismatchReply(uint32_t xid, VersionRange supported);
ReplyHeader RpcMismatchReply(uint32_t xid);
ReplyHeader AuthErrorReply(uint32_t xid, AuthStat stat);

// Why bytes are not the header they should be. The xid is known whenever four bytes were there.
struct RpcFault {
  enum class Kind : uint8_t {
    kMalformed,    // `xdr` says where
    kBadAuth,      // a call's credential or verifier is longer than one can be: answer AUTH_ERROR with `auth_stat`
    kNotACall,     // DecodeCall met a reply, or a message of neither kind
    kNotAReply,    // DecodeReply met a call, or a message of neither kind
    kRpcMismatch,  // a call of another RPC version: answer RPC_MISMATCH
  };
  Kind kind = Kind::kMalformed;
  std::optional<uint32_t> xid;
  uint32_t rpc_version = 0;            // with kRpcMismatch
  XdrFault xdr;                        // with kMalformed and kBadAuth
  AuthStat auth_stat = AuthStat::kOk;  // with kBadAuth
};
std::string ToString(const RpcFault& fault);

// Decode one header; the reader then stands at the arguments or results.
Result<CallHeader, RpcFault> DecodeCall(XdrReader& in);
Result<ReplyHeader, RpcFault> DecodeReply(XdrReader& in);

void EncodeCall(const CallHeader& header, XdrWriter& out);
void EncodeReply(const ReplyHeader& header, XdrWriter& out);
size_t EncodedSize(const CallHeader& header);
size_t EncodedSize(const ReplyHeader& header);

// The first two words of any RPC message; nullopt if shorter or neither CALL nor REPLY.
struct MessagePrefix {
  uint32_t xid = 0;
  MessageDirection direction = MessageDirection::kCall;
};
std::optional<MessagePrefix> PeekMessage(ConstBytes message);

// "call xid 876de715 program 100003 version 3 procedure 0 AUTH_NONE"
std::string ToString(const CallHeader& header);
std::string ToString(const ReplyHeader& header);
const char* ToString(AcceptStat stat);
const char* ToString(AuthStat stat);

}  // namespace stagecoach::rpcrdma
