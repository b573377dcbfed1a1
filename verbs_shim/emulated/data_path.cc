// The data path: posting and polling, reached through the tables of ibv_context.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

// No profile has more; a request with more is refused by its QP's own limit before this matters.
constexpr int kMaxSges = 32;
constexpr int kPollBatch = 16;

constexpr unsigned kKnownSendFlags = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;

using SgeArray = std::array<emu::ScatterGather, kMaxSges>;

// False: more than any QP takes.
bool Convert(const ibv_sge* list, int count, SgeArray* storage, std::span<const emu::ScatterGather>* sges) {
  if (count < 0 || count > kMaxSges) return false;
  for (int i = 0; i < count; ++i) (*storage)[i] = {list[i].addr, list[i].length, list[i].lkey};
  *sges = std::span<const emu::ScatterGather>(storage->data(), static_cast<size_t>(count));
  return true;
}

// Of a request for a QP of `type`: what a datagram's means by its address is something else to the others.
int Convert(const ibv_send_wr& from, ibv_qp_type type, SgeArray* storage, emu::SendRequest* to) {
  if (!ConvertSendFlags(from.send_flags, to)) return EINVAL;
  if (!Convert(from.sg_list, from.num_sge, storage, &to->sges)) return EINVAL;
  to->wr_id = from.wr_id;
  // A C program may have put any number there.
  std::underlying_type_t<ibv_wr_opcode> opcode;
  std::memcpy(&opcode, &from.opcode, sizeof(opcode));
  // In requests of other operations there may be anything where the handle stands.
  if (type == IBV_QPT_UD && (opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM)) {
    to->destination = AddressOf(from.wr.ud.ah);
    to->remote_qp = from.wr.ud.remote_qpn;
    to->remote_qkey = from.wr.ud.remote_qkey;
  }
  switch (opcode) {
    case IBV_WR_SEND:
      to->opcode = emu::PostOpcode::kSend;
      return 0;
    case IBV_WR_SEND_WITH_IMM:
      to->opcode = emu::PostOpcode::kSendImmediate;
      to->immediate = from.imm_data;
      return 0;
    case IBV_WR_SEND_WITH_INV:
      to->opcode = emu::PostOpcode::kSendInvalidate;
      to->remote_stag = from.invalidate_rkey;
      return 0;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_READ:
      to->opcode = opcode == IBV_WR_RDMA_WRITE ? emu::PostOpcode::kWrite : emu::PostOpcode::kRead;
      to->remote_stag = from.wr.rdma.rkey;
      to->remote_offset = from.wr.rdma.remote_addr;
      return 0;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      to->opcode = emu::PostOpcode::kWriteImmediate;
      to->immediate = from.imm_data;
      to->remote_stag = from.wr.rdma.rkey;
      to->remote_offset = from.wr.rdma.remote_addr;
      return 0;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      to->opcode = opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? emu::PostOpcode::kCompareSwap : emu::PostOpcode::kFetchAdd;
      to->remote_stag = from.wr.atomic.rkey;
      to->remote_offset = from.wr.atomic.remote_addr;
      to->compare_add = from.wr.atomic.compare_add;
      to->swap = from.wr.atomic.swap;
      return 0;
    case IBV_WR_LOCAL_INV:
      to->opcode = emu::PostOpcode::kLocalInvalidate;
      to->remote_stag = from.invalidate_rkey;
      return 0;
    case IBV_WR_BIND_MW:
      return ConvertBinding(from.bind_mw.mw, from.bind_mw.rkey, from.bind_mw.bind_info, to);
    default:
      // Segmentation, and what only datagrams of raw Ethernet have.
      return EOPNOTSUPP;
  }
}

