// IbRequester: the sending half of an InfiniBand RC or UC connection. Cuts work requests into packets, keeps what is
// not acknowledged, and decides what is sent again and what has failed.
//
// Source: InfiniBand Architecture Specification, volume 1, sections 9.7.2 to 9.7.5 (requester), 9.7.7 (acknowledged
// work), 9.8 (UC), 10.7.2 (completion errors).
//
// PACKET NUMBERS. Each work request that has begun owns a range of PSNs, one for each packet; a Read as many as its
// answer has packets. In order round the circle of 2^24:
//
//     una_ ........ cursor_ ........ high_ ........ alloc_
//     oldest        next packet      first one      first one that belongs
//     not acked     to be sent       never sent     to no work request
//
// Sending again is moving cursor_ back to una_. Since acknowledgements are cumulative, work requests complete in order:
// done_ is the oldest that has not, and una_ lies in it. Offsets are counted from una_, so that a Read of 2^23 packets
// is no special case; no more than those are ever owned at once.
//
// TIME. One timer, moved lazily: acknowledgements only note the time, and the timer looks at the note when it fires.
// A carrier that is gone is silence: the timer runs just the same. The owner may know better, and excuse the peer
// (ib_transport.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "emu/engine/ib_context.h"
#include "emu/engine/ring.h"

namespace stagecoach::emu {

class IbRequester {
 public:
  explicit IbRequester(IbContext& context);

  void Submit(const SendWork* work);
  void StartSending();
  void StopSending() { sending_ = false; }
  // The context's options have changed.
  void OnOptions();
  void OnCarrier(bool up);
  bool TakeRedialWish() { return std::exchange(redial_wish_, false); }

  // A packet from the peer's responder, in three steps; nothing changes before the third, when it is known to be
  // intact.
  void Judge(const wire::IbHeader& header, uint32_t payload);
  void Pin(IbDestination& destination);
  // Its payload cannot be placed where Pin said.
  void OnPlacementFault(MemoryFault fault) { judged_.memory_fault = fault; }
  // `placed`: where that was, for the trace.
  void Commit(const MemoryTrail& placed);

  // Queues one packet; false when none may be sent.
  bool QueueNext(RecordSink& sink);
  void OnSent(uint64_t entry);
  void OnTxMemoryFault(uint64_t entry, MemoryFault fault);

  // Everything that has not completed, and whatever is submitted from now on, is flushed.
  void Flush();
  // The oldest work request fails, if there is one, as if its retries were used up.
  void GiveUp(const char* why);
  // The lower layer holds none of our packets any more.
  void ForgetRecords();
  bool TakeCompletion(SendCompletion* completion);

  std::optional<Instant> Deadline() const;
  void OnDeadline(Instant now);
  // IbTransport says what they mean.
  bool MayExcuse(Instant now) const { return IsSilent(now) && !peer_is_elsewhere_; }
  void Excuse(bool again);

  bool HasWork() const { return !sq_.empty(); }
  // Of the oldest request that is not acknowledged; of the next one, if all are.
  uint32_t oldest_psn() const { return una_; }
  // Something has begun and is not complete.
  bool InProgress() const { return done_ < next_start_; }

 private:
  struct Entry {
    const SendWork* work = nullptr;
    // Of a work request that failed here: it stays where it is until all before it are complete.
    WorkStatus status = WorkStatus::kSuccess;
    uint32_t length = 0;
    uint32_t first_psn = 0;
    uint32_t packets = 0;         // 0: failed before it began
    uint32_t queued_records = 0;  // in the lower layer; the entry must not leave before they do
  };

  enum class Verdict : uint8_t { kIgnore, kAcknowledge, kReadData, kAtomicResult, kImpliedNak, kBadResponse };
  struct Judged {
    Verdict verdict = Verdict::kIgnore;
    bool is_from_elsewhere = false;  // kIgnore: the peer's numbers are others
    wire::IbHeader header;
    uint32_t payload = 0;
    uint64_t entry = 0;   // kReadData, kAtomicResult
    uint32_t offset = 0;  // kReadData: where the payload belongs in the message
    std::optional<MemoryFault> memory_fault;
    const char* why = "";
  };

