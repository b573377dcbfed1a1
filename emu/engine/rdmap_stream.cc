#include "emu/engine/rdmap_stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/cursor.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

namespace terminate = wire::terminate;
using wire::RdmapOpcode;
using wire::SegmentHeader;
using wire::TerminateCode;

std::string StagText(uint32_t stag) {
  std::array<std::byte, 4> bytes;
  ByteWriter(bytes).U32(stag);
  return "STag 0x" + ToHex(bytes);
}

// [RFC5040 section 4.8] The source of a Read is checked by RDMAP, and so is the target of an atomic. RFC 7306 registers
// no code of its own: one that is not aligned is refused like other uses that protection does not allow.
TerminateCode ReadSourceCode(MemoryFault fault) {
  switch (fault) {
    case MemoryFault::kUnknownStag:
    case MemoryFault::kStaleStag:
      return terminate::kRdmapInvalidStag;
    case MemoryFault::kForeignStag:
      return terminate::kRdmapForeignStag;
    case MemoryFault::kOutOfRange:
      return terminate::kRdmapBounds;
    case MemoryFault::kNoPermission:
    case MemoryFault::kUnmapped:
      return terminate::kRdmapAccess;
    case MemoryFault::kMisaligned:  // of atomics alone
      break;
  }
  return terminate::kRdmapProtectionUnspecified;
}

// [RFC5041 section 7] A tagged buffer is checked by DDP, which knows nothing of access rights: those are RDMAP's to
// refuse.
TerminateCode WriteTargetCode(MemoryFault fault) {
  switch (fault) {
    case MemoryFault::kUnknownStag:
    case MemoryFault::kStaleStag:
      return terminate::kDdpInvalidStag;
    case MemoryFault::kForeignStag:
      return terminate::kDdpForeignStag;
    case MemoryFault::kOutOfRange:
      return terminate::kDdpBounds;
    case MemoryFault::kNoPermission:
    case MemoryFault::kUnmapped:
      return terminate::kRdmapAccess;
    case MemoryFault::kMisaligned:
      break;
  }
  return terminate::kDdpInvalidStag;
}

// How the requester's work request fails when the peer says why.
WorkStatus StatusOfPeerFault(TerminateCode code) {
  const bool rdmap = code.layer == static_cast<uint8_t>(wire::TerminateLayer::kRdmap);
  const bool ddp = code.layer == static_cast<uint8_t>(wire::TerminateLayer::kDdp);
  if (code == terminate::kRdmapVersion || code == terminate::kRdmapOpcode) return WorkStatus::kRemoteInvalidRequest;
  if (code == terminate::kRdmapCannotInvalidate) return WorkStatus::kRemoteAccessError;
  if (code == terminate::kDdpTaggedVersion) return WorkStatus::kRemoteInvalidRequest;
  if (code == terminate::kDdpNoBuffer) return WorkStatus::kRemoteOperationError;
  if ((rdmap || ddp) && code.error_type == 1) return WorkStatus::kRemoteAccessError;
  if (ddp && code.error_type == 2) return WorkStatus::kRemoteInvalidRequest;
  return WorkStatus::kRemoteOperationError;
}

bool Wraps(uint64_t offset, uint64_t length) {
  return length > 0 && offset + (length - 1) < offset;
}

bool IsCarried(SendOpcode opcode, wire::RdmapExtensions extensions) {
  switch (opcode) {
    case SendOpcode::kSend:
    case SendOpcode::kSendInvalidate:
    case SendOpcode::kWrite:
    case SendOpcode::kRead:
      return true;
    case SendOpcode::kWriteImmediate:
    case SendOpcode::kCompareSwap:
    case SendOpcode::kFetchAdd:
      return extensions == wire::RdmapExtensions::kRfc7306;
    case SendOpcode::kSendImmediate:
      break;
  }
  return false;
}

bool IsWrite(SendOpcode opcode) {
  return opcode == SendOpcode::kWrite || opcode == SendOpcode::kWriteImmediate;
}

bool IsAtomic(SendOpcode opcode) {
  return opcode == SendOpcode::kCompareSwap || opcode == SendOpcode::kFetchAdd;
}

// Done when the peer has answered.
bool IsAnswered(SendOpcode opcode) {
  return opcode == SendOpcode::kRead || IsAtomic(opcode);
}

constexpr uint32_t kAtomicSize = sizeof(uint64_t);

std::string DescribeWork(const SendWork& work, uint32_t length) {
  std::string text = std::string("our ") + ToString(work.opcode) + " of " + std::to_string(length) + " bytes";
  if (IsWrite(work.opcode)) text += " to " + StagText(work.remote_stag);
  if (work.opcode == SendOpcode::kRead) text += " from " + StagText(work.remote_stag);
  if (IsAtomic(work.opcode)) text += " at " + StagText(work.remote_stag);
  return text;
}

// A message whose payload is at hand, in one record.
template <typename Message>
void QueueMessage(RecordSink& sink, const SegmentHeader& header, const Message& message, uint64_t cookie) {
  static_assert(wire::kDdpUntaggedHeaderSize + Message::EncodedSize() <= kMaxTxHeader);
  std::array<std::byte, kMaxTxHeader> bytes;
  ByteWriter writer(bytes);
  header.Encode(writer);
  message.Encode(writer);
  sink.QueueRecord(writer.written(), {}, cookie);
}

uint64_t TotalLength(std::span<const ScatterGather> parts) {
  uint64_t total = 0;
  for (const ScatterGather& part : parts) total += part.length;
  return total;
}

}  // namespace

RdmapStream::RdmapStream(const RdmapOptions& options, MemoryPort& memory, ReceiveSource& receives, TraceSink* trace,
                         std::string name)
    : options_(options),
      memory_(memory),
      receives_(receives),
      trace_(trace),
      name_(std::move(name)),
      trail_(trace != nullptr) {
  pins_.reserve(kMaxTxParts);
  destination_.reserve(kMaxTxParts);
}

// --- Commands ---

void RdmapStream::Submit(const SendWork* work) {
  SendEntry& entry = sq_.push_back({.work = work});
  if (state_ == State::kActive) return;
  STAGECOACH_MARK("rdmap.work_submitted_after_the_end");
  entry.phase = SendEntry::Phase::kDone;
  entry.status = WorkStatus::kFlushed;
  next_start_ = sq_first_ + sq_.size();
}

void RdmapStream::SendRtr(RtrKind kind) {
  rtr_ = kind;
}

void RdmapStream::Nudge() {
  nudge_ = true;
}

void RdmapStream::Flush() {
  // A Terminate on its way has flushed already, and ends the stream by itself.
  if (state_ != State::kActive) return;
  Trace(trace_, now_, name_, "flush");
  if (HasOutstandingWork()) STAGECOACH_MARK("rdmap.flush_with_work_outstanding");
  FailReceive(WorkStatus::kFlushed);
  End();
}

// --- Receiving ---

