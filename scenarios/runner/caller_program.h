// CallerProgram: what the two programs have in common that play a client of the scenario, ClientProgram and
// SessionProgram. They make the calls of its script, each when it is due; know what each answer must be, and which
// failures a call may meet for what it is itself; end amidst their work when the scenario says so, and go on.
//
// What calls are made with, called the caller here, is made and judged by the program: an rpcrdma::Client, of one
// connection after the other, or an rpcrdma::Session.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rpcrdma/api/client.h"
#include "scenarios/runner/calls_under_way.h"
#include "scenarios/runner/model.h"
#include "scenarios/runner/probe_round.h"
#include "scenarios/runner/program.h"
#include "scenarios/runner/stage.h"

namespace stagecoach::scenario {

class CallerProgram : public Program {
 public:
  const std::string& host() const final { return spec_.host(); }
  void Start() final;
  void Kill() override;
  bool Idle() const final;
  void Stop() final;

 protected:
  using Kind = rpcrdma::CallError::Kind;
  using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

  // `kind` of caller, in what is reported. `index` makes the numbers of the calls. `patience`: how long one may take
  // when nothing is wrong. `stage` and `spec` outlive the program. Whoever derives from it kills it at its end.
  CallerProgram(Stage& stage, const Client& spec, std::string_view kind, uint32_t index, Duration patience);

  // --- The caller ---

  // Makes one if there is none and one is wanted, for calls to be made as soon as that can be.
  virtual void Open() = 0;
  virtual bool IsOpen() const = 0;
  // It is on its way to be there, or to have a connection.
  virtual bool IsOpening() const = 0;
  // Whether a call can be made now. If not, sees to it that Pump() runs when one can be.
  virtual bool Ready() = 0;
  virtual rpcrdma::CallId Send(CallUnderWay& call, rpcrdma::Client::CallHandler handler) = 0;
  virtual void Cancel(const CallUnderWay& call) = 0;
  // Ends it in an orderly way; then `done` runs.
  virtual void Close(std::function<void()> done) = 0;
  // Destroys it, if it is there.
  virtual void Destroy() = 0;
  // It has ended amidst the work: goes on without it.
  virtual void Resume() = 0;

  // --- Calls ---

  // Why a call must not fail so; empty when it may. Counts it.
  virtual std::string Judge(const CallUnderWay& call, const rpcrdma::CallError& error) = 0;
  // A call is over, and has been judged: goes on.
  virtual void OnOver(const CallUnderWay& call, const Outcome& outcome) = 0;

  // --- For the derived programs ---

  void OpenAfter(Duration delay);
  // Destroys the caller, which tells nobody of its end inside of that.
  void Drop();
  // Destroys it with calls under way, of which each has to be told before the program goes on.
  void DestroyAmidst();
  // Makes the calls that are due.
  void Pump();
  // The script is at its end.
  bool AllBegun() const { return next_ == script_.size(); }
  void Begin(const Call& spec, bool probe);
  void Begin(const ProbeRound::Step& step);
  // Begins a round, and says whether: a program that is hopeless has nothing to show.
  bool BeginProbes(bool warm, uint32_t at_a_time_max);
  // Judges a failure that no injection is to blame for.
  std::string Refused(bool may);
  // The same where what became of connections plays no part: by the call, by what both ends have room for, and by what
  // their devices refused.
  std::string JudgeByItself(const CallUnderWay& call, const rpcrdma::CallError& error);
  // Whether an attempt to connect that began at `since` may fail so. Counts it.
  bool MayFailToConnect(Instant since, Kind kind);
  // A server that has waited long enough for this client to read a reply may have ended a connection that there was
  // since then.
  bool MayBeLostUnread(Instant since) const;
  // The same of a service whose call to this client, with chunks, has timed out, or found no memory here.
  bool MayBeLostByReverseCall(Instant since) const;
  // Of a client by this name, as the scenario says: one that serves the model service to its server, perhaps.
  rpcrdma::ClientOptions MakeOptions(const std::string& name);
  // Lines, the first of which ends with `state`.
  std::string DescribeCalls(std::string_view state) const;

  // Runs `action` unless the program has been killed by then.
  std::function<void()> InThisLife(std::function<void()> action);
  // From the loop: a caller must not be destroyed by a handler of its own.
  void Post(std::function<void()> action);
  uint32_t life() const { return life_; }

  // It cannot work any more, for a reason that will not go away.
  void NoteHopeless() { hopeless_ = true; }
  bool hopeless() const { return hopeless_; }
  bool stopping() const { return stopping_; }
  // The caller is being closed amidst the work.
  bool closing() const { return closing_; }
  // The caller is being destroyed.
  bool destroying() const { return destroying_; }

  Stage& stage_;
  const Client& spec_;
  const Service& service_;
  const std::string who_;  // "client c"
  const Duration patience_;
  Stage::Attempts connects_;
  CallsUnderWay calls_;
  ProbeRound probes_;
  std::unique_ptr<ModelService> reverse_;  // what it serves to its server; null: nothing

 private:
  // Client::close_ns and Client::destroy_ns.
  void ArmEnds();
  void CloseAmidst();
  void CheckAllTold(std::string_view how);
  void OnOutcome(uint64_t number, const Outcome& outcome);
  void NoteVersion(uint32_t version) const;

  const std::string kind_;
  std::vector<const Call*> script_;  // spec_.call, repeats unrolled
  size_t next_ = 0;
  Instant last_begin_{};  // of a call
  bool started_ = false;
  bool stopping_ = false;
  bool hopeless_ = false;
  bool closing_ = false;
  bool destroying_ = false;
  uint32_t life_ = 0;
  EventLoop::TimerId open_timer_ = 0;
  EventLoop::TimerId pause_timer_ = 0;  // to make the next call
  EventLoop::TimerId close_timer_ = 0;
  EventLoop::TimerId destroy_timer_ = 0;
};

}  // namespace stagecoach::scenario
