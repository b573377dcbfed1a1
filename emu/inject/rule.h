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

namespace stagecoach::emu {

// As seen from the device that has the rule.
enum class InjectionDirection : uint8_t { kSent, kReceived };
const char* ToString(InjectionDirection direction);

// What a message is, on either transport. An acknowledgement or a Terminate is the protocol's own, and a datagram is on
// no connection: a rule is about such when it names them, and otherwise not.
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
  kDatagram,   // InfiniBand: a packet of a UD QP
};
inline constexpr size_t kMessageKinds = 10;
const char* ToString(MessageKind kind);
constexpr uint16_t KindBit(MessageKind kind) {
  return static_cast<uint16_t>(1u << static_cast<uint8_t>(kind));
}
// What a rule that names no kind is about.
inline constexpr uint16_t kProgramsMessages =
    static_cast<uint16_t>((1u << kMessageKinds) - 1u - KindBit(MessageKind::kTerminate) - KindBit(MessageKind::kAck) -
                          KindBit(MessageKind::kDatagram));
// "any": every record, also those that are no message, such as Writes of no bytes.
inline constexpr uint16_t kEveryRecord = 0xffff;

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
  uint16_t kinds = kProgramsMessages;
  // Of what the device does: registrations of the device, completions of a QP, RDMA Writes that come on a connection.
  NumberRange number;
  uint64_t every = 1;                    // of what matches at a place, such as a connection, each so manieth
  uint64_t times = NumberRange::kNoEnd;  // at most, at all places together
  uint32_t probability = kAlways;        // in millionths
  uint32_t one_in = 0;                   // one in so many, by luck; 0: nothing is drawn
  uint64_t seed = 0;                     // of what is drawn; forked for each place

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
// Rules, blank ones left out.
Result<std::vector<InjectionRule>, InjectionRuleError> ParseInjectionRules(std::string_view text);

// As ParseInjectionRules reads it: conditions in the order of InjectionRule's members, and none that is as by default.
std::string ToString(const InjectionRule& rule);
// One after the other, "; " between.
std::string ToString(const std::vector<InjectionRule>& rules);

// Whether one of them has this action.
bool Has(const std::vector<InjectionRule>& rules, InjectionAction action);

// What can be done depends on the transport.
enum class InjectionTransport : uint8_t { kIwarp, kInfiniband };
// Why a rule can do nothing on a transport, in words; nothing: it can.
std::optional<std::string> WhyNotOn(InjectionTransport transport, const InjectionRule& rule);

}  // namespace stagecoach::emu
