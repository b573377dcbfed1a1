#include "emu/tap/injection_tap.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <optional>
#include <utility>

#include "emu/engine/ring.h"
#include "emu/llp/llp_over.h"
#include "emu/wire/ib.h"
#include "emu/wire/rdmap.h"

namespace stagecoach::emu {
namespace {

// Records that wait here. Enough for a window of small ones; what is in them stays where it is.
constexpr size_t kMostHeld = 1024;
// Records that are thrown away before the owner has its turn.
constexpr size_t kMostDiscarded = 64;

MessageKind KindOf(wire::RdmapOpcode opcode) {
  using wire::RdmapOpcode;
  switch (opcode) {
    case RdmapOpcode::kWrite:
      return MessageKind::kWrite;
    case RdmapOpcode::kReadRequest:
      return MessageKind::kRead;
    case RdmapOpcode::kReadResponse:
      return MessageKind::kReadResponse;
    case RdmapOpcode::kSend:
    case RdmapOpcode::kSendInvalidate:
    case RdmapOpcode::kSendSolicited:
    case RdmapOpcode::kSendSolicitedInvalidate:
      return MessageKind::kSend;
    case RdmapOpcode::kTerminate:
      return MessageKind::kTerminate;
    case RdmapOpcode::kImmediate:
    case RdmapOpcode::kImmediateSolicited:
      return MessageKind::kImmediate;
    case RdmapOpcode::kAtomicRequest:
      return MessageKind::kAtomic;
    case RdmapOpcode::kAtomicResponse:
      return MessageKind::kAtomicResponse;
  }
  return MessageKind::kSend;
}

MessageKind KindOf(wire::IbOp op) {
  if (wire::IsSend(op)) return MessageKind::kSend;
  if (wire::IsWrite(op)) return MessageKind::kWrite;
  if (wire::IsReadResponse(op)) return MessageKind::kReadResponse;
  if (wire::IsAtomic(op)) return MessageKind::kAtomic;
  if (op == wire::IbOp::kAtomicAck) return MessageKind::kAtomicResponse;
  return op == wire::IbOp::kReadRequest ? MessageKind::kRead : MessageKind::kAck;
}

std::optional<SegmentFacts> FactsOfSegment(ConstBytes head, size_t length) {
  const auto header = wire::DecodeSegment(head, length, wire::RdmapExtensions::kRfc7306);
  if (!header) return std::nullopt;
  const MessageKind kind = KindOf(header->opcode());
  const bool empty = kind == MessageKind::kRead ? header->read_request.length == 0
                                                : header->tagged() && length == header->EncodedSize();
  return SegmentFacts{.kind = kind, .ends = header->last, .empty = empty, .packet = std::nullopt};
}

std::optional<SegmentFacts> FactsOfPacket(ConstBytes head, size_t length, uint32_t mtu) {
  const auto header = wire::DecodeIb(head, length);
  if (!header) return std::nullopt;
  SegmentFacts facts{
      .kind = KindOf(header->op), .ends = wire::EndsMessage(header->op), .empty = false, .packet = std::nullopt};
  if (facts.kind == MessageKind::kAck) return facts;
  SegmentFacts::Packet& packet = facts.packet.emplace(SegmentFacts::Packet{});
  packet.psn = header->psn;
  packet.begins = wire::BeginsMessage(header->op);
  switch (facts.kind) {
    case MessageKind::kRead:
      facts.empty = header->dma_length == 0;
      packet.count = std::max<uint32_t>(1, header->dma_length / mtu + (header->dma_length % mtu != 0));
      break;
    case MessageKind::kWrite:
      // With immediate data it is one all the same.
      facts.empty = packet.begins && header->dma_length == 0 && !wire::HasImmediate(header->op);
      break;
    case MessageKind::kReadResponse:
      facts.empty = packet.begins && facts.ends && length == header->EncodedSize();
      break;
    default:
      break;
  }
  return facts;
}

class InjectionTap final : public LlpOver {
 public:
  InjectionTap(std::unique_ptr<Llp> below, std::shared_ptr<ConnectionInjections> injections,
               InjectionTapOptions options)
      : LlpOver(std::move(below)), injections_(std::move(injections)), options_(std::move(options)) {}

  bool IsReliable() const override { return options_.transport == InjectionTransport::kIwarp && below().IsReliable(); }
  bool CanQueue() const override {
    if (LosesAll()) return true;
    return IsStalled() || !held_.empty() ? held_.size() < kMostHeld : below().CanQueue();
  }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override;
  TxResult Flush(MemoryPort& memory) override;
  bool TakeSent(uint64_t* cookie) override;
  bool TxIdle() const override {
    return queued_.empty() && held_.empty() && !overtaken_ && !HasFarewell() && below().TxIdle();
  }

  RxResult NextRecord(RecordHead* record) override;
  Hold hold() const override {
    Hold hold{.receiving = IsStalled() && !LosesAll(), .more = more_, .until = std::nullopt};
    if (!held_.empty() && !IsStalled() && !blocked_) hold.until = held_.front().due;
    return hold;
  }

