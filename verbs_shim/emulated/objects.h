// The shim's objects: each begins with the public struct of the stock headers and adds the emulator's object behind it.
//
// The C entry points convert arguments and results between the two, and decide nothing. Control calls name objects to
// the NIC by the handle in the public struct, as the kernel's interface does.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <mutex>

#include "emu/world/world.h"

// Macros of verbs.h that hide the functions we define.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace stagecoach::verbs::emulated {

struct HostApi;

struct ShimDevice : ibv_device {
  HostApi* api = nullptr;
};

// The public ibv_context is the last member of verbs_context, by which the header's inlines find the tables in front of
// it.
struct ShimContext {
  verbs_context tables;
  emu::Nic* nic = nullptr;
  emu::NicContext* context = nullptr;
  HostApi* api = nullptr;
};

inline ShimContext* ToShim(ibv_context* context) {
  return reinterpret_cast<ShimContext*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
}
inline emu::Nic& NicOf(ibv_context* context) {
  return *ToShim(context)->nic;
}

struct ShimChannel : ibv_comp_channel {
  emu::CompletionChannel* channel = nullptr;
};

struct ShimCq : ibv_cq {
  emu::CompletionQueue* queue = nullptr;
  emu::EventAccount* events = nullptr;  // of asynchronous events, once there has been one
};

struct ShimQp : ibv_qp {
  emu::QueuePair* pair = nullptr;
  emu::EventAccount* events = nullptr;
};

// What this layer hangs on a host: its device as the API shows it, and what rdma_cm needs one of per device.
struct HostApi {
  explicit HostApi(emu::Host& host);
  ~HostApi();

  emu::Host& host;
  ShimDevice device{};
  // rdma_cm's own open device, and its PD for those who name none. Made on demand.
  ibv_context* CmContext();
  ibv_pd* CmPd();

 private:
  std::mutex mutex_;
  ibv_context* cm_context_ = nullptr;
  ibv_pd* cm_pd_ = nullptr;
};

HostApi& ApiOf(emu::Host& host);

// Sets errno and returns the failure value of calls that answer with a pointer.
std::nullptr_t FailWith(int error);

ibv_qp_state ToIbv(emu::QpState state);

// The tables' entries (data_path.cc, memory.cc).
int PollCq(ibv_cq* cq, int entries, ibv_wc* completions);
int RequestNotify(ibv_cq* cq, int solicited_only);
int PostSend(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad);
int PostReceive(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad);
ibv_mw* AllocateMw(ibv_pd* pd, ibv_mw_type type);
int DeallocateMw(ibv_mw* mw);

}  // namespace stagecoach::verbs::emulated
