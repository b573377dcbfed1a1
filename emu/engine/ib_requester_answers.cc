// What an IbRequester makes of the responder's packets and of its silence.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"
#include "emu/engine/ib_requester.h"

namespace stagecoach::emu {
namespace {

using wire::IbOp;
using wire::PsnAdd;
using wire::PsnOffset;

// How often in a row the time until the next look at a peer that is excused doubles, and how long it is at most, unless
// the QP's own is longer.
constexpr uint32_t kDoublingsMax = 16;
constexpr Duration kLongestExcuse = 1s;

WorkStatus StatusOfNak(uint8_t syndrome) {
  switch (syndrome) {
    case wire::kIbNakInvalidRequest:
      return WorkStatus::kRemoteInvalidRequest;
    case wire::kIbNakRemoteAccess:
      return WorkStatus::kRemoteAccessError;
    case wire::kIbNakRemoteOperation:
      return WorkStatus::kRemoteOperationError;
    default:
      return WorkStatus::kBadResponse;
  }
}

}  // namespace

// --- What the responder says ---

IbRequester::Reach IbRequester::ReachOf(uint32_t psn) const {
  const uint32_t ahead = Ahead(psn);
  for (uint64_t n = done_; n < next_start_; ++n) {
    const Entry& entry = At(n);
    if (ahead < Ahead(PsnAdd(entry.first_psn, entry.packets))) return {.entry = n};
    if (AwaitsAnswer(entry)) return {.entry = n, .blocked = true};
  }
  STAGECOACH_CHECK(false);  // callers ask for PSNs before high_
  return {};
}

void IbRequester::Judge(const wire::IbHeader& header, uint32_t payload) {
  judged_ = {.header = header, .payload = payload};
  const auto verdict = [&](Verdict what, const char* why = "") {
    judged_.verdict = what;
    judged_.why = why;
  };
  const uint32_t ahead = Ahead(header.psn);
  // A NAK may say no more than that all has come.
  const bool expects_next =
      header.op == IbOp::kAck && header.syndrome == wire::kIbNakSequence && ahead == Outstanding();
  // Old, or about packets that were never sent (section 9.7.5.1.2: ghosts).
  if (failed_) return;
  if (ahead >= Outstanding() && !expects_next) {
    const bool is_past = wire::PsnCompare(header.psn, una_) < 0;
    judged_.is_from_elsewhere = !is_past || (header.op == IbOp::kAck && header.syndrome == wire::kIbNakSequence);
    return;
  }
  if (header.op == IbOp::kAck) return verdict(Verdict::kAcknowledge);
  if (wire::KindOfSyndrome(header.syndrome) != wire::IbSyndromeKind::kAck) {
    return verdict(Verdict::kBadResponse, "an answer whose syndrome is no ACK");
  }
  const Reach reach = ReachOf(header.psn);
  if (reach.blocked) return verdict(Verdict::kImpliedNak);
  const Entry& entry = At(reach.entry);
  judged_.entry = reach.entry;
  if (header.op == IbOp::kAtomicAck) {
    if (!IsAtomic(entry.work->opcode))
      return verdict(Verdict::kBadResponse, "the answer to an atomic, where none was asked");
    return verdict(Verdict::kAtomicResult);
  }
  if (entry.work->opcode != SendOpcode::kRead) {
    return verdict(Verdict::kBadResponse, "the answer to a Read, where none was asked");
  }
  if (header.psn != (reach.entry == done_ ? una_ : entry.first_psn)) return verdict(Verdict::kImpliedNak);
  const uint32_t index = PsnOffset(header.psn, entry.first_psn);
  const bool last = index + 1 == entry.packets;
  judged_.offset = index * context_.options.mtu;
  const uint32_t expected = last ? entry.length - judged_.offset : context_.options.mtu;
  if (wire::EndsMessage(header.op) != last || payload != expected) {
    return verdict(Verdict::kBadResponse, "the answer to a Read does not have the length that was asked for");
  }
  verdict(Verdict::kReadData);
}

void IbRequester::Pin(IbDestination& destination) {
  if (judged_.verdict != Verdict::kReadData || judged_.payload == 0 || judged_.memory_fault) return;
  const auto added =
      destination.AddLocal(context_.memory, At(judged_.entry).work->sges, judged_.offset, judged_.payload);
  if (added) return;
  destination.Clear();
  judged_.memory_fault = added.error();
}

void IbRequester::Commit(const MemoryTrail& placed) {
  const Judged judged = std::exchange(judged_, {});
  if (failed_) return;
  switch (judged.verdict) {
    case Verdict::kIgnore:
      peer_is_elsewhere_ |= judged.is_from_elsewhere;
      return;
    case Verdict::kAcknowledge:
      CommitAcknowledge(judged.header);
      return;
    case Verdict::kReadData:
      CommitReadData(judged, placed);
      return;
    case Verdict::kAtomicResult:
      CommitAtomicResult(judged);
      return;
    case Verdict::kImpliedNak:
      AdvanceTo(judged.header.psn);
      ImpliedNak();
      return;
    case Verdict::kBadResponse:
      if (AdvanceTo(judged.header.psn); !failed_) Fail(WorkStatus::kBadResponse, judged.why);
      return;
  }
}

void IbRequester::CommitAcknowledge(const wire::IbHeader& header) {
  switch (wire::KindOfSyndrome(header.syndrome)) {
    case wire::IbSyndromeKind::kAck:
      if (!AdvanceTo(PsnAdd(header.psn, 1))) ImpliedNak();
      return;
    case wire::IbSyndromeKind::kRnrNak:
      CommitRnr(header);
      return;
    case wire::IbSyndromeKind::kReserved:
      Fail(WorkStatus::kBadResponse, wire::SyndromeToString(header.syndrome));
      return;
    case wire::IbSyndromeKind::kNak:
      break;
  }
  const bool reached = AdvanceTo(header.psn);
  if (failed_) return;
  if (header.syndrome == wire::kIbNakSequence) {
    // Nothing is missing, or it is about to be sent again anyway.
    if (una_ == high_ || rnr_until_ || cursor_ == una_) return;
    STAGECOACH_MARK("rc.peer_misses_packets");
    Trace(context_.trace, context_.now, context_.name, "nak.received", {{"psn", uint64_t{header.psn}}});
    Retry("the peer misses packets");
    return;
  }
  // All before it have been carried out, says the NAK; an answer that is missing has been lost, and may come again.
  if (!reached && ReachOf(header.psn).blocked) {
    ImpliedNak();
    return;
  }
  STAGECOACH_MARK("rc.peer_refuses_our_request");
  Fail(StatusOfNak(header.syndrome), wire::SyndromeToString(header.syndrome), header.syndrome);
}

void IbRequester::CommitRnr(const wire::IbHeader& header) {
  AdvanceTo(header.psn);
  if (failed_ || rnr_until_) return;
  if (rnr_left_ == 0) {
    STAGECOACH_MARK("rc.rnr_retries_used_up");
    Fail(WorkStatus::kRnrRetryExceeded, "the peer has no Receive", header.syndrome);
    return;
  }
  constexpr uint8_t kForEver = 7;
  if (context_.options.rnr_retry != kForEver) --rnr_left_;
  STAGECOACH_MARK("rc.peer_has_no_receive");
  rnr_until_ = context_.now + wire::RnrTimer(header.syndrome);
  Trace(context_.trace, context_.now, context_.name, "rnr.wait",
        {{"psn", uint64_t{una_}}, {"timer", uint64_t{header.syndrome} & 0x1f}});
  Rewind();
}

void IbRequester::CommitReadData(const Judged& judged, const MemoryTrail& placed) {
  if (!judged.memory_fault) context_.TracePlaced(judged.header, judged.payload, placed.first(), placed);
  if (AdvanceTo(judged.header.psn); failed_) return;
  if (judged.memory_fault) {
    Fail(WorkStatus::kLocalProtectionError, ToString(*judged.memory_fault));
    return;
  }
  MoveUna(PsnAdd(judged.header.psn, 1));
}

void IbRequester::CommitAtomicResult(const Judged& judged) {
  if (AdvanceTo(judged.header.psn); failed_) return;
  IbDestination sink(/*traced=*/context_.trace != nullptr);
  const auto added = sink.AddLocal(context_.memory, At(done_).work->sges, 0, kIbAtomicSize);
  if (!added) {
    Fail(WorkStatus::kLocalProtectionError, ToString(added.error()));
    return;
  }
  ConstBytes result = AsBytes(&judged.header.original, kIbAtomicSize);
  for (const MutableBytes& part : sink.parts()) {
    const ConstBytes piece = result.first(std::min(part.size(), result.size()));
    if (!SafeCopy(part, piece)) {
      Fail(WorkStatus::kLocalProtectionError, ToString(MemoryFault::kUnmapped));
      return;
    }
    result = result.subspan(piece.size());
  }
  context_.TracePlaced(judged.header, kIbAtomicSize, sink.trail().first(), sink.trail());
  MoveUna(PsnAdd(judged.header.psn, 1));
}

bool IbRequester::AdvanceTo(uint32_t psn) {
  const uint32_t target = Ahead(psn);
  uint32_t reach = target;
  for (uint64_t n = done_; n < next_start_; ++n) {
    const Entry& entry = At(n);
    const uint32_t begin = n == done_ ? 0 : Ahead(entry.first_psn);
    if (begin >= target) break;
    if (!AwaitsAnswer(entry)) continue;
    reach = begin;
    break;
  }
  MoveUna(PsnAdd(una_, reach));
  return reach == target;
}

void IbRequester::MoveUna(uint32_t psn) {
  const uint32_t moved = Ahead(psn);
  if (moved == 0) return;
  while (done_ < next_start_) {
    Entry& entry = At(done_);
    if (entry.packets == 0 || Ahead(PsnAdd(entry.first_psn, entry.packets)) > moved) break;
    if (AwaitsAnswer(entry)) --answers_due_;
    // Its memory has gone, but only after the peer had it all.
    if (entry.status != WorkStatus::kSuccess) --marked_;
    entry.status = WorkStatus::kSuccess;
    ++done_;
  }
  const bool overtaken = Ahead(cursor_) < moved;
  una_ = psn;
  if (overtaken) {
    cursor_ = psn;
    cursor_entry_ = done_;
  }
  retries_left_ = context_.options.retry_count;
  rnr_left_ = context_.options.rnr_retry;
  rnr_until_.reset();
  implied_nak_ = false;
  peer_is_elsewhere_ = false;
  last_progress_ = context_.now;
  const bool lasts =
      STAGECOACH_MUTANT("excuse-outlasts-answer", "what is awaited after an answer has an excuse's time");
  // The timer is as late as the excuses had it.
  if (std::exchange(excuses_, 0) > 0 && timer_ && !lasts) RestartTimer();
  FailMarked();
}

// --- Sending again ---

void IbRequester::Rewind() {
  cursor_ = una_;
  cursor_entry_ = done_;
}

void IbRequester::Retry(const char* why) {
  if (retries_left_ == 0) {
    STAGECOACH_MARK("rc.retries_used_up");
    Fail(WorkStatus::kRetryExceeded, why);
    return;
  }
  --retries_left_;
  Trace(context_.trace, context_.now, context_.name, "retry",
        {{"psn", uint64_t{una_}}, {"left", uint64_t{retries_left_}}, {"why", why}});
  implied_nak_ = false;
  Rewind();
  if (timer_) RestartTimer();
}

// Section 9.7.5.2.8: an answer is missing, since the peer went on past it. Said once, as all that follows says it
// again.
void IbRequester::ImpliedNak() {
  if (failed_ || implied_nak_ || rnr_until_) return;
  STAGECOACH_MARK("rc.an_answer_was_lost");
  Retry("an answer was lost");
  implied_nak_ = true;
}

void IbRequester::RestartTimer() {
  last_progress_ = context_.now;
  const Duration wait = wire::AckTimeout(context_.options.timeout);
  if (wait > Duration::zero()) timer_ = context_.now + wait;
}

bool IbRequester::IsSilent(Instant now) const {
  return !rnr_until_ && timer_ && *timer_ <= now && AwaitsPeer() && PatienceEnd() <= now;
}

void IbRequester::Excuse(bool again) {
  const Duration timeout = wire::AckTimeout(context_.options.timeout);
  const Duration wait = timeout * (1u << std::min(excuses_++, kDoublingsMax));
  timer_ = context_.now + std::min(wait, std::max(timeout, kLongestExcuse));
  last_progress_ = context_.now;
  NoteWaiting();
  if (!again) return;
  Trace(context_.trace, context_.now, context_.name, "retry",
        {{"psn", uint64_t{una_}}, {"left", uint64_t{retries_left_}}, {"why", "no answer, which is excused"}});
  implied_nak_ = false;
  Rewind();
}

std::optional<Instant> IbRequester::Deadline() const {
  return rnr_until_ ? rnr_until_ : timer_;
}

void IbRequester::OnDeadline(Instant now) {
  if (rnr_until_) {
    if (*rnr_until_ > now) return;
    rnr_until_.reset();
    RestartTimer();
    NoteWaiting();
    return;
  }
  if (!timer_ || *timer_ > now) return;
  if (!AwaitsPeer()) {
    timer_.reset();
    return;
  }
  if (!IsSilent(now)) {
    timer_ = PatienceEnd();
    return;
  }
  STAGECOACH_MARK("rc.no_answer_in_time");
  Retry("no answer");
  if (!failed_) NoteWaiting();
}

}  // namespace stagecoach::emu