std::optional<size_t> RdmapStream::OnRecord(const RecordHead& record, Instant now) {
  now_ = now;
  if (state_ != State::kActive) return std::nullopt;
  const auto header = wire::DecodeSegment(record.head, record.length, options_.extensions);
  if (!header) {
    STAGECOACH_MARK("rdmap.malformed_segment");
    FaultQuoting(header.error().terminate, record.head, record.length, wire::ToString(header.error()));
    return std::nullopt;
  }
  current_ = *header;
  current_length_ = record.length;
  const size_t header_size = current_.EncodedSize();
  current_payload_ = static_cast<uint32_t>(record.length - header_size);

  bool accepted = false;
  switch (current_.opcode()) {
    case RdmapOpcode::kWrite:
      accepted = AcceptWrite();
      break;
    case RdmapOpcode::kReadRequest:
      accepted = AcceptReadRequest();
      break;
    case RdmapOpcode::kReadResponse:
      accepted = AcceptReadResponse();
      break;
    case RdmapOpcode::kTerminate:
      accepted = AcceptTerminate();
      break;
    case RdmapOpcode::kSend:
    case RdmapOpcode::kSendInvalidate:
    case RdmapOpcode::kSendSolicited:
    case RdmapOpcode::kSendSolicitedInvalidate:
      accepted = AcceptSend();
      break;
    case RdmapOpcode::kImmediate:
    case RdmapOpcode::kImmediateSolicited:
      accepted = AcceptImmediate();
      break;
    case RdmapOpcode::kAtomicRequest:
      accepted = AcceptAtomicRequest();
      break;
    case RdmapOpcode::kAtomicResponse:
      accepted = AcceptAtomicResponse();
      break;
  }
  if (!accepted) return std::nullopt;
  return header_size;
}

bool RdmapStream::AcceptSend() {
  const bool narrow = STAGECOACH_MUTANT("msn-of-24-bits", "of the sequence number of a Send 24 bits are looked at");
  if (((current_.sequence_number ^ expected_send_msn_) & (narrow ? 0xffffff : 0xffffffff)) != 0) {
    FaultOnCurrent(terminate::kDdpMsnRange, "MSN out of sequence");
    return false;
  }
  if (current_.message_offset != (inbound_ ? inbound_->received : 0)) {
    FaultOnCurrent(terminate::kDdpMessageOffset, "message offset out of sequence");
    return false;
  }
  if (!inbound_) {
    if (!TakeReceive()) return false;
  } else if (current_.opcode() != inbound_->opcode) {
    FaultOnCurrent(terminate::kRdmapOpcode, "segments of one message differ in opcode");
    return false;
  }
  if (uint64_t{inbound_->received} + current_payload_ > inbound_->capacity) {
    STAGECOACH_MARK("rdmap.send_longer_than_its_receive");
    FailReceive(WorkStatus::kLocalLengthError);
    FaultOnCurrent(terminate::kDdpTooLong, "longer than the Receive");
    return false;
  }
  return true;
}

bool RdmapStream::TakeReceive() {
  const ReceiveWork* receive = receives_.TakeReceive();
  if (receive == nullptr) {
    STAGECOACH_MARK("rdmap.no_receive_posted");
    FaultOnCurrent(terminate::kDdpNoBuffer, "no Receive is posted");
    return false;
  }
  inbound_ = InboundSend{
      .receive = receive, .opcode = current_.opcode(), .capacity = TotalLength(receive->sges), .received = 0};
  return true;
}

bool RdmapStream::AcceptImmediate() {
  if (current_.sequence_number != expected_send_msn_) {
    FaultOnCurrent(terminate::kDdpMsnRange, "MSN out of sequence");
    return false;
  }
  // It has the number of the Send in hand, whose segments are not all here.
  if (inbound_) {
    FaultOnCurrent(terminate::kRdmapOpcode, "segments of one message differ in opcode");
    return false;
  }
  return TakeReceive();
}

bool RdmapStream::IsRequestInTurn() {
  if (current_.sequence_number != expected_read_msn_) {
    FaultOnCurrent(terminate::kDdpMsnRange, "MSN out of sequence");
    return false;
  }
  if (responses_.size() >= options_.ird) {
    STAGECOACH_MARK("rdmap.more_reads_than_ird_allows");
    FaultOnCurrent(terminate::kRdmapStreamCatastrophic, "more outstanding Reads and atomics than IRD allows");
    return false;
  }
  return true;
}

// The request itself follows as payload, and is judged when it is here.
bool RdmapStream::AcceptAtomicRequest() {
  return IsRequestInTurn();
}

bool RdmapStream::AcceptAtomicResponse() {
  if (current_.sequence_number != expected_atomic_response_msn_) {
    FaultOnCurrent(terminate::kDdpMsnRange, "MSN out of sequence");
    return false;
  }
  if (reads_.empty() || !reads_.front().atomic) {
    STAGECOACH_MARK("rdmap.answer_to_no_atomic");
    FaultOnCurrent(terminate::kRdmapOpcode, "no atomic is next to be answered");
    return false;
  }
  return true;
}

bool RdmapStream::AcceptReadRequest() {
  const wire::ReadRequest& request = current_.read_request;
  if (!IsRequestInTurn()) return false;
  if (Wraps(request.source_offset, request.length)) {
    FaultOnCurrent(terminate::kRdmapOffsetWrap, "tagged offset wraps");
    return false;
  }
  // [RFC5040] A Read of no bytes is not checked against memory.
  if (request.length == 0) return true;
  const auto pin = memory_.Pin(request.source_stag, request.source_offset, request.length, MemoryAccess::kRemoteRead);
  if (pin) return true;
  STAGECOACH_MARK("rdmap.source_of_a_read_refused");
  FaultOnCurrent(ReadSourceCode(pin.error()), ToString(pin.error()));
  return false;
}

bool RdmapStream::AcceptReadResponse() {
  if (reads_.empty()) {
    FaultOnCurrent(terminate::kRdmapOpcode, "no Read is outstanding");
    return false;
  }
  const OutboundRead& read = reads_.front();
  if (read.atomic) {
    FaultOnCurrent(terminate::kRdmapOpcode, "an atomic is next to be answered");
    return false;
  }
  const uint64_t end = uint64_t{read.received} + current_payload_;
  if (end > read.length || current_.last != (end == read.length)) {
    FaultOnCurrent(terminate::kDdpBounds, "does not have the length that was asked for");
    return false;
  }
  if (read.length == 0) return true;  // names no memory
  if (current_.stag != read.sink_stag) {
    FaultOnCurrent(terminate::kDdpInvalidStag, "not the data sink of the oldest outstanding Read");
    return false;
  }
  if (current_.tagged_offset != read.sink_offset + read.received) {
    FaultOnCurrent(terminate::kDdpBounds, "tagged offset out of sequence");
    return false;
  }
  return true;
}

bool RdmapStream::AcceptWrite() {
  // STag, bounds and rights are judged where the memory is pinned, just before placement.
  if (!Wraps(current_.tagged_offset, current_payload_)) return true;
  FaultOnCurrent(terminate::kDdpOffsetWrap, "tagged offset wraps");
  return false;
}

