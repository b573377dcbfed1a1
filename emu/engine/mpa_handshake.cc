#include "emu/engine/mpa_handshake.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"

namespace stagecoach::emu {

namespace {

using wire::kMpaDepthMax;
using wire::kMpaDepthUnspecified;
using wire::MpaEnhanced;
using wire::MpaFrame;
using wire::MpaFrameKind;

bool IsKnownRevision(uint8_t revision) {
  return revision == wire::kMpaRevision1 || revision == wire::kMpaRevision2;
}

// What one side may do, given what the other can take. "Unspecified" is no limit: the ULPs have agreed elsewhere.
uint16_t LimitBy(uint16_t own, uint16_t peer) {
  return peer == kMpaDepthUnspecified ? own : std::min(own, peer);
}

// Write needs nothing of the receiver, so it is the first choice, as siw's. An offer of nothing at all is answered with
// Write for siw's sake. A zero-length Send would consume a Receive that the ULP posted for something else: not
// supported.
std::optional<MpaRtr> ChooseRtr(const MpaEnhanced& offer) {
  if (offer.rtr_write) return MpaRtr::kWrite;
  if (offer.rtr_read) return MpaRtr::kRead;
  if (!offer.rtr_send) return MpaRtr::kWrite;
  return std::nullopt;
}

std::vector<std::byte> Copy(ConstBytes bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

const char* ToString(MpaRtr rtr) {
  switch (rtr) {
    case MpaRtr::kNone:
      return "none";
    case MpaRtr::kWrite:
      return "Write";
    case MpaRtr::kRead:
      return "Read";
  }
  return "?";
}

std::string ToString(const MpaFault& fault) {
  const std::string frame = fault.awaited == MpaFrameKind::kRequest ? "MPA Request" : "MPA Reply";
  const std::string received = " (" + std::to_string(fault.bytes_received) + " bytes received)";
  const std::string value = std::to_string(fault.value);
  switch (fault.kind) {
    case MpaFaultKind::kMalformed:
      return "malformed " + frame + ": " + wire::ToString(fault.wire);
    case MpaFaultKind::kTimeout:
      return "no " + frame + " in time" + received;
    case MpaFaultKind::kReplyTimeout:
      return "the peer did not take the MPA Reply in time";
    case MpaFaultKind::kStreamLost:
      return "the connection ended during the MPA exchange (" + std::to_string(fault.bytes_received) +
             " bytes of the " + frame + " received)";
    case MpaFaultKind::kUnsupportedRevision:
      return frame + " of unsupported revision " + value;
    case MpaFaultKind::kRevisionMismatch:
      return frame + " of revision " + value + ", which was not asked for";
    case MpaFaultKind::kEnhancedMismatch:
      return frame + " with IRD/ORD where none was asked for, or without where it was";
    case MpaFaultKind::kCrcRefused:
      return "the peer does not use the CRC that was asked for";
    case MpaFaultKind::kInsufficientIrd:
      return "the peer wants " + value + " Read Requests outstanding, more than offered";
    case MpaFaultKind::kNoMatchingRtr:
      return frame + " without a ready-to-receive message known here";
  }
  return "?";
}

namespace internal {

Result<std::optional<MpaFrame>, wire::WireFault> MpaFrameInput::OnBytes(ConstBytes bytes) {
  STAGECOACH_CHECK(bytes.size() <= Needed());
  CopyBytes(MutableBytes(bytes_).subspan(size_), bytes);
  size_ += bytes.size();
  const ConstBytes received = ConstBytes(bytes_).first(size_);
  if (size_ < wire::kMpaFrameHeaderSize) {
    // A stranger is told apart by its first bytes; it may never send twenty.
    if (wire::MpaKeyMatches(kind_, received)) {
      STAGECOACH_MARK("mpa.handshake_header_in_pieces");
      return std::optional<MpaFrame>{};
    }
  }
  const auto total = wire::MpaFrameSize(kind_, received);
  if (!total.has_value()) return Err(total.error());
  needed_ = *total;
  if (size_ < needed_) return std::optional<MpaFrame>{};
  const auto frame = MpaFrame::Decode(kind_, received);
  if (!frame.has_value()) return Err(frame.error());
  return std::optional<MpaFrame>{*frame};
}

void MpaFrameOutput::Set(const MpaFrame& frame) {
  bytes_.resize(frame.EncodedSize());
  sent_ = 0;
  ByteWriter out(bytes_);
  frame.Encode(out);
  STAGECOACH_CHECK(out.ok());
}

void MpaFrameOutput::OnTx(size_t n) {
  STAGECOACH_CHECK(n <= bytes_.size() - sent_);
  sent_ += n;
}

}  // namespace internal

// --- Initiator ---

Result<void, MpaCommandError> MpaInitiator::Start(const MpaInitiatorOptions& options, ConstBytes private_data,
                                                  Instant now) {
  if (state_ != State::kIdle) return Err(MpaCommandError::kNotNow);
  if (!IsKnownRevision(options.revision) || options.ird > kMpaDepthMax || options.ord > kMpaDepthMax) {
    return Err(MpaCommandError::kBadOption);
  }
  options_ = options;
  if (options.revision == wire::kMpaRevision1) options_.enhanced = false;
  if (!options_.enhanced) options_.peer_to_peer = options_.extensions = false;
  if (private_data.size() > MpaPrivateDataMax(options_.enhanced)) return Err(MpaCommandError::kPrivateDataTooLong);

  MpaFrame request{.kind = MpaFrameKind::kRequest, .revision = options.revision, .private_data = private_data};
  if (options_.crc) request.flags |= wire::kMpaFlagCrc;
  if (options_.enhanced) {
    request.flags |= wire::kMpaFlagEnhanced;
    if (options_.extensions) request.flags |= wire::kMpaFlagExtensionsAsked;
    request.enhanced = MpaEnhanced{.peer_to_peer = options_.peer_to_peer,
                                   .rtr_write = options_.peer_to_peer,
                                   .rtr_read = options_.peer_to_peer,
                                   .ird = options_.ird,
                                   .ord = options_.ord};
  }
  output_.Set(request);
  deadline_ = now + options_.timeout;
  state_ = State::kWaiting;
  return {};
}

void MpaInitiator::OnRx(ConstBytes bytes, Instant) {
  if (state_ != State::kWaiting) return;
  const auto frame = input_.OnBytes(bytes);
  if (!frame.has_value()) {
    STAGECOACH_MARK("mpa.malformed_reply");
    MpaFault fault = Fault(MpaFaultKind::kMalformed, 0);
    fault.wire = frame.error();
    return Finish(Err(fault));
  }
  if (frame->has_value()) Finish(Judge(**frame));
}

void MpaInitiator::OnLost(Instant) {
  if (state_ != State::kWaiting) return;
  STAGECOACH_MARK("mpa.stream_lost_before_the_reply");
  Fail(MpaFaultKind::kStreamLost);
}

void MpaInitiator::OnDeadline(Instant now) {
  if (state_ != State::kWaiting || now < deadline_) return;
  STAGECOACH_MARK("mpa.no_reply_in_time");
  Fail(MpaFaultKind::kTimeout);
}

std::optional<Instant> MpaInitiator::Deadline() const {
  if (state_ != State::kWaiting) return std::nullopt;
  return deadline_;
}

std::optional<Result<MpaOutcome, MpaFault>> MpaInitiator::TakeOutcome() {
  return std::exchange(outcome_, std::nullopt);
}

void MpaInitiator::Finish(Result<MpaOutcome, MpaFault> outcome) {
  state_ = State::kDone;
  outcome_ = std::move(outcome);
}

void MpaInitiator::Fail(MpaFaultKind kind, uint64_t value) {
  Finish(Err(Fault(kind, value)));
}

MpaFault MpaInitiator::Fault(MpaFaultKind kind, uint64_t value) const {
  return {.kind = kind, .value = value, .bytes_received = input_.size(), .awaited = MpaFrameKind::kReply};
}

Result<MpaOutcome, MpaFault> MpaInitiator::Judge(const MpaFrame& reply) const {
  if (!IsKnownRevision(reply.revision)) return Err(Fault(MpaFaultKind::kUnsupportedRevision, reply.revision));

  MpaOutcome outcome{.accepted = !reply.rejected(),
                     .revision = reply.revision,
                     .enhanced = reply.enhanced.has_value(),
                     .crc = reply.crc(),
                     .send_markers = reply.markers(),
                     .ird = options_.ird,
                     .ord = options_.ord,
                     .private_data = Copy(reply.private_data)};
  // A rejection is one whatever its form: an old peer may reject in revision 1 what it did not understand.
  if (!outcome.accepted) {
    STAGECOACH_MARK("mpa.rejected");
    return outcome;
  }

  if (reply.revision != options_.revision) return Err(Fault(MpaFaultKind::kRevisionMismatch, reply.revision));
  if (outcome.enhanced != options_.enhanced) return Err(Fault(MpaFaultKind::kEnhancedMismatch, reply.flags));
  // RFC 5044 section 7.1: C in the Request obliges both ends. Going on without would drop protection the caller asked
  // for.
  if (options_.crc && !outcome.crc) {
    STAGECOACH_MARK("mpa.peer_refuses_the_crc");
    return Err(Fault(MpaFaultKind::kCrcRefused, reply.flags));
  }
  if (!outcome.enhanced) return outcome;

  const MpaEnhanced& enhanced = *reply.enhanced;
  if (enhanced.ord != kMpaDepthUnspecified && enhanced.ord > options_.ird) {
    STAGECOACH_MARK("mpa.peer_wants_more_reads_than_offered");
    return Err(Fault(MpaFaultKind::kInsufficientIrd, enhanced.ord));
  }
  outcome.extensions = options_.extensions && reply.agrees_to_extensions();
  outcome.ird = LimitBy(options_.ird, enhanced.ord);
  outcome.ord = LimitBy(options_.ord, enhanced.ird);
  if (outcome.ord < options_.ord) STAGECOACH_MARK("mpa.initiators_ord_limited");
  // A responder that does not answer A is one of the client-server model, where no RTR is needed: the initiator speaks
  // first.
  if (options_.peer_to_peer && enhanced.peer_to_peer) {
    if (!enhanced.rtr_write && !enhanced.rtr_read) return Err(Fault(MpaFaultKind::kNoMatchingRtr, 0));
    outcome.rtr = enhanced.rtr_write ? MpaRtr::kWrite : MpaRtr::kRead;
  }
  return outcome;
}

// --- Responder ---

MpaResponder::MpaResponder(const MpaResponderOptions& options, Instant now)
    : timeout_(options.timeout), deadline_(now + options.timeout) {}

void MpaResponder::OnRx(ConstBytes bytes, Instant) {
  if (state_ != State::kWaiting) return;
  const auto frame = input_.OnBytes(bytes);
  if (!frame.has_value()) {
    STAGECOACH_MARK("mpa.malformed_request");
    // The one malformation that is surely an MPA peer's: it gets a Reply to read.
    if (frame.error().kind == wire::WireFaultKind::kEnhancedWordMissing) {
      request_.revision = wire::kMpaRevision2;
      Reply(wire::kMpaFlagReject | wire::kMpaFlagEnhanced, MpaEnhanced{}, {});
    }
    return Fail(MpaFaultKind::kMalformed, 0, frame.error());
  }
  if (frame->has_value()) OnRequest(**frame);
}

void MpaResponder::OnRequest(const MpaFrame& frame) {
  // RFC 5044 and siw agree on revisions from the future: close. Revision 0 was a draft's; nobody speaks it any more.
  if (!IsKnownRevision(frame.revision)) return Fail(MpaFaultKind::kUnsupportedRevision, frame.revision);
  request_ = {.revision = frame.revision,
              .enhanced = frame.enhanced.has_value(),
              .crc = frame.crc(),
              .markers = frame.markers(),
              .private_data = Copy(frame.private_data)};
  if (frame.enhanced.has_value()) {
    request_.ird = frame.enhanced->ird;
    request_.ord = frame.enhanced->ord;
    request_.peer_to_peer = frame.enhanced->peer_to_peer;
    request_.extensions = frame.asks_for_extensions();
    if (request_.peer_to_peer) {
      const std::optional<MpaRtr> rtr = ChooseRtr(*frame.enhanced);
      if (!rtr.has_value()) {
        Reply(wire::kMpaFlagReject | wire::kMpaFlagEnhanced, MpaEnhanced{}, {});
        return Fail(MpaFaultKind::kNoMatchingRtr);
      }
      rtr_ = *rtr;
    }
  }
  request_ready_ = true;
  state_ = State::kDeciding;
}

std::optional<MpaRequest> MpaResponder::TakeRequest() {
  if (!std::exchange(request_ready_, false)) return std::nullopt;
  return request_;
}

Result<void, MpaCommandError> MpaResponder::Accept(const MpaAcceptOptions& options, ConstBytes private_data,
                                                   Instant now) {
  if (state_ != State::kDeciding) return Err(MpaCommandError::kNotNow);
  if (options.ird > kMpaDepthMax || options.ord > kMpaDepthMax) return Err(MpaCommandError::kBadOption);
  if (private_data.size() > MpaPrivateDataMax(request_.enhanced)) return Err(MpaCommandError::kPrivateDataTooLong);

  reply_outcome_ = {.accepted = true,
                    .revision = request_.revision,
                    .enhanced = request_.enhanced,
                    .crc = request_.crc || options.crc,
                    .send_markers = request_.markers,
                    .extensions = request_.extensions && options.extensions,
                    .ird = options.ird,
                    .ord = options.ord,
                    .rtr = rtr_};
  std::optional<MpaEnhanced> enhanced;
  if (request_.enhanced) {
    // Our Reads must fit what the peer holds; what we hold for it need not exceed what it asks.
    reply_outcome_.ird = LimitBy(options.ird, request_.ord);
    reply_outcome_.ord = LimitBy(options.ord, request_.ird);
    if (reply_outcome_.ord < options.ord) STAGECOACH_MARK("mpa.responders_ord_limited");
    enhanced = MpaEnhanced{.peer_to_peer = request_.peer_to_peer,
                           .rtr_write = rtr_ == MpaRtr::kWrite,
                           .rtr_read = rtr_ == MpaRtr::kRead,
                           .ird = reply_outcome_.ird,
                           .ord = reply_outcome_.ord};
  }
  Reply(static_cast<uint8_t>((reply_outcome_.crc ? wire::kMpaFlagCrc : 0) |
                             (request_.enhanced ? wire::kMpaFlagEnhanced : 0) |
                             (reply_outcome_.extensions ? wire::kMpaFlagExtensionsAgreed : 0)),
        enhanced, private_data);
  state_ = State::kReplying;
  deadline_ = now + timeout_;
  return {};
}

Result<void, MpaCommandError> MpaResponder::Reject(ConstBytes private_data, Instant now) {
  if (state_ != State::kDeciding) return Err(MpaCommandError::kNotNow);
  if (private_data.size() > MpaPrivateDataMax(request_.enhanced)) return Err(MpaCommandError::kPrivateDataTooLong);
  reply_outcome_ = {.accepted = false, .revision = request_.revision, .enhanced = request_.enhanced};
  std::optional<MpaEnhanced> enhanced;
  if (request_.enhanced) enhanced.emplace();
  Reply(static_cast<uint8_t>(wire::kMpaFlagReject | (request_.enhanced ? wire::kMpaFlagEnhanced : 0)), enhanced,
        private_data);
  state_ = State::kReplying;
  deadline_ = now + timeout_;
  return {};
}

void MpaResponder::Reply(uint8_t flags, const std::optional<MpaEnhanced>& enhanced, ConstBytes private_data) {
  output_.Set({.kind = MpaFrameKind::kReply,
               .flags = flags,
               .revision = request_.revision,
               .enhanced = enhanced,
               .private_data = private_data});
}

void MpaResponder::OnTx(size_t bytes) {
  output_.OnTx(bytes);
  if (state_ != State::kReplying) return;
  if (!output_.Pending().empty()) {
    STAGECOACH_MARK("mpa.reply_leaves_in_pieces");
    return;
  }
  state_ = State::kDone;
  outcome_ = reply_outcome_;
}

void MpaResponder::OnLost(Instant) {
  if (state_ == State::kDone) return;
  if (state_ == State::kWaiting) STAGECOACH_MARK("mpa.stream_lost_before_the_request");
  if (state_ == State::kReplying) STAGECOACH_MARK("mpa.stream_lost_before_our_reply_left");
  output_ = {};
  Fail(MpaFaultKind::kStreamLost);
}

void MpaResponder::OnDeadline(Instant now) {
  const std::optional<Instant> deadline = Deadline();
  if (!deadline.has_value() || now < *deadline) return;
  if (state_ == State::kReplying) STAGECOACH_MARK("mpa.reply_not_taken_in_time");
  if (state_ == State::kWaiting) STAGECOACH_MARK("mpa.no_request_in_time");
  output_ = {};
  Fail(state_ == State::kReplying ? MpaFaultKind::kReplyTimeout : MpaFaultKind::kTimeout);
}

std::optional<Instant> MpaResponder::Deadline() const {
  if (state_ == State::kWaiting || state_ == State::kReplying) return deadline_;
  return std::nullopt;
}

std::optional<Result<MpaOutcome, MpaFault>> MpaResponder::TakeOutcome() {
  return std::exchange(outcome_, std::nullopt);
}

void MpaResponder::Fail(MpaFaultKind kind, uint64_t value, const wire::WireFault& wire) {
  state_ = State::kDone;
  request_ready_ = false;
  outcome_ = Err(MpaFault{
      .kind = kind, .wire = wire, .value = value, .bytes_received = input_.size(), .awaited = MpaFrameKind::kRequest});
}

}  // namespace stagecoach::emu
