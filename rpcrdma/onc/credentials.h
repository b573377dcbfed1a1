// Whether a server takes the credential and the verifier of a call: what RFC 5531 asks of it before it looks at the
// arguments (sections 8.2 and 9, appendix A).
//
// Of AUTH_NONE and AUTH_SYS everything is judged here; of other flavors only whether they are taken, and what is in
// them is for the program that takes them.
#pragma once

#include <array>
#include <span>

#include "rpcrdma/onc/rpc_message.h"

namespace stagecoach::rpcrdma {

// What a program takes that does not say which flavors it takes.
inline constexpr std::array<AuthFlavor, 2> kUsualFlavors = {AuthFlavor::kNone, AuthFlavor::kSys};

// kOk, or what the call is denied with when its program takes the flavors `taken`:
//
//   AUTH_NONE or AUTH_SYS, which is not taken       AUTH_TOOWEAK: another flavor is needed, which says or proves more
//   any other flavor, which is not taken            AUTH_REJECTEDCRED: no session of this flavor exists here, of
//                                                   RPCSEC_GSS as of AUTH_SHORT, whose client begins again with
//                                                   AUTH_SYS
//   AUTH_SYS, which cannot be read                  AUTH_BADCRED: too long a machine name, too many groups, a body that
//                                                   ends early or goes on
//   AUTH_NONE or AUTH_SYS with a verifier that is   AUTH_BADVERF
//   not AUTH_NONE
//
// Procedure 0, which does nothing, is always taken with AUTH_NONE. The body of AUTH_NONE is undefined (section 10.1),
// so it may be anything.
AuthStat JudgeAuth(const CallHeader& header, std::span<const AuthFlavor> taken);

}  // namespace stagecoach::rpcrdma
