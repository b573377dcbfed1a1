// Address handles (ibv_ah): a way to a port, looked up once and used by each datagram sent there.
//
// Values, made and kept by Nic (CreateAh, DestroyAh). A send copies what it needs when it is posted, so that a handle
// may go while sends posted with it wait.
#pragma once

#include <cstdint>

#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/queue/qp_attributes.h"

namespace stagecoach::emu {

struct AddressHandle {
  const Nic* nic = nullptr;  // a program may have more than one, with equal numbers for their PDs
  uint32_t handle = 0;
  uint32_t context = 0;
  uint32_t pd = 0;
  AddressVector vector;
  DatagramPeer peer;  // its slot is in the number of the QP that a send is for
};

}  // namespace stagecoach::emu
