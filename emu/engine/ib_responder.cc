#include "emu/engine/ib_responder.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

using wire::IbOp;
using wire::kPsnMask;
using wire::PsnAdd;
using wire::PsnCompare;
using wire::PsnOffset;

// The rest of an answer's cookie: which packet, and whether it has been sent before.
constexpr uint64_t kReplayBit = uint64_t{1} << 24;

}  // namespace

IbResponder::IbResponder(IbContext& context) : context_(context), epsn_(context.options.receive_psn & kPsnMask) {}

void IbResponder::OnCarrier(bool up) {
  if (up) return;
  judged_ = {};
  queued_records_ = 0;
  if (fatal_nak_) fatal_nak_->queued = false;
}

// --- Judging ---

const IbResponder::Message& IbResponder::MessageInProgress() const {
  static constexpr Message kNone{};
  return judged_.abandon ? kNone : message_;
}

bool IbResponder::Refuse(uint8_t syndrome, FaultKind kind, WorkStatus receive_status, std::string_view why) {
  if (!context_.acknowledged()) {
    judged_.verdict = Verdict::kDrop;
    judged_.abandon = true;
    return false;
  }
  judged_.verdict = Verdict::kFault;
  judged_.fault = {.syndrome = syndrome, .kind = kind, .receive_status = receive_status, .why = std::string(why)};
  return false;
}

void IbResponder::Judge(const wire::IbHeader& header, uint32_t payload) {
  judged_ = {.header = header, .payload = payload};
  int32_t ahead = PsnCompare(header.psn, epsn_);
  if (STAGECOACH_MUTANT("oldest-psn-is-new", "the packet number that is half a circle behind is taken for a new one") &&
      ahead == -(1 << 23)) {
    ahead = -ahead;
  }
  if (context_.acknowledged()) {
    if (ahead > 0) {
      judged_.verdict = nak_sent_ ? Verdict::kDrop : Verdict::kSequenceNak;
    } else if (ahead < 0) {
      JudgeDuplicate();
    } else {
      JudgeInOrder();
    }
    return;
  }
  // [IBTA 9.8.3] What is missing is gone; the next message that begins is taken.
  if (ahead < 0) return;
  judged_.in_order = true;
  judged_.abandon = ahead > 0;
  JudgeInOrder();
}

void IbResponder::JudgeInOrder() {
  if (!FollowsInSequence()) return;
  if (!IsEnabled()) {
    Refuse(wire::kIbNakInvalidRequest, FaultKind::kProtocol, WorkStatus::kRemoteInvalidRequest,
           "not among the QP's access flags");
    return;
  }
  if (HasResources() && HasRightLength() && NamesUsableMemory()) judged_.verdict = Verdict::kTake;
}

bool IbResponder::FollowsInSequence() {
  const IbOp op = judged_.header.op;
  const auto wanted = wire::BeginsMessage(op) ? Message::Kind::kNone
                      : wire::IsSend(op)      ? Message::Kind::kSend
                                              : Message::Kind::kWrite;
  if (MessageInProgress().kind == wanted) return true;
  if (!context_.acknowledged() && wire::BeginsMessage(op)) {
    judged_.abandon = true;
    return true;
  }
  return Refuse(wire::kIbNakInvalidRequest, FaultKind::kProtocol, WorkStatus::kRemoteInvalidRequest,
                "does not follow the packet before it");
}

bool IbResponder::IsEnabled() const {
  const IbOp op = judged_.header.op;
  uint32_t needed = 0;
  if (wire::IsWrite(op)) needed = ib_access::kRemoteWrite;
  if (op == IbOp::kReadRequest) needed = ib_access::kRemoteRead;
  if (wire::IsAtomic(op)) needed = ib_access::kRemoteAtomic;
  return (context_.options.access & needed) == needed;
}

bool IbResponder::HasResources() {
  const IbOp op = judged_.header.op;
  const bool needs_receive = wire::IsSend(op) ? wire::BeginsMessage(op) : wire::HasImmediate(op);
  if (needs_receive && receive_ == nullptr) receive_ = context_.receives.TakeReceive();
  if (needs_receive && receive_ == nullptr) {
    judged_.verdict = context_.acknowledged() ? Verdict::kRnrNak : Verdict::kDrop;
    judged_.abandon = !context_.acknowledged();
    return false;
  }
  if (op != IbOp::kReadRequest && !wire::IsAtomic(op)) return true;
  // The oldest may be forgotten if it was answered: who asks for one more than there may be has its answer.
  const size_t most = context_.options.max_dest_rd_atomic;
  if (most == 0 || (resources_.size() >= most && !resources_[resources_.size() - most].answered)) {
    return Refuse(wire::kIbNakInvalidRequest, FaultKind::kProtocol, WorkStatus::kFlushed,
                  "more Reads and atomics outstanding than the QP allows");
  }
  return true;
}

