// RecordFaults: a record layer that loses some of the records it is given, sends others twice, and lets some be
// overtaken by the next one.
//
// For the sending side of InfiniBand connections, whose engines live with all three (ib_transport.h); to an RDMAP
// stream each would be a fault of the peer. A record that is lost counts as sent. One that is to be overtaken waits for
// what is queued before the next flush, and for nothing else. Goes on top of a capture's tap, if there is one: captures
// show what is left of the records when this is done with them. Not thread-safe, as the layer below.
#pragma once

#include <cstdint>
#include <memory>

#include "base/prng.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

struct RecordFaults {
  // Of so many records one is lost, sent twice, or overtaken; 0: none.
  uint32_t drop_one_in = 0;
  uint32_t duplicate_one_in = 0;
  uint32_t overtake_one_in = 0;
  Prng luck = Prng(0);
};

std::unique_ptr<Llp> WithRecordFaults(std::unique_ptr<Llp> below, const RecordFaults& faults);

}  // namespace stagecoach::emu
