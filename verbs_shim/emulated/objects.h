// The shim's objects: each begins with the public struct of the stock headers and adds the emulator's object behind it.
//
// The C entry points convert arguments and results between the two, and decide nothing. Control calls name objects to
// the NIC by the handle in the public struct, as the kernel's interface does.
#pragma once

#include <infiniband/verbs.h>
#include <pthread.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork/fork.h"
#include "emu/world/world.h"
#include "verbs_shim/emulated/entry.h"

// Macros of verbs.h that hide the functions we define.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace stagecoach::verbs::emulated {

struct HostApi;

struct ShimDevice : ibv_device {
  HostApi* api = nullptr;
  const uint32_t born = ForkGeneration();
};

// The public ibv_context is the last member of verbs_context, by which the header's inlines find the tables in front of
// it.
struct ShimContext {
  ShimContext() { tables.context.cmd_fd = -1; }
  ~ShimContext() {
    if (tables.context.cmd_fd >= 0) CloseDescriptor(tables.context.cmd_fd);
  }
  ShimContext(const ShimContext&) = delete;
  ShimContext& operator=(const ShimContext&) = delete;

  verbs_context tables{};
  emu::Nic* nic = nullptr;
  emu::NicContext* context = nullptr;
  HostApi* api = nullptr;
  const uint32_t born = ForkGeneration();
};

inline ShimContext* ToShim(ibv_context* context) {
  return reinterpret_cast<ShimContext*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
}
inline emu::Nic& NicOf(ibv_context* context) {
  return *ToShim(context)->nic;
}
// Whether the handle in a program's struct names an object of this kind, made in the struct's context.
inline bool Has(ibv_context* context, emu::ObjectKind kind, uint32_t handle) {
  return NicOf(context).Has(*ToShim(context)->context, kind, handle);
}
// The device was opened before a fork, by a parent: it is dead here with all its objects, whose locks may be held for
// ever, and nothing may be done to them. Each call that takes one answers ENODEV.
inline bool IsInherited(ibv_context* context) {
  return ToShim(context)->born != ForkGeneration();
}

// Programs cancel threads of theirs that post and poll (pthread_cancel(3)), and take neither for a cancellation point.
// Here both make system calls which are, under locks: a thread that is cancelled finds out when it is out of here.
class NoCancellation {
 public:
  NoCancellation() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancellation() { pthread_setcancelstate(before_, nullptr); }
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

struct ShimChannel : ibv_comp_channel {
  emu::CompletionChannel* channel = nullptr;
};

// The extended structs of the headers begin as the plain ones do, so every CQ and QP has room for both.
struct ShimCq : ibv_cq_ex {
  emu::CompletionQueue* queue = nullptr;
  emu::EventAccount* events = nullptr;  // of asynchronous events, once there has been one
  // Polled the extended way (cq_ex.cc): from ibv_start_poll to ibv_end_poll, by one thread. A flag and no mutex, since
  // in a simulated world other programs of the same thread may run in between.
  bool single_threaded = false;
  std::mutex turn;  // guards `polled`
  std::condition_variable turn_over;
  bool polled = false;
  ibv_wc current{};
  Instant current_at{};
};

struct WorkBuilder;  // work_ex.cc
struct WorkBuilderDeleter {
  void operator()(WorkBuilder* builder) const;
};

struct ShimQp : ibv_qp_ex {
  emu::QueuePair* pair = nullptr;
  emu::EventAccount* events = nullptr;
  std::unique_ptr<WorkBuilder, WorkBuilderDeleter> builder;  // if it was made for ibv_wr_*
};

struct ShimSrq : ibv_srq {
  emu::SharedReceiveQueue* queue = nullptr;
  emu::EventAccount* events = nullptr;
};

struct ShimMw : ibv_mw {
  uint32_t first_rkey = 0;  // a program may write the one in ibv_mw; the index of both is the window's for life
};

struct ShimAh : ibv_ah {
  const emu::AddressHandle* address = nullptr;
};

inline ShimCq* ToShim(ibv_cq* cq) {
  return static_cast<ShimCq*>(reinterpret_cast<ibv_cq_ex*>(cq));
}
inline ibv_cq* PublicOf(ShimCq* cq) {
  return ibv_cq_ex_to_cq(cq);
}
inline ShimQp* ToShim(ibv_qp* qp) {
  return static_cast<ShimQp*>(reinterpret_cast<ibv_qp_ex*>(qp));
}
inline ibv_qp* PublicOf(ShimQp* qp) {
  return &qp->qp_base;
}
inline const ShimMw& ToShim(const ibv_mw& mw) {
  return static_cast<const ShimMw&>(mw);
}
inline ShimSrq* ToShim(ibv_srq* srq) {
  return static_cast<ShimSrq*>(srq);
}
// Null for null, which a program may well have in a work request.
inline const emu::AddressHandle* AddressOf(ibv_ah* ah) {
  return ah != nullptr ? static_cast<ShimAh*>(ah)->address : nullptr;
}

// What this layer hangs on a host: its device as the API shows it, and what rdma_cm keeps for it.
struct HostApi {
  explicit HostApi(emu::Host& host);

