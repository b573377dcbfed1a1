// What can be done: the actions of injections, one table that everything else about them comes from.
//
// An action is asked for at one depth. At that of RECORDS it is done to a segment or packet of a connection, or to a
// datagram (emu/tap/injection_tap.h); at that of the DEVICE to something that it does of itself (emu/nic). There is
// none at the depth of bytes: InfiniBand has no stream of them, and MPA's CRC would find each. What is done to hosts
// and links is a scenario's, at the depth of the WORLD (scenarios/proto/scenario.proto).
//
// docs/injections.md has this table for people; a test holds them together. Pure data; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "emu/inject/message_kind.h"

namespace stagecoach::emu {

enum class InjectionDepth : uint8_t { kRecord, kDevice };
const char* ToString(InjectionDepth depth);

enum class InjectionAction : uint8_t {
  kDisconnect,  // the connection is cut, and both ends know at once
  kStall,       // from here on nothing leaves and nothing is taken, and nobody is told
  kDrop,        // this segment is lost
  kDelay,       // it leaves later, and what follows does not overtake it
  kDuplicate,   // it leaves twice
  kOvertake,    // the next one leaves before it
  kNotReady,    // it is answered as if no Receive were posted
  kFailRegistration,
  kDelayCompletion,  // it becomes visible later, and those of its QP behind it not before it
  kPlaceLate,        // the bytes of an RDMA Write are stored later, in any order, last ones first
};
inline constexpr size_t kInjectionActions = 10;
const char* ToString(InjectionAction action);

// Some of them.
using ActionSet = uint16_t;
constexpr ActionSet SetOf(InjectionAction action) {
  return static_cast<ActionSet>(1u << static_cast<uint8_t>(action));
}
template <typename... Actions>
constexpr ActionSet SetOf(InjectionAction first, Actions... others) {
  return static_cast<ActionSet>(SetOf(first) | SetOf(others...));
}
inline constexpr ActionSet kAllActions = (1u << kInjectionActions) - 1;
// What can be done to datagrams, where they are sent.
inline constexpr ActionSet kDatagramActions =
    SetOf(InjectionAction::kDrop, InjectionAction::kDuplicate, InjectionAction::kOvertake);
// What, done to a connection, makes an answer late, or never come.
inline constexpr ActionSet kLosingActions =
    SetOf(InjectionAction::kDisconnect, InjectionAction::kStall, InjectionAction::kDrop, InjectionAction::kDelay);

struct ActionRow {
  std::string_view name;
  InjectionDepth depth = InjectionDepth::kRecord;
  // What it is done to, in words: "registration".
  std::string_view object;
  // Of records: whether it can be done to what is sent, and to what is received.
  bool sent = true;
  bool received = true;
  // Which kinds it can be done to, where the transport has them. A datagram is one for what is sent alone.
  KindSet kinds = kKindsOfConnections;
  // It is done when another record, or datagram, comes behind this one; and if none does, not.
  bool needs_another = false;
  // It has a time: "delay=5ms". With `draws` that is the longest, and how long is drawn each time.
  bool takes_time = false;
  bool draws = false;
  // Why iWARP cannot; empty: it can. InfiniBand can all of them.
  std::string_view why_not_on_iwarp;
  // For people: what does so on real hardware and networks, and what programs see.
  std::string_view cause;
  std::string_view seen;
};
std::span<const ActionRow, kInjectionActions> AllActions();
const ActionRow& RowOf(InjectionAction action);

}  // namespace stagecoach::emu