 private:
  // Queued and not reported as sent, in order.
  struct Queued {
    uint64_t cookie = 0;
    bool lost = false;  // never given to the layer below
    bool told = true;   // false: of two, the first
  };
  // A copy of a record that was not given to the layer below yet.
  struct Record {
    std::vector<std::byte> header;
    std::vector<TxPart> payload;
    uint64_t cookie = 0;
    bool twice = false;
  };
  struct Held {
    Record record;
    Instant due{};
    bool lost = false;
  };

  bool IsSevered() const { return injections_->end() == InjectionAction::kDisconnect; }
  bool IsStalled() const { return injections_->end() == InjectionAction::kStall; }
  bool Resets() const { return IsSevered() && options_.transport == InjectionTransport::kIwarp; }
  // An InfiniBand network that is silent loses packets; a TCP connection keeps what it has.
  bool LosesAll() const {
    return IsSevered() || (IsStalled() && options_.transport == InjectionTransport::kInfiniband);
  }

  InjectionVerdict Judge(InjectionDirection direction, ConstBytes head, size_t length,
                         ActionSet possible = kAllActions);
  void Pass(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie, bool twice);
  void Pass(const Record& record) { Pass(record.header, record.payload, record.cookie, record.twice); }
  void PassOvertaken() {
    const Record record = *std::exchange(overtaken_, std::nullopt);
    if (!is_passed_) injections_->NotOvertaken();
    Pass(record);
  }
  // It goes with what it waited for.
  void ForgetOvertaken() {
    if (overtaken_ && !is_passed_) injections_->NotOvertaken();
    overtaken_.reset();
  }
  void TellFired() { TraceFired(options_.trace, options_.fabric.Now(), options_.name, injections_->fired()); }
  // The farewell waits for room.
  bool HasFarewell() const { return IsSevered() && !cut_; }
  bool HasDue() const { return !IsStalled() && !held_.empty() && held_.front().due <= options_.fabric.Now(); }
  void Lose(uint64_t cookie) {
    // Of a stream that is about to be reset nothing more counts as sent.
    if (Resets()) return;
    if (LosesAll()) LoseHeld();
    // What waits was queued before it.
    if (!held_.empty()) {
      held_.push_back({{.cookie = cookie}, last_due_, /*lost=*/true});
    } else {
      queued_.push_back({.cookie = cookie, .lost = true});
    }
  }
  void LoseHeld() {
    if (overtaken_ && !Resets()) queued_.push_back({.cookie = overtaken_->cookie, .lost = true});
    ForgetOvertaken();
    for (const Held& held : held_) {
      if (!Resets()) queued_.push_back({.cookie = held.record.cookie, .lost = true});
    }
    held_.clear();
  }
  void Cut();

  const std::shared_ptr<ConnectionInjections> injections_;
  const InjectionTapOptions options_;