bool RdmapStream::AcceptTerminate() {
  if (current_.sequence_number != 1) {
    FaultOnCurrent(terminate::kDdpMsnRange, "MSN out of sequence");
    return false;
  }
  STAGECOACH_CHECK(current_payload_ <= own_payload_.size());  // DecodeSegment refuses longer ones
  return true;
}

bool RdmapStream::PinParts(std::span<const ScatterGather> parts, uint64_t skip, uint64_t size, MemoryAccess access,
                           MemoryFault* fault) {
  for (const ScatterGather& part : parts) {
    if (size == 0) break;
    if (skip >= part.length) {
      skip -= part.length;
      continue;
    }
    const uint64_t n = std::min<uint64_t>(part.length - skip, size);
    auto pin = memory_.Pin(part.lkey, part.address + skip, n, access);
    if (!pin) {
      *fault = pin.error();
      return false;
    }
    destination_.push_back(pin->bytes());
    trail_.Add(part.lkey, *pin);
    pins_.push_back(std::move(*pin));
    size -= n;
    skip = 0;
  }
  return true;
}

std::optional<std::span<const MutableBytes>> RdmapStream::PinDestination() {
  if (state_ != State::kActive) return std::nullopt;
  UnpinDestination();
  trail_.Clear();
  if (current_payload_ > 0 && !PinCurrent()) {
    UnpinDestination();
    return std::nullopt;
  }
  return std::span<const MutableBytes>(destination_);
}

bool RdmapStream::PinCurrent() {
  MemoryFault fault = MemoryFault::kUnknownStag;
  switch (current_.opcode()) {
    case RdmapOpcode::kWrite: {
      auto pin = memory_.Pin(current_.stag, current_.tagged_offset, current_payload_, MemoryAccess::kRemoteWrite);
      if (!pin) {
        FaultOnDestination(pin.error());
        return false;
      }
      destination_.push_back(pin->bytes());
      trail_.Add(current_.stag, *pin);
      pins_.push_back(std::move(*pin));
      return true;
    }
    case RdmapOpcode::kReadResponse: {
      const OutboundRead& read = reads_.front();
      SendEntry* entry = FindEntry(read.entry);
      STAGECOACH_CHECK(entry != nullptr);  // an RTR Read has no bytes to place
      if (PinParts(entry->work->sges, read.received, current_payload_, MemoryAccess::kReadSink, &fault)) return true;
      FaultOnDestination(fault);
      return false;
    }
    case RdmapOpcode::kTerminate:
    case RdmapOpcode::kImmediate:
    case RdmapOpcode::kImmediateSolicited:
    case RdmapOpcode::kAtomicRequest:
    case RdmapOpcode::kAtomicResponse:
      destination_.push_back(MutableBytes(own_payload_).first(current_payload_));
      return true;
    case RdmapOpcode::kReadRequest:
      return true;
    case RdmapOpcode::kSend:
    case RdmapOpcode::kSendInvalidate:
    case RdmapOpcode::kSendSolicited:
    case RdmapOpcode::kSendSolicitedInvalidate:
      break;
  }
  if (PinParts(inbound_->receive->sges, inbound_->received, current_payload_, MemoryAccess::kReceive, &fault)) {
    return true;
  }
  FaultOnDestination(fault);
  return false;
}

// The payload of the current segment has nowhere to go.
void RdmapStream::FaultOnDestination(MemoryFault fault) {
  switch (current_.opcode()) {
    case RdmapOpcode::kWrite:
      STAGECOACH_MARK("rdmap.target_of_a_write_refused");
      return FaultOnCurrent(WriteTargetCode(fault), ToString(fault));
    case RdmapOpcode::kReadResponse: {
      STAGECOACH_MARK("rdmap.sink_of_a_read_gone");
      SendEntry* const entry = FindEntry(reads_.front().entry);
      entry->phase = SendEntry::Phase::kDone;
      entry->status = WorkStatus::kLocalProtectionError;
      return FaultOnCurrent(terminate::kRdmapLocalCatastrophic, ToString(fault));
    }
    default:
      STAGECOACH_MARK("rdmap.buffer_of_a_receive_gone");
      FailReceive(WorkStatus::kLocalProtectionError);
      return FaultOnCurrent(terminate::kRdmapLocalCatastrophic, ToString(fault));
  }
}

void RdmapStream::OnPlacementFault(MemoryFault fault) {
  UnpinDestination();
  if (state_ == State::kActive) FaultOnDestination(fault);
}

void RdmapStream::UnpinDestination() {
  destination_.clear();
  pins_.clear();
}

void RdmapStream::OnPlaced(Instant now) {
  now_ = now;
  if (state_ != State::kActive) return;
  first_record_received_ = true;
  // What is refused has changed nothing, and is not told of as placed.
  if (current_.opcode() == RdmapOpcode::kAtomicRequest && !ExecuteAtomic()) return;
  if (current_.opcode() == RdmapOpcode::kAtomicResponse && !PlaceAtomicResult()) return;
  if (trace_ != nullptr) TracePlaced();
  CountWrite();
  switch (current_.opcode()) {
    case RdmapOpcode::kWrite:
      return;
    case RdmapOpcode::kImmediate:
    case RdmapOpcode::kImmediateSolicited:
      FinishImmediate();
      return;
    case RdmapOpcode::kAtomicRequest:
      return;
    case RdmapOpcode::kReadRequest:
      responses_.push_back({.msn = expected_read_msn_++, .request = current_.read_request, .atomic = std::nullopt});
      return;
    case RdmapOpcode::kReadResponse:
    case RdmapOpcode::kAtomicResponse:
      FinishReadResponse();
      return;
    case RdmapOpcode::kTerminate:
      FinishTerminate();
      return;
    case RdmapOpcode::kSend:
    case RdmapOpcode::kSendInvalidate:
    case RdmapOpcode::kSendSolicited:
    case RdmapOpcode::kSendSolicitedInvalidate:
      FinishSend();
      return;
  }
}

// Where this segment's payload lies now: the STag that names its first byte, that byte's offset from the first one that
// the STag names, and how many bytes from there on are the payload's. Of a Write that is what the peer named; of a Send
// or an answer the part of our scatter list where this segment goes on, and if it goes beyond that part, a
// "part.placed" for each further one. A segment of no bytes names no memory: all three are 0. Immediate Data and Atomic
// Requests have no bytes for memory; the latter names the eight that it changes, if they may be changed.
void RdmapStream::TracePlaced() {
  MemoryPlace place = trail_.first();
  uint64_t length = current_payload_;
  if (current_.opcode() == RdmapOpcode::kAtomicRequest) {
    place = atomic_place_;
    length = 0;
  } else if (current_.opcode() == RdmapOpcode::kAtomicResponse) {
    length = kAtomicSize;
  } else if (wire::IsImmediate(current_.opcode())) {
    length = 0;
  }
  Trace(trace_, now_, name_, "record.placed",
        {{"opcode", ToString(current_.opcode())},
         {"length", length},
         {"last", uint64_t{current_.last}},
         {"msn", uint64_t{current_.sequence_number}},
         {"stag", uint64_t{place.stag}},
         {"offset", place.offset},
         {"run", place.length}});
  trail_.TraceRest(trace_, now_, name_);
}

