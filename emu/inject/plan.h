// InjectionPlan: the one evaluator of injection rules. Whoever can carry something out asks it, at the depth where that
// is done, and does what it says: for each record of a connection a tap (emu/tap/injection_tap.h), for each datagram
// the port, for each registration, completion and RDMA Write the device (emu/nic).
//
// A plan is of one device. In front stand the rules that somebody has given; behind them its habits, rules as well,
// which its profile has (DeviceProfile::habits) and of which nobody is told when they fire.
//
// COUNTING. Connections of a device are numbered from 1. On each, each direction counts its messages from 1
// (message_counter.h); registrations are counted on the device, completions on their QP, Writes on their connection.
//
// ORDER. Rules are asked in the order of the table. For a record the first that disconnects, stalls, drops or has it
// overtaken ends that; delays add up; what leaves twice does so once. After a disconnect or a stall no rule is asked on
// that connection any more. For what the device does the first rule that fires ends it. A rule whose action cannot be
// carried out just then is not asked.
//
// FIRED is a rule that has acted, and no other is counted or told. What is late, or doubled, by one rule and lost by
// another was lost and nothing else. What is to be overtaken is so when another passes it: until then its rule counts
// among those that have used up their `times`, and is told, or taken back, when whoever carries it out knows.
//
// LUCK. The same segments in the same order have the same done to them: what is drawn comes from the rule's seed and
// the connection's number, or the name of the place. Rules with the device's luck (InjectionRule::kOfTheDevice) draw
// one after the other from that of the place, which is the device's seed and the name of the place. Only `times`, which
// counts at all places together, depends on how these meet.
//
// Sans-IO. Threading: InjectionPlan from any thread; but for Add and End, which are for worlds that nothing else moves
// in meanwhile. ConnectionInjections and PlaceInjections are serialised by their owners' locks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "base/time.h"
#include "base/trace.h"
#include "emu/inject/message_counter.h"
#include "emu/inject/rule.h"

namespace stagecoach::emu {

// A rule has fired.
struct InjectionFiring {
  const InjectionRule* rule = nullptr;
  size_t index = 0;    // in the table
  uint64_t count = 0;  // how many times it has now
  // At the depth of records.
  uint64_t connection = 0;
  InjectionDirection direction = InjectionDirection::kSent;
  std::optional<MessageKind> kind;  // nullopt: it is no message
  uint64_t message = 0;             // as the rule counts
  uint64_t segment = 0;
  uint64_t attempt = 0;
  // Of what the device does, and of datagrams: the how-manieth at its place.
  uint64_t number = 0;
};
// "rule 'disconnect message=10' fired: connection 1, message 10 sent (send)", with segment and attempt where these are
// not the first; "rule 'fail-registration every=3' fired: registration 3".
std::string ToString(const InjectionFiring& firing);
// The event `injection.fired` of docs/trace.md for each. `trace` may be null.
void TraceFired(TraceSink* trace, Instant now, std::string_view component, std::span<const InjectionFiring> fired);

// What is to become of a record.
struct InjectionVerdict {
  std::optional<InjectionAction> action;  // kDisconnect, kStall, kDrop or kOvertake
  Duration delay{};
  bool twice = false;
};

class ConnectionInjections;
class PlaceInjections;

class InjectionPlan : public std::enable_shared_from_this<InjectionPlan> {
 public:
  // Hears of each firing, on whatever thread asks and with its lock: not to block, nor to call back.
  using Listener = std::function<void(const InjectionFiring&)>;
  static std::shared_ptr<InjectionPlan> Make(std::vector<InjectionRule> rules, Listener listener = {});

  // Once, before anybody asks: what the device does by itself, with its luck, which is that of habits that name no
  // seed.
  void AddHabits(const std::vector<InjectionRule>& habits, uint64_t luck_seed);
  // More rules, in front of the habits. Connections that no rule was about when they were made know nothing of them.
  void Add(const std::vector<InjectionRule>& rules);
  // Rules, other than habits, that are of this depth, or of which `which` is true, fire no more.
  void End(InjectionDepth depth);
  void End(const std::function<bool(const InjectionRule&)>& which);
  // What decides about late Writes of a connection of this name.
  Prng PlacementLuck(const std::string& name) const { return luck_.Fork(name + "/placement"); }

