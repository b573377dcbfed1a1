#include "emu/engine/ib_requester.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/mutant.h"

namespace stagecoach::emu {
namespace {

using wire::IbOp;
using wire::kPsnMask;
using wire::PsnAdd;
using wire::PsnOffset;

// Half of the circle: a responder could not tell older ones from newer ones.
constexpr uint32_t kMaxOwnedPsns = 1u << 23;
// A long message is acknowledged on the way, so that what is lost is not sent again from its beginning.
constexpr uint32_t kAckEvery = 32;

bool IsSendWork(const SendWork& work) {
  return work.opcode == SendOpcode::kSend || work.opcode == SendOpcode::kSendInvalidate ||
         work.opcode == SendOpcode::kSendImmediate;
}

// Section 9.8: UC has Sends and Writes, nothing that needs an answer.
bool IsCarried(wire::IbService service, SendOpcode opcode) {
  if (service == wire::IbService::kRc) return true;
  return opcode == SendOpcode::kSend || opcode == SendOpcode::kSendImmediate || opcode == SendOpcode::kWrite ||
         opcode == SendOpcode::kWriteImmediate;
}

std::string DescribeWork(const SendWork& work, uint32_t length) {
  std::string text = std::string("our ") + ToString(work.opcode) + " of " + std::to_string(length) + " bytes";
  if (IsSendWork(work)) return text;
  std::array<std::byte, 4> key;
  ByteWriter(key).U32(work.remote_stag);
  return text + ", RKey 0x" + ToHex(key);
}

}  // namespace

IbRequester::IbRequester(IbContext& context) : context_(context) {
  OnOptions();
}

// --- Commands ---

void IbRequester::Submit(const SendWork* work) {
  const bool premature =
      STAGECOACH_MUTANT("time-begins-before-request", "the time of a request without a carrier begins before it");
  // The timer may still run from before, and nothing is awaited yet.
  if (done_ == end() && !premature) last_progress_ = context_.now;
  sq_.push_back({.work = work});
  if (failed_) {
    FlushFrom(done_);
    return;
  }
  NoteWaiting();
}

void IbRequester::StartSending() {
  if (!sending_ && una_ == high_) {
    // Nothing of it has been sent: the peer's time begins now, whatever the timer runs for.
    excuses_ = 0;
    if (timer_) RestartTimer();
  }
  sending_ = true;
  failed_ = false;  // UC: out of SQE
  NoteWaiting();
}

void IbRequester::OnOptions() {
  const IbOptions& options = context_.options;
  // The first work request fixes it; the sequence goes on from there.
  if (next_start_ == 0) una_ = cursor_ = high_ = alloc_ = options.send_psn & kPsnMask;
  retries_left_ = options.retry_count;
  rnr_left_ = options.rnr_retry;
  const bool unnoticed =
      STAGECOACH_MUTANT("late-timeout-ignored", "a timeout that is set while something is awaited does not count");
  // Until now the peer may have had all the time there is.
  if (timer_ || (context_.acknowledged() && AwaitsPeer() && !unnoticed)) {
    timer_.reset();
    RestartTimer();
  }
}

void IbRequester::OnCarrier(bool up) {
  if (!up) {
    ForgetRecords();
    if (!context_.acknowledged()) AdvanceUnacknowledged();
    NoteWaiting();
    return;
  }
  // Whatever was on its way is lost; waiting for the timer would tell nothing more.
  if (context_.acknowledged() && una_ != high_) Rewind();
  // The time that it took to open the carrier is not the peer's. A peer that opens and drops carriers gains no time.
  if (std::exchange(excuses_, 0) > 0 && timer_) RestartTimer();
}

// Something is to be sent and cannot be: whoever looks after the carrier is asked for one, and the timer counts the
// silence.
void IbRequester::NoteWaiting() {
  if (context_.carrier || failed_ || !sending_ || done_ == end()) return;
  redial_wish_ = true;
  if (context_.acknowledged() && !timer_) RestartTimer();
}

void IbRequester::ForgetRecords() {
  for (size_t i = 0; i < sq_.size(); ++i) sq_[i].queued_records = 0;
}

void IbRequester::Flush() {
  failed_ = true;
  FlushFrom(done_);
}

void IbRequester::GiveUp(const char* why) {
  if (!failed_ && done_ < end()) Fail(WorkStatus::kRetryExceeded, why);
}

void IbRequester::FlushFrom(uint64_t first) {
  for (uint64_t n = first; n < end(); ++n) At(n).status = WorkStatus::kFlushed;
  done_ = next_start_ = cursor_entry_ = end();
  // UC goes on after an error with the number after the last packet that was sent.
  una_ = cursor_ = alloc_ = high_;
  answers_due_ = marked_ = 0;
  timer_.reset();
  rnr_until_.reset();
}

bool IbRequester::TakeCompletion(SendCompletion* completion) {
  if (sq_first_ == done_) return false;
  const Entry& entry = sq_.front();
  if (entry.queued_records > 0) return false;
  *completion = {.work = entry.work, .status = entry.status};
  if (entry.status == WorkStatus::kSuccess && AwaitsAnswer(entry)) completion->byte_length = entry.length;
  sq_.pop_front();
  ++sq_first_;
  return true;
}

// --- Beginning work ---

bool IbRequester::AwaitsAnswer(const Entry& entry) {
  return entry.work->opcode == SendOpcode::kRead || IsAtomic(entry.work->opcode);
}

// The checks a device makes when it begins a work request: what it is, how long it is, and the memory that is sent.
WorkStatus IbRequester::CheckWork(const SendWork& work, uint32_t* length, std::string* why) {
  *length = 0;
  const IbOptions& options = context_.options;
  const bool answered = work.opcode == SendOpcode::kRead || IsAtomic(work.opcode);
  if (!IsCarried(options.service, work.opcode)) {
    *why = "not an operation of UC";
    return WorkStatus::kLocalOperationError;
  }
  if (answered && options.max_rd_atomic == 0) {
    *why = "the QP may have no Reads and atomics outstanding (max_rd_atomic 0)";
    return WorkStatus::kLocalOperationError;
  }
  const uint64_t total = work.is_inline ? work.inline_data.size() : TotalLength(work.sges);
  if (total > options.max_message_bytes) {
    *why = "longer than the longest message";
    return WorkStatus::kLocalLengthError;
  }
  *length = static_cast<uint32_t>(total);
  if (answered && work.is_inline) {
    *why = "inline data has nowhere to put an answer";
    return WorkStatus::kLocalOperationError;
  }
  if (IsAtomic(work.opcode) && total != kIbAtomicSize) {
    *why = "an atomic brings back eight bytes";
    return WorkStatus::kLocalLengthError;
  }
  // The memory of an answer is judged when the answer is there (ib_requester_answers.cc): what the peer refuses has
  // that status whatever this end's keys are, and an atomic has happened at the peer by then.
  if (work.is_inline || answered) return WorkStatus::kSuccess;
  for (const ScatterGather& part : work.sges) {
    if (part.length == 0) continue;
    const auto pin = context_.memory.Pin(part.lkey, part.address, part.length, MemoryAccess::kLocalRead);
    if (!pin) {
      *why = ToString(pin.error());
      return WorkStatus::kLocalProtectionError;
    }
  }
  return WorkStatus::kSuccess;
}

bool IbRequester::StartNext() {
  if (!sending_ || marked_ > 0 || next_start_ == end()) return false;
  Entry& entry = At(next_start_);
  const SendWork& work = *entry.work;
  if (work.fence && answers_due_ > 0) return false;
  const bool answered = AwaitsAnswer(entry);
  if (answered && context_.options.max_rd_atomic > 0 && answers_due_ >= context_.options.max_rd_atomic) return false;
  entry.first_psn = alloc_;
  std::string why;
  const WorkStatus status = CheckWork(work, &entry.length, &why);
  if (status != WorkStatus::kSuccess) {
    ++next_start_;
    Trace(context_.trace, context_.now, context_.name, "work.refused",
          {{"opcode", ToString(work.opcode)}, {"status", ToString(status)}});
    Mark(entry, status, std::move(why));
    return false;
  }
  const uint32_t packets = IbPacketsOf(entry.length, context_.options.mtu);
  if (Ahead(alloc_) + packets > kMaxOwnedPsns) return false;
  entry.packets = packets;
  alloc_ = PsnAdd(alloc_, packets);
  cursor_entry_ = next_start_++;
  if (answered) ++answers_due_;
  Trace(context_.trace, context_.now, context_.name, "work.started",
        {{"opcode", ToString(work.opcode)}, {"length", uint64_t{entry.length}}, {"psn", uint64_t{entry.first_psn}}});
  return true;
}

// --- Packets ---

bool IbRequester::QueueNext(RecordSink& sink) {
  if (failed_ || rnr_until_) return false;
  if (context_.acknowledged() && Ahead(cursor_) >= context_.options.window_packets) return false;
  if (cursor_ == alloc_ && !StartNext()) return false;
  Entry& entry = At(cursor_entry_);
  if (entry.status != WorkStatus::kSuccess) return false;
  const size_t records = entry.queued_records;
  QueueRequest(sink, entry);
  return entry.queued_records != records;
}

void IbRequester::QueueRequest(RecordSink& sink, Entry& entry) {
  const uint32_t mtu = context_.options.mtu;
  const uint32_t index = PsnOffset(cursor_, entry.first_psn);
  const uint32_t offset = index * mtu;
  const bool answered = AwaitsAnswer(entry);
  const uint32_t size = answered ? 0 : std::min(mtu, entry.length - offset);
  parts_.clear();
  if (size > 0) Gather(*entry.work, offset, size);
  // The first time it was checked as a whole. What is sent again may have lost its memory, which the carrier should not
  // have to die of.
  if (Ahead(cursor_) < Outstanding() && !CheckParts(entry)) return;

  const wire::IbHeader header = RequestHeader(entry, index, size);
  if (context_.acknowledged() && una_ == high_) {
    last_progress_ = context_.now;
    if (!timer_) RestartTimer();
  }
  ++entry.queued_records;
  QueueIbPacket(sink, header, parts_, MakeIbCookie(IbCookie::kRequest, cursor_entry_));
  // A Read request stands for all that is missing of its answer.
  cursor_ = answered ? PsnAdd(entry.first_psn, entry.packets) : PsnAdd(cursor_, 1);
  if (Ahead(cursor_) > Outstanding()) high_ = cursor_;
  if (cursor_ == PsnAdd(entry.first_psn, entry.packets)) ++cursor_entry_;
  if (!context_.acknowledged()) una_ = high_;
}

wire::IbHeader IbRequester::RequestHeader(const Entry& entry, uint32_t index, uint32_t size) const {
  const SendWork& work = *entry.work;
  const bool first = index == 0;
  const bool last = index + 1 == entry.packets;
  wire::IbHeader header = context_.Header(IbOp::kSendOnly, cursor_);
  const auto choose = [&](IbOp only, IbOp begin, IbOp middle, IbOp end) {
    return first ? (last ? only : begin) : (last ? end : middle);
  };
  switch (work.opcode) {
    case SendOpcode::kSend:
      header.op = choose(IbOp::kSendOnly, IbOp::kSendFirst, IbOp::kSendMiddle, IbOp::kSendLast);
      break;
    case SendOpcode::kSendImmediate:
      header.op = choose(IbOp::kSendOnlyImm, IbOp::kSendFirst, IbOp::kSendMiddle, IbOp::kSendLastImm);
      break;
    case SendOpcode::kSendInvalidate:
      header.op = choose(IbOp::kSendOnlyInv, IbOp::kSendFirst, IbOp::kSendMiddle, IbOp::kSendLastInv);
      if (last) header.invalidate_rkey = work.remote_stag;
      break;
    case SendOpcode::kWrite:
      header.op = choose(IbOp::kWriteOnly, IbOp::kWriteFirst, IbOp::kWriteMiddle, IbOp::kWriteLast);
      break;
    case SendOpcode::kWriteImmediate:
      header.op = choose(IbOp::kWriteOnlyImm, IbOp::kWriteFirst, IbOp::kWriteMiddle, IbOp::kWriteLastImm);
      break;
    case SendOpcode::kRead:
      header.op = IbOp::kReadRequest;
      break;
    case SendOpcode::kCompareSwap:
      header.op = IbOp::kCompareSwap;
      header.swap_or_add = work.swap;
      header.compare = work.compare_add;
      break;
    case SendOpcode::kFetchAdd:
      header.op = IbOp::kFetchAdd;
      header.swap_or_add = work.compare_add;
      break;
  }
  if (wire::HasImmediate(header.op)) header.immediate = work.immediate;
  if (AwaitsAnswer(entry) || (wire::IsWrite(header.op) && first)) {
    const uint32_t offset = index * context_.options.mtu;  // not 0 where a Read goes on
    header.rkey = work.remote_stag;
    header.address = work.remote_offset + offset;
    if (!IsAtomic(work.opcode)) header.dma_length = entry.length - offset;
  }
  // Solicited Event belongs to what consumes a Receive.
  header.solicited = last && work.solicited && (IsSendWork(work) || wire::HasImmediate(header.op));
  if (context_.acknowledged()) {
    const bool window_ends = Ahead(cursor_) + 1 == context_.options.window_packets;
    header.ack_request = last || AwaitsAnswer(entry) || window_ends || (index + 1) % kAckEvery == 0;
  }
  STAGECOACH_CHECK(last || AwaitsAnswer(entry) || size == context_.options.mtu);
  return header;
}

// Collects `size` bytes of the payload from `offset` on into parts_.
void IbRequester::Gather(const SendWork& work, uint32_t offset, uint32_t size) {
  if (work.is_inline) {
    parts_.push_back({.bytes = work.inline_data.subspan(offset, size)});
    return;
  }
  for (const ScatterGather& part : work.sges) {
    if (size == 0) return;
    if (offset >= part.length) {
      offset -= part.length;
      continue;
    }
    const uint32_t n = std::min(part.length - offset, size);
    parts_.push_back({.by_key = true, .key = part.lkey, .address = part.address + offset, .length = n});
    size -= n;
    offset = 0;
  }
}

bool IbRequester::CheckParts(Entry& entry) {
  for (const TxPart& part : parts_) {
    if (!part.by_key) continue;
    const auto pin = context_.memory.Pin(part.key, part.address, part.length, part.access);
    if (pin) continue;
    Mark(entry, WorkStatus::kLocalProtectionError, ToString(pin.error()));
    return false;
  }
  return true;
}

void IbRequester::OnSent(uint64_t number) {
  if (number < sq_first_ || number >= end()) return;
  Entry& entry = At(number);
  if (entry.queued_records > 0) --entry.queued_records;
  if (!context_.acknowledged()) AdvanceUnacknowledged();
}

void IbRequester::OnTxMemoryFault(uint64_t number, MemoryFault fault) {
  Trace(context_.trace, context_.now, context_.name, "tx.memory_fault", {{"fault", ToString(fault)}});
  // A packet sent once more than needed may belong to work that is complete.
  if (number < done_ || number >= end()) return;
  Mark(At(number), WorkStatus::kLocalProtectionError, ToString(fault));
}

// UC: complete is what has left.
void IbRequester::AdvanceUnacknowledged() {
  while (done_ < next_start_) {
    const Entry& entry = At(done_);
    if (entry.status != WorkStatus::kSuccess) break;
    const bool whole = done_ + 1 < next_start_ || cursor_ == alloc_;
    if (!whole || entry.queued_records > 0) break;
    ++done_;
  }
  FailMarked();
}

// --- Failures ---

void IbRequester::Mark(Entry& entry, WorkStatus status, std::string why) {
  if (failed_ || entry.status != WorkStatus::kSuccess) return;
  entry.status = status;
  if (marked_++ == 0) marked_why_ = std::move(why);
  FailMarked();
}

void IbRequester::FailMarked() {
  if (marked_ == 0 || failed_ || done_ == next_start_) return;
  const WorkStatus status = At(done_).status;
  if (status != WorkStatus::kSuccess) Fail(status, marked_why_);
}

void IbRequester::Fail(WorkStatus status, std::string why, uint8_t syndrome) {
  STAGECOACH_CHECK(!failed_ && done_ < end());
  const uint64_t number = done_;
  const SendWork& work = *At(number).work;
  const uint32_t length = At(number).length;
  Trace(context_.trace, context_.now, context_.name, "work.failed",
        {{"opcode", ToString(work.opcode)}, {"status", ToString(status)}});
  context_.Raise(context_.acknowledged() ? FaultKind::kWork : FaultKind::kSendQueue, syndrome, syndrome != 0,
                 std::string(ToString(status)) + ": " + why + " (" + DescribeWork(work, length) + ")");
  failed_ = true;
  FlushFrom(number);
  At(number).status = status;
}

}  // namespace stagecoach::emu
