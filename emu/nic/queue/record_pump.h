// RecordPump: moves records between a QP's transport engine and its record layer, and completions from the engine to
// the QP.
//
// What connections of all transports do alike. When they do it, and what the end of a record layer means, is theirs.
// A template, so that the engine is called directly for each record.
//
// Not thread-safe: runs under the lock of its QP (docs/locks_and_leases.md).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/inject/plan.h"
#include "emu/llp/llp.h"
#include "emu/nic/nic.h"
#include "emu/nic/queue/late_placement.h"
#include "emu/nic/queue/queue_pair.h"

namespace stagecoach::emu {

template <typename Transport>
class RecordPump {
 public:
  // `name` is the component in traces. All must outlive the pump.
  RecordPump(QueuePair& qp, Nic& nic, Transport& transport, MemoryPort& memory, const std::string& name)
      : qp_(qp),
        nic_(nic),
        transport_(transport),
        memory_(memory),
        name_(name),
        writes_(nic.injections(), SetOf(InjectionAction::kPlaceLate), name + "/writes") {}
  RecordPump(const RecordPump&) = delete;
  RecordPump& operator=(const RecordPump&) = delete;

  // Records go by `llp` from now on, which stays the caller's. Null: there is none; posted work still reaches the
  // engine, and completions the QP, but nothing may be received or flushed. A record that was half received is
  // forgotten.
  void Use(Llp* llp) {
    llp_ = llp;
    have_record_ = false;
    found_.reset();
    place_late_.reset();
    write_is_late_.reset();
    if (late_) late_->Forget();
    tx_failed_ = tx_blocked_ = false;
    tx_error_ = 0;
  }

  // Before a turn that a poller alone has asked for: it need not begin. Nothing has come, nothing has been posted, and
  // the turn before, which did all that it could, waits for nothing else. What was found is kept for Receive(), to
  // which the turn must come.
  bool FindsNothing() {
    if (have_record_ || tx_failed_ || qp_.Unfinished() || qp_.sends_.HasUnsubmitted() || !llp_->TxIdle()) return false;
    const RxResult next = llp_->NextRecord(&record_);
    const Llp::Hold hold = llp_->hold();
    if (next.status == RxStatus::kWouldBlock && !hold.receiving && !hold.more && !hold.until) return true;
    found_ = next;
    return false;
  }

  void BeginTurn() { moved_ = more_ = false; }

  // Receives as far as the budget goes and the engine takes it. What ended receiving, if anything did.
  std::optional<RxResult> Receive(Instant now) {
    size_t bytes = nic_.profile().receive_budget_bytes;
    size_t records = nic_.profile().receive_budget_records;
    while (transport_.Receiving()) {
      if (records-- == 0 || bytes == 0) {
        more_ = true;
        return std::nullopt;
      }
      const Step step = ReceiveRecord(now, &bytes);
      if (step.end) return step.end;
      if (step.moved) continue;
      if (llp_->hold().more) more_ = true;
      return std::nullopt;
    }
    return std::nullopt;
  }

  // Hands posted work to the engine and what the engine makes of it to the stream, as far as both go in one turn.
  // Without a record layer only the engine gets something.
  void Transmit() {
    if (llp_ == nullptr) {
      TakeSendCompletions();
      qp_.SubmitPosted(transport_);
      return;
    }
    for (int round = 0; round < kTransmitRounds; ++round) {
      TakeSendCompletions();
      bool any = qp_.SubmitPosted(transport_);
      if (!tx_failed_ && transport_.FillTx(*llp_, nic_.profile().transmit_budget_records)) any = true;
      // What left made room for more.
      if (Flush()) any = true;
      // A fenced local operation may have waited for just these.
      if (TakeSendCompletions() && qp_.sends_.HasUnsubmitted()) any = true;
      if (!any || tx_blocked_ || tx_failed_) return;
    }
    STAGECOACH_MARK("nic.transmit_rounds_used_up");
    more_ = true;
  }