  // Those that were given; habits are none of them.
  const std::vector<InjectionRule>& rules() const { return given_; }
  // Whether there are rules or habits, which are not over, with one of these actions; or ever were.
  bool Has(ActionSet actions) const { return (actions & active_) != 0; }
  // The same of those that are about one of these kinds.
  bool Has(ActionSet actions, KindSet kinds) const;
  bool EverHad(ActionSet actions) const { return (actions & ever_) != 0; }
  // The next connection of the device, of this name; null if no rule is about it. Keeps the plan.
  std::unique_ptr<ConnectionInjections> NewConnection(std::string name = {});

  struct RuleCounters {
    uint64_t matched = 0;  // what all of its addresses match
    uint64_t fired = 0;
  };
  RuleCounters counters(size_t rule) const;  // of those that were given
  // What there was to match, of the connections that rules are about and the kinds that rules are about by default.
  struct Seen {
    uint64_t connections = 0;  // all of them
    uint64_t sent = 0;         // messages
    uint64_t received = 0;
  };
  Seen seen() const;
  // Registrations, completions, Writes: what rules with this action were asked about.
  uint64_t asked(InjectionAction action) const;

 private:
  friend class ConnectionInjections;
  friend class PlaceInjections;
  friend class RulesAtAPlace;
  friend class InjectionsAtWork;

  struct Row {
    Row(const InjectionRule& of, size_t in_table, size_t of_given, bool is_habit)
        : rule(of), slot(in_table), index(of_given), habit(is_habit) {}
    // Counts a firing, unless there were as many as there may be: then nothing.
    std::optional<uint64_t> CountFiring();
    // It has not acted after all.
    void TakeBack() { fired.fetch_sub(1, std::memory_order_relaxed); }

    const InjectionRule rule;
    const size_t slot;   // among all, in the order in which they came
    const size_t index;  // among those that were given
    const bool habit;
    bool over = false;
    std::atomic<uint64_t> matched{0};
    std::atomic<uint64_t> fired{0};
  };

  explicit InjectionPlan(Listener listener) : listener_(std::move(listener)) {}
  void Append(const InjectionRule& rule, bool habit);

  const Listener listener_;
  std::vector<InjectionRule> given_;
  std::deque<Row> rows_;  // do not move
  std::vector<Row*> order_;
  ActionSet active_ = 0;
  ActionSet ever_ = 0;
  Prng luck_{0};
  bool has_habits_ = false;
  std::atomic<uint64_t> connections_{0};
  std::array<std::atomic<uint64_t>, 2> messages_{};  // by direction
  std::array<std::atomic<uint64_t>, kInjectionActions> asked_{};
};

// What the rules of a plan have been through at one place.
class RulesAtAPlace {
 public:
  // What is drawn from rules' own seeds is forked by `name`. Rules that a plan has by now take no memory later.
  RulesAtAPlace(const InjectionPlan& plan, std::string name);
  // For a row of the plan, whose addresses match. `luck` is the place's.
  bool Fires(InjectionPlan::Row& row, Prng& luck);
  // From which a row draws.
  Prng& LuckOf(const InjectionPlan::Row& row, Prng& luck);

 private:
  struct State {
    explicit State(Prng own) : luck(own) {}
    uint64_t matched = 0;
    Prng luck;
  };
  State& StateOf(const InjectionPlan::Row& row);

  const std::string name_;
  std::vector<std::optional<State>> states_;  // by slot
};

// Rules that fire at a place, between the decision and what is known of its being carried out.
class InjectionsAtWork {
 public:
  // So many rules may fire for one thing without asking for memory.
  InjectionsAtWork(std::shared_ptr<InjectionPlan> plan, size_t most);
  ~InjectionsAtWork() { NotOvertaken(); }
  InjectionsAtWork(const InjectionsAtWork&) = delete;
  InjectionsAtWork& operator=(const InjectionsAtWork&) = delete;

  // Of the next thing nothing has fired yet.
  void Begin() { fired_.clear(); }
  // A rule whose addresses match, and whose turn it is. False: there are no `times` left of it.
  bool Fire(InjectionPlan::Row& row, InjectionFiring firing);
  // Which of what has fired since Begin() is carried out.
  void Settle(ActionSet carried_out);
  // Of the one thing that is to be overtaken: another has passed it, or nothing will.
  void Overtaken();
  void NotOvertaken();