  // Which of the work requests that have begun owns a PSN that is not acknowledged; `blocked` if an unanswered Read or
  // atomic stands before it.
  struct Reach {
    uint64_t entry = 0;
    bool blocked = false;
  };

  Entry& At(uint64_t number) { return sq_[number - sq_first_]; }
  const Entry& At(uint64_t number) const { return sq_[number - sq_first_]; }
  uint64_t end() const { return sq_first_ + sq_.size(); }
  uint32_t Ahead(uint32_t psn) const { return wire::PsnOffset(psn, una_); }
  uint32_t Outstanding() const { return Ahead(high_); }
  static bool AwaitsAnswer(const Entry& entry);
  Reach ReachOf(uint32_t psn) const;

  bool StartNext();
  WorkStatus CheckWork(const SendWork& work, uint32_t* length, std::string* why);
  void Gather(const SendWork& work, uint32_t offset, uint32_t size);
  bool CheckParts(Entry& entry);
  void QueueRequest(RecordSink& sink, Entry& entry);
  wire::IbHeader RequestHeader(const Entry& entry, uint32_t index, uint32_t size) const;

  void CommitAcknowledge(const wire::IbHeader& header);
  void CommitRnr(const wire::IbHeader& header);
  void CommitReadData(const Judged& judged, const MemoryTrail& placed);
  void CommitAtomicResult(const Judged& judged);
  // Acknowledges what is before `psn`, up to the first unanswered Read or atomic. False if there is one.
  bool AdvanceTo(uint32_t psn);
  void MoveUna(uint32_t psn);
  void AdvanceUnacknowledged();
  void Rewind();
  void Retry(const char* why);
  void ImpliedNak();
  void RestartTimer();
  void NoteWaiting();
  // Something has been sent and not acknowledged, or cannot be sent for want of a carrier.
  bool AwaitsPeer() const { return una_ != high_ || (!context_.carrier && sending_ && done_ < end()); }
  bool IsSilent(Instant now) const;
  // When its silence is to be counted, if there is no progress until then.
  Instant PatienceEnd() const { return last_progress_ + wire::AckTimeout(context_.options.timeout); }

  // The work request cannot be carried out; takes effect when all before it are complete.
  void Mark(Entry& entry, WorkStatus status, std::string why);
  void FailMarked();
  // The oldest work request fails, all others are flushed.
  void Fail(WorkStatus status, std::string why, uint8_t syndrome = 0);
  void FlushFrom(uint64_t first);

  IbContext& context_;
  bool sending_ = false;
  bool failed_ = false;
  bool redial_wish_ = false;

  Ring<Entry> sq_;
  uint64_t sq_first_ = 0;    // number of sq_.front(); entries are numbered from 0 in order of submission
  uint64_t done_ = 0;        // the oldest that is not complete
  uint64_t next_start_ = 0;  // the oldest that has not begun
  uint32_t una_ = 0;
  uint32_t cursor_ = 0;
  uint32_t high_ = 0;
  uint32_t alloc_ = 0;
  uint64_t cursor_entry_ = 0;  // owns cursor_, unless that is alloc_
  uint32_t answers_due_ = 0;   // Reads and atomics that have begun and are not complete
  uint32_t marked_ = 0;        // entries that have failed here and are not the oldest yet
  std::string marked_why_;
  std::vector<TxPart> parts_;  // of the packet being queued

  uint8_t retries_left_ = 0;
  uint8_t rnr_left_ = 0;
  bool implied_nak_ = false;  // raised already for what una_ waits for
  // Has answered what was never sent, or misses what it has acknowledged: it is there, and its numbers are others.
  bool peer_is_elsewhere_ = false;
  uint32_t excuses_ = 0;  // for what una_ waits for, in a row
  std::optional<Instant> timer_;
  Instant last_progress_{};
  std::optional<Instant> rnr_until_;

  Judged judged_;
};

}  // namespace stagecoach::emu
