// CmTransport: how connections of one kind of device are agreed on. CmCore (cm_core.h) keeps ids, their states and
// events; what goes over the wire is behind this.
//
// Threading: each function says whether the core's lock is held. Those with it must not call into the NIC, and do what
// takes longer on the loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "emu/cm/cm_event.h"
#include "emu/cm/cm_id.h"
#include "emu/cm/connection_manager.h"
#include "emu/fabric/fabric.h"
#include "emu/nic/queue/qp_attributes.h"

namespace stagecoach::emu {

class CmTransport {
 public:
  virtual ~CmTransport() = default;

  enum class Message : uint8_t { kRequest, kReply, kRejection };

  // --- With the core's lock ---

  // Keeps the port of `local` for the id.
  virtual Result<std::unique_ptr<PortHold>, int> HoldPort(const CmId& id, const IpEndpoint& local) = 0;
  // An id that is to connect needs a port of its own.
  virtual bool ConnectsFromAPort() const = 0;
  // How much private data of the program a message carries, in bytes.
  virtual size_t PrivateDataMax(const CmId& id, Message message) const = 0;
  // The QP is named with connect or accept, and the program takes it through its states.
  virtual bool HasExternalQps() const = 0;
  // The id is kConnecting; answers by events.
  virtual void Connect(const std::shared_ptr<CmId>& id, const CmParameters& parameters) = 0;
  // The id is kAccepting.
  virtual void Accept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) = 0;
  // The id is kClosed.
  virtual void Reject(const std::shared_ptr<CmId>& id, std::vector<std::byte> private_data) = 0;
  // The id's QP is being destroyed; the id has let go of it.
  virtual void OnQpGone(const std::shared_ptr<CmId>& id) = 0;
  // rdma_establish and rdma_notify. 0 or EINVAL.
  virtual int Establish(const std::shared_ptr<CmId>& id) = 0;
  virtual int Notify(const std::shared_ptr<CmId>& id, bool communication_established) = 0;
  // rdma_init_qp_attr: what a QP of the id is told on its way to `state`. EINVAL: not known yet, or never.
  using QpChange = ConnectionManager::QpChange;
  virtual Result<QpChange, int> ChangeTo(const CmId& id, QpState state) const = 0;

  // --- Without ---

  // 0, or an errno: ids cannot be bound to this address of the host, nor connect from it or to it.
  virtual int WhyNotOwn(const IpEndpoint& address) const { return 0; }
  // The id is kListening.
  virtual Result<std::unique_ptr<Listener>, int> Listen(const std::shared_ptr<CmId>& id, const IpEndpoint& local,
                                                        const StreamOptions& options) = 0;
  // The id is kAccepting, and goes back to kRequested if this is not 0: what must be done before Accept.
  virtual int PrepareToAccept(const std::shared_ptr<CmId>& id, const CmParameters& parameters) = 0;
  // That was 0, and the id is not kAccepting any more.
  virtual void UndoAccept(const std::shared_ptr<CmId>& id) = 0;
  // 0 or EINVAL.
  virtual int Disconnect(const std::shared_ptr<CmId>& id) = 0;
  // The id is kDestroyed. `before` it was this; `attached`: CmId::attached_ was set, on this QP.
  virtual void Forget(const std::shared_ptr<CmId>& id, CmId::State before, bool attached, uint32_t qp_number) = 0;
  // The manager goes; on its thread. Afterwards nothing more comes from below but what is on the loop already.
  virtual void Stop() = 0;
  // The same, on the loop, and after Stop(): nothing is left of anything.
  virtual void Close() = 0;
};

}  // namespace stagecoach::emu
