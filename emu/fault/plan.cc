#include "emu/fault/plan.h"

#include <algorithm>
#include <utility>

namespace stagecoach::emu {
namespace {

// Packet numbers have 24 bits; the upper half of the circle is behind.
constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint32_t kHalfCircle = 1u << 23;
// More than a requester may have unacknowledged, so that what comes again is known.
constexpr size_t kMessagesRemembered = 512;

constexpr uint32_t Ahead(uint32_t psn, uint32_t origin) {
  return (psn - origin) & kPsnMask;
}

bool IsAnswer(MessageKind kind) {
  return kind == MessageKind::kReadResponse || kind == MessageKind::kAtomicResponse;
}

bool IsAbout(const FaultRule& rule, FaultDirection direction) {
  return direction == FaultDirection::kSent ? rule.sent : rule.received;
}

}  // namespace

std::string ToString(const FaultFiring& firing) {
  std::string text = "rule '" + ToString(*firing.rule) + "' fired: connection " + std::to_string(firing.connection) +
                     ", message " + std::to_string(firing.message) + " " + ToString(firing.direction) + " (" +
                     ToString(firing.kind);
  if (firing.segment > 1) text += ", segment " + std::to_string(firing.segment);
  if (firing.attempt > 1) text += ", attempt " + std::to_string(firing.attempt);
  return text + ")";
}

// --- MessageCounter ---

uint64_t MessageCounter::Position::NumberAmong(uint16_t kinds) const {
  uint64_t number = 0;
  for (size_t i = 0; i < kMessageKinds; ++i) {
    if ((kinds & KindBit(static_cast<MessageKind>(i))) != 0) number += counts[i];
  }
  return number;
}

MessageCounter::Position MessageCounter::Begin(MessageKind kind) {
  ++counts_[static_cast<size_t>(kind)];
  return {.counts = counts_, .segment = 1, .attempt = 1, .is_new = true};
}

std::optional<MessageCounter::Position> MessageCounter::Next(const SegmentFacts& facts) {
  if (facts.packet) return NextPacket(facts, *facts.packet);
  std::optional<Message>& current = current_[static_cast<size_t>(facts.kind)];
  if (!current) {
    if (facts.empty) return std::nullopt;
    current.emplace(Message{}).position = Begin(facts.kind);
  } else {
    ++current->position.segment;
    current->position.is_new = false;
  }
  const Position position = current->position;
  if (facts.ends) current.reset();
  return position;
}

std::optional<MessageCounter::Position> MessageCounter::NextPacket(const SegmentFacts& facts,
                                                                   const SegmentFacts::Packet& packet) {
  if (facts.empty) return std::nullopt;
  Sequence& sequence = IsAnswer(facts.kind) ? answers_ : requests_;
  std::deque<Message>& recent = sequence.recent;
  // The last message that does not begin behind this packet.
  const auto after = std::find_if(recent.rbegin(), recent.rend(), [&](const Message& message) {
                       return Ahead(packet.psn, message.first_psn) < kHalfCircle;
                     }).base();
  if (after == recent.begin() && sequence.forgotten) return std::nullopt;
  if (after != recent.begin()) {
    Message& message = *std::prev(after);
    const uint32_t index = Ahead(packet.psn, message.first_psn);
    const bool again = index < message.psns;
    if (again || (message.open && !packet.begins)) {
      if (again && index < message.expected) ++message.position.attempt;
      if (!again) {
        message.psns = index + packet.count;
        message.open = !facts.ends;
      }
      message.expected = index + packet.count;
      // A Read request is one segment, wherever its answer goes on.
      message.position.segment = facts.kind == MessageKind::kRead ? 1 : index + 1;
      message.position.is_new = false;
      return message.position;
    }
  }
  const Message message{.position = Begin(facts.kind),
                        .open = !facts.ends,
                        .first_psn = packet.psn,
                        .psns = packet.count,
                        .expected = packet.count};
  recent.insert(after, message);
  if (recent.size() > kMessagesRemembered) {
    recent.pop_front();
    sequence.forgotten = true;
  }
  return message.position;
}

// --- FaultPlan ---

FaultPlan::FaultPlan(std::vector<FaultRule> rules, Listener listener)
    : rules_(std::move(rules)), listener_(std::move(listener)), counters_(rules_.size()) {}

std::shared_ptr<FaultPlan> FaultPlan::Make(std::vector<FaultRule> rules, Listener listener) {
  return std::shared_ptr<FaultPlan>(new FaultPlan(std::move(rules), std::move(listener)));
}

std::unique_ptr<ConnectionFaults> FaultPlan::NewConnection() {
  const uint64_t number = connections_.fetch_add(1, std::memory_order_relaxed) + 1;
  const bool any = std::any_of(rules_.begin(), rules_.end(),
                               [&](const FaultRule& rule) { return rule.connection.Contains(number); });
  return any ? std::make_unique<ConnectionFaults>(shared_from_this(), number) : nullptr;
}

FaultPlan::RuleCounters FaultPlan::counters(size_t rule) const {
  const Counters& counters = counters_[rule];
  return {counters.matched.load(std::memory_order_relaxed), counters.fired.load(std::memory_order_relaxed)};
}

FaultPlan::Seen FaultPlan::seen() const {
  return {connections_.load(std::memory_order_relaxed), messages_[0].load(std::memory_order_relaxed),
          messages_[1].load(std::memory_order_relaxed)};
}

std::optional<uint64_t> FaultPlan::CountFiring(size_t rule) {
  std::atomic<uint64_t>& fired = counters_[rule].fired;
  uint64_t count = fired.load(std::memory_order_relaxed);
  do {
    if (count >= rules_[rule].times) return std::nullopt;
  } while (!fired.compare_exchange_weak(count, count + 1, std::memory_order_relaxed));
  return count + 1;
}

// --- ConnectionFaults ---

ConnectionFaults::ConnectionFaults(std::shared_ptr<FaultPlan> plan, uint64_t number)
    : plan_(std::move(plan)), number_(number) {
  for (const FaultRule& rule : plan_->rules()) {
    states_.push_back({.luck = Prng(rule.seed).Fork("connection/" + std::to_string(number))});
  }
}

FaultVerdict ConnectionFaults::Judge(FaultDirection direction, const SegmentFacts& facts) {
  fired_.clear();
  FaultVerdict verdict;
  if (end_) return verdict;
  const auto position = counters_[static_cast<size_t>(direction)].Next(facts);
  if (!position) return verdict;
  if (position->is_new && (KindBit(facts.kind) & kProgramsMessages) != 0) {
    plan_->messages_[static_cast<size_t>(direction)].fetch_add(1, std::memory_order_relaxed);
  }
  const std::vector<FaultRule>& rules = plan_->rules();
  for (size_t i = 0; i < rules.size() && !verdict.action; ++i) {
    const FaultRule& rule = rules[i];
    if (!IsAbout(rule, direction) || (rule.kinds & KindBit(facts.kind)) == 0) continue;
    const uint64_t message = position->NumberAmong(rule.kinds);
    if (!rule.connection.Contains(number_) || !rule.message.Contains(message) ||
        !rule.segment.Contains(position->segment) || !rule.attempt.Contains(position->attempt)) {
      continue;
    }
    if (!Fires(i)) continue;
    const std::optional<uint64_t> count = plan_->CountFiring(i);
    if (!count) continue;
    fired_.push_back({.rule = &rule,
                      .index = i,
                      .count = *count,
                      .connection = number_,
                      .direction = direction,
                      .kind = facts.kind,
                      .message = message,
                      .segment = position->segment,
                      .attempt = position->attempt});
    if (plan_->listener_) plan_->listener_(fired_.back());
    if (rule.action == FaultAction::kDelay) {
      verdict.delay += rule.delay;
    } else {
      verdict.action = rule.action;
    }
  }
  if (verdict.action == FaultAction::kDisconnect || verdict.action == FaultAction::kStall) end_ = verdict.action;
  return verdict;
}

// Of a rule whose addresses match.
bool ConnectionFaults::Fires(size_t index) {
  const FaultRule& rule = plan_->rules()[index];
  RuleState& state = states_[index];
  plan_->counters_[index].matched.fetch_add(1, std::memory_order_relaxed);
  if (++state.matched % rule.every != 0) return false;
  return rule.probability >= FaultRule::kAlways || state.luck.Below(FaultRule::kAlways) < rule.probability;
}

}  // namespace stagecoach::emu
