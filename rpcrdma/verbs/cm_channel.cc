#include "rpcrdma/verbs/cm_channel.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <utility>

namespace stagecoach::rpcrdma::internal {

bool MakeNonBlocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

verbs::VerbsResult<std::unique_ptr<CmChannel>> CmChannel::Create(EventLoop& loop) {
  auto channel = verbs::CreateEventChannel();
  if (!channel) return Err(channel.error());
  if (!MakeNonBlocking((*channel)->fd)) return Err(verbs::VerbsError{.error = errno, .call = "fcntl"});
  std::unique_ptr<CmChannel> result(new CmChannel(loop, std::move(*channel)));
  if (result->watch_ == 0) return Err(verbs::VerbsError{.error = errno, .call = "watch of the rdma_cm event channel"});
  return result;
}

CmChannel::CmChannel(EventLoop& loop, verbs::EventChannel channel)
    : loop_(loop), channel_(std::move(channel)), device_work_(verbs::JoinDeviceWork(loop)) {
  watch_ = loop_.WatchReadable(channel_->fd, [this] { OnReadable(); });
}

CmChannel::~CmChannel() {
  if (watch_ != 0) loop_.Unwatch(watch_);
}

verbs::VerbsResult<verbs::CmId> CmChannel::CreateId(CmHandler* handler) {
  return verbs::CreateCmId(channel_.get(), handler);
}

// There may be no event after all: destroying an id takes its events back, and that may happen between the loop's look
// at the descriptor and this call.
void CmChannel::OnReadable() {
  auto fetched = verbs::GetCmEvent(channel_.get());
  if (!fetched) return;
  const rdma_cm_event& event = *fetched->get();

  CmEvent copy{.type = event.event, .id = event.id, .status = event.status};
  copy.responder_resources = event.param.conn.responder_resources;
  copy.initiator_depth = event.param.conn.initiator_depth;
  std::array<std::byte, 256> private_data;  // its length is a byte
  copy.private_data = ConstBytes(private_data)
                          .first(event.param.conn.private_data == nullptr
                                     ? 0
                                     : CopyBytes(private_data, AsBytes(event.param.conn.private_data,
                                                                       event.param.conn.private_data_len)));
  const rdma_cm_id* owner = event.event == RDMA_CM_EVENT_CONNECT_REQUEST ? event.listen_id : event.id;
  auto* handler = static_cast<CmHandler*>(owner->context);
  fetched->Destroy();
  handler->OnCmEvent(copy);
}

}  // namespace stagecoach::rpcrdma::internal
