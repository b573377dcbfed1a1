// DatagramConnection: what moves the work of a UD QP, from RTR to the end of the QP. It is connected with nobody.
//
// A send is carried out when its turn comes: its payload is copied from memory and given to the NIC's DatagramPort,
// and it is done, whether or not anybody will have it. Where the port has no room, it and all behind it wait in the
// send queue until the port asks the QP to go on. A send that cannot be carried out fails, and the QP goes to SQE.
//
// A device with rules that have datagrams overtaken (InjectionAction::kOvertake) keeps one back now and then, of which
// the send is done, until the next one of this QP has gone or its time is over. The rule has fired in the first case.
//
// A datagram is put into a Receive as a whole, behind the 40 bytes of its route, or not at all. One that does not fit
// is dropped, and the Receive serves the next one. One that meets memory it cannot be written to fails the Receive and
// the QP.
//
// Not thread-safe: runs under the lock of its QP. Nothing here waits for a stream; it is moved by posts, by the port's
// wake-ups, and by datagrams that arrive.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "emu/engine/ib_datagram.h"
#include "emu/engine/work.h"
#include "emu/inject/plan.h"
#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/nic.h"
#include "emu/nic/objects/memory_registry.h"
#include "emu/nic/queue/qp_connection.h"
#include "emu/nic/queue/queue_pair.h"

namespace stagecoach::emu {

class DatagramConnection final : public QpConnection {
 public:
  // `mtu`: the longest datagram that may be sent, as a code of ibv_mtu.
  DatagramConnection(QueuePair& qp, uint8_t mtu);
  DatagramConnection(const DatagramConnection&) = delete;
  DatagramConnection& operator=(const DatagramConnection&) = delete;

  bool Serve(uint32_t requests) override;
  void Abort() override;
  void ForgetDeadline() override { deadline_.reset(); }

  const char* PhaseName() const override { return open_ ? "open" : "closed"; }
  bool IsOpen() const override { return open_; }
  bool HasEnded() const override { return !open_; }
  bool IsClosed() const override { return !open_; }
  bool SendsInProgress() const override { return false; }
  Llp::Counters llp_counters() const override { return {}; }
  int PollDescriptor() const override { return -1; }
  const ArrivalMark* arrival_mark() const override { return nullptr; }

  DatagramFate TakeDatagram(const RocePath& from, const wire::IbHeader& header, ConstBytes payload) override;

 private:
  // Carries out posted sends as far as there is room. True if any was.
  bool Send();
  // False: there is no room, so it was not begun.
  bool SendOne(SendSlot& slot);
  // The next datagram, which is judged once, however often it is tried to be sent.
  bool IsToBeOvertaken();
  // What is overtaken, when it has been or waits no longer.
  void SendOvertaken();
  WorkStatus Gather(const SendSlot& slot, size_t* size);
  void FinishSend(SendSlot& slot, WorkStatus status);
  // GRH and payload into the Receive's memory.
  WorkStatus Place(const ReceiveWork& receive, std::span<const ConstBytes> parts);
  void Fail(QpEvent event);
  void Close();
  void RefreshDeadline();

  // A datagram that the next one overtakes.
  struct Overtaken {
    DatagramPeer peer;
    wire::IbHeader header;
    std::vector<std::byte> payload;
    std::optional<Instant> until;  // none: it goes as soon as there is room
  };

  QueuePair& qp_;
  Nic& nic_;
  const size_t mtu_;
  RegistryPort memory_;
  bool open_ = true;
  uint32_t psn_ = 0;           // of the next datagram sent
  bool psn_is_known_ = false;  // it begins with what the program says with RTS
  // Taken and not used yet, as what it was taken for was too long.
  const ReceiveWork* receive_ = nullptr;
  std::array<std::byte, kMaxDatagram> gathered_;
  const std::string name_;  // in traces
  PlaceInjections datagrams_;
  bool judged_ = false;  // the next datagram has been
  std::optional<Overtaken> overtaken_;
  std::optional<Instant> deadline_;  // as NicLoop knows it
};

}  // namespace stagecoach::emu
