// A program that talks to others in every way at once: messages, Writes and Reads in both directions, as many as may be
// outstanding. For tests of what becomes of a connection when something happens to either end.
//
// Not in simulation. Neither threads nor sleeps: Step() does what there is to do now.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {

// One connection of a party.
class Conversation {
 public:
  // Sends that many messages, and Writes and Reads until it has; 0: it is silent.
  Conversation(CmId id, size_t most) : most_(most), id_(std::move(id)) {}
  ~Conversation() {
    if (id_ && id_->qp != nullptr) rdma_destroy_qp(id_.get());
  }
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  // Objects, memory, and Receives.
  void Prepare();
  rdma_conn_param Parameters();
  // What the other end's parameters say.
  void Hear(const rdma_conn_param& parameters);
  // Takes what has completed, and posts what may be posted.
  void Step();

  void OnEvent(rdma_cm_event_type event);
  // The event that ended it, or had it not begin.
  const std::optional<rdma_cm_event_type>& end() const { return end_event_; }

  rdma_cm_id* id() const { return id_.get(); }
  bool is_established() const { return is_established_; }
  // Completions that were successes.
  size_t done() const { return done_; }
  // Messages of the other end.
  size_t received() const { return received_; }
  size_t outstanding() const { return receives_ + messages_ + writes_ + reads_; }
  // It has sent all that it is to send, nothing of that is outstanding, and as many messages have come.
  bool is_quiet() const { return sent_ == most_ && received_ == most_ && messages_ + writes_ + reads_ == 0; }
  // In order, of what did not succeed.
  const std::vector<ibv_wc_status>& failures() const { return failures_; }

 private:
  enum Kind : uint64_t { kReceive, kMessage, kWrite, kRead };
  struct Window {
    uint64_t address = 0;
    uint32_t rkey = 0;
    uint32_t zero = 0;
  };

  // Each end sends that many messages more than it has received, so that the other has no more than twice as many to
  // take.
  static constexpr size_t kAhead = 8;
  static constexpr size_t kReceives = 2 * kAhead + 4;
  static constexpr size_t kAtOnce = 2;  // Writes, and Reads
  static constexpr size_t kMessageSize = 1000;
  static constexpr size_t kTransferSize = 40'000;

  void OnCompletion(const ibv_wc& completion);
  void PostOneReceive();
  void PostOne(Kind kind, ibv_wr_opcode opcode, size_t offset, size_t size);

  const size_t most_;
  CmId id_;
  ProtectionDomain pd_;
  CompletionQueue cq_;
  std::unique_ptr<Buffer> memory_;
  Window own_;
  Window peer_;
  bool is_established_ = false;
  std::optional<rdma_cm_event_type> end_event_;
  size_t receives_ = 0;  // outstanding, as the three that follow
  size_t messages_ = 0;
  size_t writes_ = 0;
  size_t reads_ = 0;
  size_t sent_ = 0;
  size_t received_ = 0;
  size_t done_ = 0;
  std::vector<ibv_wc_status> failures_;
};

class Party {
 public:
  struct Options {
    bool accepts = true;
    size_t most = SIZE_MAX;                  // messages of each conversation
    std::function<void()> before_connect{};  // may be empty
  };

  Party() : Party(Options()) {}
  explicit Party(Options options);

  // The port.
  uint16_t Listen();
  // Resolves, and then, unless it `resolves_only`, connects, by and by.
  void Call(uint16_t port, bool resolves_only = false);
  void Step();
  // Steps until it is so. False: the bound has passed.
  bool Until(const std::function<bool()>& done);

  // Requests that were not accepted included; oldest first.
  std::list<Conversation>& conversations() { return conversations_; }
  // Is to end; the other end is told.
  void HangUp(Conversation& conversation);
  bool is_resolved() const { return is_resolved_; }
  bool is_requested() const { return is_requested_; }
  // An errno: there was not so much as an attempt to connect. 0: there was.
  int call_error() const { return call_error_; }
  rdma_event_channel* channel() const { return channel_.get(); }

 private:
  void OnCmEvent(const rdma_cm_event& event);
  void Accept(rdma_cm_id* id, const rdma_conn_param& parameters);
  void Connect();
  Conversation& Of(const rdma_cm_id* id);

  const Options options_;
  EventChannel channel_;
  CmId listener_;
  CmId calling_;  // until it is a conversation's
  std::list<Conversation> conversations_;
  bool resolves_only_ = false;
  bool is_resolved_ = false;
  bool is_requested_ = false;
  int call_error_ = 0;
};

}  // namespace stagecoach::verbs
