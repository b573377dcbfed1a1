// InjectionRule: one row of the flat table that says what is done to a device and its connections, and where; and its
// form as text.
//
//   disconnect message=10
//   drop direction=received kind=ack probability=1% seed=7
//   delay=5ms connection=2 message=3..; stall kind=write
//   fail-registration every=3
//
// An action (action.h), then conditions in any order, each at most once; rules are separated by ';' or by a new line.
// All conditions must hold. docs/injections.md tells what each means and does; this is the table that it describes:
//
//   addresses   of records: connection=, message=, segment=, attempt= (N, N..M or N..; all count from 1),
//               direction=sent|received, kind=KIND[,KIND...] or kind=any
//               of what the device does: number= (the same)
//   occurrence  every=N, times=N, probability=P (0.01 or 1%, in steps of 0.0001%) or one-in=N, with seed=N or
//               seed=device
//
// A row is plain data without pointers, whose defaults mean "any". Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "emu/inject/action.h"
#include "emu/inject/message_kind.h"

namespace stagecoach::emu {

// As seen from the device that has the rule.
enum class InjectionDirection : uint8_t { kSent, kReceived };
const char* ToString(InjectionDirection direction);

// Both ends included.
struct NumberRange {
  static constexpr uint64_t kNoEnd = std::numeric_limits<uint64_t>::max();
  uint64_t first = 1;
  uint64_t last = kNoEnd;

  bool Contains(uint64_t number) const { return first <= number && number <= last; }
  friend bool operator==(const NumberRange&, const NumberRange&) = default;
};

// Of an action that has a time.
inline constexpr Duration kLongestRuleTime = std::chrono::hours(1);

struct InjectionRule {
  static constexpr uint32_t kAlways = 1'000'000;
  // For `seed`: what is drawn comes from the luck of the device (DeviceProfile::luck_seed), shared by all such rules at
  // a place.
  static constexpr uint64_t kOfTheDevice = NumberRange::kNoEnd;

  InjectionAction action = InjectionAction::kDisconnect;
  Duration delay{};  // of actions that have a time
  // Of records.
  NumberRange connection;  // connections of the device in the order in which they are made
  // Of the connection and direction, among the messages of the rule's kinds.
  NumberRange message;
  NumberRange segment;  // of the message: a DDP segment, an InfiniBand packet
  NumberRange attempt;  // 1: the segment is sent for the first time, or comes for the first time
  bool sent = true;
  bool received = true;
  KindSet kinds = kProgramsMessages;
  // Of what the device does: registrations of the device, completions of a QP, RDMA Writes that come on a connection.
  NumberRange number;
  uint64_t every = 1;                    // of what matches at a place, such as a connection, each so manieth
  uint64_t times = NumberRange::kNoEnd;  // at most, at all places together
  uint32_t probability = kAlways;        // in millionths
  uint32_t one_in = 0;                   // one in so many, by luck; 0: nothing is drawn
  std::optional<uint64_t> seed;          // of what is drawn; forked for each place. None: 0, or the device's

  // Whether anything is drawn for it.
  bool Draws() const { return probability != kAlways || one_in != 0 || RowOf(action).draws; }

  friend bool operator==(const InjectionRule&, const InjectionRule&) = default;
};

// What cannot be understood, and where.
struct InjectionRuleError {
  size_t offset = 0;  // in the text, in bytes
  size_t length = 0;  // of the part at fault; may be 0
  std::string message;

  // The message, the rule in question, and a mark under the part at fault; for people. Three lines, without a new line
  // at the end. `text` is what was parsed.
  std::string Explain(std::string_view text) const;
};

// At most so many are in one text, or of one device of a scenario: each place that asks keeps something of each rule.
inline constexpr size_t kMostRules = 256;
// What is said where there are more, and where there is to be one and is none.
std::string MoreThanMostRules();
inline constexpr std::string_view kNoRule = "there is no rule in it; one is 'disconnect message=10'";
// Rules, blank ones left out.
Result<std::vector<InjectionRule>, InjectionRuleError> ParseInjectionRules(std::string_view text);

// As ParseInjectionRules reads it: conditions in the order of InjectionRule's members, and none that is as by default.
std::string ToString(const InjectionRule& rule);
// One after the other, "; " between.
std::string ToString(const std::vector<InjectionRule>& rules);

// Whether one of them has this action.
bool Has(const std::vector<InjectionRule>& rules, InjectionAction action);

}  // namespace stagecoach::emu
