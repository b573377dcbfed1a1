// The shim's objects of rdma_cm, and what its files share.
//
// An id is asynchronous, with a channel of the program's, or synchronous, with a channel of its own that nobody else
// reads: there a call that has a result in an event waits for that event (Complete) and leaves it in the id.
#pragma once

#include <rdma/rdma_cma.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {

struct ShimEventChannel : rdma_event_channel {
  std::mutex mutex;
  std::shared_ptr<emu::CmChannel> channel;  // guarded by mutex once the program has it; null: it has been destroyed
  const uint32_t born = ForkGeneration();
};

struct ShimId : rdma_cm_id {
  emu::Host* host = nullptr;
  std::shared_ptr<emu::CmId> cm;
  std::unique_ptr<ShimEventChannel> own_channel;  // not null: synchronous, and `channel` is this one
  ibv_pd* default_pd = nullptr;                   // of CmDevice, held
  // rdma_create_ep: of a listener, what the QPs of its requests are like; of an initiator, what goes before the
  // program's private data.
  std::optional<ibv_qp_init_attr> request_qp;
  std::vector<std::byte> connect_data;
  const uint32_t born = ForkGeneration();
};

struct ShimCmEvent : rdma_cm_event {
  emu::CmEvent source;
  const uint32_t born = ForkGeneration();
};

inline ShimId* ToShim(rdma_cm_id* id) {
  return static_cast<ShimId*>(id);
}
inline emu::ConnectionManager& CmOf(const ShimId& id) {
  return id.host->cm();
}
inline bool IsInfiniband(const ShimId& id) {
  return id.host->nic().is_infiniband();
}
inline emu::CmId::State StateOf(const ShimId& id) {
  return CmOf(id).Describe(*id.cm).state;
}

// As of devices.
inline bool IsInherited(rdma_cm_id* id) {
  return ToShim(id)->born != ForkGeneration();
}
inline bool IsInherited(rdma_event_channel* channel) {
  return static_cast<ShimEventChannel*>(channel)->born != ForkGeneration();
}
inline bool IsInherited(rdma_cm_event* event) {
  return static_cast<ShimCmEvent*>(event)->born != ForkGeneration();
}

// Null, with errno set, when there is no descriptor left.
std::unique_ptr<ShimEventChannel> NewEventChannel();
// An id without an object of the manager.
std::unique_ptr<ShimId> NewId(rdma_event_channel* channel, void* context, rdma_port_space port_space);
// What programs read in the id, from what the manager knows.
void Refresh(ShimId* id);
// Before the id comes to have an address: opens the device and holds its PD, so that neither is missing then. 0, or an
// errno; one that has failed is missing all the same.
int TakeDevice(ShimId* id);

// The PD of a new object of the id: `pd`, or its default one when that is null. EINVAL: no device yet, or another's PD.
int ChoosePd(const ShimId& id, ibv_pd** pd);

// Of a synchronous id: acknowledges the event it holds.
void ReleaseEvent(ShimId* id);
// After a call that is answered by an event: of a synchronous id, waits for it and returns as its status says. In place
// of the event before it, the id holds it until the next call.
int Complete(ShimId* id);

}  // namespace stagecoach::verbs::emulated
