// Completion channels and completion queues.

#include <cerrno>
#include <cstdint>
#include <memory>

#include "base/event_loop.h"
#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {

ShimCq* MakeCq(ibv_context* context, int64_t entries, void* cq_context, ibv_comp_channel* channel, int64_t vector,
               emu::CompletionQueueFlags flags) {
  if (entries < 1 || entries > UINT32_MAX || vector < 0 || vector >= context->num_comp_vectors) return FailWith(EINVAL);
  if (channel != nullptr && channel->context != context) return FailWith(EBADF);
  ShimContext* shim = ToShim(context);
  auto cq = std::make_unique<ShimCq>();
  auto created =
      shim->nic->CreateCq(*shim->context, static_cast<uint32_t>(entries),
                          channel != nullptr ? static_cast<ShimChannel*>(channel)->channel : nullptr, cq.get(), flags);
  if (!created) return FailWith(created.error());
  ibv_cq* shown = PublicOf(cq.get());
  shown->context = context;
  shown->channel = channel;
  shown->cq_context = cq_context;
  shown->handle = (*created)->handle();
  shown->cqe = static_cast<int>((*created)->capacity());
  pthread_mutex_init(&shown->mutex, nullptr);
  pthread_cond_init(&shown->cond, nullptr);
  cq->queue = *created;
  if (channel != nullptr) ++channel->refcnt;
  return cq.release();
}

}  // namespace stagecoach::verbs::emulated

using namespace stagecoach;  // NOLINT: the entry points stand in the global namespace
using namespace stagecoach::verbs::emulated;

extern "C" {

struct ibv_comp_channel* ibv_create_comp_channel(struct ibv_context* context) {
  return PointerEntry([&]() -> ibv_comp_channel* {
    if (IsInherited(context)) return FailWith(ENODEV);
    ShimContext* shim = ToShim(context);
    auto channel = std::make_unique<ShimChannel>();
    auto created = shim->nic->CreateChannel(*shim->context);
    if (!created) return FailWith(created.error());
    channel->context = context;
    channel->fd = (*created)->fd();
    channel->channel = *created;
    return channel.release();
  });
}

int ibv_destroy_comp_channel(struct ibv_comp_channel* channel) {
  return NumberEntry([&]() -> int {
    if (IsInherited(channel->context)) return ENODEV;
    auto* shim = static_cast<ShimChannel*>(channel);
    if (const int error = NicOf(channel->context).DestroyChannel(shim->channel); error != 0) return error;
    delete shim;
    return 0;
  });
}

struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                             int comp_vector) {
  return PointerEntry([&]() -> ibv_cq* {
    if (IsInherited(context)) return FailWith(ENODEV);
    ShimCq* cq = MakeCq(context, cqe, cq_context, channel, comp_vector, {});
    return cq != nullptr ? PublicOf(cq) : nullptr;
  });
}

int ibv_resize_cq(struct ibv_cq* cq, int cqe) {
  return NumberEntry([&]() -> int {
    if (IsInherited(cq->context)) return ENODEV;
    if (cqe < 1) return EINVAL;
    if (!Has(cq->context, emu::ObjectKind::kCq, cq->handle)) return ENOENT;
    if (const int error = NicOf(cq->context).ResizeCq(cq->handle, static_cast<uint32_t>(cqe)); error != 0) return error;
    cq->cqe = static_cast<int>(ToShim(cq)->queue->capacity());
    return 0;
  });
}

int ibv_destroy_cq(struct ibv_cq* cq) {
  return NumberEntry([&]() -> int {
    if (IsInherited(cq->context)) return ENODEV;
    if (!Has(cq->context, emu::ObjectKind::kCq, cq->handle)) return ENOENT;
    if (const int error = NicOf(cq->context).DestroyCq(cq->handle); error != 0) return error;
    if (cq->channel != nullptr) --cq->channel->refcnt;
    pthread_cond_destroy(&cq->cond);
    pthread_mutex_destroy(&cq->mutex);
    delete ToShim(cq);
    return 0;
  });
}

int ibv_get_cq_event(struct ibv_comp_channel* channel, struct ibv_cq** cq, void** cq_context) {
  return MinusOneEntry([&]() -> int {
    if (IsInherited(channel->context)) return Answer(ENODEV);
    auto got = static_cast<ShimChannel*>(channel)->channel->GetEvent();
    if (!got) return Answer(got.error());
    *cq = PublicOf(static_cast<ShimCq*>((*got)->cookie()));
    *cq_context = (*cq)->cq_context;
    return 0;
  });
}

void ibv_ack_cq_events(struct ibv_cq* cq, unsigned int nevents) {
  VoidEntry([&] {
    if (IsInherited(cq->context)) return;
    if (nevents == 0) return;
    // Counted for programs that look; what destroying waits for is the CQ's own account.
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += nevents;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
    ToShim(cq)->queue->AckEvents(nevents);
  });
}

}  // extern "C"

namespace stagecoach::verbs {

// verbs_shim/cxx/device_work.h, which links it weakly.
std::unique_ptr<EventLoop::Companion> MakeDeviceCompanion();
std::unique_ptr<EventLoop::Companion> MakeDeviceCompanion() {
  return emu::World::Current().current_host().fabric().CreateCompanion();
}

}  // namespace stagecoach::verbs