  // True if records have left.
  bool Flush() {
    if (llp_->TxIdle() || tx_failed_) {
      tx_blocked_ = false;
      return false;
    }
    const TxResult result = llp_->Flush(memory_);
    tx_blocked_ = result.status == TxStatus::kWouldBlock;
    bool any = false;
    for (uint64_t cookie = 0; llp_->TakeSent(&cookie); any = true) transport_.OnSent(cookie);
    moved_ = moved_ || any;
    flushed_any_ = true;
    if (result.status == TxStatus::kReset) {
      FailTx(result.error);
    } else if (result.status == TxStatus::kMemoryFault) {
      FailTx(0);
      transport_.OnTxMemoryFault(result.cookie, result.memory_fault);
    }
    return any;
  }

  // Nothing can be written any more.
  void FailTx(int error) {
    tx_failed_ = true;
    tx_error_ = error;
  }

  // --- Completions ---

  bool TakeSendCompletions() {
    bool any = false;
    for (SendCompletion completion; transport_.TakeSendCompletion(&completion); any = true) qp_.FinishSend(completion);
    return any;
  }
  void TakeCompletions() {
    TakeSendCompletions();
    qp_.RetireSends();
    ReceiveCompletion received;
    while (transport_.TakeReceiveCompletion(&received)) qp_.FinishReceive(received);
  }

  // --- Writes that are placed late ---

  // Of this connection alone.
  void SettlePlacements() {
    if (late_) late_->PlaceAll(nic_.fabric().Now());
  }
  void PlaceDue(Instant now) {
    if (late_) late_->PlaceDue(now);
  }
  std::optional<Instant> PlacementDue() const { return late_ ? late_->Due() : std::nullopt; }

  // --- What has happened ---

  bool moved() const { return moved_; }  // in this turn
  bool more() const { return more_; }    // the budget ended before the work did
  void SetMore() { more_ = true; }
  bool received_any() const { return received_any_; }
  bool flushed_any() const { return flushed_any_; }
  bool tx_blocked() const { return tx_blocked_; }
  bool tx_failed() const { return tx_failed_; }
  int tx_error() const { return tx_error_; }

 private:
  // How often one turn fills and writes; each time at most transmit_budget_records.
  static constexpr int kTransmitRounds = 8;

  struct Step {
    bool moved = false;
    std::optional<RxResult> end;
  };

  static Step Stopped(const RxResult& result) {
    Step step;
    if (result.status != RxStatus::kReady && result.status != RxStatus::kWouldBlock) step.end = result;
    return step;
  }

  // One record, or a part of it.
  Step ReceiveRecord(Instant now, size_t* budget_bytes) {
    if (!have_record_) {
      const RxResult next = found_ ? *found_ : llp_->NextRecord(&record_);
      found_.reset();
      if (next.status != RxStatus::kReady) return Stopped(next);
      const std::optional<size_t> head_size = transport_.OnRecord(record_, now);
      if (!head_size) return {};
      have_record_ = true;
      head_size_ = *head_size;
      record_length_ = record_.length;
    }
    const std::optional<std::span<const MutableBytes>> destination = transport_.PinDestination();
    if (!destination) return {};
    // Decided once for each record.
    if (!place_late_) place_late_ = PlaceLate();
    const RxResult placed = llp_->Place(head_size_, *place_late_ ? late_->Stage(*destination) : Prompt(*destination));
    const bool missing = placed.status == RxStatus::kMemoryFault ||
                         (placed.status == RxStatus::kReady && !*place_late_ && !StoreLastWord());
    // Whoever waits for the pins finds it kept.
    if (placed.status == RxStatus::kReady && *place_late_) late_->Keep(now, now + place_within_);
    transport_.UnpinDestination();
    if (missing) transport_.OnPlacementFault(MemoryFault::kUnmapped);
    if (placed.status == RxStatus::kMemoryFault) return {.moved = true, .end = std::nullopt};
    if (placed.status != RxStatus::kReady) return Stopped(placed);
    have_record_ = false;
    place_late_.reset();
    moved_ = true;
    transport_.OnPlaced(now);
    *budget_bytes -= std::min(*budget_bytes, record_length_);
    received_any_ = true;
    return {.moved = true, .end = std::nullopt};
  }

