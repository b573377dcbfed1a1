#include "scenarios/runner/connection_checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace stagecoach::scenario {
namespace {

// What tells that a component is an end of a connection.
constexpr std::array<std::string_view, 25> kEvents = {
    "established",     "call.submitted", "stag.registered",     "stag.invalidated",  "stag.exposed",
    "call.sent",       "reply.sent",     "error.sent",          "send.posted",       "send.done",
    "reply.received",  "reply.ignored",  "call.over",           "connection.closed", "read.issued",
    "done.sent",       "done.received",  "reply.exposed",       "call.resent",       "connection.version",
    "properties.sent", "answer.sent",    "properties.received", "properties.over",   "extension.given_up"};

constexpr std::string_view kReverse = "/reverse";

}  // namespace

void ConnectionChecker::OnEvent(Instant now, std::string_view component, std::string_view event,
                                std::initializer_list<TraceFact> facts) {
  if (std::find(kEvents.begin(), kEvents.end(), event) == kEvents.end()) return;
  now_ = now;
  event_ = event;
  component_ = component;
  facts_ = facts;
  ++judged_;
  reverse_ = component.ends_with(kReverse);
  const std::string_view name = reverse_ ? component.substr(0, component.size() - kReverse.size()) : component;
  auto end = ends_.find(name);
  if (end == ends_.end()) end = ends_.emplace(std::string(name), End()).first;
  if (!Judge(end->second)) ends_.erase(end);
}

void ConnectionChecker::CheckNothingExposed(Instant now) {
  for (const auto& [name, end] : ends_) {
    if (!end.established || end.forward.exposed == 0) continue;
    violations_->Add(now, "exposure.held", fmt::format("{}: {} replies are exposed", name, end.forward.exposed));
  }
}

void ConnectionChecker::Finish(Instant now) {
  for (const auto& [name, end] : ends_) {
    // Its owner has destroyed it, and may be gone itself: of what was open nobody need be told.
    if (end.destroyed) continue;
    for (const auto& [id, call] : end.forward.calls) {
      violations_->Add(now, "call.once", fmt::format("{}: call {} is not over", name, id));
    }
    for (const auto& [id, call] : end.reverse.calls) {
      violations_->Add(now, "call.once", fmt::format("{}{}: call {} is not over", name, kReverse, id));
    }
    violations_->Add(now, "connection.outlived", name + " was never closed");
  }
}

template <typename T>
T ConnectionChecker::Fact(std::string_view key) const {
  if (const T* value = FindFact<T>(facts_, key)) return *value;
  violations_->Add(now_, "trace.facts", fmt::format("{} {} does not tell \"{}\"", component_, event_, key));
  return T();
}

uint64_t ConnectionChecker::Number(std::string_view key) const {
  return Fact<uint64_t>(key);
}

std::string_view ConnectionChecker::Word(std::string_view key) const {
  return Fact<std::string_view>(key);
}

void ConnectionChecker::Expect(bool holds, std::string_view rule, std::string_view what) {
  if (holds) return;
  violations_->Add(now_, rule, fmt::format("{}: {}", what, FormatTraceEvent(now_, component_, event_, facts_)));
}

