// RocePort: how InfiniBand QPs of one NIC find those of others, and get a stream to carry their packets.
//
// There is no broker and no connection manager in between: programs tell each other QP number and GID in their own way,
// and ibv_modify_qp does the rest. So the two must name the way. A GID is an IP address of the host. A QP number is
//
//     slot (8 bits) | index (16 bits)
//
// where the slot is that of the process: it listens on the first free port of the profile's block, and its slot says
// which.
//
// All hosts must have the same block: a QP calls the ports of its own.
//
// A CARRIER is a stream behind the hello of emu/wire/carrier_hello.h. It is no connection: a QP whose carrier is gone
// is none the worse until it wants to send something (ib_transport.h). Of two QPs the one with the smaller name
// (number, then GID) comes to the other as soon as it is in RTS. The other one comes by itself only when it has
// something to send and there is no carrier; it is told to wait when the first is on its way and its hello has left.
// Where both hellos have left it answers the first when it has heard that: what it said could arrive after its answer
// and be taken for a newer stream. So there is one carrier for a pair at most, the same at both ends, whichever asks
// first. A newer one takes the place of one that is there: the other end knows best that it has lost it. A stream that
// asks for a QP in RESET or INIT waits for its RTR. Whatever fails is silence to the QP, and tried again a while later,
// and so often; then a wish of the QP begins it anew. A carrier that brought nothing before it ended was one more
// failure. So a quiet pair without a carrier becomes quiet.
//
// A QP that is connected with itself comes to itself at once, by a stream of one end (echo_stream.h), and takes no
// other.
//
// Who may be a carrier: the stream comes from the address of the GID it claims, both QPs name each other, and each end
// proves that it knows what only the two know (emu/wire/carrier_proof.h): the packet numbers that both start with,
// which is why an end calls in RTS and not before, and the secret of a connection manager. Without a proof nothing is
// carried and nothing is replaced. Where what is to be proven is no secret, because a program has all its packet
// numbers be 0, the kernel says on one host whose the other end is: our user's, or root's. Who was wrong too often is
// not listened to for a while (refusals.h). A QP that was reset and connected anew at the numbers that its peer has
// come to is still that QP, as on a network. No stream outlives the QP's life at either end, so that no packet of an
// earlier one arrives late.
//
// Bounds towards strangers: streams that have proven nothing, in number (emu/fabric/half_open.h), and in time; those
// that wait for a QP to be ready, in the same two ways, and one for each QP of ours, where the newest stays.
//
// Threading: every member from any thread, also under the lock of a QP; what follows happens on the fabric's loop. The
// NIC is called without any lock held.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/infiniband/gid_table.h"
#include "emu/nic/queue/qp_attributes.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {

class Nic;

// Of a QP number: the slot is above.
inline constexpr uint32_t kSlotShift = 16;

// The other way round of GidOf. Port and scope are 0.
IpEndpoint AddressOf(const wire::Gid& gid);

// From one of this host's addresses to another address; ports are 0.
struct RocePath {
  IpEndpoint local;
  IpEndpoint remote;
};

// Packet numbers of a QP: its own, once it sends, and its peer's.
struct QpNumbers {
  std::optional<uint32_t> send;
  uint32_t receive = 0;
};

// What a QP knows of its peer, and the peer of it.
struct PeerKnowledge {
  QpNumbers begun;  // in RTR and RTS
  wire::CarrierSecret secret{};
};

// What a QP can see of the port's attempts to get it a carrier. Written on the loop, read from any thread; but for the
// last.
struct CarrierOutlook {
  // The last word was no: nobody listens at the peer's host, or who does knows no such QP, or has it in RESET or INIT,
  // or takes no stream of ours.
  std::atomic<bool> is_refused{false};
  // A stream to the peer's host stands, and waits for an answer.
  std::atomic<bool> is_asking{false};
  // Streams to the peer's host that came about, whatever became of them: each was a sign of life.
  std::atomic<uint32_t> streams{0};
  // Of the carrier that comes next: its other end loses packets by itself (CarrierHello::loses).
  std::atomic<bool> peer_loses{false};
  // Written by the QP, read on the loop: this end loses all that is sent or comes (a rule has stalled it), whatever
  // carries it.
  std::atomic<bool> loses_all{false};
};

