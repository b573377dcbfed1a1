// Owning handles for the objects of the stock verbs and rdma_cm API, and creation that says what failed.
//
// A handle is a unique pointer that knows the call which destroys its object; everything else is done with the stock
// calls on get(). Works with whichever provider //verbs_shim:verbs links. Adds no thread safety to what the stock calls
// have.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "base/result.h"

namespace stagecoach::verbs {

// Which call failed, and the errno it failed with. `call` is a string literal.
struct VerbsError {
  int error = 0;
  const char* call = "";

  // "ibv_reg_mr: Cannot allocate memory".
  std::string ToString() const;
};

template <typename T>
using VerbsResult = Result<T, VerbsError>;

// Owns one object. `Traits::Destroy` is the stock call that ends it and returns 0, or what it returned.
//
// The destructor has nobody to tell when destroying fails (EBUSY: a dependent object still lives), so declare handles
// in the order of their dependencies, or use Destroy() and look.
template <typename T, typename Traits>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T* object) : object_(object) {}
  Handle(Handle&& other) noexcept : object_(other.release()) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle(std::move(other)).swap(*this);
    return *this;
  }
  ~Handle() { Destroy(); }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

  // Gives the object away without destroying it.
  T* release() { return std::exchange(object_, nullptr); }

  // 0, or the errno of the destroying call; the object is kept when it refused.
  int Destroy() {
    if (object_ == nullptr) return 0;
    if (const int error = Traits::Destroy(object_); error != 0) return error;
    object_ = nullptr;
    return 0;
  }

  void swap(Handle& other) noexcept { std::swap(object_, other.object_); }

 private:
  T* object_ = nullptr;
};

namespace internal {
struct ContextTraits {
  static int Destroy(ibv_context* object);
};
struct ProtectionDomainTraits {
  static int Destroy(ibv_pd* object);
};
struct MemoryRegionTraits {
  static int Destroy(ibv_mr* object);
};
struct MemoryWindowTraits {
  static int Destroy(ibv_mw* object);
};
struct CompletionChannelTraits {
  static int Destroy(ibv_comp_channel* object);
};
struct CompletionQueueTraits {
  static int Destroy(ibv_cq* object);
};
struct QueuePairTraits {
  static int Destroy(ibv_qp* object);
};
struct EventChannelTraits {
  static int Destroy(rdma_event_channel* object);
};
struct CmIdTraits {
  // Destroys the id's queue pair first, when it still has one. Blocks until the id's events are acknowledged.
  static int Destroy(rdma_cm_id* object);
};
struct CmEventTraits {
  static int Destroy(rdma_cm_event* object);
};
}  // namespace internal

using Context = Handle<ibv_context, internal::ContextTraits>;
using ProtectionDomain = Handle<ibv_pd, internal::ProtectionDomainTraits>;
using MemoryRegion = Handle<ibv_mr, internal::MemoryRegionTraits>;
using MemoryWindow = Handle<ibv_mw, internal::MemoryWindowTraits>;
using CompletionChannel = Handle<ibv_comp_channel, internal::CompletionChannelTraits>;
using CompletionQueue = Handle<ibv_cq, internal::CompletionQueueTraits>;
// A QP created with ibv_create_qp. One created by rdma_create_qp belongs to its CmId.
using QueuePair = Handle<ibv_qp, internal::QueuePairTraits>;
using EventChannel = Handle<rdma_event_channel, internal::EventChannelTraits>;
using CmId = Handle<rdma_cm_id, internal::CmIdTraits>;
// A fetched event; destroying it acknowledges it.
using CmEvent = Handle<rdma_cm_event, internal::CmEventTraits>;

// Opens the device of that name, or the first one when `name` is empty. ENODEV when there is none.
VerbsResult<Context> OpenDevice(std::string_view name = {});
VerbsResult<ProtectionDomain> AllocatePd(ibv_context* context);
// `access` is a set of IBV_ACCESS_* flags.
VerbsResult<MemoryRegion> RegisterMemory(ibv_pd* pd, void* address, size_t length, int access);
VerbsResult<MemoryWindow> AllocateMw(ibv_pd* pd, ibv_mw_type type);
VerbsResult<CompletionChannel> CreateCompletionChannel(ibv_context* context);
// `channel` may be null (the CQ is only polled). `cq_context` is handed back by ibv_get_cq_event.
VerbsResult<CompletionQueue> CreateCq(ibv_context* context, int entries, void* cq_context = nullptr,
                                      ibv_comp_channel* channel = nullptr, int vector = 0);
// Both write the capacities actually given into `attributes->cap`.
VerbsResult<QueuePair> CreateQp(ibv_pd* pd, ibv_qp_init_attr* attributes);
VerbsResult<ibv_qp*> CreateCmQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes);
VerbsResult<EventChannel> CreateEventChannel();
VerbsResult<CmId> CreateCmId(rdma_event_channel* channel, void* id_context = nullptr,
                             rdma_port_space port_space = RDMA_PS_TCP);
// Blocks unless the channel's descriptor is O_NONBLOCK; then EAGAIN when no event is waiting.
VerbsResult<CmEvent> GetCmEvent(rdma_event_channel* channel);

}  // namespace stagecoach::verbs
