#include "emu/inject/rule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <numeric>
#include <span>

#include "emu/inject/reach.h"

namespace stagecoach::emu {
namespace {

constexpr std::array<std::string_view, 2> kDirectionNames = {"sent", "received"};
constexpr std::string_view kBlanks = " \t\r";
constexpr std::string_view kAnyKind = "any";
constexpr std::string_view kDeviceSeed = "device";

enum class Condition : uint8_t {
  kConnection,
  kDirection,
  kKind,
  kMessage,
  kSegment,
  kAttempt,
  kNumber,
  kEvery,
  kTimes,
  kProbability,
  kOneIn,
  kSeed,
};
constexpr std::array<std::string_view, 12> kConditionNames = {"connection", "direction",   "kind",   "message",
                                                              "segment",    "attempt",     "number", "every",
                                                              "times",      "probability", "one-in", "seed"};

constexpr std::string_view kRangeForms = "a number from 1, a range such as 3..5, or 3.. for all from the third on";
constexpr std::string_view kDelayForms = "an integer from 1 with ns, us, ms or s, such as 5ms, at most 3600s";
constexpr std::string_view kProbabilityForms = "a part such as 0.01 or 1%, more than 0, at most 1, in steps of 0.0001%";

struct TimeUnit {
  std::string_view name;
  Duration length;
};
constexpr std::array<TimeUnit, 4> kTimeUnits = {{{"ns", 1ns}, {"us", 1us}, {"ms", 1ms}, {"s", 1s}}};

std::array<std::string_view, kInjectionActions> ActionNames() {
  std::array<std::string_view, kInjectionActions> names;
  std::transform(AllActions().begin(), AllActions().end(), names.begin(),
                 [](const ActionRow& row) { return row.name; });
  return names;
}

std::array<std::string_view, kMessageKinds> KindNames() {
  std::array<std::string_view, kMessageKinds> names;
  std::transform(AllKinds().begin(), AllKinds().end(), names.begin(), [](const KindRow& row) { return row.name; });
  return names;
}

// Of a condition that says where.
std::optional<InjectionDepth> DepthOf(Condition condition) {
  if (condition < Condition::kNumber) return InjectionDepth::kRecord;
  if (condition == Condition::kNumber) return InjectionDepth::kDevice;
  return std::nullopt;
}

std::string Join(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

// Of what a user wrote, for a terminal.
std::string Printable(std::string_view text) {
  std::string printable(text);
  for (char& c : printable) {
    if (c == '\t') c = ' ';
    if (c < ' ' || c > '~') c = '?';
  }
  return printable;
}

std::string Quoted(std::string_view text) {
  return "'" + Printable(text) + "'";
}

char Lower(char letter) {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}

// How many letters must change, come or go to make one of the other, which has no capitals.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substituted = diagonal + (Lower(a[i]) == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

template <size_t Count>
std::optional<size_t> IndexOf(const std::array<std::string_view, Count>& names, std::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<size_t>(found - names.begin());
}

// "'mesage' is no condition; did you mean message?", or which there are.
std::string Unknown(std::string_view word, std::string_view what, std::span<const std::string_view> names) {
  constexpr size_t kLongestWord = 32;
  // One letter in three may be wrong, and two at most: what differs in more is another word.
  constexpr size_t kNear = 2;
  std::string text = Quoted(word) + " is no " + std::string(what) + "; ";
  if (word.size() <= kLongestWord) {
    const auto nearest = std::min_element(names.begin(), names.end(), [&](std::string_view a, std::string_view b) {
      return EditDistance(word, a) < EditDistance(word, b);
    });
    const size_t wrong = EditDistance(word, *nearest);
    if (wrong <= kNear && 3 * wrong <= word.size()) return text + "did you mean " + std::string(*nearest) + "?";
  }
  return text + "there are " + Join(names);
}

struct Token {
  std::string_view text;
  size_t offset = 0;  // in the whole text
};

class RuleParser {
 public:
  // `text` begins `offset` bytes into all that is parsed.
  RuleParser(std::string_view text, size_t offset) : rest_{text, offset} {}

  // Nothing for a blank rule.
  Result<std::optional<InjectionRule>, InjectionRuleError> Parse() {
    const std::optional<Token> action = Next();
    if (!action) return std::nullopt;
    if (auto error = TakeAction(*action)) return Err(std::move(*error));
    while (const std::optional<Token> token = Next()) {
      if (auto error = TakeCondition(*token)) return Err(std::move(*error));
    }
    if (auto error = CheckTogether()) return Err(std::move(*error));
    return rule_;
  }

 private:
  using MaybeError = std::optional<InjectionRuleError>;

  static InjectionRuleError ErrorAt(const Token& token, std::string message) {
    return {.offset = token.offset, .length = token.text.size(), .message = std::move(message)};
  }

  std::optional<Token> Next() {
    const size_t begin = rest_.text.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return std::nullopt;
    const size_t end = std::min(rest_.text.find_first_of(kBlanks, begin), rest_.text.size());
    const Token token{rest_.text.substr(begin, end - begin), rest_.offset + begin};
    rest_ = {rest_.text.substr(end), rest_.offset + end};
    return token;
  }

  // What stands behind the first '='; nothing: there is none.
  static std::optional<Token> ValueOf(const Token& token) {
    const size_t equals = token.text.find('=');
    if (equals == std::string_view::npos) return std::nullopt;
    return Token{token.text.substr(equals + 1), token.offset + equals + 1};
  }

  MaybeError TakeAction(const Token& token) {
    const std::optional<Token> value = ValueOf(token);
    const Token name{token.text.substr(0, token.text.find('=')), token.offset};
    const auto names = ActionNames();
    const auto action = IndexOf(names, name.text);
    if (!action) {
      if (IndexOf(kConditionNames, name.text)) {
        return ErrorAt(name, Quoted(name.text) + " is a condition, and a rule begins with an action: " + Join(names));
      }
      return ErrorAt(name, Unknown(name.text, "action", names));
    }
    rule_.action = static_cast<InjectionAction>(*action);
    const ActionRow& row = RowOf(rule_.action);
    rule_.sent = row.sent;
    rule_.received = row.received;
    if (!row.takes_time) {
      if (value) return ErrorAt(token, std::string(name.text) + " takes no value");
      return std::nullopt;
    }
    if (!value) {
      return ErrorAt(token, std::string(name.text) + " needs a time, such as " + std::string(name.text) + "=5ms");
    }
    const auto delay = ParseDelay(value->text);
    if (!delay) return ErrorAt(*value, Quoted(value->text) + " is no time: " + std::string(kDelayForms));
    rule_.delay = *delay;
    return std::nullopt;
  }

  MaybeError TakeCondition(const Token& token) {
    const Token name{token.text.substr(0, token.text.find('=')), token.offset};
    const auto index = IndexOf(kConditionNames, name.text);
    if (!index) {
      if (IndexOf(ActionNames(), name.text)) {
        return ErrorAt(name, "a rule has one action; the next rule stands behind ';'");
      }
      if (const auto meant = ConditionAtTheFront(token.text)) {
        return ErrorAt(token, Quoted(token.text) + " is no condition; " + ExampleOf(*meant) + " is one");
      }
      return ErrorAt(name, Unknown(name.text, "condition", kConditionNames));
    }
    const auto condition = static_cast<Condition>(*index);
    const std::optional<Token> value = ValueOf(token);
    if (!value || value->text.empty()) {
      return ErrorAt(token, std::string(name.text) + " needs a value, such as " + ExampleOf(condition));
    }
    const ActionRow& row = RowOf(rule_.action);
    if (DepthOf(condition).value_or(row.depth) != row.depth) {
      return ErrorAt(name, row.depth == InjectionDepth::kDevice
                               ? std::string(name.text) + " is of messages, and " + std::string(row.name) +
                                     " is about what the device does; number=2 is its second " + std::string(row.object)
                               : "number is of what the device does, and " + std::string(row.name) +
                                     " is about messages; message=2 is the second one");
    }
    std::optional<Token>& seen = seen_[*index];
    if (seen) return ErrorAt(name, std::string(name.text) + " stands twice in this rule");
    seen = token;
    return TakeValue(condition, *value);
  }

  // Of "message:10".
  static std::optional<Condition> ConditionAtTheFront(std::string_view text) {
    const size_t letters = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz-");
    if (letters >= text.size() || text[letters] == '=') return std::nullopt;
    const auto index = IndexOf(kConditionNames, text.substr(0, letters));
    return index ? std::optional(static_cast<Condition>(*index)) : std::nullopt;
  }

  static std::string ExampleOf(Condition condition) {
    switch (condition) {
      case Condition::kDirection:
        return "direction=sent";
      case Condition::kKind:
        return "kind=send";
      case Condition::kProbability:
        return "probability=1%";
      default:
        return std::string(kConditionNames[static_cast<size_t>(condition)]) + "=2";
    }
  }

  MaybeError TakeValue(Condition condition, const Token& value) {
    switch (condition) {
      case Condition::kConnection:
        return TakeRange(value, &rule_.connection);
      case Condition::kMessage:
        return TakeRange(value, &rule_.message);
      case Condition::kSegment:
        return TakeRange(value, &rule_.segment);
      case Condition::kAttempt:
        return TakeRange(value, &rule_.attempt);
      case Condition::kDirection:
        return TakeDirection(value);
      case Condition::kKind:
        return TakeKinds(value);
      case Condition::kEvery:
        return TakeNumber(value, &rule_.every);
      case Condition::kTimes:
        return TakeNumber(value, &rule_.times);
      case Condition::kNumber:
        return TakeRange(value, &rule_.number);
      case Condition::kOneIn:
        return TakeOneIn(value);
      case Condition::kSeed:
        return TakeSeed(value);
      case Condition::kProbability: {
        const auto probability = ParseProbability(value.text);
        if (!probability) {
          return ErrorAt(value, Quoted(value.text) + " is no probability: " + std::string(kProbabilityForms));
        }
        rule_.probability = *probability;
        return std::nullopt;
      }
    }
    return std::nullopt;
  }

  // Digits and nothing else; less than NumberRange::kNoEnd.
  static std::optional<uint64_t> ParseNumber(std::string_view text) {
    uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number == NumberRange::kNoEnd) return std::nullopt;
    return number;
  }

  static constexpr uint64_t kMostNumber = NumberRange::kNoEnd - 1;

  // For what is a number, and too large for one.
  static MaybeError WhyTooLarge(const Token& value, uint64_t most) {
    const bool is_number = !value.text.empty() && value.text.find_first_not_of("0123456789") == std::string_view::npos;
    if (!is_number || ParseNumber(value.text).value_or(NumberRange::kNoEnd) <= most) return std::nullopt;
    return ErrorAt(value, Quoted(value.text) + " is too large: it is at most " + std::to_string(most));
  }

  MaybeError TakeNumber(const Token& value, uint64_t* into, uint64_t most = kMostNumber) {
    if (auto error = WhyTooLarge(value, most)) return error;
    const auto number = ParseNumber(value.text);
    if (!number || *number == 0) return ErrorAt(value, Quoted(value.text) + " is no number from 1 on");
    *into = *number;
    return std::nullopt;
  }

  MaybeError TakeOneIn(const Token& value) {
    uint64_t number = 0;
    if (auto error = TakeNumber(value, &number, std::numeric_limits<uint32_t>::max())) return error;
    rule_.one_in = static_cast<uint32_t>(number);
    return std::nullopt;
  }

  MaybeError TakeSeed(const Token& value) {
    if (auto error = WhyTooLarge(value, kMostNumber)) return error;
    rule_.seed = value.text == kDeviceSeed ? InjectionRule::kOfTheDevice : ParseNumber(value.text);
    if (rule_.seed) return std::nullopt;
    return ErrorAt(value, Quoted(value.text) + " is no seed: a number from 0 on, or " + std::string(kDeviceSeed));
  }

  MaybeError TakeRange(const Token& value, NumberRange* into) {
    constexpr std::string_view kDots = "..";
    const size_t dots = value.text.find(kDots);
    if (auto error = WhyTooLarge({value.text.substr(0, dots), value.offset}, kMostNumber)) return error;
    if (dots != std::string_view::npos) {
      const size_t end = dots + kDots.size();
      if (auto error = WhyTooLarge({value.text.substr(end), value.offset + end}, kMostNumber)) return error;
    }
    const auto first = ParseNumber(value.text.substr(0, dots));
    std::optional<uint64_t> last = first;
    if (dots != std::string_view::npos) {
      const std::string_view end = value.text.substr(dots + kDots.size());
      last = end.empty() ? NumberRange::kNoEnd : ParseNumber(end);
    }
    if (!first || *first == 0 || !last) {
      return ErrorAt(value, Quoted(value.text) + " is neither of these: " + std::string(kRangeForms));
    }
    if (*last < *first) return ErrorAt(value, Quoted(value.text) + " ends before it begins");
    *into = {*first, *last};
    return std::nullopt;
  }

  MaybeError TakeDirection(const Token& value) {
    const auto direction = IndexOf(kDirectionNames, value.text);
    if (!direction) {
      // As who wants both would say it.
      const bool is_both = value.text == "both" || value.text == kAnyKind || value.text.find(',') != value.text.npos;
      return ErrorAt(value, is_both ? "a rule that names no direction is about both"
                                    : Unknown(value.text, "direction", kDirectionNames));
    }
    if (const auto why = WhyNotDirection(rule_.action, static_cast<InjectionDirection>(*direction))) {
      return ErrorAt(value, *why);
    }
    rule_.sent = static_cast<InjectionDirection>(*direction) == InjectionDirection::kSent;
    rule_.received = !rule_.sent;
    return std::nullopt;
  }

  MaybeError TakeKinds(const Token& value) {
    if (value.text == kAnyKind) {
      rule_.kinds = kEveryRecord;
      return std::nullopt;
    }
    rule_.kinds = 0;
    Token rest = value;
    while (true) {
      const size_t comma = std::min(rest.text.find(','), rest.text.size());
      const Token name{rest.text.substr(0, comma), rest.offset};
      if (name.text == kAnyKind) return ErrorAt(name, "any is every record, and stands alone");
      const auto kind = IndexOf(KindNames(), name.text);
      if (!kind) return ErrorAt(name, UnknownKind(name.text));
      const KindSet bit = KindBit(static_cast<MessageKind>(*kind));
      if ((rule_.kinds & bit) != 0) return ErrorAt(name, std::string(name.text) + " stands twice in this list");
      rule_.kinds |= bit;
      if (comma == rest.text.size()) return std::nullopt;
      rest = {rest.text.substr(comma + 1), rest.offset + comma + 1};
    }
  }

  static std::string UnknownKind(std::string_view word) {
    const auto kinds = KindNames();
    std::array<std::string_view, kMessageKinds + 1> names;
    *std::copy(kinds.begin(), kinds.end(), names.begin()) = kAnyKind;
    return Unknown(word, "kind of message", names);
  }

  static std::optional<Duration> ParseDelay(std::string_view text) {
    const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const auto number = ParseNumber(text.substr(0, digits));
    const auto unit = std::find_if(kTimeUnits.begin(), kTimeUnits.end(),
                                   [&](const TimeUnit& each) { return each.name == text.substr(digits); });
    if (!number || *number == 0 || unit == kTimeUnits.end()) return std::nullopt;
    if (*number > static_cast<uint64_t>(kLongestRuleTime / unit->length)) return std::nullopt;
    return unit->length * static_cast<int64_t>(*number);
  }

  // In millionths.
  static std::optional<uint32_t> ParseProbability(std::string_view text) {
    size_t decimals = 6;
    if (text.ends_with('%')) {
      text.remove_suffix(1);
      decimals = 4;
    }
    const size_t point = std::min(text.find('.'), text.size());
    std::string digits(text.substr(0, point));
    if (digits.empty()) return std::nullopt;
    std::string_view fraction;
    if (point < text.size()) {
      fraction = text.substr(point + 1);
      if (fraction.empty() || fraction.size() > decimals) return std::nullopt;
    }
    digits += fraction;
    digits.append(decimals - fraction.size(), '0');
    const auto millionths = ParseNumber(digits);
    if (!millionths || *millionths == 0 || *millionths > InjectionRule::kAlways) return std::nullopt;
    return static_cast<uint32_t>(*millionths);
  }

  MaybeError CheckTogether() {
    const std::optional<Token>& seed = seen_[static_cast<size_t>(Condition::kSeed)];
    const std::optional<Token>& probability = seen_[static_cast<size_t>(Condition::kProbability)];
    const std::optional<Token>& one_in = seen_[static_cast<size_t>(Condition::kOneIn)];
    if (probability && one_in) return ErrorAt(*one_in, "one-in and probability say the same; a rule has one of them");
    if (seed && !probability && !rule_.Draws()) {
      return ErrorAt(*seed, "seed is of what is drawn, and without probability or one-in nothing is");
    }
    const bool is_order = rule_.action == InjectionAction::kPlaceLate && !probability && !one_in;
    if (seed && is_order && rule_.seed != InjectionRule::kOfTheDevice) {
      return ErrorAt(*seed,
                     "the order in which Writes are placed is the device's luck; seed is of probability and one-in");
    }
    if (!rule_.Draws()) rule_.seed.reset();  // nor here
    return std::nullopt;
  }

  Token rest_;
  InjectionRule rule_;
  std::array<std::optional<Token>, kConditionNames.size()> seen_;
};

// Where the rule begins and ends that has this byte.
std::pair<size_t, size_t> RuleAround(std::string_view text, size_t offset) {
  constexpr std::string_view kSeparators = ";\n";
  offset = std::min(offset, text.size());
  size_t begin = 0;
  if (offset > 0) {
    if (const size_t before = text.find_last_of(kSeparators, offset - 1); before != std::string_view::npos) {
      begin = before + 1;
    }
  }
  while (begin < offset && (text[begin] == ' ' || text[begin] == '\t')) ++begin;
  return {begin, std::min(text.find_first_of(kSeparators, offset), text.size())};
}

std::string DelayText(Duration delay) {
  for (auto unit = kTimeUnits.rbegin(); unit != kTimeUnits.rend(); ++unit) {
    if (delay % unit->length == Duration::zero()) return std::to_string(delay / unit->length) + std::string(unit->name);
  }
  return std::to_string(delay.count()) + "ns";
}

std::string ProbabilityText(uint32_t millionths) {
  constexpr uint32_t kPerCent = InjectionRule::kAlways / 100;
  std::string text = std::to_string(millionths / kPerCent);
  if (const uint32_t rest = millionths % kPerCent; rest != 0) {
    std::string fraction = std::to_string(kPerCent + rest).substr(1);
    fraction.erase(fraction.find_last_not_of('0') + 1);
    text += "." + fraction;
  }
  return text + "%";
}

std::string RangeText(const NumberRange& range) {
  std::string text = std::to_string(range.first);
  if (range.last == range.first) return text;
  text += "..";
  if (range.last != NumberRange::kNoEnd) text += std::to_string(range.last);
  return text;
}

}  // namespace

const char* ToString(InjectionDirection direction) {
  return kDirectionNames[static_cast<size_t>(direction)].data();
}

std::string InjectionRuleError::Explain(std::string_view text) const {
  const auto [begin, end] = RuleAround(text, offset);
  const size_t marked = std::min(length, end - std::min(offset, end));
  std::string explained = message + "\n  " + Printable(text.substr(begin, end - begin)) + "\n  ";
  explained.append(std::min(offset, end) - begin, ' ');
  explained += '^';
  if (marked > 1) explained.append(marked - 1, '~');
  return explained;
}

std::string MoreThanMostRules() {
  return "more than " + std::to_string(kMostRules) + " rules of one device";
}

Result<std::vector<InjectionRule>, InjectionRuleError> ParseInjectionRules(std::string_view text) {
  std::vector<InjectionRule> rules;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find_first_of(";\n", begin), text.size());
    auto rule = RuleParser(text.substr(begin, end - begin), begin).Parse();
    if (!rule) return Err(std::move(rule.error()));
    if (*rule && rules.size() == kMostRules) {
      begin = text.find_first_not_of(kBlanks, begin);
      return Err(InjectionRuleError{.offset = begin, .length = end - begin, .message = MoreThanMostRules()});
    }
    if (*rule) rules.push_back(**rule);
    begin = end + 1;
  }
  return rules;
}

