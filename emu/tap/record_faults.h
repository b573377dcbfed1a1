// RecordFaults: a record layer that loses some of the records it is given and sends others twice.
//
// For the sending side of InfiniBand connections, whose engines live with both (ib_transport.h); to an RDMAP stream
// either would be a fault of the peer. A record that is lost counts as sent. Goes on top of a capture's tap, if there
// is one: captures show what is left of the records when this is done with them. Not thread-safe, as the layer below.
#pragma once

#include <cstdint>
#include <memory>

#include "base/prng.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

struct RecordFaults {
  // Of so many records one is lost, or sent twice; 0: none.
  uint32_t drop_one_in = 0;
  uint32_t duplicate_one_in = 0;
  Prng luck = Prng(0);
};

std::unique_ptr<Llp> WithRecordFaults(std::unique_ptr<Llp> below, const RecordFaults& faults);

}  // namespace stagecoach::emu
