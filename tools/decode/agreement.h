// Whether `stagecoach decode` and those who act on messages are of one mind: the codecs of rpcrdma/wire, and its
// judgement of chunk lists. For tests.
#pragma once

#include <string>

#include "base/bytes.h"
#include "rpcrdma/wire/profile.h"

namespace stagecoach::decode::testing {

// What one calls legal and the other does not; empty: nothing. `call` was sent before `message`, which may be the reply
// to it; it may be empty, or no call at all. `profile`: one of rpcrdma::AllProfiles().
//
// What a codec refuses is marked, and what is marked of a transport header a codec or the judgement of its lists
// refuses. They differ in this alone: limits on numbers (of segments, properties, bytes) are those of an end and not of
// the protocol; a flag that is reserved and a grant of zero are illegal, and let pass; so are bytes behind a header
// that is a whole message, but for properties; an error of version 1 whose code is nobody's, with the words that the
// older documents give it, is legal, and says nothing to an end.
std::string Disagreement(const rpcrdma::ProtocolProfile& profile, ConstBytes call, ConstBytes message);

}  // namespace stagecoach::decode::testing