std::string ToString(const InjectionRule& rule) {
  const InjectionRule any;
  const ActionRow& row = RowOf(rule.action);
  std::string text(row.name);
  if (row.takes_time) text += "=" + DelayText(rule.delay);
  const auto add_range = [&](std::string_view name, const NumberRange& range) {
    if (range != NumberRange()) text += " " + std::string(name) + "=" + RangeText(range);
  };
  const auto add_number = [&](std::string_view name, uint64_t number, uint64_t usual) {
    if (number != usual) text += " " + std::string(name) + "=" + std::to_string(number);
  };
  add_range("connection", rule.connection);
  add_range("message", rule.message);
  add_range("segment", rule.segment);
  add_range("attempt", rule.attempt);
  // Some actions have but one.
  if (rule.sent != rule.received && row.sent && row.received) {
    text +=
        std::string(" direction=") + ToString(rule.sent ? InjectionDirection::kSent : InjectionDirection::kReceived);
  }
  if (rule.kinds == kEveryRecord) {
    text += " kind=" + std::string(kAnyKind);
  } else if (rule.kinds != any.kinds) {
    std::string kinds;
    for (size_t i = 0; i < kMessageKinds; ++i) {
      const auto kind = static_cast<MessageKind>(i);
      if ((rule.kinds & KindBit(kind)) == 0) continue;
      if (!kinds.empty()) kinds += ",";
      kinds += ToString(kind);
    }
    text += " kind=" + kinds;
  }
  add_range("number", rule.number);
  add_number("every", rule.every, any.every);
  add_number("times", rule.times, any.times);
  if (rule.probability != any.probability) text += " probability=" + ProbabilityText(rule.probability);
  add_number("one-in", rule.one_in, any.one_in);
  if (rule.seed) {
    text += " seed=";
    text += *rule.seed == InjectionRule::kOfTheDevice ? std::string(kDeviceSeed) : std::to_string(*rule.seed);
  }
  return text;
}

std::string ToString(const std::vector<InjectionRule>& rules) {
  std::string text;
  for (const InjectionRule& rule : rules) {
    if (!text.empty()) text += "; ";
    text += ToString(rule);
  }
  return text;
}

bool Has(const std::vector<InjectionRule>& rules, InjectionAction action) {
  return std::any_of(rules.begin(), rules.end(), [&](const InjectionRule& rule) { return rule.action == action; });
}

}  // namespace stagecoach::emu
