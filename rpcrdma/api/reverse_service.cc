#include "rpcrdma/api/reverse_service.h"

#include <utility>

#include "rpcrdma/api/encode_message.h"

namespace stagecoach::rpcrdma::internal {
namespace {

Responder::Config ResponderConfig(const ReverseService::Options& options) {
  Responder::Config config;
  config.receives = options.shares.reverse_receives;
  config.terms = options.terms;
  config.inline_only = true;
  config.reverse = ReverseService::SupportOf(options.services, options.reads_max);
  config.reads_max = options.reads_max;
  config.data_limits.read_bytes_max = options.call_bytes_max;
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
  for (Service* service : options.services) services_[service->program()] = service;
}

void ReverseService::SetSendInline(uint32_t send_inline) {
  send_inline_ = send_inline;
  responder_.SetLimits(send_inline, 0, false);
}

void ReverseService::OnProgress() {
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
  if (verdict.service != nullptr) return verdict.service->Handle(Request(std::move(state)));
  if (verdict.reply) {
    return Finish(
        *state, *verdict.reply, [](XdrWriter&) {}, nullptr, false);
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
  if (connection_ != nullptr) connection_->Kick();
}

bool ReverseService::Encode(const RequestState& state, const ReplyHeader& header, Request::ResultsWriter results,
                            std::shared_ptr<const void> memory, bool copy_items) {
  auto encoded = EncodeMessage(&responder_.reply_buffer(state.id), send_inline_, kAnyEligible, [&](XdrWriter& out) {
    EncodeReply(header, out);  // [5666bis:8.3.5#5]
    results(out);
  });
  if (!encoded) return false;
  Responder::ReplySpec reply{
      .message_size = encoded->size, .items = std::move(encoded->items), .memory = std::move(memory)};
  if (copy_items && !reply.items.empty()) reply.memory = CopyItems(&reply.items);
  return responder_.Complete(state.id, std::move(reply), loop_.Now()).has_value();
}

}  // namespace stagecoach::rpcrdma::internal
