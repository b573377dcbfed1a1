// One line of text per frame or segment, for people and traces.
//
// The lines are deterministic and hold no addresses of this process; tagged offsets are the wire's. Any thread.
#pragma once

#include <string>

#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu::wire {

// "MPA Request rev 2 flags S, IRD 128 ORD 0, 8 bytes of private data f6ab0e1801010303". Private data is cut after 32
// bytes.
std::string Describe(const MpaFrame& frame);

// "Send MSN 1 MO 0 last", "Write STag 0xca454604 TO 0xb64d82ed0420e000 last",
// "Read Request MSN 1: 255 bytes from STag 0x11b22d00 TO 0x... to STag 0x9d451400 TO 0x...".
std::string Describe(const SegmentHeader& header);

// "DDP tagged buffer: invalid STag [siw bit order], about Write STag 0x1 TO 0x0 last of 64 bytes". An ambiguous one
// ends with
// "[or, if siw sent it: ...]".
std::string Describe(const TerminateReading& reading);

}  // namespace stagecoach::emu::wire
