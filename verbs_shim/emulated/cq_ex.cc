// Extended CQs: completions read field by field (ibv_create_cq_ex(3)).
//
// Offered are the standard fields and the completion timestamp, which is the fabric's clock in nanoseconds. Not offered
// (EOPNOTSUPP): wall-clock timestamps, VLAN and flow tags, tag matching. LIDs are zero, as in a plain ibv_wc here, and
// so is the service level but for a datagram's: they mean nothing on Ethernet.

#include <cerrno>
#include <mutex>

#include "verbs_shim/emulated/objects.h"

namespace stagecoach::verbs::emulated {
namespace {

constexpr uint64_t kFields = uint64_t{IBV_WC_STANDARD_FLAGS} | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
constexpr uint32_t kFlags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

ShimCq* ShimOf(ibv_cq_ex* cq) {
  return static_cast<ShimCq*>(cq);
}

int NextPoll(ibv_cq_ex* cq) {
  return NumberEntry([&]() -> int {
    if (IsInherited(cq->context)) return ENODEV;
    const NoCancellation no_cancellation;
    ShimCq* shim = ShimOf(cq);
    emu::WorkCompletion completion;
    if (shim->queue->Poll({&completion, 1}) == 0) return ENOENT;
    shim->current = ToIbv(completion);
    shim->current_at = completion.at;
    cq->status = shim->current.status;
    cq->wr_id = shim->current.wr_id;
    return 0;
  });
}

// Waits until nobody else polls. False in a simulated world where that can never be.
bool TakeTurn(ShimCq* shim) {
  if (shim->single_threaded) return true;
  std::unique_lock lock(shim->turn);
  emu::Fabric& fabric = NicOf(shim->context).fabric();
  if (shim->polled && !fabric.Wait(lock, shim->turn_over, [shim] { return !shim->polled; })) return false;
  shim->polled = true;
  return true;
}

void EndPoll(ibv_cq_ex* cq) {
  VoidEntry([&] {
    if (IsInherited(cq->context)) return;
    ShimCq* shim = ShimOf(cq);
    if (shim->single_threaded) return;
    {
      std::lock_guard lock(shim->turn);
      shim->polled = false;
    }
    shim->turn_over.notify_one();
  });
}

int StartPoll(ibv_cq_ex* cq, ibv_poll_cq_attr* attributes) {
  return NumberEntry([&]() -> int {
    if (IsInherited(cq->context)) return ENODEV;
    if (attributes->comp_mask != 0) return EINVAL;
    ShimCq* shim = ShimOf(cq);
    const NoCancellation no_cancellation;
    if (!TakeTurn(shim)) return EDEADLK;
    const int error = NextPoll(cq);
    // Then no ibv_end_poll follows.
    if (error != 0) EndPoll(cq);
    return error;
  });
}

ibv_wc_opcode ReadOpcode(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.opcode;
}
uint32_t ReadVendorError(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.vendor_err;
}
uint32_t ReadByteLength(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.byte_len;
}
// Also the key that a Send with Invalidate named (ibv_wc_read_invalidated_rkey): they share their storage.
__be32 ReadImmediate(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.imm_data;
}
uint32_t ReadQpNumber(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.qp_num;
}
uint32_t ReadSourceQp(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.src_qp;
}
unsigned ReadFlags(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.wc_flags;
}
uint32_t ReadSourceLid(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.slid;
}
uint8_t ReadServiceLevel(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.sl;
}
uint8_t ReadPathBits(ibv_cq_ex* cq) {
  return ShimOf(cq)->current.dlid_path_bits;
}
uint64_t ReadTimestamp(ibv_cq_ex* cq) {
  return static_cast<uint64_t>(ShimOf(cq)->current_at.time_since_epoch().count());
}

}  // namespace

ibv_cq_ex* CreateExtendedCq(ibv_context* context, ibv_cq_init_attr_ex* attributes) {
  return PointerEntry([&]() -> ibv_cq_ex* {
    if (IsInherited(context)) return FailWith(ENODEV);
    if ((attributes->comp_mask & ~uint32_t{IBV_CQ_INIT_ATTR_MASK_FLAGS}) != 0) return FailWith(EOPNOTSUPP);
    const uint32_t flags = (attributes->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0 ? attributes->flags : 0;
    if ((flags & ~kFlags) != 0 || (attributes->wc_flags & ~kFields) != 0) return FailWith(EOPNOTSUPP);
    ShimCq* cq = MakeCq(context, attributes->cqe, attributes->cq_context, attributes->channel, attributes->comp_vector,
                        {.ignore_overrun = (flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0,
                         .timestamps = (attributes->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0});
    if (cq == nullptr) return nullptr;
    cq->single_threaded = (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED) != 0;
    cq->start_poll = StartPoll;
    cq->next_poll = NextPoll;
    cq->end_poll = EndPoll;
    cq->read_opcode = ReadOpcode;
    cq->read_vendor_err = ReadVendorError;
    cq->read_wc_flags = ReadFlags;
    // The others exist where they were asked for.
    const uint64_t fields = attributes->wc_flags;
    if ((fields & IBV_WC_EX_WITH_BYTE_LEN) != 0) cq->read_byte_len = ReadByteLength;
    if ((fields & IBV_WC_EX_WITH_IMM) != 0) cq->read_imm_data = ReadImmediate;
    if ((fields & IBV_WC_EX_WITH_QP_NUM) != 0) cq->read_qp_num = ReadQpNumber;
    if ((fields & IBV_WC_EX_WITH_SRC_QP) != 0) cq->read_src_qp = ReadSourceQp;
    if ((fields & IBV_WC_EX_WITH_SLID) != 0) cq->read_slid = ReadSourceLid;
    if ((fields & IBV_WC_EX_WITH_SL) != 0) cq->read_sl = ReadServiceLevel;
    if ((fields & IBV_WC_EX_WITH_DLID_PATH_BITS) != 0) cq->read_dlid_path_bits = ReadPathBits;
    if ((fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0) cq->read_completion_ts = ReadTimestamp;
    return cq;
  });
}

}  // namespace stagecoach::verbs::emulated
