#include "rpcrdma/verbs/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace stagecoach::rpcrdma::internal {

verbs::VerbsResult<std::unique_ptr<Listener>> Listener::Listen(CmChannel& channel, const sockaddr* address, int backlog,
                                                               OnRequest on_request) {
  std::unique_ptr<Listener> listener(new Listener(std::move(on_request)));
  auto id = channel.CreateId(listener.get());
  if (!id) return Err(id.error());
  listener->id_ = std::move(*id);
  // [5666bis:7#1] [5666:10#1] An IP address and a port, whatever the device: on InfiniBand rdma_cm translates them into
  // a GID and a service ID (annex A11), here as at the client that connects.
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

sockaddr_storage Listener::address() const {
  sockaddr_storage address = {};
  const sockaddr* bound = rdma_get_local_addr(id_.get());
  std::memcpy(&address, bound, bound->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  return address;
}

void Listener::OnCmEvent(const CmEvent& event) {
  if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) on_request_(verbs::CmId(event.id), event);
}

}  // namespace stagecoach::rpcrdma::internal
