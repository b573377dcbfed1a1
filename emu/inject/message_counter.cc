#include "emu/inject/message_counter.h"

#include <algorithm>
#include <utility>

namespace stagecoach::emu {
namespace {

// Packet numbers have 24 bits; the upper half of the circle is behind.
constexpr uint64_t kCircle = uint64_t{1} << 24;
constexpr uint64_t kHalfCircle = kCircle / 2;
// More than a requester may have unacknowledged, so that what comes again is known.
constexpr size_t kMessagesRemembered = 512;

bool IsAnswer(MessageKind kind) {
  return kind == MessageKind::kReadResponse || kind == MessageKind::kAtomicResponse;
}

}  // namespace

// --- PacketAttempts ---

uint64_t PacketAttempts::Note(uint64_t first, uint64_t count) {
  const uint64_t end = first + count;
  // What goes on behind everything is what there is all the time.
  if (!runs_.empty() && runs_.back().end == first && runs_.back().attempts == 1) {
    runs_.back().end = end;
    return 1;
  }
  std::vector<Run> noted;
  noted.reserve(runs_.size() + 3);
  const auto add = [&noted](uint64_t from, uint64_t to, uint64_t attempts) {
    if (from >= to) return;
    if (!noted.empty() && noted.back().end == from && noted.back().attempts == attempts) {
      noted.back().end = to;
    } else {
      noted.push_back({from, to, attempts});
    }
  };
  uint64_t most = 1;
  uint64_t from = first;  // of what has not been added yet
  for (const Run& run : runs_) {
    add(run.begin, std::min(run.end, first), run.attempts);
    const uint64_t again = std::max(run.begin, first);
    const uint64_t to = std::min(run.end, end);
    if (again < to) {
      add(from, again, 1);
      add(again, to, run.attempts + 1);
      most = std::max(most, run.attempts + 1);
      from = to;
    } else if (run.begin >= end) {
      add(std::exchange(from, end), end, 1);
    }
    add(std::max(run.begin, end), run.end, run.attempts);
  }
  add(from, end, 1);
  while (noted.size() > kMostRuns) {
    noted[1] = {noted[0].begin, noted[1].end, std::max(noted[0].attempts, noted[1].attempts)};
    noted.erase(noted.begin());
  }
  runs_ = std::move(noted);
  return most;
}

// --- MessageCounter ---

uint64_t MessageCounter::Position::NumberAmong(uint16_t kinds) const {
  uint64_t number = 0;
  for (size_t i = 0; i < kMessageKinds; ++i) {
    if ((kinds & KindBit(static_cast<MessageKind>(i))) != 0) number += counts[i];
  }
  return number;
}

MessageCounter::Counts MessageCounter::Begin(MessageKind kind) {
  ++counts_[static_cast<size_t>(kind)];
  return counts_;
}

std::optional<MessageCounter::Position> MessageCounter::Next(const SegmentFacts& facts) {
  if (facts.packet) return NextPacket(facts, *facts.packet);
  std::optional<Position>& current = current_[static_cast<size_t>(facts.kind)];
  if (!current) {
    if (facts.empty) return std::nullopt;
    current = Position{.counts = Begin(facts.kind), .segment = 1, .attempt = 1, .is_new = true};
  } else {
    ++current->segment;
    current->is_new = false;
  }
  const Position position = *current;
  if (facts.ends) current.reset();
  return position;
}

// What is less than half a circle behind `next` is behind.
uint64_t MessageCounter::Sequence::Extend(uint32_t psn) const {
  if (!next) return kCircle + psn;
  const uint64_t behind = (*next - psn) % kCircle;
  return behind <= kHalfCircle ? *next - behind : *next + (kCircle - behind);
}

std::optional<MessageCounter::Position> MessageCounter::NextPacket(const SegmentFacts& facts,
                                                                   const SegmentFacts::Packet& packet) {
  if (facts.empty) return std::nullopt;
  Sequence& sequence = IsAnswer(facts.kind) ? answers_ : requests_;
  Messages& recent = sequence.recent;
  const uint64_t psn = sequence.Extend(packet.psn);
  const auto after = std::find_if(recent.rbegin(), recent.rend(), [psn](const Message& message) {
                       return message.first <= psn;
                     }).base();
  if (after == recent.begin() && sequence.forgotten) return std::nullopt;
  bool is_new = false;
  const auto message = MessageOf(recent, after, facts, packet, psn, &is_new);
  // A Read request is one segment, wherever its answer goes on.
  const Position position = {.counts = message->counts,
                             .segment = facts.kind == MessageKind::kRead ? 1 : psn - message->first + 1,
                             .attempt = sequence.attempts.Note(psn, packet.count),
                             .is_new = is_new};
  sequence.next = std::max(sequence.next.value_or(0), psn + packet.count);
  if (recent.size() > kMessagesRemembered) {
    recent.pop_front();
    sequence.forgotten = true;
  }
  return position;
}

// `after` is the first message that begins behind the packet.
MessageCounter::Messages::iterator MessageCounter::MessageOf(Messages& recent, Messages::iterator after,
                                                             const SegmentFacts& facts,
                                                             const SegmentFacts::Packet& packet, uint64_t psn,
                                                             bool* is_new) {
  const uint64_t end = psn + packet.count;
  const bool has_before = after != recent.begin();
  const auto before = has_before ? std::prev(after) : after;
  Messages::iterator message = before;
  Message begun{.kind = facts.kind, .first = psn, .end = end, .open = !facts.ends, .headless = !packet.begins};
  const bool is_of_open_one = has_before && before->open && before->kind == facts.kind;
  if (has_before && psn < before->end) {
    // Both of these go on where an answer broke. Nothing else begins within a message, and none goes on behind its end:
    // what was taken for one is two. What was seen of the second one counts when it comes again.
    const bool goes_on =
        IsAnswer(facts.kind) || (facts.kind == MessageKind::kRead && before->kind == MessageKind::kRead);
    if (packet.begins && psn > before->first && !goes_on) {
      if (!facts.ends) {
        begun.end = before->end;
        begun.open = before->open;
      }
      before->end = psn;
      before->open = false;
      *is_new = true;
    } else if (facts.ends && end <= before->end) {
      before->end = end;
      before->open = false;
    }
  } else if (is_of_open_one && (!packet.begins || (facts.kind == MessageKind::kReadResponse && psn == before->end))) {
    before->end = end;
    before->open = !facts.ends;
  } else if (!facts.ends && after != recent.end() && after->headless && after->kind == facts.kind) {
    message = after;
  } else {
    *is_new = true;
  }
  if (*is_new) {
    begun.counts = Begin(facts.kind);
    message = recent.insert(after, begun);
  }
  // Before a packet that does not begin its message there is at least one more, unless that is another's.
  if (message->headless && psn <= message->first) {
    const bool is_alone = message != recent.begin() && std::prev(message)->end >= psn;
    message->first = packet.begins || is_alone ? psn : psn - 1;
    message->headless = !packet.begins;
  }
  return message;
}

}  // namespace stagecoach::emu