ibv_wc_status ToIbv(emu::CompletionStatus status) {
  switch (status) {
    case emu::CompletionStatus::kSuccess:
      return IBV_WC_SUCCESS;
    case emu::CompletionStatus::kLocalLengthError:
      return IBV_WC_LOC_LEN_ERR;
    case emu::CompletionStatus::kLocalQpOperationError:
      return IBV_WC_LOC_QP_OP_ERR;
    case emu::CompletionStatus::kLocalProtectionError:
      return IBV_WC_LOC_PROT_ERR;
    case emu::CompletionStatus::kFlushed:
      return IBV_WC_WR_FLUSH_ERR;
    case emu::CompletionStatus::kWindowBindError:
      return IBV_WC_MW_BIND_ERR;
    case emu::CompletionStatus::kRemoteInvalidRequest:
      return IBV_WC_REM_INV_REQ_ERR;
    case emu::CompletionStatus::kRemoteAccessError:
      return IBV_WC_REM_ACCESS_ERR;
    case emu::CompletionStatus::kRemoteOperationError:
      return IBV_WC_REM_OP_ERR;
    case emu::CompletionStatus::kFatal:
      return IBV_WC_FATAL_ERR;
    case emu::CompletionStatus::kBadResponse:
      return IBV_WC_BAD_RESP_ERR;
    case emu::CompletionStatus::kLocalAccessError:
      return IBV_WC_LOC_ACCESS_ERR;
    case emu::CompletionStatus::kRetryExceeded:
      return IBV_WC_RETRY_EXC_ERR;
    case emu::CompletionStatus::kRnrRetryExceeded:
      return IBV_WC_RNR_RETRY_EXC_ERR;
  }
  return IBV_WC_GENERAL_ERR;
}

ibv_wc_opcode ToIbv(emu::CompletionOpcode opcode) {
  switch (opcode) {
    case emu::CompletionOpcode::kSend:
      return IBV_WC_SEND;
    case emu::CompletionOpcode::kWrite:
      return IBV_WC_RDMA_WRITE;
    case emu::CompletionOpcode::kRead:
      return IBV_WC_RDMA_READ;
    case emu::CompletionOpcode::kLocalInvalidate:
      return IBV_WC_LOCAL_INV;
    case emu::CompletionOpcode::kBindWindow:
      return IBV_WC_BIND_MW;
    case emu::CompletionOpcode::kReceive:
      return IBV_WC_RECV;
    case emu::CompletionOpcode::kReceiveWriteImmediate:
      return IBV_WC_RECV_RDMA_WITH_IMM;
    case emu::CompletionOpcode::kCompareSwap:
      return IBV_WC_COMP_SWAP;
    case emu::CompletionOpcode::kFetchAdd:
      return IBV_WC_FETCH_ADD;
  }
  return IBV_WC_SEND;
}

emu::WindowBinding BindingOf(const ibv_mw& window, uint32_t new_rkey, const ibv_mw_bind_info& info) {
  return {.window_rkey = ToShim(window).first_rkey,
          .new_rkey = new_rkey,
          .region_lkey = info.mr != nullptr ? info.mr->lkey : 0,
          .address = info.addr,
          .length = info.length,
          .access = info.mw_access_flags,
          .type = window.type == IBV_MW_TYPE_1 ? emu::WindowType::kType1 : emu::WindowType::kType2};
}

// `post` takes one converted request; the requests before a bad one have been posted.
template <typename Post>
int PostReceives(ibv_recv_wr* requests, ibv_recv_wr** bad, Post post) {
  for (ibv_recv_wr* request = requests; request != nullptr; request = request->next) {
    SgeArray storage;
    emu::ReceiveRequest converted{.wr_id = request->wr_id, .sges = {}};
    const int error = Convert(request->sg_list, request->num_sge, &storage, &converted.sges) ? post(converted) : EINVAL;
    if (error != 0) {
      *bad = request;
      return error;
    }
  }
  return 0;
}

}  // namespace

ibv_wc ToIbv(const emu::WorkCompletion& from) {
  ibv_wc to{};
  to.wr_id = from.wr_id;
  to.status = ToIbv(from.status);
  to.opcode = ToIbv(from.opcode);
  to.vendor_err = from.vendor_error;
  to.byte_len = from.byte_length;
  to.qp_num = from.qp_number;
  if (from.with_invalidate) {
    to.wc_flags = IBV_WC_WITH_INV;
    to.invalidated_rkey = from.invalidated_rkey;
  }
  if (from.has_immediate) {
    to.wc_flags = IBV_WC_WITH_IMM;
    to.imm_data = from.immediate;
  }
  if (from.has_grh) {
    to.wc_flags |= IBV_WC_GRH;
    to.src_qp = from.source_qp;
    to.sl = from.service_level;
  }
  return to;
}

bool ConvertSendFlags(unsigned flags, emu::SendRequest* to) {
  to->signaled = (flags & IBV_SEND_SIGNALED) != 0;
  to->solicited = (flags & IBV_SEND_SOLICITED) != 0;
  to->fence = (flags & IBV_SEND_FENCE) != 0;
  to->is_inline = (flags & IBV_SEND_INLINE) != 0;
  return (flags & ~kKnownSendFlags) == 0;
}

