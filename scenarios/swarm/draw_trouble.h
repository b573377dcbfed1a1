// What is done to the hosts of a drawn world, and between them, at a time.
#pragma once

#include <cstdint>

#include "base/prng.h"
#include "scenarios/proto/scenario.pb.h"

namespace stagecoach::scenario {

// Injections fall into this time from the start; work is spread so that most of it meets some.
inline constexpr uint64_t kTroubleNs = 40'000'000;

// What a link is like, from its beginning or from an injection on.
void DrawLinkInto(Prng& prng, Link& link);

// One to six injections of any kind but STOP.
void DrawInjections(Prng& prng, Scenario& scenario);

// Hosts whose processes stand still for a while, and others that are cut off for longer than peers wait for them.
void DrawSilence(Prng& prng, Scenario& scenario);

// A storm: so many more clients like the first, all of which connect at one moment and call a few times.
inline constexpr uint64_t kStormLeast = 16;
inline constexpr uint64_t kStormMost = 40;
void DrawStorm(Prng& prng, Scenario& scenario);
// When all else is drawn: a backlog, mostly, that has no room for all of a storm.
void DrawBacklog(Prng& prng, Scenario& scenario);

// Hosts that nobody else uses, whose streams come to servers and say nothing. In one of three worlds they are more than
// a listener holds of those (CmOptions::half_open_limit, DeviceProfile::max_joining).
void DrawSilentPeers(Prng& prng, Scenario& scenario);

// Whether a host may go without a word.
bool HasSilentInjections(const Scenario& scenario);

}  // namespace stagecoach::scenario