bool IbResponder::HasRightLength() {
  const wire::IbHeader& header = judged_.header;
  const Message& message = MessageInProgress();
  const uint32_t mtu = context_.options.mtu;
  const uint32_t payload = judged_.payload;
  const auto refuse = [&](WorkStatus receive_status, FaultKind kind, std::string_view why) {
    return Refuse(wire::kIbNakInvalidRequest, kind, receive_status, why);
  };
  if (header.op == IbOp::kReadRequest) {
    if (header.dma_length <= context_.options.max_message_bytes) return true;
    return refuse(WorkStatus::kFlushed, FaultKind::kProtocol, "longer than the longest message");
  }
  if (wire::IsAtomic(header.op)) {
    if (header.address % kIbAtomicSize == 0) return true;
    return refuse(WorkStatus::kFlushed, FaultKind::kProtocol, "atomic on an address that is not aligned");
  }
  const bool begins = wire::BeginsMessage(header.op);
  const bool ends = wire::EndsMessage(header.op);
  if (!ends ? payload != mtu : payload > mtu || (payload == 0 && !begins)) {
    return refuse(WorkStatus::kRemoteInvalidRequest, FaultKind::kProtocol, "packet length does not fit the path MTU");
  }
  if (wire::IsSend(header.op)) {
    const uint64_t length = uint64_t{message.received} + payload;
    if (length > context_.options.max_message_bytes) {
      return refuse(WorkStatus::kRemoteInvalidRequest, FaultKind::kProtocol, "longer than the longest message");
    }
    if (length <= TotalLength(receive_->sges)) return true;
    return refuse(WorkStatus::kLocalLengthError, FaultKind::kWork, "longer than the Receive");
  }
  const uint32_t length = begins ? header.dma_length : message.length;
  const uint32_t left = length - message.received;
  if (length <= context_.options.max_message_bytes && (ends ? payload == left : payload < left)) return true;
  return refuse(WorkStatus::kRemoteInvalidRequest, FaultKind::kProtocol, "packets do not add up to the DMA length");
}

bool IbResponder::NamesUsableMemory() {
  const wire::IbHeader& header = judged_.header;
  // Atomics are judged where they are carried out. Nothing is asked of a key for no bytes.
  const bool write = wire::IsWrite(header.op) && wire::BeginsMessage(header.op);
  if ((!write && header.op != IbOp::kReadRequest) || header.dma_length == 0) return true;
  const auto access = write ? MemoryAccess::kRemoteWrite : MemoryAccess::kRemoteRead;
  const auto pin = context_.memory.Pin(header.rkey, header.address, header.dma_length, access);
  if (pin) return true;
  return Refuse(wire::kIbNakRemoteAccess, FaultKind::kProtection,
                wire::HasImmediate(header.op) ? WorkStatus::kLocalAccessError : WorkStatus::kFlushed,
                ToString(pin.error()));
}

void IbResponder::JudgeDuplicate() {
  const wire::IbHeader& header = judged_.header;
  if (wire::IsSend(header.op) || wire::IsWrite(header.op)) {
    judged_.verdict = Verdict::kDuplicate;
    return;
  }
  for (size_t i = 0; i < resources_.size(); ++i) {
    const Resource& resource = resources_[i];
    const wire::IbHeader& request = resource.request;
    const uint32_t index = PsnOffset(header.psn, request.psn);
    if (index >= resource.packets || header.op != request.op || header.rkey != request.rkey) continue;
    // A Read may be asked for again from the middle, never for more than before.
    const uint64_t skipped = uint64_t{index} * context_.options.mtu;
    if (header.address != request.address + skipped || header.dma_length > request.dma_length - skipped) continue;
    judged_.verdict = Verdict::kReplay;
    judged_.resource = resource_first_ + i;
    return;
  }
  // Nobody waits for its answer, unless the peer's numbers are others than ours. The specification has it dropped. What
  // has been acknowledged already is said again, by which such a peer knows that this end runs (0061).
  judged_.verdict = Verdict::kDuplicate;
}

