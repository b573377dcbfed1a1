// Judges a connection by its trace alone: what an observer can hold the RPC stack to without looking inside.
//
// The events and their facts are those of rpcrdma/core (the engine's decisions) and rpcrdma/verbs (what the device was
// given and gave back, counted where it happens); both ends' components have names of their own. Rules:
//
//   credits      a reply is posted while Receives posted + calls not yet answered >= credits granted, and a call while
//                Receives posted >= calls in flight <= the last grant seen (ARCHITECTURE section 7)
//   fence        when a call is over, none of its STags is valid
//   once         each call submitted is over once
//   lengths      what the caller gets is what the server wrote
//   reads        no more RDMA Reads are in flight than the connection admits
//   buffers      a Send buffer is not filled while a Send from it is outstanding
//   conservation what a queue pair took is what it gave back and what it was destroyed with
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/trace.h"

namespace stagecoach::e2e {

class FactChecker final : public TraceSink {
 public:
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    now_ = now;
    event_ = event;
    component_ = component;
    facts_ = facts;
    ++counts_[std::string(event)];
    Judge(ends_[std::string(component)]);
  }

  // Call after everything is over.
  std::vector<std::string> Violations() const {
    std::vector<std::string> all = violations_;
    for (const auto& [name, end] : ends_) {
      for (const auto& [id, call] : end.calls) all.push_back(name + ": call " + std::to_string(id) + " is not over");
      if (end.established && !end.closed) all.push_back(name + ": never closed");
    }
    return all;
  }
  size_t count(const std::string& event) const {
    const auto found = counts_.find(event);
    return found == counts_.end() ? 0 : found->second;
  }

 private:
  struct Call {
    std::set<uint64_t> registrations;
    uint64_t returned = 0;
  };
  struct Planned {  // a Send that the engine asked for
    bool reply = false;
    uint64_t granted = 0;
    uint64_t unanswered = 0;  // or in flight
    uint64_t received = 0;
  };
  struct End {
    std::map<uint64_t, Call> calls;
    std::map<uint64_t, Planned> planned;  // by send buffer, until posted
    std::set<uint64_t> slots;             // send buffers in use
    std::set<uint64_t> valid;             // registrations
    uint64_t in_flight = 0;
    uint64_t granted = 1;
    bool established = false;
    bool closed = false;
  };

  uint64_t Number(std::string_view key) {
    for (const TraceFact& fact : facts_) {
      if (fact.key == key && std::holds_alternative<uint64_t>(fact.value)) return std::get<uint64_t>(fact.value);
    }
    Expect(false, "no fact " + std::string(key));
    return 0;
  }
  std::string_view Word(std::string_view key) {
    for (const TraceFact& fact : facts_) {
      if (fact.key == key && std::holds_alternative<std::string_view>(fact.value)) {
        return std::get<std::string_view>(fact.value);
      }
    }
    Expect(false, "no fact " + std::string(key));
    return {};
  }
  void Expect(bool holds, const std::string& rule) {
    if (!holds) violations_.push_back(rule + " broken by: " + FormatTraceEvent(now_, component_, event_, facts_));
  }

  void Judge(End& end) {
    if (event_ == "established") end.established = true;
    if (event_ == "call.submitted") {
      Expect(end.calls.emplace(Number("call"), Call{}).second, "once");
    } else if (event_ == "stag.registered") {
      Expect(end.valid.insert(Number("registration")).second, "fence");
    } else if (event_ == "stag.invalidated") {
      Expect(end.valid.erase(Number("registration")) == 1, "fence");
    } else if (event_ == "stag.exposed") {
      end.calls[Number("call")].registrations.insert(Number("registration"));
    } else if (event_ == "call.sent") {
      ++end.in_flight;
      Expect(end.in_flight == Number("in_flight"), "credits: calls in flight");
      Expect(end.in_flight <= end.granted, "credits: in flight <= granted");
      Plan(end, {.granted = Number("granted"), .unanswered = Number("in_flight"), .received = Number("received")});
    } else if (event_ == "reply.sent" || event_ == "error.sent") {
      Expect(Number("receives") + Number("unanswered") >= Number("granted"), "credits: as the engine counts");
      Plan(end, {.reply = true,
                 .granted = Number("granted"),
                 .unanswered = Number("unanswered"),
                 .received = Number("received")});
    } else if (event_ == "send.posted") {
      JudgePosted(end);
    } else if (event_ == "send.done") {
      end.slots.erase(Number("slot"));
    } else if (event_ == "read.issued") {
      Expect(Number("in_flight") <= Number("reads_max"), "reads");
    } else if (event_ == "reply.received") {
      --end.in_flight;
      end.granted = Number("credits");
      Call& call = end.calls[Number("call")];
      call.returned = Number("writes_returned");
      Expect(call.returned <= Number("writes_offered"), "lengths: within what was offered");
      Expect(Number("reply_returned") <= Number("reply_offered"), "lengths: within what was offered");
    } else if (event_ == "reply.ignored" && Word("why") == "cancelled") {
      --end.in_flight;
      end.granted = Number("credits");
    } else if (event_ == "call.over") {
      JudgeOver(end);
    } else if (event_ == "connection.closed") {
      end.closed = true;
      end.valid.clear();
      Expect(Number("receives_posted") == Number("receives_completed") + Number("receives_destroyed"), "conservation");
      Expect(Number("sends_posted") == Number("sends_completed") + Number("sends_destroyed"), "conservation");
    }
  }

  void Plan(End& end, const Planned& planned) {
    Expect(end.slots.insert(Number("slot")).second, "buffers");
    end.planned[Number("slot")] = planned;
  }

  // What arrived between the engine's decision and the post is neither posted nor answered.
  void JudgePosted(End& end) {
    const auto found = end.planned.find(Number("slot"));
    if (found == end.planned.end()) return Expect(false, "a Send that nobody asked for");
    const Planned planned = found->second;
    end.planned.erase(found);
    const uint64_t arrived = Number("received") - planned.received;
    if (planned.reply) {
      Expect(Number("receives_posted") + arrived + planned.unanswered >= planned.granted, "credits");
    } else {
      Expect(Number("receives_posted") + arrived >= planned.unanswered, "credits: a Receive for each reply");
    }
  }

  void JudgeOver(End& end) {
    const auto found = end.calls.find(Number("call"));
    if (found == end.calls.end()) return Expect(false, "once");
    const Call call = found->second;
    end.calls.erase(found);
    Expect(Number("stags") == 0, "fence");
    for (const uint64_t registration : call.registrations) {
      // A number that is valid again belongs to a later call: the sets of open calls do not overlap.
      if (end.valid.count(registration) > 0 && !OfAnother(end, registration)) Expect(false, "fence: in the driver");
    }
    if (Word("outcome") == "ok") Expect(Number("placed") == call.returned, "lengths");
  }
  static bool OfAnother(const End& end, uint64_t registration) {
    for (const auto& [id, call] : end.calls) {
      if (call.registrations.count(registration) > 0) return true;
    }
    return false;
  }

  Instant now_;
  std::string_view event_;
  std::string_view component_;
  std::initializer_list<TraceFact> facts_;
  std::map<std::string, End> ends_;
  std::map<std::string, size_t> counts_;
  std::vector<std::string> violations_;
};

}  // namespace stagecoach::e2e