// For the length of a Write with Immediate: the Write is whatever came right before the Immediate Data.
void RdmapStream::CountWrite() {
  if (current_.opcode() == RdmapOpcode::kWrite) {
    write_bytes_ = current_payload_ + (write_whole_ ? 0 : write_bytes_);
    write_whole_ = current_.last;
  } else if (!wire::IsImmediate(current_.opcode()) || !write_whole_) {
    write_bytes_ = 0;
    write_whole_ = true;
  }
}

void RdmapStream::FinishImmediate() {
  ++expected_send_msn_;
  const auto data = wire::ImmediateData::Decode(own_payload_);
  const uint64_t most = UINT32_MAX;
  receive_completions_.push_back({.work = inbound_->receive,
                                  .byte_length = static_cast<uint32_t>(std::min(write_bytes_, most)),
                                  .solicited = wire::IsSolicited(current_.opcode()),
                                  .write_immediate = true,
                                  .has_immediate = true,
                                  .immediate = data->AsInMemory()});
  write_bytes_ = 0;
  inbound_.reset();
}

// False, with a fault, when the peer may not have it.
bool RdmapStream::ExecuteAtomic() {
  const auto request = wire::AtomicRequest::Decode(own_payload_);
  const auto code = static_cast<wire::AtomicOpcode>(request->operation);
  if (code != wire::AtomicOpcode::kFetchAdd && code != wire::AtomicOpcode::kCompareSwap) {
    FaultOnCurrent(terminate::kRdmapOpcode, "not an atomic operation that is known");
    return false;
  }
  if (!request->IsPlain()) {
    STAGECOACH_MARK("rdmap.atomic_with_masks_refused");
    FaultOnCurrent(terminate::kRdmapUnspecified, "masks are not supported");
    return false;
  }
  const AtomicOp op = code == wire::AtomicOpcode::kFetchAdd ? AtomicOp::kFetchAdd : AtomicOp::kCompareSwap;
  const auto outcome =
      memory_.Atomic(request->stag, request->tagged_offset, op, request->add_or_swap, request->compare);
  if (!outcome) {
    STAGECOACH_MARK("rdmap.target_of_an_atomic_refused");
    FaultOnCurrent(ReadSourceCode(outcome.error()), StagText(request->stag) + ": " + ToString(outcome.error()));
    return false;
  }
  atomic_place_ = {.stag = request->stag, .offset = outcome->offset, .length = kAtomicSize};
  responses_.push_back(
      {.msn = expected_read_msn_++,
       .request = {},
       .atomic = wire::AtomicResponse{.identifier = request->identifier, .original = outcome->original}});
  return true;
}

// False, with a fault, when the answer makes no sense or its sink has gone.
bool RdmapStream::PlaceAtomicResult() {
  const OutboundRead& read = reads_.front();
  const auto response = wire::AtomicResponse::Decode(own_payload_);
  if (response->identifier != read.msn) {
    FaultOnCurrent(terminate::kRdmapUnspecified, "not the answer to the oldest outstanding atomic");
    return false;
  }
  SendEntry* entry = FindEntry(read.entry);
  STAGECOACH_CHECK(entry != nullptr);
  UnpinDestination();
  MemoryFault fault = MemoryFault::kUnmapped;
  bool placed = PinParts(entry->work->sges, 0, kAtomicSize, MemoryAccess::kLocalWrite, &fault);
  // In the byte order of this host, as programs of verbs expect.
  ConstBytes result = AsBytes(&response->original, kAtomicSize);
  for (size_t i = 0; placed && i < destination_.size(); ++i) {
    placed = SafeCopy(destination_[i], result.first(destination_[i].size()));
    result = result.subspan(destination_[i].size());
  }
  UnpinDestination();
  if (placed) return true;
  STAGECOACH_MARK("rdmap.sink_of_an_atomic_gone");
  entry->phase = SendEntry::Phase::kDone;
  entry->status = WorkStatus::kLocalProtectionError;
  FaultOnCurrent(terminate::kRdmapLocalCatastrophic, ToString(fault));
  return false;
}

void RdmapStream::FinishSend() {
  inbound_->received += current_payload_;
  if (!current_.last) return;
  ++expected_send_msn_;
  ReceiveCompletion completion{
      .work = inbound_->receive, .byte_length = inbound_->received, .solicited = wire::IsSolicited(current_.opcode())};
  if (!wire::HasInvalidate(current_.opcode())) {
    inbound_.reset();
    receive_completions_.push_back(completion);
    return;
  }
  // [RFC5040] Invalidated before the Receive completes: the ULP may rely on it when it sees the completion.
  const uint32_t stag = current_.invalidate_stag();
  const auto invalidated = memory_.InvalidateRemotely(stag);
  if (invalidated) {
    Trace(trace_, now_, name_, "window.invalidated", {{"stag", uint64_t{stag}}, {"by", "peer"}});
    completion.invalidated = true;
    completion.invalidated_stag = stag;
    inbound_.reset();
    receive_completions_.push_back(completion);
    return;
  }
  STAGECOACH_MARK("rdmap.remote_invalidation_refused");
  FailReceive(WorkStatus::kRemoteInvalidRequest);
  FaultOnCurrent(invalidated.error() == MemoryFault::kForeignStag ? terminate::kRdmapProtectionCannotInvalidate
                                                                  : terminate::kRdmapCannotInvalidate,
                 ToString(invalidated.error()));
}

void RdmapStream::FinishReadResponse() {
  OutboundRead& read = reads_.front();
  read.received += current_payload_;
  if (!current_.last) return;
  if (read.atomic) ++expected_atomic_response_msn_;
  if (read.rtr) {
    rtr_read_answered_ = true;
  } else {
    SendEntry* entry = FindEntry(read.entry);
    STAGECOACH_CHECK(entry != nullptr);
    entry->phase = SendEntry::Phase::kDone;
  }
  reads_.pop_front();
}

// --- The peer's Terminate ---

