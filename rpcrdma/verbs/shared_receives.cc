#include "rpcrdma/verbs/shared_receives.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"

namespace stagecoach::rpcrdma::internal {
namespace {

using verbs::VerbsError;

// Of the Receives, those that are kept for connections to come.
constexpr uint32_t kSparePart = 4;

}  // namespace

verbs::VerbsResult<std::shared_ptr<SharedReceives>> SharedReceives::Create(ibv_context* context, uint32_t receives,
                                                                           uint32_t slot_size) {
  ibv_device_attr device = {};
  if (const int error = ibv_query_device(context, &device); error != 0) {
    return Err(VerbsError{.error = error, .call = "ibv_query_device"});
  }
  if (device.max_srq <= 0 || context->device->transport_type != IBV_TRANSPORT_IB) {
    return Err(VerbsError{.error = ENOTSUP, .call = "shared receive queue"});
  }
  // Any connection's completion queue may have to hold them all, beside what it sends.
  const int most = std::min(device.max_srq_wr, device.max_cqe / 2);
  if (most < 2) return Err(VerbsError{.error = ENOSPC, .call = "shared receive queue"});
  const uint32_t slots = std::clamp(receives, 2u, static_cast<uint32_t>(most));

  std::shared_ptr<SharedReceives> shared(new SharedReceives(slots, slot_size));
  auto domain = verbs::AllocatePd(context);
  if (!domain) return Err(domain.error());
  shared->domain_ = std::move(*domain);
  shared->regions_.Open(shared->domain_.get(), /*bindable=*/false);
  auto region = verbs::RegisterMemory(shared->domain_.get(), shared->memory_.data(), shared->memory_.size(),
                                      IBV_ACCESS_LOCAL_WRITE);
  if (!region) return Err(region.error());
  shared->region_ = std::move(*region);
  ibv_srq_init_attr attributes = {};
  attributes.attr.max_wr = slots;
  attributes.attr.max_sge = 1;
  shared->queue_ = ibv_create_srq(shared->domain_.get(), &attributes);
  if (shared->queue_ == nullptr) return Err(VerbsError{.error = errno, .call = "ibv_create_srq"});
  for (uint32_t slot = 0; slot < slots; ++slot) shared->to_post_.push_back(slot);
  shared->Post();
  if (!shared->to_post_.empty()) return Err(VerbsError{.error = ENOMEM, .call = "ibv_post_srq_recv"});
  return shared;
}

SharedReceives::SharedReceives(uint32_t receives, uint32_t slot_size)
    : slot_size_(slot_size),
      memory_(size_t{receives} * slot_size),
      held_(receives, true),
      budget_(std::make_shared<CreditBudget>(receives, receives / kSparePart)) {}

void SharedReceives::Close() {
  if (queue_ != nullptr) ibv_destroy_srq(std::exchange(queue_, nullptr));
  posted_ = 0;
  region_ = {};
  regions_.Close();
  domain_ = {};
}

void SharedReceives::OnTaken(uint32_t slot) {
  STAGECOACH_CHECK(slot < held_.size() && !held_[slot] && posted_ > 0);
  held_[slot] = true;
  --posted_;
}

void SharedReceives::Return(uint32_t slot) {
  STAGECOACH_CHECK(slot < held_.size() && held_[slot]);
  if (queue_ == nullptr) return;
  to_post_.push_back(slot);
  Post();
}

// The queue has room for all of them; what a device refuses all the same is tried again with the next.
void SharedReceives::Post() {
  while (!to_post_.empty()) {
    const uint32_t slot = to_post_.back();
    ibv_sge sge = {.addr = reinterpret_cast<uintptr_t>(place(slot)), .length = slot_size_, .lkey = region_->lkey};
    ibv_recv_wr request = {.wr_id = kReceiveId | slot, .next = nullptr, .sg_list = &sge, .num_sge = 1};
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_srq_recv(queue_, &request, &bad) != 0) return;
    to_post_.pop_back();
    held_[slot] = false;
    ++posted_;
  }
}

}  // namespace stagecoach::rpcrdma::internal