  emu::Host& host;
  ShimDevice device{};
  std::mutex mutex;
  std::shared_ptr<void> cm;  // cm_device.h; guarded by mutex
};

HostApi& ApiOf(emu::Host& host);

// Where sysfs is, without a slash at the end: /sys, or where SYSFS_PATH says, as users of libsysfs have it.
const std::string& SysfsPath();

// The GIDs of the port at this moment: an entry for each index below the table's length (ibv_port_attr::gid_tbl_len),
// with a zero GID where there is none.
uint32_t GidTableLength(const emu::Nic& nic);
std::vector<ibv_gid_entry> GidEntries(emu::Nic& nic);
bool IsEmpty(const ibv_gid_entry& entry);

// A CQ as the plain and the extended call make it; null and errno on failure.
ShimCq* MakeCq(ibv_context* context, int64_t entries, void* cq_context, ibv_comp_channel* channel, int64_t vector,
               emu::CompletionQueueFlags flags);

// Sets errno and returns the failure value of calls that answer with a pointer.
std::nullptr_t FailWith(int error);
// Of those that answer with 0, or with -1 and errno, as all of rdma_cm do.
int Answer(int error);

ibv_qp_state ToIbv(emu::QpState state);

emu::AddressVector FromIbv(const ibv_ah_attr& from);
ibv_ah_attr ShownAs(const emu::AddressVector& from);

ibv_wc ToIbv(const emu::WorkCompletion& completion);

// What a program may say of a send besides its opcode; false: a flag this device does not know.
bool ConvertSendFlags(unsigned flags, emu::SendRequest* to);
// What IBV_WR_BIND_MW binds; EINVAL for a window of type 1.
int ConvertBinding(const ibv_mw* window, uint32_t new_rkey, const ibv_mw_bind_info& info, emu::SendRequest* to);

// Has the entry points of ibv_wr_* in `qp` that `operations` (ibv_qp_create_send_ops_flags) name. False: one is not
// offered by QPs of this type on this device.
bool OfferWork(ShimQp* qp, uint64_t operations, const emu::DeviceProfile& profile, ibv_qp_type type);

// The tables' entries (data_path.cc, memory.cc, cq_ex.cc, queue_pair.cc, queries.cc).
int PollCq(ibv_cq* cq, int entries, ibv_wc* completions);
int RequestNotify(ibv_cq* cq, int solicited_only);
int PostSend(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad);
int PostReceive(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad);
int PostSharedReceive(ibv_srq* srq, ibv_recv_wr* requests, ibv_recv_wr** bad);
int BindMw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind);
ibv_cq_ex* CreateExtendedCq(ibv_context* context, ibv_cq_init_attr_ex* attributes);
ibv_qp* CreateExtendedQp(ibv_context* context, ibv_qp_init_attr_ex* attributes);
int QueryRealTime(ibv_context* context, ibv_values_ex* values);
ibv_mw* AllocateMw(ibv_pd* pd, ibv_mw_type type);
int DeallocateMw(ibv_mw* mw);

}  // namespace stagecoach::verbs::emulated