RdmapStream::SendEntry* RdmapStream::EntryAtFault(const wire::TerminateHeader& header, bool siw) {
  const ConstBytes quoted = header.DdpHeader();
  if (quoted.empty()) return nullptr;
  const auto started = [](const SendEntry& entry) {
    return entry.phase != SendEntry::Phase::kWaiting && entry.phase != SendEntry::Phase::kDone;
  };
  if (const auto tagged = wire::DdpTaggedHeader::Decode(quoted); tagged && quoted.size() < kUntaggedHeader) {
    const auto control = wire::RdmapControl::Decode(tagged->ulp, options_.extensions);
    if (!control || control->opcode != RdmapOpcode::kWrite) return nullptr;
    for (size_t i = 0; i < sq_.size(); ++i) {
      SendEntry& entry = sq_[i];
      const SendWork& work = *entry.work;
      if (started(entry) && IsWrite(work.opcode) && work.remote_stag == tagged->stag &&
          tagged->tagged_offset - work.remote_offset < std::max(entry.length, 1u)) {
        return &entry;
      }
    }
    return nullptr;
  }
  const auto untagged = wire::DdpUntaggedHeader::Decode(quoted);
  if (!untagged) return nullptr;
  const auto control = wire::RdmapControl::Decode(untagged->ulp, options_.extensions);
  if (!control) return nullptr;
  if (wire::IsSend(control->opcode) || wire::IsImmediate(control->opcode)) {
    for (size_t i = 0; i < sq_.size(); ++i) {
      SendEntry& entry = sq_[i];
      const bool send = !IsAnswered(entry.work->opcode) && entry.work->opcode != SendOpcode::kWrite;
      if (started(entry) && send && entry.msn == untagged->sequence_number) return &entry;
    }
    return nullptr;
  }
  const bool request = control->opcode == RdmapOpcode::kReadRequest || control->opcode == RdmapOpcode::kAtomicRequest;
  if (!request || reads_.empty()) return nullptr;
  // siw puts the Read's size where its MSN belongs, so its quotation names no request. Reads are answered in order: it
  // is the oldest.
  for (size_t i = 0; !siw && i < reads_.size(); ++i) {
    if (reads_[i].msn == untagged->sequence_number) return reads_[i].rtr ? nullptr : FindEntry(reads_[i].entry);
  }
  return siw && !reads_.front().rtr ? FindEntry(reads_.front().entry) : nullptr;
}

void RdmapStream::FinishTerminate() {
  if (tx_.kind != OutMessage::Kind::kNone) STAGECOACH_MARK("rdmap.terminate_received_amidst_a_message_of_ours");
  TransportFault fault{.from_peer = true};
  const auto reading = wire::DecodeTerminate(ConstBytes(own_payload_).first(current_payload_));
  if (!reading) {
    STAGECOACH_MARK("rdmap.terminate_that_makes_no_sense");
    fault.layer = static_cast<uint8_t>(wire::TerminateLayer::kRdmap);
    fault.error_type = terminate::kRdmapUnspecified.error_type;
    fault.error_code = terminate::kRdmapUnspecified.error_code;
    fault.description = "a Terminate that makes no sense: " + wire::ToString(reading.error());
  } else {
    const TerminateCode code = reading->header.code;
    fault.layer = code.layer;
    fault.error_type = code.error_type;
    fault.error_code = code.error_code;
    fault.siw_bit_order = reading->order == wire::TerminateBitOrder::kSiw;
    fault.description = wire::ToString(code);
    if (reading->as_siw) fault.description += ", or, from Linux siw, " + wire::ToString(reading->as_siw->code);
    if (fault.siw_bit_order) STAGECOACH_MARK("rdmap.terminate_in_the_bit_order_of_siw");
    if (SendEntry* entry = EntryAtFault(reading->header, fault.siw_bit_order)) {
      STAGECOACH_MARK("rdmap.terminate_names_our_work");
      fault.description += " (" + DescribeWork(*entry->work, entry->length) + ")";
      entry->phase = SendEntry::Phase::kDone;
      entry->status = StatusOfPeerFault(code);
    }
  }
  Trace(trace_, now_, name_, "terminate.received",
        {{"layer", uint64_t{fault.layer}},
         {"type", uint64_t{fault.error_type}},
         {"code", uint64_t{fault.error_code}},
         {"siw", uint64_t{fault.siw_bit_order}}});
  fault_ = std::move(fault);
  FailReceive(WorkStatus::kFlushed);
  End();
}

// --- Faults and endings ---

void RdmapStream::OnSent(uint64_t cookie) {
  const auto kind = static_cast<CookieKind>(cookie & 3);
  if (kind == CookieKind::kTerminate) {
    Trace(trace_, now_, name_, "terminate.sent");
    End();
    return;
  }
  if (kind != CookieKind::kWork) return;
  SendEntry* entry = FindEntry(cookie >> 2);
  if (entry == nullptr || entry->queued_records == 0) {
    STAGECOACH_MARK("rdmap.record_leaves_after_the_end");
    return;
  }
  --entry->queued_records;
  if (entry->phase == SendEntry::Phase::kHandedOver && entry->queued_records == 0) {
    entry->phase = SendEntry::Phase::kDone;
  }
}

void RdmapStream::OnTxMemoryFault(uint64_t cookie, MemoryFault fault) {
  if (state_ == State::kEnded) return;
  std::string what = "our Read Response";
  if (static_cast<CookieKind>(cookie & 3) == CookieKind::kWork) {
    if (SendEntry* entry = FindEntry(cookie >> 2)) {
      what = DescribeWork(*entry->work, entry->length);
      if (entry->phase != SendEntry::Phase::kDone) {
        entry->phase = SendEntry::Phase::kDone;
        entry->status = WorkStatus::kLocalProtectionError;
      }
    }
  }
  STAGECOACH_MARK("rdmap.memory_gone_while_it_is_sent");
  Trace(trace_, now_, name_, "tx.memory_fault", {{"fault", ToString(fault)}});
  // No Terminate: part of the record may have left, and nothing can follow a record that cannot be finished.
  if (state_ == State::kActive) {
    fault_ = TransportFault{.description = "memory went away while being sent: " + what + ": " + ToString(fault)};
  }
  FailReceive(WorkStatus::kFlushed);
  End();
}

void RdmapStream::OnLlpFault(uint8_t code) {
  STAGECOACH_MARK("rdmap.lower_layer_fault");
  const auto layer = static_cast<uint8_t>(wire::TerminateLayer::kLlp);
  Fault({.layer = layer, .error_type = 0, .error_code = code}, "in what the peer sent");
}

void RdmapStream::OnLost(bool orderly) {
  if (state_ == State::kEnded) return;
  Trace(trace_, now_, name_, "stream.lost", {{"orderly", uint64_t{orderly}}});
  if (inbound_) STAGECOACH_MARK("rdmap.lost_inside_a_message");
  if (tx_.kind != OutMessage::Kind::kNone) STAGECOACH_MARK("rdmap.lost_amidst_a_message_of_ours");
  if (!reads_.empty()) STAGECOACH_MARK("rdmap.lost_with_reads_outstanding");
  if (!responses_.empty()) STAGECOACH_MARK("rdmap.lost_with_reads_to_answer");
  if (state_ == State::kTerminating) STAGECOACH_MARK("rdmap.lost_before_the_terminate_left");
  FailReceive(WorkStatus::kFlushed);
  End();
}

std::string RdmapStream::DescribeCurrent() const {
  std::string text = std::string("the peer's ") + ToString(current_.opcode()) + " of ";
  if (current_.opcode() == RdmapOpcode::kReadRequest) {
    return text + std::to_string(current_.read_request.length) + " bytes from " +
           StagText(current_.read_request.source_stag);
  }
  text += std::to_string(current_payload_) + " bytes";
  if (current_.tagged()) return text + " to " + StagText(current_.stag);
  text += ", MSN " + std::to_string(current_.sequence_number);
  if (wire::HasInvalidate(current_.opcode())) text += ", invalidating " + StagText(current_.invalidate_stag());
  return text;
}

