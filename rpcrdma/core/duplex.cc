#include "rpcrdma/core/duplex.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mutant.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

BufferArena Part(BufferArena arena, uint32_t first, uint32_t slots) {
  arena.first = first;
  arena.slots = slots;
  return arena;
}

}  // namespace

// Each message of the reverse direction asks for a completion of its own, so a few beyond the calls are enough for
// those on their way home.
uint32_t ReverseSendBuffers(uint32_t reverse) {
  return reverse + 2;
}

// [5666bis:8.2.1+1] [5666:3.3+3] [5666bis:8.2.1+2] [5666bis:8.2.1+3] [5666bis:8.2.2.1+1] [5666bis:8.2.2.2+1]
// [5666bis:8.2.2.2+2] A Receive for each credit that is granted and each reply that is expected, of either direction.
std::optional<DuplexShares> DivideForDuplex(const BufferArena& send, const BufferArena& receive, uint32_t forward,
                                            uint32_t reverse) {
  STAGECOACH_CHECK(forward > 0 && reverse > 0 && send.first == 0 && receive.first == 0);
  if (send.slots < 2 || receive.slots < 2) return std::nullopt;
  DuplexShares shares;
  const uint64_t wanted = uint64_t{forward} + reverse;
  shares.reverse_receives = reverse;
  if (receive.slots < wanted) {
    shares.reverse_receives = static_cast<uint32_t>(std::max<uint64_t>(uint64_t{receive.slots} * reverse / wanted, 1));
  }
  shares.forward_receives = receive.slots - shares.reverse_receives;
  // The larger half stays with the forward direction, whose Sends ask for completions seldom: as many as may go without
  // one must not take all its buffers (queue_sizes.h).
  const uint32_t reverse_sends = std::min(ReverseSendBuffers(shares.reverse_receives), send.slots / 2);
  shares.forward_send = Part(send, 0, send.slots - reverse_sends);
  shares.reverse_send = Part(send, send.slots - reverse_sends, reverse_sends);
  return shares;
}

Duplex::Duplex(const Config& config, Requester& requester, Responder& responder, const DuplexShares& shares,
               const BufferArena& receive)
    : config_(config),
      terms_(config.terms != nullptr ? *config.terms
                                     : own_terms_.emplace(ConnectionTerms::Config{.list_limits = config.list_limits})),
      requester_(requester),
      responder_(responder),
      first_reverse_send_(shares.reverse_send.first),
      receive_(receive) {
  STAGECOACH_CHECK(shares.forward_receives + shares.reverse_receives == receive.slots);
  STAGECOACH_CHECK(receive.slots < kRequesterTag && first_reverse_send_ + shares.reverse_send.slots < kRequesterTag);
}

// [5666bis:8.2.2+1] [5666bis:8.2.2.1+2] [5666bis:8.2.2.2+3] All Receives, before anything is sent; a connection that
// takes the place of another has its own.
void Duplex::Start() {
  requester_.Start();
  responder_.Start();
  for (uint32_t slot = 0; slot < receive_.slots; ++slot) receives_.push(slot);
}

// --- Receiving ---

void Duplex::OnReceive(uint32_t slot, uint32_t length, std::optional<uint32_t> invalidated, Instant now) {
  STAGECOACH_CHECK(slot < receive_.slots && length <= receive_.slot_size && posted_receives_ > 0);
  --posted_receives_;
  // Whatever it came with, this steering tag is dead now.
  if (invalidated) requester_.OnInvalidatedByPeer(*invalidated, now);

  ByteReader in(receive_.slot(slot).first(length));
  Result<Header, HeaderFault> header = terms_.Decode(in);
  if (!header) {
    if (RouteOf(header.error()) == Side::kRequester) {
      requester_.OnMalformed(slot, length, header.error(), now);
    } else {
      responder_.OnMalformed(slot, length, header.error(), now);
    }
    return;
  }
  const ConstBytes message = in.Rest();
  const Side side = Route(*header, message);
  const bool properties = header->type() == MessageType::kConnProp;
  if (side == Side::kRequester) {
    requester_.OnMessage(slot, std::move(*header), message, now);
  } else {
    responder_.OnMessage(slot, std::move(*header), message, now);
    if (properties) requester_.OnPeerProperties(now);
  }
}