bool ConnectionChecker::Judge(End& end) {
  Direction& direction = reverse_ ? end.reverse : end.forward;
  if (event_ == "established") {
    end.established = true;
  } else if (event_ == "call.submitted") {
    Call call;
    call.deadline = Number("deadline");
    Expect(direction.calls.emplace(Number("call"), call).second, "call.once", "a call begins twice");
  } else if (event_ == "stag.registered") {
    Expect(end.valid.emplace(Number("registration"), ++end.registered).second, "fence",
           "a registration is valid already");
  } else if (event_ == "stag.invalidated") {
    Expect(end.valid.erase(Number("registration")) == 1, "fence", "invalidated without being valid");
  } else if (event_ == "stag.exposed") {
    if (const auto valid = end.valid.find(Number("registration")); valid != end.valid.end()) {
      direction.calls[Number("call")].registrations.insert_or_assign(valid->first, valid->second);
    }
  } else if (event_ == "call.sent") {
    ++direction.in_flight;
    const uint64_t deadline = direction.calls[Number("call")].deadline;
    const auto now = static_cast<uint64_t>(now_.time_since_epoch().count());
    Expect(deadline == 0 || now <= deadline, "call.late", "sent after its time-out");
    Expect(direction.in_flight == Number("in_flight"), "credit.requester", "calls in flight miscounted");
    const bool fits = direction.in_flight + direction.dones() <= direction.granted;
    Expect(fits || direction.in_flight == 1, "credit.requester", "more calls than granted");
    direction.dones_before[Number("xid")] = direction.dones_sent;
    JudgeSent(end, direction);
    Plan(end, direction,
         {.granted = Number("granted"), .unanswered = Number("in_flight"), .received = Number("received")});
  } else if (event_ == "properties.sent") {
    ++direction.in_flight;
    direction.tells_properties = true;
    Expect(direction.in_flight <= direction.granted, "credit.requester", "more than granted");
    Plan(end, direction,
         {.granted = Number("granted"), .unanswered = Number("in_flight"), .received = Number("received")});
  } else if (event_ == "properties.received") {
    // At a responder nobody waits for them.
    const auto* const awaited = FindFact<uint64_t>(facts_, "awaited");
    if (awaited != nullptr && *awaited != 0) direction.granted = std::max<uint64_t>(Number("credits"), 1);
  } else if (event_ == "properties.over") {
    const std::string_view how = Word("how");
    if (!std::exchange(direction.tells_properties, false)) return true;
    --direction.in_flight;
    // Without an answer it may still be unread when what is sent next arrives.
    if (how == "announced" || how == "unanswered") ++direction.dones_sent;
  } else if (event_ == "extension.given_up") {
    if (direction.in_flight > 0) --direction.in_flight;
    ++direction.dones_sent;
  } else if (event_ == "call.resent") {
    Call& call = direction.calls[Number("call")];
    Expect(!call.in_flight, "call.once", "sent again without an answer");
    call.xid = Number("xid");
    call.before = std::move(call.registrations);
    call.registrations.clear();
  } else if (event_ == "connection.version") {
    Expect(end.version == 0 || end.version == Number("version"), "version.fixed", "another version");
    end.version = Number("version");
  } else if (event_ == "reply.exposed") {
    ++direction.exposed;
  } else if (event_ == "done.received") {
    if (Number("matched") == 0) return true;
    Expect(direction.exposed > 0, "exposure.held", "a reply that was not exposed is said to be read");
    if (direction.exposed > 0) --direction.exposed;
  } else if (event_ == "done.sent") {
    Expect(direction.dones_owed > 0, "credit.requester", "an RDMA_DONE for nothing");
    if (direction.dones_owed > 0) --direction.dones_owed;
    ++direction.dones_sent;
    Plan(end, direction, {.what = Planned::What::kDone, .received = direction.received});
  } else if (event_ == "reply.sent" || event_ == "error.sent" || event_ == "answer.sent") {
    const uint64_t taken = Number("granted") + direction.exposed;
    Expect(Number("receives") + Number("unanswered") >= taken, "credit.responder", "granted too much");
    Plan(end, direction,
         {.what = Planned::What::kReply,
          .granted = taken,
          .unanswered = Number("unanswered"),
          .received = Number("received")});
  } else if (event_ == "read.issued") {
    Expect(Number("in_flight") <= Number("reads_max"), "read.limit", "too many RDMA Reads");
  } else if (event_ == "send.posted") {
    JudgePosted(end);
  } else if (event_ == "send.done") {
    end.slots.erase(Number("slot"));
  } else if (event_ == "reply.received") {
    JudgeAnswer(direction);
    Call& call = direction.calls[Number("call")];
    call.in_flight = false;
    call.returned = Number("writes_returned");
    Expect(call.returned <= Number("writes_offered"), "reply.lengths", "more than was offered");
    Expect(Number("reply_returned") <= Number("reply_offered"), "reply.lengths", "more than was offered");
  } else if (event_ == "reply.ignored") {
    if (Word("why") == "cancelled") {
      JudgeAnswer(direction);
    } else {
      direction.dones_owed += Number("exposes");
    }
  } else if (event_ == "call.over") {
    JudgeOver(end, direction);
  } else if (event_ == "connection.closed") {
    Expect(Number("receives_posted") == Number("receives_completed") + Number("receives_destroyed"), "conservation",
           "Receives");
    Expect(Number("sends_posted") == Number("sends_completed") + Number("sends_destroyed"), "conservation", "Sends");
    end.destroyed = Word("why") == "closed at once";
    // Calls still open end after it; the end itself has nothing left.
    end.valid.clear();
    end.planned.clear();
    end.slots.clear();
    end.forward.exposed = 0;
    end.version = 0;
    end.established = false;
  }
  // After the end of the connection, nothing is worth keeping once all its calls are over.
  return end.established || !end.forward.calls.empty() || !end.reverse.calls.empty() || !end.valid.empty();
}

