#include "rpcrdma/api/reverse_service.h"

#include <algorithm>
#include <utility>

#include "rpcrdma/api/encode_message.h"
#include "rpcrdma/verbs/lasting_memory.h"

namespace stagecoach::rpcrdma::internal {
namespace {

// What one call may offer for its reply, by Write chunks and Reply chunk together. Bytes.
constexpr uint64_t kOfferMax = 1u << 30;

Responder::Config ResponderConfig(const ReverseService::Options& options) {
  Responder::Config config;
  config.terms = options.terms;
  config.receives = options.shares.reverse_receives;
  config.inline_only = true;
  config.reverse = ReverseService::SupportOf(options.services, options.reads_max);
  config.reads_max = options.reads_max;
  config.data_limits = {.read_bytes_max = options.call_bytes_max, .write_bytes_max = kOfferMax};
  config.can_invalidate = true;  // [v2:8.4.1+2]
  config.send_inline = options.send_inline;
  config.name = options.name + "/reverse";
  return config;
}

}  // namespace

ReverseService::ReverseService(EventLoop& loop, const Options& options, Requester& requester, Connection& connection,
                               std::weak_ptr<void> owner)
    : loop_(loop),
      options_(options),
      connection_(&connection),
      owner_(std::move(owner)),
      send_inline_(options.send_inline),
      responder_(ResponderConfig(options), options.shares.reverse_send, connection.receive_arena(), connection,
                 options.trace),
      duplex_({.end = Duplex::End::kClient, .terms = options.terms}, requester, responder_, options.shares,
              connection.receive_arena()) {
  for (Service* service : options.services) {
    services_[service->program()] = service;
    for (const Binding& binding : service->bindings()) bindings_.Add(binding);
  }
}

ReverseService::~ReverseService() {
  // Buffers may outlive us, and with them the pool.
  options_.memory->OnFreed(nullptr);
  options_.pool->StopWaiting();
}

// [v2:1#2] [v2:4.2.2+1] What its application serves, and its device can do.
ReverseSupport ReverseService::SupportOf(const std::vector<Service*>& services, uint32_t reads_max) {
  if (services.empty()) return ReverseSupport::kNone;
  return reads_max > 0 ? ReverseSupport::kGeneral : ReverseSupport::kInline;
}

std::shared_ptr<MemoryAllowance> ReverseService::MakeAllowance(uint64_t call_bytes_max) {
  return std::make_shared<MemoryAllowance>(call_bytes_max +
                                           uint64_t{ChunkListLimits{}.read_segments_max} * BlockPool::kSmallest);
}

void ReverseService::Start() {
  // Memory is freed deep inside of handlers; calls get it from the loop.
  options_.memory->OnFreed([life = std::weak_ptr(life_), this] {
    if (!life.expired()) ProgressLater();
  });
  duplex_.Start();
}

void ReverseService::ProgressLater() {
  loop_.Post([owner = owner_, life = std::weak_ptr(life_), this] {
    const auto keep = owner.lock();
    if (keep == nullptr || life.expired() || connection_ == nullptr) return;
    OnProgress();
    if (connection_ != nullptr) connection_->Kick();
  });
}

void ReverseService::OnGone() {
  connection_ = nullptr;
  options_.pool->StopWaiting();
}

// Calls that wait for memory get what was freed.
void ReverseService::TryMemory() {
  if (options_.pool->TakeFreed()) {
    responder_.OnMemoryFreed(loop_.Now());
    // One may be there without anything that is still to come in from the device.
    if (responder_.has_request()) ProgressLater();
  }
  if (options_.pool->waiting() && responder_.waiting_for_memory() == 0) options_.pool->StopWaiting();
}

void ReverseService::SetSendInline(uint32_t send_inline) {
  send_inline_ = send_inline;
  responder_.SetLimits(send_inline, 0, false);
}

void ReverseService::OnVersionSettled() {
  responder_.OnVersionSettled(loop_.Now());
}

void ReverseService::OnProgress() {
  if (connected()) TryMemory();
  while (connected()) {
    const std::optional<RequestId> id = responder_.TakeRequest(loop_.Now());
    if (!id) return;
    ++executing_;
    Dispatch(*id);
  }
}

void ReverseService::Dispatch(RequestId id) {
  auto state = std::make_unique<RequestState>();
  state->connection = std::shared_ptr<RequestHost>(owner_.lock(), this);
  state->id = id;
  state->args = XdrReader(responder_.stream(id));
  const Verdict verdict = Judge(services_, responder_.xid(id), *state);
  std::optional<ReplyHeader> reply = verdict.reply;
  if (verdict.service != nullptr) {
    const std::optional<AcceptStat> refused = Bind(bindings_, responder_.stream(id), *state);
    if (!refused) return verdict.service->Handle(Request(std::move(state)));
    reply = ErrorReply(responder_.xid(id), *refused);
  }
  if (reply) {
    return Finish(
        *state, *reply, [](XdrWriter&) {}, nullptr, false);
  }
  --executing_;
  responder_.Drop(id, "not an RPC call", loop_.Now());
}

void ReverseService::Finish(RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
                            std::shared_ptr<const void> memory, bool copy_items) {
  // [5666bis:8.3.3+2]
  // What cannot be said inline is answered as a result that fits no Reply chunk is [5666bis:5.5#6].
  if (!Encode(state, header, results, std::move(memory), copy_items)) responder_.Refuse(state.id, loop_.Now());
  --executing_;
  active_at_ = loop_.Now();
  TryMemory();
  if (connection_ != nullptr) connection_->Kick();
}

bool ReverseService::Encode(const RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
                            std::shared_ptr<const void> memory, bool copy_items) {
  // In version 2 the reply goes by the chunks that were offered, whatever the server has said of itself [v2:4.2.2+7],
  // and where it does not fit the responder says how much room it would have needed.
  const uint32_t bytes_max = is_v2() ? options_.message_bytes_max : send_inline_;
  auto encoded =
      EncodeMessage(&responder_.reply_buffer(state.id), bytes_max, state.eligible_results, [&](XdrWriter& out) {
        EncodeReply(header, out);  // [5666bis:8.3.5#5]
        results(out);
      });
  if (!encoded) return false;
  LastingMemory* const lasting = memory != nullptr ? state.lasting.get() : nullptr;
  if (lasting != nullptr &&
      !std::ranges::all_of(encoded->items, [&](const EligibleItem& item) { return lasting->Contains(item.data); })) {
    return false;
  }
  Responder::ReplySpec reply{.message_size = encoded->size,
                             .items = std::move(encoded->items),
                             .memory = std::move(memory),
                             .lasting = lasting};
  if (copy_items && !reply.items.empty()) reply.memory = CopyItems(&reply.items);
  return responder_.Complete(state.id, std::move(reply), loop_.Now()).has_value();
}

}  // namespace stagecoach::rpcrdma::internal