bool IbResponder::PlacementMayWait() const {
  return judged_.verdict == Verdict::kTake && wire::IsWrite(judged_.header.op) &&
         !wire::HasImmediate(judged_.header.op);
}

bool IbResponder::EndsWrite() const {
  return judged_.verdict == Verdict::kTake && wire::IsWrite(judged_.header.op) && wire::EndsMessage(judged_.header.op);
}

void IbResponder::Pin(IbDestination& destination) {
  if (judged_.verdict != Verdict::kTake || judged_.payload == 0) return;
  const wire::IbHeader& header = judged_.header;
  const Message& message = MessageInProgress();
  if (wire::IsSend(header.op)) {
    const auto added = destination.AddLocal(context_.memory, receive_->sges, message.received, judged_.payload,
                                            MemoryAccess::kReceive);
    if (added) return;
    destination.Clear();
    OnPlacementFault(added.error());
    return;
  }
  const bool begins = wire::BeginsMessage(header.op);
  const auto added = destination.Add(context_.memory, begins ? header.rkey : message.rkey,
                                     begins ? header.address : message.address + message.received, judged_.payload,
                                     MemoryAccess::kRemoteWrite);
  if (added) return;
  destination.Clear();
  OnPlacementFault(added.error());
}

void IbResponder::OnPlacementFault(MemoryFault fault) {
  const wire::IbHeader& header = judged_.header;
  if (wire::IsSend(header.op)) {
    // The Receive can never be filled, so that UC ends as well.
    judged_.verdict = Verdict::kFault;
    judged_.fault = {.syndrome = context_.acknowledged() ? wire::kIbNakRemoteOperation : uint8_t{0},
                     .kind = FaultKind::kWork,
                     .receive_status = WorkStatus::kLocalProtectionError,
                     .why = std::string("memory of the Receive: ") + ToString(fault)};
    return;
  }
  Refuse(wire::kIbNakRemoteAccess, FaultKind::kProtection,
         wire::HasImmediate(header.op) ? WorkStatus::kLocalAccessError : WorkStatus::kFlushed, ToString(fault));
}

// --- Carrying out ---

void IbResponder::Commit(const MemoryTrail& placed) {
  if (judged_.verdict == Verdict::kTake || judged_.verdict == Verdict::kRnrNak || judged_.verdict == Verdict::kFault) {
    first_packet_ = first_packet_ || !first_packet_told_;
    first_packet_told_ = true;
  }
  if (judged_.abandon) message_ = {};
  switch (judged_.verdict) {
    case Verdict::kDrop:
      if (judged_.in_order) epsn_ = PsnAdd(judged_.header.psn, 1);
      break;
    case Verdict::kTake:
      Take(placed);
      break;
    case Verdict::kDuplicate:
      Acknowledge(/*after_rnr=*/false);
      break;
    case Verdict::kReplay:
      Replay();
      break;
    case Verdict::kSequenceNak:
      nak_sent_ = true;
      control_ = Control{.syndrome = wire::kIbNakSequence};
      Trace(context_.trace, context_.now, context_.name, "nak.raised",
            {{"syndrome", uint64_t{wire::kIbNakSequence}}, {"psn", uint64_t{epsn_}}});
      break;
    case Verdict::kRnrNak:
      nak_sent_ = true;
      control_ = Control{.syndrome = static_cast<uint8_t>(wire::kIbRnrNak | (context_.options.min_rnr_timer & 0x1f))};
      if (STAGECOACH_MUTANT("rnr-timer-loses-top-bit", "of the timer of an RNR NAK four bits are sent")) {
        control_->syndrome &= 0xef;
      }
      Trace(context_.trace, context_.now, context_.name, "nak.raised",
            {{"syndrome", uint64_t{control_->syndrome}}, {"psn", uint64_t{epsn_}}});
      break;
    case Verdict::kFault: {
      const wire::IbHeader& header = judged_.header;
      Fault fault = judged_.fault;
      fault.why = "the peer's " + wire::Describe(header) + ": " + fault.why;
      Fail(fault, header.psn);
      break;
    }
  }
  judged_ = {};
}