void RdmapStream::Fault(TerminateCode code, std::string detail) {
  FaultQuoting(code, {}, 0, std::move(detail));
}

void RdmapStream::FaultOnCurrent(TerminateCode code, std::string_view reason) {
  // The head is gone by the time a message is finished; the decoded header makes the same bytes.
  std::array<std::byte, wire::kMaxSegmentHeaderSize> bytes;
  ByteWriter writer(bytes);
  current_.Encode(writer);
  FaultQuoting(code, writer.written(), current_length_, DescribeCurrent() + ": " + std::string(reason));
}

void RdmapStream::FaultQuoting(TerminateCode code, ConstBytes head, size_t length, std::string detail) {
  if (state_ != State::kActive) return;
  fault_ = TransportFault{.layer = code.layer,
                          .error_type = code.error_type,
                          .error_code = code.error_code,
                          .description = wire::ToString(code) + " (" + detail + ")"};
  Trace(trace_, now_, name_, "terminate.raised",
        {{"layer", uint64_t{code.layer}}, {"type", uint64_t{code.error_type}}, {"code", uint64_t{code.error_code}}});
  ByteWriter writer(terminate_);
  SegmentHeader::Terminate().Encode(writer);
  wire::TerminateHeader::For(code, head, length).Encode(writer);
  STAGECOACH_CHECK(writer.ok());
  terminate_size_ = writer.position();
  if (tx_.kind != OutMessage::Kind::kNone) STAGECOACH_MARK("rdmap.terminate_cuts_off_a_message");
  if (tx_.kind == OutMessage::Kind::kWork) KeepAnswersToAtomics();
  if (!reads_.empty()) STAGECOACH_MARK("rdmap.terminate_with_reads_outstanding");
  state_ = State::kTerminating;
  FailReceive(WorkStatus::kFlushed);
  FlushWork();
  if (responses_.empty()) return;
  STAGECOACH_MARK("rdmap.terminate_waits_for_answers");
  answer_until_ = now_ + options_.answer_time;
}

void RdmapStream::OnDeadline(Instant now) {
  now_ = now;
  if (!answer_until_ || *answer_until_ > now) return;
  STAGECOACH_MARK("rdmap.terminate_waits_no_longer");
  ForgetAnswers();
}

void RdmapStream::FailReceive(WorkStatus status) {
  if (!inbound_) return;
  receive_completions_.push_back({.work = inbound_->receive, .status = status});
  inbound_.reset();
}

// Work that has not been handed over whole is flushed. Records of it that are queued already still leave.
void RdmapStream::FlushWork() {
  for (size_t i = 0; i < sq_.size(); ++i) {
    SendEntry& entry = sq_[i];
    if (entry.phase == SendEntry::Phase::kDone || entry.phase == SendEntry::Phase::kHandedOver) continue;
    entry.phase = SendEntry::Phase::kDone;
    entry.status = WorkStatus::kFlushed;
  }
  next_start_ = sq_first_ + sq_.size();
  if (tx_.kind == OutMessage::Kind::kWork) tx_ = {};
  reads_.clear();
  rtr_.reset();
  nudge_ = false;
}

void RdmapStream::ForgetAnswers() {
  responses_.clear();
  if (tx_.kind == OutMessage::Kind::kResponse) tx_ = {};
  answer_until_.reset();
}

// [RFC5041] Behind a message that was cut off only the Terminate makes sense to every peer: siw takes the answer to a
// Read for an error of its own. Ends that have agreed on atomics are ends like this one, and take it; they must not
// take an atomic that was carried out for one that was not.
void RdmapStream::KeepAnswersToAtomics() {
  while (!responses_.empty() && !responses_.back().atomic) responses_.pop_back();
}

void RdmapStream::FailAnswer(MemoryFault fault) {
  STAGECOACH_MARK("rdmap.source_of_a_read_gone_before_the_answer");
  const InboundRead& read = responses_.front();
  std::array<std::byte, wire::kMaxSegmentHeaderSize> head;
  ByteWriter writer(head);
  SegmentHeader::Read(read.msn, read.request).Encode(writer);
  FaultQuoting(ReadSourceCode(fault), writer.written(), writer.position(),
               std::string("source of the peer's Read gone before the answer: ") + ToString(fault));
  ForgetAnswers();
}

void RdmapStream::End() {
  FlushWork();
  ForgetAnswers();
  for (size_t i = 0; i < sq_.size(); ++i) {
    SendEntry& entry = sq_[i];
    if (entry.phase != SendEntry::Phase::kDone) {
      entry.phase = SendEntry::Phase::kDone;
      entry.status = WorkStatus::kFlushed;
    }
    entry.queued_records = 0;
  }
  UnpinDestination();
  state_ = State::kEnded;
}

// --- Transmitting ---

RdmapStream::SendEntry* RdmapStream::FindEntry(uint64_t number) {
  if (number < sq_first_ || number - sq_first_ >= sq_.size()) return nullptr;
  return &sq_[number - sq_first_];
}

bool RdmapStream::FillTx(RecordSink& sink, size_t budget) {
  bool any = false;
  while (budget > 0 && sink.CanQueue() && QueueNext(sink)) {
    any = true;
    --budget;
  }
  return any;
}

bool RdmapStream::QueueNext(RecordSink& sink) {
  if (state_ == State::kActive) {
    // [RFC5041] Messages of a stream are not interleaved: anything new waits for the end of the one in
    // hand.
    if (tx_.kind != OutMessage::Kind::kNone) {
      if (QueueSegment(sink)) return true;
    } else if (rtr_) {
      QueueRtr(sink);
      return true;
    } else if (nudge_) {
      STAGECOACH_MARK("rdmap.nudge_queued");
      nudge_ = false;
      QueueHeader(sink, SegmentHeader::Write(kUncheckedStag, 0, true), {}, MakeCookie(CookieKind::kNone, 0));
      return true;
    } else if (StartNextMessage() && QueueSegment(sink)) {
      return true;
    }
  }
  // Work of ours that was cut off by the fault stays unfinished; the Terminate goes out at a record boundary.
  if (state_ != State::kTerminating || terminate_queued_) return false;
  if ((tx_.kind == OutMessage::Kind::kResponse || (!responses_.empty() && StartResponse())) &&
      QueueResponseSegment(sink)) {
    return true;
  }
  answer_until_.reset();
  terminate_queued_ = true;
  sink.QueueRecord(ConstBytes(terminate_).first(terminate_size_), {}, MakeCookie(CookieKind::kTerminate, 0));
  return true;
}

// Answers and work of our own take turns, message by message, so that neither side's Reads can starve the other's
// progress.
bool RdmapStream::StartNextMessage() {
  const bool response_waits = !responses_.empty();
  const bool work_waits = MayStartWork();
  if (!response_waits && !work_waits) return false;
  if (response_waits && work_waits) STAGECOACH_MARK("rdmap.answers_and_work_take_turns");
  const bool respond = response_waits && (response_turn_ || !work_waits);
  response_turn_ = !respond;
  return respond ? StartResponse() : StartWork();
}

