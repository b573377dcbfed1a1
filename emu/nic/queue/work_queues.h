// The send and receive rings of a QP: work requests copied at post, in slots that are allocated as they are used
// (slot_ring.h).
//
// Each ring has two sides. Posters add at the head, serialised by the ring's own lock, so that posting never waits for
// a connection that is being moved. The connection's holder takes from there, and gives slots back at the tail when
// their work has completed. Head and tail are counters that only grow; a slot's contents pass from one side to the
// other with them (release, acquire).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "emu/engine/work.h"
#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/objects/work_types.h"
#include "emu/nic/queue/qp_attributes.h"
#include "emu/nic/queue/slot_ring.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {

// Where a datagram goes.
struct DatagramTarget {
  DatagramPeer peer;
  uint32_t remote_qp = 0;
  uint32_t remote_qkey = 0;
  uint8_t traffic_class = 0;
  uint8_t hop_limit = wire::kUsualHopLimit;
  uint32_t flow_label = 0;
  bool foreign = false;  // the handle is of another domain than the QP
};

// A posted send. The base is what the transport engine is given; local operations never reach it.
struct SendSlot : SendWork {
  PostOpcode posted = PostOpcode::kSend;
  WindowBinding bind;
  DatagramTarget* target = nullptr;  // of a UD QP
  bool done = false;
  CompletionStatus status = CompletionStatus::kSuccess;
  uint32_t byte_length = 0;
};

// What may be posted, besides what the capabilities say.
struct SendRules {
  QpKind kind = QpKind::kIwarp;
  uint32_t max_read_sge = 1;
  bool atomics = false;
  bool signal_all = false;
  // That address handles are to be of.
  const Nic* nic = nullptr;
  uint32_t pd = 0;
};

class SendQueue {
 public:
  SendQueue(const QpCapabilities& capabilities, const SendRules& rules);

  // --- Posters' side; `mutex()` held, which also orders posts with changes of the QP's state ---
  std::mutex& mutex() { return mutex_; }
  // Of iWARP: whether the connection has what RFC 7306 adds.
  void SetExtensions(bool extensions) { extensions_ = extensions; }
  // 0, EINVAL or ENOMEM (ibv_post_send(3)); EOPNOTSUPP for an operation that the device or connection does not have;
  // EFAULT for inline data that cannot be read.
  int Add(const SendRequest& request);
  // What Add would say of the request if `ahead` others were added first. Takes the memory that it will need.
  int Check(const SendRequest& request, size_t ahead = 0);

  // --- Holder's side ---
  bool HasUnsubmitted() const { return submitted_ < posted_.load(std::memory_order_acquire); }
  bool HasUnretired() const { return retired_.load(std::memory_order_relaxed) < submitted_; }
  // The next request in order of posting; HasUnsubmitted() must hold.
  SendSlot& NextToSubmit() { return At(submitted_); }
  void AdvanceSubmitted() { ++submitted_; }
  // Requests since the QP was made or reset: posted, and of these completed.
  uint64_t posted() const { return posted_.load(std::memory_order_acquire); }
  uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }
  // Of a datagram.
  static const DatagramTarget& TargetOf(const SendSlot& slot) { return *slot.target; }
  // The slot of work the engine was given.
  static SendSlot& SlotOf(const SendWork* work);
  // What was submitted and is not done is flushed: nobody has it any more.
  void FlushSubmitted();
  // The oldest submitted request if it is done, else null.
  SendSlot* OldestDone();
  // Whether everything before this submitted request has been retired.
  bool IsOldest(const SendSlot& slot) const { return &slot == &At(retired_.load(std::memory_order_relaxed)); }
  void Retire() { retired_.store(retired_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
  // Forgets everything; mutex() held as well.
  void Clear();

 private:
  struct Block {
    std::array<SendSlot, kSlotsOfABlock> slots;
    std::unique_ptr<ScatterGather[]> sges;      // max_sge_ for each slot
    std::unique_ptr<std::byte[]> inline_data;   // max_inline_ for each slot
    std::unique_ptr<DatagramTarget[]> targets;  // of a UD QP: one for each slot
    Block* next = nullptr;
  };
  using Slots = SlotRing<Block>;

  SendSlot& At(uint64_t number) const { return slots_.BlockOf(number).slots[Slots::IndexOf(number)]; }
  // Null for want of memory.
  Block* NewBlock() const;
  DatagramTarget TargetOf(const SendRequest& request) const;

  const uint32_t capacity_;
  const uint32_t max_sge_;
  const uint32_t max_inline_;
  const SendRules rules_;
  std::mutex mutex_;
  bool extensions_ = false;  // guarded by mutex_
  Slots slots_;
  std::atomic<uint64_t> posted_{0};
  uint64_t submitted_ = 0;
  std::atomic<uint64_t> retired_{0};
};

class ReceiveQueue final : public ReceiveSource {
 public:
  explicit ReceiveQueue(const QpCapabilities& capabilities);

  std::mutex& mutex() { return mutex_; }
  int Add(const ReceiveRequest& request);

  // --- Holder's side ---
  const ReceiveWork* TakeReceive() override;
  // The oldest Receive not retired; null when there is none. For flushing.
  const ReceiveWork* Oldest();
  void Retire();
  uint64_t posted() const { return posted_.load(std::memory_order_acquire); }
  uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }
  void Clear();

 private:
  struct Block {
    std::array<ReceiveWork, kSlotsOfABlock> slots;
    std::unique_ptr<ScatterGather[]> sges;
    Block* next = nullptr;
  };
  using Slots = SlotRing<Block>;

  ReceiveWork& At(uint64_t number) const { return slots_.BlockOf(number).slots[Slots::IndexOf(number)]; }
  Block* NewBlock() const;

  const uint32_t capacity_;
  const uint32_t max_sge_;
  std::mutex mutex_;
  Slots slots_;
  std::atomic<uint64_t> posted_{0};
  uint64_t taken_ = 0;
  std::atomic<uint64_t> retired_{0};
};

}  // namespace stagecoach::emu
