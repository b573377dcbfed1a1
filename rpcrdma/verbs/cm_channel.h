// CmChannel: an rdma_cm event channel on an EventLoop. Fetches one event each time the descriptor is readable,
// acknowledges it, and hands a copy to the handler that is the id's context.
//
// An event is acknowledged before it is handled, so a handler may destroy its id, or the channel's owner.
#pragma once

#include <memory>

#include "base/bytes.h"
#include "base/event_loop.h"
#include "verbs_shim/cxx/device_work.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {

// Sets O_NONBLOCK; false, and errno, on failure.
bool MakeNonBlocking(int fd);

// A copy of what an rdma_cm_event says about a connection.
struct CmEvent {
  rdma_cm_event_type type = RDMA_CM_EVENT_ADDR_RESOLVED;
  rdma_cm_id* id = nullptr;
  int status = 0;
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
  ConstBytes private_data;  // valid within the handler
};

class CmHandler {
 public:
  virtual ~CmHandler() = default;
  // With CONNECT_REQUEST, `event.id` is a new id, which the (listening) handler owns from now on.
  virtual void OnCmEvent(const CmEvent& event) = 0;
};

class CmChannel {
 public:
  static verbs::VerbsResult<std::unique_ptr<CmChannel>> Create(EventLoop& loop);
  // After all ids on the channel are destroyed.
  ~CmChannel();
  CmChannel(const CmChannel&) = delete;
  CmChannel& operator=(const CmChannel&) = delete;

  // `handler` gets the id's events and outlives it.
  verbs::VerbsResult<verbs::CmId> CreateId(CmHandler* handler);

 private:
  CmChannel(EventLoop& loop, verbs::EventChannel channel);
  void OnReadable();

  EventLoop& loop_;
  verbs::EventChannel channel_;
  const std::shared_ptr<verbs::DeviceWork> device_work_;
  EventLoop::WatchId watch_ = 0;
};

}  // namespace stagecoach::rpcrdma::internal
