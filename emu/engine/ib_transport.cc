#include "emu/engine/ib_transport.h"

#include <array>
#include <utility>

#include "base/check.h"

namespace stagecoach::emu {

namespace {

// Section 9.6.1.1.2: keys match in their lower fifteen bits, and both ends must not be limited members. Ours is the
// default key, of a full member.
constexpr uint16_t kPkeyMask = 0x7fff;

}  // namespace

void QueueIbPacket(RecordSink& sink, wire::IbHeader header, std::span<const TxPart> payload, uint64_t cookie) {
  size_t size = 0;
  for (const TxPart& part : payload) size += part.size();
  header.pad = wire::IbPad(size);
  std::array<std::byte, wire::kMaxIbHeaderSize> bytes;
  ByteWriter out(bytes);
  header.Encode(out);
  STAGECOACH_CHECK(out.ok() && out.position() + size <= sink.MaxUlpdu());  // a carrier that does not fit the path MTU
  sink.QueueRecord(out.written(), payload, cookie);
}

IbTransport::IbTransport(const IbOptions& options, MemoryPort& memory, ReceiveSource& receives, TraceSink* trace,
                         std::string name)
    : context_{.options = options, .memory = memory, .receives = receives, .trace = trace, .name = std::move(name)},
      requester_(context_),
      responder_(context_),
      destination_(trace != nullptr) {
  STAGECOACH_CHECK(options.service != wire::IbService::kUd && options.mtu >= 256 && options.mtu <= 4096 &&
                   options.window_packets > 0);
}

// --- Commands ---

void IbTransport::SetAttributes(const IbOptions& options) {
  IbOptions next = options;
  next.service = context_.options.service;
  next.qp_number = context_.options.qp_number;
  next.destination_qp = context_.options.destination_qp;
  next.receive_psn = context_.options.receive_psn;
  next.mtu = context_.options.mtu;
  context_.options = next;
  requester_.OnOptions();
}

void IbTransport::StartSending() {
  if (!begun_psn_) begun_psn_ = context_.options.send_psn;
  if (state_ == State::kActive) requester_.StartSending();
}

void IbTransport::StopSending() {
  requester_.StopSending();
}

void IbTransport::Submit(const SendWork* work) {
  requester_.Submit(work);
}

void IbTransport::Flush() {
  if (state_ != State::kActive) return;
  Trace(context_.trace, context_.now, context_.name, "flush");
  BeginFailing();
}

void IbTransport::OnCarrier(bool up, Instant now) {
  context_.now = now;
  if (state_ == State::kEnded) return;
  Trace(context_.trace, now, context_.name, up ? "carrier.up" : "carrier.down");
  context_.carrier = up;
  half_ = Half::kNone;
  destination_.Clear();
  requester_.OnCarrier(up);
  responder_.OnCarrier(up);
  if (!up) nak_redial_ = state_ == State::kFailing && responder_.WantsCarrier();
  EndIfIdle();
}

bool IbTransport::TakeRedialWish() {
  const bool wish = requester_.TakeRedialWish() || std::exchange(nak_redial_, false);
  return wish && !context_.carrier && state_ != State::kEnded;
}

void IbTransport::OnUnreachable() {
  if (state_ != State::kActive) return;
  constexpr const char* kWhy = "the peer is out of reach";
  // What has failed of UC would stop the send queue alone.
  if (context_.acknowledged()) requester_.GiveUp(kWhy);
  if (!context_.fault) context_.Raise(FaultKind::kWork, /*syndrome=*/0, /*from_peer=*/false, kWhy);
  Settle();
}

std::array<std::byte, wire::kIbBthSize> IbTransport::UnreachableWord() const {
  const IbOptions& options = context_.options;
  return wire::EncodeIbUnreachable(options.destination_qp, begun_psn_.value_or(options.receive_psn));
}

// --- Receiving ---

bool IbTransport::IsForUs(const wire::IbHeader& header) const {
  return header.service == context_.options.service && header.destination_qp == context_.options.qp_number &&
         (header.pkey & kPkeyMask) == (wire::kIbDefaultPkey & kPkeyMask);
}

bool IbTransport::IsUnreachableWord(const RecordHead& record) const {
  const IbOptions& options = context_.options;
  const auto names = [&](uint32_t psn) {
    return wire::IsIbUnreachable(record.head, record.length, options.qp_number, psn);
  };
  return names(options.receive_psn) || (begun_psn_ && names(*begun_psn_));
}

std::optional<size_t> IbTransport::OnRecord(const RecordHead& record, Instant now) {
  context_.now = now;
  half_ = Half::kNone;
  if (state_ != State::kActive) return std::nullopt;
  if (IsUnreachableWord(record)) {
    half_ = Half::kUnreachable;
    return record.head.size();
  }
  const auto header = wire::DecodeIb(record.head, record.length);
  if (!header || !IsForUs(*header)) {
    Trace(context_.trace, now, context_.name, "packet.dropped",
          {{"why", header ? std::string("for another QP") : wire::ToString(header.error())}});
    return record.head.size();
  }
  const auto payload = static_cast<uint32_t>(record.length - header->EncodedSize());
  if (wire::IsResponse(header->op)) {
    half_ = Half::kRequester;
    requester_.Judge(*header, payload);
  } else {
    half_ = Half::kResponder;
    responder_.Judge(*header, payload);
  }
  return header->EncodedSize();
}

std::optional<std::span<const MutableBytes>> IbTransport::PinDestination() {
  if (state_ != State::kActive) return std::nullopt;
  destination_.Begin();
  if (half_ == Half::kRequester) requester_.Pin(destination_);
  if (half_ == Half::kResponder) responder_.Pin(destination_);
  return destination_.parts();
}

bool IbTransport::PlacementMayWait() const {
  return half_ == Half::kResponder && responder_.PlacementMayWait();
}

void IbTransport::OnPlacementFault(MemoryFault fault) {
  if (state_ != State::kActive) return;
  destination_.Clear();
  if (half_ == Half::kRequester) requester_.OnPlacementFault(fault);
  if (half_ == Half::kResponder) responder_.OnPlacementFault(fault);
}

void IbTransport::OnPlaced(Instant now) {
  context_.now = now;
  if (state_ != State::kActive) return;
  const Half half = std::exchange(half_, Half::kNone);
  if (half == Half::kRequester) requester_.Commit(destination_.trail());
  if (half == Half::kResponder) responder_.Commit(destination_.trail());
  if (half == Half::kUnreachable) return OnUnreachable();
  Settle();
}

// --- Sending ---

bool IbTransport::FillTx(RecordSink& sink, size_t budget) {
  bool any = false;
  while (budget > 0 && context_.carrier && sink.CanQueue() && QueueNext(sink)) {
    any = true;
    --budget;
    Settle();
  }
  Settle();
  EndIfIdle();
  return any;
}

// Answers and requests take turns, so that neither side's Reads can starve the other's progress.
bool IbTransport::QueueNext(RecordSink& sink) {
  if (state_ == State::kEnded) return false;
  if (state_ == State::kFailing) return responder_.QueueNext(sink);
  answer_turn_ = !answer_turn_;
  if (answer_turn_) return requester_.QueueNext(sink) || responder_.QueueNext(sink);
  return responder_.QueueNext(sink) || (state_ == State::kActive && requester_.QueueNext(sink));
}

void IbTransport::OnSent(uint64_t cookie) {
  if (state_ == State::kEnded) return;
  if (static_cast<IbCookie>(cookie & 3) == IbCookie::kRequest) {
    requester_.OnSent(cookie >> 2);
  } else {
    responder_.OnSent(cookie);
  }
  Settle();
  EndIfIdle();
}

void IbTransport::OnTxMemoryFault(uint64_t cookie, MemoryFault fault) {
  if (state_ == State::kEnded) return;
  if (static_cast<IbCookie>(cookie & 3) == IbCookie::kRequest) {
    requester_.OnTxMemoryFault(cookie >> 2, fault);
  } else {
    responder_.OnTxMemoryFault(cookie, fault);
  }
  Settle();
}

void IbTransport::OnLlpFault(uint8_t) {
  OnCarrier(false, context_.now);
}

void IbTransport::OnLost(bool) {
  OnCarrier(false, context_.now);
}

void IbTransport::OnDeadline(Instant now) {
  context_.now = now;
  requester_.OnDeadline(now);
  Settle();
}

void IbTransport::Excuse(bool again, Instant now) {
  context_.now = now;
  requester_.Excuse(again);
}

// --- Endings ---

void IbTransport::Settle() {
  if (!context_.fault) return;
  std::optional<TransportFault> raised = std::exchange(context_.fault, std::nullopt);
  if (state_ != State::kActive) return;  // it is failing for an earlier reason
  fault_ = std::move(raised);
  if (fault_->kind == FaultKind::kSendQueue) return;
  BeginFailing();
}

void IbTransport::BeginFailing() {
  state_ = State::kFailing;
  half_ = Half::kNone;
  destination_.Clear();
  requester_.Flush();
  responder_.Close();
  EndIfIdle();
}

void IbTransport::EndIfIdle() {
  if (state_ != State::kFailing) return;
  // Without a carrier only a NAK is worth waiting for another.
  if (context_.carrier ? !responder_.Idle() : responder_.WantsCarrier()) return;
  requester_.ForgetRecords();
  state_ = State::kEnded;
}

std::optional<TransportFault> IbTransport::TakeFault() {
  return std::exchange(fault_, std::nullopt);
}

}  // namespace stagecoach::emu
