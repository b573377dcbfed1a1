// Words for programs that meet something this device does not have, and say no more of it than an errno.
#pragma once

#include <cstdint>

namespace stagecoach::verbs::emulated {

enum class Lack : uint8_t {
  kConnectionsByHand,  // a QP of an iWARP device taken to RTR by ibv_modify_qp
  kIwarpDatagrams,     // RDMA_PS_UDP on an iWARP device
  kMulticast,
  kRsockets,
};

// A line on standard error, at the first call for each in a process. From any thread.
void Explain(Lack lack);

}  // namespace stagecoach::verbs::emulated