class RocePort {
 public:
  // The NIC must outlive the port.
  RocePort(Nic& nic, Fabric& fabric, const DeviceProfile& profile);
  // Waits until nothing of it runs on the loop.
  ~RocePort();
  RocePort(const RocePort&) = delete;
  RocePort& operator=(const RocePort&) = delete;

  // The slot of this process. Starts listening at the first call. EAGAIN: no port of the block is free; else what
  // listening says.
  Result<uint8_t, int> Slot();

  // The host's addresses at this moment, by index (gid_table.h), with room for the profile's max_gids. Empty entries
  // behind the last that was used are left out.
  std::vector<GidTable::Entry> GidEntries();
  // Their GIDs alone.
  std::vector<wire::Gid> Gids();
  // The largest MTU, as a code of ibv_mtu, with which packets fit the link of one of this host's addresses.
  uint8_t MtuOf(const IpEndpoint& local) const;
  // Of the link that the first GID is of: what a program has that asks for no other.
  uint8_t ActiveMtu();
  // GidTable::IndexOf, at this moment.
  std::optional<uint8_t> IndexOf(const IpEndpoint& address);
  // Whether the table is another one than at the last such call; true at the first.
  bool GidsHaveChanged();
  // Tells people, once, that a program has named this address, which has no GID.
  void ComplainOf(const IpEndpoint& address);
  // EINVAL: another port than 1, an index beyond the table, or a destination that can be no address. ENODATA: the
  // source GID is empty, as Linux says of it.
  Result<RocePath, int> PathTo(const AddressVector& vector);

  // A number for a life of a QP, from RTR to RESET or its end.
  uint64_t NextGeneration() { return next_generation_.fetch_add(1, std::memory_order_relaxed); }

  // QP `qp_number`, in the life `generation`, is in RTR and wants packets carried; again when its path changes.
  // Carriers come by Nic::TakeCarrier; how it stands with them, `outlook` tells from now on.
  void Join(uint32_t qp_number, uint64_t generation, const RocePath& path, uint32_t remote_qp,
            const PeerKnowledge& knowledge, std::shared_ptr<CarrierOutlook> outlook);
  // It knows more of its peer: it sends from now on, or was told a secret.
  void Learn(uint32_t qp_number, uint64_t generation, const PeerKnowledge& knowledge);
  // It wants to send and has no carrier.
  void WantCarrier(uint32_t qp_number, uint64_t generation);
  // It has given up the carrier `serial`, which had brought a packet if `was_useful`.
  void CarrierLost(uint32_t qp_number, uint64_t generation, uint64_t serial, bool was_useful, const QpNumbers& reached);
  // It knows that its peer is out of reach for good.
  void PeerUnreachable(uint32_t qp_number, uint64_t generation);
  void Leave(uint32_t qp_number, uint64_t generation);

  enum class Loss : uint8_t { kCarrier, kPeer };
  // Hears of each QP that has given up its carrier, or its peer; on the loop. An empty one ends it: no call runs or
  // will start when this returns. Not from within the handler, nor with a lock that it takes.
  using LossHandler = std::function<void(uint32_t qp_number, Loss what)>;
  void SetLossHandler(LossHandler handler);

  struct Counters {
    uint64_t carriers_refused = 0;  // streams that wanted to be one
    uint64_t not_proven = 0;        // of them, those whose proof was wrong, or not looked at for others of their source
    uint64_t calls_not_proven = 0;  // streams of ours to who could not prove to be the peer
  };
  Counters counters() const;

 private:
  class Core;
  class Caller;
  class Visitor;

  // With mutex_ held. Tells people once.
  Result<uint8_t, int> NoSlot(int error, const char* why);

  Nic& nic_;
  const DeviceProfile& profile_;
  Fabric& fabric_;
  const std::shared_ptr<Core> core_;
  std::atomic<uint64_t> next_generation_{1};

  std::mutex mutex_;  // all below
  bool has_complained_ = false;
  std::optional<uint8_t> slot_;
  std::unique_ptr<Listener> listener_;
  GidTable gids_;
  std::optional<std::vector<GidTable::Entry>> seen_gids_;
  bool has_complained_of_an_address_ = false;
};

}  // namespace stagecoach::emu
