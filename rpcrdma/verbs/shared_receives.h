// SharedReceives: Receives that all connections of a server draw on (a shared receive queue), and the buffers behind
// them.
//
// A connection takes a buffer when a message comes and gives it back when the call is answered; then it is posted again
// at once, before the reply's Send, so the queue is refilled as fast as it is used and the limit event of SRQs has
// nothing to tell. How many calls each connection may have is CreditBudget's to say: what is granted to all of them is
// never more than there are Receives.
//
// Not on iWARP. A queue pair and its SRQ are in one protection domain, and there the sink of an RDMA Read is open to
// remote writes: one connection's steering tags would be good on every other. On InfiniBand a server opens nothing, and
// these buffers are for local writes alone (ARCHITECTURE section 7).
//
// Not thread-safe: on the loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "rpcrdma/core/credit_budget.h"
#include "rpcrdma/verbs/lasting_memory.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {

class SharedReceives {
 public:
  // In wr_id, beside the number of the buffer: what tells a Receive from a Send.
  static constexpr uint64_t kReceiveId = uint64_t{1} << 63;

  // `receives` buffers of `slot_size` bytes, fewer when the device's queues are short. ENOTSUP where connections need
  // Receives of their own.
  static verbs::VerbsResult<std::shared_ptr<SharedReceives>> Create(ibv_context* context, uint32_t receives,
                                                                    uint32_t slot_size);
  ~SharedReceives() { Close(); }
  SharedReceives(const SharedReceives&) = delete;
  SharedReceives& operator=(const SharedReceives&) = delete;

  // Lets go of the device. No queue pair uses it any more; buffers that are held stay readable.
  void Close();

  ibv_pd* domain() const { return domain_.get(); }
  // What the program has registered there, for all connections.
  DomainRegions& regions() { return regions_; }
  ibv_srq* queue() const { return queue_; }
  uint32_t slots() const { return static_cast<uint32_t>(held_.size()); }
  uint32_t posted() const { return posted_; }
  uint32_t slot_size() const { return slot_size_; }
  std::byte* place(uint32_t slot) { return memory_.data() + size_t{slot} * slot_size_; }
  const std::shared_ptr<CreditBudget>& budget() const { return budget_; }

  // A message came in this buffer, or its Receive was flushed.
  void OnTaken(uint32_t slot);
  // It is not looked at any more.
  void Return(uint32_t slot);

 private:
  SharedReceives(uint32_t receives, uint32_t slot_size);
  void Post();

  const uint32_t slot_size_;
  std::vector<std::byte> memory_;
  std::vector<bool> held_;  // by a connection, or not accepted by the device
  std::vector<uint32_t> to_post_;
  uint32_t posted_ = 0;
  const std::shared_ptr<CreditBudget> budget_;
  verbs::ProtectionDomain domain_;
  verbs::MemoryRegion region_;
  DomainRegions regions_;
  ibv_srq* queue_ = nullptr;
};

}  // namespace stagecoach::rpcrdma::internal
