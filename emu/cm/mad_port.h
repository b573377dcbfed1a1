// MadPort: how management datagrams leave and come (DatagramPort), and what of the NIC else tells a connection manager
// that a peer may be gone. Behind an interface so that tests lose, repeat and forge what they like.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/bytes.h"
#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/infiniband/roce_port.h"

namespace stagecoach::emu {

class MadPort {
 public:
  // Called on the loop.
  struct Handlers {
    std::function<void(const DatagramPeer& from, ConstBytes mad)> on_mad;
    std::function<void(const DatagramPeer& to, DatagramPort::LinkEvent event)> on_link;
    // A connected QP hears nothing of its peer any more, as far as streams go, or never will.
    RocePort::LossHandler on_loss;
  };

  virtual ~MadPort() = default;
  virtual void Start(Handlers handlers) = 0;
  // No handler runs or will run when this returns. Not on the loop.
  virtual void Stop() = 0;
  virtual DatagramPeer PeerAt(const RocePath& path, uint8_t slot) const = 0;
  // To QP 1 of the peer. False: it did not leave, and may be tried again.
  virtual bool Send(const DatagramPeer& to, ConstBytes mad) = 0;
};

// By the NIC's ports, of an InfiniBand device.
std::unique_ptr<MadPort> MakeMadPort(Nic& nic);

}  // namespace stagecoach::emu
