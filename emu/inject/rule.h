// InjectionRule: one row of the flat table that says which injections are injected where, and its form as text.
//
//   disconnect message=10
//   drop direction=received kind=ack probability=1% seed=7
//   delay=5ms connection=2 message=3..; stall kind=write
//
// An action, then conditions in any order, each at most once; rules are separated by ';' or by a new line. All
// conditions must hold. docs/injections.md tells what each means and does; this is the table that it describes:
//
//   actions     disconnect, stall, drop, delay=TIME (an integer with us, ms or s; at most an hour)
//   addresses   connection=, message=, segment=, attempt= (N, N..M or N..; all count from 1), direction=sent|received,
//               kind=KIND[,KIND...]
//   occurrence  every=N, times=N, probability=P (0.01 or 1%, in steps of 0.0001%) with seed=N
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

namespace stagecoach::emu {

enum class InjectionAction : uint8_t {
  kDisconnect,  // the connection is cut, and both ends know at once
  kStall,       // from here on nothing leaves and nothing is taken, and nobody is told
  kDrop,        // this segment is lost; InfiniBand alone
  kDelay,       // it leaves later, and what follows does not overtake it; of what is sent alone
};

const char* ToString(InjectionAction action);

// As seen from the device that has the rule.
enum class InjectionDirection : uint8_t { kSent, kReceived };
const char* ToString(InjectionDirection direction);

// What a message is, on either transport. An acknowledgement or a Terminate is the protocol's own: a rule is about such
// when it names them, and otherwise not.
enum class MessageKind : uint8_t {
  kSend,  // with whatever it carries besides: invalidation, immediate data
  kWrite,
  kRead,  // the request
  kReadResponse,
  kAtomic,  // the request
  kAtomicResponse,
  kImmediate,  // iWARP: RFC 7306; on InfiniBand it is part of a Write
  kTerminate,  // iWARP
  kAck,        // InfiniBand: ACK, NAK and RNR NAK
};
inline constexpr size_t kMessageKinds = 9;
const char* ToString(MessageKind kind);
constexpr uint16_t KindBit(MessageKind kind) {
  return static_cast<uint16_t>(1u << static_cast<uint8_t>(kind));
}
// What a rule that names no kind is about.
inline constexpr uint16_t kProgramsMessages =
    static_cast<uint16_t>((1u << kMessageKinds) - 1u - (1u << static_cast<uint8_t>(MessageKind::kTerminate)) -
                          (1u << static_cast<uint8_t>(MessageKind::kAck)));

// Both ends included.
struct NumberRange {
  static constexpr uint64_t kNoEnd = std::numeric_limits<uint64_t>::max();
  uint64_t first = 1;
  uint64_t last = kNoEnd;

  bool Contains(uint64_t number) const { return first <= number && number <= last; }
  friend bool operator==(const NumberRange&, const NumberRange&) = default;
};

struct InjectionRule {
  static constexpr uint32_t kAlways = 1'000'000;

  InjectionAction action = InjectionAction::kDisconnect;
  Duration delay{};        // kDelay: how much later
  NumberRange connection;  // connections of the device in the order in which they are made
  // Of the connection and direction, among the messages of the rule's kinds.
  NumberRange message;
  NumberRange segment;  // of the message: a DDP segment, an InfiniBand packet
  NumberRange attempt;  // 1: the segment is sent for the first time, or comes for the first time
  bool sent = true;
  bool received = true;
  uint16_t kinds = kProgramsMessages;
  uint64_t every = 1;                    // of what matches on a connection, each so manieth
  uint64_t times = NumberRange::kNoEnd;  // at most, on all connections together
  uint32_t probability = kAlways;        // in millionths
  uint64_t seed = 0;                     // of what is drawn; forked for each connection

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

// Any number of rules, blank ones left out.
Result<std::vector<InjectionRule>, InjectionRuleError> ParseInjectionRules(std::string_view text);

// As ParseInjectionRules reads it: conditions in the order of InjectionRule's members, and none that is as by default.
std::string ToString(const InjectionRule& rule);
// One after the other, "; " between.
std::string ToString(const std::vector<InjectionRule>& rules);

// Which injections there are depends on what carries them.
enum class InjectionTransport : uint8_t { kIwarp, kInfiniband };
// Why a rule can do nothing on a transport, in words; nothing: it can.
std::optional<std::string> WhyNotOn(InjectionTransport transport, const InjectionRule& rule);

}  // namespace stagecoach::emu
