#include "emu/nic/queue/work_queues.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/nic/datagram/address_handles.h"

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
    : capacity_(std::max(capabilities.max_send_wr, 1u)),
      max_sge_(capabilities.max_send_sge),
      max_inline_(capabilities.max_inline),
      rules_(rules),
      slots_(capacity_) {}

SendQueue::Block* SendQueue::NewBlock() const {
  std::unique_ptr<Block> block(new (std::nothrow) Block);
  if (block == nullptr) return nullptr;
  block->sges.reset(new (std::nothrow) ScatterGather[kSlotsOfABlock * max_sge_]);
  block->inline_data.reset(new (std::nothrow) std::byte[kSlotsOfABlock * max_inline_]);
  if (block->sges == nullptr || block->inline_data == nullptr) return nullptr;
  if (rules_.kind != QpKind::kUd) return block.release();
  block->targets.reset(new (std::nothrow) DatagramTarget[kSlotsOfABlock]);
  if (block->targets == nullptr) return nullptr;
  for (size_t i = 0; i < kSlotsOfABlock; ++i) block->slots[i].target = &block->targets[i];
  return block.release();
}

int SendQueue::Check(const SendRequest& request, size_t ahead) {
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
    if (STAGECOACH_MUTANT("inline-length-wraps", "the lengths of inline data are added up in 32 bits")) {
      inline_size = static_cast<uint32_t>(inline_size);
    }
    if (inline_size > max_inline_) return EINVAL;
  }
  const uint64_t number = posted_.load(std::memory_order_relaxed) + ahead;
  const uint64_t retired = retired_.load(std::memory_order_acquire);
  if (number - retired >= capacity_) {
    STAGECOACH_MARK("qp.send_queue_full");
    return ENOMEM;
  }
  return slots_.Room(number, retired, [this] { return NewBlock(); }) ? 0 : ENOMEM;
}

int SendQueue::Add(const SendRequest& request) {
  if (const int error = Check(request)) return error;
  const uint64_t number = posted_.load(std::memory_order_relaxed);
  const size_t index = Slots::IndexOf(number);
  Block& block = slots_.BlockOf(number);
  SendSlot& slot = block.slots[index];
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
  if (slot.target != nullptr && IsDatagram(request.opcode)) *slot.target = TargetOf(request);
  if (request.is_inline) {
    std::byte* const data = block.inline_data.get() + index * max_inline_;
    size_t at = 0;
    for (const ScatterGather& sge : request.sges) {
      const ConstBytes piece = AsBytes(reinterpret_cast<const void*>(sge.address), sge.length);
      if (!SafeCopy(MutableBytes(data + at, sge.length), piece)) return EFAULT;
      at += sge.length;
    }
    slot.inline_data = ConstBytes(data, at);
  } else if (!request.sges.empty()) {
    ScatterGather* const sges = block.sges.get() + index * max_sge_;
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
                        .flow_label = to.vector.flow_label,
                        .foreign = to.nic != rules_.nic || to.pd != rules_.pd};
  // "A host MUST NOT send a datagram with a Time-to-Live (TTL) value of zero" (RFC 1122 section 3.2.1.7).
  if (to.vector.hop_limit != 0) target.hop_limit = to.vector.hop_limit;
  // With the general services every process has a QP of the same number: that of the first is meant.
  target.peer.slot = static_cast<uint8_t>(target.remote_qp >> kSlotShift);
  return target;
}

SendSlot& SendQueue::SlotOf(const SendWork* work) {
  // Ours, and given out as const only to be left alone.
  return *const_cast<SendSlot*>(static_cast<const SendSlot*>(work));
}

void SendQueue::FlushSubmitted() {
  for (uint64_t number = retired_.load(std::memory_order_relaxed); number < submitted_; ++number) {
    SendSlot& slot = At(number);
    if (!std::exchange(slot.done, true)) slot.status = CompletionStatus::kFlushed;
  }
}

SendSlot* SendQueue::OldestDone() {
  if (!HasUnretired()) return nullptr;
  SendSlot& slot = At(retired_.load(std::memory_order_relaxed));
  return slot.done ? &slot : nullptr;
}

void SendQueue::Clear() {
  slots_.Clear();
  posted_.store(0, std::memory_order_relaxed);
  retired_.store(0, std::memory_order_relaxed);
  submitted_ = 0;
}

ReceiveQueue::ReceiveQueue(const QpCapabilities& capabilities)
    : capacity_(std::max(capabilities.max_receive_wr, 1u)), max_sge_(capabilities.max_receive_sge), slots_(capacity_) {}

ReceiveQueue::Block* ReceiveQueue::NewBlock() const {
  std::unique_ptr<Block> block(new (std::nothrow) Block);
  if (block == nullptr) return nullptr;
  block->sges.reset(new (std::nothrow) ScatterGather[kSlotsOfABlock * max_sge_]);
  return block->sges != nullptr ? block.release() : nullptr;
}

int ReceiveQueue::Add(const ReceiveRequest& request) {
  if (request.sges.size() > max_sge_) return EINVAL;
  const uint64_t number = posted_.load(std::memory_order_relaxed);
  const uint64_t retired = retired_.load(std::memory_order_acquire);
  if (number - retired >= capacity_) {
    STAGECOACH_MARK("qp.receive_queue_full");
    return ENOMEM;
  }
  if (!slots_.Room(number, retired, [this] { return NewBlock(); })) return ENOMEM;
  const size_t index = Slots::IndexOf(number);
  Block& block = slots_.BlockOf(number);
  ReceiveWork& slot = block.slots[index];
  slot.wr_id = request.wr_id;
  slot.sges = {};
  if (!request.sges.empty()) {
    ScatterGather* const sges = block.sges.get() + index * max_sge_;
    std::copy(request.sges.begin(), request.sges.end(), sges);
    slot.sges = {sges, request.sges.size()};
  }
  posted_.store(number + 1, std::memory_order_release);
  return 0;
}

const ReceiveWork* ReceiveQueue::TakeReceive() {
  if (taken_ >= posted_.load(std::memory_order_acquire)) return nullptr;
  return &At(taken_++);
}

const ReceiveWork* ReceiveQueue::Oldest() {
  const uint64_t retired = retired_.load(std::memory_order_relaxed);
  return retired < posted_.load(std::memory_order_acquire) ? &At(retired) : nullptr;
}

void ReceiveQueue::Retire() {
  const uint64_t retired = retired_.load(std::memory_order_relaxed) + 1;
  retired_.store(retired, std::memory_order_release);
  if (taken_ < retired) taken_ = retired;
}

void ReceiveQueue::Clear() {
  slots_.Clear();
  posted_.store(0, std::memory_order_relaxed);
  retired_.store(0, std::memory_order_relaxed);
  taken_ = 0;
}

}  // namespace stagecoach::emu