void IbResponder::Take(const MemoryTrail& placed) {
  const wire::IbHeader& header = judged_.header;
  // As of RdmapStream: where the payload begins and how much of it lies there. An atomic has none and changes eight
  // bytes; what a Read is answered from is told by "response.started".
  MemoryPlace place = placed.first();
  if (wire::IsAtomic(header.op)) {
    if (!TakeAtomic(&place)) return;
  } else if (header.op == IbOp::kReadRequest) {
    TakeRead();
  } else {
    const bool done = wire::IsSend(header.op) ? TakeSend() : TakeWrite();
    if (done) epsn_ = PsnAdd(header.psn, 1);
    if (done && header.ack_request && context_.acknowledged()) Acknowledge(/*after_rnr=*/true);
  }
  nak_sent_ = false;
  context_.TracePlaced(header, judged_.payload, place, placed);
}

bool IbResponder::TakeSend() {
  const wire::IbHeader& header = judged_.header;
  message_.kind = Message::Kind::kSend;
  message_.received += judged_.payload;
  if (!wire::EndsMessage(header.op)) return true;
  ReceiveCompletion completion{.work = receive_, .byte_length = message_.received};
  if (wire::HasInvalidate(header.op)) {
    // Before the Receive completes: the program may rely on it when it sees the completion. A key that cannot be
    // invalidated is a fault of class J (section 9.9.3): this end fails, and the message is not answered.
    const auto invalidated = context_.memory.InvalidateRemotely(header.invalidate_rkey);
    if (invalidated) {
      Trace(context_.trace, context_.now, context_.name, "window.invalidated",
            {{"stag", uint64_t{header.invalidate_rkey}}, {"by", "peer"}});
      completion.invalidated = true;
      completion.invalidated_stag = header.invalidate_rkey;
    } else {
      context_.Raise(FaultKind::kWork, 0, false,
                     "the peer's " + wire::Describe(header) + ": " + ToString(invalidated.error()));
      completion.status = WorkStatus::kRemoteInvalidRequest;
    }
  }
  const bool done = completion.status == WorkStatus::kSuccess;
  if (done) ++msn_;
  CompleteReceive(completion);
  return done;
}

bool IbResponder::TakeWrite() {
  const wire::IbHeader& header = judged_.header;
  if (wire::BeginsMessage(header.op)) {
    message_ = {
        .kind = Message::Kind::kWrite, .rkey = header.rkey, .address = header.address, .length = header.dma_length};
  }
  message_.received += judged_.payload;
  if (!wire::EndsMessage(header.op)) return true;
  ++msn_;
  if (wire::HasImmediate(header.op)) {
    CompleteReceive({.work = receive_, .byte_length = message_.length, .write_immediate = true});
  } else {
    message_ = {};
  }
  return true;
}

void IbResponder::CompleteReceive(ReceiveCompletion completion) {
  const wire::IbHeader& header = judged_.header;
  message_ = {};
  receive_ = nullptr;
  if (completion.status == WorkStatus::kSuccess) {
    completion.solicited = header.solicited;
    completion.has_immediate = wire::HasImmediate(header.op);
    completion.immediate = header.immediate;
  } else {
    completion = {.work = completion.work, .status = completion.status};
  }
  completions_.push_back(completion);
}

void IbResponder::TakeRead() {
  const wire::IbHeader& header = judged_.header;
  const uint32_t packets = IbPacketsOf(header.dma_length, context_.options.mtu);
  epsn_ = PsnAdd(header.psn, packets);
  ++msn_;
  Remember({.request = header, .packets = packets, .msn = msn_});
  Push({.resource = resource_first_ + resources_.size() - 1,
        .psn = header.psn,
        .address = header.address,
        .left = header.dma_length});
}

bool IbResponder::TakeAtomic(MemoryPlace* changed) {
  const wire::IbHeader& header = judged_.header;
  const auto op = header.op == IbOp::kFetchAdd ? AtomicOp::kFetchAdd : AtomicOp::kCompareSwap;
  const auto outcome = context_.memory.Atomic(header.rkey, header.address, op, header.swap_or_add, header.compare);
  if (!outcome) {
    const bool misaligned = outcome.error() == MemoryFault::kMisaligned;
    Fail({.syndrome = misaligned ? wire::kIbNakInvalidRequest : wire::kIbNakRemoteAccess,
          .kind = misaligned ? FaultKind::kProtocol : FaultKind::kProtection,
          .why = "the peer's " + wire::Describe(header) + ": " + ToString(outcome.error())},
         header.psn);
    return false;
  }
  *changed = {.stag = header.rkey, .offset = outcome->offset, .length = kIbAtomicSize};
  epsn_ = PsnAdd(header.psn, 1);
  ++msn_;
  Remember({.request = header, .msn = msn_, .original = outcome->original});
  Push({.resource = resource_first_ + resources_.size() - 1, .psn = header.psn});
  return true;
}

