// RocePort: how InfiniBand QPs of one NIC find those of others, and get a stream to carry their packets.
//
// There is no broker and no connection manager in between: programs tell each other QP number and GID in their own way,
// and ibv_modify_qp does the rest. So the two must name the way. A GID is an IP address of the host. A QP number is
//
//     slot (8 bits) | index (16 bits)
//
// where the slot is that of the process: it listens on the first free port of the profile's block, and its slot says
// which. A path without a GID (LID-only addressing) reaches this host alone.
//
// A CARRIER is a stream behind the hello of emu/wire/carrier_hello.h. It is no connection: a QP whose carrier is gone
// is none the worse until it wants to send something (ib_transport.h). Of two QPs the one with the smaller name
// (number, then GID) comes to the other as soon as it is in RTR. The other one comes by itself only when it has
// something to send and there is no carrier; it is told to wait while the first is on its way. So there is one carrier
// for a pair at most, whichever asks first, and a quiet pair without one stays quiet. A stream that asks for a QP that
// is not in RTR yet waits for that. Whatever fails is silence to the QP, and tried again a while later, if the QP still
// wants it.
//
// Who may be a carrier: the stream comes from the address of the GID it claims, both QPs name each other, and neither
// is in another life than the one that was met first (a QP that was reset and connected anew is another one). Streams
// that have not said for whom they are, or wait, are bounded in number and in time.
//
// Threading: every member from any thread, also under the lock of a QP; what follows happens on the fabric's loop. The
// NIC is called without any lock held.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/qp_attributes.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu {

class Nic;

// An address as the GID that names it.
wire::Gid GidOf(const IpEndpoint& address);
// Port and scope are 0.
IpEndpoint AddressOf(const wire::Gid& gid);

// From one of this host's addresses to another address; ports are 0.
struct RocePath {
  IpEndpoint local;
  IpEndpoint remote;
};

class RocePort {
 public:
  // `seed`: of the numbers of QPs' lives. The NIC must outlive the port.
  RocePort(Nic& nic, Fabric& fabric, const DeviceProfile& profile, uint64_t seed);
  // Waits until nothing of it runs on the loop.
  ~RocePort();
  RocePort(const RocePort&) = delete;
  RocePort& operator=(const RocePort&) = delete;

  // The slot of this process. Starts listening at the first call. EAGAIN: no port of the block is free; else what
  // listening says.
  Result<uint8_t, int> Slot();

  // The host's addresses, at first with the first IPv4 address that is no loopback in front: programs use index 0
  // unless told. An index stays what it is: the GID of an address that has gone is zero until the address is back, and
  // new ones come behind, or, when the profile allows no more, in the place of those that have gone.
  std::vector<wire::Gid> Gids();
  // EINVAL: another port than 1, no such source GID, or a destination that can be no address.
  Result<RocePath, int> PathTo(const AddressVector& vector);

  // Of a life of a QP; never 0.
  uint64_t NextGeneration();

  // QP `qp_number`, in the life `generation`, is in RTR and wants packets carried; again when its path changes.
  // Carriers come by Nic::TakeCarrier.
  void Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp);
  // It wants to send and has no carrier.
  void WantCarrier(uint32_t qp_number, uint64_t generation);
  // It has given up the carrier `serial`.
  void CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial);
  void Leave(uint32_t qp_number, uint64_t generation);

 private:
  class Core;
  class Caller;
  class Visitor;

  std::vector<wire::Gid> GidsOf(std::vector<IpEndpoint> addresses);

  const DeviceProfile& profile_;
  Fabric& fabric_;
  const std::shared_ptr<Core> core_;
  std::atomic<uint64_t> next_generation_;

  std::mutex mutex_;  // all below
  std::optional<uint8_t> slot_;
  std::unique_ptr<Listener> listener_;
  std::vector<wire::Gid> gids_;
};

}  // namespace stagecoach::emu
