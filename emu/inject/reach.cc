#include "emu/inject/reach.h"

#include <string_view>
#include <utility>

namespace stagecoach::emu {
namespace {

bool HasKind(KindSet kinds, size_t kind) {
  return (kinds & KindBit(static_cast<MessageKind>(kind))) != 0;
}

// "send, write, read".
std::string NamesOf(KindSet kinds) {
  std::string names;
  for (size_t i = 0; i < kMessageKinds; ++i) {
    if (!HasKind(kinds, i)) continue;
    if (!names.empty()) names += ", ";
    names += AllKinds()[i].name;
  }
  return names;
}

template <typename Which>
KindSet KindsWith(Which which) {
  KindSet kinds = 0;
  for (size_t i = 0; i < kMessageKinds; ++i) {
    if (which(AllKinds()[i])) kinds |= KindBit(static_cast<MessageKind>(i));
  }
  return kinds;
}

// What of a rule's kinds is left when one condition after the other has been looked at.
class Reach {
 public:
  Reach(InjectionTransport transport, const InjectionRule& rule)
      : transport_(transport), rule_(rule), row_(RowOf(rule.action)), kinds_(rule.kinds & kAllKinds) {}

  std::optional<std::string> WhyNone() {
    if (!Keep(KindsOn(transport_))) return WhyNotHere() + ExpectedKinds();
    if (!Keep(row_.kinds)) return std::string(row_.name) + " is never done to " + NamesOf(kinds_) + ExpectedKinds();
    if (auto why = WhyNoDatagram()) return why;
    if (auto why = WhyNoSegment()) return why;
    if (auto why = WhyNoAttempt()) return why;
    return WhyNoneOfEvery();
  }

  // Where so few can match that the first of `every` never comes.
  std::optional<std::string> WhyNoneOfEvery() const {
    const KindSet several = KindsWith([](const KindRow& row) { return row.has_segments; });
    const bool is_of_device = row_.depth == InjectionDepth::kDevice;
    uint64_t most = 1;
    const auto times = [&](uint64_t count) { most = count > rule_.every / most ? NumberRange::kNoEnd : most * count; };
    if (is_of_device) {
      times(CountOf(rule_.number));
    } else if (rule_.kinds == kEveryRecord && rule_.message == NumberRange()) {
      return std::nullopt;  // what is no message matches as well
    } else {
      times(CountOf(rule_.message));
      if (rule_.sent && rule_.received) times(2);
      if ((kinds_ & several) != 0) times(CountOf(rule_.segment));
      if (!IsIwarp()) times(CountOf(rule_.attempt));
    }
    if (most >= rule_.every) return std::nullopt;
    return "every=" + std::to_string(rule_.every) + " is never reached: no more than " + std::to_string(most) +
           (is_of_device ? " can match" : " can match on a connection");
  }

 private:
  // False: none would be left, and so all are.
  bool Keep(KindSet which) {
    if ((kinds_ & which) == 0) return false;
    kinds_ &= which;
    return true;
  }
  bool IsIwarp() const { return transport_ == InjectionTransport::kIwarp; }

  std::string ExpectedKinds() const {
    return std::string("; on ") + ToString(transport_) + " kind can be " + NamesOf(row_.kinds & KindsOn(transport_));
  }
  std::string WhyNotHere() const {
    std::string why;
    for (size_t i = 0; i < kMessageKinds; ++i) {
      if (!HasKind(kinds_, i)) continue;
      if (!why.empty()) why += "; ";
      why += IsIwarp() ? AllKinds()[i].why_not_on_iwarp : AllKinds()[i].why_not_on_infiniband;
    }
    return why;
  }

  std::optional<std::string> WhyNoDatagram() {
    const NumberRange any;
    if (!rule_.sent && !Keep(kKindsOfConnections)) {
      return "what is done to datagrams is done where they are sent; give the rule to the process that sends them, "
             "with "
             "direction=sent";
    }
    const bool is_addressed =
        rule_.connection != any || rule_.message != any || rule_.segment != any || rule_.attempt != any;
    if (is_addressed && !Keep(kKindsOfConnections)) {
      return "datagrams are on no connection, which would count them; there are every=, times= and what is drawn";
    }
    return std::nullopt;
  }

  std::optional<std::string> WhyNoSegment() {
    if (rule_.segment.first == 1) return std::nullopt;
    const KindSet several = KindsWith([](const KindRow& row) { return row.has_segments; });
    if (!Keep(several)) {
      return NamesOf(kinds_) + ": one segment is all that such a message has, and its number is 1; of " +
             NamesOf(several & row_.kinds & KindsOn(transport_)) + " there may be several";
    }
    if (rule_.action == InjectionAction::kNotReady &&
        !Keep(KindsWith([](const KindRow& row) { return row.receives_last; }))) {
      return NamesOf(kinds_) + ": such a message takes its Receive with its first segment, and finds none there or " +
             "never; segment=1 is all that not-ready can meet of it";
    }
    return std::nullopt;
  }

  std::optional<std::string> WhyNoAttempt() {
    if (rule_.attempt.first == 1) return std::nullopt;
    if (IsIwarp()) return "iWARP sends nothing twice: there is no second attempt";
    if (!Keep(KindsWith([](const KindRow& row) { return row.is_repeated; }))) {
      return NamesOf(kinds_) + ": each is one of its own, and none comes a second time; attempt=1 is all that there is";
    }
    return std::nullopt;
  }

  static uint64_t CountOf(const NumberRange& range) {
    return range.last == NumberRange::kNoEnd ? NumberRange::kNoEnd : range.last - range.first + 1;
  }

  const InjectionTransport transport_;
  const InjectionRule& rule_;
  const ActionRow& row_;
  KindSet kinds_;
};

}  // namespace

std::optional<std::string> WhyNotDirection(InjectionAction action, InjectionDirection direction) {
  const ActionRow& row = RowOf(action);
  if (direction == InjectionDirection::kReceived ? row.received : row.sent) return std::nullopt;
  if (!row.received) {
    return std::string(row.name) +
           " is of what is sent; give the rule to the process that sends it, with direction=sent";
  }
  return std::string(row.name) +
         " is of what is received; give the rule to the process that receives it, with direction=received";
}

std::optional<std::string> WhyNotOn(InjectionTransport transport, const InjectionRule& rule) {
  const ActionRow& row = RowOf(rule.action);
  if (!rule.sent && !row.received) return WhyNotDirection(rule.action, InjectionDirection::kReceived);
  if (!rule.received && !row.sent) return WhyNotDirection(rule.action, InjectionDirection::kSent);
  if (transport == InjectionTransport::kIwarp && !row.why_not_on_iwarp.empty()) {
    return std::string(row.why_not_on_iwarp);
  }
  Reach reach(transport, rule);
  if (row.depth == InjectionDepth::kRecord) return reach.WhyNone();
  return reach.WhyNoneOfEvery();
}

}  // namespace stagecoach::emu
