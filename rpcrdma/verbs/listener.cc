#include "rpcrdma/verbs/listener.h"

#include <arpa/inet.h>

#include <cerrno>
#include <utility>

namespace stagecoach::rpcrdma::internal {

verbs::VerbsResult<std::unique_ptr<Listener>> Listener::Listen(CmChannel& channel, const sockaddr* address, int backlog,
                                                               OnRequest on_request) {
  std::unique_ptr<Listener> listener(new Listener(std::move(on_request)));
  auto id = channel.CreateId(listener.get());
  if (!id) return Err(id.error());
  listener->id_ = std::move(*id);
  // The stock prototype takes the address without const and does not change it.
  if (rdma_bind_addr(listener->id_.get(), const_cast<sockaddr*>(address)) != 0) {
    return Err(verbs::VerbsError{.error = errno, .call = "rdma_bind_addr"});
  }
  if (rdma_listen(listener->id_.get(), backlog) != 0) {
    return Err(verbs::VerbsError{.error = errno, .call = "rdma_listen"});
  }
  return listener;
}

uint16_t Listener::port() const {
  return ntohs(rdma_get_src_port(id_.get()));
}

void Listener::OnCmEvent(const CmEvent& event) {
  if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) on_request_(verbs::CmId(event.id), event);
}

}  // namespace stagecoach::rpcrdma::internal