  // Programs poll the end of a buffer that a peer writes, and when they see it change use all of it (ARCHITECTURE
  // section 5, prompt placement). So the last word of a Write, as wide as its end is aligned, goes aside first: nothing
  // orders the stores by which a socket's bytes, or ours, are copied to where they belong.
  std::span<const MutableBytes> Prompt(std::span<const MutableBytes> destination) {
    last_word_ = {};
    if (destination.empty() || !transport_.EndsWrite()) return destination;
    const MutableBytes all = destination.front();  // the target of a Write is one range
    const uintptr_t end = reinterpret_cast<uintptr_t>(all.data()) + all.size();
    size_t width = last_word_bytes_.size();
    while (width > all.size() || end % width != 0) width /= 2;
    last_word_ = all.last(width);
    prompt_parts_ = {all.first(all.size() - width), MutableBytes(last_word_bytes_).first(width)};
    return prompt_parts_;
  }

  // Everything else of the record is in place. False: the memory is not.
  bool StoreLastWord() {
    const MutableBytes to = std::exchange(last_word_, {});
    return to.empty() || SafeStoreRelease(to.data(), ConstBytes(last_word_bytes_).first(to.size()));
  }

  // Whether the current record's payload is kept aside; if not, what was kept aside is placed.
  bool PlaceLate() {
    if (!transport_.PlacementMayWait()) {
      const bool overtaken =
          STAGECOACH_MUTANT("send-before-write", "a Send is delivered before Writes ahead of it are placed");
      if (late_ && late_->Due()) STAGECOACH_MARK("placement.ordering_point_settles_late_writes");
      if (!overtaken) SettlePlacements();
      return false;
    }
    // Once for each Write, however many records it has.
    if (!write_is_late_) write_is_late_ = JudgeWrite();
    const bool late = *write_is_late_;
    if (transport_.EndsWrite()) write_is_late_.reset();
    return late;
  }

  bool JudgeWrite() {
    const InjectionRule* const rule = writes_.Judge();
    if (rule == nullptr) return false;
    TraceFired(nic_.trace(), nic_.fabric().Now(), name_, writes_.fired());
    place_within_ = rule->delay;
    if (!late_) late_.emplace(nic_.late_placements(), nic_.injections()->PlacementLuck(name_), name_);
    return true;
  }

  QueuePair& qp_;
  Nic& nic_;
  Transport& transport_;
  MemoryPort& memory_;
  const std::string& name_;
  Llp* llp_ = nullptr;

  RecordHead record_;              // in front of the record layer
  std::optional<RxResult> found_;  // what the layer said when it was asked for that before the turn
  bool have_record_ = false;       // its head has been judged, its payload is being placed
  size_t head_size_ = 0;
  size_t record_length_ = 0;
  MutableBytes last_word_;  // where it goes
  std::array<std::byte, sizeof(uint64_t)> last_word_bytes_{};
  std::array<MutableBytes, 2> prompt_parts_{};
  PlaceInjections writes_;
  std::optional<bool> place_late_;     // of this record
  std::optional<bool> write_is_late_;  // whose records come now
  Duration place_within_{};            // likewise
  std::optional<LatePlacement> late_;  // once the NIC places late
  bool tx_blocked_ = false;
  bool tx_failed_ = false;
  int tx_error_ = 0;
  bool more_ = false;
  bool moved_ = false;
  bool received_any_ = false;
  bool flushed_any_ = false;
};

}  // namespace stagecoach::emu
