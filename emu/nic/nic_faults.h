// NicFaults: habits of a device that programs must live with, for simulated worlds.
//
// Each is something hardware may do at any time and the specifications allow: a registration fails for want of
// resources, a completion comes late and others behind it at once, RDMA Writes are placed in any order and as late as
// the next ordering point (ARCHITECTURE section 5). What is drawn comes from `luck`.
//
// Only for NICs on a fabric without a progress thread, and changed between events.
#pragma once

#include <cstdint>

#include "base/prng.h"
#include "base/time.h"

namespace stagecoach::emu {

struct NicFaults {
  // One registration in so many fails with ENOMEM; 0: none.
  uint32_t registration_fails_one_in = 0;
  // One completion in so many is held back, and those of its QP behind it, for up to completion_delay_max; 0: none.
  uint32_t completion_delayed_one_in = 0;
  Duration completion_delay_max{};
  // RDMA Writes are placed in any order, last byte first, within placement_delay_max and before the next record that is
  // no Write.
  bool adversarial_placement = false;
  Duration placement_delay_max = 50us;
  Prng luck = Prng(0);
};

}  // namespace stagecoach::emu
