// IwarpCm: connections as iWARP has them: a stream to a TCP port, the MPA handshake on it, and then it is the QP's.
//
// The handshake (RFC 5044 section 7.1, RFC 6581) runs here; once it is through, the stream goes to the QP
// (Nic::AttachConnection) and this only observes. Initiators ask for the enhanced revision 2 with IRD and ORD and for
// peer-to-peer mode with an RTR, so that either end may send first.
//
// A listener holds at most `half_open_limit` streams whose request is incomplete, or as many as the program's backlog
// where that is more: then one of them gives way to a newer one (emu/fabric/half_open.h). A request must be complete
// within `request_timeout`; bytes that are no MPA request end that stream and nothing else.
//
// Threading: cm_transport.h. Streams in handshake belong to the fabric's loop and are touched there only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emu/cm/cm_core.h"
#include "emu/cm/cm_transport.h"
#include "emu/fabric/half_open.h"

namespace stagecoach::emu {

struct MpaOutcome;

class IwarpCm final : public CmTransport {
 public:
  explicit IwarpCm(CmCore& core);
  ~IwarpCm() override;

  Result<std::unique_ptr<PortHold>, int> HoldPort(const CmId& id, const IpEndpoint& local) override;
  // A stream finds a port by itself when it connects; many may then have the same one, towards different peers.
  bool ConnectsFromAPort() const override { return false; }
  size_t PrivateDataMax(const CmId&, Message) const override { return kCmPrivateDataMax; }
  bool HasExternalQps() const override { return false; }
  void Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) override;
  void OnQpGone(const std::shared_ptr<CmId>& id) override;
  // That is the answer to an event which iWARP does not have: its initiators are connected with the reply.
  int Establish(const std::shared_ptr<CmId>&) override { return EINVAL; }
  // There is nothing that this manager did not see.
  int Notify(const std::shared_ptr<CmId>& id, bool communication_established) override;
  Result<QpChange, int> ChangeTo(const CmId& id, QpState state) const override;

  Result<std::unique_ptr<Listener>, int> Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                const StreamOptions& options) override;
  // The program may post as soon as it has accepted, before the loop has the connection.
  int PrepareToAccept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) override;
  void UndoAccept(const std::shared_ptr<CmId>& id) override;
  int Disconnect(const std::shared_ptr<CmId>& id) override;
  void Forget(const std::shared_ptr<CmId>& id, CmId::State before, bool attached, uint32_t qp_number) override;
  void Stop() override {}
  void Close() override;

 private:
  class Handshake;
  class Outgoing;
  class Incoming;
  class Observer;

  // Runs `action` on the loop, if the core, and so this, still lives then.
  template <typename Action>
  void OnLoop(Action action) {
    core_.OnLoop([this, action = std::move(action)](CmCore&) mutable { action(*this); });
  }

  // With the peers' hosts.
  void SetPatience(StreamOptions* options) const;

  // On the loop.
  Handshake* Find(uint64_t key);
  void Remove(uint64_t key);
  void OnStream(const std::weak_ptr<CmId>& weak_listener, const std::shared_ptr<HalfOpen>& half_open,
                std::unique_ptr<Stream> stream);
  // Puts the stream under the id's QP. The id must be in `expected`; then it is kConnected, or kAccepting while an RTR
  // is awaited.
  void Attach(const std::shared_ptr<CmId>& id, CmId::State expected, std::unique_ptr<Stream> stream,
              const MpaOutcome& outcome, bool initiator);
  void AwaitRtr(const std::shared_ptr<CmId>& id);
  void StopAwaitingRtr(uint64_t serial);
  // Of an id whose accepted connection does not come, unless the id has moved on.
  void FailAccepted(const std::shared_ptr<CmId>& id, CmCore::Failure failure);

  // From the observer, on the loop.
  void OnFirstRecord(const std::shared_ptr<CmId>& id);
  void OnClosed(const std::shared_ptr<CmId>& id, const CloseNotice& notice);

  CmCore& core_;
  std::map<uint64_t, std::unique_ptr<Handshake>> handshakes_;  // the loop's own
  std::map<uint64_t, Reactor::TimerId> rtr_timers_;            // likewise, of ids that await an RTR, by serial
};

}  // namespace stagecoach::emu
