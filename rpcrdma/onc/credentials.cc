#include "rpcrdma/onc/credentials.h"

#include <algorithm>

namespace stagecoach::rpcrdma {

AuthStat JudgeAuth(const CallHeader& header, std::span<const AuthFlavor> taken) {
  const auto flavor = static_cast<AuthFlavor>(header.cred.flavor);
  const bool usual = flavor == AuthFlavor::kNone || flavor == AuthFlavor::kSys;
  const bool null_call = header.proc == 0 && flavor == AuthFlavor::kNone;
  if (!null_call && std::find(taken.begin(), taken.end(), flavor) == taken.end()) {
    return usual ? AuthStat::kTooWeak : AuthStat::kRejectedCred;
  }
  if (!usual) return AuthStat::kOk;
  if (flavor == AuthFlavor::kSys && !ParseAuthSys(header.cred)) return AuthStat::kBadCred;
  if (header.verf.flavor != static_cast<uint32_t>(AuthFlavor::kNone)) return AuthStat::kBadVerf;
  return AuthStat::kOk;
}

}  // namespace stagecoach::rpcrdma