int ConvertBinding(const ibv_mw* window, uint32_t new_rkey, const ibv_mw_bind_info& info, emu::SendRequest* to) {
  if (window == nullptr || window->type != IBV_MW_TYPE_2 || (info.mr == nullptr && info.length != 0)) return EINVAL;
  to->opcode = emu::PostOpcode::kBindWindow;
  to->bind = BindingOf(*window, new_rkey, info);
  return 0;
}

// Of type 1 windows; the header's inline refuses others. The key is the device's choice and counts from the post on.
int BindMw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) return ENODEV;
    emu::SendRequest request;
    if (!ConvertSendFlags(bind->send_flags, &request) || request.is_inline) return EINVAL;
    request.wr_id = bind->wr_id;
    request.opcode = emu::PostOpcode::kBindWindow;
    request.bind = BindingOf(*mw, ibv_inc_rkey(mw->rkey), bind->bind_info);
    const NoCancellation no_cancellation;
    if (const int error = ToShim(qp)->pair->PostSend(request)) return error;
    mw->rkey = request.bind.BoundRkey();
    return 0;
  });
}

int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) {
  return NegativeEntry([&]() -> int {
    if (IsInherited(cq->context)) return -ENODEV;
    const NoCancellation no_cancellation;
    emu::CompletionQueue& queue = *ToShim(cq)->queue;
    // Not initialised, which would take as long as all else that a poll does which finds nothing.
    alignas(emu::WorkCompletion) std::array<std::byte, kPollBatch * sizeof(emu::WorkCompletion)> memory;
    auto* const batch = reinterpret_cast<emu::WorkCompletion*>(memory.data());
    int taken = 0;
    while (taken < entries) {
      const size_t wanted = static_cast<size_t>(std::min(entries - taken, kPollBatch));
      const size_t got = queue.Poll({batch, wanted});
      for (size_t i = 0; i < got; ++i) completions[taken++] = ToIbv(batch[i]);
      if (got < wanted) break;
    }
    return taken;
  });
}

int RequestNotify(ibv_cq* cq, int solicited_only) {
  return NumberEntry([&]() -> int {
    if (IsInherited(cq->context)) return ENODEV;
    const NoCancellation no_cancellation;
    emu::CompletionQueue* queue = ToShim(cq)->queue;
    // By its handle, as every call of the kernel's knows it; the device is asked only where that is not its own any
    // more.
    if (cq->handle != queue->handle()) {
      queue = Has(cq->context, emu::ObjectKind::kCq, cq->handle) ? NicOf(cq->context).FindCq(cq->handle) : nullptr;
      if (queue == nullptr) return ENOENT;
    }
    queue->RequestNotify(solicited_only != 0);
    return 0;
  });
}

int PostSend(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) {
      *bad = requests;
      return ENODEV;
    }
    const NoCancellation no_cancellation;
    emu::QueuePair& pair = *ToShim(qp)->pair;
    int error = 0;
    for (ibv_send_wr* request = requests; request != nullptr; request = request->next) {
      SgeArray storage;
      emu::SendRequest converted;
      error = Convert(*request, qp->qp_type, &storage, &converted);
      if (error == 0) error = pair.EnqueueSend(converted);
      if (error != 0) {
        *bad = request;
        break;
      }
      if (converted.opcode == emu::PostOpcode::kBindWindow) request->bind_mw.mw->rkey = converted.bind.BoundRkey();
    }
    // What stands before a bad request has been posted.
    pair.RingDoorbell();
    return error;
  });
}

int PostReceive(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  return NumberEntry([&]() -> int {
    if (IsInherited(qp->context)) {
      *bad = requests;
      return ENODEV;
    }
    const NoCancellation no_cancellation;
    emu::QueuePair& pair = *ToShim(qp)->pair;
    return PostReceives(requests, bad, [&](const emu::ReceiveRequest& request) { return pair.PostReceive(request); });
  });
}

int PostSharedReceive(ibv_srq* srq, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  return NumberEntry([&]() -> int {
    if (IsInherited(srq->context)) {
      *bad = requests;
      return ENODEV;
    }
    const NoCancellation no_cancellation;
    emu::SharedReceiveQueue& queue = *ToShim(srq)->queue;
    return PostReceives(requests, bad, [&](const emu::ReceiveRequest& request) { return queue.Post(request); });
  });
}

}  // namespace stagecoach::verbs::emulated
