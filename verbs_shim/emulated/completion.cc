// Completion channels and completion queues.

#include <cerrno>

#include "verbs_shim/emulated/objects.h"

using namespace stagecoach::verbs::emulated;  // NOLINT: the entry points stand in the global namespace

extern "C" {

struct ibv_comp_channel* ibv_create_comp_channel(struct ibv_context* context) {
  ShimContext* shim = ToShim(context);
  auto created = shim->nic->CreateChannel(*shim->context);
  if (!created) return FailWith(created.error());
  auto* channel = new ShimChannel{};
  channel->context = context;
  channel->fd = (*created)->fd();
  channel->channel = *created;
  return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel* channel) {
  auto* shim = static_cast<ShimChannel*>(channel);
  if (const int error = NicOf(channel->context).DestroyChannel(shim->channel); error != 0) return error;
  delete shim;
  return 0;
}

struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                             int comp_vector) {
  if (cqe < 1 || comp_vector < 0 || comp_vector >= context->num_comp_vectors) return FailWith(EINVAL);
  ShimContext* shim = ToShim(context);
  auto* cq = new ShimCq{};
  auto created = shim->nic->CreateCq(*shim->context, static_cast<uint32_t>(cqe),
                                     channel != nullptr ? static_cast<ShimChannel*>(channel)->channel : nullptr, cq);
  if (!created) {
    delete cq;
    return FailWith(created.error());
  }
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->handle = (*created)->handle();
  cq->cqe = static_cast<int>((*created)->capacity());
  cq->queue = *created;
  if (channel != nullptr) ++channel->refcnt;
  return cq;
}

int ibv_resize_cq(struct ibv_cq* cq, int cqe) {
  if (cqe < 1) return EINVAL;
  if (const int error = NicOf(cq->context).ResizeCq(cq->handle, static_cast<uint32_t>(cqe)); error != 0) return error;
  cq->cqe = static_cast<int>(static_cast<ShimCq*>(cq)->queue->capacity());
  return 0;
}

int ibv_destroy_cq(struct ibv_cq* cq) {
  if (const int error = NicOf(cq->context).DestroyCq(cq->handle); error != 0) return error;
  if (cq->channel != nullptr) --cq->channel->refcnt;
  delete static_cast<ShimCq*>(cq);
  return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel* channel, struct ibv_cq** cq, void** cq_context) {
  auto got = static_cast<ShimChannel*>(channel)->channel->GetEvent();
  if (!got) {
    errno = got.error();
    return -1;
  }
  *cq = static_cast<ShimCq*>((*got)->cookie());
  *cq_context = (*cq)->cq_context;
  return 0;
}

void ibv_ack_cq_events(struct ibv_cq* cq, unsigned int nevents) {
  if (nevents > 0) static_cast<ShimCq*>(cq)->queue->AckEvents(nevents);
}

}  // extern "C"
