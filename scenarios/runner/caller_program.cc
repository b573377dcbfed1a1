#include "scenarios/runner/caller_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/mark.h"
#include "rpcrdma/wire/header.h"

namespace stagecoach::scenario {

using rpcrdma::CallError;

CallerProgram::CallerProgram(Stage& stage, const Client& spec, std::string_view kind, uint32_t index, Duration patience)
    : stage_(stage),
      spec_(spec),
      service_(ServiceOf(stage.scenario(), spec)),
      who_(fmt::format("{} {}", kind, spec.name())),
      patience_(patience),
      calls_(stage, spec.host(), who_, index),
      probes_(stage, spec, who_),
      kind_(kind) {
  for (const Call& call : spec.call()) script_.insert(script_.end(), call.repeat(), &call);
}

void CallerProgram::Start() {
  ArmEnds();
  if (started_) return Open();
  started_ = true;
  last_begin_ = stage_.Now();
  OpenAfter(Duration(spec_.start_ns()));
}

void CallerProgram::Kill() {
  ++life_;
  for (EventLoop::TimerId* timer : {&open_timer_, &pause_timer_, &close_timer_, &destroy_timer_}) {
    if (*timer != 0) stage_.loop(host()).Cancel(std::exchange(*timer, 0));
  }
  Drop();
  tally_.disturbed += calls_.size();
  calls_.Abandon();
  reverse_.reset();
}

bool CallerProgram::Idle() const {
  if (hopeless_) return true;
  if (stopping_) return !IsOpen();
  return started_ && AllBegun() && calls_.empty() && !IsOpening() && !probes_.under_way() && !closing_ &&
         close_timer_ == 0 && destroy_timer_ == 0;
}

void CallerProgram::Stop() {
  stopping_ = true;
  calls_.CheckMemory();
  if (!IsOpen()) return;
  Close(InThisLife([this] { Post([this] { Drop(); }); }));
}

std::string CallerProgram::DescribeCalls(std::string_view state) const {
  return fmt::format("{} on {}: {} of {} calls started, {} under way{}\n", who_, host(), next_, script_.size(),
                     calls_.size(), state) +
         calls_.Describe();
}

std::function<void()> CallerProgram::InThisLife(std::function<void()> action) {
  return [this, life = life_, action = std::move(action)] {
    if (life == life_) action();
  };
}

void CallerProgram::Post(std::function<void()> action) {
  stage_.loop(host()).Post(InThisLife(std::move(action)));
}

// --- The caller ---

rpcrdma::ClientOptions CallerProgram::MakeOptions(const std::string& name) {
  rpcrdma::ClientOptions options;
  options.credits = spec_.credits();
  options.inline_threshold = spec_.inline_threshold();
  options.incoming_reads = static_cast<uint8_t>(spec_.incoming_reads());
  options.queued_calls_max = spec_.queued_calls_max();
  options.message_bytes_max = spec_.message_bytes_max();
  options.memory_windows = spec_.memory_windows();
  options.trace = stage_.trace();
  options.name = name;
  options.first_xid = stage_.FirstModelXid(name);
  SetTerms(spec_, &options);
  ServeReverse(stage_, spec_, &reverse_, &options);
  return options;
}

bool CallerProgram::MayFailToConnect(Instant since, Kind kind) {
  // The calls that configure a connection, or show its version, take as long as any other, and end as it does.
  const bool calls = spec_.ccp() || spec_.version_high() > 1;
  if (calls && kind == Kind::kUnreachable &&
      (patience_ > rpcrdma::ClientOptions().connect_timeout || stage_.FailedRegistration(spec_.server(), since))) {
    return true;
  }
  return stage_.MayFailToConnect(spec_.host(), spec_.server(), since, kind, &connects_);
}

bool CallerProgram::MayBeLostUnread(Instant since) const {
  if (!RepliesAreRead(spec_, service_)) return false;
  const auto unread = stage_.evidence().LastUnreadReply(spec_.server());
  return unread && *unread >= since &&
         (Duration(service_.exposed_ns()) < patience_ || stage_.Disturbed(spec_.host(), spec_.server(), since));
}

bool CallerProgram::MayBeLostByReverseCall(Instant since) const {
  if (!spec_.reverse_chunks()) return false;
  // Serving its server, it lets the connection go when it cannot register what a call needs, as servers do.
  if (stage_.FailedRegistration(spec_.host(), since)) return true;
  const auto& calls = spec_.reverse_call();
  // A client that cannot register what one needs lets the connection go, too.
  return stage_.Disturbed(spec_.host(), spec_.server(), since) || stage_.FailedRegistration(spec_.host(), since) ||
         std::any_of(calls.begin(), calls.end(),
                     [&](const Call& call) { return Duration(call.timeout_ns()) < patience_; });
}

void CallerProgram::OpenAfter(Duration delay) {
  if (open_timer_ != 0) stage_.loop(host()).Cancel(open_timer_);
  open_timer_ = stage_.loop(host()).At(stage_.Now() + delay, [this] {
    open_timer_ = 0;
    Open();
  });
}

void CallerProgram::Drop() {
  closing_ = false;
  destroying_ = true;
  Destroy();
  destroying_ = false;
}

void CallerProgram::ArmEnds() {
  const auto arm = [this](EventLoop::TimerId* timer, uint64_t when, void (CallerProgram::*end)()) {
    // What would have been while the host was down is not made up for.
    if (when == 0 || Instant(Duration(when)) <= stage_.Now()) return;
    *timer = stage_.loop(host()).At(Instant(Duration(when)), [this, timer, end] {
      *timer = 0;
      if (!IsOpen() || closing_ || stopping_) return Pump();
      calls_.NoteClosed();
      (this->*end)();
    });
  };
  arm(&close_timer_, spec_.close_ns(), &CallerProgram::CloseAmidst);
  arm(&destroy_timer_, spec_.destroy_ns(), &CallerProgram::DestroyAmidst);
}

void CallerProgram::CloseAmidst() {
  closing_ = true;
  Close(InThisLife([this] {
    if (!closing_) return;
    CheckAllTold("closed");
    Post([this] {
      if (!closing_) return;
      Drop();
      Resume();
    });
  }));
}

void CallerProgram::DestroyAmidst() {
  Drop();
  // Behind what the caller had to say yet.
  Post([this] {
    CheckAllTold("destroyed");
    Resume();
  });
}

// [client.h] [session.h] Every call has been told by now.
void CallerProgram::CheckAllTold(std::string_view how) {
  calls_.CheckAllTold(fmt::format("the {} is {}", kind_, how));
}

// --- Calls ---

void CallerProgram::Pump() {
  while (!AllBegun() && calls_.size() < spec_.concurrency() && Ready()) {
    const Call& call = *script_[next_];
    const Instant due = last_begin_ + Duration(call.pause_ns());
    if (due > stage_.Now()) {
      if (pause_timer_ != 0) return;
      pause_timer_ = stage_.loop(host()).At(due, [this] {
        pause_timer_ = 0;
        Pump();
      });
      return;
    }
    ++next_;
    Begin(call, false);
  }
}

bool CallerProgram::BeginProbes(bool warm, uint32_t at_a_time_max) {
  calls_.CheckMemory();
  if (hopeless_) return false;
  probes_.Begin(warm, at_a_time_max);
  // Each round is the same work.
  calls_.AlignNumbers();
  return true;
}

void CallerProgram::Begin(const ProbeRound::Step& step) {
  for (uint32_t i = 0; i < step.count; ++i) Begin(step.call, true);
}

void CallerProgram::Begin(const Call& spec, bool probe) {
  last_begin_ = stage_.Now();
  // A probe that is cancelled is no call that anybody wants answered.
  if (!probe || spec.cancel_ns() == 0) ++tally_.calls;
  CallUnderWay& call = calls_.Begin(spec, probe);
  call.id = Send(call, [this, number = call.number, life = life_](Outcome outcome) {
    if (life == life_) OnOutcome(number, outcome);
  });
  calls_.CancelInTime(call, [this](const CallUnderWay& due) { Cancel(due); });
}

void CallerProgram::OnOutcome(uint64_t number, const Outcome& outcome) {
  if (destroying_) {
    stage_.Violate("call.ended_inside",
                   fmt::format("{}, call {:#x}: ends while the {} is being destroyed", who_, number, kind_));
  }
  std::optional<CallUnderWay> call = calls_.End(number);
  if (!call) return;
  if (outcome) {
    ++tally_.answered;
    NoteVersion(outcome->rpcrdma_version());
    call->CheckReply(stage_, who_, *outcome);
  } else if (const std::string objection = Judge(*call, outcome.error()); !objection.empty()) {
    stage_.Violate(call->probe ? "liveness.probe" : "call.failed",
                   fmt::format("{}: {}: {}", call->Label(who_, "call"), outcome.error().ToString(), objection));
  }
  calls_.Retire(*call);
  OnOver(*call, outcome);
}

// It may speak version 2, and an older document is what its version 1 is by.
void CallerProgram::NoteVersion(uint32_t version) const {
  if (spec_.version_high() < rpcrdma::kRpcRdmaVersion2 || !IsOlderDocument(spec_.rpcrdma_profile())) return;
  if (version == rpcrdma::kRpcRdmaVersion2) {
    STAGECOACH_MARK("caller.version_2_beside_an_older_document");
  } else {
    STAGECOACH_MARK("caller.older_document_in_place_of_version_2");
  }
}

std::string CallerProgram::Refused(bool may) {
  ++tally_.refused;
  return may ? "" : "nothing in the scenario explains it";
}

std::string CallerProgram::JudgeByItself(const CallUnderWay& call, const CallError& error) {
  switch (error.kind) {
    case Kind::kCancelled:
      if (call.probe && call.cancelled) return "";
      return Refused(call.cancelled);
    case Kind::kQueueFull:
      return Refused(spec_.concurrency() > spec_.queued_calls_max());
    case Kind::kTooLarge:
      return Refused(TooLarge(stage_.scenario(), spec_, call.spec));
    case Kind::kMemory:
      return Refused(stage_.FailedRegistration(spec_.host(), call.started) ||
                     (error.sent && ReplyExceedsDevice(stage_.scenario(), spec_, call.spec)));
    case Kind::kBadReply:
      return Refused(ReplyExceedsClient(spec_, service_, call.spec));
    case Kind::kTransport:
      return Refused(
          ReplyCannotTravel(stage_.scenario(), spec_, call.spec) || EndsForReadChunks(spec_, service_, call.spec) ||
          stage_.FailedRegistration(spec_.server(), call.started) || ArgumentsExceedServer(service_, call.spec));
    case Kind::kRpc:
      return Refused(error.accept_stat == rpcrdma::AcceptStat::kSystemErr &&
                     (ServerMayLackMemory(stage_.scenario(), spec_, call.spec) ||
                      ReplyExceedsServer(service_, call.spec) ||
                      // Sent again because the reply found no room: what was executed is not kept.
                      (MayBeOfVersion2(spec_, service_) && ReplyIsNotKept(service_, call.spec))));
    case Kind::kClosed:
      return Refused(call.closed);
    default:
      return Refused(false);
  }
}

}  // namespace stagecoach::scenario
