// ibv_wr_*: send requests built call by call and posted together (ibv_wr_post(3)).
//
// Between ibv_wr_start and ibv_wr_complete or ibv_wr_abort the builder belongs to one thread. An error in any of the
// calls between is kept, and the batch it belongs to is not posted at all: ibv_wr_complete says what it was.

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

#include "base/safe_copy/safe_copy.h"
#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {

struct WorkBuilder {
  struct Pending {
    emu::SendRequest request;
    std::vector<emu::ScatterGather> sges;
    std::vector<std::byte> inline_data;
    ibv_mw* window = nullptr;  // of a bind
  };

  std::mutex mutex;  // held from start to complete or abort
  int error = 0;
  size_t used = 0;  // of `pending`; the rest keeps its memory for later batches
  std::vector<Pending> pending;
  std::vector<emu::SendRequest> batch;

  // The request that the calls which set its data mean; null and an error if there is none.
  Pending* Current() {
    if (used > 0) return &pending[used - 1];
    Refuse(EINVAL);
    return nullptr;
  }
  void Refuse(int why) {
    if (error == 0) error = why;
  }
};

void WorkBuilderDeleter::operator()(WorkBuilder* builder) const {
  delete builder;
}

namespace {

ShimQp* ShimOf(ibv_qp_ex* qp) {
  return static_cast<ShimQp*>(qp);
}

// What fails in a call that has no answer is the batch's error.
template <typename Body>
void WorkEntry(ibv_qp_ex* qp, Body body) {
  Entry([qp](int error) { ShimOf(qp)->builder->Refuse(error); }, std::move(body));
}

// A request with the id and flags that the program has set in `qp`.
emu::SendRequest& Begin(ibv_qp_ex* qp, emu::PostOpcode opcode) {
  WorkBuilder& builder = *ShimOf(qp)->builder;
  if (builder.used == builder.pending.size()) builder.pending.emplace_back();
  WorkBuilder::Pending& next = builder.pending[builder.used++];
  next.request = {};
  next.window = nullptr;
  next.sges.clear();
  next.inline_data.clear();
  if (!ConvertSendFlags(qp->wr_flags, &next.request)) builder.Refuse(EINVAL);
  // Inline is what the data-setting call says.
  next.request.is_inline = false;
  next.request.wr_id = qp->wr_id;
  next.request.opcode = opcode;
  return next.request;
}

void Start(ibv_qp_ex* qp) {
  WorkEntry(qp, [&] {
    WorkBuilder& builder = *ShimOf(qp)->builder;
    // Whoever held it at the fork holds it for ever.
    if (!IsInherited(qp->qp_base.context)) builder.mutex.lock();
    builder.error = 0;
    builder.used = 0;
  });
}

void Abort(ibv_qp_ex* qp) {
  WorkEntry(qp, [&] {
    if (!IsInherited(qp->qp_base.context)) ShimOf(qp)->builder->mutex.unlock();
  });
}

int Complete(ibv_qp_ex* qp) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->qp_base.context)) return ENODEV;
    const NoCancellation no_cancellation;
    WorkBuilder& builder = *ShimOf(qp)->builder;
    std::unique_lock lock(builder.mutex, std::adopt_lock);
    emu::QueuePair& pair = *ShimOf(qp)->pair;
    int error = builder.error;
    if (error == 0) {
      builder.batch.clear();
      for (size_t i = 0; i < builder.used; ++i) {
        WorkBuilder::Pending& pending = builder.pending[i];
        if (pending.request.is_inline) {
          pending.sges = {{reinterpret_cast<uintptr_t>(pending.inline_data.data()),
                           static_cast<uint32_t>(pending.inline_data.size()), 0}};
        }
        pending.request.sges = pending.sges;
        builder.batch.push_back(pending.request);
      }
      error = pair.EnqueueSends(builder.batch);
    }
    for (size_t i = 0; error == 0 && i < builder.used; ++i) {
      if (ibv_mw* const window = builder.pending[i].window) window->rkey = builder.batch[i].bind.BoundRkey();
    }
    lock.unlock();
    if (error == 0) pair.RingDoorbell();
    return error;
  });
}

