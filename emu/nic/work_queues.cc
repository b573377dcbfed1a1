#include "emu/nic/work_queues.h"

#include <algorithm>
#include <cerrno>

#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/nic/address_handles.h"

namespace stagecoach::emu {
namespace {

SendOpcode EngineOpcode(PostOpcode opcode) {
  switch (opcode) {
    case PostOpcode::kSendInvalidate:
      return SendOpcode::kSendInvalidate;
    case PostOpcode::kWrite:
      return SendOpcode::kWrite;
    case PostOpcode::kRead:
      return SendOpcode::kRead;
    case PostOpcode::kSendImmediate:
      return SendOpcode::kSendImmediate;
    case PostOpcode::kWriteImmediate:
      return SendOpcode::kWriteImmediate;
    case PostOpcode::kCompareSwap:
      return SendOpcode::kCompareSwap;
    case PostOpcode::kFetchAdd:
      return SendOpcode::kFetchAdd;
    case PostOpcode::kSend:
    case PostOpcode::kLocalInvalidate:
    case PostOpcode::kBindWindow:
      break;
  }
  return SendOpcode::kSend;
}

// 0 if such a QP of this device does it.
int CheckOpcode(const SendRules& rules, bool extensions, PostOpcode opcode) {
  if (rules.kind == QpKind::kIwarp) {
    // RFC 5040 has a message for none of these, RFC 7306 for all but the first.
    if (opcode == PostOpcode::kSendImmediate) return EOPNOTSUPP;
    return (opcode == PostOpcode::kWriteImmediate || IsAtomic(opcode)) && !extensions ? EOPNOTSUPP : 0;
  }
  // What QPs of a type do not carry out is found out when its turn comes.
  return IsAtomic(opcode) && !rules.atomics && rules.kind != QpKind::kUd ? EOPNOTSUPP : 0;
}

}  // namespace

SendQueue::SendQueue(const QpCapabilities& capabilities, const SendRules& rules)
    : max_sge_(capabilities.max_send_sge),
      max_inline_(capabilities.max_inline),
      rules_(rules),
      slots_(std::max(capabilities.max_send_wr, 1u)),
      sges_(slots_.size() * max_sge_),
      inline_data_(slots_.size() * max_inline_),
      targets_(rules.kind == QpKind::kUd ? slots_.size() : 0) {}

int SendQueue::Check(const SendRequest& request, size_t ahead) const {
  if (const int error = CheckOpcode(rules_, extensions_, request.opcode)) return error;
  if (rules_.kind == QpKind::kUd && IsDatagram(request.opcode) && request.destination == nullptr) return EINVAL;
  if (request.sges.size() > max_sge_) return EINVAL;
  const bool is_read = request.opcode == PostOpcode::kRead;
  // What an answer is to be put into cannot be inline.
  if ((is_read || IsAtomic(request.opcode)) && request.is_inline) return EINVAL;
  if (is_read && request.sges.size() > rules_.max_read_sge) return EINVAL;
  uint64_t inline_size = 0;
  if (request.is_inline) {
    for (const ScatterGather& sge : request.sges) inline_size += sge.length;
    if (inline_size > max_inline_) return EINVAL;
  }
  const uint64_t number = posted_.load(std::memory_order_relaxed) + ahead;
  if (number - retired_.load(std::memory_order_acquire) < slots_.size()) return 0;
  STAGECOACH_MARK("qp.send_queue_full");
  return ENOMEM;
}

int SendQueue::Add(const SendRequest& request) {
  if (const int error = Check(request)) return error;
  const uint64_t number = posted_.load(std::memory_order_relaxed);
  const size_t index = number % slots_.size();
  SendSlot& slot = slots_[index];
  slot.wr_id = request.wr_id;
  slot.opcode = EngineOpcode(request.opcode);
  slot.signaled = request.signaled || rules_.signal_all;
  slot.solicited = request.solicited;
  slot.fence = request.fence;
  slot.is_inline = request.is_inline;
  slot.remote_stag = request.remote_stag;
  slot.remote_offset = request.remote_offset;
  slot.immediate = request.immediate;
  slot.compare_add = request.compare_add;
  slot.swap = request.swap;
  slot.posted = request.opcode;
  slot.bind = request.bind;
  slot.done = false;
  slot.status = CompletionStatus::kSuccess;
  slot.byte_length = 0;
  slot.sges = {};
  slot.inline_data = {};
  if (!targets_.empty() && IsDatagram(request.opcode)) targets_[index] = TargetOf(request);
  if (request.is_inline) {
    std::byte* const data = inline_data_.data() + index * max_inline_;
    size_t at = 0;
    for (const ScatterGather& sge : request.sges) {
      const ConstBytes piece = AsBytes(reinterpret_cast<const void*>(sge.address), sge.length);
      if (!SafeCopy(MutableBytes(data + at, sge.length), piece)) return EFAULT;
      at += sge.length;
    }
    slot.inline_data = ConstBytes(data, at);
  } else if (!request.sges.empty()) {
    ScatterGather* const sges = sges_.data() + index * max_sge_;
    std::copy(request.sges.begin(), request.sges.end(), sges);
    slot.sges = {sges, request.sges.size()};
  }
  posted_.store(number + 1, std::memory_order_release);
  return 0;
}

DatagramTarget SendQueue::TargetOf(const SendRequest& request) const {
  const AddressHandle& to = *request.destination;
  DatagramTarget target{.peer = to.peer,
                        .remote_qp = request.remote_qp & wire::kIbQpMask,
                        .remote_qkey = request.remote_qkey,
                        .traffic_class = to.vector.traffic_class,
                        .foreign = to.nic != rules_.nic || to.pd != rules_.pd};
  // With the general services every process has a QP of the same number: that of the first is meant.
  target.peer.slot = static_cast<uint8_t>(target.remote_qp >> kSlotShift);
  return target;
}

SendSlot& SendQueue::SlotOf(const SendWork* work) {
  return slots_[static_cast<size_t>(static_cast<const SendSlot*>(work) - slots_.data())];
}

SendSlot* SendQueue::OldestDone() {
  if (!HasUnretired()) return nullptr;
  SendSlot& slot = At(retired_.load(std::memory_order_relaxed));
  return slot.done ? &slot : nullptr;
}

void SendQueue::Clear() {
  posted_.store(0, std::memory_order_relaxed);
  retired_.store(0, std::memory_order_relaxed);
  submitted_ = 0;
}

ReceiveQueue::ReceiveQueue(const QpCapabilities& capabilities)
    : max_sge_(capabilities.max_receive_sge),
      slots_(std::max(capabilities.max_receive_wr, 1u)),
      sges_(slots_.size() * max_sge_) {}

int ReceiveQueue::Add(const ReceiveRequest& request) {
  if (request.sges.size() > max_sge_) return EINVAL;
  const uint64_t number = posted_.load(std::memory_order_relaxed);
  if (number - retired_.load(std::memory_order_acquire) >= slots_.size()) {
    STAGECOACH_MARK("qp.receive_queue_full");
    return ENOMEM;
  }
  const size_t index = number % slots_.size();
  ReceiveWork& slot = slots_[index];
  slot.wr_id = request.wr_id;
  slot.sges = {};
  if (!request.sges.empty()) {
    ScatterGather* const sges = sges_.data() + index * max_sge_;
    std::copy(request.sges.begin(), request.sges.end(), sges);
    slot.sges = {sges, request.sges.size()};
  }
  posted_.store(number + 1, std::memory_order_release);
  return 0;
}

const ReceiveWork* ReceiveQueue::TakeReceive() {
  if (taken_ >= posted_.load(std::memory_order_acquire)) return nullptr;
  return &slots_[taken_++ % slots_.size()];
}

const ReceiveWork* ReceiveQueue::Oldest() {
  const uint64_t retired = retired_.load(std::memory_order_relaxed);
  return retired < posted_.load(std::memory_order_acquire) ? &slots_[retired % slots_.size()] : nullptr;
}

void ReceiveQueue::Retire() {
  const uint64_t retired = retired_.load(std::memory_order_relaxed) + 1;
  retired_.store(retired, std::memory_order_release);
  if (taken_ < retired) taken_ = retired;
}

void ReceiveQueue::Clear() {
  posted_.store(0, std::memory_order_relaxed);
  retired_.store(0, std::memory_order_relaxed);
  taken_ = 0;
}

}  // namespace stagecoach::emu