void IbResponder::Remember(Resource resource) {
  while (!resources_.empty() && resources_.size() >= context_.options.max_dest_rd_atomic) {
    resources_.pop_front();
    ++resource_first_;
  }
  // Answers that were to be repeated for those that are forgotten are not needed: the peer has gone on.
  for (size_t n = jobs_.size(); n > 0; --n) {
    const Job job = jobs_.front();
    jobs_.pop_front();
    if (job.resource >= resource_first_) jobs_.push_back(job);
  }
  resources_.push_back(std::move(resource));
}

// One answer for each resource at most: the latest that was asked for, in the order in which they were.
void IbResponder::Push(const Job& job) {
  for (size_t n = jobs_.size(); n > 0; --n) {
    const Job other = jobs_.front();
    jobs_.pop_front();
    if (other.resource != job.resource) jobs_.push_back(other);
  }
  jobs_.push_back(job);
}

void IbResponder::Replay() {
  const wire::IbHeader& header = judged_.header;
  STAGECOACH_MARK("rc.answer_repeated");
  Trace(context_.trace, context_.now, context_.name, "answer.repeated",
        {{"opcode", wire::ToString(header.op)}, {"psn", uint64_t{header.psn}}});
  const Job job{.resource = judged_.resource,
                .psn = header.psn,
                .address = header.address,
                .left = header.dma_length,
                .replay = At(judged_.resource).answered};
  Push(job);
}

// A NAK that waits says as much; only what ends the wait for a Receive takes the place of one.
void IbResponder::Acknowledge(bool after_rnr) {
  if (control_) {
    const auto kind = wire::KindOfSyndrome(control_->syndrome);
    if (kind == wire::IbSyndromeKind::kNak) return;
    if (kind == wire::IbSyndromeKind::kRnrNak && !after_rnr) return;
  }
  control_ = Control{.syndrome = wire::kIbAck};
}

// --- Endings ---

void IbResponder::Fail(const Fault& fault, uint32_t psn) {
  Trace(context_.trace, context_.now, context_.name, "nak.raised",
        {{"syndrome", uint64_t{fault.syndrome}}, {"psn", uint64_t{psn}}});
  const std::string name = fault.syndrome != 0 ? wire::SyndromeToString(fault.syndrome) : "no answer";
  context_.Raise(fault.kind, fault.syndrome, false, name + " (" + fault.why + ")");
  FailReceive(fault.receive_status);
  control_.reset();
  if (fault.syndrome != 0) fatal_nak_ = Control{.syndrome = fault.syndrome, .psn = psn};
}

void IbResponder::FailReceive(WorkStatus status) {
  message_ = {};
  if (receive_ == nullptr) return;
  completions_.push_back({.work = receive_, .status = status});
  receive_ = nullptr;
}

void IbResponder::Close() {
  FailReceive(WorkStatus::kFlushed);
  if (fatal_nak_) return;  // it follows the answers to what came before
  // The memory of Reads is the program's again, and nothing can be told behind an answer that is missing.
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (At(jobs_[i].resource).request.op != IbOp::kReadRequest) continue;
    Ring<Job> kept;
    for (size_t k = 0; k < i; ++k) kept.push_back(jobs_[k]);
    jobs_ = std::move(kept);
    control_.reset();
    return;
  }
}

bool IbResponder::TakeCompletion(ReceiveCompletion* completion) {
  if (completions_.empty()) return false;
  *completion = completions_.front();
  completions_.pop_front();
  return true;
}

// --- Answering ---

bool IbResponder::QueueNext(RecordSink& sink) {
  while (!jobs_.empty()) {
    const uint32_t before = queued_records_;
    QueueAnswer(sink);
    if (queued_records_ != before) return true;
  }
  if (fatal_nak_) {
    if (fatal_nak_->queued) return false;
    fatal_nak_->queued = true;
    QueueControl(sink, *fatal_nak_, IbCookie::kFatalNak);
    return true;
  }
  if (!control_) return false;
  Control control = *control_;
  control_.reset();
  const bool ack = control.syndrome == wire::kIbAck;
  control.psn = ack ? PsnAdd(epsn_, kPsnMask) : epsn_;  // the last that came, or the one that is wanted
  QueueControl(sink, control, IbCookie::kControl);
  return true;
}