  const std::vector<InjectionFiring>& fired() const { return fired_; }

 private:
  struct Shot {
    InjectionPlan::Row* row = nullptr;
    InjectionFiring firing;
  };
  void Tell(const Shot& shot);

  const std::shared_ptr<InjectionPlan> plan_;
  std::vector<Shot> shots_;  // not settled
  std::optional<Shot> overtaken_;
  std::vector<InjectionFiring> fired_;  // told
};

// The rules' view of one connection. Outlives the streams that carry it, where these come and go.
class ConnectionInjections {
 public:
  ConnectionInjections(std::shared_ptr<InjectionPlan> plan, uint64_t number, std::string name);

  uint64_t number() const { return number_; }
  // Another stream carries it from now on; the device's luck with its records is another, by this name.
  void BeginStream(std::string_view name);
  // For each record once, in order; no facts: it cannot be read. `possible` is what can be carried out just now, and is
  // carried out when it is in the verdict. What of the table has fired for it is in fired() until the next call.
  InjectionVerdict Judge(InjectionDirection direction, const std::optional<SegmentFacts>& facts,
                         ActionSet possible = kAllActions);
  // The record that was received last is about to take a Receive: whether there is to be none (kNotReady).
  bool HidesReceive();
  // The record that was last to be overtaken has been, or is not going to be. No other is judged so before.
  void Overtaken() { at_work_.Overtaken(); }
  void NotOvertaken() { at_work_.NotOvertaken(); }
  const std::vector<InjectionFiring>& fired() const { return at_work_.fired(); }
  // The disconnect or stall that has fired.
  std::optional<InjectionAction> end() const { return end_; }
  // A rule has had something lost that went over the stream there is, whichever rule it is.
  bool has_lost() const { return has_lost_; }

 private:
  using Position = MessageCounter::Position;
  struct Record {
    InjectionDirection direction = InjectionDirection::kSent;
    std::optional<MessageKind> kind;   // nullopt: it cannot be read
    std::optional<Position> position;  // nullopt: it is no message
  };
  // Whether the row is about the record, and fires for it.
  bool Fires(InjectionPlan::Row& row, const Record& record, Prng& luck);

  const std::shared_ptr<InjectionPlan> plan_;
  const uint64_t number_;
  RulesAtAPlace rules_;
  std::array<MessageCounter, 2> counters_;  // by direction
  Prng record_luck_;
  Prng receive_luck_;
  Record received_;  // last
  InjectionsAtWork at_work_;
  std::optional<InjectionAction> end_;
  bool has_lost_ = false;
};

// The rules' view of a place of the device where things are counted: its registrations, a QP's completions, the Writes
// that come on a connection; or the datagrams that are sent by a port or a QP. A plan without rules costs a look.
class PlaceInjections {
 public:
  // Of rules with one of these actions. What the device's luck draws here is forked by `name`.
  PlaceInjections(std::shared_ptr<InjectionPlan> plan, ActionSet actions, std::string name);

  // Whether any rule is about it now.
  bool IsWatched() const { return plan_->Has(actions_); }
  // One more. The rule that is to be carried out, if any; what can be just now is `possible`.
  const InjectionRule* Judge(ActionSet possible = kAllActions);
  // Of the rule that has fired last: from nothing to its time.
  Duration DrawTime();
  // The datagram that was last to be overtaken has been, or is not going to be. No other is judged so before.
  void Overtaken() { at_work_.Overtaken(); }
  void NotOvertaken() { at_work_.NotOvertaken(); }
  // What has fired in the last call of these.
  const std::vector<InjectionFiring>& fired() const { return at_work_.fired(); }
  // The same, of which there is one at most, for those who tell of it when they hold no lock any more.
  std::optional<InjectionFiring> TheFired() const {
    return fired().empty() ? std::nullopt : std::optional(fired().front());
  }

 private:
  const std::shared_ptr<InjectionPlan> plan_;
  const ActionSet actions_;
  RulesAtAPlace rules_;
  Prng luck_;
  uint64_t number_ = 0;
  InjectionPlan::Row* last_ = nullptr;
  InjectionsAtWork at_work_;
};

}  // namespace stagecoach::emu