bool RdmapStream::MayStartWork() const {
  if (next_start_ - sq_first_ >= sq_.size()) return false;
  if (options_.hold_until_first_record && !first_record_received_) {
    STAGECOACH_MARK("rdmap.responder_waits_for_the_first_record");
    return false;
  }
  const SendWork& work = *sq_[next_start_ - sq_first_].work;
  if (work.fence && !reads_.empty()) {
    STAGECOACH_MARK("rdmap.fenced_work_waits_for_reads");
    return false;
  }
  if (!IsAnswered(work.opcode) || options_.ord == 0 || reads_.size() < options_.ord) return true;
  STAGECOACH_MARK("rdmap.read_waits_for_ord");
  return false;
}

// The checks a device makes when it begins a work request: its scatter/gather list against local memory.
WorkStatus RdmapStream::CheckWork(const SendWork& work, uint32_t* length, MemoryPlace* first, std::string* why) {
  *length = 0;
  if (!IsCarried(work.opcode, options_.extensions)) {
    *why = "not an operation that this connection has";
    return WorkStatus::kLocalOperationError;
  }
  if (IsAnswered(work.opcode) && options_.ord == 0) {
    *why = "no outstanding Reads and atomics were agreed on (ORD 0)";
    return WorkStatus::kLocalOperationError;
  }
  const uint64_t total = work.is_inline ? work.inline_data.size() : TotalLength(work.sges);
  if (total > options_.max_message_bytes) {
    *why = "longer than the longest message";
    return WorkStatus::kLocalLengthError;
  }
  *length = static_cast<uint32_t>(total);
  if (work.is_inline && IsAnswered(work.opcode)) {
    *why = "inline data has nowhere to put an answer";
    return WorkStatus::kLocalOperationError;
  }
  if (IsAtomic(work.opcode) && total != kAtomicSize) {
    *why = "an atomic brings back eight bytes";
    return WorkStatus::kLocalLengthError;
  }
  if (work.is_inline) return WorkStatus::kSuccess;
  auto access = MemoryAccess::kLocalRead;
  if (work.opcode == SendOpcode::kRead) access = MemoryAccess::kReadSink;
  // Its answer names no memory.
  if (IsAtomic(work.opcode)) access = MemoryAccess::kLocalWrite;
  for (const ScatterGather& part : work.sges) {
    if (part.length == 0) continue;
    const auto pin = memory_.Pin(part.lkey, part.address, part.length, access);
    if (!pin) {
      *why = ToString(pin.error());
      return WorkStatus::kLocalProtectionError;
    }
    if (first->length == 0) *first = {.stag = part.lkey, .offset = pin->offset(), .length = part.length};
  }
  return WorkStatus::kSuccess;
}

bool RdmapStream::StartWork() {
  SendEntry& entry = *FindEntry(next_start_);
  const SendWork& work = *entry.work;
  MemoryPlace first;
  std::string why;
  const WorkStatus status = CheckWork(work, &entry.length, &first, &why);
  if (status != WorkStatus::kSuccess) {
    entry.phase = SendEntry::Phase::kDone;
    entry.status = status;
    STAGECOACH_MARK("rdmap.work_refused_at_its_start");
    Trace(trace_, now_, name_, "work.refused", {{"opcode", ToString(work.opcode)}, {"status", ToString(status)}});
    Fault(terminate::kRdmapLocalCatastrophic, DescribeWork(work, entry.length) + ": " + why);
    return false;
  }
  tx_ = {.kind = OutMessage::Kind::kWork, .entry = next_start_, .length = entry.length};
  ++next_start_;
  entry.phase = SendEntry::Phase::kSending;
  if (IsAnswered(work.opcode)) {
    entry.msn = next_read_msn_++;
  } else if (work.opcode != SendOpcode::kWrite) {
    entry.msn = next_send_msn_++;
  }
  Trace(trace_, now_, name_, "work.started",
        {{"opcode", ToString(work.opcode)},
         {"length", uint64_t{entry.length}},
         {"msn", uint64_t{entry.msn}},
         {"stag", uint64_t{first.stag}},
         {"offset", first.offset},
         {"run", first.length}});
  return true;
}

bool RdmapStream::StartResponse() {
  const InboundRead& read = responses_.front();
  if (read.atomic) {
    tx_ = {.kind = OutMessage::Kind::kResponse};
    Trace(trace_, now_, name_, "atomic.answered", {{"msn", uint64_t{read.msn}}});
    return true;
  }
  // A Read of no bytes names no memory, whatever its STag.
  MemoryPlace source;
  // The source was good when the request came; it may have been invalidated while others were answered.
  if (read.request.length > 0) {
    const auto pin = memory_.Pin(read.request.source_stag, read.request.source_offset, read.request.length,
                                 MemoryAccess::kRemoteRead);
    if (!pin) {
      FailAnswer(pin.error());
      return false;
    }
    source = {.stag = read.request.source_stag, .offset = pin->offset()};
  }
  tx_ = {.kind = OutMessage::Kind::kResponse, .length = read.request.length};
  Trace(trace_, now_, name_, "response.started",
        {{"length", uint64_t{read.request.length}},
         {"msn", uint64_t{read.msn}},
         {"stag", uint64_t{source.stag}},
         {"offset", source.offset}});
  return true;
}

void RdmapStream::QueueHeader(RecordSink& sink, const SegmentHeader& header, std::span<const TxPart> parts,
                              uint64_t cookie) {
  std::array<std::byte, wire::kMaxSegmentHeaderSize> bytes;
  ByteWriter writer(bytes);
  header.Encode(writer);
  sink.QueueRecord(writer.written(), parts, cookie);
}

void RdmapStream::QueueRtr(RecordSink& sink) {
  const RtrKind kind = *rtr_;
  rtr_.reset();
  Trace(trace_, now_, name_, "rtr.queued", {{"kind", kind == RtrKind::kWrite ? "write" : "read"}});
  const uint64_t cookie = MakeCookie(CookieKind::kNone, 0);
  if (kind == RtrKind::kWrite) {
    STAGECOACH_MARK("rdmap.rtr_by_write");
    QueueHeader(sink, SegmentHeader::Write(kUncheckedStag, 0, true), {}, cookie);
    return;
  }
  STAGECOACH_MARK("rdmap.rtr_by_read");
  const uint32_t msn = next_read_msn_++;
  const wire::ReadRequest request{.sink_stag = kUncheckedStag, .source_stag = kUncheckedStag};
  QueueHeader(sink, SegmentHeader::Read(msn, request), {}, cookie);
  reads_.push_back({.rtr = true, .msn = msn});
}