void IbResponder::QueueControl(RecordSink& sink, const Control& control, IbCookie kind) {
  wire::IbHeader header = context_.Header(IbOp::kAck, control.psn);
  header.syndrome = control.syndrome;
  header.msn = msn_;
  ++queued_records_;
  QueueIbPacket(sink, header, {}, MakeIbCookie(kind, 0));
}

void IbResponder::QueueAnswer(RecordSink& sink) {
  Job& job = jobs_.front();
  Resource& resource = At(job.resource);
  const uint64_t cookie = MakeIbCookie(IbCookie::kResponse, job.psn | (job.replay ? kReplayBit : 0));
  // It acknowledges all before it; an acknowledgement that says no more has nothing to say.
  if (control_ && control_->syndrome == wire::kIbAck && PsnCompare(PsnAdd(job.psn, 1), epsn_) >= 0) control_.reset();
  wire::IbHeader header = context_.Header(IbOp::kAtomicAck, job.psn);
  header.syndrome = wire::kIbAck;
  header.msn = resource.msn;
  if (wire::IsAtomic(resource.request.op)) {
    header.original = resource.original;
    resource.answered = true;
    jobs_.pop_front();
    ++queued_records_;
    QueueIbPacket(sink, header, {}, cookie);
    return;
  }
  const uint32_t size = std::min(job.left, context_.options.mtu);
  const bool last = size == job.left;
  MemoryPlace source;
  if (size > 0) {
    // The source was good when the request came. It may have gone since, for an answer that is only repeated even
    // lawfully: the peer may have had it the first time. Nor need it be there at all, and a packet that cannot be
    // finished would cost the carrier, with the answers to what came before.
    const auto pin = context_.memory.Pin(resource.request.rkey, job.address, size, MemoryAccess::kRemoteRead);
    if (!pin || !IsReadable(pin->bytes())) {
      const bool replay = job.replay;
      const uint32_t psn = job.psn;
      if (replay) {
        jobs_.pop_front();
        return;
      }
      jobs_.clear();
      Fail({.syndrome = wire::kIbNakRemoteAccess,
            .kind = FaultKind::kProtection,
            .why = std::string("source of the peer's Read gone before the answer: ") +
                   ToString(pin ? MemoryFault::kUnmapped : pin.error())},
           psn);
      return;
    }
    source = {.stag = resource.request.rkey, .offset = pin->offset()};
  }
  if (!job.begun) {
    Trace(context_.trace, context_.now, context_.name, "response.started",
          {{"length", uint64_t{job.left}},
           {"psn", uint64_t{job.psn}},
           {"stag", uint64_t{source.stag}},
           {"offset", source.offset}});
  }
  header.op = job.begun ? (last ? IbOp::kReadLast : IbOp::kReadMiddle) : (last ? IbOp::kReadOnly : IbOp::kReadFirst);
  const TxPart part{.by_key = true,
                    .key = resource.request.rkey,
                    .address = job.address,
                    .length = size,
                    .access = MemoryAccess::kRemoteRead};
  job.begun = true;
  job.psn = PsnAdd(job.psn, 1);
  job.address += size;
  job.left -= size;
  if (last) {
    // One that was asked for in part is answered whole together with what came before.
    if (job.psn == PsnAdd(resource.request.psn, resource.packets)) resource.answered = true;
    jobs_.pop_front();
  }
  ++queued_records_;
  QueueIbPacket(sink, header, {&part, size > 0 ? size_t{1} : size_t{0}}, cookie);
}

void IbResponder::OnSent(uint64_t cookie) {
  if (queued_records_ > 0) --queued_records_;
  if (static_cast<IbCookie>(cookie & 3) == IbCookie::kFatalNak) fatal_nak_.reset();
}

void IbResponder::OnTxMemoryFault(uint64_t cookie, MemoryFault fault) {
  Trace(context_.trace, context_.now, context_.name, "tx.memory_fault", {{"fault", ToString(fault)}});
  if (((cookie >> 2) & kReplayBit) != 0 || fatal_nak_) return;
  jobs_.clear();
  Fail({.syndrome = wire::kIbNakRemoteAccess,
        .kind = FaultKind::kProtection,
        .why = std::string("source of the peer's Read gone while the answer was sent: ") + ToString(fault)},
       static_cast<uint32_t>(cookie >> 2) & kPsnMask);
}

}  // namespace stagecoach::emu
