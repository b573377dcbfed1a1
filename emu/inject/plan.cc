#include "emu/inject/plan.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/mark.h"

namespace stagecoach::emu {
namespace {

constexpr ActionSet kRecordActions =
    SetOf(InjectionAction::kDisconnect, InjectionAction::kStall, InjectionAction::kDrop, InjectionAction::kDelay,
          InjectionAction::kDuplicate, InjectionAction::kOvertake);

// Rules as text say so, those that are filled in by programs need not.
bool IsAbout(const InjectionRule& rule, InjectionDirection direction) {
  const ActionRow& row = RowOf(rule.action);
  return direction == InjectionDirection::kSent ? rule.sent && row.sent : rule.received && row.received;
}

// Of a rule that is about every record.
bool NamesNoMessage(const InjectionRule& rule) {
  const NumberRange any;
  return rule.message == any && rule.segment == any && rule.attempt == any;
}

}  // namespace

std::string ToString(const InjectionFiring& firing) {
  std::string text = "rule '" + ToString(*firing.rule) + "' fired: ";
  if (firing.number != 0) {
    text +=
        RowOf(firing.rule->action).depth == InjectionDepth::kDevice ? RowOf(firing.rule->action).object : "datagram";
    return text + " " + std::to_string(firing.number);
  }
  text += "connection " + std::to_string(firing.connection) + ", ";
  if (!firing.kind) return text + "a record " + ToString(firing.direction);
  if (firing.message == 0)
    return text + "no message, " + ToString(firing.direction) + " (" + ToString(*firing.kind) + ")";
  text +=
      "message " + std::to_string(firing.message) + " " + ToString(firing.direction) + " (" + ToString(*firing.kind);
  if (firing.segment > 1) text += ", segment " + std::to_string(firing.segment);
  if (firing.attempt > 1) text += ", attempt " + std::to_string(firing.attempt);
  return text + ")";
}

void TraceFired(TraceSink* trace, Instant now, std::string_view component, std::span<const InjectionFiring> fired) {
  if (trace == nullptr) return;
  for (const InjectionFiring& firing : fired) {
    const uint64_t rule = firing.index + 1;
    if (firing.number != 0) {
      Trace(trace, now, component, "injection.fired",
            {{"rule", rule}, {"action", ToString(firing.rule->action)}, {"number", firing.number}});
      continue;
    }
    Trace(trace, now, component, "injection.fired",
          {{"rule", rule},
           {"action", ToString(firing.rule->action)},
           {"connection", firing.connection},
           {"direction", ToString(firing.direction)},
           {"kind", firing.kind ? ToString(*firing.kind) : "unknown"},
           {"message", firing.message},
           {"segment", firing.segment},
           {"attempt", firing.attempt}});
  }
}

// --- InjectionPlan ---

std::shared_ptr<InjectionPlan> InjectionPlan::Make(std::vector<InjectionRule> rules, Listener listener) {
  std::shared_ptr<InjectionPlan> plan(new InjectionPlan(std::move(listener)));
  plan->Add(rules);
  return plan;
}

void InjectionPlan::AddHabits(const std::vector<InjectionRule>& habits, uint64_t luck_seed) {
  STAGECOACH_CHECK(!std::exchange(has_habits_, true));
  luck_ = Prng(luck_seed);
  for (InjectionRule habit : habits) {
    if (!habit.seed) habit.seed = InjectionRule::kOfTheDevice;
    Append(habit, /*habit=*/true);
  }
}

void InjectionPlan::Add(const std::vector<InjectionRule>& rules) {
  for (const InjectionRule& rule : rules) Append(rule, /*habit=*/false);
}

void InjectionPlan::Append(const InjectionRule& rule, bool habit) {
  Row& row = rows_.emplace_back(rule, rows_.size(), given_.size(), habit);
  const auto behind =
      habit ? order_.end() : std::find_if(order_.begin(), order_.end(), [](const Row* each) { return each->habit; });
  order_.insert(behind, &row);
  if (!habit) given_.push_back(rule);
  active_ |= SetOf(rule.action);
  ever_ |= SetOf(rule.action);
}

void InjectionPlan::End(InjectionDepth depth) {
  End([depth](const InjectionRule& rule) { return RowOf(rule.action).depth == depth; });
}

void InjectionPlan::End(const std::function<bool(const InjectionRule&)>& which) {
  active_ = 0;
  for (Row* const row : order_) {
    row->over = row->over || (!row->habit && which(row->rule));
    if (!row->over) active_ |= SetOf(row->rule.action);
  }
}

bool InjectionPlan::Has(ActionSet actions, KindSet kinds) const {
  return std::any_of(order_.begin(), order_.end(), [&](const Row* row) {
    return !row->over && (SetOf(row->rule.action) & actions) != 0 && (row->rule.kinds & kinds) != 0;
  });
}

std::unique_ptr<ConnectionInjections> InjectionPlan::NewConnection(std::string name) {
  const uint64_t number = connections_.fetch_add(1, std::memory_order_relaxed) + 1;
  const bool any = std::any_of(order_.begin(), order_.end(), [&](const Row* row) {
    const InjectionRule& rule = row->rule;
    return RowOf(rule.action).depth == InjectionDepth::kRecord && rule.connection.Contains(number) &&
           (rule.kinds & kKindsOfConnections) != 0;
  });
  return any ? std::make_unique<ConnectionInjections>(shared_from_this(), number, std::move(name)) : nullptr;
}

InjectionPlan::RuleCounters InjectionPlan::counters(size_t rule) const {
  for (const Row* const row : order_) {
    if (!row->habit && row->index == rule) {
      return {row->matched.load(std::memory_order_relaxed), row->fired.load(std::memory_order_relaxed)};
    }
  }
  return {};
}

InjectionPlan::Seen InjectionPlan::seen() const {
  return {connections_.load(std::memory_order_relaxed), messages_[0].load(std::memory_order_relaxed),
          messages_[1].load(std::memory_order_relaxed)};
}

uint64_t InjectionPlan::asked(InjectionAction action) const {
  return asked_[static_cast<size_t>(action)].load(std::memory_order_relaxed);
}

std::optional<uint64_t> InjectionPlan::Row::CountFiring() {
  uint64_t count = fired.load(std::memory_order_relaxed);
  do {
    if (count >= rule.times) return std::nullopt;
  } while (!fired.compare_exchange_weak(count, count + 1, std::memory_order_relaxed));
  return count + 1;
}

// --- RulesAtAPlace ---

RulesAtAPlace::RulesAtAPlace(const InjectionPlan& plan, std::string name) : name_(std::move(name)) {
  for (const InjectionPlan::Row& row : plan.rows_) StateOf(row);
}

RulesAtAPlace::State& RulesAtAPlace::StateOf(const InjectionPlan::Row& row) {
  if (states_.size() <= row.slot) states_.resize(row.slot + 1);
  std::optional<State>& state = states_[row.slot];
  if (!state) state.emplace(Prng(row.rule.seed.value_or(0)).Fork(name_));
  return *state;
}

Prng& RulesAtAPlace::LuckOf(const InjectionPlan::Row& row, Prng& luck) {
  return row.rule.seed == InjectionRule::kOfTheDevice ? luck : StateOf(row).luck;
}

bool RulesAtAPlace::Fires(InjectionPlan::Row& row, Prng& luck) {
  const InjectionRule& rule = row.rule;
  row.matched.fetch_add(1, std::memory_order_relaxed);
  if (++StateOf(row).matched % rule.every != 0) return false;
  if (rule.one_in != 0) return LuckOf(row, luck).OneIn(rule.one_in);
  return rule.probability >= InjectionRule::kAlways ||
         LuckOf(row, luck).Below(InjectionRule::kAlways) < rule.probability;
}

// --- InjectionsAtWork ---

InjectionsAtWork::InjectionsAtWork(std::shared_ptr<InjectionPlan> plan, size_t most) : plan_(std::move(plan)) {
  shots_.reserve(most);
  fired_.reserve(most);
}

bool InjectionsAtWork::Fire(InjectionPlan::Row& row, InjectionFiring firing) {
  const std::optional<uint64_t> count = row.CountFiring();
  if (!count) return false;
  firing.count = *count;
  shots_.push_back({&row, firing});
  return true;
}

void InjectionsAtWork::Settle(ActionSet carried_out) {
  for (const Shot& shot : shots_) {
    if ((SetOf(shot.row->rule.action) & carried_out) == 0) {
      shot.row->TakeBack();
    } else if (RowOf(shot.row->rule.action).needs_another) {
      overtaken_ = shot;
    } else {
      Tell(shot);
    }
  }
  shots_.clear();
}

void InjectionsAtWork::Overtaken() {
  Begin();
  if (const std::optional<Shot> shot = std::exchange(overtaken_, std::nullopt)) Tell(*shot);
}

void InjectionsAtWork::NotOvertaken() {
  Begin();
  if (const std::optional<Shot> shot = std::exchange(overtaken_, std::nullopt)) shot->row->TakeBack();
}

// What is done is done, whether or not there is memory to tell of it.
void InjectionsAtWork::Tell(const Shot& shot) {
  if (shot.row->habit) return;
  try {
    fired_.push_back(shot.firing);
    if (plan_->listener_) plan_->listener_(shot.firing);
  } catch (const std::bad_alloc&) {
    STAGECOACH_MARK("injection.no_memory_to_tell_of_it");
  }
}

// --- ConnectionInjections ---

ConnectionInjections::ConnectionInjections(std::shared_ptr<InjectionPlan> plan, uint64_t number, std::string name)
    : plan_(std::move(plan)),
      number_(number),
      rules_(*plan_, "connection/" + std::to_string(number)),
      record_luck_(plan_->luck_.Fork(name)),
      receive_luck_(plan_->luck_.Fork(name + "/receives")),
      at_work_(plan_, plan_->rows_.size()) {}

void ConnectionInjections::BeginStream(std::string_view name) {
  at_work_.NotOvertaken();  // by anything, if the stream before has gone with it
  record_luck_ = plan_->luck_.Fork(name);
  has_lost_ = false;
}

InjectionVerdict ConnectionInjections::Judge(InjectionDirection direction, const std::optional<SegmentFacts>& facts,
                                             ActionSet possible) {
  at_work_.Begin();
  InjectionVerdict verdict;
  if (end_) return verdict;
  Record record{.direction = direction, .kind = std::nullopt, .position = std::nullopt};
  if (facts) {
    record.kind = facts->kind;
    record.position = counters_[static_cast<size_t>(direction)].Next(*facts);
    if (record.position && record.position->is_new && (KindBit(facts->kind) & kProgramsMessages) != 0) {
      plan_->messages_[static_cast<size_t>(direction)].fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (direction == InjectionDirection::kReceived) received_ = record;
  for (InjectionPlan::Row* const row : plan_->order_) {
    if (verdict.action) break;
    const InjectionAction action = row->rule.action;
    if ((SetOf(action) & kRecordActions & possible) == 0) continue;
    // What waits for its time waits for nothing else.
    if (action == InjectionAction::kOvertake && verdict.delay > Duration::zero()) continue;
    if (action == InjectionAction::kDuplicate && verdict.twice) continue;
    if (!Fires(*row, record, record_luck_)) continue;
    if (action == InjectionAction::kDelay) {
      verdict.delay += row->rule.delay;
    } else if (action == InjectionAction::kDuplicate) {
      verdict.twice = true;
    } else {
      verdict.action = action;
    }
  }
  if (verdict.action == InjectionAction::kDisconnect || verdict.action == InjectionAction::kStall) {
    end_ = verdict.action;
  }
  has_lost_ = has_lost_ || verdict.action == InjectionAction::kDrop || verdict.action == InjectionAction::kStall;
  // What does not leave does not leave late, or twice.
  const bool leaves = !verdict.action || verdict.action == InjectionAction::kOvertake;
  at_work_.Settle(leaves ? kAllActions : SetOf(*verdict.action));
  return verdict;
}

bool ConnectionInjections::HidesReceive() {
  at_work_.Begin();
  if (end_) return false;
  const bool hides = std::any_of(plan_->order_.begin(), plan_->order_.end(), [&](InjectionPlan::Row* row) {
    return row->rule.action == InjectionAction::kNotReady && Fires(*row, received_, receive_luck_);
  });
  at_work_.Settle(kAllActions);
  return hides;
}

bool ConnectionInjections::Fires(InjectionPlan::Row& row, const Record& record, Prng& luck) {
  const InjectionRule& rule = row.rule;
  if (row.over || !IsAbout(rule, record.direction) || !rule.connection.Contains(number_)) return false;
  InjectionFiring firing{.rule = &rule,
                         .index = row.index,
                         .count = 0,
                         .connection = number_,
                         .direction = record.direction,
                         .kind = record.kind,
                         .message = 0,
                         .segment = 0,
                         .attempt = 0};
  if (record.position) {
    if ((rule.kinds & KindBit(*record.kind)) == 0) return false;
    firing.message = record.position->NumberAmong(rule.kinds);
    firing.segment = record.position->segment;
    firing.attempt = record.position->attempt;
    if (!rule.message.Contains(firing.message) || !rule.segment.Contains(firing.segment) ||
        !rule.attempt.Contains(firing.attempt)) {
      return false;
    }
  } else if (rule.kinds != kEveryRecord || !NamesNoMessage(rule)) {
    return false;
  }
  return rules_.Fires(row, luck) && at_work_.Fire(row, firing);
}

// --- PlaceInjections ---

PlaceInjections::PlaceInjections(std::shared_ptr<InjectionPlan> plan, ActionSet actions, std::string name)
    : plan_(std::move(plan)),
      actions_(actions),
      rules_(*plan_, name),
      luck_(plan_->luck_.Fork(name)),
      at_work_(plan_, 1) {}

const InjectionRule* PlaceInjections::Judge(ActionSet possible) {
  at_work_.Begin();
  if (!IsWatched()) return nullptr;
  ++number_;
  ActionSet counted = 0;
  for (InjectionPlan::Row* const row : plan_->order_) {
    const InjectionRule& rule = row->rule;
    if (row->over || (SetOf(rule.action) & actions_ & possible) == 0) continue;
    const ActionRow& action = RowOf(rule.action);
    if (action.depth == InjectionDepth::kDevice) {
      if ((counted & SetOf(rule.action)) == 0) {
        plan_->asked_[static_cast<size_t>(rule.action)].fetch_add(1, std::memory_order_relaxed);
      }
      counted |= SetOf(rule.action);
      if (!rule.number.Contains(number_)) continue;
    } else if ((rule.kinds & KindBit(MessageKind::kDatagram)) == 0 || !rule.sent || !NamesNoMessage(rule) ||
               rule.connection != NumberRange()) {
      continue;
    }
    if (!rules_.Fires(*row, luck_)) continue;
    if (!at_work_.Fire(*row, {.rule = &rule, .index = row->index, .number = number_})) continue;
    at_work_.Settle(kAllActions);
    last_ = row;
    return &rule;
  }
  return nullptr;
}

Duration PlaceInjections::DrawTime() {
  const auto longest = static_cast<uint64_t>(last_->rule.delay.count());
  return Duration(rules_.LuckOf(*last_, luck_).Below(longest + 1));
}

}  // namespace stagecoach::emu