// A call in flight has its answer.
void ConnectionChecker::JudgeAnswer(Direction& direction) {
  --direction.in_flight;
  // An error of version 2 grants nothing.
  if (Word("type") != "RDMA2_ERROR") direction.granted = std::max<uint64_t>(Number("credits"), 1);
  direction.dones_owed += Number("exposes");
  const auto before = direction.dones_before.find(Number("xid"));
  if (before == direction.dones_before.end()) return;
  direction.dones_dealt_with = std::max(direction.dones_dealt_with, before->second);
  direction.dones_before.erase(before);
}

// The call of this event goes out, for the first time or again.
void ConnectionChecker::JudgeSent(End& end, Direction& direction) {
  Call& call = direction.calls[Number("call")];
  Expect(!call.in_flight, "call.once", "sent while it is in flight");
  call.in_flight = true;
  if (!call.xid) return;
  Expect(*call.xid == Number("xid"), "call.once", "sent again with another XID");
  call.xid.reset();
  Expect(!AnyValid(end, std::exchange(call.before, {})), "fence", "an STag of the attempt before is valid");
}

// A number that is valid again is that of another registration, of whichever engine of this end.
bool ConnectionChecker::AnyValid(const End& end, const Registrations& registrations) {
  return std::any_of(registrations.begin(), registrations.end(), [&](const auto& registration) {
    const auto valid = end.valid.find(registration.first);
    return valid != end.valid.end() && valid->second == registration.second;
  });
}

void ConnectionChecker::Plan(End& end, Direction& direction, const Planned& planned) {
  Expect(end.slots.insert(Number("slot")).second, "buffer.reuse", "filled while in use");
  Planned& plan = end.planned[Number("slot")] = planned;
  plan.reverse = reverse_;
  direction.received = planned.received;
}

void ConnectionChecker::JudgePosted(End& end) {
  const auto found = end.planned.find(Number("slot"));
  if (found == end.planned.end()) return Expect(false, "buffer.reuse", "a Send that nobody asked for");
  const Planned planned = found->second;
  end.planned.erase(found);
  // What arrived between the engine's decision and the post is neither posted nor answered.
  const Direction& other = planned.reverse ? end.forward : end.reverse;
  const uint64_t arrived = Number("received") - planned.received - other.received;
  if (planned.what == Planned::What::kReply) {
    Expect(Number("receives_posted") + arrived + planned.unanswered >= planned.granted, "credit.responder",
           "too few Receives for the grant");
  } else if (planned.what == Planned::What::kCall) {
    Expect(Number("receives_posted") + arrived >= planned.unanswered, "credit.requester",
           "too few Receives for the replies");
  }
}

void ConnectionChecker::JudgeOver(End& end, Direction& direction) {
  const auto found = direction.calls.find(Number("call"));
  if (found == direction.calls.end()) return Expect(false, "call.once", "a call ends twice");
  const Call call = found->second;
  direction.calls.erase(found);
  Expect(Number("stags") == 0, "fence", "STags are valid");
  Expect(!AnyValid(end, call.registrations), "fence", "an STag is valid in the driver");
  if (Word("outcome") == "ok") Expect(Number("placed") == call.returned, "reply.lengths", "the caller gets another");
}

}  // namespace stagecoach::scenario