void Send(ibv_qp_ex* qp) {
  WorkEntry(qp, [&] { Begin(qp, emu::PostOpcode::kSend); });
}

void SendInvalidate(ibv_qp_ex* qp, uint32_t rkey) {
  WorkEntry(qp, [&] { Begin(qp, emu::PostOpcode::kSendInvalidate).remote_stag = rkey; });
}

void Tagged(ibv_qp_ex* qp, emu::PostOpcode opcode, uint32_t rkey, uint64_t remote_address) {
  emu::SendRequest& request = Begin(qp, opcode);
  request.remote_stag = rkey;
  request.remote_offset = remote_address;
}

void Write(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_address) {
  WorkEntry(qp, [&] { Tagged(qp, emu::PostOpcode::kWrite, rkey, remote_address); });
}

void Read(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_address) {
  WorkEntry(qp, [&] { Tagged(qp, emu::PostOpcode::kRead, rkey, remote_address); });
}

void SendImmediate(ibv_qp_ex* qp, __be32 immediate) {
  WorkEntry(qp, [&] { Begin(qp, emu::PostOpcode::kSendImmediate).immediate = immediate; });
}

void WriteImmediate(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_address, __be32 immediate) {
  WorkEntry(qp, [&] {
    emu::SendRequest& request = Begin(qp, emu::PostOpcode::kWriteImmediate);
    request.remote_stag = rkey;
    request.remote_offset = remote_address;
    request.immediate = immediate;
  });
}

void CompareSwap(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_address, uint64_t compare, uint64_t swap) {
  WorkEntry(qp, [&] {
    emu::SendRequest& request = Begin(qp, emu::PostOpcode::kCompareSwap);
    request.remote_stag = rkey;
    request.remote_offset = remote_address;
    request.compare_add = compare;
    request.swap = swap;
  });
}

void FetchAdd(ibv_qp_ex* qp, uint32_t rkey, uint64_t remote_address, uint64_t add) {
  WorkEntry(qp, [&] {
    emu::SendRequest& request = Begin(qp, emu::PostOpcode::kFetchAdd);
    request.remote_stag = rkey;
    request.remote_offset = remote_address;
    request.compare_add = add;
  });
}

void LocalInvalidate(ibv_qp_ex* qp, uint32_t rkey) {
  WorkEntry(qp, [&] { Begin(qp, emu::PostOpcode::kLocalInvalidate).remote_stag = rkey; });
}

void Bind(ibv_qp_ex* qp, ibv_mw* window, uint32_t rkey, const ibv_mw_bind_info* info) {
  WorkEntry(qp, [&] {
    WorkBuilder& builder = *ShimOf(qp)->builder;
    emu::SendRequest& request = Begin(qp, emu::PostOpcode::kBindWindow);
    if (const int error = ConvertBinding(window, rkey, *info, &request)) return builder.Refuse(error);
    builder.Current()->window = window;
  });
}

void SetUdAddress(ibv_qp_ex* qp, ibv_ah* ah, uint32_t remote_qp, uint32_t remote_qkey) {
  WorkEntry(qp, [&] {
    WorkBuilder::Pending* pending = ShimOf(qp)->builder->Current();
    if (pending == nullptr) return;
    pending->request.destination = AddressOf(ah);
    pending->request.remote_qp = remote_qp;
    pending->request.remote_qkey = remote_qkey;
  });
}

void SetSgeList(ibv_qp_ex* qp, size_t count, const ibv_sge* list) {
  WorkEntry(qp, [&] {
    WorkBuilder::Pending* pending = ShimOf(qp)->builder->Current();
    if (pending == nullptr) return;
    pending->request.is_inline = false;
    pending->sges.clear();
    // One too many is enough to be refused.
    const size_t most = ShimOf(qp)->pair->capabilities().max_send_sge + size_t{1};
    for (size_t i = 0; i < std::min(count, most); ++i) {
      pending->sges.push_back({list[i].addr, list[i].length, list[i].lkey});
    }
  });
}