// Collects at most `room` bytes of the work request's payload, from where the last segment ended.
uint32_t RdmapStream::GatherParts(const SendWork& work, uint32_t room, TxParts* parts) {
  const uint32_t left = std::min(tx_.length - tx_.offset, room);
  if (work.is_inline) {
    if (left > 0) parts->Add({.bytes = work.inline_data.subspan(tx_.offset, left)});
    return left;
  }
  uint32_t gathered = 0;
  // A segment that would need more parts than there is room for ends early; DDP does not mind.
  while (gathered < left && !parts->Full()) {
    const ScatterGather& part = work.sges[tx_.part];
    const uint32_t n = std::min(part.length - tx_.part_offset, left - gathered);
    if (n > 0) {
      parts->Add({.by_key = true, .key = part.lkey, .address = part.address + tx_.part_offset, .length = n});
      gathered += n;
      tx_.part_offset += n;
    }
    if (tx_.part_offset == part.length) {
      ++tx_.part;
      tx_.part_offset = 0;
    }
  }
  if (gathered < left) STAGECOACH_MARK("rdmap.segment_ends_early_for_its_parts");
  return gathered;
}

bool RdmapStream::QueueSegment(RecordSink& sink) {
  if (tx_.kind == OutMessage::Kind::kResponse) return QueueResponseSegment(sink);
  QueueWorkSegment(sink);
  return true;
}

bool RdmapStream::QueueResponseSegment(RecordSink& sink) {
  if (responses_.front().atomic) {
    QueueAtomicResponse(sink);
    return true;
  }
  const wire::ReadRequest& request = responses_.front().request;
  const uint32_t room = PayloadRoom(sink, wire::kDdpTaggedHeaderSize);
  const uint32_t n = std::min(tx_.length - tx_.offset, room);
  const bool last = tx_.offset + n == tx_.length;
  TxParts parts;
  if (n > 0) {
    // Looked at before it is begun, since nothing can follow a record that cannot be finished.
    const auto pin = memory_.Pin(request.source_stag, request.source_offset + tx_.offset, n, MemoryAccess::kRemoteRead);
    if (!pin || !IsReadable(pin->bytes())) {
      FailAnswer(pin ? MemoryFault::kUnmapped : pin.error());
      return false;
    }
    parts.Add({.by_key = true,
               .key = request.source_stag,
               .address = request.source_offset + tx_.offset,
               .length = n,
               .access = MemoryAccess::kRemoteRead});
  }
  QueueHeader(sink, SegmentHeader::ReadResponse(request.sink_stag, request.sink_offset + tx_.offset, last),
              parts.view(), MakeCookie(CookieKind::kResponse, 0));
  tx_.offset += n;
  if (!last) return true;
  tx_ = {};
  responses_.pop_front();
  return true;
}

void RdmapStream::QueueAtomicResponse(RecordSink& sink) {
  QueueMessage(sink, SegmentHeader::AtomicResponse(next_atomic_response_msn_++), *responses_.front().atomic,
               MakeCookie(CookieKind::kResponse, 0));
  tx_ = {};
  responses_.pop_front();
}

void RdmapStream::QueueAtomicRequest(RecordSink& sink, const SendWork& work, uint64_t number) {
  SendEntry& entry = *FindEntry(number);
  const auto request =
      work.opcode == SendOpcode::kFetchAdd
          ? wire::AtomicRequest::FetchAdd(entry.msn, work.remote_stag, work.remote_offset, work.compare_add)
          : wire::AtomicRequest::CompareSwap(entry.msn, work.remote_stag, work.remote_offset, work.compare_add,
                                             work.swap);
  QueueMessage(sink, SegmentHeader::AtomicRequest(entry.msn), request, MakeCookie(CookieKind::kWork, number));
  reads_.push_back({.atomic = true, .entry = number, .msn = entry.msn, .length = kAtomicSize});
  entry.phase = SendEntry::Phase::kAwaitingResponse;
  tx_ = {};
}

void RdmapStream::QueueWorkSegment(RecordSink& sink) {
  const uint64_t number = tx_.entry;
  const uint64_t cookie = MakeCookie(CookieKind::kWork, number);
  SendEntry& entry = *FindEntry(number);
  const SendWork& work = *entry.work;
  ++entry.queued_records;

  if (work.opcode == SendOpcode::kRead) {
    // The sink is placed by position in the scatter list; what the peer is told of it need only come back unchanged.
    wire::ReadRequest request{
        .length = entry.length, .source_stag = work.remote_stag, .source_offset = work.remote_offset};
    for (const ScatterGather& part : work.sges) {
      if (part.length == 0) continue;
      request.sink_stag = part.lkey;
      request.sink_offset = part.address;
      break;
    }
    QueueHeader(sink, SegmentHeader::Read(entry.msn, request), {}, cookie);
    reads_.push_back({.entry = number,
                      .msn = entry.msn,
                      .sink_stag = request.sink_stag,
                      .sink_offset = request.sink_offset,
                      .length = entry.length});
    entry.phase = SendEntry::Phase::kAwaitingResponse;
    tx_ = {};
    return;
  }

  if (IsAtomic(work.opcode)) {
    QueueAtomicRequest(sink, work, number);
    return;
  }
  if (tx_.immediate_due) {
    QueueMessage(sink, SegmentHeader::Immediate(work.solicited, entry.msn), wire::ImmediateData::Of(work.immediate),
                 cookie);
    tx_ = {};
    entry.phase = SendEntry::Phase::kHandedOver;
    return;
  }

  const bool write = IsWrite(work.opcode);
  const uint32_t room = PayloadRoom(sink, write ? wire::kDdpTaggedHeaderSize : wire::kDdpUntaggedHeaderSize);
  TxParts parts;
  const uint32_t n = GatherParts(work, room, &parts);
  const bool last = tx_.offset + n == tx_.length;
  if (write) {
    QueueHeader(sink, SegmentHeader::Write(work.remote_stag, work.remote_offset + tx_.offset, last), parts.view(),
                cookie);
  } else {
    const RdmapOpcode opcode = wire::SendOpcodeOf(work.solicited, work.opcode == SendOpcode::kSendInvalidate);
    QueueHeader(sink, SegmentHeader::Send(opcode, work.remote_stag, entry.msn, tx_.offset, last), parts.view(), cookie);
  }
  tx_.offset += n;
  if (!last) return;
  if (work.opcode == SendOpcode::kWriteImmediate) {
    tx_.immediate_due = true;
    return;
  }
  tx_ = {};
  entry.phase = SendEntry::Phase::kHandedOver;
}

// --- Outputs ---

bool RdmapStream::TakeSendCompletion(SendCompletion* completion) {
  if (sq_.empty()) return false;
  const SendEntry& entry = sq_.front();
  if (entry.phase != SendEntry::Phase::kDone || entry.queued_records > 0) return false;
  *completion = {.work = entry.work, .status = entry.status};
  if (entry.status == WorkStatus::kSuccess && IsAnswered(entry.work->opcode)) {
    completion->byte_length = entry.length;
  }
  sq_.pop_front();
  ++sq_first_;
  return true;
}

bool RdmapStream::TakeReceiveCompletion(ReceiveCompletion* completion) {
  if (receive_completions_.empty()) return false;
  *completion = receive_completions_.front();
  receive_completions_.pop_front();
  return true;
}

std::optional<TransportFault> RdmapStream::TakeFault() {
  return std::exchange(fault_, std::nullopt);
}

bool RdmapStream::HasOutstandingWork() const {
  return !sq_.empty() || !responses_.empty() || !reads_.empty();
}

}  // namespace stagecoach::emu