  Ring<Queued> queued_;
  std::deque<Held> held_;
  std::optional<Record> overtaken_;
  bool gone_ahead_ = false;    // one that came behind overtaken_ has not waited here
  bool is_passed_ = false;     // one has passed overtaken_
  Instant last_due_{};         // of what was delayed
  bool blocked_ = false;       // the stream takes no more
  bool cut_ = false;           // nothing more is to be said to the peer
  bool more_ = false;          // NextRecord has thrown away as much as it may
  size_t discarded_head_ = 0;  // of a record that has arrived and is lost; 0: there is none
};

InjectionVerdict InjectionTap::Judge(InjectionDirection direction, ConstBytes head, size_t length, ActionSet possible) {
  const bool is_iwarp = options_.transport == InjectionTransport::kIwarp;
  const auto facts = is_iwarp ? FactsOfSegment(head, length) : FactsOfPacket(head, length, options_.mtu);
  const InjectionVerdict verdict = injections_->Judge(direction, facts, possible);
  TellFired();
  return verdict;
}

// --- Sending ---

// What is queued first leaves first, so that the payload is kept for both of two. Where there is no room for the
// second, it waits, and what follows waits behind it.
void InjectionTap::Pass(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie, bool twice) {
  if (overtaken_ && !std::exchange(is_passed_, true)) {
    injections_->Overtaken();
    TellFired();
  }
  below().QueueRecord(header, payload, cookie);
  queued_.push_back({.cookie = cookie, .told = !twice});
  if (!twice) return;
  if (held_.empty() && below().CanQueue()) {
    below().QueueRecord(header, payload, cookie);
    queued_.push_back({.cookie = cookie});
    return;
  }
  held_.push_front({{{header.begin(), header.end()}, {payload.begin(), payload.end()}, cookie, /*twice=*/false},
                    options_.fabric.Now(),
                    /*lost=*/false});
}

void InjectionTap::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  if (LosesAll()) return Lose(cookie);
  size_t length = header.size();
  for (const TxPart& part : payload) length += part.size();
  // What stands behind the headers is no concern of the decoders.
  std::array<std::byte, std::max(kMaxRecordHead, kMaxTxHeader)> head{};
  CopyBytes(head, header);
  // One at a time is overtaken, and none while others wait.
  const bool keeps = IsStalled() || !held_.empty();
  const ActionSet possible = keeps || overtaken_ ? kAllActions & ~SetOf(InjectionAction::kOvertake) : kAllActions;
  const InjectionVerdict verdict =
      Judge(InjectionDirection::kSent, ConstBytes(head).first(std::min(length, head.size())), length, possible);
  if (verdict.action == InjectionAction::kDrop || LosesAll()) return Lose(cookie);
  if (verdict.action == InjectionAction::kOvertake) {
    overtaken_ = Record{{header.begin(), header.end()}, {payload.begin(), payload.end()}, cookie, verdict.twice};
    gone_ahead_ = is_passed_ = false;
    return;
  }
  if (verdict.delay > Duration::zero()) {
    last_due_ = std::max(last_due_, options_.fabric.Now() + verdict.delay);
  }
  if (IsStalled() || !held_.empty() || verdict.delay > Duration::zero()) {
    held_.push_back({{{header.begin(), header.end()}, {payload.begin(), payload.end()}, cookie, verdict.twice},
                     last_due_,
                     /*lost=*/false});
    return;
  }
  Pass(header, payload, cookie, verdict.twice);
  gone_ahead_ = true;
  if (overtaken_ && below().CanQueue()) PassOvertaken();
}

TxResult InjectionTap::Flush(MemoryPort& memory) {
  if (Resets() && cut_) return {.status = TxStatus::kReset, .error = ECONNRESET};
  if (LosesAll()) LoseHeld();
  TxResult result;
  bool more = true;
  while (more) {
    if (HasFarewell()) Cut();
    while (HasDue() && below().CanQueue()) {
      const Held held = std::move(held_.front());
      held_.pop_front();
      if (held.lost) {
        queued_.push_back({.cookie = held.record.cookie, .lost = true});
      } else {
        Pass(held.record);
      }
    }
    result = below().TxIdle() ? TxResult{} : below().Flush(memory);
    const bool idle = result.status == TxStatus::kIdle;
    more = idle && (HasDue() || HasFarewell()) && below().CanQueue();
    // By one place, and no more, where the room that there is now is its own; without anything behind it, not at all.
    if (overtaken_ && (idle || (gone_ahead_ && below().CanQueue()))) {
      PassOvertaken();
      more = more || idle;
    }
  }
  blocked_ = result.status == TxStatus::kWouldBlock;
  if (!Resets()) return result;
  below().Abort();
  return {.status = TxStatus::kReset, .error = ECONNRESET};
}

// Nothing but the farewell leaves any more, once there is room for it.
void InjectionTap::Cut() {
  LoseHeld();
  if (!Resets()) {
    if (!below().CanQueue()) return;
    below().QueueRecord(options_.farewell(), {}, /*cookie=*/0);
  }
  cut_ = true;
}

bool InjectionTap::TakeSent(uint64_t* cookie) {
  while (!queued_.empty()) {
    const Queued front = queued_.front();
    if (!front.lost && !below().TakeSent(cookie)) return false;
    *cookie = front.cookie;
    queued_.pop_front();
    if (front.told) return true;
  }
  return false;
}

// --- Receiving ---

RxResult InjectionTap::NextRecord(RecordHead* record) {
  const bool is_iwarp = options_.transport == InjectionTransport::kIwarp;
  more_ = false;
  for (size_t discarded = 0;; ++discarded) {
    if (is_iwarp && IsSevered()) return {.status = RxStatus::kReset, .error = ECONNRESET};
    if (is_iwarp && IsStalled()) return {.status = RxStatus::kWouldBlock};
    if (discarded_head_ > 0) {
      const RxResult placed = below().Place(discarded_head_, {});
      if (placed.status != RxStatus::kReady) return placed;
      discarded_head_ = 0;
    }
    if (discarded == kMostDiscarded) {
      more_ = true;
      return {.status = RxStatus::kWouldBlock};
    }
    const RxResult result = below().NextRecord(record);
    if (result.status != RxStatus::kReady) return result;
    const InjectionVerdict verdict = LosesAll() ? InjectionVerdict{InjectionAction::kDrop}
                                                : Judge(InjectionDirection::kReceived, record->head, record->length);
    if (!verdict.action) return result;
    if (is_iwarp && IsSevered()) {
      // There is nothing to wait for; on InfiniBand the next flush tells the peer.
      Cut();
      below().Abort();
    } else {
      discarded_head_ = record->head.size();
    }
  }
}

}  // namespace

std::unique_ptr<Llp> WithInjections(std::unique_ptr<Llp> below, std::shared_ptr<ConnectionInjections> injections,
                                    InjectionTapOptions options) {
  return std::make_unique<InjectionTap>(std::move(below), std::move(injections), std::move(options));
}

}  // namespace stagecoach::emu