void SetSge(ibv_qp_ex* qp, uint32_t lkey, uint64_t address, uint32_t length) {
  WorkEntry(qp, [&] {
    const ibv_sge sge{.addr = address, .length = length, .lkey = lkey};
    SetSgeList(qp, 1, &sge);
  });
}

void SetInlineList(ibv_qp_ex* qp, size_t count, const ibv_data_buf* list) {
  WorkEntry(qp, [&] {
    WorkBuilder& builder = *ShimOf(qp)->builder;
    WorkBuilder::Pending* pending = builder.Current();
    if (pending == nullptr) return;
    const size_t most = ShimOf(qp)->pair->capabilities().max_inline;
    pending->request.is_inline = true;
    pending->inline_data.clear();
    for (size_t i = 0; i < count; ++i) {
      if (list[i].length > most - pending->inline_data.size()) return builder.Refuse(EINVAL);
      // The caller's memory is its own again when this returns.
      const size_t at = pending->inline_data.size();
      pending->inline_data.resize(at + list[i].length);
      if (!SafeCopy(MutableBytes(pending->inline_data).subspan(at), AsBytes(list[i].addr, list[i].length))) {
        return builder.Refuse(EFAULT);
      }
    }
  });
}

void SetInline(ibv_qp_ex* qp, void* address, size_t length) {
  WorkEntry(qp, [&] {
    const ibv_data_buf data{.addr = address, .length = length};
    SetInlineList(qp, 1, &data);
  });
}

}  // namespace

bool OfferWork(ShimQp* qp, uint64_t operations, const emu::DeviceProfile& profile, ibv_qp_type type) {
  uint64_t offered = IBV_QP_EX_WITH_SEND;
  if (type != IBV_QPT_UD) offered |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;
  if (type == IBV_QPT_RC) offered |= IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND_WITH_INV;
  const bool infiniband = profile.transport == emu::TransportKind::kInfiniband;
  if (infiniband) offered |= IBV_QP_EX_WITH_SEND_WITH_IMM;
  // On iWARP the peer decides, once it is there.
  if ((infiniband || profile.extensions) && type != IBV_QPT_UD) offered |= IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  if ((infiniband ? profile.atomics : profile.extensions) && type == IBV_QPT_RC) {
    offered |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
  }
  if ((operations & ~offered) != 0) return false;
  qp->builder.reset(new WorkBuilder);
  qp->wr_start = Start;
  qp->wr_complete = Complete;
  qp->wr_abort = Abort;
  qp->wr_set_sge = SetSge;
  qp->wr_set_sge_list = SetSgeList;
  qp->wr_set_inline_data = SetInline;
  qp->wr_set_inline_data_list = SetInlineList;
  if (type == IBV_QPT_UD) qp->wr_set_ud_addr = SetUdAddress;
  if ((operations & IBV_QP_EX_WITH_SEND) != 0) qp->wr_send = Send;
  if ((operations & IBV_QP_EX_WITH_SEND_WITH_INV) != 0) qp->wr_send_inv = SendInvalidate;
  if ((operations & IBV_QP_EX_WITH_RDMA_WRITE) != 0) qp->wr_rdma_write = Write;
  if ((operations & IBV_QP_EX_WITH_RDMA_READ) != 0) qp->wr_rdma_read = Read;
  if ((operations & IBV_QP_EX_WITH_SEND_WITH_IMM) != 0) qp->wr_send_imm = SendImmediate;
  if ((operations & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) != 0) qp->wr_rdma_write_imm = WriteImmediate;
  if ((operations & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) != 0) qp->wr_atomic_cmp_swp = CompareSwap;
  if ((operations & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) != 0) qp->wr_atomic_fetch_add = FetchAdd;
  if ((operations & IBV_QP_EX_WITH_LOCAL_INV) != 0) qp->wr_local_inv = LocalInvalidate;
  if ((operations & IBV_QP_EX_WITH_BIND_MW) != 0) qp->wr_bind_mw = Bind;
  return true;
}

}  // namespace stagecoach::verbs::emulated
