// CallsUnderWay: the calls of the model service that a program has made and that are not over, and what is watched of
// each from then on: that its memory does not change, and that it is not executed if it was not sent.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/guarded_memory.h"
#include "scenarios/runner/model_call.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

struct CallUnderWay : ModelCall {
  using ModelCall::ModelCall;
  // When it times out; nullopt: never.
  std::optional<Instant> due() const;
  bool IsLate(Instant now) const;

  Instant started{};
  rpcrdma::CallId id = 0;  // 0: it failed at once, which it has yet to be told
  bool cancelled = false;
  bool closed = false;  // what it was made with was closed, or destroyed, while it was under way
  bool probe = false;
  EventLoop::TimerId cancel_timer = 0;
  // Of a session's call:
  Instant since{};      // of the oldest connection that it may go on
  uint64_t losses = 0;  // so many connections had been lost when it began
};

class CallsUnderWay {
 public:
  // `who` makes them on `host`, in what is reported. `index` makes their numbers. `stage` outlives the object.
  CallsUnderWay(Stage& stage, const std::string& host, const std::string& who, uint32_t index);
  // None is under way any more: looks a last time at what is watched.
  ~CallsUnderWay();
  CallsUnderWay(const CallsUnderWay&) = delete;
  CallsUnderWay& operator=(const CallsUnderWay&) = delete;

  size_t size() const { return calls_.size(); }
  bool empty() const { return calls_.empty(); }
  // One of them has timed out.
  bool AnyLate() const;
  // The service tells calls apart by their numbers: those that begin from now on are of the same kinds as those that
  // began when this was called before.
  void AlignNumbers();
  // For a call that nobody watches.
  uint64_t NewNumber() { return next_number_++; }

  // One begins. It stays where it is until it is over.
  CallUnderWay& Begin(const Call& spec, bool probe);
  // When the scenario has it cancelled, `cancel` runs, unless it is over or closed by then, or failed at once.
  void CancelInTime(CallUnderWay& call, std::function<void(const CallUnderWay&)> cancel);
  // It is over. nullopt, which is a violation, when it was before.
  std::optional<CallUnderWay> End(uint64_t number);
  // It was not sent: its result has not been written to, and it is never executed.
  void NoteUnsent(const CallUnderWay& call);
  // It has failed before anything could write to its result.
  void CheckResultUntouched(const CallUnderWay& call);
  // It has been judged: takes its memory, to watch it from now on.
  void Retire(CallUnderWay& call) { call.Retire(stage_, who_, &cold_); }
  // Their program is gone, and is told of none.
  void Abandon();

  // What they were made with ends, which each of them is to be told.
  void NoteClosed();
  // By now they have been. `how`: "the client is closed".
  void CheckAllTold(const std::string& how);
  // What is watched is as it was.
  void CheckMemory() { cold_.CheckAll(stage_.Now()); }
  // A line for each.
  std::string Describe() const;

 private:
  void StopTimer(CallUnderWay& call);

  Stage& stage_;
  const std::string host_;
  const std::string who_;
  uint64_t next_number_;
  std::map<uint64_t, CallUnderWay> calls_;
  std::vector<uint64_t> unsent_;  // numbers
  ColdStorage cold_;
};

}  // namespace stagecoach::scenario
