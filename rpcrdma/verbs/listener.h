// Listener: an rdma_cm id that listens, and hands over what connects to it.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>

#include "base/event_loop.h"
#include "rpcrdma/verbs/cm_channel.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {

class Listener final : public CmHandler {
 public:
  // Called for each connection request: the new id, owned from then on (to be adopted or rejected), and the event.
  using OnRequest = std::function<void(verbs::CmId id, const CmEvent& request)>;

  // `channel` outlives the listener.
  static verbs::VerbsResult<std::unique_ptr<Listener>> Listen(CmChannel& channel, const sockaddr* address, int backlog,
                                                              OnRequest on_request);

  // Host byte order.
  uint16_t port() const;
  // Where it is bound, port included.
  sockaddr_storage address() const;

  void OnCmEvent(const CmEvent& event) override;

 private:
  explicit Listener(OnRequest on_request) : on_request_(std::move(on_request)) {}

  OnRequest on_request_;
  verbs::CmId id_;
};

}  // namespace stagecoach::rpcrdma::internal