// [v2:3.2+3] Where the flags can be read they say it, whatever is wrong behind them. Another version's cannot.
Duplex::Side Duplex::RouteOf(const HeaderFault& fault) const {
  if (!fault.flags) return forward();
  return (*fault.flags & kFlagResponse) != 0 ? Side::kRequester : Side::kResponder;
}

// [5666bis:8.1.3+1] [5666bis:8.3.3+1] Messages of both directions, in the same Receives.
Duplex::Side Duplex::Route(const Header& header, ConstBytes message) const {
  // [v2:3.2#2] [v2:3.2+3] Never by an XID, which the other direction may have, too, nor by the direction of the RPC
  // message, which a long one does not show.
  if (header.flags) return header.is_response() ? Side::kRequester : Side::kResponder;
  const ChunkLists* lists = header.chunks();
  if (lists == nullptr) return header.type() == MessageType::kError ? Side::kRequester : forward();
  if (!header.has_inline_message()) return lists->reads.empty() ? forward() : Side::kResponder;
  if (requester_.Knows(header.xid) &&
      STAGECOACH_MUTANT("reverse-routed-by-xid", "what has the XID of a call under way is taken for its reply")) {
    return Side::kRequester;
  }
  // [5666bis:8.3.4#5] [5666bis:8.3.5#5]
  const std::optional<MessagePrefix> prefix = PeekMessage(message);
  if (!prefix) return forward();
  return prefix->direction == MessageDirection::kCall ? Side::kResponder : Side::kRequester;
}

// --- What the other completions belong to ---

void Duplex::OnSendDone(uint32_t slot, Instant now) {
  const bool of_requester = (slot < first_reverse_send_) == (forward() == Side::kRequester);
  if (of_requester) {
    requester_.OnSendDone(slot, now);
  } else {
    responder_.OnSendDone(slot, now);
  }
}

void Duplex::OnReadDone(uint32_t tag, Instant now) {
  if ((tag & kRequesterTag) != 0) {
    requester_.OnReadDone(tag & ~kRequesterTag, now);
  } else {
    responder_.OnReadDone(tag, now);
  }
}

void Duplex::OnInvalidated(uint32_t tag, Instant now) {
  if ((tag & kRequesterTag) != 0) {
    requester_.OnInvalidated(tag & ~kRequesterTag, now);
  } else {
    responder_.OnInvalidated(tag, now);
  }
}

void Duplex::OnDisconnected(Instant now) {
  requester_.OnDisconnected(now);
  responder_.OnDisconnected(now);
  receives_.clear();
  calls_.clear();
  replies_.clear();
  posted_receives_ = 0;
}

// --- Commands ---

void Duplex::Collect(ConnectionEngine& engine, Ring<Command>* commands) {
  while (std::optional<Command> command = engine.TakeCommand()) {
    if (const auto* receive = std::get_if<PostReceive>(&*command)) {
      receives_.push(receive->slot);
      continue;
    }
    // Few buffers that many Sends of the other direction stand between: their completion is asked for.
    auto* send = std::get_if<PostSend>(&*command);
    if (send != nullptr && send->slot >= first_reverse_send_) send->prompt = true;
    if (&engine == &requester_) {
      if (auto* read = std::get_if<PostRead>(&*command)) read->tag |= kRequesterTag;
      if (auto* invalidate = std::get_if<Invalidate>(&*command)) invalidate->tag |= kRequesterTag;
    }
    commands->push(*command);
  }
}

std::optional<Command> Duplex::TakeCommand() {
  Collect(requester_, &calls_);
  Collect(responder_, &replies_);
  if (!receives_.empty()) {
    ++posted_receives_;
    return PostReceive{receives_.pop()};
  }
  if (calls_.empty() && replies_.empty()) return std::nullopt;
  const bool reply = replies_next_ ? !replies_.empty() : calls_.empty();
  replies_next_ = !reply;
  return reply ? replies_.pop() : calls_.pop();
}

// --- Time ---

std::optional<Instant> Duplex::Deadline() const {
  const std::optional<Instant> one = requester_.Deadline();
  const std::optional<Instant> other = responder_.Deadline();
  return one && other ? std::min(*one, *other) : one ? one : other;
}

void Duplex::OnDeadline(Instant now) {
  requester_.OnDeadline(now);
  responder_.OnDeadline(now);
}

}  // namespace stagecoach::rpcrdma
